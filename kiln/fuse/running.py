"""Running sums and their like: loops in order along one dimension, and calls of eager's kernels.

Sums and products are loops, in eager's precision: sums of float32 are taken in float64, those of half types
in float32. So are largest and smallest values with their places. Sums of exponentials, and all of them on
other devices, are calls along the last dimension: along others eager's kernels go through memory in steps, up
to twenty times slower; there a transpose before and one after, which are kernels in tiles and fuse with what
is around them, pay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kiln.ops.layout import INEXACT
from kiln.ops.reductions import running_max, running_min, running_product, running_sum
from kiln.ops.table import aten

#: Elements that are worth two transposes.
MANY = 1 << 12

#: What eager's kernels carry for results of a type.
CARRIED = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}


def along_last(op: Any) -> Callable[..., Any]:
    """An expansion of an op along a dimension: the op along the last one, of what is transposed for it."""

    def expanded(x: torch.Tensor, dim: int, **kwargs: Any) -> Any:
        rank = x.dim()
        if rank < 2 or dim % rank == rank - 1 or not x.is_contiguous() or x.dtype.is_complex:
            return NotImplemented
        if not all(type(n) is int for n in x.shape) or x.numel() < MANY or x.shape[dim] < 2:
            return NotImplemented
        found = op(x.transpose(dim, -1).contiguous(), rank - 1, **kwargs)
        if isinstance(found, tuple):
            return tuple([part.transpose(dim, -1).contiguous() for part in found])
        return found.transpose(dim, -1).contiguous()

    return expanded


def in_order(op: Any, running: Any) -> Callable[..., Any]:
    """An expansion of an op along a dimension: in the type that is carried along, as `running` in float32."""
    elsewhere = along_last(op)

    def expanded(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        if x.device.type != "cpu" or not x.dim():
            return elsewhere(x, dim, dtype=dtype)
        out = dtype or (x.dtype if x.dtype in INEXACT else torch.int64)
        carried = CARRIED.get(out, out)
        if carried == x.dtype and out == x.dtype:
            return NotImplemented
        return (running if carried is torch.float32 else op)(x.to(out).to(carried), dim).to(out)

    return expanded


def with_places(op: Any, running: Any) -> Callable[..., Any]:
    """An expansion of an op that gives the best value so far and its last place, as two running values."""
    elsewhere = along_last(op)

    def expanded(x: torch.Tensor, dim: int) -> Any:
        if x.device.type != "cpu" or not x.dim() or type(x.shape[dim]) is not int or x.shape[dim] >= 1 << 31:
            return elsewhere(x, dim)
        best = running(x, dim)
        taken = x == best
        if x.is_floating_point():
            taken = taken | torch.isnan(x)
        places = torch.arange(x.shape[dim], dtype=torch.int32)
        places = places.view([-1, *[1] * (x.dim() - 1 - dim % x.dim())])
        zero = torch.zeros((), dtype=torch.int32)
        return best, running_max(torch.where(taken, places, zero), dim).to(torch.int64)

    return expanded


RUNNING: dict[Any, Callable[..., Any]] = {
    aten.cumsum.default: in_order(aten.cumsum.default, running_sum),
    aten.cumprod.default: in_order(aten.cumprod.default, running_product),
    aten.cummax.default: with_places(aten.cummax.default, running_max),
    aten.cummin.default: with_places(aten.cummin.default, running_min),
    aten.logcumsumexp.default: along_last(aten.logcumsumexp.default),
}
