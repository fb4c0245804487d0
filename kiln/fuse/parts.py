"""Parts: of a graph whose parts have nothing to do with each other, equal ones are fused once.

An optimizer's step is such a graph: a few ops for each of many tensors. What they share is numbers (a
learning rate), constants and values without inputs; all else connects what reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec
from kiln.fuse.lower import is_drawn, is_pointwise
from kiln.fuse.merge import rewritten
from kiln.fuse.nest import Buffer, Nest
from kiln.fuse.repeats import FEWEST, marks_of
from kiln.fuse.stages import Batch
from kiln.fuse.steps import Launch, Step
from kiln.fuse.views import is_map


def fuse_parts(graph: Graph, fuse: Callable[[Graph], list[Step]]) -> list[Step] | None:
    """The steps for a graph of many parts, some of them equal, by a function that gives them for one."""
    parts = parts_of(graph)
    if len(parts) < FEWEST:
        return None
    marks = dict(zip(graph.nodes, marks_of(graph), strict=True))
    forms = [part.form(marks) for part in parts]
    firsts = dict(zip(reversed(forms), reversed(parts), strict=True))
    if len(firsts) * 2 > len(parts):
        return None
    fused = {form: fuse(part.graph(graph)) for form, part in firsts.items()}
    if not all(isinstance(step, Launch) and not step.scratch for steps in fused.values() for step in steps):
        return None  # calls of eager kernels keep their order
    rows = []
    for form, part in zip(forms, parts, strict=True):
        moves = dict(zip(firsts[form].members, part.members, strict=True))
        rows.append([(step, moves) for step in fused[form] if isinstance(step, Launch)])
    # What comes first in each part is side by side, then what comes second.
    return side_by_side([step for turn in zip_longest(*rows) for step in turn if step is not None])


# Finding parts


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes that are connected, in order; `members` are these and what they read, in order of first use."""

    nodes: list[Node]
    members: list[Node]

    def form(self, marks: Mapping[Node, int]) -> Any:
        """Equal for parts that do the same to values of the same types; what has no inputs is part of it."""
        numbers = {node: i for i, node in enumerate(self.members)}
        return tuple([
            (marks.get(node), *[numbers[read] for read in node.inputs()]) for node in self.members
        ])  # fmt: skip

    def graph(self, whole: Graph) -> Graph:
        """The part as a graph."""
        made = Graph()
        own = set(self.nodes)
        made.inputs = [node for node in self.members if node.op is INPUT]
        made.nodes = [node for node in self.members if node.op is not INPUT and is_shared(node)]
        made.nodes += self.nodes
        made.outputs = tuple([out for out in whole.outputs if type(out) is Node and out in own])
        return made


def is_shared(node: Node) -> bool:
    """Whether a node that several parts read does not connect them."""
    if node.op is INPUT:
        return not isinstance(node.spec, TensorSpec) or node.spec.shape == ()
    return node.op is CONSTANT or not node.inputs()


def parts_of(graph: Graph) -> list[Part]:
    """The parts of a graph of pointwise ops; none where it has other ops or outputs that are not nodes."""
    own = []
    for node in graph.nodes:
        if not is_shared(node):
            own.append(node)
            if not is_map(node) and (is_drawn(node) or not is_pointwise(node)):
                return []
    above: dict[Node, Node] = {}

    def top(node: Node) -> Node:
        while (upper := above.get(node, node)) is not node:
            above[node] = node = above.get(upper, upper)
        return node

    for node in own:
        for read in node.inputs():
            if not is_shared(read):
                above[top(read)] = top(node)
    parts: dict[Node, list[Node]] = {}
    for node in own:
        parts.setdefault(top(node), []).append(node)
    return [
        Part(nodes, list(dict.fromkeys(n for node in nodes for n in (*node.inputs(), node))))
        for nodes in parts.values()
    ]


# Steps side by side


def side_by_side(launches: Sequence[tuple[Launch, Mapping[Node, Node]]]) -> list[Step]:
    """As few launches as possible that do the same as these, with other nodes in the place of theirs."""
    made: list[Step] = []
    owners: dict[Buffer, Node] = {}
    buffers: dict[Node, Buffer] = {}
    batch = Batch()

    def close() -> None:
        kernel = batch.kernel(f"k{len(made)}")
        reads, writes = kernel.buffers()
        made.append(Launch(kernel, {b: owners[b] for b in reads}, {b: owners[b] for b in writes}, {}))

    for launch, moves in launches:
        others: dict[Buffer, Buffer] = {}
        for old, node in (*launch.reads.items(), *launch.writes.items()):
            moved = moves[node]
            others[old] = buffer = buffers.setdefault(moved, Buffer(moved.name, old.dtype))
            owners[buffer] = moved
        nests = [over(nest, others) for nest in launch.kernel.nests]
        if not batch.takes(nests):
            close()
            batch = Batch()
            batch.takes(nests)
    if batch.stages:
        close()
    return made


def over(nest: Nest, others: Mapping[Buffer, Buffer]) -> Nest:
    """The nest over other buffers."""
    stores = rewritten(nest.stores, lambda index: index, others)
    return Nest(nest.axes, stores, nest.part, nest.ordered, nest)
