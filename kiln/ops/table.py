"""The table of shape rules: one entry an aten overload, from its arguments to fake outputs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

import torch

Rule = Callable[..., Any]
F = TypeVar("F", bound=Rule)

#: A rule receives the arguments of the overload as dispatched and returns what the overload returns.
#: `NotImplemented` sends the call on to the meta kernels.
RULES: dict[Any, Rule] = {}

#: Rules of families with very many overloads, each found when it is first met: by the start of the name.
LATE: dict[str, Callable[[Any], Rule | None]] = {}

aten = torch.ops.aten


def rule_of(overload: Any) -> Rule | None:
    """The shape rule of an overload; None where the meta kernels alone know its shape."""
    known = RULES.get(overload)
    if known is None:
        name = overload.name()
        for start, find in LATE.items():
            if name.startswith(start) and (known := find(overload)) is not None:
                RULES[overload] = known
    return known


def overload(name: str) -> Any:
    """The overload of aten that is named `op`, for the default one, or `op.overload`."""
    op, _, which = name.partition(".")
    return getattr(getattr(aten, op), which or "default")


def declare(table: dict[Any, Rule], rows: Mapping[str, Rule]) -> None:
    """Put rows into a table: the names of overloads, as `overload` takes them, and what stands for them."""
    for names, function in rows.items():
        _put(table, map(overload, names.split()), function)


def _put(table: dict[Any, Rule], overloads: Iterable[Any], function: Rule) -> None:
    for target in overloads:
        assert target not in table, f"{target} is declared twice"
        table[target] = function


def rule(*overloads: Any) -> Callable[[F], F]:
    """Declare the decorated function as the shape rule of `overloads`."""

    def declared(function: F) -> F:
        _put(RULES, overloads, function)
        return function

    return declared


#: An expansion receives the arguments of the overload and computes its result with smaller ops, on real
#: tensors as on fakes. `NotImplemented` leaves these arguments to the eager kernel.
EXPANSIONS: dict[Any, Rule] = {}
#: The overloads whose expansion holds for complex numbers too.
COMPLEX_TOO: set[Any] = set()


def expansion(*overloads: Any, complex_too: bool = False) -> Callable[[F], F]:
    """Declare the decorated function as the expansion of `overloads`."""

    def declared(function: F) -> F:
        _put(EXPANSIONS, overloads, function)
        COMPLEX_TOO.update(overloads if complex_too else ())
        return function

    return declared


def expansions(
    rows: Mapping[str, Rule], around: Callable[[Rule], Rule] | None = None, complex_too: bool = False
) -> None:
    """Declare a table of expansions: the names of overloads, as `overload` takes them, and the function.

    `around` decorates each of the functions.
    """
    for names, function in rows.items():
        declared = function if around is None else around(function)
        expansion(*map(overload, names.split()), complex_too=complex_too)(declared)


class _CallableModule(ModuleType):
    """`kiln.ops.table` is this module and a public function, which prints what the tables hold."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        # The catalogue stands above all that fills the tables, and this module below.
        importlib.import_module("kiln.ops.catalogue").show(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
