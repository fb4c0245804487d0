"""Convolutions over few channels: as products of patches, and with columns of filters as channels."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kiln
from kiln import compiler
from kiln.base.fx import runner
from kiln.expand import channels
from kiln.ops.record import recorded
from tests.gpu.driver import pretended
from tests.gpu.emitted import device_of

HALF = torch.bfloat16
CONVOLUTION = torch.ops.aten.convolution.default


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(channels, "DEVICES", frozenset({"cpu"}))


def image(height, width, many=3):
    return torch.randn(2, many, height, width).to(HALF)


def model(kernel, stride, padding, bias, many=3):
    torch.manual_seed(0)
    first = nn.Conv2d(many, 16, kernel, stride, padding, bias=bias)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)).to(HALF)


def compared(run, x, wanted):
    """Results and gradients of a model, native and eager."""
    found = []
    kiln.reset()
    for f in (kiln.compile(run, fullgraph=True), run):
        run.zero_grad()
        x.grad = None
        with pretended(), kiln.config.patch(strict=True):
            out = f(x.requires_grad_(wanted))
            out.float().square().sum().backward()
        grads = [x.grad] if wanted else []
        found.append([v.detach().clone() for v in (out, *grads, *[p.grad for p in run.parameters()])])
    for got, expected in zip(*found, strict=True):
        assert got.stride() == expected.stride() and (got - expected).float().norm() <= 0.02 * expected.float().norm()


SHAPES = [(7, 2, 3, 32, 30), (3, 2, 1, 17, 21), (5, 3, 0, 20, 19), ((3, 7), (1, 2), (0, 3), 12, 16), (2, 4, 0, 17, 18), (1, 2, 0, 9, 8)]
PATCHES = [(4, 4, 0, 16, 24), (4, 4, 0, 18, 27), ((2, 8), (2, 8), 0, 8, 16)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding", "height", "width"), [*SHAPES, *PATCHES])
def test_results_and_gradients(kernel, stride, padding, height, width, bias):
    compared(model(kernel, stride, padding, bias), image(height, width), bias)


@pytest.mark.parametrize("many", [1, 4, 7, 8])
def test_other_numbers_of_channels(many):
    compared(model(4, 4, 0, True, many), image(16, 16, many), False)
    compared(model(3, 2, 1, True, many), image(16, 16, many), False)


@pytest.mark.parametrize(("kernel", "stride", "padding", "height", "width"), SHAPES)
def test_columns_are_channels(kernel, stride, padding, height, width):
    layers = model(kernel, stride, padding, True)
    graph = channels.side_by_side(recorded(layers, image(height, width)))
    first, *_ = [n for n in graph.nodes if n.op is CONVOLUTION]
    images, filters = (n.spec for n in first.args[:2])
    assert images.shape[1] == filters.shape[1] and images.shape[1] % 8 == 0 == images.shape[1] * filters.shape[3] % 8
    assert filters.shape[3] == 1 and images.stride[1] == filters.stride[1] == 1


def test_gradients_of_filters_are_taken_of_columns(monkeypatch):
    graphs, arrange = [], compiler.side_by_side
    monkeypatch.setattr(compiler, "side_by_side", lambda *given: graphs.append(arrange(*given)) or graphs[-1])
    for wanted in (False, True):
        compared(model(7, 2, 3, True), image(32, 30), wanted)
        *_, last = [n for n in graphs.pop().nodes if n.op is torch.ops.aten.convolution_backward.default]
        assert last.args[1].spec.shape[1] == (3 if wanted else 24)


@pytest.mark.parametrize(("kernel", "stride", "padding", "height", "width"), PATCHES)
def test_patches_are_a_product(kernel, stride, padding, height, width):
    layer = nn.Conv2d(3, 16, kernel, stride, padding).to(HALF)
    graph = channels.side_by_side(recorded(layer, image(height, width)))
    assert not any(n.op is CONVOLUTION for n in graph.nodes)
    assert sum(n.op is torch.ops.aten.addmm.default for n in graph.nodes) == 1


def test_others_stay():
    for layer, x in (
        (nn.Conv2d(8, 8, 4, 4), image(8, 8, 8)), (nn.Conv2d(4, 4, 4, 4, groups=2), image(8, 8, 4)),
        (nn.Conv2d(3, 8, 4, 4, 1), image(8, 8)), (nn.Conv2d(3, 8, 2, 2, dilation=2), image(8, 8)),
        (nn.Conv2d(3, 8, 1), image(8, 8)), (nn.Conv1d(3, 8, 4, 4), torch.randn(2, 3, 8).to(HALF)),
        (nn.ConvTranspose2d(3, 8, 4, 4), image(8, 8)),
    ):  # fmt: skip
        graph = recorded(layer.to(HALF), x)
        assert channels.side_by_side(graph) is graph
    graph = recorded(nn.Conv2d(3, 8, 4, 4), image(8, 8).float())
    assert channels.side_by_side(graph) is graph


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(7, 2, 3), (3, 2, 1), (4, 4, 0)])
def test_an_infinity_reaches_what_it_reaches(kernel, stride, padding):
    x = image(24, 24)
    x[0, 1, 9, 10], x[1, 2, 3, 23] = torch.inf, torch.nan
    layers = model(kernel, stride, padding, True)
    graph = channels.side_by_side(recorded(layers, x))
    (got,) = runner(graph)([x])
    assert torch.equal(got.isfinite(), layers(x).isfinite())


def test_columns_are_stored_sixteen_bytes_at_once():
    found = device_of(lambda x, *w: F.conv2d(F.conv2d(F.conv2d(x, w[0], None, 2, 3), w[1]), w[2]), torch.randn(64, 3, 64, 64).to(HALF),
                      torch.randn(16, 3, 7, 7).to(HALF), torch.randn(8, 16, 1, 1).to(HALF), torch.randn(8, 8, 1, 1).to(HALF))  # fmt: skip
    first = found.text.partition("ret;")[0]
    assert first.count("st.global.v4.b32") == first.count("st.global") == 1 and first.count("ld.global") == 7
