"""Primitives that loop nests do better as smaller ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kiln.fuse import filters as filters  # lowers convolutions
from kiln.fuse.lower import HALVES
from kiln.fuse.products import convolution_backward
from kiln.fuse.running import RUNNING
from kiln.fuse.taps import TAPS
from kiln.fuse.volumes import convolution
from kiln.fuse.windows import avg_pool, avg_pool_backward, max_pool, max_pool_backward
from kiln.ops.expansions.indexing import index_copy
from kiln.ops.expansions.losses import binary_cross_entropy
from kiln.ops.expansions.norms import (
    batch_norm,
    batch_norm_backward,
    batch_norm_functional,
    group_norm,
    layer_norm,
)
from kiln.ops.expansions.reductions import product
from kiln.ops.expansions.support import in_wide, of_one_dtype
from kiln.ops.pointwise import checked
from kiln.ops.table import aten


def _spread_and_mean(x: torch.Tensor, dims: list[int], count: Any, correction: Any) -> Any:
    mean = aten.sum.dim_IntList(x, dims, True) / count
    centred = x - mean
    spread = aten.sum.dim_IntList(centred * centred, dims, True) / max(count - correction, 0)
    return spread, mean


def _statistics(x: torch.Tensor, dims: list[int], eps: float) -> Any:
    """Those of norms, in the type of what is normalised: two passes over a row that stays in the cache."""
    count = math.prod([x.shape[d] for d in dims])
    spread, mean = _spread_and_mean(x, dims, count, 0)
    if count > 1:  # an infinity makes eager's running mean NaN
        mean = torch.where(torch.isnan(spread), spread, mean)
    return spread, mean, torch.rsqrt(spread + eps)


def _var_mean(
    x: torch.Tensor, dims: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    """In a type that holds squares: on CPUs float64, as eager, but for float16."""
    if not x.dim() or not x.is_floating_point():
        return NotImplemented
    dims = list(range(x.dim())) if not dims else [d % x.dim() for d in dims]
    count = math.prod([x.shape[d] for d in dims])
    if not count:
        return NotImplemented
    here, dtype = x.device.type == "cpu", x.dtype
    exact = here and dtype is not torch.float16
    wide = x.to(torch.float64 if exact else torch.float32 if dtype in HALVES else dtype)
    spread, mean = _spread_and_mean(wide, dims, count, 1 if correction is None else correction)
    if count > 1:  # an infinity makes eager's running mean NaN
        lost = torch.isnan(spread)
        if here:  # unless it comes last
            last = x
            for d in dims:
                last = last.narrow(d, x.shape[d] - 1, 1)
            others = aten.sum.dim_IntList(torch.where(x.abs() < math.inf, 0.0, 1.0), dims, True)
            lost = lost & ~(torch.isinf(last) & (others == 1.0))
        mean = torch.where(lost, spread, mean)
    if not keepdim:
        kept = [n for d, n in enumerate(x.shape) if d not in dims]
        spread, mean = spread.reshape(kept), mean.reshape(kept)
    return spread.to(dtype), mean.to(dtype)


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


def _index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    return index_copy(x, dim, _counted(index, x.shape[dim]), source) if x.dim() else NotImplemented


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
    aten.index_copy.default: _index_copy,
    aten.binary_cross_entropy.default: of_one_dtype(in_wide(partial(binary_cross_entropy, checked=checked))),
    aten.native_layer_norm.default: partial(layer_norm, statistics=_statistics),
    aten.native_group_norm.default: partial(group_norm, statistics=_statistics),
    aten.native_batch_norm.default: _unless(_adds_rows, batch_norm),
    aten._native_batch_norm_legit_functional.default: _unless(_adds_rows, batch_norm_functional),
    aten.native_batch_norm_backward.default: _unless(
        lambda grad, x, weight, mean, var, middle, scale, training, *_: training and _in_single(x),
        batch_norm_backward),
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    aten.avg_pool2d.default: partial(avg_pool, 2),
    aten.avg_pool3d.default: partial(avg_pool, 3),
    aten.avg_pool3d_backward.default: partial(avg_pool_backward, 3),
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.index_add.default: _eager,  # faster than an index_put that adds, with the same sums
    **RUNNING,
    **TAPS,
    # What `kiln.ops.random` left: those draw eager's numbers.
    aten.bernoulli.p: _eager,
    aten.bernoulli.default: _eager,
}  # fmt: skip
