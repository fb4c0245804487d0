"""Attention as loops: one kernel, whose scores a task has for itself; with eager's values, layouts and gradients."""

import math
from unittest import mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

import kiln
from kiln.expand.expand import expand
from kiln.fuse.attention import ATTENTION
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.program import fuse
from kiln.fuse.turns import InTurns
from kiln.generate import cpu
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded
from tests.fuse.test_kernels import calls_of

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore")


def given(count, heads, rows, length, width, shared=None, order="rows"):
    """Queries, keys and values, of which the heads of a row, or the rows of a head, lie together."""
    made = []
    for n, many in ((rows, heads), (length, shared or heads), (length, shared or heads)):
        shape = (count, n, many, width) if order == "rows" else (count, many, n, width)
        x = torch.randn(shape)
        made.append(x.transpose(1, 2) if order == "rows" else x)
    return made


def program(function, *inputs):
    return fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS | ATTENTION))


def compiled(function, *inputs):
    """What a graph of the function gives on a processor on which eager's kernel is slow."""
    with mock.patch.object(cpu.Host, "is_called_slowly", True):
        (made,) = compile_graph(recorded(function, *inputs))(list(inputs))
    return made


def check(function, *inputs, kernels=1):
    """The function is so many kernels and no call, and as near to the exact values as eager."""
    made = program(function, *inputs)
    assert len(made.kernels) == kernels and not calls_of(made)
    eager, exact = function(*inputs), function(*[x.double() if x.is_floating_point() else x for x in inputs])
    mine = compiled(function, *inputs)
    assert mine.stride() == eager.stride()
    error, own = ((x.double() - exact).abs().max().item() for x in (mine, eager))
    assert error <= 2 * own + 1e-6 * exact.abs().max().item()
    return made.kernels


SIZES = [(1, 12, 197, 197, 64), (2, 12, 128, 128, 64), (3, 8, 33, 65, 16), (2, 6, 90, 100, 80), (16, 8, 32, 48, 48)]


@pytest.mark.parametrize("order", ["rows", "heads"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_one_kernel(size, order):
    (kernel,) = check(attention, *given(*size, order=order))
    assert isinstance(kernel, InTurns) and math.prod(kernel.planes) >= 8
    assert len(kernel.held) == 3  # keys in panels, scores, what softmax makes of them


@pytest.mark.parametrize("size", SIZES[1:4], ids=str)
def test_masks(size):
    q, k, v = given(*size)
    check(lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.3), q, k, v)
    check(lambda q, k, v: attention(q, k, v, scale=0.0), q, k, v)
    mask = torch.randn(size[0], 1, size[2], size[3])
    mask[mask > 1] = -math.inf
    mask[0, 0, 3] = -math.inf  # a row that sees nothing is zero
    check(lambda q, k, v, m: attention(q, k, v, attn_mask=m), q, k, v, mask)
    check(lambda q, k, v, m: attention(q, k, v, attn_mask=m), q, k, v, mask[0, 0])


def test_heads_that_share_keys():
    q, k, v = given(2, 8, 64, 64, 32, shared=4)

    def shared(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]

    made = program(shared, q, k, v)
    assert len(made.kernels) == 1
    expected = attention(*[x.double() for x in (q, *(x.repeat_interleave(2, 1) for x in (k, v)))], is_causal=True)
    assert (compiled(shared, q, k, v) - expected).abs().max() < 2e-6


def test_infinities_and_nan():
    for what in (math.inf, -math.inf, math.nan):
        q, k, v = given(2, 8, 20, 40, 32)
        for x in (q, k, v):
            x[0, 0, 3, 5] = what
        mine = compiled(attention, q, k, v)
        expected = attention(q, k, v)
        assert torch.equal(mine.isnan(), expected.isnan())
        assert torch.allclose(mine, expected, 1e-5, 1e-5, equal_nan=True)


@pytest.mark.parametrize("size, why", [
    ((1, 4, 64, 64, 64), "few planes"), ((1, 8, 300, 300, 64), "many scores"), ((2, 8, 8, 64, 64), "few rows"),
    ((2, 8, 64, 64, 24), "an odd width"),
])  # fmt: skip
def test_what_stays_a_call(size, why):
    made = program(attention, *given(*size))
    assert calls_of(made), why


def test_other_types_stay_calls():
    made = program(attention, *[x.bfloat16() for x in given(2, 8, 64, 64, 64)])
    assert calls_of(made)


@pytest.mark.parametrize("slowly", [True, False])
def test_gradients_go_with_it(slowly):
    """What the kernel of gradients is given, sums' logarithms among it, is what eager's would have made."""
    q, k, v = (x.requires_grad_() for x in given(2, 8, 40, 40, 32))
    with mock.patch.object(cpu.Host, "is_called_slowly", slowly):
        kiln.reset()
        out = kiln.compile(lambda q, k, v: attention(q, k, v, is_causal=True), fullgraph=True)(q, k, v)
        expected = attention(q, k, v, is_causal=True)
        assert out.stride() == expected.stride() and torch.allclose(out, expected, 1e-5, 1e-5)
        weights = torch.randn_like(expected)
        for mine, theirs in zip(*(torch.autograd.grad(x, (q, k, v), weights) for x in (out, expected)), strict=True):
            assert torch.allclose(mine, theirs, 1e-4, 1e-5) and mine.stride() == theirs.stride()
    kiln.reset()


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"mask": True, "scale": 0.2}], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients_are_one_kernel(size, how):
    q, k, v = given(*size)
    more = {"scale": how["scale"]} if "scale" in how else {}
    if "mask" in how:
        more["attn_mask"] = torch.randn(size[0], 1, size[2], size[3])
    causal = "is_causal" in how
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, **more)
    grad = torch.randn_like(out)

    def backward(*given):
        cast = {name: x.to(given[0].dtype) if name == "attn_mask" else x for name, x in more.items()}
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, **cast)

    inputs = grad, q, k, v, out, sums
    made = program(backward, *inputs)
    assert len(made.kernels) <= (2 if size[0] < 16 else 4) and not calls_of(made)
    doubles = [x.double() for x in (q, k, v)]
    cast = {name: x.double() if name == "attn_mask" else x for name, x in more.items()}
    exactly = aten._scaled_dot_product_flash_attention_for_cpu(*doubles, 0.0, causal, **cast)
    exact = backward(grad.double(), *doubles, *exactly)
    with mock.patch.object(cpu.Host, "is_called_slowly", True):
        found = compile_graph(recorded(backward, *inputs))(list(inputs))
    for mine, eager, right in zip(found, backward(*inputs), exact, strict=True):
        assert mine.stride() == eager.stride() and mine.shape == eager.shape
        error, own = ((x.double() - right).abs().max().item() for x in (mine, eager))
        assert error <= 2 * own + 4e-6 * right.abs().max().item()


def test_rows_that_see_nothing_have_no_gradients():
    q, k, v = (x.requires_grad_() for x in given(2, 8, 40, 40, 32))
    mask = torch.zeros(2, 1, 40, 40)
    mask[0, 0, 3] = -math.inf
    with mock.patch.object(cpu.Host, "is_called_slowly", True):
        kiln.reset()
        out = kiln.compile(lambda q, k, v: attention(q, k, v, attn_mask=mask), fullgraph=True)(q, k, v)
        found = torch.autograd.grad(out.square().sum(), (q, k, v))
    expected = torch.autograd.grad(attention(q, k, v, attn_mask=mask).square().sum(), (q, k, v))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, 1e-4, 1e-5, equal_nan=True)
    kiln.reset()


def test_numbers_of_eager_are_its_kernels():
    q, k, v = given(2, 8, 40, 40, 32)
    exactly = kiln.compile(attention, options={"numerics": "eager"})
    with torch.no_grad():
        assert exactly(q, k, v).equal(attention(q, k, v))
