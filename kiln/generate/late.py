"""Stores past the caches that wait for the next row: memory is read and written at once then.

A softmax reads a row, computes, and writes. Where the results of a row are written while the next one is read
and computed, the processor waits for neither. What a row leaves is kept on the stack until then: its
exponentials, each of which is read just before that of the next row takes its place, their sum, and the
variables of the loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kiln.fuse.nest import Fold, Store
from kiln.generate.llvm import F32, I64, Value
from kiln.generate.streams import Streams

#: The phase whose stores wait.
LAST = 2


class Late(Streams):
    """Emits the last phase of rows beside the first of those after them."""

    late: tuple[Store, ...] = ()
    """The stores that wait, where code is emitted."""

    along: Callable[..., list[Value]]
    over_powers: Callable[[], tuple[Fold, Fold] | None]
    phase: Callable[[list[Fold], list[Store]], None]
    vectors_at_once: Callable[[list[Fold], list[Store]], int]

    def begin_late(self) -> None:
        """Find the stores that wait: all there are, of the shares of a row's exponentials."""
        stores = [s for s in self.nest.stores if not s.kept]
        if not self.streams or not stores or any(s.phase != LAST for s in stores):
            return
        self.keep_costly(LAST)
        found = self.over_powers()
        if found is None or self.nest.folds() != list(found):
            return
        self.late, self.total = tuple(stores), found[1]
        self.left = [self.fn.at_entry(f"alloca {kind}") for kind in self._kinds()]
        self.fn.store(self.fn.constant(0, I64), self.left[0])

    def _kinds(self) -> list[Any]:
        """The types of what a row leaves: that it was there, its sum, the variables of its loops."""
        return [I64, F32, *[I64 for _ in self.outer()]]

    def leave_row(self) -> None:
        """Keep what the stores of this row need."""
        variables = [self.variables[a.variable] for a in self.outer()]
        found = [self.fn.constant(1, I64), self.value(self.total), *variables]
        for value, address in zip(found, self.left, strict=True):
            self.fn.store(value, address)

    def take_row(self) -> Value:
        """Take what the row before has left; 1 where there is one, 0 in the first row."""
        found = zip(self.left, self._kinds(), strict=True)
        there, *self.taken = [self.fn.load(address, kind) for address, kind in found]
        return there

    @contextmanager
    def row_before(self) -> Iterator[None]:
        """What is emitted here is for the row before."""
        axes = [a.variable for a in self.outer()]
        total, *variables = self.taken
        now, here = (self.layers, self.indices, self.now), [self.variables.get(a) for a in axes]
        self.variables.update(zip(axes, variables, strict=True))
        self.layers, self.indices, self.now = [{id(self.total): total}], [{}], LAST
        yield
        self.layers, self.indices, self.now = now
        self.variables.update({a: v for a, v in zip(axes, here, strict=True) if v is not None})

    def store_edges(self, end: Value, step: int) -> tuple[Value, Value]:
        """Store what is before the first line of the row before, and what is left after steps from there on.

        Gives where the steps begin and how much they are in all.
        """
        end = self.take_row() * end
        with self.row_before():
            first = self.fn.constant(0, I64) if self.uneven is None else self.first_line(self.uneven, end)
            whole = (end - first) / step * step
            streams, self.streams = self.streams, []
            for low, high in ((0, first), (first + whole, end)):
                self.along(self.vector, low, high, [], self._store_here)
            self.streams = streams
        return first, whole

    def _store_here(self, carried: list[Value]) -> list[Value]:
        self.even_and_odd = ({}, {}) if self.lanes > self.width else None
        for store in self.late:
            self.store(store)
        self.even_and_odd = None
        return carried

    def store_late(self, place: Value, step: int) -> None:
        """Store a step of the row before, from a place on."""
        assert self.vector is not None
        lanes = self.vectors_at_once([], list(self.late)) * self.width
        for start in range(0, step, lanes):
            with self.row_before():
                self.variables[self.vector.variable], outside, self.lanes = place + start, self.lanes, lanes
                self._store_here([])
                self.lanes = outside

    def end_late(self) -> None:
        """Store the last row."""
        fn = self.fn
        if not self.late:
            return

        def last(_: Value, carried: list[Value]) -> list[Value]:
            self.take_row()
            with self.row_before():
                self.phase([], list(self.late))
            return carried

        fn.loop(0, fn.load(self.left[0], I64), 1, [], last)
        self.late = ()
