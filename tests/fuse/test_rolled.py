"""Rows of wide filters as a loop: the same sums, and one row of code in the place of all."""

import ctypes
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from kiln.base.graph import Graph, TensorSpec
from kiln.base.options import config
from kiln.fuse import neighbours, rolled
from kiln.fuse.neighbours import results_at_once
from kiln.fuse.nest import Kernel, Load, Nest
from kiln.fuse.program import Fusing
from kiln.fuse.split import GRIDS
from kiln.generate import code
from kiln.generate.device import generate
from kiln.launch.program import fused

aten = torch.ops.aten
GPU = torch.device("cuda:0")


def image(*shape):
    n, c, h, w = shape
    return TensorSpec(shape, (c * h * w, 1, w * c, c), torch.bfloat16, GPU)


def kernels_for(n, c, size, filters, step=(1, 1), around=(2, 2), bias=False, spread=False):
    """A convolution of one channel each and relu, as it is fused for a GPU."""
    graph, (h, w) = Graph(), size
    x = graph.input("x", image(n, c, *size))
    k = graph.input("w", TensorSpec((c, 1, *filters), (1, 1, filters[1] * c, c), torch.bfloat16, GPU))
    b = graph.input("b", TensorSpec((c,), (1,), torch.bfloat16, GPU)) if bias else None
    after = [(m + 2 * p - f) // s + 1 for m, p, f, s in zip(size, around, filters, step, strict=True)]
    if spread:
        after = [(m - 1) * s - 2 * p + f for m, p, f, s in zip(size, around, filters, step, strict=True)]
    args = x, k, b, list(step), list(around), [1, 1], spread, [0, 0], c
    y = graph.call(aten.convolution.default, args, spec=image(n, c, *after))
    graph.outputs = (graph.call(aten.relu.default, (y,), spec=y.spec),)
    return fused(graph, config.now, Fusing(GRIDS)).kernels


def as_fold(nest):
    """A loop of each thread as one that is folded over, which loops for the CPU have."""
    axes = (*nest.axes, replace(nest.rolled, reduced=True))
    return Nest(axes, [replace(s, phase=1, kept=True) for s in nest.stores])


def run(nest, tensors):
    (made,) = code.generate([Kernel("k", ((nest,),))])
    buffers = (ctypes.c_void_p * len(made.buffers))(*[tensors[b.name].data_ptr() for b in made.buffers])
    status, address = ctypes.c_int64(), made.code.wait().address(made.names[0])
    word = ctypes.c_void_p
    entry = ctypes.CFUNCTYPE(None, word, word, word, ctypes.c_int64, ctypes.c_int64)(address)
    entry(ctypes.addressof(buffers), None, ctypes.addressof(status), 0, made.tasks[0])
    assert not status.value


@pytest.mark.parametrize(
    ("size", "filters", "step", "around", "bias", "spread"),
    [
        ((9, 12), (5, 5), (1, 1), (2, 2), False, True),
        ((12, 9), (7, 7), (1, 1), (3, 3), True, True),
        ((9, 12), (5, 5), (1, 1), (2, 2), False, False),
        ((12, 9), (7, 7), (1, 1), (3, 3), True, False),
        ((11, 12), (5, 5), (2, 2), (2, 2), True, False),
        ((12, 12), (5, 5), (1, 1), (0, 0), False, False),
        ((3, 4), (5, 5), (1, 1), (2, 2), False, False),
        ((8, 8), (3, 7), (1, 1), (1, 3), False, False),
        ((8, 8), (5, 5), (1, 1), (4, 4), False, False),
    ],
)
def test_values(size, filters, step, around, bias, spread, monkeypatch):
    monkeypatch.setattr(neighbours, "THREADED", 1)
    n, c = 2, 8
    ((nest,),) = [k.nests for k in kernels_for(n, c, size, filters, step, around, bias, spread)]
    made = results_at_once(nest)
    assert made.rolled is not None and made.rolled.size == filters[0] and len(made.stores) > 1
    torch.manual_seed(0)
    x = torch.randn(n, c, *size, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    w = torch.randn(c, 1, *filters, dtype=torch.bfloat16)
    b = torch.randn(c, dtype=torch.bfloat16) if bias else None
    given = (t.float() if t is not None else None for t in (x, w, b))
    wanted = (F.conv_transpose2d(*given, step, around, 0, c) if spread else F.conv2d(*given, step, around, 1, c)).relu()
    out = torch.full_like(wanted, float("nan"), dtype=torch.bfloat16, memory_format=torch.channels_last)
    by_place = w[:, 0].permute(1, 2, 0).contiguous()
    run(as_fold(made), {"x": x, "w": by_place, "b": b, "relu": out})
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)


def test_a_thread_has_the_code_of_one_row():
    kernels = kernels_for(64, 240, (28, 28), (5, 5))
    made = generate(kernels)
    (start,) = made.starts[0]
    text = made.ptx((9, 0))
    (nest,) = start.nests
    assert [given.name for given in start.given if given is not None] == ["x", "w", "relu"]
    seven = 7 * 5 * 8  # neighbours, products of a row, channels
    assert text.count("fma.rn.f32") == seven and text.count("ld.global") == 7 + 4 + 5
    assert len([term for term in nest.terms() if isinstance(term, Load)]) == 50


@pytest.mark.parametrize("given", [((3, 3), (1, 1), False), ((5, 5), (2, 2), True)])
def test_others_stay_written_out(given):
    """Small filters, and those whose places from row to row do not move by one number."""
    filters, around, spread = given
    ((nest,),) = [k.nests for k in kernels_for(64, 64, (28, 28), filters, (2, 2), around, spread=spread)]
    assert results_at_once(nest).rolled is None


def test_borders_that_one_row_has_alone_keep_rows_apart(monkeypatch):
    ((nest,),) = [k.nests for k in kernels_for(64, 240, (28, 28), (5, 5))]
    scope = nest.axes[0].variable.scope
    assert neighbours.rolled(nest, scope).rolled is not None
    monkeypatch.setattr(rolled, "holds", lambda scope, *border: None)
    assert neighbours.rolled(nest, scope) is nest
