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


def test_training(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(),
        nn.Conv2d(16, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    ).to(HALF)  # fmt: skip
    x = torch.randn(4, 3, 16, 16).to(HALF)

    def step(f):
        model.zero_grad()
        loss = f(x).float().square().mean()
        loss.backward()
        return [loss.detach(), *[p.grad.clone() for p in model.parameters()]]

    kiln.reset()
    expected = step(model)
    graphs = []
    arrange = compiler.side_by_side
    monkeypatch.setattr(compiler, "side_by_side", lambda graph: graphs.append(arrange(graph)) or graphs[-1])
    got = step(kiln.compile(model, fullgraph=True))
    (graph,) = graphs
    gradients = [n for n in graph.nodes if n.op is torch.ops.aten.convolution_backward.default]
    assert len(gradients) == 3 and all(n.args[1].spec.stride[1] == 1 for n in gradients)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.stride() == theirs.stride()
        assert (mine - theirs).norm() <= 0.1 * theirs.norm() + 1e-3
    kiln.reset()
