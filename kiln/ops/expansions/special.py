"""Expansions of special functions that have a form in primitives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kiln.ops.expansions.arithmetic import promoted, to_float, together
from kiln.ops.expansions.pointwise import of_float
from kiln.ops.expansions.support import floating, in_wide, number, wide, zero
from kiln.ops.layout import FLOATS
from kiln.ops.table import Rule, aten, expansion, expansions


def _times_log(x: Tensor, y: Tensor, logarithm: Callable[[Tensor], Tensor]) -> Any:
    """x * log(y), which is 0 where x is; NaN where y is."""
    dtype = to_float(promoted(x, y))
    if dtype not in FLOATS:
        return NotImplemented
    x, y = x.to(wide(dtype)), y.to(wide(dtype))
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


EXPANDED: dict[str, Rule] = {
    "xlogy.Tensor": lambda x, y: _times_log(x, y, torch.log),
    "special_xlog1py": lambda x, y: _times_log(x, y, torch.log1p),
    "heaviside": lambda x, values: torch.where(x == 0, values, (x > 0).to(x.dtype)),
    "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi),
}
expansions(EXPANDED)
SUMS: dict[str, Rule] = {
    "logaddexp": lambda a, b: _log_of_sum(a, b, lambda gap: torch.log1p(torch.exp(-gap))),
    "logaddexp2": lambda a, b: _log_of_sum(
        a, b, lambda gap: torch.log1p(torch.exp2(-gap)) * (1 / math.log(2))
    ),
}
expansions(SUMS, lambda function: together(in_wide(function)))
