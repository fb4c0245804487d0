"""Shape rules of matrix products."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kiln.ops.fake import make
from kiln.ops.layout import INEXACT, INTEGERS, Mismatch, broadcast
from kiln.ops.pointwise import two_devices
from kiln.ops.table import RULES, declare


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


def _added(bias: Tensor, a: Tensor, out: Any) -> Any:
    if bias.dtype is not a.dtype or a.dtype not in INEXACT or bias.device != a.device:
        return NotImplemented
    return out if broadcast(out.shape, bias.shape) == out.shape else NotImplemented


declare(RULES, {
    "mm": lambda a, b: _product(a, b, 2),
    "bmm": lambda a, b: _product(a, b, 3),
    "addmm": lambda bias, a, b, **_: _added(bias, a, _product(a, b, 2)),
    "baddbmm": lambda bias, a, b, **_: _added(bias, a, _product(a, b, 3)),
})  # fmt: skip
