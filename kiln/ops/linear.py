"""Shape rules of matrix products."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kiln.ops.fake import make
from kiln.ops.layout import INEXACT, INTEGERS, Mismatch, broadcast
from kiln.ops.pointwise import two_devices
from kiln.ops.table import aten, rule


def _product(a: Tensor, b: Tensor, rank: int) -> Any:
    """The product of two matrices, or of two batches of them."""
    left, right, dtype = a.shape, b.shape, a.dtype
    if len(left) != rank or len(right) != rank or left[-1] != right[-2] or dtype is not b.dtype:
        raise Mismatch("the matrices do not fit")
    if left[: rank - 2] != right[: rank - 2]:
        raise Mismatch("the batches do not fit")
    if a.device != b.device:
        raise two_devices(a.device, b.device)
    if dtype not in INEXACT and dtype not in INTEGERS:
        raise Mismatch("no product for this dtype")
    return make((*left[:-1], right[-1]), None, dtype, a.device)


@rule(aten.mm.default)
def _mm(a: Tensor, b: Tensor) -> Any:
    return _product(a, b, 2)


@rule(aten.bmm.default)
def _bmm(a: Tensor, b: Tensor) -> Any:
    return _product(a, b, 3)


@rule(aten.addmm.default)
def _addmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Any:
    return _added(bias, a, _product(a, b, 2))


@rule(aten.baddbmm.default)
def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Any:
    return _added(bias, a, _product(a, b, 3))


def _added(bias: Tensor, a: Tensor, out: Any) -> Any:
    if bias.dtype is not a.dtype or a.dtype not in INEXACT or bias.device != a.device:
        return NotImplemented
    return out if broadcast(out.shape, bias.shape) == out.shape else NotImplemented
