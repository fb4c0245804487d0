"""Shape rules of matrix products."""

from __future__ import annotations

from typing import Any

import torch

from kiln.ops.fake import make
from kiln.ops.layout import INEXACT, INTEGERS, Mismatch, broadcast
from kiln.ops.pointwise import two_devices
from kiln.ops.table import aten, rule


@rule(aten.mm.default)
def _mm(a: torch.Tensor, b: torch.Tensor) -> Any:
    left, right, dtype = a.shape, b.shape, a.dtype
    if len(left) != 2 or len(right) != 2 or left[1] != right[0] or dtype is not b.dtype:
        raise Mismatch("the matrices do not fit")
    if a.device != b.device:
        raise two_devices(a.device, b.device)
    if dtype not in INEXACT and dtype not in INTEGERS:
        raise Mismatch("no product for this dtype")
    return make((left[0], right[1]), None, dtype, a.device)


@rule(aten.addmm.default)
def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    out = _mm(a, b)
    if (
        out is NotImplemented
        or bias.dtype is not a.dtype
        or a.dtype not in INEXACT
        or bias.device != a.device
    ):
        return NotImplemented
    return out if broadcast(out.shape, bias.shape) == out.shape else NotImplemented


@rule(aten.bmm.default)
def _bmm(a: torch.Tensor, b: torch.Tensor) -> Any:
    left, right, dtype = a.shape, b.shape, a.dtype
    if (
        len(left) != 3
        or len(right) != 3
        or left[0] != right[0]
        or left[2] != right[1]
        or dtype is not b.dtype
    ):
        raise Mismatch("the matrices do not fit")
    if a.device != b.device:
        raise two_devices(a.device, b.device)
    if dtype not in INEXACT and dtype not in INTEGERS:
        raise Mismatch("no product for this dtype")
    return make((left[0], left[1], right[2]), None, dtype, a.device)


@rule(aten.baddbmm.default)
def _baddbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    out = _bmm(a, b)
    if (
        out is NotImplemented
        or bias.dtype is not a.dtype
        or a.dtype not in INEXACT
        or bias.device != a.device
    ):
        return NotImplemented
    return out if broadcast(out.shape, bias.shape) == out.shape else NotImplemented
