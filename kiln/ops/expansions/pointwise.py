"""Expansions of elementwise choices, bounds, truth, rounding, sums of three products, special functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kiln.ops.expansions.arithmetic import of_kind, promoted, settled, to_float, together
from kiln.ops.expansions.support import HALF, floating, in_wide, number, wide, zero
from kiln.ops.layout import FLOATS, INEXACT
from kiln.ops.table import Rule, aten, expansion, expansions


@expansion(aten.masked_fill.Scalar, aten.masked_fill.Tensor, complex_too=True)
def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Any:
    if mask.dtype is not torch.bool:
        return NotImplemented
    if isinstance(value, Tensor):
        return torch.where(mask, value.to(device=x.device, dtype=x.dtype), x)
    return torch.where(mask, number(value, x), x)


@expansion(aten.clamp.default)
def clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    """At level prims: x and the bounds are of one kind."""
    dtype = promoted(x, *[v for v in (low, high) if v is not None])
    bounds = [v for v in (low, high) if v is not None]
    if not bounds or settled((x, *bounds), dtype):
        return NotImplemented
    kinds = [None if v is None else of_kind(v, dtype) for v in (low, high)]
    return torch.clamp(x.to(dtype), *kinds)


@expansion(aten.clamp.Tensor)
def clamp_tensor(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Any:
    if low is None and high is None:
        return NotImplemented
    dtype = promoted(x, *[v for v in (low, high) if v is not None])
    out = x.to(dtype)
    if low is not None:
        out = torch.maximum(out, low.to(dtype))
    return out if high is None else torch.minimum(out, high.to(dtype))


def _number_wins(a: Tensor, b: Tensor, chosen: Tensor) -> Tensor:
    """The chosen one of two, or the one that is no NaN."""
    if chosen.dtype not in FLOATS:
        return chosen
    return torch.where(torch.isnan(a), b, torch.where(torch.isnan(b), a, chosen))


def _truth(x: Tensor) -> Tensor:
    return x if x.dtype is torch.bool else x != 0


def _never(x: Tensor) -> Tensor:
    return torch.full_like(x, False, dtype=torch.bool)


ONE_LINERS: dict[str, Rule] = {
    "clamp_min": lambda x, low: torch.clamp(x, low),
    "clamp_max": lambda x, high: torch.clamp(x, max=high),
    "clamp_min.Tensor": lambda x, low: torch.maximum(x, low),
    "clamp_max.Tensor": lambda x, high: torch.minimum(x, high),
    # Of two zeros eager takes the first, and the second for maximum and minimum.
    "fmax": lambda a, b: _number_wins(a, b, torch.maximum(b, a)),
    "fmin": lambda a, b: _number_wins(a, b, torch.minimum(b, a)),
    "logical_and": lambda a, b: torch.bitwise_and(_truth(a), _truth(b)),
    "logical_or": lambda a, b: torch.bitwise_or(_truth(a), _truth(b)),
    "logical_xor": lambda a, b: torch.bitwise_xor(_truth(a), _truth(b)),
    "logical_not": lambda x: torch.bitwise_not(x) if x.dtype is torch.bool else x == 0,
    # At level prims only floating numbers are asked, and rounded.
    "isnan": lambda x: NotImplemented if x.dtype in INEXACT else _never(x),
    "floor ceil round trunc": lambda x: NotImplemented if x.dtype in INEXACT else x.clone(),
    "isinf": lambda x: torch.abs(x) == math.inf if x.dtype in FLOATS else _never(x),
    "isposinf": lambda x: x == math.inf if x.dtype in FLOATS else _never(x),
    "isneginf": lambda x: x == -math.inf if x.dtype in FLOATS else _never(x),
    "frac": in_wide(lambda x: x - torch.trunc(x)),
    # The negative itself, not a tensor that says it is one: kernels read memory as it is.
    "_neg_view": lambda x: -x,
    "sgn": lambda x: torch.sign(x),
}
expansions(ONE_LINERS)


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


# Special functions


def _times_log(x: Tensor, y: Tensor, logarithm: Callable[[Tensor], Tensor]) -> Any:
    """x * log(y), which is 0 where x is; NaN where y is."""
    dtype = to_float(promoted(x, y))
    if dtype not in FLOATS:
        return NotImplemented
    x, y = x.to(dtype).to(wide(dtype)), y.to(dtype).to(wide(dtype))
    out = torch.where(x == 0, zero(x), x * logarithm(y))
    return torch.where(torch.isnan(y), number(math.nan, y), out).to(dtype)


def _log_of_sum(a: Tensor, b: Tensor, beyond: Callable[[Tensor], Tensor]) -> Any:
    """The logarithm of a sum of powers: the larger exponent, and what the gap to the other adds to it."""
    if not of_float(a, b):
        return NotImplemented
    same = (a == b) & (torch.abs(a) == math.inf)
    return torch.where(same, a, torch.maximum(a, b) + beyond(torch.abs(a - b)))


@expansion(aten.sinc.default)
def sinc(x: Tensor) -> Tensor:
    dtype = floating(x)
    turned = x.to(wide(dtype)) * math.pi
    return torch.where(turned == 0, number(1, turned), torch.sin(turned) / turned).to(dtype)


@expansion(aten.special_entr.default)
@in_wide
def entr(x: Tensor) -> Any:
    if x.dtype not in FLOATS:
        return NotImplemented
    inside = torch.where(x == 0, zero(x), -x * torch.log(x))
    return torch.where(x < 0, number(-math.inf, x), inside)


@expansion(aten.nan_to_num.default)
def nan_to_num(x: Tensor, nan: Any = None, above: Any = None, below: Any = None) -> Tensor:
    if x.dtype not in FLOATS:
        return x.clone()
    limits = torch.finfo(x.dtype)
    out = torch.where(torch.isnan(x), number(nan or 0.0, x), x)
    out = torch.where(x == math.inf, number(limits.max if above is None else above, x), out)
    return torch.where(x == -math.inf, number(limits.min if below is None else below, x), out)


SPECIAL: dict[str, Rule] = {
    "xlogy.Tensor": lambda x, y: _times_log(x, y, torch.log),
    "special_xlog1py": lambda x, y: _times_log(x, y, torch.log1p),
    "heaviside": lambda x, values: torch.where(x == 0, values, (x > 0).to(x.dtype)),
    "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi),
}
expansions(SPECIAL)
SUMS: dict[str, Rule] = {
    "logaddexp": lambda a, b: _log_of_sum(a, b, lambda gap: torch.log1p(torch.exp(-gap))),
    "logaddexp2": lambda a, b: _log_of_sum(
        a, b, lambda gap: torch.log1p(torch.exp2(-gap)) * (1 / math.log(2))
    ),
}
expansions(SUMS, lambda function: together(in_wide(function)))
