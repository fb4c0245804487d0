"""Plans for a GPU: kernels on torch's current stream, in memory from torch's allocator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch

from kiln._launch import Plan
from kiln.base.dataclass import dataclass
from kiln.base.expressions import Expr, hinted
from kiln.base.graph import TensorSpec, nodes_in
from kiln.fuse.nest import Buffer, Kernel
from kiln.fuse.program import Program
from kiln.generate.device import Function, Started, generate
from kiln.generate.nvptx import WAITING
from kiln.launch.cuda import Loading, Store, context
from kiln.launch.memory import Lodging, size_of
from kiln.launch.native import set_up
from kiln.launch.plan import Planner
from kiln.launch.products import Template

SMALL = (12, 0)  # the first architecture, of those that have clusters, whose processors have 100 KB of memory
APART = 1 << 20  # bytes of a value that may have memory of its own
MUCH = 16 << 20  # bytes of what a program leaves, beside which an arena would stay
LINE = 256  # bytes at whose multiples values start: what libraries take for granted of their own memory
CUDA = 1  # torch's number for the type of device
UNUSED, FIRST_NUMBER = -1, -2  # as in _launch.h


@dataclass(eq=False, slots=True)
class OnDevice:
    """A kernel on a GPU: the functions that it starts, and what finds those for other alignments."""

    kernel: Kernel
    starts: Sequence[Started]
    handles: dict[Function, int]
    find: Callable[[Sequence[Function]], dict[Function, int]]
    others: tuple[int, ...] = ()
    code: Any = None
    clusters: bool = True
    buffers: dict[Buffer, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [g for start in self.starts for g in start.given if isinstance(g, Buffer)]
        self.buffers = {buffer: i for i, buffer in enumerate(dict.fromkeys(given))}

    def unaligned(self) -> tuple[int, ...]:
        """The functions for buffers that do not start at multiples of 16 bytes, compiled when one is met."""
        if not self.others and isinstance(self.kernel, Template):
            self.others = tuple(self.find([self.kernel.function(aligned=False)]).values())
        if not self.others:
            made = generate([self.kernel], aligned=False, clusters=self.clusters)
            handles = self.find(made.functions)
            self.others = tuple([handles[start.function] for start in made.starts[0]])
        return self.others


def bytes_left(program: Program) -> int:
    """The bytes of the results of a program."""
    made = {*nodes_in(program.graph.outputs)}.difference(program.graph.inputs)
    return sum([hinted(size_of(node.spec)) for node in made if isinstance(node.spec, TensorSpec)])


class DevicePlanner(Planner):
    """The plan of a program on a GPU in the making.

    Where values may lie `apart`, large ones of a backward pass, or of a program that leaves much, are not in
    the arena.
    """

    def __init__(
        self,
        program: Program,
        compiled: Sequence[OnDevice],
        device: tuple[int, int, int],
        early: bool = False,
        apart: bool = False,
    ) -> None:
        super().__init__(program, compiled, device)
        if apart and (any(node.backward for node in program.graph.nodes) or bytes_left(program) >= MUCH):
            # What was saved goes while gradients are made, and comes before: memory is taken bit by bit.
            self.lodgers = {node for node in self.lodgers if hinted(size_of(node.spec)) < APART}
        self.early = early  # whether kernels are started before those before them have ended
        self.unfailing = 0  # a fault ends the device's program
        tables = [start.nests for one in compiled for start in one.starts if start.table]
        self.reads_first = {nest for nests in tables for nest in nests}

    def lodge(self, name: str, spec: TensorSpec, last: int) -> Lodging:
        lodging = super().lodge(name, spec, last)
        lodging.size = (lodging.size + (LINE - 1)) // LINE * LINE
        return lodging

    def started(self, compiled: Any, buffers: tuple[Any, ...]) -> tuple[Any, ...]:
        """The step that starts the functions of a kernel."""
        starts = tuple([
            (compiled.handles[s.function], s.threads, s.function.shared, self.numbers.run((s.blocks,)),
             tuple([self.parameter(compiled, g) for g in s.given]), s.table, self.early and s.function.waits)
            for s in compiled.starts
        ])  # fmt: skip
        return "grid", starts, buffers, compiled.unaligned, ()

    def parameter(self, compiled: OnDevice, given: Any) -> int:
        if given is None:
            return UNUSED
        if isinstance(given, (Expr, int)):
            return FIRST_NUMBER - self.numbers.run((given,))
        return compiled.buffers[given]


def capability(device: torch.device) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return int(major), int(minor)


def plan_on(
    program: Program, device: torch.device, store: Store | None = None, apart: bool = False
) -> Callable[[], Plan]:
    """What gives the plan of a program on a GPU, once other threads have compiled its kernels.

    See `DevicePlanner` for `apart`.
    """
    index, architecture = device.index or 0, capability(device)

    def find(functions: Sequence[Function]) -> dict[Function, int]:
        return Loading(index, architecture, store).add(*functions).finish()

    set_up()
    new = architecture >= WAITING
    clusters = WAITING <= architecture < SMALL
    coming = Loading(index, architecture, store)
    made = generate(program.kernels, clusters=clusters, written=coming.add)
    templates = {k: k.started() for k in dict.fromkeys(program.kernels) if isinstance(k, Template)}
    coming.add(*[start.function for start in templates.values()])

    def finish() -> Plan:
        handles = coming.finish()
        kernels: list[OnDevice] = []
        for kernel, starts in zip(program.kernels, made.starts, strict=True):
            chosen = [templates[kernel]] if isinstance(kernel, Template) else starts
            kernels.append(OnDevice(kernel, chosen, handles, find, clusters=clusters))
        return DevicePlanner(program, kernels, (CUDA, index, context(index)), new, apart).plan()

    return finish
