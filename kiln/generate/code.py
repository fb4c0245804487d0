"""Kernels to machine code: all kernels of a program in one module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kiln.base.symbols import LIMIT, Expr, Symbol
from kiln.fuse.nest import Buffer, Kernel, Nest
from kiln.generate.cpu import Code, compile_text, host
from kiln.generate.kernel import Emitter
from kiln.generate.llvm import I64, PTR, Module
from kiln.generate.values import NAME


@dataclass(frozen=True, eq=False, slots=True)
class Compiled:
    """A kernel in machine code: the addresses and tasks of its stages, the order of its buffers and sizes."""

    kernel: Kernel
    addresses: tuple[int, ...]
    tasks: tuple[Any, ...]
    buffers: tuple[Buffer, ...]
    sizes: tuple[Any, ...]
    code: Code


def generate(kernels: Sequence[Kernel]) -> list[Compiled]:
    """Machine code for kernels, in their order; nests that differ in names alone share it."""
    if not kernels:
        return []
    writer = Writer(host().vector_bytes // 4)
    entries = [Entries(kernel, writer, f"entry{i}") for i, kernel in enumerate(kernels)]
    code = compile_text(writer.text())
    return [
        Compiled(
            e.kernel,
            tuple([code.address(name) for name in e.names]),
            tuple(e.tasks),
            tuple(e.buffers),
            tuple(e.sizes),
            code,
        )
        for e in entries
    ]


class Writer:
    """The text of a module: a function for each nest that differs from the others, and entries."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.names: dict[str, str] = {}
        self.declared: dict[str, str] = {}
        self.entries = Module()

    def nest(self, nest: Nest) -> tuple[Emitter, str]:
        """What was emitted for a nest, and the name of its function."""
        emitter = Emitter(nest, self.width)
        self.declared.update(emitter.module.declarations())
        return emitter, self.names.setdefault(emitter.module.definitions(), f"nest{len(self.names)}")

    def text(self) -> str:
        bodies = [text.replace(f"@{NAME}(", f"@{name}(") for text, name in self.names.items()]
        return "\n".join([*self.declared.values(), *bodies, self.entries.definitions()])


class Entries:
    """The functions that are called for a kernel, one for each stage: tasks go through all of its nests."""

    def __init__(self, kernel: Kernel, writer: Writer, name: str) -> None:
        self.kernel, self.writer = kernel, writer
        reads, writes = kernel.buffers()
        self.buffers = {buffer: i for i, buffer in enumerate([*reads, *writes])}
        self.sizes: dict[Any, int] = {}
        self.names = [f"{name}_{i}" for i in range(len(kernel.stages))]
        self.tasks = [self.stage(n, stage) for n, stage in zip(self.names, kernel.stages, strict=True)]

    def stage(self, name: str, nests: Sequence[Nest]) -> Any:
        """Write the entry of a stage: `void (ptr buffers, ptr sizes, ptr status, i64 begin, i64 end)`."""
        pointers = [("buffers", PTR), ("sizes", PTR), ("status", PTR)]
        fn = self.writer.entries.function(name, [*pointers, ("begin", I64), ("end", I64)])
        first, last = fn.parameters["begin"], fn.parameters["end"]

        def size(value: Any) -> Any:
            if not isinstance(value, Expr):
                return fn.constant(value, I64)
            place = self.sizes.setdefault(value, len(self.sizes))
            return fn.load(fn.at(fn.parameters["sizes"], place, I64), I64)

        total: Any = 0
        for nest in nests:
            general, lengths = of_any_length(nest) if len(nests) > 1 else (nest, {})
            emitter, body = self.writer.nest(general)
            tasks = emitter.tasks()
            if isinstance(tasks, Expr) and lengths:
                tasks = tasks.evaluate(lengths)
            given = [
                fn.load(fn.at(fn.parameters["buffers"], self.buffers[b], I64), PTR) for b in emitter.buffers
            ]
            given += [size(lengths.get(s, s)) for s in emitter.sizes]
            low, high = first, last
            if len(nests) > 1:
                start, end = size(total), size(total + tasks)
                low = (first > start).where(first, start) - start
                high = (last < end).where(last, end) - start
            given += [fn.parameters["status"], low, high]
            fn.do(f"call void @{body}({', '.join(f'{g.type} {g.text}' for g in given)})")
            total = total + tasks
        fn.do("ret void")
        return total


def of_any_length(nest: Nest) -> tuple[Nest, dict[Symbol, int]]:
    """A nest of one loop with its length as a size: one function does for all such nests of a stage."""
    if len(nest.axes) != 1 or type(nest.axes[0].size) is not int or nest.axes[0].reduced:
        return nest, {}
    (axis,) = nest.axes
    length = Symbol(axis.variable.scope, "n", axis.size, "", 0, LIMIT)
    return Nest((replace(axis, size=length),), nest.stores), {length: axis.size}
