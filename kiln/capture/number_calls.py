"""How functions of numbers are captured when the numbers are symbolic."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch

from kiln.capture import operators, symbolic
from kiln.capture.calls import HANDLERS, METHODS, Args, Kwargs, handles, native
from kiln.capture.frame import Machine
from kiln.capture.world import MISSING


def of_one_number(m: Machine, function: Any, value: Any, *rest: Any) -> Any:
    """abs, round, float and the functions of math."""
    if type(value) not in symbolic.SYMBOLIC:
        return m.native(function, *symbolic.concrete((value, *rest)))
    return m.native(symbolic.function, function, value, *rest)


def whole(m: Machine, function: Any, value: Any, *base: Any) -> Any:
    if base or type(value) not in symbolic.SYMBOLIC:
        return m.native(int, *symbolic.concrete((value, *base)))
    return m.native(symbolic.whole, value)


def index(m: Machine, function: Any, value: Any) -> Any:
    return value if type(value) is torch.SymInt else m.native(operator.index, symbolic.concrete(value))


def power(m: Machine, function: Any, a: Any, b: Any, *modulus: Any) -> Any:
    if modulus:
        return m.native(pow, *symbolic.concrete((a, b, *modulus)))
    return operators.binary(m, "**", a, b)


def float_power(m: Machine, function: Any, a: Any, b: Any) -> Any:
    """`math.pow`: of a positive number, what `**` gives of its float."""
    if m.truth(operators.compare(m, ">", a, 0)):
        return operators.binary(m, "**", of_one_number(m, float, a), b)
    return m.native(math.pow, *symbolic.concrete((a, b)))


def product(m: Machine, function: Any, values: Any, start: Any = 1) -> Any:
    return reduce(partial(operators.binary, m, "*"), values, start)


def size_product(m: Machine, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """`torch.Size.numel()`."""
    return product(m, math.prod, tuple(owner)) if symbolic.holds_symbols(owner) else MISSING


METHODS[torch.Size, "numel"] = size_product


def torch_extreme(m: Machine, function: Any, a: Any, b: Any) -> Any:
    """What comes out is a float when one of the two is."""
    called = max if function is torch.sym_max else min
    if symbolic.is_float(a) != symbolic.is_float(b):
        a, b = (v if symbolic.is_float(v) else of_one_number(m, float, v) for v in (a, b))
    return m.native(symbolic.extreme, called, [a, b])


RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(symbolic.FUNCTIONS, of_one_number),
    **dict.fromkeys((torch.sym_max, torch.sym_min), torch_extreme),
    int: whole, operator.index: index, pow: power, math.pow: float_power, math.prod: product,
    complex: lambda m, f, *args, **named: m.native(f, *symbolic.concrete(args), **symbolic.concrete(named)),
    divmod: lambda m, f, a, b: (operators.binary(m, "//", a, b), operators.binary(m, "%", a, b)),
    torch.sym_int: lambda m, f, value: whole(m, int, value),
    torch.sym_float: lambda m, f, value: of_one_number(m, float, value),
    torch.sym_sum: lambda m, f, values: reduce(partial(operators.binary, m, "+"), values, 0),
    torch.sym_not: lambda m, f, value: not m.truth(value),
}  # fmt: skip
BEFORE: dict[Any, Any] = {function: HANDLERS.get(id(function)) for function in RULES}


@handles(*RULES, told=True)
def on_symbols(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """A call with a symbolic number is captured by its rule; others go as before."""
    if symbolic.holds_symbols(args):
        return RULES[function](m, function, *args, **kwargs)
    before = BEFORE[function]
    return native(m, function, args, kwargs) if before is None else before(m, args, kwargs)
