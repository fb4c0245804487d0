"""Strips of rows: a team takes one row after the other and keeps the sums of its columns in registers."""

from __future__ import annotations

from typing import Any

from kiln.base.symbols import Expr
from kiln.fuse.nest import Load, Store, terms
from kiln.generate.functions import compute_type
from kiln.generate.grid import LOOPED, key_of
from kiln.generate.llvm import I64, Type, Value
from kiln.generate.ptx import GridEmitter
from kiln.generate.scalar import TYPES

#: Rows that are read ahead at most, and the registers of a thread for them.
AHEAD, REGISTERS = 3, 30


class StripEmitter(GridEmitter):
    """Writes a nest over rows in parts; what it adds to columns is stored once a part.

    What a row reads is on its way while the rows before it are worked on.
    """

    def emit(self) -> None:
        self.read_ahead: dict[Any, Value] = {}  # for each key and turn
        self.raw: Value | None = None  # what was read last
        self.memory: Value | None = None  # where teams find each other's sums
        self.sums: dict[tuple[Store, int], Value] = {}
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
        self.mine = self.unsigned(self.thread & grid.team - 1).to(I64)
        team = self.unsigned(self.thread) / grid.team
        self.numbered = team + 1
        strip = self.unsigned(self.block).to(I64)
        begin = strip * part.rows
        first, end = begin + team.to(I64), begin + part.rows
        end = (end < row.size).where(end, row.size)
        loads = {key_of(t): t for t in terms(s.value for s in self.nest.stores) if isinstance(t, Load)}
        plain = [t for t in loads.values() if t.valid is None and not t.places]
        own = [t for t in plain if isinstance(t.index, Expr) and row.variable in t.index.symbols()]
        fixed = self.read_ahead = self.rows_read([t for t in plain if t not in own])

        def at(place: Value) -> dict[Any, Value]:
            self.variables[row.variable] = (place < end).where(place, begin)
            return self.rows_read(own)

        ahead = [at(first)]
        taken = sum(max(v.type.width * v.type.bits // 32, 1) for v in ahead[0].values())
        depth = max(min(AHEAD, REGISTERS // max(taken, 1)), 1) if grid.threads <= LOOPED else 1
        ahead += [at(first + i * grid.rows) for i in range(1, depth)]
        added = [s for s in self.nest.stores if s.adds]
        places = [(store, turn) for store in added for turn in range(grid.turns)]
        zero = fn.constant(0.0, compute_type(TYPES[added[0].buffer.dtype]).wide(grid.width))
        keys = list(ahead[0])

        def body(place: Value, carried: list[Value]) -> list[Value]:
            sums, rest = carried[: len(places)], carried[len(places) :]
            self.push()
            following = at(place + depth * grid.rows)
            self.pop()
            self.push()
            self.turns = {}
            self.other = (place - first) / grid.rows & 1
            self.read_ahead = {**fixed, **dict(zip(keys, rest, strict=False))}
            self.sums = dict(zip(places, sums, strict=True))
            self.variables[row.variable] = place
            self.row()
            self.pop()
            return [*self.sums.values(), *rest[len(keys) :], *following.values()]

        start = [zero] * len(places) + [value for rows in ahead for value in rows.values()]
        totals = fn.loop(first, end, grid.rows, start, body)
        self.numbered = None
        self.variables[part.variable] = strip
        self.lanes = grid.width
        for (store, self.turn), total in zip(places, totals, strict=False):
            self.push()
            place, valid = self.turn_at(self.turn)
            self.along_row(place)
            self.layers[-1][id(store.value)] = self.of_all_teams(total)
            with self.only_if(team.compare("eq", 0)), self.only_if(valid):
                super().store(store)
            self.pop()
        self.lanes = 1

    def of_all_teams(self, total: Value) -> Value:
        """The sum of what the teams of a block have, in their order, for the first of them."""
        fn, grid, kind = self.fn, self.grid, total.type
        if grid.rows == 1:
            return total
        if self.memory is None:
            self.memory = self.shared_memory(kind.scalar, grid.threads * grid.width)
        else:
            self.barrier()
        thread = self.unsigned(self.thread).to(I64)
        self.put_shared(fn.at(self.memory, thread * grid.width, kind), total)
        self.barrier()
        for team in range(1, grid.rows):
            there = (self.mine + team * grid.team) * grid.width
            total = total + self.from_shared(fn.at(self.memory, there, kind), kind)
        return total

    def rows_read(self, loads: list[Load]) -> dict[Any, Value]:
        """What a thread reads of a row, in all turns."""
        found: dict[Any, Value] = {}
        outside, self.lanes = self.lanes, self.grid.width
        for self.turn in range(self.grid.turns):
            self.push()
            self.along_row(self.turn_at(self.turn)[0])
            for load in loads:
                self.raw = None
                self.load(load)
                if self.raw is not None:
                    found[key_of(load), self.turn] = self.raw
            self.pop()
        self.lanes = outside
        return found

    def read(self, term: Load, memory: Type, address: Value, many: int) -> Value:
        found = self.read_ahead.get((key_of(term), self.turn))
        self.raw = found = super().read(term, memory, address, many) if found is None else found
        return found

    def store(self, store: Store) -> None:
        if not store.adds:
            super().store(store)
            return
        value = self.value(store.value)
        for condition in self.conditions:
            value = condition.where(value, 0.0)
        key = store, self.turn
        self.sums[key] = self.sums[key] + value
