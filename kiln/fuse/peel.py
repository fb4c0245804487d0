"""Cuts loops where conditions on their places change: borders of padding, seams of joined tensors.

Between two cuts such a condition is known: what is not read there is not asked for, and the rest is read
without a mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from kiln.base.expressions import FLOORDIV, grows, hinted
from kiln.base.symbols import Expr, Scope
from kiln.fuse.axes import axis
from kiln.fuse.merge import merged, rewritten, substituted
from kiln.fuse.nest import Apply, Axis, Const, Load, Nest, Place, Term, changed

#: Elements from which on a nest is worth several.
WORTH = 1 << 13
#: Nests that one becomes at most.
MOST = 9
#: Elements that a turn reads from which on a nest stays whole: conditions cost little beside them, and code
#: for each part takes long to compile.
LOADS = 16
#: Parts of the innermost loop are at least this long, or it stays whole.
LINE = 16

#: What stands for an element that is not read, where it is no integer.
ZEROS: dict[torch.dtype, Any] = {
    **dict.fromkeys((torch.float32, torch.float64, torch.float16, torch.bfloat16), 0.0), torch.bool: False,
}  # fmt: skip

KNOWN = {value: Const(value, torch.bool) for value in (False, True)}


def peeled(nest: Nest, scope: Scope) -> list[Nest]:
    """The nest, or nests that together do what it does, each with fewer conditions."""
    if nest.reduced or not nest.axes or nest.volume() < WORTH:
        return [nest]
    if any(a.low != 0 for a in nest.axes):
        return [nest]
    used = nest.terms()
    if sum(isinstance(term, Load) for term in used) >= LOADS:
        return [nest]
    tests = {id(t): found for t in used if (found := turning(t, nest.axes)) is not None}
    parts = {a: between(a, {turn for b, turn, _ in tests.values() if a is b}) for a in nest.axes}
    inner = in_line(nest)
    if any(hinted(high - low) < LINE for low, high in parts[inner]):
        parts[inner] = [(0, inner.size)]
    count = math.prod(map(len, parts.values()))
    if count == 1 or count > MOST:
        return [nest]
    if count == len(parts[inner]):  # lines are written in their order: the target goes from part to part
        return [nest]
    regions = itertools.product(*[parts[a] for a in nest.axes])
    return [merged(part_of(nest, tests, region, scope), scope) for region in regions]


def between(along: Axis, turns: set[Any]) -> list[tuple[Any, Any]]:
    """The parts of a loop between these turns; one where it is not known in which order they come."""
    inside = {turn for turn in turns if not at_most(turn, 0) and not at_most(along.size, turn)}
    places = [0, *sorted(inside, key=hinted), along.size]
    parts = list(itertools.pairwise(places))
    return parts if all(itertools.starmap(at_most, parts)) else [(0, along.size)]


def at_most(a: Any, b: Any) -> bool:
    """Whether a number is known to be no more than another, whatever the sizes are."""
    rest = b - a
    least = rest.scope.bounds(rest)[0] if isinstance(rest, Expr) else rest
    return bool(least >= 0)


def in_line(nest: Nest) -> Axis:
    """The loop along which elements lie side by side where they are stored."""
    index = nest.stores[0].index
    return next((a for a in reversed(nest.axes) if grows(index, a.variable) == 1), nest.axes[-1])


def turning(term: Term, axes: Sequence[Axis]) -> tuple[Axis, Any, bool] | None:
    """For a comparison of one loop's place with a number: the loop, where it changes, what it is before."""
    if not isinstance(term, Apply) or term.op not in ("lt", "ge"):
        return None
    left, right = (number(arg) for arg in term.args)
    if left is None or right is None:
        return None
    past = left - right
    if not isinstance(past, Expr):
        return None
    start: Any = past
    step, repeats = 0, 1
    found: Axis | None = None
    for monomial, factor in past.poly.items():
        if not any(a.variable in atom.symbols() for atom in monomial for a in axes):
            continue
        if len(monomial) > 1 or step or type(factor) is not int:
            return None
        atom, step = monomial[0], factor
        start = start - atom * step
        if atom.op is FLOORDIV and type(atom.args[1]) is int:
            atom, repeats = atom.args
        found = next((a for a in axes if atom is a.variable), None)
    if found is None or type(start) is not int and (abs(step) > 1 or repeats > 1):
        return None
    # `step * place + start < 0` holds up to a place, or from it on.
    turn = -(start // step) if step > 0 else start // -step + 1
    return found, turn * repeats, (step > 0) == (term.op == "lt")


def equals(low: int, high: int, number: int) -> bool | None:
    return low == number if low == high else None if low <= number <= high else False


#: Comparisons of a place, by the ends of its range, with a number: None where both may be.
BORDERS: dict[str, Callable[[int, int, int], bool | None]] = {
    "lt": lambda low, high, border: True if high < border else False if low >= border else None,
    "ge": lambda low, high, border: True if low >= border else False if high < border else None,
    "eq": equals,
}  # fmt: skip
Border: TypeAlias = "tuple[str, Any, int]"
"""A comparison: its name, the place that is compared, and the number that it is compared with."""


def border_of(term: Term) -> Border | None:
    """The comparison of a place with a number that a term is; None for others."""
    if not isinstance(term, Apply) or term.op not in BORDERS:
        return None
    place, border = term.args[0], number(term.args[1])
    plain = isinstance(place, Place) and not place.places and type(border) is int
    return (term.op, place.index, border) if plain else None  # type: ignore[union-attr]


def holds(scope: Scope, name: str, place: Any, border: int) -> bool | None:
    """Whether a comparison holds wherever loops are, or nowhere; None where that is not known."""
    low, high = scope.bounds(place) if isinstance(place, Expr) else (place, place)
    return BORDERS[name](low, high, border)


def number(term: Term) -> Any:
    """An index or a whole number that a term is; None for others."""
    if isinstance(term, Place):
        return None if term.places else term.index
    return term.value if isinstance(term, Const) and type(term.value) is int else None


def part_of(
    nest: Nest, tests: dict[int, tuple[Axis, Any, bool]], region: tuple[tuple[Any, Any], ...], scope: Scope
) -> Nest:
    """The nest over one region, in which most comparisons are known."""
    bounds = dict(zip(nest.axes, region, strict=True))
    known: dict[int, Term] = {}
    for key, (a, turn, before) in tests.items():
        low, high = bounds[a]
        if at_most(high, turn):
            known[key] = KNOWN[before]
        elif at_most(turn, low):
            known[key] = KNOWN[not before]
    stores = changed(nest.stores, known, decided)
    axes: list[Axis] = []
    moves: dict[Any, Any] = {}
    for a, (low, high) in bounds.items():
        if (low, high) == (0, a.size):
            axes.append(a)
        elif high - low == 1:
            moves[a.variable] = low
        else:
            axes.append(axis(scope, high - low, a.variable.name))
            moves[a.variable] = axes[-1].variable + low
    return Nest(tuple(axes), rewritten(stores, lambda index: substituted(index, moves)))


def decided(term: Term) -> Term:
    """What a term over known conditions is: one of its arguments, a number, a load without a condition."""
    if isinstance(term, Load) and term.valid is KNOWN[False]:
        return Const(ZEROS.get(term.dtype, 0), term.dtype)
    if isinstance(term, Load) and term.valid is KNOWN[True]:
        return replace(term, valid=None)
    if not isinstance(term, Apply):
        return term
    args = term.args
    if term.op == "where" and (args[0] is KNOWN[True] or args[0] is KNOWN[False]):
        return args[1] if args[0] is KNOWN[True] else args[2]
    if term.op == "bitwise_and":
        for one, other in itertools.permutations(args):
            if one is KNOWN[False]:
                return one
            if one is KNOWN[True]:
                return other
    return term
