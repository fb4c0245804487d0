"""Kernels to PTX: all nests of a program in one module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kiln.fuse.nest import Buffer, Kernel, Nest
from kiln.generate.nvptx import ptx
from kiln.generate.ptx import GridEmitter
from kiln.generate.ptx_library import LIBRARY, library
from kiln.generate.values import NAME


@dataclass(frozen=True, eq=False, slots=True)
class Started:
    """A nest as it is started: the name of its function, its blocks and their threads, what it is given.

    `given` are in the order of the function's parameters: buffers, sizes, and None for what it does not use.
    """

    function: str
    blocks: Any
    threads: int
    given: tuple[Any, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Device:
    """The kernels of a program for a GPU: PTX, and for each kernel the functions to start in order."""

    text: str
    starts: list[list[Started]]


def generate(kernels: Sequence[Kernel], capability: tuple[int, int], aligned: bool = True) -> Device:
    """PTX for kernels; nests that differ in names alone share a function."""
    writer = Writer(aligned)
    starts = [[writer.start(nest) for nest in kernel.nests] for kernel in kernels]
    return Device(writer.ptx(capability) if writer.names else "", starts)


class Writer:
    """A module under construction."""

    def __init__(self, aligned: bool) -> None:
        self.aligned = aligned
        self.names: dict[str, str] = {}
        self.threads: dict[str, int] = {}
        self.declared: dict[str, str] = {}

    def start(self, nest: Nest) -> Started:
        emitter = GridEmitter(nest, self.aligned)
        self.declared.update(emitter.module.declarations())
        name = self.names.setdefault(emitter.module.definitions(), f"nest{len(self.names)}")
        self.threads[name] = emitter.grid.threads
        return Started(name, emitter.blocks(), emitter.grid.threads, given(emitter))

    def text(self) -> str:
        bodies = [text.replace(f"@{NAME}", f"@{name}") for text, name in self.names.items()]
        functions, called = library(name for name in self.declared if name in LIBRARY)
        declared = {n: t for n, t in {**self.declared, **called}.items() if n not in LIBRARY}
        return "\n".join([*declared.values(), functions, *bodies])

    def ptx(self, capability: tuple[int, int]) -> str:
        return ptx(self.text(), self.threads, capability)


def given(emitter: GridEmitter) -> tuple[Buffer | Any, ...]:
    """What the parameters of a nest's function stand for."""
    known: dict[str, Any] = {f"b{i}": b for i, b in enumerate(emitter.buffers)}
    known |= {f"s{i}": s for i, s in enumerate(emitter.sizes)}
    return tuple([known.get(name) for name in emitter.fn.parameters])
