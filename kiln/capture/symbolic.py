"""Symbolic numbers as the program sees them: ints and floats whose value the graph leaves open.

Arithmetic gives expressions, a comparison is decided and becomes a condition of the entry, and whatever needs
the number itself gets it, at the price that the entry is good for that number alone.
"""

from __future__ import annotations

import bisect
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

from kiln.base import arithmetic as ar
from kiln.base import conditions
from kiln.base.expressions import CALLS, INFIX, Condition, Expr
from kiln.ops.symint import SYMBOLIC as SYMBOLIC
from kiln.ops.symint import expr_of, specialised, wrap

#: What a symbolic number is to the program.
SEEN_AS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
NUMERIC = frozenset({int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool})
#: Native code that holds numbers as they are, or only compares them.
KEEPERS = frozenset({torch.Size, slice, types.SimpleNamespace, typing.cast, bisect.bisect_left,
                     bisect.bisect_right})  # fmt: skip
#: Native classes that look at the values of what they hold.
HASHING = frozenset({set, frozenset})
COMPOUND: tuple[Any, ...] = (tuple, list, dict, set, frozenset, slice)

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": ar.add, "-": ar.sub, "*": ar.mul, "/": ar.truediv, "//": ar.floordiv, "%": ar.mod, "**": ar.power,
    **{sign: functools.partial(ar.infix, sign) for sign in ("&", "|", "^", "<<", ">>")},
}  # fmt: skip
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": conditions.eq, "!=": conditions.ne, "<": conditions.lt, "<=": conditions.le, ">": conditions.gt,
    ">=": conditions.ge,
}  # fmt: skip
EXTREMES = {max: ar.maximum, min: ar.minimum}
#: Functions of one number that stay symbolic, by what they are called in expressions.
FUNCTIONS: dict[Any, str] = {
    abs: "abs", round: "round", float: "float",
    **{getattr(math, name.removeprefix("math.")): name for name in CALLS if name.startswith("math.")},
}  # fmt: skip


def needs_numbers(function: Any, deeply: bool) -> bool:
    """Whether native code needs the numbers themselves; `deeply`: it does more than to hold what it gets."""
    return function not in KEEPERS if deeply else function in HASHING


def concrete(value: Any) -> Any:
    """`value` with plain numbers in place of symbolic ones, for which alone the entry is then good."""
    kind = type(value)
    if kind in SYMBOLIC:
        return specialised(value)
    if not isinstance(value, COMPOUND) or not holds_symbols(value):
        return value
    if kind is slice:
        return slice(concrete(value.start), concrete(value.stop), concrete(value.step))
    if isinstance(value, dict):
        return {concrete(key): concrete(item) for key, item in dict.items(value)}
    parts = [concrete(part) for part in value]
    return kind(*parts) if hasattr(value, "_fields") else kind(parts)


def holds_symbols(value: Any) -> bool:
    """Whether a symbolic number stands in the nest `value`."""
    left, seen = [value], set[int]()
    while left:
        value = left.pop()
        kind = type(value)
        if kind in SYMBOLIC:
            return True
        if not isinstance(value, COMPOUND) or id(value) in seen:
            continue
        seen.add(id(value))
        if kind is slice:
            left += (value.start, value.stop, value.step)
        else:
            left += (*dict.keys(value), *dict.values(value)) if isinstance(value, dict) else value
    return False


def simple(value: Any) -> Any:
    """The expression behind a symbolic number, under all that was decided; a plain number where fixed.

    A truth is decided, unless only the graph can tell.
    """
    expr = expr_of(value)
    if isinstance(expr, Expr):
        return expr.scope.simplify(expr)
    if isinstance(expr, Condition):
        return expr if expr.scope.is_open(expr) and expr.scope.known(expr) is None else decide(expr)
    return expr


def number(value: Any) -> Any:
    """The expression of an operand; truth values count as numbers, and are decided."""
    return int(value) if type(value) in (bool, torch.SymBool) else expr_of(value)


def arithmetic(sign: str, a: Any, b: Any) -> Any:
    """`a sign b` of two numbers, at least one of them symbolic."""
    left, right = number(a), number(b)
    positive = type(left) is float and left > 0  # to any power a float
    if sign in ("<<", ">>") or sign == "**" and not positive:
        right = number(concrete(b))  # its sign says whether an int or a float comes out, or an error
    if sign in ("/", "//", "%") and decide(conditions.eq(right, 0)):
        return INFIX[sign][1](concrete(a), concrete(b))  # raises
    return wrap(ARITHMETIC[sign](left, right))


def compare(sign: str, a: Any, b: Any) -> Any:
    """`a sign b` of two numbers, decided where that can be before the graph runs."""
    answer = COMPARISONS[sign](number(a), number(b))
    if isinstance(answer, Condition) and answer.scope.is_open(answer):
        return wrap(answer)
    return decide(answer)


def decide(answer: Any) -> bool:
    """The truth of a condition, which the entry then takes for granted."""
    return bool(answer.scope.decide(answer) if isinstance(answer, Condition) else answer)


def truth(value: Any) -> bool:
    """`bool(value)` of a symbolic number."""
    if type(value) is torch.SymBool:
        return bool(value)
    return decide(conditions.ne(number(value), 0))


def negative(value: Any) -> Any:
    """`-value`."""
    return wrap(ar.mul(-1, number(value)))


def function(called: Any, value: Any, *rest: Any) -> Any:
    """A function of FUNCTIONS on a symbolic number."""
    if any(part is not None for part in rest) or type(value) is torch.SymBool:
        return called(concrete(value), *[concrete(part) for part in rest])
    return wrap(ar.call(FUNCTIONS[called], expr_of(value)))


def whole(value: Any) -> Any:
    """`int(value)`."""
    if type(value) is torch.SymInt:
        return value
    return int(value) if type(value) is torch.SymBool else wrap(ar.call("math.trunc", expr_of(value)))


def extreme(called: Any, values: list[Any]) -> Any:
    """The least or greatest of numbers of one kind, at least one of them symbolic."""
    return wrap(functools.reduce(EXTREMES[called], map(expr_of, values)))


def is_float(value: Any) -> bool:
    """Whether a number is a float to the program."""
    return type(value) is float or type(value) is torch.SymFloat
