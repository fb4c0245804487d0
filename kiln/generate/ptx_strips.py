"""Strips of rows: a team takes one row after the other and keeps the sums of its columns in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kiln.base.symbols import Expr
from kiln.fuse.nest import Apply, Axis, Const, Load, Store, Term
from kiln.generate.grid import LOOPED, WIDEST, key_of, phases_of, power_of_two, reduced_extent, rows_ahead
from kiln.generate.llvm import F32, I8, I32, I64, Type, Value
from kiln.generate.ptx import GridEmitter

TOGETHER = 16 << 10  # bytes of neighbouring rows that a strip takes at once
QUAD = 4  # columns that a thread sums at the end
REGISTERS = 72  # of a thread of a large block, so that blocks of the second stage start beside it


class StripEmitter(GridEmitter):
    """Writes a nest over rows in parts; what it adds to columns is stored once a part.

    What a row reads is on its way while the rows before it are worked on.
    """

    def emit(self) -> None:
        self.module.contracts = True
        if self.grid.threads > LOOPED:
            self.fn.attributes += f' "nvvm.maxnreg"="{REGISTERS}"'
        self.read_ahead: dict[Any, Value] = {}  # what was read before it is needed, by its key and turn
        self.raw: Value | None = None  # what was read last
        self.sums: dict[tuple[Store, int], Value] = {}
        self.kept = rows_ahead(self.nest, self.grid) if self.grid.shared else {}
        self.stage = sum(row.bytes for row in self.kept.values())  # bytes of what is kept of a row
        self.slot: Value | None = None  # where that begins, for the row that is worked on
        super().emit()

    def count(self) -> Any:
        """The strips."""
        assert self.nest.part is not None
        return -(-self.nest.kept[0].size // self.nest.part.rows)

    def blocks(self) -> Any:
        return self.count()

    def team(self) -> None:
        fn, grid, (row,), part = self.fn, self.grid, self.nest.kept, self.nest.part
        assert part is not None
        self.mine = (self.unsigned(self.thread) % grid.team).to(I64)
        team = self.unsigned(self.thread) / grid.team
        self.numbered = team + 1
        strip = self.unsigned(self.block).to(I64)
        first, (at, end) = team.to(I64), self.rows_of(row, strip)
        loads = {key_of(t): t for t in self.nest.terms() if isinstance(t, Load)}
        plain = [t for t in loads.values() if t.valid is None and not t.places]
        own = [t for t in plain if isinstance(t.index, Expr) and row.variable in t.index.symbols()]
        copied = [t for t in own if self.can_copy(t)]
        own = [t for t in own if t not in copied]
        depth = grid.shared // self.stage if copied else 1
        last = self.unsigned((end - 1).to(I32))

        def near(place: Value) -> None:
            there = self.unsigned(place.to(I32))
            self.variables[row.variable] = at((there < last).where(there, last))

        for stage in range(depth if copied else 0):
            near(first + stage * grid.rows)
            self.copy_row(copied, fn.constant(stage * self.stage, I32))
        fixed = self.read_ahead = self.rows_read([t for t in plain if t not in own and t not in copied])
        near(first)
        ahead = self.rows_read(own)
        added = [s for s in self.nest.stores if s.adds]
        places = [(store, turn) for store in added for turn in range(grid.turns)]
        zero = fn.constant(0.0, F32.wide(grid.width))

        def body(place: Value, carried: list[Value]) -> list[Value]:
            sums, (other, slot, *here) = carried[: len(places)], carried[len(places) :]
            self.push()
            near(place + grid.rows)
            following = self.rows_read(own)
            self.pop()
            self.push()
            self.turns = {}
            self.other, self.slot = other, slot
            self.read_ahead = {**fixed, **dict(zip(ahead, here, strict=True))}
            self.sums = dict(zip(places, sums, strict=True))
            self.variables[row.variable] = at(self.unsigned(place.to(I32)))
            if copied:
                self.wait_but(depth - 1)
            self.row()
            self.pop()
            if copied:
                self.push()
                near(place + depth * grid.rows)
                self.copy_row(copied, self.slot)
                self.pop()
            self.slot = None
            after = slot + self.stage
            after = (after < depth * self.stage).where(after, 0)
            return [*self.sums.values(), other ^ 1, after, *following.values()]

        turns = [fn.constant(0, I64), fn.constant(0, I32)]
        totals = fn.loop(first, end, grid.rows, [*[zero] * len(places), *turns, *ahead.values()], body)
        if copied:
            self.wait_but(0)
        if grid.rows > 1:  # teams with a row less meet as often: tools that look for races count barriers
            with self.branch(first + (end - 1) / grid.rows * grid.rows >= end):
                self.barrier()
        self.numbered = None
        self.variables[part.variable] = strip
        self.finish([(*place, total) for place, total in zip(places, totals, strict=False)], team)
        self.lanes = 1

    def rows_of(self, row: Axis, strip: Value) -> tuple[Callable[[Value], Value], Value]:
        """What says which row of all it is that has a number in a strip, and how many rows the strip has.

        Strips take a few neighbours in turn, so that what all processors read lies together; of the rows that
        are left over each has a part.
        """
        strips, near = self.count(), self.neighbours()
        before = row.size // (strips * near) * near
        left = -(-(row.size - before * strips) // strips)
        rest = strip * -left + (row.size - before * strips)
        rest = (rest < left).where((rest > 0).where(rest, 0), left)
        block = self.unsigned(self.block)

        def at(number: Value) -> Value:
            there = number / near * (strips * near) + block * near + number % near
            after = number + block * left + before * (strips - 1)
            row: Value = (number < before).where(there, after)
            return row.to(I64)

        return at, rest + before

    def neighbours(self) -> int:
        """How many rows are taken that are neighbours."""
        size = max((int(key[2].itemsize) for key in phases_of(self.nest)), default=1)
        return power_of_two(max(self.grid.rows, TOGETHER // (reduced_extent(self.nest) * size)))

    def finish(self, totals: list[tuple[Store, int, Value]], team: Value) -> None:
        """Store the sums of what the teams of a block have, in their order; teams share the columns."""
        fn, grid, kind = self.fn, self.grid, totals[0][2].type
        if grid.rows == 1:
            for store, turn, total in totals:
                self.store_sum(store, turn, self.mine * grid.width, total)
            return
        needed = grid.threads * grid.width
        at_once = min(grid.shared // (needed * kind.bits // 8), len(totals))  # where rows were kept
        memory = self.row_memory() if at_once else self.shared_memory(kind.scalar, needed)
        thread = self.unsigned(self.thread).to(I64)
        quad = kind.wide(min(grid.width, QUAD))
        for first in range(0, len(totals), at_once or 1):
            here = totals[first : first + (at_once or 1)]
            self.barrier()
            for number, (_, _, total) in enumerate(here):
                self.put_shared(fn.at(memory, (thread + number * grid.threads) * grid.width, kind), total)
            self.barrier()
            tasks = [(n, part) for n in range(len(here)) for part in range(0, grid.width, quad.width)]
            for number, (task, part) in enumerate(tasks):
                with self.branch(team.compare("eq", number % grid.rows)):
                    column, step = self.mine * quad.width + part * grid.team, grid.team * grid.width
                    rows = [column + (task * grid.rows + i) * step for i in range(grid.rows)]
                    total, *others = [self.from_shared(fn.at(memory, row, quad), quad) for row in rows]
                    for other in others:
                        total = total + other
                    self.store_sum(*here[task][:2], column, total)

    def store_sum(self, store: Store, turn: int, column: Value, total: Value) -> None:
        """Store the sums of some columns, the first of which is this one of those of a turn."""
        width = self.grid.team * self.grid.width
        place, size = column + turn * width, reduced_extent(self.nest)
        self.push()
        self.lanes = total.type.width
        self.along_row(place)
        self.layers[-1][id(store.value)] = total
        with self.only_if(place < size if (turn + 1) * width > size else None):
            super().store(store)
        self.pop()

    def rows_read(self, loads: list[Load]) -> dict[Any, Value]:
        """What a thread reads of a row, in all turns."""
        found: dict[Any, Value] = {}
        outside, self.lanes = self.lanes, self.grid.width
        for turn in range(self.grid.turns):
            self.turn = turn
            self.push()
            self.along_row(self.turn_at(turn)[0])
            for load in loads:
                self.raw = None
                self.load(load)
                if self.raw is not None:
                    found[key_of(load), self.turn] = self.raw
            self.pop()
        self.lanes = outside
        return found

    def can_copy(self, load: Load) -> bool:
        """Whether threads may copy what they read of a row at once."""
        outside, self.lanes = self.lanes, self.grid.width
        size = self.lanes * int(load.dtype.itemsize)
        fits = key_of(load) in self.kept and size in (4, 8, WIDEST)
        fits = fits and self.stride(load.index) == 1 and self.granule(load.index) == self.lanes
        self.lanes = outside
        return fits

    def copy_row(self, loads: list[Load], slot: Value) -> None:
        """Begin to copy what a thread reads of a row."""
        for turn in range(self.grid.turns):
            self.turn = turn
            self.push()
            self.along_row(self.turn_at(turn)[0])
            for load in loads:
                self.copy(load, self.offset(load, slot), self.grid.width * int(load.dtype.itemsize))
            self.pop()
        self.commit()

    def offset(self, load: Load, slot: Value) -> Value:
        """Where what a thread reads in this turn is kept in the block's memory."""
        grid, size = self.grid, self.grid.width * int(load.dtype.itemsize)
        first = self.kept[key_of(load)].place + self.turn * grid.threads * size
        return self.thread * size + slot + first

    def read(self, term: Load, memory: Type, address: Value, many: int) -> Value:
        if self.slot is not None and memory.width == self.grid.width and self.can_copy(term):
            base = self.row_memory()
            place = self.unsigned(self.offset(term, self.slot)).to(I64)
            align = memory.width * memory.bits // 8
            kept = self.fn.at(base, place, I8)
            return self.fn.emit(f"load {memory}, ptr {kept.text}, align {align}", memory)
        found = self.read_ahead.get((key_of(term), self.turn))
        self.raw = found = super().read(term, memory, address, many) if found is None else found
        return found

    def compute(self, term: Term) -> Value:
        """A value; a quotient by a number, of what a row was folded into, is a product."""
        if isinstance(term, Apply) and term.op == "div" and self.in_f32(term):
            above, below = term.args
            if isinstance(below, Const) and isinstance(below.value, (int, float)) and below.value:
                return self.value(above) * (1.0 / below.value)
        return super().compute(term)

    def store(self, store: Store) -> None:
        if not store.adds:
            super().store(store)
            return
        value = self.value(store.value)
        for condition in self.conditions:
            value = condition.where(value, 0.0)
        key = store, self.turn
        self.sums[key] = self.sums[key] + value
