"""What expansions share: computing in a wide dtype, promotion, reductions of losses."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import wraps
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kiln.ops.layout import FLOATS, INEXACT

Some: TypeAlias = "Tensor | None"
HALF = frozenset({torch.float16, torch.bfloat16})
NONE, MEAN, SUM = 0, 1, 2


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which eager kernels compute with numbers of `dtype`."""
    return torch.float32 if dtype in HALF else dtype


def widened(x: Tensor) -> Tensor:
    """`x`, in float32 where it is of a half type."""
    return x.to(torch.float32) if x.dtype in HALF else x


def rounded(number: float, dtype: torch.dtype) -> float:
    """A number as one of a half type; what that has no room for, and what is no number, stays."""
    if not abs(number) < (65504 if dtype is torch.float16 else 3e38):
        return number
    if dtype is torch.float16:
        return float(struct.unpack("<e", struct.pack("<e", number))[0])
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def floating(x: Tensor) -> torch.dtype:
    """The dtype of a function that is not closed over the integers."""
    return x.dtype if x.dtype in INEXACT else torch.get_default_dtype()


def in_wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run an expansion over the float32 form of half tensors; the result is of the first tensor's dtype.

    Ops of one kernel round once: so must what they are expanded to. Tensors that are not floating stay.
    """

    @wraps(function)
    def rounded_once(*args: Any, **kwargs: Any) -> Any:
        dtypes = {a.dtype for a in args if isinstance(a, Tensor) and a.dtype in FLOATS}
        if dtypes.isdisjoint(HALF):
            return function(*args, **kwargs)
        first = next(a.dtype for a in args if isinstance(a, Tensor) and a.dtype in FLOATS)
        out = function(*[widened(a) if isinstance(a, Tensor) else a for a in args], **kwargs)
        return narrowed(out, first)

    return rounded_once


def of_one_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    """An expansion for tensors of one dtype alone."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        dtypes = {a.dtype for a in args if isinstance(a, Tensor)}
        return function(*args, **kwargs) if len(dtypes) == 1 else NotImplemented

    return checked


def narrowed(value: Any, dtype: torch.dtype) -> Any:
    """The floating tensors in a result in `dtype`; what is no tensor stays."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in FLOATS else value
    return tuple([narrowed(v, dtype) for v in value]) if isinstance(value, tuple) else value


def reduce_loss(loss: Tensor, reduction: int) -> Tensor:
    """A loss an element, summed or averaged as asked."""
    if reduction == MEAN:
        return loss.mean()
    return loss.sum() if reduction == SUM else loss


def share(grad: Tensor, loss: Tensor, reduction: int) -> Tensor:
    """The gradient of each element of a loss that is reduced so."""
    return grad / loss.numel() if reduction == MEAN else grad


def number(value: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number as a tensor without dimensions, beside `like`."""
    return torch.full((), value, dtype=dtype or like.dtype, device=like.device)


def zero(like: Tensor) -> Tensor:
    """A zero to choose in place of elements of `like`."""
    return number(0, like)


def dims_of(dim: Any, rank: int) -> list[int]:
    """The dimensions that an argument of a reduction names, counted from the front; none or [] means all."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))
    return sorted(d % rank if rank else 0 for d in ([dim] if isinstance(dim, int) else dim))


def extent(x: Tensor, dims: list[int]) -> Any:
    """How many elements are reduced to one."""
    return prod([x.shape[d] for d in dims]) if x.dim() else 1
