"""Comparisons of expressions in normal form: `a == b` and `b == a` are one, so are `2*a < 7` and `a <= 3`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from kiln.base.arithmetic import add, sub, whole, without, without_quotients
from kiln.base.expressions import (
    FLOORDIV,
    INFIX,
    NUMBERS,
    Condition,
    Expr,
    Monomial,
    Poly,
    Truth,
    Value,
    condition,
    from_poly,
    is_real,
)


def _compare(op: str, a: Value, b: Value) -> Truth:
    if type(a) in NUMBERS and type(b) in NUMBERS:
        return bool(INFIX[op][1](a, b))
    scope: Any = a.scope if isinstance(a, Expr) else b.scope  # type: ignore[union-attr]
    if is_real(a) or is_real(b):
        left, right = whole(a), whole(b)
        if left is not None and right is not None:
            return _compare(op, left, right)
        hint = INFIX[op][1](*[v.hint if isinstance(v, Expr) else v for v in (a, b)])
        return condition(scope, "float", (op, a, b), bool(hint))
    known: Truth | None = scope.memo.get((op, a, b))
    if known is None:
        known = scope.memo[op, a, b] = zero(op, sub(a, b))
    return known


#: `a == b`, `a != b`, `a <= b`, `a < b`.
eq, ne, le, lt = (partial(_compare, op) for op in ("==", "!=", "<=", "<"))


def ge(a: Value, b: Value) -> Truth:
    return le(b, a)


def gt(a: Value, b: Value) -> Truth:
    return lt(b, a)


def zero(op: str, value: Value) -> Truth:
    """The comparison of an integer with zero, in lowest terms."""
    if not isinstance(value, Expr):
        return bool(INFIX[op][1](value, 0))
    poly, scope = _reduced(value), value.scope
    constant = poly.pop((), 0)
    if not poly:
        return bool(INFIX[op][1](constant, 0))
    if op == "<":
        op, constant = "<=", constant + 1
    shared = math.gcd(*poly.values())
    if op == "<=":
        constant = -(-constant // shared)
    elif constant % shared:
        return op == "!="
    else:
        constant //= shared
        if poly[min(poly, key=lambda m: [part.order for part in m])] < 0:
            shared, constant = -shared, -constant
    poly = {m: n // shared for m, n in poly.items()}
    if op == "<=" and len(poly) == 1:
        whole = _of_dividend(*next(iter(poly.items())), constant)
        if whole is not None:
            return zero(op, whole)
    if constant:
        poly[()] = constant
    expr = from_poly(scope, poly)
    if not isinstance(expr, Expr):
        return bool(INFIX[op][1](expr, 0))
    return condition(scope, op, (expr,), bool(INFIX[op][1](expr.hint, 0)))


def _of_dividend(monomial: Monomial, n: int, constant: int) -> Value | None:
    """What of `a` is at most zero when `n * (a // b) + constant` is, for a number `b`; None for others."""
    if len(monomial) != 1 or monomial[0].op is not FLOORDIV or abs(n) != 1:
        return None
    a, b = monomial[0].args
    if type(b) is not int:
        return None
    return sub(constant * b, a) if n < 0 else add(a, (constant - 1) * b + 1)


def _reduced(value: Expr) -> Poly:
    """The terms of `value` without the positive factors that all of them share."""
    poly = dict(without_quotients(value.poly))
    while poly and () not in poly:
        shared = next(
            (p for p in next(iter(poly)) if all(p in m for m in poly) and value.scope.bounds(p)[0] > 0), None
        )
        if shared is None:
            break
        poly = {without(monomial, (shared,)) or (): n for monomial, n in poly.items()}
    return poly


def negate(value: Truth) -> Truth:
    """The condition that holds where `value` does not."""
    if not isinstance(value, Condition):
        return not value
    if value.op == "<=":
        return zero("<=", sub(1, value.args[0]))
    if value.op in ("==", "!="):
        return condition(value.scope, "!=" if value.op == "==" else "==", value.args, not value.hint)
    if value.op == "not":
        inner: Truth = value.args[0]
        return inner
    if value.op in ("and", "or"):
        return (any_of if value.op == "and" else all_of)(*[negate(arg) for arg in value.args])
    return condition(value.scope, "not", (value,), not value.hint)


def all_of(*values: Truth) -> Truth:
    """Whether all conditions hold."""
    return _joined("and", values, False)


def any_of(*values: Truth) -> Truth:
    """Whether one of the conditions holds."""
    return _joined("or", values, True)


def _joined(op: str, values: tuple[Truth, ...], decisive: bool) -> Truth:
    parts: list[Condition] = []
    for value in values:
        if not isinstance(value, Condition):
            if bool(value) is decisive:
                return decisive
        else:
            parts += [arg for arg in (value.args if value.op == op else (value,)) if arg not in parts]
    if not parts:
        return not decisive
    if len(parts) == 1:
        return parts[0]
    hint = any(p.hint for p in parts) if decisive else all(p.hint for p in parts)
    return condition(parts[0].scope, op, tuple(parts), hint)
