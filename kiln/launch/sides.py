"""Graphs over a GPU and the CPU: a part for each side, one after the other, and what goes between them.

Single numbers go together, in one copy. What follows from them by arithmetic is computed again where it is
read, in double precision as Python does: an optimizer counts its steps on the CPU, and these counts are all
that a step sends to the GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from itertools import groupby
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.fx import bindings
from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec, copied, nodes_in, retarget, tensors
from kiln.expand.expand import expand
from kiln.expand.stacks import unstacked
from kiln.fuse.lower import HALVES
from kiln.ops.layout import fills_memory
from kiln.ops.levels import name_of
from kiln.ops.table import aten

CPU = torch.device("cpu")
LINE = 16  # bytes at whose multiples kernels want to find what they read
#: Arithmetic of numbers that is done again on the other side.
ARITHMETIC = frozenset("add sub rsub mul div neg reciprocal sqrt rsqrt pow".split())
#: Nodes that read a number which is computed again: what many read would connect them.
FEW = 4
#: Ops whose eager kernels for half types take a number of the CPU as it is.
UNROUNDED = frozenset((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor))
#: Numbers that are made anew on the side that reads them.
NUMBERS = frozenset((aten.scalar_tensor.default, aten.full.default))
#: Ops that take more than a number from another device.
MOVES = frozenset((aten._to_copy.default, aten.copy.default, aten.index.Tensor))


@dataclass(eq=False, slots=True)
class Part:
    """What runs on one device: a graph, and the values of the whole graph that it reads and makes."""

    device: torch.device
    graph: Graph = field(default_factory=Graph)
    reads: list[Node] = field(default_factory=list)
    moved: list[Node] = field(default_factory=list)
    """What it reads from the other side; numbers come first, those of one type side by side."""
    makes: list[Node] = field(default_factory=list)
    known: dict[Node, Node] = field(default_factory=dict)

    def read(self, node: Node) -> Node:
        """A value of the whole graph, as it stands in this one."""
        found = self.known.get(node)
        if found is None:
            spec = node.spec
            elsewhere = isinstance(spec, TensorSpec) and spec.device != self.device
            (self.moved if elsewhere else self.reads).append(node)
            spec = replace(spec, device=self.device) if elsewhere else spec
            found = self.known[node] = Node(INPUT, spec=spec, name=self.graph.name(node.name))
        return found

    def add(self, node: Node) -> None:
        known: dict[Node, Any] = {one: self.read(one) for one in node.inputs()}
        self.known[node] = self.graph.copy(node, known)

    def finish(self, needed: set[Node], sizes: Sequence[Node]) -> None:
        """Say what the graph takes and gives; `sizes` are inputs whose sizes it may speak of."""
        self.makes = [node for node, own in self.known.items() if own.op is not INPUT and node in needed]
        self.moved.sort(key=lambda node: (node.spec.shape != (), str(node.spec.dtype)))
        inputs = [self.known[node] for node in (*self.reads, *self.moved)]
        for node in sizes:
            if node not in self.reads:
                self.reads.insert(0, node)
                inputs.insert(0, Node(INPUT, spec=node.spec, name=self.graph.name(node.name)))
        self.graph.inputs, self.graph.outputs = inputs, tuple([self.known[node] for node in self.makes])


def parted(graph: Graph) -> tuple[Graph, list[Part]] | None:
    """A graph over one GPU and the CPU that does the same, and its parts; None where it has none."""
    calls = [node for node in graph.nodes if node.op is not operator.getitem]
    others = {spec.device for node in (*graph.inputs, *calls) for spec in tensors((node.spec,))} - {CPU}
    if len(others) != 1 or any(out is not None and type(out) is not Node for out in graph.outputs):
        return None
    lists = any(isinstance(node.spec, (tuple, list)) and len(sides(node)) > 1 for node in calls)
    whole = expand(graph, "core") if lists else copied(graph)
    whole.overwrites = graph.overwrites
    device = others.pop()
    with_numbers_again(unstacked(whole), device)
    with_numbers_there(whole, device)
    return (whole, in_turns(whole)) if all(map(has_side, whole.nodes)) else None


def sides(node: Node) -> set[torch.device]:
    """The devices of what a node reads and makes."""
    return {spec.device for one in (node, *node.inputs()) for spec in tensors((one.spec,))}


def side(node: Node) -> torch.device:
    """Where a node runs; one that gives no tensor is where what it reads was made."""
    return next((spec.device for one in (node, *node.inputs()) for spec in tensors((one.spec,))), CPU)


def is_number(node: Node) -> bool:
    """Whether a value is a float without dimensions on the CPU."""
    spec = node.spec
    plain = isinstance(spec, TensorSpec) and spec.shape == () and spec.device == CPU
    return plain and spec.dtype in (torch.float32, torch.float64)


def has_side(node: Node) -> bool:
    """Whether it is known where a node runs, and what it reads can be brought there."""
    if node.op is operator.getitem:
        return True
    if node.op is CONSTANT:
        return isinstance(node.spec, TensorSpec)
    if not isinstance(node.op, torch._ops.OpOverload) or node.op._schema.is_mutable:
        return False
    mine = {spec.device for spec in tensors((node.spec,))} or {side(node)}
    others = [n for n in node.inputs() if isinstance(n.spec, TensorSpec) and n.spec.device not in mine]
    return len(mine) == 1 and all(
        one.spec.shape == () or node.op in MOVES and fills_memory(one.spec) for one in others
    )


def with_numbers_again(graph: Graph, device: torch.device) -> None:
    """Change a graph so that what is on a GPU reads no number that follows from others by arithmetic."""
    outputs, users = set(nodes_in(graph.outputs)), graph.users()
    wide: dict[Node, Node] = {}
    narrow: dict[tuple[Node, torch.dtype], Node] = {}
    nodes: list[Node] = []

    def call(op: Any, args: tuple[Any, ...], kwargs: Any, spec: TensorSpec, like: Node) -> Node:
        made = Node(op, args, kwargs, spec, graph.name(name_of(op)), like.where, like.backward, like.region)
        nodes.append(made)
        return made

    def converted(node: Node, dtype: torch.dtype) -> Node:
        spec = replace(node.spec, dtype=dtype, device=device)
        return call(aten._to_copy.default, (node,), {"dtype": dtype}, spec, node)

    def again(node: Node) -> bool:
        if name_of(node.op) not in ARITHMETIC or node in outputs or not is_number(node):
            return False
        return len(users[node]) <= FEW and all(map(is_number, node.inputs()))

    def widened(node: Node) -> Node:
        if not again(node):
            return converted(node, torch.float64)  # for each reader anew, so that it connects nothing
        found = wide.get(node)
        if found is None:
            known: dict[Node, Any] = {one: widened(one) for one in node.inputs()}
            spec = TensorSpec((), (), torch.float64, device)
            found = call(node.op, retarget(node.args, known), retarget(node.kwargs, known), spec, node)
            wide[node] = found
        return found

    def taken(node: Node, dtype: torch.dtype) -> Node:
        if not again(node):
            return node
        found = narrow.get((node, dtype))
        if found is None:
            found = narrow[node, dtype] = converted(widened(node), dtype)
        return found

    for node in graph.nodes:
        spec = node.spec
        numbers = [one for one in node.inputs() if is_number(one)]
        if not numbers or not isinstance(spec, TensorSpec) or spec.device == CPU:
            nodes.append(node)
            continue
        known: dict[Node, Any] = {one: taken(one, one.spec.dtype) for one in numbers}
        if node.op in UNROUNDED and spec.dtype in HALVES and not node.kwargs:
            known.update({one: converted(one, torch.float32) for one in node.inputs() if one not in known})
            whole = call(node.op, retarget(node.args, known), {}, replace(spec, dtype=torch.float32), node)
            node.op, node.args, node.kwargs = aten._to_copy.default, (whole,), {"dtype": spec.dtype}
        else:
            node.args, node.kwargs = retarget(node.args, known), retarget(node.kwargs, known)
        nodes.append(node)
    graph.nodes = nodes
    graph.drop_unused(keep=lambda node: not users.get(node, (node,)))  # called for what it does


def with_numbers_there(graph: Graph, device: torch.device) -> None:
    """Change a graph so that what is on a GPU reads no number of the CPU that is known, nor a view of one."""
    there: dict[Node, Node] = {}
    nodes: list[Node] = []

    def made(node: Node) -> Node | None:
        """What stands for a node of the CPU on the other side."""
        spec, found = node.spec, there.get(node)
        if found is not None or not isinstance(spec, TensorSpec) or spec.device != CPU:
            return found
        kwargs: dict[str, Any] = {"dtype": spec.dtype, "device": device}
        args: tuple[Any, ...]
        if spec.shape == () and node.op is CONSTANT and not spec.dtype.is_complex:
            op, args = aten.full.default, ([], node.args[0].item())
        elif spec.shape == () and node.op in NUMBERS:
            op, args = aten.full.default, ([], node.args[-1])
        elif node.op is aten.expand.default and (number := made(node.args[0])) is not None:
            op, args, kwargs = node.op, (number, *node.args[1:]), {}
        else:
            return None
        found = node.over(args, kwargs, graph.name(node.name))
        found.op, found.spec = op, replace(spec, device=device)
        there[node] = found
        nodes.append(found)
        return found

    for node in graph.nodes:
        if side(node) != CPU:
            for one in node.inputs():
                made(one)
            node.args, node.kwargs = retarget(node.args, there), retarget(node.kwargs, there)
        nodes.append(node)
    graph.nodes = nodes
    graph.drop_unused(keep=lambda node: node not in there)


def in_turns(graph: Graph) -> list[Part]:
    """The parts of a graph, those on the CPU and those on the GPU in turns."""
    turns: dict[Node, int] = {}
    parts: dict[int, Part] = {}
    for node in graph.nodes:
        here = side(node)
        first = int(here != CPU)
        turn = max([turns[one] for one in node.inputs() if one.op is not INPUT], default=first)
        turns[node] = turn = turn + (turn + first) % 2
        parts.setdefault(turn, Part(here)).add(node)
    found = [parts[turn] for turn in sorted(parts)]
    needed = {*nodes_in(graph.outputs), *[node for part in found for node in (*part.reads, *part.moved)]}
    sizes = list(dict.fromkeys(node for node, _, _ in bindings(graph).values()))
    for part in found:
        part.finish(needed, sizes)
    last = {node: i for i, part in enumerate(found) for node in (*part.reads, *part.moved)}
    for i, k in graph.overwrites.items():
        out, given = graph.outputs[i], graph.inputs[k]
        for turn, part in enumerate(found):
            if out in part.makes and given in part.reads and last[given] == turn:
                part.graph.overwrites[part.makes.index(out)] = part.reads.index(given)
    return found


class Sides:
    """Runs parts one after the other: takes a list with the values of the inputs, gives the outputs."""

    def __init__(self, graph: Graph, parts: Sequence[Part], runs: Sequence[Callable[..., Any]]) -> None:
        places = {node: i for i, node in enumerate(graph.inputs)}
        for part in parts:
            places.update({node: len(places) + i for i, node in enumerate(part.makes)})
        last = {node: i for i, part in enumerate(parts) for node in (*part.reads, *part.moved)}
        last.update(dict.fromkeys(nodes_in(graph.outputs), len(parts)))
        self.outputs = [None if out is None else places[out] for out in graph.outputs]
        self.turns = [
            (
                run,
                [places[node] for node in part.reads],
                [places[node] for node in part.moved],
                runs_of_numbers(part),
                part.device,
                [places[node] for node, turn in last.items() if turn == i],
            )
            for i, (part, run) in enumerate(zip(parts, runs, strict=True))
        ]

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        known = list(values)
        values.clear()
        for run, reads, moved, numbers, device, ending in self.turns:
            given = [known[i] for i in reads]
            given += brought([known[i] for i in moved], numbers, device)
            for i in ending:
                known[i] = None
            known += run(given)
        return [None if i is None else known[i] for i in self.outputs]


def runs_of_numbers(part: Part) -> list[int]:
    """How many numbers of each type stand side by side among what comes from the other side."""
    types = [node.spec.dtype for node in part.moved if node.spec.shape == ()]
    return [len(list(run)) for _, run in groupby(types)]


def brought(values: list[Any], numbers: Sequence[int], device: torch.device) -> list[Any]:
    """Values on another device; runs of numbers go together, each at a multiple of 16 bytes.

    The GPU need not be waited for: the driver has taken what it copies when the call returns.
    """
    made: list[Any] = []
    for count in numbers:
        packed = torch.stack(values[len(made) : len(made) + count])
        rows = packed.unsqueeze(1).expand(-1, max(LINE // packed.element_size(), 1)).contiguous()
        made += rows.to(device, non_blocking=device.type != "cpu").select(1, 0).unbind()
    return made + [value.to(device) for value in values[len(made) :]]
