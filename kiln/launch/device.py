"""Programs on a GPU: kernels on torch's current stream, in memory from torch's allocator."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kiln._cuda import Kernel
from kiln.base.graph import CONSTANT, Graph, Node, TensorSpec, mapped
from kiln.base.symbols import Expr
from kiln.fuse.program import Program
from kiln.fuse.steps import Launch
from kiln.generate.device import Device, Started, generate
from kiln.launch.cuda import Loaded, context

_empty = torch.empty_strided


class Prepared:
    """A kernel to be made callable: where its buffers are among the tensors of a call, what it makes."""

    def __init__(self, step: Launch, device: torch.device) -> None:
        self.step, self.device = step, device
        self.inputs = list(step.reads.values())
        self.outputs = list(step.writes.values())
        made: list[TensorSpec] = [n.spec for n in self.outputs]
        self.specs = made + [replace(spec, device=device) for spec in step.scratch.values()]
        self.places: dict[Any, int] = {b: i for i, b in enumerate([*step.reads, *step.writes, *step.scratch])}

    def sizes(self, starts: Sequence[Started]) -> list[Any]:
        """The sizes that functions are given, once each."""
        return list(dict.fromkeys(g for s in starts for g in s.given if isinstance(g, Expr)))

    def numbers(self, starts: Sequence[Started]) -> tuple[Any, ...]:
        """What varies from call to call, as the callable kernel takes it after its tensors."""
        layouts = [part for spec in self.specs for part in (spec.shape, spec.stride)]
        numbers = (*layouts, *self.sizes(starts), *[s.blocks for s in starts])
        return numbers if self.moving(starts) else ()

    def moving(self, starts: Sequence[Started]) -> bool:
        numbers = [*[s.blocks for s in starts], *(n for s in self.specs for n in (*s.shape, *s.stride))]
        return bool(self.sizes(starts)) or not all(type(n) is int for n in numbers)

    def kernel(self, starts: Sequence[Started], loaded: Loaded, aligned: bool = True) -> Kernel:
        """The kernel as a function from tensors to a tuple of new ones; see `_cuda.c` for what it takes."""
        moving, sizes = self.moving(starts), self.sizes(starts)
        codes: dict[Any, int] = {**self.places, **{s: -2 - i for i, s in enumerate(sizes)}, None: -1}
        made = tuple([
            (None if moving else (s.shape, s.stride), {"dtype": s.dtype, "device": s.device})
            for s in self.specs
        ])  # fmt: skip
        index = self.device.index or 0
        return Kernel(
            tuple([
                (loaded.function(s.function), s.threads, 0 if moving else s.blocks,
                 tuple([codes[g] for g in s.given]))
                for s in starts
            ]),
            (self, loaded), _empty, made, self.step.kernel.name, len(self.inputs), len(sizes), moving, index,
            torch._C._cuda_getCurrentRawStream, context(index), self.unaligned if aligned else None,
        )  # fmt: skip

    def unaligned(self, *arguments: Any) -> tuple[Any, ...]:
        """The same for tensors that do not start at a multiple of 16 bytes, compiled when one is met."""
        if not hasattr(self, "_unaligned"):
            made = generate([self.step.kernel], capability(self.device), aligned=False)
            self._unaligned = self.kernel(made.starts[0], Loaded(made.text, self.device.index or 0), False)
        return self._unaligned(*arguments)


def capability(device: torch.device) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return int(major), int(minor)


def linked(program: Program, device: torch.device) -> Graph:
    """The program as a graph whose nodes are eager calls and kernels."""
    launches = [step for step in program.steps if isinstance(step, Launch)]
    made: Device = generate([launch.kernel for launch in launches], capability(device))
    loaded = Loaded(made.text, device.index or 0) if made.text else None
    starts = dict(zip(launches, made.starts, strict=True))
    graph, known = Graph(), dict[Node, Node]()
    for node in program.graph.inputs:
        known[node] = graph.input(node.name, node.spec)

    def value(leaf: Any) -> Any:
        return known[leaf] if type(leaf) is Node else leaf

    for node in program.graph.nodes:
        if node.op is CONSTANT:
            known[node] = graph.add(Node(CONSTANT, node.args, {}, node.spec, graph.name(node.name)))
    for step in program.steps:
        if isinstance(step, Launch):
            assert loaded is not None
            prepared = Prepared(step, device)
            arguments = (*[known[n] for n in prepared.inputs], *prepared.numbers(starts[step]))
            call = prepared.kernel(starts[step], loaded)
            whole = graph.call(call, arguments, spec=tuple(prepared.specs))
            for i, node in enumerate(prepared.outputs):
                known[node] = graph.call(operator.getitem, (whole, i), spec=node.spec, like=node)
        else:
            node = step.node
            args, kwargs = mapped(node.args, value), mapped(node.kwargs, value)
            known[node] = graph.add(Node(node.op, args, kwargs, node.spec, graph.name(node.name)))
    graph.outputs = mapped(program.graph.outputs, value)
    return graph.check()
