"""Ranges of expressions by operator, from the ranges that a scope knows of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kiln.base.arithmetic import add, mul, sub, without
from kiln.base.expressions import FLOORDIV, MAX, MIN, MOD, SUM, SYMBOL, Expr, Value, from_poly

LIMIT = (1 << 63) - 1
"""The largest size."""
MANY = 16
"""Terms of a sum that is looked at as a whole."""


def _range_of_sum(scope: Any, value: Expr) -> tuple[int, int]:
    shared = next((p for p in next(iter(value.poly)) if all(p in m for m in value.poly)), None)
    if shared is not None and len(value.poly) > 1:
        rest = {without(monomial, (shared,)) or (): n for monomial, n in value.poly.items()}
        return _product(scope.bounds(shared), scope.bounds(from_poly(scope, rest)))
    low = high = 0
    for monomial, n in value.poly.items():
        span = (n, n)
        for part in monomial:
            span = _product(span, scope.bounds(part))
        low, high = low + span[0], high + span[1]
    if low < 0 < high and any(len(m) > 1 for m in value.poly) and len(value.poly) <= MANY:
        least, most = _range_above_ends(scope, value)
        return max(low, least), min(high, most)
    return low, high


def _range_above_ends(scope: Any, value: Expr) -> tuple[int, int]:
    """The range of a sum of products that falls or rises with what parts have beyond their least values.

    So `a * b - b` is positive where `a` is at least 2, though both of its terms vary.
    """
    shifted: dict[tuple[int, ...], int] = {}
    for monomial, n in value.poly.items():
        terms: dict[tuple[int, ...], int] = {(): n}
        for part in monomial:
            end = scope.bounds(part)[0]
            if end <= -LIMIT:
                return -LIMIT, LIMIT
            grown = {key: count * end for key, count in terms.items()}
            for key, count in terms.items():
                above = tuple(sorted((*key, part.order)))
                grown[above] = grown.get(above, 0) + count
            terms = grown
        for key, count in terms.items():
            shifted[key] = shifted.get(key, 0) + count
    at_ends = shifted.pop((), 0)
    rises, falls = (all(sign * n >= 0 for n in shifted.values()) for sign in (1, -1))
    return at_ends if rises else -LIMIT, at_ends if falls else LIMIT


def _product(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    if a[0] >= 0 and b[0] >= 0:
        return a[0] * b[0], a[1] * b[1]
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _range_of_quotient(scope: Any, value: Expr) -> tuple[int, int]:
    a, b = scope.bounds(value.args[0]), scope.bounds(value.args[1])
    if b[0] <= 0 <= b[1]:
        size = max(abs(a[0]), abs(a[1]))
        return -size - 1, size + 1
    corners = [x // y for x in a for y in b]
    return min(corners), max(corners)


def _range_of_remainder(scope: Any, value: Expr) -> tuple[int, int]:
    a, b = scope.bounds(value.args[0]), scope.bounds(value.args[1])
    if b[0] > 0:
        return 0, min(b[1] - 1, a[1]) if a[0] >= 0 else b[1] - 1
    return min(b[0] + 1, 0), max(b[1] - 1, 0)


def _range_of_extreme(pick: Callable[..., int], scope: Any, value: Expr) -> tuple[int, int]:
    lows, highs = zip(*[scope.bounds(arg) for arg in value.args])
    return pick(lows), pick(highs)


def relaxed(value: Expr) -> Iterator[Value]:
    """Expressions without some part of `value` that are not below it, or not below a multiple of it."""
    for monomial, n in value.poly.items():
        if len(monomial) != 1:
            continue
        part = monomial[0]
        rest = sub(value, mul(n, part))
        if part.op is FLOORDIV and type(part.args[1]) is int:
            a, b = part.args
            yield add(mul(rest, b), mul(n, a if n > 0 else sub(a, b - 1)))
        elif part.op is (MIN if n > 0 else MAX):
            for arg in part.args:
                yield add(rest, mul(n, arg))


RANGES: dict[str, Callable[[Any, Expr], tuple[int, int]]] = {
    SYMBOL: lambda scope, value: (value.low, value.high),  # type: ignore[attr-defined]
    SUM: _range_of_sum,
    FLOORDIV: _range_of_quotient,
    MOD: _range_of_remainder,
    MIN: partial(_range_of_extreme, min),
    MAX: partial(_range_of_extreme, max),
}
