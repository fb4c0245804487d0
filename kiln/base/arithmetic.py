"""Arithmetic of expressions: sums of products, quotients and remainders in lowest terms; trees for floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from kiln.base.expressions import (
    CALLS,
    FLOORDIV,
    INFIX,
    MAX,
    MIN,
    MOD,
    NUMBERS,
    OPERATORS,
    TO_INT,
    Expr,
    Monomial,
    Poly,
    Value,
    accumulate,
    atom,
    from_poly,
    hint_of,
    is_real,
    poly_of,
    scope_of,
    times,
    weight,
)

Operation = Callable[[Value, Value], Value]


def _operation(op: str, normal: Callable[[Any, Value, Value], Value]) -> Operation:
    """An operation on numbers and expressions: of floats a tree, of integers what `normal` makes, once."""
    compute = INFIX[op][1]

    def operation(a: Value, b: Value) -> Value:
        if type(a) in NUMBERS and type(b) in NUMBERS:
            return compute(a, b)  # type: ignore[no-any-return]
        if is_real(a) or is_real(b):
            return infix(op, a, b)
        scope = scope_of(a, b)
        known: Value | None = scope.memo.get((op, a, b))
        if known is None:
            known = scope.memo[op, a, b] = normal(scope, a, b)
        return known

    return operation


def _sum(scope: Any, a: Value, b: Value, factor: int = 1) -> Value:
    poly = dict(poly_of(a))
    accumulate(poly, poly_of(b), factor)
    return from_poly(scope, poly)


def total(values: Iterable[Value]) -> Value:
    """The sum of integers."""
    poly: Poly = {}
    scope = None
    for value in values:
        accumulate(poly, poly_of(value), 1)
        if isinstance(value, Expr):
            scope = value.scope
    return poly.get((), 0) if scope is None else from_poly(scope, poly)


def dot(values: Iterable[Value], factors: Iterable[Value]) -> Value:
    """The sum of integers, each times a factor."""
    poly: Poly = {}
    scope = None
    for value, factor in zip(values, factors, strict=True):
        if isinstance(factor, Expr):
            scope = factor.scope
            accumulate(poly, times(poly_of(value), factor.poly), 1)
            continue
        if isinstance(value, Expr):
            scope = value.scope
        accumulate(poly, poly_of(value), int(factor))
    return poly.get((), 0) if scope is None else from_poly(scope, poly)


def _quotient(scope: Any, a: Any, b: Any) -> Value:
    if type(b) is int and b <= 0:
        if b == 0:
            raise ZeroDivisionError("integer division or modulo by zero")
        return floordiv(mul(-1, a), -b)
    whole, left = _divided(_with_quotients(poly_of(a), b), b, signed=True)
    rest = from_poly(scope, left)
    first = min((m for m in left if m), key=weight, default=None)
    if first is not None and left[first] < 0:
        part = mul(-1, _fraction(scope, sub(sub(b, 1), rest), b))
    else:
        part = _fraction(scope, rest, b)
    return add(from_poly(scope, whole), part)


def _fraction(scope: Any, rest: Any, b: Any) -> Value:
    """`rest // b` where no multiple of `b` can be taken out of `rest`."""
    low, high = scope.bounds(rest)
    if low >= 0 and high < scope.bounds(b)[0]:
        return 0
    if type(b) is int:
        shared = math.gcd(b, *[n for m, n in rest.poly.items() if m])
        if shared > 1:
            poly = {m: n // shared for m, n in rest.poly.items() if n // shared}
            return floordiv(from_poly(scope, poly), b // shared)
        inner = [m for m in rest.poly if m]
        if len(inner) == 1 and len(inner[0]) == 1 and rest.poly[inner[0]] == 1:
            part = inner[0][0]
            if part.op is FLOORDIV and type(part.args[1]) is int:
                c = part.args[1]
                return floordiv(add(part.args[0], rest.poly.get((), 0) * c), b * c)
    return atom(scope, FLOORDIV, (rest, b), hint_of(rest) // hint_of(b))


def _remainder(scope: Any, a: Any, b: Any) -> Value:
    if type(b) is int and b <= 0:
        if b == 0:
            raise ZeroDivisionError("integer division or modulo by zero")
        return mul(-1, mod(mul(-1, a), -b))
    poly = poly_of(a)
    if type(b) is int:
        poly = _without_remainders(poly, b)
    rest: Any = from_poly(scope, _divided(poly, b, signed=False)[1])
    low, high = scope.bounds(rest)
    if low >= 0 and high < scope.bounds(b)[0]:
        return rest  # type: ignore[no-any-return]
    if type(b) is int:
        shared = math.gcd(b, *rest.poly.values())
        if shared > 1:
            poly = {m: n // shared for m, n in rest.poly.items()}
            return mul(shared, mod(from_poly(scope, poly), b // shared))
    return atom(scope, MOD, (rest, b), hint_of(rest) % hint_of(b))


def _divided(poly: Poly, b: Any, signed: bool) -> tuple[Poly, Poly]:
    """`poly` as `whole * b + rest`: each term of `rest` has a small factor, of the term's sign or none."""
    divisor = poly_of(b)
    if len(divisor) > 1:
        return _long_division(poly, divisor)
    ((parts, size),) = divisor.items()
    whole: Poly = {}
    rest: Poly = {}
    for monomial, n in poly.items():
        others = without(monomial, parts)
        if others is None:
            rest[monomial] = n
            continue
        if signed and others + parts:
            count = n // size if n * size >= 0 else -(-n // size)
            if abs(2 * (n - count * size)) > size:
                count += 1 if n > 0 else -1
        else:
            count = n // size
        if count:
            whole[others] = count
        if n - count * size:
            rest[monomial] = n - count * size
    return whole, rest


def _long_division(poly: Poly, divisor: Poly) -> tuple[Poly, Poly]:
    """`poly` as a multiple of a sum; all of it is the rest when it is none."""
    lead = min(divisor, key=weight)
    whole: Poly = {}
    rest = dict(poly)
    for _ in range(2 * len(poly)):
        if not rest:
            return whole, rest
        top = min(rest, key=weight)
        others = without(top, lead)
        if others is None or rest[top] % divisor[lead]:
            break
        count = rest[top] // divisor[lead]
        whole[others] = count
        accumulate(rest, times(divisor, {others: 1}), -count)
    return ({}, poly) if rest else (whole, rest)


def without(monomial: Monomial, parts: Monomial) -> Monomial | None:
    """`monomial` divided by the product of `parts`."""
    if not parts:
        return monomial
    left = list(monomial)
    for part in parts:
        if part not in left:
            return None
        left.remove(part)
    return tuple(left)


def _remainders(poly: Poly) -> Iterator[tuple[int, Any, Any, Poly]]:
    """For each term `n * (x % c)` of `poly` n, x and c, and `poly` with `n * x` in the place of it."""
    for monomial, n in poly.items():
        if len(monomial) == 1 and monomial[0].op is MOD:
            out = dict(poly)
            del out[monomial]
            x, c = monomial[0].args
            accumulate(out, poly_of(x), n)
            yield n, x, c, out


def _without_remainders(poly: Poly, b: int) -> Poly:
    """`poly` with `x % c` written as `x` where that is the same modulo `b`."""
    for n, _, c, out in _remainders(poly):
        if type(c) is int and n * c % b == 0:
            return _without_remainders(out, b)
    return poly


def _with_quotients(poly: Poly, b: Any) -> Poly:
    """`poly` with `x - x % b` written as `b * (x // b)` where that makes it shorter, to be divided by `b`."""
    for n, x, c, out in _remainders(poly):
        fits = c is b or (type(c) is int and type(b) is int and n * c % b == 0)
        if fits and len(out) < len(poly):
            accumulate(out, times(poly_of(floordiv(x, c)), poly_of(c)), -n)
            return _with_quotients(out, b)
    return poly


def _rejoined(poly: Poly) -> Poly:
    """`poly` with `x % c + c * (x // c)` written as `x`."""
    for n, x, c, out in _remainders(poly):
        quotient = poly_of(floordiv(x, c)) if type(c) is int else {}
        if quotient and all(poly.get(part) == n * c * count for part, count in quotient.items() if part):
            accumulate(out, quotient, -n * c)
            return _rejoined(out)
    return poly


def without_quotients(poly: Poly) -> Poly:
    """`poly` with `b * (a // b)` written as `a - a % b` where that is shorter; `a` may be a quotient."""
    poly = _rejoined(poly)
    for monomial, factor in poly.items():
        for i, part in enumerate(monomial):
            if part.op is not FLOORDIV:
                continue
            a, b = part.args
            others, count = monomial[:i] + monomial[i + 1 :], factor
            if type(b) is int and (shared := math.gcd(factor, b)) > 1:
                a, b, count = a if shared == b else floordiv(a, b // shared), shared, factor // shared
            elif b in others:
                others = without(others, (b,))  # type: ignore[assignment]
            else:
                continue
            rest = part.scope.simplify(mod(a, b))
            left = dict(poly)
            del left[monomial]
            accumulate(left, times(poly_of(sub(a, rest)), {others: count}), 1)
            if len(left) < len(poly) or rest == 0:
                return without_quotients(left)
    return poly


def extreme(op: str, a: Value, b: Value) -> Value:
    """`min(a, b)` or `max(a, b)`."""
    pick = CALLS[op]
    if type(a) in NUMBERS and type(b) in NUMBERS:
        return pick(a, b)  # type: ignore[no-any-return]
    scope = scope_of(a, b)
    if is_real(a) or is_real(b):
        return atom(scope, op, (a, b), pick(float(hint_of(a)), float(hint_of(b))))
    parts: list[Any] = []
    for value in (a, b):
        parts += value.args if isinstance(value, Expr) and value.op is op else [value]
    kept: list[Any] = []
    for part in sorted(parts, key=lambda p: p.order if isinstance(p, Expr) else -1):
        if not any(_chosen(scope, op, other, part) for other in kept):
            kept = [other for other in kept if not _chosen(scope, op, part, other)] + [part]
    if len(kept) == 1:
        return kept[0]  # type: ignore[no-any-return]
    return atom(scope, op, tuple(kept), pick([hint_of(part) for part in kept]))


def _chosen(scope: Any, op: str, a: Any, b: Any) -> bool:
    """Whether `a` is surely the one of the two that `op` gives."""
    low, high = scope.bounds(sub(a, b))
    return bool(high <= 0 if op is MIN else low >= 0)


minimum, maximum = partial(extreme, MIN), partial(extreme, MAX)


def infix(op: str, a: Value, b: Value) -> Value:
    """A binary operation that has no normal form: on floats, and on the bits of integers."""
    function = INFIX[op][1]
    if type(a) in NUMBERS and type(b) in NUMBERS:
        return function(a, b)  # type: ignore[no-any-return]
    if op in ("+", "-", "*"):
        left, right = whole(a), whole(b)
        if left is not None and right is not None:
            return call("float", OPERATORS[op](left, right))
    return atom(scope_of(a, b), op, (a, b), function(hint_of(a), hint_of(b)))


def whole(value: Value) -> Value | None:
    """The integer of which `value` is the float, or that it is; None for other floats."""
    if isinstance(value, Expr):
        return value.args[0] if value.op == "float" else None if value.real else value  # type: ignore[no-any-return]
    return int(value) if value == value // 1 and abs(value) < EXACT else None


EXACT = 1 << 53
"""Below it, every integer is a float."""


def truediv(a: Value, b: Value) -> Value:
    return call("float", a) if type(b) in NUMBERS and b == 1 and isinstance(a, Expr) else infix("/", a, b)


def power(a: Value, b: Value) -> Value:
    """`a ** b`."""
    if not is_real(a) and type(b) is int and 0 <= b <= 8:
        out: Value = 1
        for _ in range(b):
            out = mul(out, a)
        return out
    return infix("**", a, b)


def call(name: str, a: Value, *rest: int) -> Value:
    """A function of CALLS on one number."""
    function = CALLS[name]
    if type(a) in NUMBERS:
        return function(a, *rest)  # type: ignore[no-any-return]
    assert isinstance(a, Expr)
    if not a.real:
        if name in TO_INT:
            return a
        if name == "abs" and a.scope.bounds(a)[0] >= 0:
            return a
        if name == "abs":
            return maximum(a, mul(-1, a))
    elif name == "float":
        return a
    elif name in TO_INT and a.op == "float" and not rest:
        return a.args[0]  # type: ignore[no-any-return]
    return atom(a.scope, name, (a, *rest), function(a.hint, *rest))


add = _operation("+", _sum)
sub = _operation("-", lambda scope, a, b: _sum(scope, a, b, -1))
mul = _operation("*", lambda scope, a, b: from_poly(scope, times(poly_of(a), poly_of(b))))
floordiv = _operation("//", _quotient)
mod = _operation("%", _remainder)
OPERATORS.update({"+": add, "-": sub, "*": mul, "//": floordiv, "%": mod, "/": truediv})


for _name, _own in zip("add sub mul floordiv mod truediv".split(), OPERATORS.values(), strict=True):
    setattr(Expr, f"__{_name}__", _own)
    setattr(Expr, f"__r{_name}__", lambda a, b, own=_own: own(b, a))
