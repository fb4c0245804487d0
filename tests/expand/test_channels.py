"""Convolutions with channels side by side: layouts between them, results and gradients as before."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kiln
from kiln import compiler
from kiln.base.fx import runner
from kiln.expand import channels
from kiln.ops.record import recorded

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(channels, "DEVICES", frozenset({"cpu"}))


def net(x, a, b, c):
    x = F.relu(F.conv2d(x, a, padding=1))
    x = F.max_pool2d(F.relu(F.conv2d(x, b)), 2)
    return F.conv2d(x, c, padding=1).mean((2, 3))


INPUTS = [torch.randn(n).to(HALF) for n in ((2, 3, 8, 8), (8, 3, 3, 3), (8, 8, 1, 1), (16, 8, 3, 3))]


def test_what_lies_between_convolutions_stays_turned():
    graph = channels.side_by_side(recorded(net, *INPUTS))
    layers = [n for n in graph.nodes if n.op is torch.ops.aten.convolution.default]
    assert all(n.spec.stride[1] == 1 for n in layers) and all(n.args[0].spec.stride[1] == 1 for n in layers)
    # The image and two filters are turned; the filter for single places is not.
    assert sum(n.op is torch.ops.aten.clone.default for n in graph.nodes) == 3
    torch.testing.assert_close(runner(graph)(list(INPUTS))[0], net(*INPUTS), rtol=0.05, atol=0.1)


def test_few_convolutions_of_groups_or_other_dtypes_stay():
    for graph in (
        recorded(lambda x, a: F.conv2d(x, a), *INPUTS[:2]),
        recorded(net, *[x.float() for x in INPUTS]),
    ):
        assert channels.side_by_side(graph) is graph


@pytest.mark.parametrize(("channels_in", "channels_out", "groups", "stay"), [(16, 32, 16, True), (16, 16, 8, True),
                         (24, 24, 1, False), (24, 24, 2, True), (16, 16, 4, False), (16, 32, 4, False)])  # fmt: skip
def test_groups_for_which_the_library_has_no_kernel_stay(channels_in, channels_out, groups, stay):
    def f(x, a, b, c):
        x = F.conv2d(F.conv2d(F.conv2d(x, a), b, padding=1, groups=groups), c)
        return (x.float() ** 2).sum()

    sizes = (2, 8, 6, 6), (channels_in, 8, 1, 1), (channels_out, channels_in // groups, 3, 3), (8, channels_out, 1, 1)
    inputs = [torch.randn(n).to(HALF).requires_grad_() for n in sizes]
    graph = channels.side_by_side(recorded(f, *inputs))
    layers = [n for n in graph.nodes if n.op is torch.ops.aten.convolution.default]
    assert [n.args[0].spec.stride[1] == 1 for n in layers] == [True, not stay, True]
    compiled, grads = kiln.compile(f, fullgraph=True), []
    for g in (f, compiled):
        grads.append(torch.autograd.grad(g(*inputs), inputs))
    torch.testing.assert_close(*grads, rtol=0.05, atol=0.5)


def test_filters_of_one_channel_each_follow():
    def f(x, a, b, c):
        return F.conv2d(F.conv2d(F.conv2d(x, a), b, padding=1, groups=16), c)

    inputs = [torch.randn(n).to(HALF) for n in ((2, 8, 6, 6), (16, 8, 1, 1), (16, 1, 3, 3), (4, 16, 1, 1))]
    graph = channels.side_by_side(recorded(f, *inputs))
    layers = [n for n in graph.nodes if n.op is torch.ops.aten.convolution.default]
    assert all(n.args[0].spec.stride[1] == 1 and n.spec.stride[1] == 1 for n in layers)
    # The image is turned, and the result back; the filters of one channel each lie by place, no others are turned.
    assert sum(n.op is torch.ops.aten.clone.default for n in graph.nodes) == 3
    torch.testing.assert_close(runner(graph)(list(inputs))[0], f(*inputs), rtol=0.05, atol=0.1)


def test_groups_of_channels_follow():
    def f(x, a, b, c):
        return F.conv2d(F.conv2d(F.conv2d(x, a), b, padding=1, groups=4), c)

    inputs = [torch.randn(n).to(HALF) for n in ((2, 8, 6, 6), (16, 8, 1, 1), (16, 4, 3, 3), (4, 16, 1, 1))]
    graph = channels.side_by_side(recorded(f, *inputs))
    layers = [n for n in graph.nodes if n.op is torch.ops.aten.convolution.default]
    assert len(layers) == 3 and all(n.spec.stride[1] == 1 for n in layers)
    torch.testing.assert_close(runner(graph)(list(inputs))[0], f(*inputs), rtol=0.05, atol=0.1)


def test_channels_that_are_mixed_stay_side_by_side():
    def shuffled(x, groups=2):
        n, c, h, w = x.shape
        return x.view(n, groups, c // groups, h, w).transpose(1, 2).contiguous().view(n, c, h, w)

    def f(x, a, b, c):
        return F.conv2d(shuffled(F.conv2d(shuffled(F.conv2d(x, a)), b)), c)

    inputs = [torch.randn(n).to(HALF) for n in ((2, 8, 6, 7), (16, 8, 1, 1), (16, 16, 1, 1), (4, 16, 1, 1))]
    graph = channels.side_by_side(recorded(f, *inputs))
    mixed = [n for n in graph.nodes if n.op is torch.ops.aten.clone.default and len(n.spec.shape) == 5]
    assert [n.spec.shape for n in mixed] == [(2, 6, 7, 8, 2)] * 2
    # Besides them the image is turned, and the result back.
    assert sum(n.op is torch.ops.aten.clone.default for n in graph.nodes) == 4
    torch.testing.assert_close(runner(graph)(list(inputs))[0], f(*inputs), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("training", [False, True])
def test_models(training, monkeypatch):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(),
        nn.Conv2d(16, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    ).to(HALF).train(training)  # fmt: skip
    graphs, arrange = [], compiler.side_by_side
    monkeypatch.setattr(compiler, "side_by_side", lambda *given: graphs.append(arrange(*given)) or graphs[-1])
    x = torch.randn(4, 3, 16, 16).to(HALF)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    kiln.reset()
    found = []
    for run in (kiln.compile(model, fullgraph=True), model):
        model.load_state_dict(state)
        model.zero_grad()
        with torch.set_grad_enabled(training):
            out = run(x)
        if training:
            out.float().square().sum().backward()
        found.append([out, *[p.grad for p in model.parameters() if p.grad is not None], *model.buffers()])
        found[-1] = [value.detach().clone() for value in found[-1]]
    for got, expected in zip(*found, strict=True):
        assert (got - expected).float().norm() <= 0.1 * expected.float().norm() and got.stride() == expected.stride()
    (graph,) = graphs
    layers = [n for n in graph.nodes if n.op in channels.OPERANDS]
    assert len(layers) == (6 if training else 3)
    for layer in layers:
        assert all(operand.spec.stride[1] == 1 for operand in layer.args[: channels.OPERANDS[layer.op]])
    # Turned are the image, two filters and their gradients, and the gradients of a mean and of a pooling, whose
    # loops write so; between layers nothing is.
    images = [n for n in graph.nodes if n.op is torch.ops.aten.clone.default]
    assert len(images) == (7 if training else 3)
    kiln.reset()


ACTIVATIONS = [
    F.hardswish, F.relu6, F.hardsigmoid, F.elu, F.leaky_relu, F.softplus, F.mish, F.softshrink, F.hardshrink,
    lambda x: F.interpolate(x, scale_factor=2), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    lambda x: F.prelu(x, torch.full((16,), 0.3, dtype=x.dtype)),
]  # fmt: skip


@pytest.mark.parametrize("f", ACTIVATIONS)
def test_activations_and_their_gradients_follow(f, monkeypatch):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 4, 1)).to(HALF)

    def step(run):
        model.zero_grad()
        out = run(x)
        out.float().square().sum().backward()
        return [out.detach(), *[p.grad for p in model.parameters()]]

    def whole(x):
        return model[2](f(model[1](f(model[0](x)))))

    graphs, arrange = [], compiler.side_by_side
    monkeypatch.setattr(compiler, "side_by_side", lambda *given: graphs.append(arrange(*given)) or graphs[-1])
    x = torch.randn(2, 8, 6, 6).to(HALF)
    kiln.reset()
    mine, eager = step(kiln.compile(whole, fullgraph=True)), step(whole)
    for a, b in zip(mine, eager, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(b.abs().max()))
    # The image is turned, the result and its gradient are turned back, and filters lie by place.
    assert sum(n.op is torch.ops.aten.clone.default for n in graphs[0].nodes) <= 4
