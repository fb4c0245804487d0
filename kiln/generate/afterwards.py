"""What comes once for each row, for the rows of a task in one loop after them, in vectors across them.

A logarithm takes as long for a row as for sixteen: some hundred cycles, in which the next row can only be
begun.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from kiln.base.expressions import hinted
from kiln.base.symbols import Expr
from kiln.fuse.costs import COSTLY
from kiln.fuse.nest import Apply, Axis, Fold, Load, Place, children
from kiln.generate import avx512
from kiln.generate.functions import compute_type
from kiln.generate.lanes import row_terms
from kiln.generate.llvm import Value
from kiln.generate.scalar import TYPES
from kiln.generate.streams import Streams

#: Rows of a task, at least, and rows that are worth it, so that there are some tasks.
TOGETHER, FEWEST = avx512.LANES, 1024
#: Elements of a row that is so short that what comes once for it counts.
LONGEST = 1 << 14


class Afterwards(Streams):
    """Emits such stores."""

    masks = False
    blocked: bool
    along: Callable[..., list[Value]]
    held: tuple[tuple[Fold, Value], ...] = ()
    """The folds that wait for the other rows of a task, and where."""
    first: Value
    """The first row of a task."""

    @cached_property
    def waiting_folds(self) -> list[Fold]:
        """What is folded of a row where all that it stores can wait; nothing where it need not."""
        nest, outer, vector = self.nest, self.outer(), self.vector
        if not self.masks or self.blocked or vector is None or not vector.reduced or not outer:
            return []
        if nest.part is not None or nest.ordered or hinted(outer[-1].size) < FEWEST:
            return []
        if self.row_length() > LONGEST or not all(s.kept and not s.adds for s in nest.stores):
            return []
        if any(f.running or f.dtype is torch.bool for f in nest.folds()):
            return []
        found = row_terms([s.value for s in nest.stores])
        if not any(isinstance(t, Apply) and t.op in COSTLY for t in found):
            return []
        inside = {a.variable for a in nest.reduced}
        places = [t.index for t in found if isinstance(t, (Load, Place)) and isinstance(t.index, Expr)]
        if not all(inside.isdisjoint(index.symbols()) for index in places):
            return []
        wanted = {id(c) for t in found for c in children(t)} | {id(s.value) for s in nest.stores}
        return [f for f in nest.folds() if id(f) in wanted]

    def hold(self, block: int, low: Value) -> None:
        """Let what is folded of the rows from `low` on wait, of a block of them at most."""
        kinds = [compute_type(TYPES[fold.dtype]) for fold in self.waiting_folds]
        memory = [self.fn.at_entry(f"alloca [{block} x {kind}], align 64") for kind in kinds]
        self.held, self.first = tuple(zip(self.waiting_folds, memory, strict=True)), low

    def keep_folds(self, axis: Axis) -> None:
        """Keep those of the row at hand."""
        for (fold, _), address in zip(self.held, self.of_row(axis), strict=True):
            self.fn.store(self.value(fold), address)

    def of_row(self, axis: Axis) -> list[Value]:
        """Where the folds of a row are, or those of some rows from it on."""
        place = self.variables[axis.variable] - self.first
        return [self.fn.at(memory, place, compute_type(TYPES[fold.dtype])) for fold, memory in self.held]

    def store_held(self, axis: Axis, low: Value, high: Value) -> None:
        """Store what waited, of rows up to `high`."""
        vector, self.vector = self.vector, axis

        def some(_: list[Value]) -> list[Value]:
            for (fold, _memory), address in zip(self.held, self.of_row(axis), strict=True):
                kind = compute_type(TYPES[fold.dtype]).wide(self.lanes)
                self.layers[-1][id(fold)] = self.fn.load(address, kind)
            for store in self.nest.stores:
                self.store(store)
            return []

        self.along(axis, low, high, [], some)
        self.vector, self.held = vector, ()
