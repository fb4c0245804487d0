"""Few blocks of a graph: they are compiled, and the steps of one stand for those that are left out.

Blocks are what `kiln.fuse.repeats` finds. Here it is plans that repeat: no stage sees more than a few blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec, nodes_in
from kiln.fuse.repeats import Blocks, blocks_of
from kiln.launch.layers import THIRD, Output, Triple, repeated
from kiln.launch.memory import size_of
from kiln.launch.text import Description

#: The blocks that are compiled: three that are compared, and the last with what follows.
FEW = 4


@dataclass(frozen=True, slots=True)
class Few:
    """A graph with few of its equal blocks: `count` of them are left out after the second."""

    graph: Graph
    count: int
    owns: tuple[Triple, ...]
    """The inputs that the first three blocks have each of its own."""
    inputs: tuple[int, ...]
    """For its inputs, and those of the blocks left out, where they are among all."""
    outputs: tuple[Output, ...]
    left: int
    """The bytes of the outputs of the blocks that are left out."""
    marks: Sequence[int]
    """The marks of the graph's nodes, by which blocks are found."""

    def whole(self, made: Description) -> Description:
        """The plan of the whole graph by that of the few blocks."""
        return repeated(made, self.owns, self.count, self.inputs, self.outputs)


def few_of(graph: Graph, marks: Sequence[int] = ()) -> Few | None:
    """A graph with four or five of its equal blocks, where it has more and all sizes are known.

    `marks` are those of its nodes, where they are known.
    """
    specs = [node.spec for node in graph.inputs]
    if graph.overwrites or not all(type(spec) is TensorSpec for spec in specs):
        return None
    if not all(type(n) is int for spec in specs for n in (*spec.shape, *spec.stride)):
        return None
    if any(type(out) is not Node and nodes_in(out) for out in graph.outputs):
        return None
    blocks = blocks_of(graph, marks=marks)
    if blocks is None or not blocks.families or not all(node.op is INPUT for node in blocks.families):
        return None
    # An even number is left out: what blocks hand on may lie at two places in turn.
    kept, within = FEW + blocks.run.count % 2, graph.nodes[blocks.run.start : blocks.end]
    if kept >= blocks.run.count or any(node.op is CONSTANT for node in within) or blocks.adds_up():
        return None
    return _with(blocks, kept)


def _with(blocks: Blocks, kept: int) -> Few:
    """The graph with so many of its blocks."""
    graph, run, nodes = blocks.graph, blocks.run, blocks.graph.nodes
    count = run.count - kept
    few, known = Graph(), dict[Node, Any]()
    # The inputs of the few blocks, then those of the others.
    place = {node: i for i, node in enumerate(graph.inputs)}
    inputs: list[int] = []
    for node in graph.inputs:
        members, number = blocks.families.get(node, ((), 0))
        if number < kept:
            known[node] = few.input(node.name, node.spec, node.backward)
            inputs.append(place[members[number + count] if number >= THIRD else node])
    own = {node: i for i, node in enumerate(known)}
    families = {id(members): members for members, _ in blocks.families.values()}.values()
    owns = [(own[members[0]], own[members[1]], own[members[2]]) for members in families]
    inputs += [place[members[r]] for r in range(THIRD, THIRD + count) for members in families]
    for node in nodes[: run.start + kept * run.period]:
        known[node] = few.copy(node, known)
    last = range(blocks.end - kept * run.period, blocks.end)
    after = known | {nodes[i]: known[nodes[i - count * run.period]] for i in last}  # what follows reads these
    for node in nodes[blocks.end :]:
        after[node] = few.copy(node, after)
    given, places, outputs, left = dict[Any, Any](), dict[Any, int](), list[Output](), 0
    for i, out in enumerate(graph.outputs):
        equal, number = _equals(blocks, out)
        values: dict[Any, Any] = {known[node]: known[node] for node in equal[:kept]}
        if not equal:
            values = {after[out]: after[out]} if type(out) is Node else {(i,): out}
        given |= values
        outputs.append(Output(tuple([places.setdefault(key, len(places)) for key in values]), number))
        if THIRD <= number < THIRD + count and out.op is not INPUT and isinstance(out.spec, TensorSpec):
            left += size_of(out.spec)
    few.outputs = tuple(given.values())
    marks = [*blocks.marks[: run.start + kept * run.period], *blocks.marks[blocks.end :]]
    return Few(few, count, tuple(owns), tuple(inputs), tuple(outputs), left, marks)


def _equals(blocks: Blocks, out: Any) -> tuple[Sequence[Node], int]:
    """What stands in the place of an output in all blocks, and which is its own; nothing for one of none."""
    if type(out) is Node:
        if out in blocks.families:
            return blocks.families[out]
        run, number = blocks.run, blocks.block(out)
        if number is not None and number >= 0:
            start = blocks.index[out] - number * run.period
            return blocks.graph.nodes[start : blocks.end : run.period], number
    return (), -1
