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


def test_a_model_without_gradients(monkeypatch):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(),
        nn.Conv2d(16, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    ).to(HALF).eval()  # fmt: skip
    graphs, arrange = [], compiler.side_by_side
    monkeypatch.setattr(compiler, "side_by_side", lambda graph: graphs.append(arrange(graph)) or graphs[-1])
    x = torch.randn(4, 3, 16, 16).to(HALF)
    kiln.reset()
    compiled = kiln.compile(model, fullgraph=True)
    with torch.no_grad():
        got, expected = compiled(x), model(x)
    assert (got - expected).norm() <= 0.1 * expected.norm() and got.stride() == expected.stride()
    (graph,) = graphs
    assert all(n.spec.stride[1] == 1 for n in graph.nodes if n.op is torch.ops.aten.convolution.default)
    compiled(x).float().mean().backward()  # with gradients, layouts stay
    assert len(graphs) == 1
    kiln.reset()
