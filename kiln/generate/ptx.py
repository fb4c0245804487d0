"""Loop nests as GPU kernels: a thread for some elements, teams of threads for rows, squares to turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any

from kiln.base.symbols import Expr
from kiln.fuse.nest import Axis, Fold, Load, Nest, Store, Term, is_affine, terms
from kiln.fuse.split import products_of
from kiln.generate.functions import compute_type
from kiln.generate.grid import (
    SQUARE,
    WIDEST,
    as_written,
    has_weights,
    in_order,
    largest_and_sum,
    loads_before_folds,
    reduced_extent,
    row_bytes,
    turns,
)
from kiln.generate.lanes import across_lanes, aligned, combined
from kiln.generate.llvm import I32, I64, Value, fma
from kiln.generate.ptx_online import Online
from kiln.generate.ptx_team import Turn
from kiln.generate.scalar import TYPES

#: Turns of a loop over memory that are written out, so that several reads are under way.
UNROLLED, MORE = 4, 8
SHIFT = SQUARE.bit_length() - 1


class GridEmitter(Online):
    """Writes one nest as a kernel: `void (ptr …, i64 sizes …, …)`, run by the threads of its grid."""

    def __init__(self, nest: Nest, aligned: bool = True, clusters: bool = True) -> None:
        super().__init__(nest, aligned, clusters)
        self.turns: dict[int, tuple[dict[int, Value], dict[Any, Value]]] = {}
        self.in_order = in_order(nest)  # whether each thread has a row of its own
        self.emit()

    # The frame

    def emit(self) -> None:
        if self.grid.members == 1 and not self.asks():
            self.begin()
        self.locate()
        sizes = [part for axis in self.nest.axes for part in (axis.size, axis.low) if isinstance(part, Expr)]
        extents = {symbol for size in sizes for symbol in size.symbols()}
        for symbol in extents & self.variables.keys():  # what is known to fit 32 bits is divided as such
            self.variables[symbol] = self.unsigned(self.variables[symbol].to(I32)).to(I64)
        if self.nest.reduced and not self.in_order:
            self.team()
        else:
            self.each()
        self.fn.do("ret void")

    def locate(self) -> None:
        """Say which thread of which block this is."""
        self.thread, self.block = (self.special(f"{name}.x") for name in ("tid", "ctaid"))

    def special(self, name: str) -> Value:
        """A register of the machine that says where a thread is."""
        return self.fn.call(f"llvm.nvvm.read.ptx.sreg.{name}", I32)

    def number(self, major: Value, many: int, minor: Value) -> Value:
        """`major * many + minor` of 32 bits each as an index; in 32 bits where it is known to fit."""
        count = self.count()
        if isinstance(count, int) and count + many >= 1 << 31:
            return self.unsigned(major).to(I64) * many + self.unsigned(minor).to(I64)
        return self.unsigned(major * many + minor).to(I64)

    def blocks(self) -> Any:
        """The number of blocks, in terms of the sizes."""
        grid, count = self.grid, self.count()
        if grid.across is not None:
            return count
        if grid.members > 1:
            return count * grid.members
        rows = grid.rows * grid.many
        return (count + (rows - 1)) // rows if not self.nest.reduced or grid.along or self.in_order else count

    def count(self) -> Any:
        """How many rows there are, or elements by the width; for column groups, blocks."""
        grid, count = self.grid, 1
        if grid.across is not None and grid.vector is not None:
            for axis in self.nest.axes:
                tiled = axis in (grid.across, grid.vector)
                count = count * ((axis.size + (SQUARE - 1)) // SQUARE if tiled else axis.size)
            return count
        for axis in self.outer():
            count = count * (axis.size - axis.low)
        if grid.along or grid.vector is None:
            return count
        if not self.nest.reduced:
            return count * ((grid.vector.size + (grid.width - 1)) // grid.width)
        return count * self.column_groups()

    def column_groups(self) -> Any:
        assert self.vector is not None
        many = self.grid.rows * self.grid.width
        return (self.vector.size + (many - 1)) // many

    def outer(self) -> list[Axis]:
        """The kept axes that do not run in the elements of a thread."""
        return as_written(self.nest, [a for a in self.nest.kept if a is not self.vector])

    # Without folds

    def each(self) -> None:
        """A thread for `width` elements."""
        if self.grid.across is not None:
            self.squares(self.grid.across)
            return
        grid = self.grid
        if grid.many > 1:  # all of them exist; their loads come first
            for turn in range(grid.many):
                task = self.number(self.block, grid.rows * grid.many, self.thread + turn * grid.rows)
                self.push()
                self.task(task)
                self.pop()
            return
        task = self.number(self.block, grid.rows, self.thread)
        with self.branch(task < self.index(self.count())):
            self.task(task)

    def task(self, task: Value) -> None:
        if self.vector is None:
            self.place(self.outer(), task)
            self.alone() if self.in_order else self.store_all()
        else:
            self.along_vector(self.vector, task)

    def along_vector(self, vector: Axis, task: Value) -> None:
        width = self.grid.width
        groups = self.index((vector.size + (width - 1)) // width)
        outer = self.outer()
        if outer:
            self.place(outer, task / groups)
            task = task % groups
        place = self.variables[vector.variable] = task * width
        if not self.grid.tail:
            self.together(width)
            return
        end = self.index(vector.size)
        full = place + width <= end
        with self.branch(full):
            self.together(width)
        with self.branch(place + width > end):
            self.fn.loop(place, end, 1, [], partial(self.one, vector))
            self.variables[vector.variable] = place

    def together(self, many: int) -> None:
        """Store some elements along the vector axis."""
        self.lanes = many
        self.store_all()
        self.lanes = 1

    def one(self, vector: Axis, place: Value, carried: list[Value]) -> list[Value]:
        """Store one element."""
        self.push()
        self.variables[vector.variable] = place
        self.store_all()
        self.pop()
        return carried

    def squares(self, other: Axis) -> None:
        """A block for a square of two axes: what lies along the other one is read along it, and turned."""
        fn, vector = self.fn, self.vector
        assert vector is not None
        parts = (self.thread & SQUARE - 1, self.thread >> SHIFT)
        column, row = (self.unsigned(part).to(I64) for part in parts)
        tiles = [self.index((axis.size + (SQUARE - 1)) // SQUARE) for axis in (other, vector)]
        rest = self.unsigned(self.block).to(I64)
        across, along = rest / tiles[1] % tiles[0] * SQUARE, rest % tiles[1] * SQUARE
        self.place([a for a in self.outer() if a is not other], rest / tiles[1] / tiles[0])
        loads = self.nest.terms()
        turned = {id(t): t for t in loads if isinstance(t, Load) and turns(t, vector, other)}
        memory = {key: self.shared_memory(TYPES[t.dtype], SQUARE * (SQUARE + 1)) for key, t in turned.items()}
        step = self.grid.rows // SQUARE
        for turn in range(0, SQUARE, step):
            self.push()
            self.inside(vector, along + row + turn)
            self.inside(other, across + column)
            for key, term in turned.items():
                stored = TYPES[term.dtype]
                value = fn.load(fn.at(self.pointers[term.buffer], self.index(term.index), stored), stored)
                fn.store(value, fn.at(memory[key], (row + turn) * (SQUARE + 1) + column, stored))
            self.pop()
        self.barrier()
        for turn in range(0, SQUARE, step):
            self.push()
            valid = [self.inside(vector, along + column), self.inside(other, across + row + turn)]
            for key, term in turned.items():
                stored = TYPES[term.dtype]
                value = fn.load(fn.at(memory[key], column * (SQUARE + 1) + row + turn, stored), stored)
                self.layers[-1][key] = value.to(compute_type(stored))
            with self.only_if(valid[0]), self.only_if(valid[1]):
                self.store_all()
            self.pop()

    def inside(self, axis: Axis, place: Value) -> Value | None:
        """Let a loop variable be at a place, or at the first where that is outside; whether it is not."""
        self.variables[axis.variable] = place
        if isinstance(axis.size, int) and axis.size % SQUARE == 0:
            return None
        valid = place < self.index(axis.size)
        self.variables[axis.variable] = valid.where(place, 0)
        return valid

    def store_all(self) -> None:
        if self.nest.rolled is not None:
            self.roll(self.nest.rolled)
        elif self.nest.several:  # all of them product by product: what they share is needed for a short time
            found = [terms([store.value]) for store in self.nest.stores]
            for term in (t for turn in zip_longest(*found) for t in turn if t is not None):
                self.value(term)
        for store in self.nest.stores:
            self.store(store)

    def roll(self, axis: Axis) -> None:
        """Sums of products over a loop of each thread, all of them product by product."""
        folds = self.nest.folds()
        products = list(zip(*[products_of(fold) or () for fold in folds], strict=True))

        def turn(place: Value, carried: list[Value]) -> list[Value]:
            self.push()
            self.variables[axis.variable] = place
            for pairs in products:
                carried = [self.with_products(c, [pair]) for c, pair in zip(carried, pairs, strict=True)]
            self.pop()
            return carried

        start = [part for fold in folds for part in self.neutral(fold, self.lanes)]
        totals = self.fn.loop(0, axis.size, 1, start, turn)
        self.layers[-1].update(zip(map(id, folds), totals, strict=True))

    # With folds

    def team(self) -> None:
        """Threads of a team on one row, or on one group of columns."""
        grid = self.grid
        if grid.members > 1:
            self.begin_together()
            self.mine = self.number(self.block & grid.members - 1, grid.team, self.thread)
            active = None
            self.place(self.outer(), (self.unsigned(self.block) / grid.members).to(I64))
            self.begin()
        elif grid.along:
            self.mine = (self.unsigned(self.thread) % grid.team).to(I64)
            row = self.number(self.block, grid.rows, self.unsigned(self.thread) / grid.team)
            count = self.count()
            exact = isinstance(count, int) and count % grid.rows == 0
            active = None if exact or grid.rows == 1 else row < self.index(count)
            self.place(self.outer(), row if active is None else active.where(row, 0))
            if self.asks():
                self.begin()
        else:
            active = self.columns()
        with self.only_if(active):
            self.row()

    def alone(self) -> None:
        """A thread on a row of its own."""
        self.mine = self.fn.constant(0, I64)
        self.row()

    def columns(self) -> Value | None:
        """Let the threads of a block be on neighbouring columns; whether this one is on one."""
        grid, vector = self.grid, self.vector
        assert vector is not None
        self.mine = (self.unsigned(self.thread) / grid.rows).to(I64)
        groups, block = self.index(self.column_groups()), self.unsigned(self.block).to(I64)
        outer = self.outer()
        if outer:
            self.place(outer, block / groups)
            block = block % groups
        column = (block * grid.rows + (self.unsigned(self.thread) % grid.rows).to(I64)) * grid.width
        self.lanes = grid.width
        if isinstance(vector.size, int) and vector.size % (grid.rows * grid.width) == 0:
            self.variables[vector.variable] = column
            return None
        active = column < self.index(vector.size)
        self.variables[vector.variable] = active.where(column, 0)
        return active

    def row(self) -> None:
        """The phases of a row, one after the other."""
        stores, folds = self.nest.stores, self.nest.folds()
        last = max([s.phase for s in stores] + [f.phase for f in folds], default=0)
        grid = self.grid
        if grid.along and grid.team > 1:
            self.begin_to_read([s.value for s in stores if s.kept])
        if grid.turns and self.again:
            self.fetch()
        at_once = None if self.held or not grid.along else largest_and_sum(self.nest)
        # Of weights that no cache of a processor holds, the next block finds those that were read last.
        alternate = bool(self.again) and grid.members == 1 and bool(grid.turns) and has_weights(self.nest)
        if at_once is not None:
            self.online(*at_once)
            stores = [s for s in stores if s.kept or s.phase]
        for phase in range(last + 1):
            self.now = phase
            here = [f for f in folds if f.phase == phase and (at_once is None or f not in at_once)]
            inside = [s for s in stores if s.phase == phase and not s.kept]
            with self.only_if(self.mine.compare("eq", 0) if grid.team > 1 else None):
                for store in stores:
                    if store.kept and store.phase == phase:
                        self.store(store)
            if here or inside:
                self.backwards = (self.block & 1).compare("eq", 1) if phase == last and alternate else None
                self.phase(here, inside)

    def begin_to_read(self, values: list[Term]) -> None:
        """Read what is needed of memory beside the folds of a row, so that it is there after them."""
        for value in values:
            for load in loads_before_folds(value):
                if load.places or load.valid is not None:
                    free = not any(isinstance(term, Fold) for term in terms([load]))
                    self.awaited += [load] if free else []
                else:
                    self.value(load)

    def phase(self, folds: list[Fold], stores: list[Store]) -> None:
        """The turns of the reduced axes, shared by the team: folds some values, stores others."""
        grid = self.grid
        start = [part for fold in folds for part in self.neutral(fold, grid.width)]

        def body(carried: list[Value], valid: Value | None = None) -> list[Value]:
            if products is not None and valid is None:
                return [self.with_products(c, parts) for c, parts in zip(carried, products, strict=True)]
            values = [self.value(part) for fold in folds for part in fold.parts]
            values = [c.like(v) for c, v in zip(carried, values, strict=True)]
            if valid is not None:
                values = [valid.where(v, n) for v, n in zip(values, start, strict=True)]
            with self.only_if(valid):
                for store in stores:
                    self.store(store)
            return values if carried is start and valid is None else combined(folds, carried, values)

        products = None if grid.along else self.products
        outside = self.lanes
        self.lanes = grid.width
        if self.in_order:
            totals = self.turns_in_order(start, folds, stores)
        else:
            totals = self.held_turns(start, body) if self.held else self.several_turns(start, body)
        self.lanes = outside
        if not folds:
            return
        combine = partial(combined, folds)
        if grid.along:
            totals = across_lanes(totals, combine)
        neutral = [part for fold in folds for part in self.neutral(fold, 1)]
        alike = len({(f.kind, f.value.dtype) for f in folds}) == 1 and folds[0].place is None
        totals = self.exchanged(totals, combine, neutral, partial(combined, folds[:1]) if alike else None)
        for fold in folds:
            *_, result = [totals.pop(0) for _ in fold.parts]
            self.layers[-1][id(fold)] = result

    def turns_in_order(self, carried: list[Value], folds: list[Fold], stores: list[Store]) -> list[Value]:
        """All turns of a row, some at a time: what these read comes first, so that none waits for its own."""
        values = [part for fold in folds for part in fold.parts] + [store.value for store in stores]
        loads = [t for t in terms(values) if isinstance(t, Load) and not t.places]
        loads = [t for t in loads if not any(isinstance(below, Fold) for below in terms([t]))]

        def several(turns: list[Turn], carried: list[Value]) -> list[Value]:
            read = []
            for place, _ in turns:
                self.push()
                self.along_row(place)
                for load in loads:
                    self.value(load)
                read.append((self.layers.pop(), self.indices.pop()))
            for (place, _), (known, indices) in zip(turns, read, strict=True):
                self.layers.append(known)
                self.indices.append(indices)
                self.along_row(place)
                carried = self.advanced(folds, carried)
                for store in stores:
                    self.store(store)
                self.pop()
            return carried

        return self.row_turns(carried, several, MORE)

    def advanced(self, folds: list[Fold], carried: list[Value]) -> list[Value]:
        """What folds carry after a turn; values of running ones are known in it."""
        results: list[Value] = []
        for fold in folds:
            held = carried[len(results) : len(results) + len(fold.parts)]
            if is_affine(fold.value):
                factor, value = [held[0].like(self.value(part)) for part in fold.value.args]
                results.append(fma(factor, held[0], value))
            else:
                values = [c.like(self.value(part)) for c, part in zip(held, fold.parts, strict=True)]
                results += combined([fold], held, values)
            if fold.running:
                self.layers[-1][id(fold)] = results[-1]
        return results

    def with_products(self, total: Value, products: list[tuple[Term, ...]]) -> Value:
        """What was summed up so far, and some products, each added by one instruction."""
        for pair in products:
            total = fma(*aligned([*[self.value(factor) for factor in pair], total]))
        return total

    def held_turns(self, carried: list[Value], body: Callable[..., list[Value]]) -> list[Value]:
        """All turns of a thread written out; what they read stays in registers for later phases."""
        for turn in range(self.grid.turns):
            self.turn = turn
            place, valid = self.turn_at(turn)
            known, indices = self.turns.setdefault(turn, ({}, {}))
            self.layers.append(known)
            self.indices.append(indices)
            self.place(self.folded(), place)
            carried = body(carried, valid)
            self.pop()
        return carried

    def several_turns(self, carried: list[Value], body: Callable[..., list[Value]]) -> list[Value]:
        """The turns of a thread, some at a time; what they read is read again by later phases."""

        def several(turns: list[Turn], values: list[Value]) -> list[Value]:
            for place, valid in turns:
                self.push()
                if short:  # what is known to fit 32 bits is divided as such
                    self.along_row(self.unsigned(place.to(I32)).to(I64))
                    for axis in self.nest.reduced:
                        here = self.variables[axis.variable]
                        self.variables[axis.variable] = self.unsigned(here.to(I32)).to(I64)
                else:
                    self.along_row(place)
                values = body(values, valid)
                self.pop()
            return values

        products = not self.grid.along and self.products is not None
        short = products and reduced_extent(self.nest) < 1 << 31
        step = self.grid.team * (self.grid.width if self.grid.along else 1)
        little = row_bytes(self.nest, self.vector, self.grid.width) <= WIDEST
        many = MORE if little and reduced_extent(self.nest) >= 2 * MORE * step else UNROLLED
        return self.row_turns(carried, several, 1 if products else many)

