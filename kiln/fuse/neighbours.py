"""Neighbours at once: a thread makes several results side by side, so that what they share is read once.

Results of a convolution of one channel each have the filters in common, and most of what they see of the
image; the sums that are the gradient of the filters have the other gradient in common.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

from kiln.base.expressions import MOD
from kiln.base.symbols import Expr, Scope
from kiln.fuse.axes import axis
from kiln.fuse.merge import substituted
from kiln.fuse.nest import (
    Apply,
    Axis,
    Load,
    Nest,
    Place,
    Store,
    Term,
    changed,
    children,
    rebuilt,
    terms,
)
from kiln.fuse.peel import KNOWN, border_of, decided, holds, in_line
from kiln.fuse.rolled import WIDE, rolled
from kiln.fuse.split import SUMS, along_memory, products_of

#: Products that a turn is made of, at most: the driver's compiler takes half a second for 400 of them.
PRODUCTS = 200
#: Results at once at most; products of neighbours that a turn adds up, by what their number is a multiple of.
RESULTS, ADDED = 8, (4, 7, 5, 3, 2)
#: Results at least for each of those that a thread makes: others are too few to keep a GPU busy.
THREADED = 1 << 17
#: Elements of one value that a turn reads, and others that are the same for neighbours, at least.
SEEN, SHARED = 4, 4
#: Whether rows of wide filters are loops.
ROWS = True
#: Places of a factor that each have a sum of their own, at most: of more, registers hold too few.
PLACES = 9


def is_plain(nest: Nest) -> bool:
    """Whether the lengths of loops are known, and all that is read is at places that follow from theirs."""
    known = all(type(a.size) is int and a.low == 0 for a in nest.axes)
    if not known or nest.ordered or nest.part is not None or len(nest.axes) < 2:
        return False
    return not any(term.places for term in nest.terms() if isinstance(term, (Load, Place)))


# Results


def results_at_once(nest: Nest) -> Nest:
    """The nest with several results in a turn: neighbours, and those that see other places of a filter."""
    if nest.reduced or not is_plain(nest):
        return nest
    inner = in_line(nest)
    found = [a for a in nest.axes if a is not inner and shares(nest, inner, a)]
    if not found:
        return nest
    line = found[-1]
    counts = {a: n for a in nest.axes if (n := remainders(nest, a)) > 1}
    each = counts.get(line, 1)
    each_of = sum(map(is_product, nest.terms()))
    most = min(RESULTS, PRODUCTS // each_of, nest.volume() // THREADED) // math.prod(counts.values())
    counts[line] = each * divisor(line.size // each, max(most, 1))
    scope = inner.variable.scope
    return unrolled(rolled(nest, scope) if ROWS else nest, counts, scope)


def length_of(nest: Nest) -> int:
    """About how many terms there are to write for a nest, neighbours counted."""
    found = nest.terms()
    products = sum(map(is_product, found))
    return len(found) * (RESULTS if SHARED - 1 <= products < WIDE else 1)


def divisor(size: int, most: int) -> int:
    """The largest number, up to `most`, that a size is a multiple of."""
    return next(n for n in range(most, 0, -1) if size % n == 0)


def shares(nest: Nest, inner: Axis, along: Axis) -> bool:
    """Whether neighbours along a loop see much of the same: many elements of a value, times the same ones."""
    found = nest.terms()
    if sum(map(is_product, found)) < SHARED - 1:
        return False
    same, seen = 0, dict[Any, int]()
    for load in {(t.buffer, t.index) for t in found if isinstance(t, Load)}:
        if isinstance(load[1], Expr) and inner.variable in load[1].symbols():
            moves = along.variable in load[1].symbols()
            same += not moves
            seen[load[0]] = seen.get(load[0], 0) + moves
    return same >= SHARED and max(seen.values()) >= SEEN


def is_product(term: Term) -> bool:
    return isinstance(term, Apply) and term.op == "addcmul"


def remainders(nest: Nest, along: Axis) -> int:
    """The number that a loop's place is divided by for a condition, where its length is a multiple of it."""
    for term in nest.terms():
        if isinstance(term, Place) and isinstance(term.index, Expr) and term.index.op is MOD:
            by = term.index.args[1]
            if along.variable in term.index.symbols() and type(by) is int and along.size % by == 0:
                return by
    return 1


def unrolled(nest: Nest, counts: dict[Axis, int], scope: Scope) -> Nest:
    """The nest with so many turns of each of these loops in one."""
    fewer = {a: axis(scope, a.size // n, a.variable.name) for a, n in counts.items() if n < a.size}
    sides = [[{a.variable: (fewer[a].variable * n if a in fewer else 0) + i} for i in range(n)]
             for a, n in counts.items()]  # fmt: skip
    moves = [dict(itertools.chain(*[part.items() for part in parts])) for parts in itertools.product(*sides)]
    axes = tuple([
        replace(fewer[a], reduced=a.reduced) if a in fewer else a for a in nest.axes
        if a in fewer or a not in counts
    ])  # fmt: skip
    return replace(at_once(nest, axes, moves, scope), rolled=nest.rolled)


# Sums


def sums_at_once(nest: Nest, scope: Scope) -> Nest:
    """The nest with sums of products at several places in a turn, where one factor is the same for them."""
    if not nest.reduced or not is_plain(nest):
        return nest
    folds, inner = nest.folds(), along_memory(nest)
    plain = len(folds) == 1 and products_of(folds[0]) is not None and not inner.reduced
    if not plain or not all(store.kept for store in nest.stores) or len(nest.reduced) < 2:
        return nest
    places = [a for a in nest.kept if a is not inner]
    if not SUMS <= math.prod([a.size for a in places]) <= PLACES:
        return nest
    apart = {a.variable for a in places}
    loads = [t for t in nest.terms() if isinstance(t, Load) and isinstance(t.index, Expr)]
    if len(loads) != 2 or sum(apart.isdisjoint(t.index.symbols()) for t in loads) != 1:
        return nest
    nest = unrolled(nest, {a: a.size for a in places}, scope)
    first, second, *_ = nest.reduced
    if len(nest.reduced) > 2:
        nest = as_one(nest, first, second, scope)
    line = nest.reduced[-1]
    many = next((n for n in ADDED if line.size % n == 0), 1)
    return replace(added(nest, line, many, scope), several=False)


def as_one(nest: Nest, outer: Axis, inner: Axis, scope: Scope) -> Nest:
    """The nest with two of its loops as one, which can be cut into more parts."""
    both = replace(axis(scope, outer.size * inner.size, outer.variable.name), reduced=True)
    moves = {outer.variable: both.variable // inner.size, inner.variable: both.variable % inner.size}
    axes = tuple([both if a is outer else a for a in nest.axes if a is not inner])
    return at_once(nest, axes, [moves], scope)


def added(nest: Nest, line: Axis, many: int, scope: Scope) -> Nest:
    """The nest with several turns of a loop that is folded over added up in one."""
    if many == 1:
        return nest
    fewer = replace(axis(scope, line.size // many, line.variable.name), reduced=True)
    axes = tuple([fewer if a is line else a for a in nest.axes])
    same: dict[Any, Term] = {}
    made: dict[int, Term] = {}
    values = [fold.value for fold in nest.folds()]
    parts = [
        moved(values, {line.variable: fewer.variable * many + i}, same, scope) for i in range(many)
    ]  # fmt: skip
    for fold, *turns in zip(nest.folds(), *parts, strict=True):
        total = turns[0]
        for turn in turns[1:]:
            total = Apply("addcmul", (total, *children(turn)), turn.dtype)
        made[id(fold)] = replace(fold, value=total)
    return replace(nest, axes=axes, stores=changed(nest.stores, made))


# Terms at other places


def at_once(
    nest: Nest, axes: tuple[Axis, ...], places: list[dict[Any, Any]], scope: Scope | None = None
) -> Nest:
    """The nest at several places in each turn; what is the same for some of them is one term.

    With a scope, what is known of conditions there is made use of.
    """
    stores: list[Store] = []
    same: dict[Any, Term] = {}
    for moves in places:
        values = moved([s.value for s in nest.stores], moves, same, scope)
        stores += [
            replace(s, index=substituted(s.index, moves), value=value)
            for s, value in zip(nest.stores, values, strict=True)
        ]
    return Nest(axes, stores, several=True)


def moved(
    roots: list[Term], moves: dict[Any, Any], same: dict[Any, Term], scope: Scope | None
) -> list[Term]:
    """Terms with other places of loops; `same` are those made before."""
    made: dict[int, Term] = {}
    for term in terms(roots):
        new = term if all(made[id(child)] is child for child in children(term)) else rebuilt(term, made)
        if isinstance(new, (Load, Place)) and isinstance(new.index, Expr):
            index = substituted(new.index, moves)
            key = (index, new.buffer, id(new.valid)) if isinstance(new, Load) else (index, new.dtype)
            if key not in same:
                same[key] = replace(new, index=index)
            new = same[key]
        elif isinstance(new, Apply):
            new = same.setdefault((new.op, new.dtype, *map(id, new.args)), new)
        made[id(term)] = new if scope is None else settled(new, scope)
    return [made[id(root)] for root in roots]


def settled(term: Term, scope: Scope) -> Term:
    """A condition that is known, or what a term over such a one is."""
    found = holds(scope, *border) if (border := border_of(term)) is not None else None
    return decided(term) if found is None else KNOWN[found]
