"""Threads that work together: what each has folded into one, by shuffles and through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kiln.fuse.nest import Axis, Nest
from kiln.generate.grid import WARP
from kiln.generate.llvm import I1, I8, I32, I64, PTR, U8, VOID, Type, Value
from kiln.generate.ptx_values import DeviceValues
from kiln.generate.values import NAME


class Team(DeviceValues):
    """A kernel whose threads share rows."""

    thread: Value
    block: Value
    mine: Value
    """The number of a thread in its team."""
    step: int
    """How many elements a team takes in one turn."""

    def __init__(self, nest: Nest, aligned: bool = True) -> None:
        super().__init__(nest, aligned)
        self.shared = 0

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

    def shared_turns(
        self, carried: list[Value], body: Callable[[Value, list[Value], int], list[Value]], many: int
    ) -> list[Value]:
        """A loop over a thread's turns of the reduced axes, `many` at a time, and what is left one by one."""
        fn, grid = self.fn, self.grid
        count: Any = 1
        for axis in self.nest.reduced:
            count = count * (axis.size - axis.low)
        each = grid.width if grid.along else 1
        step = self.step = grid.team * each
        end, first = self.index(count), self.mine * each
        whole_turns = end / (step * many) * (step * many)
        carried = fn.loop(first, whole_turns, step * many, carried, lambda at, values: body(at, values, many))
        return fn.loop(first + whole_turns, end, step, carried, lambda at, values: body(at, values, 1))

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
