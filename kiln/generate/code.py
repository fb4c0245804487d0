"""Kernels to machine code: all kernels of a program in one module."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from time import perf_counter
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet, WeakValueDictionary

from kiln.base import records
from kiln.base.dataclass import dataclass
from kiln.base.symbols import Expr
from kiln.fuse.nest import Buffer, Kernel, Nest
from kiln.fuse.turns import InTurns, of_a_plane
from kiln.generate.alike import form, of_any_length
from kiln.generate.blocks import blocked
from kiln.generate.cpu import Code, Making, compiling, depends_on, host, joined, load
from kiln.generate.kernel import Emitter
from kiln.generate.llvm import BRIEF, I64, PTR, Function, Module, Value
from kiln.generate.scalar import TYPES
from kiln.generate.schedule import USUAL, Schedule
from kiln.generate.values import NAME

ENTRY = "entry"  # the function of a stage while it is written


@dataclass(frozen=True, eq=False, slots=True)
class Compiled:
    """A kernel in machine code: the functions and tasks of its stages, the order of its buffers and sizes."""

    kernel: Kernel
    tasks: tuple[Any, ...]
    buffers: tuple[Buffer, ...]
    sizes: tuple[Any, ...]
    code: Coming
    names: tuple[str, ...]
    """The functions of the stages in the text of the module."""


class Store(Protocol):
    """Where machine code is kept between processes."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, data: bytes) -> None: ...


_loaded: WeakValueDictionary[str, Code] = WeakValueDictionary()
"""The machine code in use in this process, by key."""

_in_the_making: WeakSet[Coming] = WeakSet()
# What other threads work on is not there in a process that is forked off.
os.register_at_fork(
    before=lambda: wait([part.future for code in list(_in_the_making) for part in code.parts])
)


Schedules: TypeAlias = Mapping[Kernel, Schedule]
"""How kernels run, where it is not the usual way."""

Revise: TypeAlias = Callable[[str], str]
"""Gives the text of a module that is compiled in place of another."""


def generate(
    kernels: Sequence[Kernel],
    store: Store | None = None,
    revise: Revise = lambda text: text,
    schedules: Schedules = MappingProxyType({}),
) -> list[Compiled]:
    """Machine code for kernels, in their order; what differs in names and where it begins alone shares it."""
    if not kernels:
        return []
    started = perf_counter()
    writer = Writer(host().vector_bytes // 4)
    entries = {k: Entries(k, writer, schedules.get(k, USUAL)) for k in dict.fromkeys(kernels)}
    code = code_for(revise(writer.text()), store)
    counts = len(kernels), len(writer.entries), len(writer.nests)
    code.report(lambda: records.emit(records.CodeRecord(*counts, code.source, perf_counter() - started)))
    made = {kernel: e.compiled(code) for kernel, e in entries.items()}
    return [made[kernel] for kernel in kernels]


def variant(kernel: Kernel, schedule: Schedule) -> tuple[str, Callable[[], Compiled]]:
    """The text of a kernel under a schedule, and what compiles it."""
    writer = Writer(host().vector_bytes // 4)
    entries = Entries(kernel, writer, schedule)
    text = writer.text()
    return text, lambda: entries.compiled(code_for(text, None))


class Coming:
    """Machine code that other threads may still be at work on; `source` says where it comes from."""

    def __init__(self, key: str, text: str, store: Store | None) -> None:
        self.key, self._store = key, store
        self.parts: list[Making] = []
        self._report: Callable[[], None] | None = None
        self._code, self.source = kept_code(key, store)
        if self._code is None:
            self.source = "compiled"
            self.parts = compiling(text)
            _in_the_making.add(self)

    @property
    def is_here(self) -> bool:
        return self._code is not None

    def report(self, report: Callable[[], None]) -> None:
        """Call this once the code is there."""
        if self.is_here:
            report()
        else:
            self._report = report

    def wait(self) -> Code:
        """The code, when it is there."""
        if self._code is None:
            data = joined([part.result() for part in self.parts])
            if self._store is not None:
                self._store.put(self.key, data)
            self._code = _ready(self.key, data)
            _in_the_making.discard(self)
            if self._report is not None:
                self._report()
        return self._code


def kept_code(key: str, store: Store | None) -> tuple[Code | None, str]:
    """The code of a key, where it is in "memory" or on "disk"."""
    code = _loaded.get(key)
    if code is not None:
        return code, "memory"
    data = store.get(key) if store is not None else None
    return (None, "") if data is None else (_ready(key, data), "disk")


def _ready(key: str, data: bytes) -> Code:
    code = _loaded[key] = load(data)
    code.key = key
    return code


def code_for(text: str, store: Store | None) -> Coming:
    """Machine code for a module."""
    # The text says all that the functions do: nothing of how it came about belongs into the key.
    return Coming(hashlib.sha256(f"{depends_on()}\n{text}".encode()).hexdigest(), text, store)


Piece: TypeAlias = "tuple[str, list[int], list[Any], Any]"
"""A function for a nest or a part of one: its name, which buffers and sizes it is given, its tasks."""


class Writer:
    """The text of a module: a function for each nest, and for each stage, that differs from the others."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.nests: dict[str, str] = {}
        self.entries: dict[str, str] = {}
        self.declared: dict[str, str] = {}
        self.written: dict[Any, tuple[list[Piece], tuple[int, ...]]] = {}
        self.forms: dict[Nest, tuple[Any, tuple[int, ...]]] = {}

    def nest(self, nest: Nest, alone: bool, schedule: Schedule) -> tuple[list[Piece], list[int]]:
        """The functions of a nest, alike, of any length; and by how much its buffers begin after theirs."""
        like = nest.like or nest
        if like not in self.forms:
            self.forms[like] = form(like)
        found, begins = self.forms[like]
        key = found, alone, schedule
        if key not in self.written:
            used, parts = nest.used(), blocked(nest, self.width >> schedule.narrower)
            self.written[key] = [self.piece(used, part, alone, schedule) for part in parts], begins
        pieces, first = self.written[key]
        return pieces, [mine - its for mine, its in zip(begins, first, strict=True)]

    def piece(self, used: list[Buffer], nest: Nest, alone: bool, schedule: Schedule) -> Piece:
        """One function: its name, the places of its buffers among those used, its sizes and its tasks."""
        general, lengths = (None if alone else of_any_length(nest)) or (nest, {})
        emitter = Emitter(general, self.width >> schedule.narrower, schedule)
        self.declared.update(emitter.module.declarations())
        name = self.nests.setdefault(emitter.module.definitions(), f"nest{len(self.nests)}")
        tasks = emitter.tasks()
        if isinstance(tasks, Expr) and lengths:
            tasks = tasks.evaluate(lengths)
        places = [used.index(buffer) for buffer in emitter.buffers]
        return name, places, [lengths.get(s, s) for s in emitter.sizes], tasks

    def entry(self, module: Module) -> str:
        """The name of the function of a stage."""
        return self.entries.setdefault(module.definitions(), f"entry{len(self.entries)}")

    def text(self) -> str:
        bodies = [text.replace(f"@{NAME}(", f"@{name}(") for text, name in self.nests.items()]
        bodies += [text.replace(f"@{ENTRY}(", f"@{name}(") for text, name in self.entries.items()]
        return "\n".join([*self.declared.values(), *bodies])


class Entries:
    """The functions that are called for a kernel, one for each stage: tasks go through all of its nests."""

    def __init__(self, kernel: Kernel, writer: Writer, schedule: Schedule) -> None:
        self.kernel, self.writer, self.schedule = kernel, writer, schedule
        reads, writes = kernel.buffers()
        self.buffers = {buffer: i for i, buffer in enumerate([*reads, *writes])}
        self.sizes: dict[Any, int] = {}
        self.names: list[str] = []
        self.tasks = [self.stage(stage) for stage in kernel.stages]

    def compiled(self, code: Coming) -> Compiled:
        """The kernel with its functions in machine code."""
        parts = tuple(self.tasks), tuple(self.buffers), tuple(self.sizes)
        return Compiled(self.kernel, *parts, code, tuple(self.names))

    def stage(self, nests: Sequence[Nest]) -> Any:
        """Write the entry of a stage: `void (ptr buffers, ptr sizes, ptr status, i64 begin, i64 end)`."""
        module = Module()
        pointers = [("buffers", PTR), ("sizes", PTR), ("status", PTR)]
        fn = module.function(ENTRY, [*pointers, ("begin", I64), ("end", I64)])
        fn.attributes = BRIEF
        first, last = fn.parameters["begin"], fn.parameters["end"]

        def listed(value: Any) -> Any:
            place = self.sizes.setdefault(value, len(self.sizes))
            return fn.load(fn.at(fn.parameters["sizes"], place, I64), I64)

        def size(value: Any) -> Any:
            return listed(value) if isinstance(value, Expr) else fn.constant(value, I64)

        def pointer(buffer: Buffer, ahead: int) -> Any:
            base = fn.load(fn.at(fn.parameters["buffers"], self.buffers[buffer], I64), PTR)
            return fn.at(base, listed(ahead), TYPES[buffer.dtype]) if ahead else base

        def run(body: str, given: list[Any], low: Any, high: Any) -> None:
            given = [*given, fn.parameters["status"], low, high]
            fn.do(f"call void @{body}({', '.join(f'{g.type} {g.text}' for g in given)})")

        if isinstance(self.kernel, InTurns):
            self.in_turns(fn, self.kernel, pointer, run)
            fn.do("ret void")
            self.names.append(self.writer.entry(module))
            return math.prod(self.kernel.planes)
        total: Any = 0
        pieces: list[tuple[list[Buffer], list[int], Piece]] = []
        for nest in nests:
            made, ahead = self.writer.nest(nest, len(nests) == 1, self.schedule)
            pieces += [(nest.used(), ahead, piece) for piece in made]
        for used, ahead, (body, places, sizes, tasks) in pieces:
            given = [pointer(used[place], ahead[place]) for place in places]
            given += map(size, sizes)
            low, high = first, last
            if len(pieces) > 1:
                start, end = size(total), size(total + tasks)
                low = (first > start).where(first, start) - start
                high = (last < end).where(last, end) - start
            run(body, given, low, high)
            total = total + tasks
        fn.do("ret void")
        self.names.append(self.writer.entry(module))
        return total

    def in_turns(
        self, fn: Function, kernel: InTurns, pointer: Callable[..., Any], run: Callable[..., None]
    ) -> None:
        """Write the loop over the turns of nests that follow each other in each of them."""
        rooms = [(b, f"[{count} x {TYPES[b.dtype]}]") for b, count in kernel.held.items()]
        held = {buffer: fn.at_entry(f"alloca {room}, align 64") for buffer, room in rooms}
        inner = [of_a_plane(nest, kernel.depth) for nest in kernel.nests]

        def turn(i: Value, _: list[Value]) -> list[Value]:
            turns: list[Value] = []
            for size in reversed(kernel.planes[1:]):
                i, turns = i / size, [i - i / size * size, *turns]
            turns.insert(0, i)
            for nest, moves in inner:
                pieces, ahead = self.writer.nest(nest, True, self.schedule)
                for body, places, _, tasks in pieces:
                    given = []
                    for buffer, more in [(nest.used()[place], ahead[place]) for place in places]:
                        base = held.get(buffer) or pointer(buffer, more)
                        # Alike nests have one function: what they hold may begin elsewhere, too.
                        move: Any = more if buffer in held else 0
                        for at, step in zip(turns, moves[buffer], strict=True):
                            move = at * step + move if step and buffer not in held else move
                        given.append(fn.at(base, move, TYPES[buffer.dtype]) if move else base)
                    run(body, given, fn.constant(0, I64), fn.constant(tasks, I64))
            return []

        fn.loop(fn.parameters["begin"], fn.parameters["end"], 1, [], turn)
