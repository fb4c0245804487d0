"""Activations as part of products: which are found, however they are written, and which are left alone."""

import math

import pytest
import torch
from torch.nn import functional as F

from kiln.expand import epilogues
from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.ops.record import recorded
from tests.graphs import run_graph

aten = torch.ops.aten
HALF = torch.bfloat16
X, W, B = torch.randn(4, 8, 16).to(HALF), torch.randn(32, 16).to(HALF), torch.randn(32).to(HALF)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(epilogues, "DEVICES", frozenset({"cpu"}))


def written_out(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def with_epilogues(f, *inputs):
    return epilogues.with_epilogues(expand(recorded(f, *inputs), "prims", FOR_LOOPS)).check()


def ops(graph):
    return [node.op.name().removeprefix("aten::") for node in graph.nodes]


FOUND = {
    "relu": (F.relu, False),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), True),
    "gelu in steps": (written_out, True),
    "gelu in other steps": (lambda x: x * 0.5 * (torch.tanh(0.7978845608 * (x + x * x * x * 0.044715)) + 1), True),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_activations(name):
    f, gelu = FOUND[name]
    graph = with_epilogues(lambda x, w, b: f(F.linear(x, w, b)), X, W, B)
    assert ops(graph) == ["view", "permute", "_addmm_activation", "view"]
    assert graph.nodes[2].kwargs == {"use_gelu": gelu} and graph.outputs[0].spec.shape == (4, 8, 32)
    flat = with_epilogues(lambda x, w, b: f(torch.addmm(b, x, w.t())) + 1, X[0], W, B)
    assert ops(flat) == ["permute", "_addmm_activation", "add.Tensor"]


LEFT = {
    "another function": lambda x, w, b: F.gelu(F.linear(x, w, b)),
    "other numbers": lambda x, w, b: (lambda y: y * 0.5 * (torch.tanh(0.8 * (y + y * y * y * 0.044715)) + 1))(
        F.linear(x, w, b)
    ),
    "the product is read too": lambda x, w, b: (lambda y: (F.relu(y), y.sum(-1)))(F.linear(x, w, b)),
    "the product is a result": lambda x, w, b: (lambda y: (F.relu(y), y))(F.linear(x, w, b)),
    "no bias": lambda x, w, b: F.relu(F.linear(x, w)),
    "a bias for each row": lambda x, w, b: F.relu(torch.addmm(x[1][:, :1], x[0], w.t())),
    "wider": lambda x, w, b: F.relu(F.linear(x.float(), w.float(), b.float())),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name):
    assert "_addmm_activation" not in ops(with_epilogues(LEFT[name], X, W, B))


def test_two_layers():
    def f(x, w, b, v, c):
        return F.relu(F.linear(F.relu(F.linear(x, w, b)), v, c))

    graph = with_epilogues(f, X, W, B, torch.randn(16, 32).to(HALF), torch.randn(16).to(HALF))
    assert ops(graph).count("_addmm_activation") == 2 and "relu" not in ops(graph)
    out = run_graph(graph, X, W, B, *[torch.randn(*s).to(HALF) for s in ((16, 32), (16,))])[0]
    assert out.shape == (4, 8, 16)


@pytest.mark.parametrize("dims", [1, 2])
def test_loops_add_the_biases_of_convolutions(dims):
    convolve = F.conv1d if dims == 1 else F.conv2d
    x, w, b = torch.randn(2, 4, *[6] * dims), torch.randn(8, 4, *[3] * dims), torch.randn(8)

    def f(x, w, b):
        return convolve(x, w, b).relu() + convolve(x, w, None)

    graph = epilogues.with_biases_apart(expand(recorded(f, x, w, b), "prims", FOR_LOOPS)).check()
    assert [n.args[2] for n in graph.nodes if n.op is aten.convolution.default] == [None, None]
    assert ops(graph).count("add.Tensor") == 2
    torch.testing.assert_close(run_graph(graph, x, w, b)[0], f(x, w, b))
