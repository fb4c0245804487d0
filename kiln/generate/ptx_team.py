"""Threads that work together: what each has folded into one, by shuffles and through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

from kiln.fuse.nest import Axis, Load, Nest
from kiln.generate.grid import WARP, WIDEST, has_weights, key_of, phases_of, power_of_two, reduced_extent
from kiln.generate.lanes import lanes
from kiln.generate.llvm import I1, I8, I32, I64, PTR, U8, VOID, Type, Value
from kiln.generate.nvptx import NEXT, WAIT
from kiln.generate.ptx_values import DeviceValues
from kiln.generate.scalar import TYPES
from kiln.generate.values import NAME

READ = 8  # places of shared memory that each thread reads itself
QUAD = 4  # of them at once
PAIR = 2  # blocks that meet at the barrier of their cluster; more of them wait for bytes
#: A word is put into the memory of a block of the cluster, whose barrier counts its bytes.
PUT = (
    "{{ .reg .b32 there, counts;"
    " mapa.shared::cluster.u32 there, $0, $2; mapa.shared::cluster.u32 counts, $1, $2;"
    " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b{bits} [there], $3, [counts]; }}"
)
#: All bytes that a barrier expects have arrived.
ARRIVED = (
    "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0;"
    " @!done bra again; }"
)
Turn: TypeAlias = "tuple[Value, Value | None]"
"""A place in a row, and whether it is there."""


class Team(DeviceValues):
    """A kernel whose threads share rows."""

    thread: Value
    block: Value
    mine: Value
    """The number of a thread in its team."""

    def __init__(self, nest: Nest, aligned: bool = True, clusters: bool = True) -> None:
        super().__init__(nest, aligned, clusters)
        self.shared = 0
        self.awaited: list[Load] = []  # elements at places that are read, to be read when those are there
        self.numbered: Value | None = None
        self.other: Value | None = None  # 1 in every other turn of a loop: threads may still read the last
        self.turn = 0  # the one being emitted, of those written out
        self.barriers: list[Value] = []  # that count the bytes of other blocks, one for each exchange
        self.exchanges = 0  # between blocks, so far
        self.let = False  # whether what comes next may have been started
        self.backwards: Value | None = None  # whether this block goes from the end of its row to the start

    def begin(self) -> None:
        """Wait for what was started before, and let what comes next start where blocks take little."""
        if self.asks():
            self.ask()
        self.fn.do(WAIT)
        if not self.grid.shared:
            self.fn.do(NEXT)

    def asks(self) -> bool:
        """Whether rows are asked for before they may be read: norms with weights read little at their end."""
        whole = self.grid.along and self.grid.members == 1 and self.nest.part is None
        return whole and bool(self.grid.turns) and self.new and has_weights(self.nest)

    def ask(self) -> None:
        """Let what a thread reads of its row come to the second cache, which is always up to date."""
        kept = {axis.variable for axis in self.nest.kept}
        loads = {key_of(t): t for t in self.nest.terms() if isinstance(t, Load)}
        own = [loads[key] for key in phases_of(self.nest) if not kept.isdisjoint(key[1].symbols())]
        for turn in range(self.grid.turns):
            self.push()
            self.along_row(self.turn_at(turn)[0])
            for load in own:
                self.do("prefetch.global.L2 [$0];", self.source(load))
            self.pop()

    def source(self, load: Load) -> Value:
        """Where a thread reads at its place."""
        return self.fn.at(self.pointers[load.buffer], self.index(load.index), TYPES[load.dtype])

    def let_next(self) -> None:
        """Let what comes next start: all of a row that takes much of a processor's memory has been read.

        Function.shared keeps blocks from crowding on the processors that are free first.
        """
        known = all(type(axis.size) is int for axis in self.nest.kept)
        if self.grid.shared and self.nest.part is None and not self.let and known:
            self.fn.do(NEXT)
        self.let = True

    def place(self, axes: Sequence[Axis], rest: Value) -> None:
        """Let loop variables have their values in turn `rest` of their loops."""
        for number, axis in enumerate(reversed(axes)):
            last = number == len(axes) - 1
            size = self.index(axis.size - axis.low)
            here = rest if last else rest % size
            self.variables[axis.variable] = here if axis.low == 0 else here + self.index(axis.low)
            rest = rest if last else rest / size

    def folded(self) -> list[Axis]:
        """The reduced axes, the one that neighbouring threads are along last."""
        axes = [a for a in self.nest.reduced if a is not self.vector]
        return axes if not self.grid.along or self.vector is None else [*axes, self.vector]

    def along_row(self, place: Value) -> None:
        """Let the loops over the reduced axes be at a place of the row."""
        self.here = place
        if self.grid.part:  # where that is in the block's part of the row
            self.here = (self.unsigned(self.thread).to(I64) + self.turn * self.grid.team) * self.grid.width
        self.place(self.folded(), place)

    def row_turns(
        self,
        carried: list[Value],
        body: Callable[[list[Turn], list[Value]], list[Value]],
        many: int,
        together: int = 1,
    ) -> list[Value]:
        """The turns of a thread along its row: in loops `many` at a time, or written out, `together`."""
        fn, grid = self.fn, self.grid
        if grid.turns:
            for start in range(0, grid.turns, together):
                turns = range(start, min(start + together, grid.turns))
                self.turn = start
                if self.fetched and not self.now:
                    self.wait_for(turns.stop)
                carried = body([self.turn_at(turn) for turn in turns], carried)
                if self.fetched and turns.stop < grid.turns:
                    self.read_places()
            return carried
        count: Any = 1
        for axis in self.nest.reduced:
            count = count * (axis.size - axis.low)
        each = grid.width if grid.along else 1
        step = grid.team * each
        end, first = self.index(count), self.mine * each
        whole_turns: Any = end / (step * many) * (step * many)
        if isinstance(count, int):
            whole_turns = count // (step * many) * (step * many)

        def some(at: Value, values: list[Value], count: int) -> list[Value]:
            return body([(at + i * step, None) for i in range(count)], values)

        if many == 1 and not isinstance(count, int):
            return fn.loop(first, end, step, carried, lambda at, values: some(at, values, 1))
        carried = fn.loop(first, whole_turns, step * many, carried, lambda at, values: some(at, values, many))
        if not isinstance(count, int):
            return fn.loop(first + whole_turns, end, step, carried, lambda at, values: some(at, values, 1))
        left: list[Turn] = []  # at once too
        for after in range(whole_turns, count, step):
            place = first + after
            valid = None if after + step <= count else place < count
            left.append((place if valid is None else valid.where(place, 0), valid))
        return body(left, carried) if left else carried

    def turn_at(self, turn: int) -> Turn:
        """The place of a turn that is written out, and whether it is in the row; if not, another place."""
        grid, total = self.grid, reduced_extent(self.nest)
        step, first = grid.team * grid.members * grid.width, self.mine * grid.width
        if self.backwards is not None and total % step == 0:
            return first + self.backwards.where(first.like((grid.turns - 1 - turn) * step), turn * step), None
        place = first + turn * step
        if (turn + 1) * step <= total:
            return place, None
        valid = place < total
        return valid.where(place, first if turn else 0), valid

    def fetch(self) -> None:
        """Begin to copy what is read of the row more than once, a group of copies for each turn."""
        loads = {key_of(t): t for t in self.nest.terms() if isinstance(t, Load)}
        outside, self.lanes = self.lanes, self.grid.width
        bytes_of = {key: self.lanes * int(key[2].itemsize) for key in self.again}
        known = all(n in (4, 8, WIDEST) for n in bytes_of.values())
        if known and all(self.granule(loads[key].index) == self.lanes for key in self.again):
            self.fetched = True
            for turn in range(self.grid.turns):
                self.turn = turn
                place, valid = self.turn_at(turn)
                with self.branch(valid) if valid is not None else nullcontext():
                    self.push()
                    self.along_row(place)
                    for key, size in bytes_of.items():
                        at = self.here.to(I32) * int(key[2].itemsize) + self.again[key].place
                        self.copy(loads[key], at, size)
                    self.pop()
                self.commit()
        self.lanes = outside

    def copy(self, load: Load, at: Value, size: int) -> None:
        """Copy what a thread reads here to a place in the block's memory, while the thread goes on."""
        cached = "cg" if size == WIDEST else "ca"
        target = self.address_of(f"@{NAME}_row") + at
        self.do(f"cp.async.{cached}.shared.global [$0], [$1], {size};", target, self.source(load))

    def commit(self) -> None:
        """What was copied since the last time is waited for at once."""
        self.do("cp.async.commit_group;")

    def wait_for(self, turns: int) -> None:
        """Wait until the first turns of the row are there."""
        self.wait_but(self.grid.turns - turns)

    def wait_but(self, left: int) -> None:
        """Wait for all copies but the last."""
        self.do(f"cp.async.wait_group {left};")

    def exchanged(
        self,
        values: list[Value],
        combine: Callable[..., list[Value]],
        neutral: list[Value],
        each: Callable[..., list[Value]] | None = None,
    ) -> list[Value]:
        """What the threads of a team have, folded into one; every thread has it, the order is always one.

        `each` combines one value of two that are folded in the same way.
        """
        grid = self.grid
        self.let_next()
        self.read_places()
        if grid.team == 1:
            return values
        if not grid.along:
            return self.through_memory(values, combine, grid.team)
        warps = grid.team // WARP
        if grid.members == 1 and warps > 1:
            paired = each is not None and len(values) == 2
            found = self.shuffled_pair(values, each) if paired else self.across(values, combine, WARP)
            return self.between_warps(found, combine, neutral, warps, [v.type for v in values])
        values = self.across(values, combine, min(grid.team, WARP))
        return self.between_blocks(values, combine, neutral, warps) if grid.members > 1 else values

    def read_places(self) -> None:
        """Read the elements at places that were read before: by now those are there."""
        outside, self.lanes = self.lanes, 1
        for load in self.awaited:
            self.value(load)
        self.awaited, self.lanes = [], outside

    def across(self, values: list[Value], combine: Callable[..., list[Value]], many: int) -> list[Value]:
        """What so many neighbouring threads have, folded into one."""
        return self.shuffled(values, combine, many)

    def in_all_threads(self, combine: Callable[..., list[Value]], count: int) -> bool:
        """Whether each thread folds all of so many values itself."""
        return count <= READ

    def shuffled(
        self, values: list[Value], combine: Callable[..., list[Value]], many: int, distance: int = 1
    ) -> list[Value]:
        while distance < many:
            values = combine(values, [self.from_thread(v, distance) for v in values])
            distance *= 2
        return values

    def shuffled_pair(self, values: list[Value], each: Any) -> list[Value]:
        """Two values at once: threads of even numbers fold the first one, the others the second."""
        first, second = values
        odd = (self.thread & 1).compare("eq", 1)
        mine, other = odd.where(second, first), odd.where(first, second)
        return self.shuffled(each([mine], [self.from_thread(other, 1)]), each, WARP, 2)

    def from_thread(self, value: Value, distance: int) -> Value:
        """The value that the thread has whose number differs in one bit."""
        fn, kind, word = self.fn, value.type, self.as_word(value)
        if kind.bits == 64:
            low, high = (self.from_thread(part.to(I32), distance) for part in (word, word >> 32))
            moved = self.unsigned(low).to(I64) | self.unsigned(high).to(I64) << 32
        else:
            all_threads, far, clamp = (fn.constant(n, I32) for n in (-1, distance, WARP - 1))
            moved = fn.call("llvm.nvvm.shfl.sync.bfly.i32", I32, all_threads, word, far, clamp)
        return self.of_word(moved, kind)

    def as_word(self, value: Value) -> Value:
        """The bits of a value in a word of 32 or 64."""
        kind = value.type
        if kind.bits < 32:
            return self.unsigned(value).to(I32)
        return self.unsigned(value.bits(I64 if kind.bits == 64 else I32) if kind.is_float else value)

    def of_word(self, word: Value, kind: Type) -> Value:
        """The value that a word has the bits of."""
        if kind.kind == "i1":
            return word.to_mask()
        return word.bits(kind) if kind.is_float else word.to(kind)

    def between_warps(
        self,
        values: list[Value],
        combine: Callable[..., list[Value]],
        neutral: list[Value],
        warps: int,
        kinds: list[Type],
    ) -> list[Value]:
        """What the first threads of warps have, one value each or all of them, folded for every thread."""
        fn, grid = self.fn, self.grid
        room = power_of_two(warps)  # of a team, so that several places are read at once
        size = room * grid.rows * (1 if self.other is None else 2)
        lane = self.unsigned(self.thread & WARP - 1).to(I64)
        first = self.unsigned(self.unsigned(self.thread) / grid.team * room).to(I64)
        first = first if self.other is None else first + self.other * (room * grid.rows)
        place = first + (self.mine >> WARP.bit_length() - 1)
        if len(values) < len(kinds):
            start = self.shared_memory(kinds[0], size * len(kinds))
            memory = [fn.at(start, i * size, kind) for i, kind in enumerate(kinds)]
            with self.branch(lane < len(kinds)):
                fn.store(values[0], fn.at(start, place + lane * size, kinds[0]))
        else:
            memory = [self.shared_memory(kind, size) for kind in kinds]
            with self.branch(lane.compare("eq", 0)):
                for m, v in zip(memory, values, strict=True):
                    fn.store(v, fn.at(m, place, v.type))
        self.barrier()

        def at(place: Value | int, many: int = 1) -> list[Value]:
            wide = [kind.wide(many) for kind in kinds]
            there = [fn.at(m, first + place, kind) for m, kind in zip(memory, kinds, strict=True)]
            return [self.from_shared(a, kind) for a, kind in zip(there, wide, strict=True)]

        if not self.in_all_threads(combine, warps):
            return self.all_of(at, warps, combine, neutral)
        many = min(room, QUAD)
        groups = [at(number, many) for number in range(0, warps, many)]
        found, *others = [[lanes(v, i % many, 1) for v in groups[i // many]] for i in range(warps)]
        for other in others:
            found = combine(found, other)
        return found

    def all_of(
        self,
        at: Callable[[Value | int], list[Value]],
        count: int,
        combine: Callable[..., list[Value]],
        neutral: list[Value],
    ) -> list[Value]:
        """What lies at so many places, folded into one: each thread reads a few, or has them of its warp."""
        if self.in_all_threads(combine, count):
            found = at(0)
            for number in range(1, count):
                found = combine(found, at(number))
            return found
        many = min(power_of_two(count), WARP)
        mine, found = self.unsigned(self.thread & many - 1).to(I64), []
        for first in range(0, count, many):
            place = mine + first
            if first + many <= count:
                here = at(place)
            else:
                valid = place < count
                read = at(valid.where(place, 0))
                here = [valid.where(v, n) for v, n in zip(read, neutral, strict=True)]
            found = combine(found, here) if found else here
        return self.across(found, combine, many)

    def between_blocks(
        self, values: list[Value], combine: Callable[..., list[Value]], neutral: list[Value], warps: int
    ) -> list[Value]:
        """Every warp puts what it has into the memory of all blocks of its row."""
        fn, total = self.fn, warps * self.grid.members
        words = [self.as_word(v) for v in values]
        memory = [self.declared(w.type, total) for w in words]
        if not self.exchanges:
            fn.call("llvm.nvvm.barrier.cluster.wait", VOID)
        lane = self.unsigned(self.thread & WARP - 1)
        warp = (self.mine >> WARP.bit_length() - 1).to(I32)
        put = self.put_and_meet if self.grid.members <= PAIR else self.put_and_count
        put(words, memory, lane, warp)
        self.exchanges += 1

        def at(place: Value | int) -> list[Value]:
            there = [fn.at(self.generic(m), place, w.type) for m, w in zip(memory, words, strict=True)]
            here = [fn.load(a, w.type) for a, w in zip(there, words, strict=True)]
            return [self.of_word(w, v.type) for w, v in zip(here, values, strict=True)]

        return self.all_of(at, total, combine, neutral)

    def put_and_meet(self, words: list[Value], memory: list[str], lane: Value, warp: Value) -> None:
        """Put words into the memory of all blocks, and wait until all of them have."""
        fn = self.fn
        with self.branch(lane < self.grid.members):
            for m, w in zip(memory, words, strict=True):
                place = fn.at(self.generic(m), self.unsigned(warp).to(I64), w.type)
                fn.store(w, fn.call("llvm.nvvm.mapa", PTR, place, lane))
        fn.call("llvm.nvvm.barrier.cluster.arrive", VOID)
        fn.call("llvm.nvvm.barrier.cluster.wait", VOID)

    def put_and_count(self, words: list[Value], memory: list[str], lane: Value, warp: Value) -> None:
        """Put words into the memory of all blocks, and wait for the bytes of theirs alone."""
        barrier, sizes = self.barriers[self.exchanges], [w.type.bits // 8 for w in words]
        expected = self.grid.members * self.grid.team // WARP * sum(sizes)
        with self.branch(self.thread.compare("eq", 0)):
            self.do(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {expected};", barrier)
        with self.branch(lane < self.grid.members):
            for m, w, size in zip(memory, words, sizes, strict=True):
                self.do(PUT.format(bits=8 * size), self.address_of(m) + warp * size, barrier, lane, w)
        self.do(ARRIVED, barrier)

    def begin_together(self) -> None:
        """Say that this block has begun, and its barriers for what others put into its memory are there."""
        if self.grid.members > PAIR:
            many = len({fold.phase for fold in self.nest.folds()})
            first = self.address_of(self.declared(I64, many))
            self.barriers = [first + 8 * i for i in range(many)]
            with self.branch(self.thread.compare("eq", 0)):
                for barrier in self.barriers:
                    self.do("mbarrier.init.shared::cta.b64 [$0], 1;", barrier)
                self.do("fence.mbarrier_init.release.cluster;")
        self.fn.call("llvm.nvvm.barrier.cluster.arrive.relaxed", VOID)

    def do(self, text: str, *operands: Value) -> None:
        """An instruction of the machine that LLVM has no name for."""
        kinds = ["l" if operand.type.bits == 64 else "r" for operand in operands]
        given = ", ".join(f"{operand.type} {operand.text}" for operand in operands)
        self.fn.do(f'call void asm sideeffect "{text}", "{",".join([*kinds, "~{memory}"])}"({given})')

    def through_memory(
        self, values: list[Value], combine: Callable[..., list[Value]], team: int
    ) -> list[Value]:
        """A team whose threads lie apart: halves take over what the others have left in shared memory."""
        grid = self.grid
        column = (self.unsigned(self.thread) % grid.rows).to(I64) * grid.width
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
        return self.generic(self.declared(kind, count))

    def declared(self, kind: Type, count: int) -> str:
        """The name of memory of the block for this many values."""
        stored = I8 if kind.kind == "i1" else kind
        name = f"@{NAME}_shared{self.shared}"
        self.shared += 1
        kind_of_memory = f"internal addrspace(3) global [{count} x {stored}]"
        self.module.memory.append(f"{name} = {kind_of_memory} poison, align 16")
        return name

    def generic(self, name: str) -> Value:
        """A pointer to memory of the block."""
        return Value(self.fn, f"addrspacecast (ptr addrspace(3) {name} to ptr)", PTR)

    def address_of(self, name: str) -> Value:
        """Where something is in the memory of the block."""
        return Value(self.fn, f"ptrtoint (ptr addrspace(3) {name} to i32)", I32)

    def barrier(self) -> None:
        """Wait for the threads of the block, or of the team where that has a number of its own."""
        if self.numbered is None:
            self.fn.call("llvm.nvvm.barrier0", VOID)
        elif self.grid.team > WARP:
            threads = self.fn.constant(self.grid.team, I32)
            self.fn.call("llvm.nvvm.barrier.cta.sync.aligned.count", VOID, self.numbered, threads)
