"""Lanes of vectors: which axis runs in them, how they are taken apart and folded; what a nest is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from kiln.base.expressions import FLOORDIV, MAX, MIN, MOD, SUM, hinted
from kiln.base.graph import reached
from kiln.base.symbols import Expr
from kiln.fuse.nest import (
    Apply,
    Axis,
    Const,
    Fold,
    Load,
    Nest,
    Place,
    Term,
    children,
    is_affine,
    terms,
)
from kiln.generate.llvm import Value
from kiln.generate.scalar import FOLDS, PLACED


def row_terms(roots: list[Term]) -> list[Term]:
    """The terms below the roots that are computed for each element, not below a fold."""
    found = reached(roots, lambda term: () if isinstance(term, Fold) else children(term))
    return [term for term in found if not isinstance(term, Fold)]


def varying(found: list[Term], variables: Set[Expr]) -> set[int]:
    """The ids of terms, given children first, that depend on one of these loops and on no fold."""
    ids: set[int] = set()
    for term in found:
        index = getattr(term, "index", None)
        inside = isinstance(index, Expr) and not variables.isdisjoint(index.symbols())
        if inside or not isinstance(term, Fold) and any(id(child) in ids for child in children(term)):
            ids.add(id(term))
    return ids


def aligned(values: list[Value]) -> list[Value]:
    """Operands of one width."""
    width = max(v.type.width for v in values)
    return [v if v.type.width == width else v.splat(width) for v in values]


def first_lane(value: Value) -> Value:
    return lanes(value, 0, 1)


def with_lane(value: Value, lane: int, part: Value) -> Value:
    """A vector with another value in one lane."""
    text = f"insertelement {value.type} {value.text}, {part.type} {part.text}, i64 {lane}"
    return value.fn.emit(text, value.type)


def with_first_lane(value: Value, first: Value) -> Value:
    return with_lane(value, 0, first)


def combined(folds: list[Fold], left: list[Value], right: list[Value]) -> list[Value]:
    """Two turns of some folds as one."""
    results: list[Value] = []
    for fold in folds:
        parts = slice(len(results), len(results) + len(fold.parts))
        if fold.place is None:
            results += map(FOLDS[fold.kind][2], left[parts], right[parts])
        else:
            results += PLACED[fold.kind](*left[parts], *right[parts])
    return results


def across_lanes(values: list[Value], combine: Callable[..., list[Value]]) -> list[Value]:
    """The lanes of vectors folded into fewer, at last into scalars, halves with halves."""
    while values and values[0].type.width > 1:
        half = values[0].type.width // 2
        values = combine(*[[lanes(value, start, half) for value in values] for start in (0, half)])
    return values


def lanes(value: Value, start: int, count: int) -> Value:
    """Some lanes of a vector."""
    if count == 1:
        return value.fn.emit(f"extractelement {value.type} {value.text}, i64 {start}", value.type.scalar)
    return shuffled(value, range(start, start + count))


def shuffled(value: Value, order: Sequence[int], other: Value | None = None) -> Value:
    """The lanes of a vector, or of two one after the other, in this order."""
    second = "poison" if other is None else other.text
    chosen = ", ".join(f"i32 {i}" for i in order)
    return value.fn.emit(
        f"shufflevector {value.type} {value.text}, {value.type} {second}, <{len(order)} x i32> <{chosen}>",
        value.type.wide(len(order)),
    )


STRIDES = frozenset({-1, 2, 3, 4})  # from lane to lane, for which whole vectors are read
GATHER_COST = 8  # of reading or writing lanes one by one, in reads of whole vectors


def vector_axis(nest: Nest, rank: int = 0, width: int = 16) -> Axis | None:
    """The axis along which vectors of at most `width` cost least for an element; the last one of equals.

    With a `rank`, the second such axis, the third, … .

    A loop whose variable is in the bounds of another one runs turn by turn.
    """
    if nest.part is not None:
        return nest.reduced[0]
    bounds = [part for axis in nest.axes for part in (axis.low, axis.size) if isinstance(part, Expr)]
    able = [axis for axis in nest.axes if not any(axis.variable in part.symbols() for part in bounds)]
    if nest.ordered:
        able = [axis for axis in able if not axis.reduced]
    running = [fold for fold in nest.folds() if fold.running]
    if running and len(nest.reduced) > 1 or any(is_affine(fold.value) for fold in running):
        # What the last turns of one loop leave, fewer than a vector, goes on in the next.
        able = [axis for axis in able if not axis.reduced]
    if not able:
        return None
    computed = nest.terms()
    loads = [t for t in computed if isinstance(t, Load)]
    accesses = [t.index for t in loads if not t.places] + [s.index for s in nest.stores]
    functions = sum(isinstance(t, Apply) for t in computed)

    def cost(axis: Axis) -> float:
        taken = functions + sum(access_cost(index, axis) for index in accesses if isinstance(index, Expr))
        taken += sum(_cost_at_places(load, axis) for load in loads if load.places)
        return taken / lanes_along(axis, width)

    able.reverse()
    ordered = sorted(able, key=cost)
    return ordered[min(rank, len(ordered) - 1)]


def lanes_along(axis: Axis, width: int) -> int:
    """How many lanes vectors along an axis have: a power of two, at most `width`."""
    lanes, extent = 1, hinted(axis.size)
    while lanes < width and lanes * 2 <= extent:
        lanes *= 2
    return lanes


def access_cost(index: Expr, axis: Axis) -> int:
    """What an access costs in vectors along this axis: nothing where all lanes read one place."""
    if axis.variable not in index.symbols():
        return 0
    linear = index.poly.get((axis.variable,))
    return 1 if linear == 1 else 3 if linear in STRIDES else GATHER_COST


def _cost_at_places(load: Load, axis: Axis) -> int:
    """The same for places that are data: elements one by one where these differ along the axis."""
    below = [t.index for t in terms(place.term for place in load.places) if isinstance(t, (Load, Place))]
    if any(axis.variable in index.symbols() for index in below if isinstance(index, Expr)):
        return GATHER_COST
    return access_cost(load.index, axis)


def symbols_of(nest: Nest) -> list[Expr]:
    """The sizes that the nest takes as arguments, in order, and the numbers of the program as a whole.

    Those may leave 64 bits on the way, as indices into memory do not.
    """
    loops = {axis.variable for axis in nest.axes}
    loops.update(inner.variable for inner in (nest.part, nest.rolled) if inner is not None)
    for term in nest.terms():
        if isinstance(term, (Load, Place)):
            loops.update(place.symbol for place in term.places)
    found: dict[Expr, None] = {}
    expressions = [part for axis in nest.axes for part in (axis.low, axis.size)]
    expressions += [s.index for s in nest.stores]
    for term in nest.terms():
        if isinstance(term, (Load, Place)):
            expressions += [term.index, *(place.size for place in term.places)]
        elif isinstance(term, Const) and isinstance(term.value, Expr):
            found[term.value] = None
    for expression in expressions:
        given = {part for part in given_in(expression) if part not in loops}
        found.update(dict.fromkeys(sorted(given, key=lambda part: part.order)))
    return list(found)


#: What code computes of indices.
COMPUTED = frozenset({SUM, MIN, MAX, FLOORDIV, MOD})


def given_in(expression: Any) -> Iterator[Expr]:
    """The numbers that code is given for an index: symbols, and what floats were rounded to."""
    if not isinstance(expression, Expr):
        return
    if expression.op not in COMPUTED:
        yield expression
        return
    atoms = [a for m in expression.poly for a in m] if expression.op is SUM else expression.args
    for atom in atoms:
        yield from given_in(atom)
