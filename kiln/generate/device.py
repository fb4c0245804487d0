"""Kernels for a GPU: each nest that differs from the others is a function in a module of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.expressions import evaluate
from kiln.fuse.neighbours import length_of, results_at_once
from kiln.fuse.nest import Buffer, Kernel, Nest
from kiln.fuse.stages import together
from kiln.generate.alike import form, of_any_length
from kiln.generate.grid import power_of_two, spread
from kiln.generate.nvptx import ptx
from kiln.generate.ptx import GridEmitter
from kiln.generate.ptx_library import LIBRARY, library
from kiln.generate.ptx_strips import StripEmitter
from kiln.generate.ptx_table import LEAST_VERSION, SMALL, WORD, TableEmitter, most_entries
from kiln.generate.values import NAME

#: The least version of PTX whose blocks put words into each other's memory and count their bytes.
CLUSTERS_VERSION = 81


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    """A function in LLVM's language, with all that it calls, and the threads of its blocks.

    `shared` are the bytes of a block's memory that it is started with, beyond those that it declares;
    `version` is the least one of PTX that has what it needs; `waits` says whether it waits itself for what
    was started before it, where the machine can.
    """

    name: str
    text: str
    threads: int
    shared: int = 0
    version: int = 0
    waits: bool = False

    def ptx(self, capability: tuple[int, int]) -> str:
        return ptx(self.text, {self.name: self.threads}, capability, self.version)


@dataclass(frozen=True, eq=False, slots=True)
class Started:
    """Nests as they are started at once: their function, its blocks and their threads, what it is given.

    `given` are in the order of the function's parameters: buffers, sizes, and None for what it does not use.
    They are one parameter, a table, where there are several nests.
    """

    function: Function
    blocks: Any
    threads: int
    given: tuple[Any, ...]
    nests: tuple[Nest, ...]

    @property
    def table(self) -> bool:
        return len(self.nests) > 1


@dataclass(frozen=True, eq=False, slots=True)
class Device:
    """The kernels of a program for a GPU: the functions, and for each kernel those to start in order."""

    functions: list[Function]
    starts: list[list[Started]]

    def ptx(self, capability: tuple[int, int]) -> str:
        """The PTX of all functions."""
        return "\n".join(function.ptx(capability) for function in self.functions)


def generate(
    kernels: Sequence[Kernel], aligned: bool = True, clusters: bool = True,
    written: Callable[[Function], object] = lambda function: None,
) -> Device:  # fmt: skip
    """Functions for kernels; nests that differ in names alone share one.

    They may expect all buffers `aligned` to 16 bytes, and neighbouring blocks that share rows (`clusters`).
    `written` is told of each as soon as it is there: those that take longest to compile come first.
    """
    writer = Writer(aligned, clusters, written)
    order = sorted(dict.fromkeys(kernels), key=lambda k: max(map(length_of, k.nests), default=0))
    made = {k: [s for stage in k.stages for s in writer.stage(stage)] for k in reversed(order)}
    starts = [made[kernel] for kernel in kernels]
    return Device(list(dict.fromkeys(s.function for some in starts for s in some)), starts)


class Writer:
    """Functions under construction."""

    def __init__(self, aligned: bool, clusters: bool, written: Callable[[Function], object]) -> None:
        self.aligned, self.clusters, self.written = aligned, clusters, written
        self.functions: dict[tuple[str, int], Function] = {}
        self.forms: dict[Nest, Any] = {}
        self.alone: dict[Any, tuple[Function, Any, tuple[Any, ...]]] = {}

    def stage(self, nests: Sequence[Nest]) -> list[Started]:
        """What is started for a stage: nests that differ in their lengths alone at once."""
        alike: dict[Any, list[Entry]] = {}
        forms: dict[Nest, Form] = {}
        for nest in nests:
            first = nest.like or nest
            if first not in forms:
                forms[first] = Form.of(nest, of_any_length(nest) if len(nests) > 1 else None)
            found = forms[first]
            alike.setdefault(nest if found.body is None else found.body, []).append(Entry(nest, found))
        several = [started for same in alike.values() if len(same) > 1 for started in self.starts(same)]
        alone = together([same[0].nest for same in alike.values() if len(same) == 1])
        return [*several, *[self.start(nest) for nest in alone]]

    def starts(self, same: Sequence[Entry]) -> list[Started]:
        """The starts of nests of one body."""
        most = most_entries(1 + len(same[0].given())) if len(same) > 1 else 1
        return [self.at_once(same[i : i + most]) for i in range(0, len(same), max(most, 1))]

    def start(self, nest: Nest) -> Started:
        """The start of a nest; what is alike but for its buffers is written once."""
        like = nest.like or nest
        if like not in self.forms:
            self.forms[like] = form(like)
        key, used = self.forms[like], nest.used()
        if key not in self.alone:
            self.alone[key] = self.started(nest, used)
        made, blocks, places = self.alone[key]
        parameters = tuple([used[place] if type(place) is Used else place for place in places])
        return Started(made, blocks, made.threads, parameters, (nest,))

    def started(self, nest: Nest, used: list[Buffer]) -> tuple[Function, Any, tuple[Any, ...]]:
        """A nest's function, its blocks, and what it is given: buffers by their place among those used."""
        nest = results_at_once(nest)
        emitter = (GridEmitter if nest.part is None else StripEmitter)(nest, self.aligned, self.clusters)
        shared = spread(emitter.grid, emitter.blocks()) if self.clusters and nest.part is None else None
        made = self.function(emitter, CLUSTERS_VERSION if emitter.grid.members > 1 else 0, shared)
        places = {buffer: Used(place) for place, buffer in enumerate(used)}
        return made, emitter.blocks(), tuple([places.get(g, g) for g in given(emitter)])

    def at_once(self, same: Sequence[Entry]) -> Started:
        if len(same) == 1:
            return self.start(same[0].nest)
        emitter = TableEmitter(same[0].form.general, self.aligned, power_of_two(len(same)))
        words: list[Any] = []
        total = 0
        for entry in same:
            words += [total, *entry.given()]
            total += entry.form.blocks
        for _ in range(len(same), emitter.entries):
            words += [total, *[None] * (emitter.words - 1)]
        nests = tuple([entry.nest for entry in same])
        version = LEAST_VERSION if len(words) * WORD > SMALL else 0
        return Started(self.function(emitter, version), total, emitter.grid.threads, tuple(words), nests)

    def function(self, emitter: GridEmitter, version: int = 0, shared: int | None = None) -> Function:
        body, grid = emitter.module.definitions(), emitter.grid
        key = body, grid.shared if shared is None else shared
        if key not in self.functions:
            made = function(body, emitter.module.declarations(), grid.threads, key[1], version)
            self.functions[key] = made
            self.written(made)
        return self.functions[key]


class Used(int):
    """The place of a buffer among those that a nest uses."""


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """A nest as one of any length, where it has such a form: its sizes, and the blocks for its own length.

    Nests that have a `body` in common are started at once; without one a nest is started alone.
    """

    general: Nest
    body: str | None
    sizes: tuple[Any, ...] = ()
    blocks: int = 0

    @staticmethod
    def of(nest: Nest, general: tuple[Nest, dict[Any, int]] | None) -> Form:
        if general is None:
            return Form(nest, None)
        emitter, lengths = GridEmitter(general[0]), general[1]
        sizes = tuple([lengths.get(s, s) for s in emitter.sizes])
        blocks = int(evaluate(emitter.blocks(), lengths))
        return Form(general[0], emitter.module.definitions(), sizes, blocks)


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """A nest as an entry of a table."""

    nest: Nest
    form: Form

    def given(self) -> list[Any]:
        """What follows the number of its first block: buffers and sizes."""
        return [*self.nest.used(), *self.form.sizes]


def function(body: str, declared: dict[str, str], threads: int, shared: int, version: int = 0) -> Function:
    """A function with what it calls, under a name that follows from its text."""
    functions, called = library(name for name in declared if name in LIBRARY)
    outside = {n: t for n, t in {**declared, **called}.items() if n not in LIBRARY}
    name = f"kiln_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
    text = "\n".join([*outside.values(), functions, body.replace(f"@{NAME}", f"@{name}")])
    return Function(name, text, threads, shared, version, waits=True)


def given(emitter: GridEmitter) -> tuple[Buffer | Any, ...]:
    """What the parameters of a nest's function stand for."""
    known: dict[str, Any] = {f"b{i}": b for i, b in enumerate(emitter.buffers)}
    known |= {f"s{i}": s for i, s in enumerate(emitter.sizes)}
    return tuple([known.get(name) for name in emitter.fn.parameters])
