"""Expressions as calls: what computes a symbolic number from its symbols, in a graph."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from kiln.base.expressions import CALLS, INFIX, SUM, Expr, Symbol

#: Calls that also understand the symbolic numbers of whoever runs the graph again.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": torch.sym_min, "max": torch.sym_max, "float": torch.sym_float, "abs": operator.abs, "round": round,
    **{f"math.{name}": getattr(torch, f"_sym_{name}", getattr(math, name))
       for name in (key.removeprefix("math.") for key in CALLS if key.startswith("math."))},
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<<": operator.lshift, ">>": operator.rshift,
}  # fmt: skip
assert FUNCTIONS.keys() >= CALLS.keys()
assert FUNCTIONS.keys() >= INFIX.keys() - {"==", "!=", "<", "<="}


def build(value: Any, symbol: Callable[[Symbol], Any], call: Callable[..., Any]) -> Any:
    """Compute an expression by `call(function, a, b)`, beginning with what `symbol` gives for each symbol."""
    if not isinstance(value, Expr):
        return value
    if isinstance(value, Symbol):
        return symbol(value)
    if value.op is SUM:
        return _sum(value, symbol, call)
    parts = [build(part, symbol, call) for part in value.args]
    if value.op in ("min", "max"):
        out = parts[0]
        for part in parts[1:]:
            out = call(FUNCTIONS[value.op], out, part)
        return out
    return call(FUNCTIONS[value.op], *parts)


def _sum(value: Expr, symbol: Callable[[Symbol], Any], call: Callable[..., Any]) -> Any:
    """A sum of products: positive terms first, so that most differences need no negation."""
    out: Any = None
    terms = sorted(value.poly.items(), key=lambda term: (term[1] < 0, not term[0]))
    for monomial, factor in terms:
        product: Any = None
        for part in monomial:
            made = build(part, symbol, call)
            product = made if product is None else call(operator.mul, product, made)
        size = builtins.abs(factor)
        if product is None:
            product = size
        elif size != 1:
            product = call(operator.mul, product, size)
        if out is None:
            out = product if factor > 0 else call(operator.neg, product) if monomial else -product
        else:
            out = call(operator.add if factor > 0 else operator.sub, out, product)
    return out
