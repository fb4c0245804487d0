"""Loop nests as GPU kernels: a thread for some elements, teams of threads for rows, folds by shuffles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from kiln.base.symbols import Expr
from kiln.fuse.nest import Apply, Axis, Const, Fold, Load, Nest, Store, Term, terms
from kiln.generate.functions import compute_type
from kiln.generate.grid import SQUARE, WARP, Grid, extent, laid, turns, whole
from kiln.generate.lanes import across_lanes, combined
from kiln.generate.lanes import lanes as some_lanes
from kiln.generate.llvm import I1, I8, I32, I64, PTR, U8, VOID, Type, Value
from kiln.generate.ptx_functions import AND_ONE, OWN, exp_of_small
from kiln.generate.scalar import FOLDS, NOWHERE, TYPES
from kiln.generate.values import DIVIDED_BY_ZERO, NAME, OUT_OF_BOUNDS, OUTSIDE, Values

#: Turns of a loop over memory that are written out, so that several reads are under way.
UNROLLED = 4
SHIFT = SQUARE.bit_length() - 1
#: What a fault is called where a kernel ends with one.
FAULTS = {
    OUTSIDE: "index out of bounds", OUT_OF_BOUNDS: "index out of bounds", DIVIDED_BY_ZERO: "division by zero",
}  # fmt: skip


class GridEmitter(Values):
    """Writes one nest as a kernel: `void (ptr …, i64 sizes …, …)`, run by the threads of its grid."""

    def __init__(self, nest: Nest, aligned: bool = True) -> None:
        super().__init__(nest, 1)
        self.grid: Grid = laid(nest)
        self.aligned = aligned
        self.vector, self.width = self.grid.vector, self.grid.width
        self.module.own = OWN
        self.fn.convention = "ptx_kernel "
        self.fn.attributes = "nounwind"
        self.conditions: list[Value] = []  # under which what is stored is stored
        self.turns: dict[int, tuple[dict[int, Value], dict[Any, Value]]] = {}
        self.turn: int | None = None  # the one being emitted, where what it reads is held as it is in memory
        self.held: dict[tuple[int, int], Value] = {}
        self.shared = 0
        self.emit()

    # The frame

    def emit(self) -> None:
        sizes = [part for axis in self.nest.axes for part in (axis.size, axis.low) if isinstance(part, Expr)]
        extents = {symbol for size in sizes for symbol in size.symbols()}
        for symbol in extents & self.variables.keys():  # what is known to fit 32 bits is divided as such
            self.variables[symbol] = self.unsigned(self.variables[symbol].to(I32)).to(I64)
        self.thread, self.block = (self.special(f"{name}.x") for name in ("tid", "ctaid"))
        if self.nest.reduced:
            self.team()
        else:
            self.each()
        self.fn.do("ret void")

    def special(self, name: str) -> Value:
        """A register of the machine that says where a thread is."""
        return self.fn.call(f"llvm.nvvm.read.ptx.sreg.{name}", I32)

    def unsigned(self, value: Value) -> Value:
        """The same bits, never negative."""
        return Value(self.fn, value.text, replace(value.type, signed=False))

    def number(self, major: Value, many: int, minor: Value) -> Value:
        """`major * many + minor` of 32 bits each as an index; in 32 bits where it is known to fit."""
        count = self.count()
        if isinstance(count, int) and count * many >= 1 << 31:
            return self.unsigned(major).to(I64) * many + self.unsigned(minor).to(I64)
        return self.unsigned(major * many + minor).to(I64)

    def blocks(self) -> Any:
        """The number of blocks, in terms of the sizes."""
        grid, count = self.grid, self.count()
        if grid.across is not None:
            return count
        return (count + (grid.rows - 1)) // grid.rows if not self.nest.reduced or grid.along else count

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
        return [a for a in self.nest.kept if a is not self.vector]

    def place(self, axes: Sequence[Axis], rest: Value) -> None:
        """Let loop variables have their values in turn `rest` of their loops."""
        for number, axis in enumerate(reversed(axes)):
            last = number == len(axes) - 1
            size = self.index(axis.size - axis.low)
            here = rest if last else rest % size
            self.variables[axis.variable] = here if axis.low == 0 else here + self.index(axis.low)
            rest = rest if last else rest / size

    @contextmanager
    def only_if(self, condition: Value | None) -> Iterator[None]:
        """Store nothing where this does not hold."""
        if condition is not None:
            self.conditions.append(condition)
        yield
        if condition is not None:
            self.conditions.pop()

    @contextmanager
    def branch(self, condition: Value) -> Iterator[None]:
        """What is emitted runs where this holds."""
        fn = self.fn
        inside, after = fn.label("then"), fn.label("after")
        fn.branch(condition, inside, after)
        fn.start(inside)
        self.push()
        yield
        self.pop()
        fn.jump(after)
        fn.start(after)

    # Without folds

    def each(self) -> None:
        """A thread for `width` elements."""
        if self.grid.across is not None:
            self.squares(self.grid.across)
            return
        task = self.number(self.block, self.grid.rows, self.thread)
        with self.branch(task < self.index(self.count())):
            if self.vector is None:
                self.place(self.outer(), task)
                self.store_all()
            else:
                self.along_vector(self.vector, task)

    def along_vector(self, vector: Axis, task: Value) -> None:
        width = self.grid.width
        groups = self.index((vector.size + (width - 1)) // width)
        outer = self.outer()
        if outer:
            self.place(outer, task / groups)
            task = task % groups
        self.variables[vector.variable] = task * width
        self.lanes = width
        self.store_all()
        self.lanes = 1

    def squares(self, other: Axis) -> None:
        """A block for a square of two axes: what lies along the other one is read along it, and turned."""
        fn, vector = self.fn, self.vector
        assert vector is not None
        column, row = (self.unsigned(part).to(I64) for part in (self.thread & SQUARE - 1, self.thread >> SHIFT))
        tiles = [self.index((axis.size + (SQUARE - 1)) // SQUARE) for axis in (other, vector)]
        rest = self.unsigned(self.block).to(I64)
        across, along = rest / tiles[1] % tiles[0] * SQUARE, rest % tiles[1] * SQUARE
        self.place([a for a in self.outer() if a is not other], rest / tiles[1] / tiles[0])
        loads = terms(s.value for s in self.nest.stores)
        turned = {id(t): t for t in loads if isinstance(t, Load) and turns(t, vector, other)}
        memory = {
            key: self.shared_memory(TYPES[t.dtype], SQUARE * (SQUARE + 1)) for key, t in turned.items()
        }
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
        for store in self.nest.stores:
            self.store(store)

    # With folds

    def team(self) -> None:
        """Threads of a team on one row, or on one group of columns."""
        grid = self.grid
        if grid.along:
            self.mine = self.unsigned(self.thread & grid.team - 1).to(I64)
            row = self.number(self.block, grid.rows, self.unsigned(self.thread) / grid.team)
            count = self.count()
            exact = isinstance(count, int) and count % grid.rows == 0
            active = None if exact or grid.rows == 1 else row < self.index(count)
            self.place(self.outer(), row if active is None else active.where(row, 0))
        else:
            active = self.columns()
        with self.only_if(active):
            self.row()

    def columns(self) -> Value | None:
        """Let the threads of a block be on neighbouring columns; whether this one is on one."""
        grid, vector = self.grid, self.vector
        assert vector is not None
        self.mine = self.unsigned(self.thread / grid.rows).to(I64)
        groups, block = self.index(self.column_groups()), self.unsigned(self.block).to(I64)
        outer = self.outer()
        if outer:
            self.place(outer, block / groups)
            block = block % groups
        column = (block * grid.rows + self.unsigned(self.thread & grid.rows - 1).to(I64)) * grid.width
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
        for phase in range(last + 1):
            here = [f for f in folds if f.phase == phase]
            inside = [s for s in stores if s.phase == phase and not s.kept]
            with self.only_if(self.mine.compare("eq", 0) if self.grid.team > 1 else None):
                for store in stores:
                    if store.kept and store.phase == phase:
                        self.store(store)
            if here or inside:
                self.phase(here, inside)

    def phase(self, folds: list[Fold], stores: list[Store]) -> None:
        """The turns of the reduced axes, shared by the team: folds some values, stores others."""
        grid = self.grid
        start = [part for fold in folds for part in self.neutral(fold, grid.width)]

        def body(carried: list[Value], valid: Value | None = None) -> list[Value]:
            values = [self.value(part) for fold in folds for part in fold.parts]
            values = [c.like(v) for c, v in zip(carried, values, strict=True)]
            if valid is not None:
                values = [valid.where(v, n) for v, n in zip(values, start, strict=True)]
            with self.only_if(valid):
                for store in stores:
                    self.store(store)
            return combined(folds, carried, values)

        outside = self.lanes
        self.lanes = grid.width
        totals = self.held_turns(start, body) if grid.turns else self.looped_turns(start, body)
        self.lanes = outside
        if not folds:
            return
        combine = partial(combined, folds)
        if grid.along:
            totals = across_lanes(totals, combine)
        totals = self.exchanged(totals, combine)
        for fold in folds:
            *_, result = [totals.pop(0) for _ in fold.parts]
            self.layers[-1][id(fold)] = result

    def held_turns(self, carried: list[Value], body: Callable[..., list[Value]]) -> list[Value]:
        """All turns of a thread written out; what they read stays in registers for later phases."""
        grid = self.grid
        total = 1
        for axis in self.nest.reduced:
            total *= extent(axis)
        step = grid.team * grid.width
        first = self.mine * grid.width
        for turn in range(grid.turns):
            place, valid = first + turn * step, None
            if (turn + 1) * step > total:
                valid = place < total
                place = valid.where(place, 0)
            known, indices = ({}, {}) if grid.packed else self.turns.setdefault(turn, ({}, {}))
            self.layers.append(known)
            self.indices.append(indices)
            self.turn = turn if grid.packed else None
            self.place(self.folded(), place)
            carried = body(carried, valid)
            self.pop()
        self.turn = None
        return carried

    def looped_turns(self, carried: list[Value], body: Callable[..., list[Value]]) -> list[Value]:
        """The turns of a thread in a loop, some at a time."""
        fn, grid = self.fn, self.grid
        count: Any = 1
        for axis in self.nest.reduced:
            count = count * (axis.size - axis.low)
        each = grid.width if grid.along else 1
        step = grid.team * each

        def turn(place: Value, values: list[Value]) -> list[Value]:
            self.push()
            self.place(self.folded(), place)
            results = body(values)
            self.pop()
            return results

        def several(place: Value, values: list[Value]) -> list[Value]:
            for i in range(UNROLLED):
                values = turn(place + i * step, values)
            return values

        end, first = self.index(count), self.mine * each
        whole_turns = end / (step * UNROLLED) * (step * UNROLLED)
        carried = fn.loop(first, whole_turns, step * UNROLLED, carried, several)
        return fn.loop(first + whole_turns, end, step, carried, turn)

    def folded(self) -> list[Axis]:
        """The reduced axes, the one that neighbouring threads are along last."""
        axes = [a for a in self.nest.reduced if a is not self.vector]
        return axes if not self.grid.along or self.vector is None else [*axes, self.vector]

    def neutral(self, fold: Fold, wide: int) -> list[Value]:
        """What a fold starts with."""
        kind = compute_type(TYPES[fold.value.dtype]).wide(wide)
        floating, integral, _ = FOLDS[fold.kind.replace("arg", "a")]
        start = self.fn.constant(floating if kind.is_float else integral(kind.scalar), kind)
        return [start] if fold.place is None else [start, self.fn.constant(NOWHERE, I64.wide(wide))]

    # Between threads

    def exchanged(self, values: list[Value], combine: Callable[..., list[Value]]) -> list[Value]:
        """What the threads of a team have, folded into one; every thread has it, the order is always one."""
        grid = self.grid
        if grid.team == 1:
            return values
        if not grid.along:
            return self.through_memory(values, combine, grid.team)
        values = self.shuffled(values, combine, min(grid.team, WARP))
        warps = grid.team // WARP
        return values if warps <= 1 else self.between_warps(values, combine, warps)

    def shuffled(self, values: list[Value], combine: Callable[..., list[Value]], many: int) -> list[Value]:
        distance = 1
        while distance < many:
            values = combine(values, [self.from_thread(v, distance) for v in values])
            distance *= 2
        return values

    def from_thread(self, value: Value, distance: int) -> Value:
        """The value that the thread has whose number differs in one bit."""
        fn, kind = self.fn, value.type
        if kind.bits == 64:
            whole = self.unsigned(value.bits(I64) if kind.is_float else value)
            low, high = (self.from_thread(part.to(I32), distance) for part in (whole, whole >> 32))
            joined = self.unsigned(low).to(I64) | self.unsigned(high).to(I64) << 32
            return joined.bits(kind) if kind.is_float else joined
        if kind.bits < 32:
            moved = self.from_thread(self.unsigned(value).to(I32), distance)
            return moved.to(kind) if kind.kind != "i1" else moved.to_mask()
        all_threads, far, clamp = (fn.constant(n, I32) for n in (-1, distance, WARP - 1))
        bits = value.bits(I32) if kind.is_float else value
        moved = fn.call("llvm.nvvm.shfl.sync.bfly.i32", I32, all_threads, bits, far, clamp)
        return moved.bits(kind) if kind.is_float else moved

    def between_warps(
        self, values: list[Value], combine: Callable[..., list[Value]], warps: int
    ) -> list[Value]:
        thread = self.unsigned(self.thread).to(I64)
        lane, warp = thread & WARP - 1, thread >> WARP.bit_length() - 1
        memory = [self.shared_memory(v.type, warps * self.grid.rows) for v in values]
        with self.branch(lane.compare("eq", 0)):
            for m, v in zip(memory, values, strict=True):
                self.fn.store(v, self.fn.at(m, warp, v.type))
        self.barrier()
        place = warp - self.mine / WARP + (lane & warps - 1)
        at = [self.fn.at(m, place, v.type) for m, v in zip(memory, values, strict=True)]
        found = [self.fn.load(a, v.type) for a, v in zip(at, values, strict=True)]
        return self.shuffled(found, combine, warps)

    def through_memory(
        self, values: list[Value], combine: Callable[..., list[Value]], team: int
    ) -> list[Value]:
        """A team whose threads lie apart: halves take over what the others have left in shared memory."""
        grid = self.grid
        column = self.unsigned(self.thread & grid.rows - 1).to(I64) * grid.width
        memory = [self.shared_memory(v.type.scalar, team * grid.rows * grid.width) for v in values]

        def at(thread: Value | int) -> list[Value]:
            place = column + thread * (grid.rows * grid.width)
            return [self.fn.at(m, place, v.type) for m, v in zip(memory, values, strict=True)]

        def put(given: list[Value]) -> None:
            for address, value in zip(at(self.mine), given, strict=True):
                self.put_shared(address, value)

        def found(thread: Value | int) -> list[Value]:
            return [self.from_shared(a, v.type) for a, v in zip(at(thread), values, strict=True)]

        put(values)
        while team > 1:
            team //= 2
            self.barrier()
            with self.branch(self.mine < team):
                put(combine(found(self.mine), found(self.mine + team)))
        self.barrier()
        return found(0)

    def put_shared(self, address: Value, value: Value) -> None:
        value = value.to(U8) if value.type.kind == "i1" else value
        align = min(value.type.bits * value.type.width // 8, 16)
        self.fn.do(f"store {value.type} {value.text}, ptr {address.text}, align {align}")

    def from_shared(self, address: Value, kind: Type) -> Value:
        memory = (U8 if kind.kind == "i1" else kind).wide(kind.width)
        align = min(memory.bits * memory.width // 8, 16)
        value = self.fn.emit(f"load {memory}, ptr {address.text}, align {align}", memory)
        return value.to(I1) if kind.kind == "i1" else value

    def shared_memory(self, kind: Type, count: int) -> Value:
        """Memory of the block for this many values."""
        stored = I8 if kind.kind == "i1" else kind
        name = f"@{NAME}_shared{self.shared}"
        self.shared += 1
        kind_of_memory = f"internal addrspace(3) global [{count} x {stored}]"
        self.module.memory.append(f"{name} = {kind_of_memory} poison, align 16")
        return Value(self.fn, f"addrspacecast (ptr addrspace(3) {name} to ptr)", PTR)

    def barrier(self) -> None:
        self.fn.call("llvm.nvvm.barrier0", VOID)

    # Values

    def compute(self, term: Term) -> Value:
        """A value; sums with 1, quotients by what is one for all elements, and some powers cost less."""
        if not isinstance(term, Apply) or not self.in_f32(term):
            return super().compute(term)
        if term.op == "add":
            for known, other in (term.args, term.args[::-1]):
                if isinstance(known, Apply) and known.op in AND_ONE and is_one(other) and self.in_f32(known):
                    return AND_ONE[known.op](self.value(known.args[0]))
        if term.op == "exp" and is_below_largest(term.args[0]):
            return exp_of_small(self.value(term.args[0]))
        if term.op == "div":
            above, below = (self.value(a) for a in term.args)
            if below.type.width < above.type.width:
                return above * (1.0 / below)
        return super().compute(term)

    def in_f32(self, term: Apply) -> bool:
        return compute_type(TYPES[term.dtype]).kind == "f32" and len(term.args) <= 2

    # Memory

    def load(self, term: Load) -> Value:
        fn, base, stored = self.fn, self.pointers[term.buffer], TYPES[term.dtype]
        held = compute_type(stored)
        self.bind(term.places)
        mask = None if term.valid is None else self.value(term.valid)
        step = self.stride(term.index)
        one = self.lanes == 1 or step == 0
        if one and (mask is None or mask.type.width == 1):
            place = self.index(term.index)
            place = place if mask is None else mask.where(place, 0)
            return fn.load(fn.at(base, place, stored), stored).to(held)
        if step == 1 and mask is None:
            memory = (U8 if stored.kind == "i1" else stored).wide(self.lanes)
            address = fn.at(base, self.index(term.index), stored)
            align = self.granule(term.index) * memory.bits // 8
            value = self.held_load(term, memory, address, align)
            return (value.to(I1) if stored.kind == "i1" else value).to(held)
        result = Value(fn, "poison", stored.wide(self.lanes))
        for lane, place in enumerate(self.each_place(term.index, step)):
            if mask is not None:
                valid = mask if mask.type.width == 1 else some_lanes(mask, lane, 1)
                place = valid.where(place, 0)
            value = fn.load(fn.at(base, place, stored), stored)
            inserted = f"insertelement {result.type} {result.text}, {value.type} {value.text}, i64 {lane}"
            result = fn.emit(inserted, result.type)
        return result.to(held)

    def held_load(self, term: Load, memory: Type, address: Value, align: int) -> Value:
        """Elements of memory; those that a thread holds for later phases are read once."""
        fn = self.fn
        words = I32.wide(memory.bits * memory.width // 32)
        found = None if self.turn is None else self.held.get((self.turn, id(term)))
        if found is None:
            value = fn.emit(f"load {memory}, ptr {address.text}, align {align}", memory)
            if self.turn is not None and memory.bits * memory.width >= 64:
                self.held[self.turn, id(term)] = fn.emit(f"bitcast {memory} {value.text} to {words}", words)
            return value
        # What was computed from them would be held in their place if it were seen that they are the same.
        hidden = Value(fn, "poison", words)
        for i in range(words.width):
            word = some_lanes(found, i, 1)
            moved = fn.emit(f'call i32 asm sideeffect "mov.b32 $0, $1;", "=r,r"(i32 {word.text})', I32)
            hidden = fn.emit(f"insertelement {words} {hidden.text}, i32 {moved.text}, i64 {i}", words)
        return fn.emit(f"bitcast {words} {hidden.text} to {memory}", memory)

    def each_place(self, index: Any, step: int | None) -> list[Value]:
        """An index in each lane."""
        if step is not None:
            first = self.index(index)
            return [first + lane * step if lane and step else first for lane in range(self.lanes)]
        places = self.lanes_of(index)
        if places.type.width == 1:
            return [places] * self.lanes
        return [some_lanes(places, lane, 1) for lane in range(self.lanes)]

    def granule(self, index: Any) -> int:
        """How many elements an index is always a multiple of, up to the lanes."""
        many = self.lanes if self.aligned else 1
        assert self.vector is not None
        while many > 1 and not whole(index, many, self.vector.variable):
            many //= 2
        return many

    def store(self, store: Store) -> None:
        value = self.value(store.value)
        index, step = store.index, self.stride(store.index)
        places = None
        if self.lanes > 1 and step != 1:
            places = self.each_place(index, step)
        else:
            self.index(index)
        if not self.conditions:
            self.written(store, value, places)
            return
        condition = self.conditions[0]
        for other in self.conditions[1:]:
            condition = condition & other
        with self.branch(condition):
            self.written(store, value, places)

    def written(self, store: Store, value: Value, places: list[Value] | None) -> None:
        fn, stored = self.fn, TYPES[store.buffer.dtype]
        base = self.pointers[store.buffer]
        value = value.to(stored)
        if self.lanes == 1:
            fn.store(value, fn.at(base, self.index(store.index), stored))
            return
        value = value if value.type.width > 1 else value.splat(self.lanes)
        if places is None:
            value = value.to(U8) if stored.kind == "i1" else value
            address = fn.at(base, self.index(store.index), stored)
            align = self.granule(store.index) * value.type.bits // 8
            fn.do(f"store {value.type} {value.text}, ptr {address.text}, align {align}")
            return
        for lane, place in enumerate(places):
            fn.store(some_lanes(value, lane, 1), fn.at(base, place, stored))

    def report(self, wrong: Value, fault: int) -> None:
        """What eager kernels do with an index outside of its range: end the program of the device."""
        fn = self.fn
        if wrong.type.width > 1:
            wrong = fn.call(f"llvm.vector.reduce.or.v{wrong.type.width}i1", I1, wrong)
        with self.branch(wrong):
            parts = [self.text(FAULTS[fault]), self.text("kiln"), fn.constant(0, I32), self.text("kernel")]
            fn.call("__assertfail", VOID, *parts, fn.constant(1, I64))

    def text(self, words: str) -> Value:
        """A text in the memory of the device."""
        name = f"@{NAME}_text{len(self.module.memory)}"
        self.module.memory.append(f'{name} = internal constant [{len(words) + 1} x i8] c"{words}\\00"')
        return Value(self.fn, name, PTR)

    def nonzero(self, divisor: Value) -> Value:
        """A divisor of integers, with 1 in place of 0: eager kernels report nothing here."""
        return divisor.compare("eq", 0).where(1, divisor)


def is_below_largest(term: Term) -> bool:
    """Whether a value is one less the largest of its row: its power matters where it is near 0."""
    return isinstance(term, Apply) and term.op == "sub" and getattr(term.args[1], "kind", "") == "amax"


def is_one(term: Term) -> bool:
    return isinstance(term, Const) and type(term.value) is float and term.value == 1.0

