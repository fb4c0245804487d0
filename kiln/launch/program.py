"""Programs that run: a fused graph as a function from the inputs' values to the outputs."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kiln.base.fx import runner
from kiln.base.graph import CONSTANT, Graph, Node, TensorSpec, mapped
from kiln.expand.expand import expand
from kiln.fuse.group import Launch, Program, fuse
from kiln.fuse.loops import FOR_LOOPS
from kiln.generate.code import Compiled, generate

_empty = torch.empty_strided


class KernelCall:
    """Allocates a kernel's outputs and runs it on the memory of tensors."""

    def __init__(self, compiled: Compiled, reads: dict[Any, int], writes: Sequence[TensorSpec]) -> None:
        self.compiled = compiled
        self.entry = compiled.entry
        self.tasks = compiled.tasks
        self.writes = writes
        self.__name__ = compiled.kernel.name
        self.order = [reads[buffer] for buffer in compiled.buffers]
        self.pointers = ctypes.c_void_p * len(self.order)

    def __call__(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int], tasks: int, shapes: Sequence[Any]
    ) -> list[torch.Tensor]:
        made = [
            _empty(shape, stride, dtype=spec.dtype)
            for (shape, stride), spec in zip(shapes, self.writes, strict=True)
        ]
        addresses = [t.data_ptr() for t in (*tensors, *made)]
        given = (ctypes.c_int64 * len(sizes))(*sizes) if sizes else None
        status = ctypes.c_int64(0)
        self.entry(self.pointers(*[addresses[i] for i in self.order]), given, ctypes.addressof(status), 0, tasks)
        if status.value:
            raise IndexError("index out of range in self")
        return made


def linked(program: Program) -> Graph:
    """The program as a graph whose nodes are eager calls and kernels."""
    launches = [step for step in program.steps if isinstance(step, Launch)]
    compiled = dict(zip(launches, generate([launch.kernel for launch in launches]), strict=True))
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
            outputs = list(step.writes.values())
            inputs = list(step.reads.values())
            places = {b: i for i, b in enumerate([*step.reads, *step.writes])}
            made = compiled[step]
            call = KernelCall(made, places, [n.spec for n in outputs])
            shapes = [(n.spec.shape, n.spec.stride) for n in outputs]
            arguments = ([known[n] for n in inputs], list(made.sizes), made.tasks, shapes)
            whole = graph.call(call, arguments, spec=tuple(n.spec for n in outputs))
            for i, node in enumerate(outputs):
                known[node] = graph.call(operator.getitem, (whole, i), spec=node.spec, like=node)
        else:
            node = step.node
            known[node] = graph.add(
                Node(node.op, mapped(node.args, value), mapped(node.kwargs, value), node.spec, graph.name(node.name))
            )
    graph.outputs = mapped(program.graph.outputs, value)
    return graph.check()


def compile_graph(graph: Graph) -> Callable[[list[Any]], Sequence[Any]]:
    """A graph of aten ops as native kernels and eager calls."""
    return runner(linked(fuse(expand(graph, "prims", FOR_LOOPS))))
