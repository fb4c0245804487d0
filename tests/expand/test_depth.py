"""Convolutions of one channel each as loops: results, gradients of images and of filters."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kiln
from kiln.expand import channels
from kiln.fuse import neighbours
from kiln.fuse.neighbours import results_at_once
from kiln.fuse.program import Fusing, fuse
from kiln.fuse.split import GRIDS
from kiln.fuse.steps import Call
from kiln.generate.device import generate
from kiln.launch import program
from kiln.ops.record import recorded
from tests.gpu.driver import pretended

HALF = torch.bfloat16
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(channels, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(neighbours, "THREADED", 1)  # few results as many


def net(many, kernel, stride, padding, bias=False, dtype=HALF):
    torch.manual_seed(0)
    middle = nn.Conv2d(many, many, kernel, stride, padding, groups=many, bias=bias)
    return nn.Sequential(nn.Conv2d(8, many, 1), nn.ReLU(), middle, nn.ReLU6(), nn.Conv2d(many, 8, 1)).to(dtype)


@pytest.fixture
def called(monkeypatch):
    """The groups of the convolutions that are calls of eager's kernels."""
    found = []

    def noted(graph, exact=False, fusing=Fusing(GRIDS)):
        made = fuse(graph, exact, fusing)
        names = {aten.convolution.default: -1, aten.convolution_backward.default: -2}
        nodes = [step.node for step in made.steps if isinstance(step, Call)]
        found.extend(node.args[names[node.op]] for node in nodes if node.op in names)
        return made

    monkeypatch.setattr(program, "fuse", noted)
    return found


def compared(model, x):
    """Results and gradients of a model, native and eager."""
    found = []
    kiln.reset()
    for run in (kiln.compile(model, fullgraph=True), model):
        model.zero_grad()
        x.grad = None
        with pretended(), kiln.config.patch(strict=True):
            out = run(x.requires_grad_())
            out.float().square().sum().backward()
        found.append([v.detach().clone() for v in (out, x.grad, *[p.grad for p in model.parameters()])])
    for got, expected in zip(*found, strict=True):
        assert got.stride() == expected.stride() and (got - expected).float().norm() <= 0.01 * expected.float().norm()


SHAPES = [
    (3, 1, 1, 8, 8), (3, 1, 1, 7, 9), (3, 2, 1, 8, 12), (5, 1, 2, 8, 14), (5, 2, 2, 8, 8), (7, 1, 3, 7, 7), (3, 1, 0, 9, 11),
    (5, 2, 1, 10, 8), ((3, 5), 1, (1, 2), 8, 6), (2, 2, 0, 8, 8), (3, 1, 2, 5, 5),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "stride", "padding", "height", "width"), SHAPES)
def test_results_and_gradients(kernel, stride, padding, height, width, called):
    model = net(16, kernel, stride, padding, bias=height % 2 == 0)
    compared(model, torch.randn(2, 8, height, width).to(HALF))
    # The library sums up the gradients of filters of many places.
    assert called.count(16) == (model[2].weight[0].numel() != 9)


@pytest.mark.parametrize("many", [10, 12])
def test_even_numbers_of_channels(many, called):
    compared(net(many, 3, 1, 1), torch.randn(2, 8, 6, 6).to(HALF))
    assert set(called) == {1}


def test_of_float16(called):
    compared(net(24, 3, 1, 1, dtype=torch.float16), torch.randn(2, 8, 6, 6).half())
    assert set(called) == {1}


@pytest.mark.parametrize(("many", "options", "calls"), [
    (13, {}, {13}), (16, {"dilation": 2}, {16}), (16, {"kernel_size": 9, "padding": 4}, {16}),
    (16, {"stride": 3}, {16}), (16, {"stride": 2, "padding": 1}, {16}),
], ids=str)  # fmt: skip
def test_others_are_calls(many, options, calls, called):
    model, size = net(many, 3, 1, 1), 9
    model[2] = nn.Conv2d(many, many, **{"kernel_size": 3, **options}, groups=many, bias=False).to(HALF)
    compared(model, torch.randn(2, 8, size, size).to(HALF))
    assert set(called) == {1} | calls


def test_what_is_outside_of_the_image_is_not_seen():
    x = torch.zeros(1, 8, 4, 4, dtype=HALF)
    x[:, :, 0, 3], x[:, :, 3, 0] = torch.inf, torch.nan
    filters = torch.ones(8, 1, 3, 3, dtype=HALF)

    def f(x, w):
        return F.conv2d(F.conv2d(F.conv2d(x, w, padding=1, groups=8), w * 0 + 1, padding=1, groups=8), w, padding=1, groups=8)

    kiln.reset()
    with pretended():
        out = kiln.compile(f, fullgraph=True)(x, filters)
    torch.testing.assert_close(out, f(x, filters), equal_nan=True)


def built(f, *inputs):
    """What is started for the convolutions of a graph, with its PTX."""
    made = program.fused(channels.side_by_side(recorded(f, *inputs)), kiln.config.now, Fusing(GRIDS))
    device = generate(made.kernels)
    return made, device.starts, [function.ptx((9, 0)) for function in device.functions]


def images(many, size, batch=2):
    return torch.empty(batch, many, size, size, dtype=HALF).to(memory_format=torch.channels_last)


def backward(kernel, stride, mask):
    def f(grad, x, w):
        around = [kernel // 2] * 2
        given = [stride] * 2, around, [1, 1], False, [0, 0], x.shape[1], mask
        return tuple(one for one in aten.convolution_backward.default(grad, x, w, [0], *given) if one is not None)

    return f


def test_threads_make_neighbours_of_whole_reads(monkeypatch):
    monkeypatch.setattr(channels, "FEWEST", 1)
    x, w = images(64, 56, 16), torch.empty(64, 1, 3, 3, dtype=HALF)
    _, _, (_, text) = built(lambda x, w: F.conv2d(x, w, padding=1, groups=64), x, w)
    # Eight results: three rows of ten places, of which eight are always there, and nine filters.
    assert text.count("st.global.v4.b32") == 8 and text.count("fma.rn.f32") + text.count("mul.rn.f32") == 8 * 9 * 8
    assert text.count("@%p") - text.count("bra") == 30 - 8 and len(re.findall(r"ld.global[.nc]*.v4.b32", text)) == 30 + 9
    assert "ld.local" not in text and not re.search(r"ld.global[.nc]*.b16", text)


def test_of_gradients_with_a_stride_each_product_is_taken_once(monkeypatch):
    monkeypatch.setattr(channels, "FEWEST", 1)
    given = images(32, 28, 16), images(32, 56, 16), torch.empty(32, 1, 3, 3, dtype=HALF)
    _, _, (_, text) = built(backward(3, 2, [True, False, False]), *given)
    # Squares of two by two, two of them: nine products each.
    assert text.count("st.global.v4.b32") == 8 and text.count("fma.rn.f32") + text.count("mul.rn.f32") == 8 * 9 * 2


def test_sums_of_all_places_are_taken_at_once(monkeypatch):
    monkeypatch.setattr(channels, "FEWEST", 1)
    given = images(32, 28, 64), images(32, 28, 64), torch.empty(32, 1, 3, 3, dtype=HALF)
    made, (starts,), (text, _) = built(backward(3, 1, [False, True, False]), *given)
    partial, _ = made.kernels[0].nests
    assert len(partial.folds()) == 9 and len(partial.buffers()[0]) == 2 and len(starts) == 2
    # Four channels and four neighbours at once, each product added by one instruction; nothing is read alone.
    assert text.count("fma.rn.f32") == 4 * 4 * 9 and "ld.local" not in text and "mul.hi.u64" not in text
    assert starts[0].threads == 128 and starts[0].blocks >= 96 and not re.search(r"ld.global[.nc]*.b16", text)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16),
            nn.ReLU6(), nn.Conv2d(16, 8, 1),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


@pytest.fixture
def programs(monkeypatch):
    """What graphs become."""
    found = []

    def noted(graph, exact=False, fusing=Fusing(GRIDS)):
        found.append(fuse(graph, exact, fusing))
        return found[-1]

    monkeypatch.setattr(program, "fuse", noted)
    return found


def nests_in(programs):
    return [nest for made in programs for kernel in made.kernels for nest in kernel.nests]


def convolved(nests):
    """Those that are convolutions, as they are written."""
    return [made for nest in nests if (made := results_at_once(nest)).several]


def test_what_is_seen_is_read_from_memory_and_nothing_wide_is_kept(programs):
    torch.manual_seed(0)
    model, x = Block().to(HALF), torch.randn(4, 8, 16, 16).to(HALF)
    kiln.reset()
    compiled = kiln.compile(model, fullgraph=True)
    with pretended(), kiln.config.patch(strict=True):
        with torch.no_grad():  # nobody else keeps the image
            compiled(x)
        compiled(x).float().square().sum().backward()
    nests = nests_in(programs)
    assert [len(nest.buffers()[0]) for nest in convolved(nests)] == [3, 3, 2]  # the image, the filters, a bias
    # The sums of filters, of a gradient and an image, are cut into parts for more processors.
    assert [len(nest.buffers()[0]) for nest in nests if len(nest.folds()) == 9] == [2, 9]
    wide = [s for nest in nests for s in nest.stores if s.buffer.dtype is torch.float32 and not s.kept]
    assert not wide


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("fewest", "loops"), [(1, 2), (channels.FEWEST, 0)])
def test_a_single_one_is_a_loop_where_it_is_enough(fewest, loops, bias, programs, monkeypatch):
    monkeypatch.setattr(channels, "FEWEST", fewest)
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 64, 5, 1, 2, groups=64, bias=bias).to(HALF)
    compared(nn.Sequential(conv, nn.ReLU()), torch.randn(2, 64, 9, 9).to(HALF).to(memory_format=torch.channels_last))
    assert len(convolved(nests_in(programs))) == loops  # the image's and its gradient's


def test_gradients_that_a_program_asks_for_itself():
    given = images(16, 8), images(16, 8), torch.empty(16, 1, 3, 3, dtype=HALF)

    def f(grad, x, w):
        parts = [backward(3, 1, [True, False, False])(grad, x, w)[0] for _ in range(3)]
        return sum(parts)

    graph = channels.side_by_side(recorded(f, *given))
    assert not any(node.op is aten.convolution_backward.default for node in graph.nodes)
