"""Transposes through tiles: squares of what lies along another axis than vectors are turned in registers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.expressions import hinted
from kiln.base.symbols import Expr
from kiln.fuse.nest import Axis, Load, Nest
from kiln.generate.cpu import cores, host
from kiln.generate.functions import compute_type
from kiln.generate.lanes import access_cost, shuffled
from kiln.generate.llvm import Value
from kiln.generate.scalar import TYPES
from kiln.generate.streams import Streams, is_large

#: The side of squares in which a large transpose goes: with many elements of each page, and within the cache.
BLOCK = 256
#: The same of one that goes past the caches where memory comes fastest in order, about.
LONG = 768
#: Rows of the result in one task otherwise.
FEW = 16
#: Tasks for each processor, at least.
TASKS = 2
#: Elements ahead that are asked for along the rows of what is turned; where little is foreseen.
AHEAD, AHEAD_SLOW = 64, 16
#: Elements that fit the cache.
CACHED = 1 << 18


@dataclass(frozen=True, eq=False, slots=True)
class Crossing:
    """What lies along `across` while results lie along `along`."""

    along: Axis
    across: Axis
    loads: tuple[Load, ...]
    tile: int = 0
    in_order: bool = False
    """Whether memory is read in long pieces of a few rows of what is turned."""

    @property
    def block(self) -> int:
        """Turns of `across` in one task: `tile`, where that is not 0."""
        if self.tile:
            return self.tile
        if self.in_order:
            size = hinted(self.across.size)
            parts = max(-(-size // LONG), TASKS * cores())
            return -(-size // (parts * FEW)) * FEW
        return BLOCK if hinted(self.across.size) * hinted(self.along.size) > CACHED else FEW


def crossing(nest: Nest, width: int, tile: int = 0) -> Crossing | None:
    """The axes of a nest without folds that some loads run along one of and all stores along the other."""
    if nest.reduced or len(nest.axes) < 2 or width < 4:
        return None
    computed = nest.terms()
    loads = [t for t in computed if isinstance(t, Load) and isinstance(t.index, Expr)]
    long = [a for a in nest.axes if hinted(a.size) >= width]
    for along in long:
        if any(not isinstance(s.index, Expr) or access_cost(s.index, along) != 1 for s in nest.stores):
            continue
        for across in long:
            found = [load for load in loads if _crosses(load, along, across)]
            if across is not along and found:
                in_order = host().reads_in_steps and is_large(nest)
                return Crossing(along, across, tuple(found), tile, in_order)
    return None


def _crosses(load: Load, along: Axis, across: Axis) -> bool:
    """Whether elements of a load lie side by side along `across`, and far from each other along `along`."""
    if load.places or load.valid is not None or load.dtype is torch.bool:
        return False
    far = load.index.poly.get((along.variable,), 0)
    for monomial in load.index.poly:
        if monomial in ((along.variable,), (across.variable,)):
            continue
        steps = along.variable in monomial  # by a product of sizes
        other = [atom for atom in monomial if atom is not along.variable]
        if any(axis.variable in atom.symbols() for atom in other for axis in (along, across)):
            return False
        far = far or steps and hinted(math.prod(other))
    return bool(load.index.poly.get((across.variable,)) == 1 and abs(far) > 4)


def turned(rows: list[Value]) -> list[Value]:
    """The columns of a square: vectors of as many lanes as there are vectors."""
    size = len(rows)
    distance = size // 2
    while distance:
        for i in range(size):
            if not i & distance:
                a, b = rows[i], rows[i + distance]
                low = [lane if not lane & distance else size + lane - distance for lane in range(size)]
                high = [lane + distance if not lane & distance else size + lane for lane in range(size)]
                rows[i], rows[i + distance] = shuffled(a, low, b), shuffled(a, high, b)
        distance //= 2
    return rows


class Tiles(Streams):
    """Emits the tasks of nests with a crossing: a block of `across` and the whole of `along`."""

    crossing: Crossing | None = None

    def foresee(self, load: Load, lanes: int) -> None:
        """Nothing is read line after line where squares are turned."""
        if self.crossing is None:
            super().foresee(load, lanes)

    def tiled(
        self, block: Value, ordinary: Callable[[Any, Any], None], body: Callable[[], None]
    ) -> None:
        """One task; `ordinary` runs along a part of `along` in the usual way, `body` once in vectors."""
        found = self.crossing
        assert found is not None
        fn, width = self.fn, self.width
        size, length = self.index(found.across.size), self.index(found.along.size)
        low = block * found.block
        high = low + found.block
        high = (high < size).where(high, size)
        whole, columns = low + (high - low) / width * width, length / width * width

        def rows(first: Value, last: Value, start: Any, end: Any) -> None:
            """The usual way for some rows."""

            def turn(i: Value, _: list[Value]) -> list[Value]:
                self.push()
                self.variables[found.across.variable] = i
                ordinary(start, end)
                self.pop()
                return []

            fn.loop(first, last, 1, [], turn)

        memory = [
            fn.at_entry(f"alloca [{width * width} x {compute_type(TYPES[load.dtype])}], align 64")
            for load in found.loads
        ]

        def part(left: Value, _: list[Value]) -> list[Value]:
            right = left + BLOCK
            right = (right < columns).where(right, columns)

            def row(first: Value, _: list[Value]) -> list[Value]:
                return fn.loop(
                    left, right, width, [], lambda start, _: self.tile(found, memory, first, start, body)
                )

            return fn.loop(low, whole, width, [], row)

        def strip(left: Value, _: list[Value]) -> list[Value]:
            """Rows of what is read come as a few streams: for stores that leave the caches alone."""
            return fn.loop(
                low, whole, width, [], lambda first, _: self.tile(found, memory, first, left, body)
            )

        if self.streams:
            fn.loop(0, columns, width, [], strip)
        else:
            fn.loop(0, columns, BLOCK, [], part)
        rows(low, whole, columns, length)
        rows(whole, high, 0, found.along.size)

    def tile(
        self, found: Crossing, memory: list[Value], first: Value, start: Value, body: Callable[[], None]
    ) -> list[Value]:
        """A square of results, from row `first` and column `start` on."""
        fn, width = self.fn, self.width
        kinds = [compute_type(TYPES[load.dtype]) for load in found.loads]
        for load, kind, held in zip(found.loads, kinds, memory, strict=True):
            read = [self.across(found, load, first, start + k) for k in range(width)]
            for i, value in enumerate(turned(read)):
                fn.store(value, fn.at(held, i * width, kind))

        def row(i: Value, _: list[Value]) -> list[Value]:
            self.push()
            self.variables[found.across.variable] = first + i
            self.variables[found.along.variable] = start
            self.lanes = width
            for load, kind, held in zip(found.loads, kinds, memory, strict=True):
                self.layers[-1][id(load)] = fn.load(fn.at(held, i * width, kind), kind.wide(width))
            if self.streams:
                for load in self.side_by_side(found):
                    self.prefetch(load, self.index(load.index) + width, 2)
            body()
            self.lanes = 1
            self.pop()
            return []

        fn.loop(0, width, 1, [], row)
        return []

    def side_by_side(self, found: Crossing) -> list[Load]:
        """Loads along the axis of results: the next strip of squares reads the lines beside theirs."""
        loads = [t for t in self.nest.terms() if isinstance(t, Load)]
        near = [t for t in loads if isinstance(t.index, Expr) and not t.places and t not in found.loads]
        axes = {found.along.variable, found.across.variable}
        return [t for t in near if axes <= t.index.symbols() and access_cost(t.index, found.along) == 1]

    def across(self, found: Crossing, load: Load, first: Value, column: Value) -> Value:
        """What a load reads in one column of a square."""
        self.push()
        self.variables[found.across.variable] = first
        self.variables[found.along.variable] = column
        place = self.index(load.index)
        self.pop()
        stored = self.module.held(TYPES[load.dtype])
        address = self.fn.at(self.pointers[load.buffer], place, stored)
        if self.streams:
            ahead = AHEAD_SLOW if host().foresees_little else AHEAD
            self.prefetch(load, place + ahead, 2)  # processors do not foresee the order
        return self.fn.load(address, stored.wide(self.width)).to(compute_type(stored))
