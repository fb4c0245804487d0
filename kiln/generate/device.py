"""Kernels for a GPU: each nest that differs from the others is a function in a module of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kiln.fuse.nest import Buffer, Kernel, Nest
from kiln.generate.nvptx import ptx
from kiln.generate.ptx import GridEmitter
from kiln.generate.ptx_library import LIBRARY, library
from kiln.generate.values import NAME


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    """A function in LLVM's language, with all that it calls, and the threads of its blocks."""

    name: str
    text: str
    threads: int

    def ptx(self, capability: tuple[int, int]) -> str:
        return ptx(self.text, {self.name: self.threads}, capability)


@dataclass(frozen=True, eq=False, slots=True)
class Started:
    """A nest as it is started: its function, its blocks and their threads, what it is given.

    `given` are in the order of the function's parameters: buffers, sizes, and None for what it does not use.
    """

    function: Function
    blocks: Any
    threads: int
    given: tuple[Any, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Device:
    """The kernels of a program for a GPU: the functions, and for each kernel those to start in order."""

    functions: list[Function]
    starts: list[list[Started]]

    def ptx(self, capability: tuple[int, int]) -> str:
        """The PTX of all functions."""
        return "\n".join(function.ptx(capability) for function in self.functions)


def generate(kernels: Sequence[Kernel], aligned: bool = True) -> Device:
    """Functions for kernels; nests that differ in names alone share one."""
    writer = Writer(aligned)
    made = {kernel: [writer.start(nest) for nest in kernel.nests] for kernel in dict.fromkeys(kernels)}
    return Device(list(writer.functions.values()), [made[kernel] for kernel in kernels])


class Writer:
    """Functions under construction."""

    def __init__(self, aligned: bool) -> None:
        self.aligned = aligned
        self.functions: dict[str, Function] = {}

    def start(self, nest: Nest) -> Started:
        emitter = GridEmitter(nest, self.aligned)
        body = emitter.module.definitions()
        if body not in self.functions:
            self.functions[body] = function(body, emitter.module.declarations(), emitter.grid.threads)
        return Started(self.functions[body], emitter.blocks(), emitter.grid.threads, given(emitter))


def function(body: str, declared: dict[str, str], threads: int) -> Function:
    """A function with what it calls, under a name that follows from its text."""
    functions, called = library(name for name in declared if name in LIBRARY)
    outside = {n: t for n, t in {**declared, **called}.items() if n not in LIBRARY}
    name = f"kiln_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
    text = "\n".join([*outside.values(), functions, body.replace(f"@{NAME}", f"@{name}")])
    return Function(name, text, threads)


def given(emitter: GridEmitter) -> tuple[Buffer | Any, ...]:
    """What the parameters of a nest's function stand for."""
    known: dict[str, Any] = {f"b{i}": b for i, b in enumerate(emitter.buffers)}
    known |= {f"s{i}": s for i, s in enumerate(emitter.sizes)}
    return tuple([known.get(name) for name in emitter.fn.parameters])
