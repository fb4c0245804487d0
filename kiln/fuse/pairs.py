"""Rows in parts of one length: each leaves its largest value and the sum of powers below that.

Few long rows are badly shared by many processors, parts of them are not. A second stage makes of the parts of
a row what the row would have given, and a fold over rows, as the mean of their losses, goes with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kiln.base.graph import TensorSpec
from kiln.base.symbols import Scope
from kiln.fuse.axes import axis
from kiln.fuse.merge import rewritten, substituted
from kiln.fuse.nest import Apply, Buffer, Const, Fold, Load, Nest, Store, Term, changed, read_again, terms
from kiln.fuse.split import Cuts, Split, pair_of, results

#: Bytes of a part at least and at most: so many are under way to a block. Parts of all rows at most.
SHORTEST, LONGEST, MOST = 24 << 10, 43 << 10, 1 << 13
#: Bytes that threads read at once: a part has whole ones.
AT_ONCE = 16
#: Processors that share rows; they do badly where one has so many times the rows that each has on average.
PROCESSORS, UNEVEN = 132, 1.1


def in_pairs(nest: Nest, scope: Scope, name: str, cuts: Cuts) -> Split | None:
    """Loops over parts of rows and loops over rows; None where nothing is gained or it cannot be."""
    found = largest_and_sum(nest) if cuts.at_once else None
    if found is None or len(nest.reduced) != 1 or any(type(a.size) is not int or a.low for a in nest.axes):
        return None
    parts = parts_of(results(nest), nest.reduced[0].size * bytes_of(found[0]))
    return Pairs(nest, *found, parts, scope, name).run() if parts else None


def parts_of(rows: int, size: int) -> int:
    """How many parts of one length a row of so many bytes is cut into; 0 for none."""
    for parts in range(max(-(-size // LONGEST), 2), size // SHORTEST + 1):
        if size % (parts * AT_ONCE) == 0:
            return parts if PROCESSORS < parts * rows <= MOST else 0
    return 0


def bytes_of(largest: Fold) -> int:
    """The bytes that are read for an element of what is folded; 0 where that is not of one tensor."""
    loads = {t.buffer: int(t.dtype.itemsize) for t in terms([largest.value]) if isinstance(t, Load)}
    return next(iter(loads.values())) if len(loads) == 1 else 0


def copies(nest: Nest) -> bool:
    """Whether elements are stored too."""
    return any(not store.kept for store in nest.stores)


def uneven(nest: Nest) -> bool:
    """Whether some processors would have many more rows than others."""
    rows = results(nest)
    return rows > PROCESSORS and -(-rows // PROCESSORS) * PROCESSORS > UNEVEN * rows


def largest_and_sum(nest: Nest) -> tuple[Fold, Fold] | None:
    """The folds of a nest where they are the largest of a row and the sum of powers below it, in f32.

    All else that is stored is one value for a row, or of what is read alone.
    """
    folds = nest.folds()
    if any(f.dtype != torch.float32 or f.value.dtype != torch.float32 for f in folds):
        return None
    if any(not s.kept and s.phase for s in nest.stores):
        return None
    return pair_of([f for f in folds if not f.phase], [f for f in folds if f.phase])


class Pairs:
    """One cut of rows into parts."""

    def __init__(self, nest: Nest, largest: Fold, total: Fold, parts: int, scope: Scope, name: str) -> None:
        self.nest, self.largest, self.total, self.parts = nest, largest, total, parts
        self.scope, self.name = scope, name
        (self.along,) = nest.reduced
        self.part = axis(scope, parts, f"{self.along.variable.name}_p")
        self.stores: list[Store] = [s for s in nest.stores if not s.kept]  # of the parts
        self.scratch: dict[Buffer, TensorSpec] = {}
        self.row: Any = 0
        for a in nest.kept:
            self.row = self.row * a.size + a.variable

    def run(self) -> Split:
        kind = torch.float32
        lowest = Apply("eq", (self.largest, Const(-math.inf, kind)), torch.bool)  # then there are no powers
        sum_or_none = Apply("where", (lowest, Const(0.0, kind), self.total), kind)
        tops, sums = self.of_parts(self.largest, 1), self.of_parts(sum_or_none, 2)
        top = tree(tops, lambda a, b: Apply("maximum", (a, b), kind))
        scales = [Apply("exp", (Apply("sub", (each, top), kind),), kind) for each in tops]
        scaled = [Apply("mul", pair, kind) for pair in zip(sums, scales, strict=True)]
        total = tree(scaled, lambda a, b: Apply("add", (a, b), kind))
        known = {id(self.largest): top, id(self.total): total}
        ends = [s for s in self.nest.stores if s.kept]
        for term in terms(s.value for s in ends):  # at a place that is data: read while the parts are
            if isinstance(term, Load) and term.places and not any(isinstance(t, Fold) for t in terms([term])):
                known[id(term)] = self.of_parts(term, 1)[0]
        final = [replace(s, phase=0, kept=False) for s in changed(ends, known)]
        return Split([self.first(), Nest(self.nest.kept, final)], self.scratch)

    def first(self) -> Nest:
        """The loops over parts."""
        length = self.along.size // self.parts
        inner = replace(axis(self.scope, length, self.along.variable.name), reduced=True)
        moves = {self.along.variable: self.part.variable * length + inner.variable}
        stores = rewritten(self.stores, lambda index: substituted(index, moves))
        return Nest((*self.nest.kept, self.part, inner), stores)

    def of_parts(self, value: Term, phase: int) -> list[Term]:
        """A value of each part of a row, as the second stage reads it."""
        rows = results(self.nest)
        held = Buffer(f"{self.name}_part{len(self.scratch)}", value.dtype)
        self.scratch[held] = TensorSpec((self.parts * rows,), (1,), held.dtype, torch.device("cpu"))
        self.stores.append(Store(held, self.part.variable * rows + self.row, value, phase, True))
        return [Load(held, self.row + number * rows, held.dtype) for number in range(self.parts)]


def tree(values: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Values as one, neighbours first."""
    while len(values) > 1:
        paired = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[len(paired) * 2 :]
    return values[0]


def with_fold(rows: Split, nest: Nest, scope: Scope, name: str, cuts: Cuts) -> Split | None:
    """Rows in parts, whose second stage is a nest that folds what it gives; None where they do not fit."""
    if not cuts.at_once or len(nest.axes) != 1 or not nest.reduced:
        return None
    cut: Split | None = rows
    if len(rows.nests) == 1:
        home = rows.nests[0]
        read = set(nest.buffers()[0])
        follows = any(s.kept and s.buffer in read for s in home.stores)
        cut = in_pairs(home, scope, name, cuts) if follows and uneven(home) else None
    if cut is None or len(cut.nests) != 2 or not cut.scratch or len(cut.nests[1].kept) != len(nest.axes):
        return None
    last, (down,) = cut.nests[1], nest.axes
    (row, *inner) = last.axes
    if inner or row.size != down.size or row.low != 0 or down.low != 0:
        return None
    moved = rewritten(last.stores, lambda index: substituted(index, {row.variable: down.variable}))
    known = read_again(nest.stores, moved, lambda store: store.buffer.dtype.itemsize >= 4)
    if not known or {*nest.buffers()[1]} & {*last.used()}:
        return None
    folded = changed(nest.stores, known)
    return Split([cut.nests[0], Nest(nest.axes, [*moved, *folded])], {**rows.scratch, **cut.scratch})
