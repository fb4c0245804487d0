"""Expressions as calls: what computes a symbolic number from its parts, in a graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch

from kiln.base.expressions import CALLS, INFIX, SUM, Expr

#: Calls that also understand the symbolic numbers of whoever runs the graph again.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{sign: function for sign, (_, function) in INFIX.items()},
    "min": torch.sym_min, "max": torch.sym_max, "float": torch.sym_float, "abs": operator.abs, "round": round,
    **{f"math.{name}": getattr(torch, f"_sym_{name}", getattr(math, name))
       for name in (key.removeprefix("math.") for key in CALLS if key.startswith("math."))},
}  # fmt: skip
assert FUNCTIONS.keys() >= CALLS.keys()


def build(value: Expr, part: Callable[[Any], Any], call: Callable[..., Any]) -> Any:
    """Compute an expression, no symbol, by `call(function, a, b)` of what `part` gives for its parts."""
    if value.op is SUM:
        return _sum(value, part, call)
    parts = [part(inner) for inner in value.args]
    if value.op in ("min", "max"):
        return reduce(partial(call, FUNCTIONS[value.op]), parts)
    return call(FUNCTIONS[value.op], *parts)


def _sum(value: Expr, part: Callable[[Any], Any], call: Callable[..., Any]) -> Any:
    """A sum of products: positive terms first, so that most differences need no negation."""
    out: Any = None
    for monomial, factor in sorted(value.poly.items(), key=lambda term: (term[1] < 0, not term[0])):
        product: Any = reduce(partial(call, operator.mul), map(part, monomial)) if monomial else abs(factor)
        if monomial and abs(factor) != 1:
            product = call(operator.mul, product, abs(factor))
        if out is None:
            out = product if factor > 0 else call(operator.neg, product) if monomial else -product
        else:
            out = call(operator.add if factor > 0 else operator.sub, out, product)
    return out
