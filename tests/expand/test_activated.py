"""Convolutions with a norm, an addition and relu as one call, where calls are recorded."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kiln
from kiln import compiler
from kiln.base.fx import runner
from kiln.expand import activated, channels
from kiln.ops.record import recorded
from tests.gpu.driver import pretended

HALF = torch.bfloat16
aten = torch.ops.aten


def relu_of(x, w, bias, stride, padding, dilation, groups):
    out = F.conv2d(x.float(), w.float(), bias.float() if bias is not None else None, stride, padding, dilation, groups)
    return F.relu(out).to(HALF).contiguous(memory_format=torch.channels_last)


def relu_of_sum(x, w, z, factor, bias, *how):
    stride, padding, dilation, groups = how
    out = F.conv2d(x.float(), w.float(), bias.float(), stride, padding, dilation, groups)
    return F.relu(out + factor * z.float()).to(HALF).contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(channels, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(activated, "can_fuse", lambda device: True)


class Block(nn.Module):
    def __init__(self, bias=False, kernel=3, stride=1, channels=16):
        super().__init__()
        self.first = nn.Conv2d(channels, 16, kernel, stride, kernel // 2, bias=bias)
        self.second, self.third = nn.Conv2d(16, 24, 3, padding=1, bias=bias), nn.Conv2d(24, 16, 1, bias=bias)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (16, 24, 16))

    def forward(self, x):
        a = F.relu(self.norms[0](self.first(x)))
        b = F.relu(self.norms[1](self.second(a)))
        return F.relu(self.norms[2](self.third(b)) + a)


def made(**options):
    torch.manual_seed(0)
    model = Block(**options)
    for norm in model.norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.2, 2.0)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return model.to(HALF).eval()


def arranged(f, x):
    """The graph of a function, as it comes from where gradients are taken."""
    with torch.no_grad():
        graph = recorded(f, x)
    graph.drop_unused()
    return channels.side_by_side(graph, True)


def fused(graph):
    """The graph with what the library does done by torch's ops; how many calls there are of each kind."""
    ops = {activated.RELU: relu_of, activated.ADD_RELU: relu_of_sum}
    calls = [node for node in graph.nodes if node.op in ops]
    counts = [sum(node.op is op for node in calls) for op in ops]
    for node in calls:
        assert all(read.spec.stride[1] == 1 for read in node.args[: 3 if node.op is activated.ADD_RELU else 2])
        node.op = ops[node.op]
    return counts, sum(node.op is aten.convolution.default for node in graph.nodes)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"kernel": 7, "stride": 2, "channels": 3}], ids=str)
def test_values(options):
    model, x = made(**options), torch.randn(2, options.get("channels", 16), 20, 18).to(HALF)
    with torch.no_grad():
        graph = arranged(model, x)
        assert fused(graph) == ([2, 1], 0)
        assert not any("norm" in node.name for node in graph.nodes)
        (got,), expected, exact = runner(graph)([x]), model(x), model.float()(x.float())
    assert (got - exact).norm() <= 1.5 * (expected - exact).norm()


def test_what_is_seen_or_read_twice_stays():
    model, x = made(), torch.randn(2, 16, 8, 8).to(HALF)
    norm, conv, other = model.norms[0], model.first, nn.Conv2d(16, 16, 1).to(HALF)

    def seen(f):
        return fused(arranged(lambda x: f(other(conv(conv(conv(x))))), x))

    assert seen(lambda y: F.relu(norm(y))) == ([1, 0], 3)
    assert seen(F.relu) == ([1, 0], 3)
    assert seen(lambda y: (F.relu(norm(y)), y)) == ([0, 0], 4)
    assert seen(lambda y: F.relu(z := norm(y)) + z) == ([0, 0], 4)
    assert seen(lambda y: F.relu(norm(y) + 1)) == ([0, 0], 4)
    assert seen(lambda y: F.relu(norm(y) + y.mean((2, 3), keepdim=True))) == ([0, 0], 4)
    assert seen(lambda y: F.relu(torch.add(norm(y), x, alpha=2))) == ([0, 0], 4)
    assert seen(lambda y: F.relu((z := norm(y)) + z)) == ([0, 0], 4)
    assert seen(lambda y: F.relu(F.batch_norm(y, None, None, norm.weight, norm.bias, True))) == ([0, 0], 4)
    assert seen(lambda y: F.relu(F.batch_norm(y, norm.running_mean, norm.running_var))) == ([0, 0], 4)


@pytest.mark.parametrize("mode", ["default", "large", "reduce-overhead"])
@pytest.mark.parametrize("gradients", [False, True])
def test_where_calls_are_recorded_or_results_are_large(mode, gradients, monkeypatch):
    if mode == "large":
        monkeypatch.setattr(activated, "LARGE", 2 * 18 * 64 * 2)  # two images of 16, 24 and 16 channels
    graphs, arrange = [], compiler.side_by_side

    def noted(*given):
        graph = arrange(*given)
        graphs.append(fused(graph))
        return graph

    monkeypatch.setattr(compiler, "side_by_side", noted)
    model, x = made(), torch.randn(2, 16, 8, 8).to(HALF)
    kiln.reset()
    with torch.set_grad_enabled(gradients), pretended():
        out = kiln.compile(model, mode=mode.replace("large", "default"), fullgraph=True)(x)
    assert graphs == [([2, 1], 0) if mode != "default" and not gradients else ([0, 0], 3)]
    torch.testing.assert_close(out, model(x), rtol=0.05, atol=0.05, check_stride=True)
    kiln.reset()


def test_without_the_library_nothing_is_asked_of_it(monkeypatch):
    monkeypatch.undo()
    assert not activated.can_fuse(torch.device("cpu"))
