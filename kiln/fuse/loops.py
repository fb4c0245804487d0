"""Primitives that loop nests do better as smaller ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kiln.fuse.lower import HALVES
from kiln.fuse.products import convolution_backward
from kiln.fuse.running import RUNNING
from kiln.fuse.taps import TAPS
from kiln.fuse.windows import avg_pool, max_pool, max_pool_backward
from kiln.ops.expansions.norms import batch_norm, batch_norm_backward, batch_norm_functional
from kiln.ops.expansions.reductions import product
from kiln.ops.table import aten


def _var_mean(
    x: torch.Tensor, dims: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    """Two passes over a row that stays in the cache."""
    if not x.dim() or not x.is_floating_point():
        return NotImplemented
    if x.dtype in HALVES:
        found = _var_mean(x.to(torch.float32), dims, correction=correction, keepdim=keepdim)
        return found if found is NotImplemented else tuple(part.to(x.dtype) for part in found)
    dims = list(range(x.dim())) if not dims else [d % x.dim() for d in dims]
    count: Any = 1
    for d in dims:
        count = count * x.shape[d]
    if type(count) is not int or not count:
        return NotImplemented
    mean = aten.sum.dim_IntList(x, dims, True) / float(count)
    centred = x - mean
    divisor = count - (1 if correction is None else correction)
    spread = aten.sum.dim_IntList(centred * centred, dims, True) / float(max(divisor, 0))
    if count > 1:  # an infinity makes eager's running mean NaN
        lost = torch.isnan(spread)
        if correction != 0 and x.device.type == "cpu":  # unless it comes last; norms ask for 0, and are NaN
            last = x
            for d in dims:
                last = last.narrow(d, x.shape[d] - 1, 1)
            others = aten.sum.dim_IntList(torch.where(x.abs() < math.inf, 0.0, 1.0), dims, True)
            lost = lost & ~(torch.isinf(last) & (others == 1.0))
        mean = torch.where(lost, spread, mean)
    if not keepdim:
        kept = [n for d, n in enumerate(x.shape) if d not in dims]
        spread, mean = spread.reshape(kept), mean.reshape(kept)
    return spread, mean


def _product(x: torch.Tensor, *dims: Any, dtype: Any = None) -> Any:
    """In float64: a lane's part may leave float32's range while another's is 0, and the whole is not NaN."""
    end = dtype or x.dtype
    if end in (torch.float32, torch.float16, torch.bfloat16):
        return torch.prod(x.to(end).double(), *dims).to(end)
    return product(x, *dims, dtype=dtype)


def _counted(index: torch.Tensor, size: Any) -> torch.Tensor:
    """Indices that may not count from the end: negative ones become too large."""
    return torch.where(index < 0, size, index)


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    if not x.dim():
        return NotImplemented
    dim %= x.dim()
    places: list[Any] = [None] * dim + [_counted(index.reshape(-1), x.shape[dim])]
    return aten.index(x, places)


def _embedding(weight: torch.Tensor, index: torch.Tensor, *_: Any) -> Any:
    return aten.index(weight, [_counted(index, weight.shape[0])]) if weight.dim() == 2 else NotImplemented


def _eager(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


# Gradients of normalised batches cancel: the last bits of eager's sums become leading digits of what is left,
# and results near eager's need those bits. The backward adds in float32 by eight lanes of each plane: sums in
# another order, or in float64, give gradients that differ from eager's by more than a thousandth in a U-Net.


def _in_single(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype is torch.float32


def _adds_rows(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any) -> bool:
    """Whether eager adds row by row, with products that are not rounded."""
    return training and _in_single(x) and math.prod(x.shape[2:]) == 1


def _unless(called: Callable[..., bool], expansion: Callable[..., Any]) -> Callable[..., Any]:
    """An expansion, but for arguments with which eager's kernel is called."""
    return lambda *args: NotImplemented if called(*args) else expansion(*args)


#: Expansions in addition to those of the level of primitives.
FOR_LOOPS: dict[Any, Callable[..., Any]] = {
    aten.var_mean.correction: _var_mean,
    aten.prod.default: _product,
    aten.prod.dim_int: _product,
    aten.index_select.default: _index_select,
    aten.embedding.default: _embedding,
    aten.native_batch_norm.default: _unless(_adds_rows, batch_norm),
    aten._native_batch_norm_legit_functional.default: _unless(_adds_rows, batch_norm_functional),
    aten.native_batch_norm_backward.default: _unless(
        lambda grad, x, weight, mean, var, middle, scale, training, *_: training and _in_single(x),
        batch_norm_backward),
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    aten.avg_pool2d.default: avg_pool,
    aten.convolution_backward.default: convolution_backward,
    aten.index_add.default: _eager,  # faster than an index_put that adds, with the same sums
    **RUNNING,
    **TAPS,
    # What `kiln.ops.random` left: those draw eager's numbers.
    aten.bernoulli.p: _eager,
    aten.bernoulli.default: _eager,
}  # fmt: skip
