"""Attention over keys and values whose heads serve several of queries."""

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.expand.heads import grouped
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


def repeated(x, times):
    batch, heads, rows, width = x.shape
    return x[:, :, None].expand(batch, heads, times, rows, width).reshape(batch, heads * times, rows, width)


def attended(q, k, v):
    return FORWARD(q, repeated(k, q.shape[1] // k.shape[1]), repeated(v, q.shape[1] // v.shape[1]))[0]


def heads(graph, op=FORWARD, first=1):
    """The heads of keys and values that the attention of a graph reads."""
    (node,) = [node for node in grouped(graph).nodes if node.op is op.default]
    return [read.spec.shape[1] for read in node.args[first : first + 2]]


def tensors(*sizes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(size, dtype=dtype) for size in sizes]


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_not_repeated(kept, dtype):
    given = tensors((2, 4, 9, 8), (2, kept, 9, 8), (2, kept, 9, 8), dtype=dtype)
    graph = recorded(attended, *given)
    assert heads(graph) == [kept, kept]
    assert torch.equal(compile_graph(graph)(list(given))[0], attended(*given))


def test_gradients_are_sums_over_heads_already():
    def backward(grad, q, k, v, out, sums):
        made = BACKWARD(grad, q, repeated(k, 3), repeated(v, 3), out, sums, 0.0, False)
        return made[0], *[one.view(2, 2, 3, 9, 8).sum([2], True).squeeze(2) for one in made[1:]]

    grad, q, k, v = tensors((2, 6, 9, 8), (2, 6, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    given = [grad, q, k, v, *FORWARD(q, repeated(k, 3), repeated(v, 3))]
    graph = recorded(backward, *given)
    assert heads(graph, BACKWARD, 2) == [2, 2]
    for mine, theirs in zip(compile_graph(graph)(list(given)), backward(*given), strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs)


def test_gradients_that_are_read_head_by_head_are_not_summed():
    def backward(grad, q, k, v, out, sums):
        _, keys, values = BACKWARD(grad, q, repeated(k, 3), repeated(v, 3), out, sums, 0.0, False)
        return keys, values.view(2, 2, 3, 9, 8).sum([2], True)

    grad, q, k, v = tensors((2, 6, 9, 8), (2, 6, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    given = [grad, q, k, v, *FORWARD(q, repeated(k, 3), repeated(v, 3))]
    graph = recorded(backward, *given)
    assert heads(graph, BACKWARD, 2) == [6, 6]
    for mine, theirs in zip(compile_graph(graph)(list(given)), backward(*given), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_is_repeated_otherwise_stays():
    def tiled(q, k, v):
        return FORWARD(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))[0]

    def turned(q, k, v):
        spread = [x.transpose(2, 3)[:, :, None].expand(2, 2, 2, 8, 9).transpose(3, 4) for x in (k, v)]
        return FORWARD(q, *[x.reshape(2, 4, 9, 8) for x in spread])[0]

    def one(q, k, v):
        return FORWARD(q, repeated(k, 2), v.repeat(1, 2, 1, 1))[0]

    given = tensors((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    for function in (tiled, turned, one):
        graph = recorded(function, *given)
        assert heads(graph) == [4, 4]
        torch.testing.assert_close(compile_graph(graph)(list(given))[0], function(*given))


@pytest.mark.parametrize("masked", [False, True])
def test_learning(masked):
    def f(x, w, mask):
        q, k, v = (x @ w).split([64, 32, 32], -1)
        q, k, v = [y.view(2, 12, -1, 16).transpose(1, 2) for y in (q, k, v)]
        given = {"attn_mask": mask} if masked else {"is_causal": True}
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **given)

    x, w, mask = tensors((2, 12, 32), (32, 128), (2, 1, 12, 12))
    w.requires_grad_()
    compiled = kiln.compile(f, fullgraph=True)
    for _ in range(2):
        (mine,) = torch.autograd.grad(compiled(x, w, mask).square().sum(), w)
        (eager,) = torch.autograd.grad(f(x, w, mask).square().sum(), w)
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)
