"""Expansions of elementwise choices, bounds, truth, rounding, and products and sums of three."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kiln.ops.expansions.arithmetic import of_kind, promoted, settled, together
from kiln.ops.expansions.support import HALF, in_wide, number
from kiln.ops.layout import FLOATS, INEXACT
from kiln.ops.table import aten, expansion


@expansion(aten.masked_fill.Scalar, aten.masked_fill.Tensor, complex_too=True)
def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Any:
    if mask.dtype is not torch.bool:
        return NotImplemented
    if isinstance(value, Tensor):
        return torch.where(mask, value.to(device=x.device, dtype=x.dtype), x)
    return torch.where(mask, number(value, x), x)


# Bounds


@expansion(aten.clamp.default)
def clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    """At level prims: x and the bounds are of one kind."""
    dtype = promoted(x, *[v for v in (low, high) if v is not None])
    bounds = [v for v in (low, high) if v is not None]
    if not bounds or settled((x, *bounds), dtype):
        return NotImplemented
    kinds = [None if v is None else of_kind(v, dtype) for v in (low, high)]
    return torch.clamp(x.to(dtype), *kinds)


@expansion(aten.clamp_min.default)
def clamp_min(x: Tensor, low: Any) -> Tensor:
    return torch.clamp(x, low)


@expansion(aten.clamp_max.default)
def clamp_max(x: Tensor, high: Any) -> Tensor:
    return torch.clamp(x, max=high)


@expansion(aten.clamp_min.Tensor)
def clamp_min_tensor(x: Tensor, low: Tensor) -> Tensor:
    return torch.maximum(x, low)


@expansion(aten.clamp_max.Tensor)
def clamp_max_tensor(x: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(x, high)


@expansion(aten.clamp.Tensor)
def clamp_tensor(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Any:
    if low is None and high is None:
        return NotImplemented
    dtype = promoted(x, *[v for v in (low, high) if v is not None])
    out = x.to(dtype)
    if low is not None:
        out = torch.maximum(out, low.to(dtype))
    return out if high is None else torch.minimum(out, high.to(dtype))


@expansion(aten.fmax.default)
def fmax(a: Tensor, b: Tensor) -> Tensor:
    larger = torch.maximum(a, b)
    if larger.dtype not in FLOATS:
        return larger
    return torch.where(torch.isnan(a), b, torch.where(torch.isnan(b), a, larger))


@expansion(aten.fmin.default)
def fmin(a: Tensor, b: Tensor) -> Tensor:
    smaller = torch.minimum(a, b)
    if smaller.dtype not in FLOATS:
        return smaller
    return torch.where(torch.isnan(a), b, torch.where(torch.isnan(b), a, smaller))


# Truth


def _truth(x: Tensor) -> Tensor:
    return x if x.dtype is torch.bool else x != 0


@expansion(aten.logical_and.default)
def logical_and(a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_and(_truth(a), _truth(b))


@expansion(aten.logical_or.default)
def logical_or(a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_or(_truth(a), _truth(b))


@expansion(aten.logical_xor.default)
def logical_xor(a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_xor(_truth(a), _truth(b))


@expansion(aten.logical_not.default)
def logical_not(x: Tensor) -> Tensor:
    return torch.bitwise_not(x) if x.dtype is torch.bool else x == 0


@expansion(aten.isnan.default)
def isnan(x: Tensor) -> Any:
    """At level prims: only floating numbers are asked."""
    return NotImplemented if x.dtype in INEXACT else torch.full_like(x, False, dtype=torch.bool)


def _never(x: Tensor) -> Tensor:
    return torch.full_like(x, False, dtype=torch.bool)


@expansion(aten.isinf.default)
def isinf(x: Tensor) -> Tensor:
    return torch.abs(x) == math.inf if x.dtype in FLOATS else _never(x)


@expansion(aten.isposinf.default)
def isposinf(x: Tensor) -> Tensor:
    return x == math.inf if x.dtype in FLOATS else _never(x)


@expansion(aten.isneginf.default)
def isneginf(x: Tensor) -> Tensor:
    return x == -math.inf if x.dtype in FLOATS else _never(x)


# Rounding of integers does nothing


def _whole(operation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    def keep(x: Tensor) -> Any:
        return NotImplemented if x.dtype in INEXACT else x.clone()

    return expansion(operation)(keep)


for _operation in (aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default):
    _whole(_operation)


@expansion(aten.frac.default)
@in_wide
def frac(x: Tensor) -> Tensor:
    return x - torch.trunc(x)


@expansion(aten._neg_view.default)
def neg_view(x: Tensor) -> Tensor:
    """The negative itself, not a tensor that says it is one: kernels read memory as it is."""
    return -x


@expansion(aten.sgn.default)
def sgn(x: Tensor) -> Tensor:
    return torch.sign(x)


# Products and sums of three


def of_float(*tensors: Tensor) -> bool:
    return all(t.dtype in FLOATS for t in tensors)


@expansion(aten.addcmul.default)
@together
@in_wide
def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    """At level prims: floating operands of one dtype, no value; eager rounds the sum once too."""
    scaled = a if value == 1 else a * value
    return torch.addcmul(x, scaled, b) if of_float(x, a, b) else x + scaled * b


@expansion(aten.addcdiv.default)
@together
@in_wide
def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Any:
    if not of_float(x, a, b):
        return NotImplemented
    return x + (a if value == 1 else a * value) / b


@expansion(aten.lerp.Scalar)
@in_wide
def lerp(a: Tensor, b: Tensor, weight: Any) -> Any:
    if not of_float(a, b):
        return NotImplemented
    # From the nearer end, so that a weight of 0 or 1 gives an end exactly.
    return a + (b - a) * weight if abs(weight) < 0.5 else b - (b - a) * (1 - weight)


@expansion(aten.lerp.Tensor)
@in_wide
def lerp_tensor(a: Tensor, b: Tensor, weight: Tensor) -> Any:
    if not of_float(a, b, weight):
        return NotImplemented
    way = b - a
    return torch.where(torch.abs(weight) < 0.5, a + way * weight, b - way * (1 - weight))


@expansion(aten.addr.default)
def addr(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if not of_float(x, a, b) or x.dtype in HALF:
        return NotImplemented
    outer = a.unsqueeze(1) * b
    scaled = outer if alpha == 1 else outer * alpha
    # A beta of zero drops x, NaNs too.
    return scaled if beta == 0 else (x if beta == 1 else x * beta) + scaled


@expansion(aten._addmm_activation.default)
def addmm_activation(
    x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> Tensor:
    out = torch.addmm(x, a, b, beta=beta, alpha=alpha)
    return torch.nn.functional.gelu(out, approximate="tanh") if use_gelu else torch.relu(out)
