"""Products over operands whose rows are not aligned: which are padded, and that results are the same."""

import pytest
import torch

from kiln.base.fx import runner
from kiln.expand import padding
from kiln.ops.record import recorded

aten = torch.ops.aten
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(padding, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(padding, "LEAST", 1)


def ops(graph):
    return [node.op.name().removeprefix("aten::") for node in graph.nodes]


def check(f, *inputs):
    graph = padding.padded(recorded(f, *inputs))
    got, expected = runner(graph)(list(inputs)), f(*inputs)
    for mine, theirs in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.1)
    return graph


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(HALF)


def test_a_layer_with_an_odd_number_of_words():
    graph = check(lambda x, w, b: torch.addmm(b, x, w.t()), rand(16, 32), rand(30, 32), rand(30))
    assert ops(graph).count("constant_pad_nd") == 2 and "slice.Tensor" in ops(graph) and "clone" in ops(graph)
    (layer,) = [node for node in graph.nodes if node.op is aten.addmm.default]
    assert layer.spec.shape == (16, 32) and layer.args[2].spec.stride == (1, 32)


def test_its_gradients_pad_what_comes_in_once():
    def backward(grad, x, w):
        return grad @ w, grad.t() @ x

    graph = check(backward, rand(16, 30), rand(16, 32), rand(30, 32))
    assert ops(graph).count("constant_pad_nd") == 2  # the gradient and the weight
    assert [n.spec.shape for n in graph.nodes if n.op is aten.mm.default] == [(16, 32), (32, 32)]


def test_the_next_op_reads_a_part():
    graph = check(lambda x, w: (x @ w).sigmoid() * 2, rand(16, 32), rand(32, 30))
    assert "clone" not in ops(graph)


def test_what_is_aligned_or_of_another_dtype_stays():
    aligned = recorded(lambda x, w: x @ w, rand(16, 32), rand(32, 24))
    single = recorded(lambda x, w: x @ w, rand(16, 32).float(), rand(32, 30).float())
    for graph in (aligned, single):
        assert padding.padded(graph) is graph
