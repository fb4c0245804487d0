"""Nests for machines whose threads read several neighbours at once: such reads need no conditions.

A read under a condition is one element at a time. Where the place is one of the buffer's whatever the
condition says, it is read anyway: what stands there is not used. And a row whose length is no multiple of
what is read at once, in memory where the next row starts at one, is folded over up to there, without what is
behind its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch

from kiln.base.expressions import grows
from kiln.base.graph import TensorSpec, reached
from kiln.base.symbols import Expr, Scope
from kiln.fuse.axes import axis
from kiln.fuse.costs import COSTLY
from kiln.fuse.merge import merged, rewritten, substituted
from kiln.fuse.nest import (
    Apply,
    Axis,
    Buffer,
    Const,
    Fold,
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
from kiln.fuse.peel import border_of, holds
from kiln.fuse.split import along_memory

#: Elements that are read at once at most, and of rows that are worth it at least.
STEP, LONG = 8, 1024
#: What folds start with, where elements that do not count can be given that.
NEUTRAL = {"sum": 0.0, "amax": -math.inf, "amin": math.inf}


def apart(nest: Nest, scope: Scope) -> list[Nest]:
    """The nest, or two: what computes much by itself, and sums of its columns, which have fewer threads."""
    inside = [s for s in nest.stores if is_inside(s) and is_costly([s])]
    if not inside or not nest.reduced or along_memory(nest).reduced:
        return [nest]
    read: dict[int, Term] = {id(s.value): Load(s.buffer, s.index, s.buffer.dtype) for s in inside}
    others = [s for s in nest.stores if s not in inside]
    rest = changed(others, read)
    if is_costly(rest):
        return [nest]
    each = replace(nest, axes=unfolded((*nest.reduced, *nest.kept)), stores=inside)
    return [merged(each, scope), replace(nest, stores=rest)]


def is_costly(stores: list[Store]) -> bool:
    return any(isinstance(t, Apply) and t.op in COSTLY for t in terms(s.value for s in stores))


class Aligning:
    """The memory of buffers, and what indices into it can be."""

    def __init__(self, scope: Scope, spec_of: Callable[[Buffer], TensorSpec]) -> None:
        self.scope, self.spec_of = scope, spec_of
        self.lengths: dict[Buffer, int] = {}

    def run(self, nest: Nest) -> list[Nest]:
        """The nest with reads without needless conditions, over rows of whole reads; or two of the same."""
        found = nest.terms()
        read = [t for t in found if isinstance(t, Load)]
        freed = {id(load): valid for load in read if (valid := self.needed(load)) is not load.valid}
        places = [c.term for t in found if isinstance(t, (Load, Place)) for c in t.places]
        asked = {id(term): value for term in places if (value := self.always(term)) is not term}
        if freed or asked:
            nest = replace(nest, stores=unmasked(nest.stores, freed, asked))
        inside = [s for s in nest.stores if is_inside(s)]
        rest = replace(nest, stores=[s for s in nest.stores if s not in inside])
        rows = self.whole_rows(rest)
        if rows is rest:
            return [nest]
        each = replace(nest, axes=unfolded(nest.axes), stores=inside)
        return [rows, merged(each, self.scope)] if inside else [rows]

    def always(self, term: Term) -> Term:
        """A place without a condition of other loops than its own: it is asked for in some of those."""
        if not isinstance(term, Apply) or term.op != "where":
            return term
        condition, value, _ = term.args

        def below(part: Term) -> Iterable[Term]:
            return children(replace(part, valid=self.needed(part)) if isinstance(part, Load) else part)

        read = [part for part in reached([value], below) if isinstance(part, (Load, Place))]
        used = {symbol for part in read if isinstance(part.index, Expr) for symbol in part.index.symbols()}
        return value if self.elsewhere(condition, used) else term

    def inside(self, load: Load) -> bool:
        """Whether an index is always one of the buffer's."""
        if load.places:
            return False
        length = self.lengths.get(load.buffer)
        if length is None:
            spec = self.spec_of(load.buffer)
            known = all(type(n) is int for n in (*spec.shape, *spec.stride)) and 0 not in spec.shape
            ends = [(n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True)] if known else [-1]
            length = 1 + sum(ends)
            self.lengths[load.buffer] = length
        low, high = self.scope.bounds(load.index)
        return low >= 0 and high < length

    def needed(self, load: Load) -> Term | None:
        """Of the condition of a read, what says that the place exists."""
        if load.valid is None or self.inside(load):
            return None
        if load.places or not isinstance(load.index, Expr):
            return load.valid
        parts = conjuncts(load.valid)
        kept = [part for part in parts if not self.elsewhere(part, load.index.symbols())]
        if len(kept) == len(parts) or not kept:
            return load.valid
        made = kept[0]
        for part in kept[1:]:
            made = Apply("bitwise_and", (made, part), torch.bool)
        return made

    def elsewhere(self, condition: Term, used: Collection[Any]) -> bool:
        """Whether a condition is of other loops than those used, and holds in some turn of its own."""
        name, place, border = border_of(condition) or ("eq", 0, 0)
        if name == "eq" or not isinstance(place, Expr) or not place.symbols().isdisjoint(used):
            return False
        return holds(self.scope, name, place, border) is not False

    # Rows

    def whole_rows(self, nest: Nest) -> Nest:
        """The nest over rows up to where the next read at once would start, if their memory is there."""
        if len(nest.reduced) != 1 or not all(store.kept for store in nest.stores):
            return nest
        (row,) = nest.reduced
        if type(row.size) is not int or row.low != 0 or row.size < LONG or row.size % STEP == 0:
            return nest
        folds = nest.folds()
        plain = all(f.kind in NEUTRAL and f.place is None and f.dtype.is_floating_point for f in folds)
        longer = replace(axis(self.scope, -(-row.size // STEP) * STEP, row.variable.name), reduced=True)

        moves: dict[Any, Any] = {row.variable: longer.variable}
        stores = rewritten(nest.stores, lambda index: substituted(index, moves))
        along = [
            t for t in terms(s.value for s in stores)
            if isinstance(t, Load) and isinstance(t.index, Expr) and longer.variable in t.index.symbols()
        ]  # fmt: skip
        if not plain or not along or not all(self.inside(t) and starts_whole(t, longer) for t in along):
            return nest
        axes = tuple([longer if a is row else a for a in nest.axes])
        return replace(nest, axes=axes, stores=without_rest(stores, longer, row.size))


def conjuncts(condition: Term) -> list[Term]:
    """The conditions that hold where a condition holds."""
    if isinstance(condition, Apply) and condition.op == "bitwise_and" and condition.dtype is torch.bool:
        return [part for arg in condition.args for part in conjuncts(arg)]
    return [condition]


def is_inside(store: Store) -> bool:
    """Whether a store has nothing to do with folds."""
    return not store.kept and store.phase == 0 and not any(isinstance(t, Fold) for t in terms([store.value]))


def unfolded(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple([replace(a, reduced=False) for a in axes])


def unmasked(stores: list[Store], freed: dict[int, Term | None], asked: dict[int, Term]) -> list[Store]:
    """The stores with other conditions of reads, by the reads' ids, and places asked for by other terms."""
    made: dict[int, Term] = {}

    def built(term: Term) -> Term:
        if id(term) not in made:
            new = replace(term, valid=freed[id(term)]) if id(term) in freed else term  # type: ignore[arg-type]
            below = {id(child): built(child) for child in children(new)}
            at_places = [place.term for place in getattr(new, "places", ()) if id(place.term) in asked]
            below |= {id(old): built(asked[id(old)]) for old in at_places}
            made[id(term)] = rebuilt(new, below)
        return made[id(term)]

    return [replace(store, value=built(store.value)) for store in stores]


def starts_whole(load: Load, along: Axis) -> bool:
    """Whether the elements of a row lie side by side, and each row starts where a read at once does."""
    rest = [factor for monomial, factor in load.index.poly.items() if monomial != (along.variable,)]
    return grows(load.index, along.variable) == 1 and all(factor % STEP == 0 for factor in rest)


def without_rest(stores: list[Store], row: Axis, end: int) -> list[Store]:
    """The stores with folds over the elements before the end alone."""
    before = Apply("lt", (Place(row.variable), Const(end, torch.int64)), torch.bool)
    made: dict[int, Term] = {}
    found: dict[int, Term] = {}  # what the largest is of, without the rest: what is less than it is, too

    def counted(fold: Fold) -> Fold:
        value = built(fold.value)
        if isinstance(value, Apply) and value.op == "exp" and below_largest(value.args[0]):
            return replace(fold, value=value)
        if id(fold.value) in found:
            value = found[id(fold.value)]
        else:
            value = Apply("where", (before, value, Const(NEUTRAL[fold.kind], value.dtype)), value.dtype)
        if fold.kind == "amax":
            found[id(fold.value)] = value
        return replace(fold, value=value)

    def built(term: Term) -> Term:
        if id(term) in made:
            return made[id(term)]
        new: Any = term
        if isinstance(term, Fold):
            new = counted(term)
        elif isinstance(term, Apply) and below_largest(term):
            largest = built(term.args[1])
            new = replace(term, args=(found[id(term.args[0])], largest))
        elif children(term):
            new = rebuilt(term, {id(child): built(child) for child in children(term)})
        made[id(term)] = new
        return new  # type: ignore[no-any-return]

    def below_largest(term: Term) -> bool:
        element, fold = term.args if isinstance(term, Apply) and term.op == "sub" else (term, None)
        if not isinstance(fold, Fold):
            return False
        return fold.kind == "amax" and (fold.value is element or fold.value is found.get(id(element)))

    return [replace(store, value=built(store.value)) for store in stores]
