"""The two halves of a joint graph, made for a choice of values to save between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.expressions import Expr, Symbol
from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec, mapped, nodes_in
from kiln.differentiate.joint import Joint
from kiln.differentiate.kinds import is_mask, kind, nbytes, part_of_views
from kiln.ops.table import aten


@dataclass(frozen=True, slots=True)
class Halves:
    """The two graphs of a training step.

    `forward` takes the primals and gives the results, then what is saved: tensors, then numbers. `backward`
    takes the saved tensors, the saved numbers and the tangents, and gives the gradients.
    """

    forward: Graph
    backward: Graph
    tensors: int
    """How many tensors are saved."""
    numbers: int
    """How many numbers are saved."""


class Parts:
    """A joint graph taken apart: inputs, results and gradients, forward and backward nodes, shared memory."""

    def __init__(self, joint: Joint) -> None:
        graph = self.graph = joint.graph
        count = len(joint.primals)
        self.primals, self.tangents = graph.inputs[:count], graph.inputs[count:]
        self.results, self.gradients = graph.outputs[: joint.results], graph.outputs[joint.results :]
        self.mutated = {self.primals[mutation.primal] for mutation in joint.mutated}
        self.forward = [node for node in graph.nodes if not node.backward]
        self.backward = [node for node in graph.nodes if node.backward]
        self.bases = self._bases()

    def _bases(self) -> dict[Node, Node]:
        """For each value, the one whose memory it shows."""
        bases = {node: node for node in self.graph.inputs}
        for node in self.graph.nodes:
            source: Any = node.args[0] if node.args else None
            shows = type(source) is Node and (kind(node.op).view or part_of_views(node))
            bases[node] = bases[source] if shows else node
        return bases

    def split(self, kept: Sequence[Node]) -> Halves:
        """The two graphs when these values are saved."""
        tensors = [node for node in kept if isinstance(node.spec, TensorSpec)]
        numbers: list[Any] = [node for node in kept if not isinstance(node.spec, TensorSpec)]
        back = Builder()
        for node in kept:
            back.input(node, packed=is_mask(node))
        for node in self.tangents:
            back.input(node)
        later = self._later()
        for node in self.backward:
            if node not in later:
                back.need(node)
        for node in nodes_in(self.gradients):
            back.need(node)
        for node in back.nodes:
            node.backward = True  # also of what is computed again
        numbers += sorted((back.symbols | back.sizes()) - {n.spec for n in numbers}, key=str)
        backward = back.finish(self.gradients, [*tensors, *numbers, *self.tangents])
        return Halves(self._forward(tensors, numbers), backward, len(tensors), len(numbers))

    def _later(self) -> set[Node]:
        """The backward nodes to compute when their first reader runs, because that keeps less memory alive.

        So what takes saved or recomputed values up, the gradient of a weight, comes before what only makes a
        new value, the gradient of the layer's input.
        """
        places: dict[Node, int] = {}
        first: dict[Node, int] = {}
        until = {self.bases[node]: len(self.backward) for node in nodes_in(self.gradients)}
        given = set(nodes_in(self.gradients))
        later: set[Node] = set()
        for place in range(len(self.backward) - 1, -1, -1):
            node = self.backward[place]
            reads = node.inputs()
            read = {self.bases[n] for n in reads}
            use = first.get(node)
            what = kind(node.op)
            if use is None or node in given or what.acts or what.random:
                if use is None and node not in given and not what.acts:
                    later.add(node)  # nobody reads it
                    continue
                places[node] = place
            else:
                held = sum([nbytes(n.spec) for n in read if n.op is not INPUT and until.get(n, -1) < use])
                sinks = held < (nbytes(node.spec) if self.bases[node] is node else 0) or not held
                places[node] = use if sinks else place
                if sinks:
                    later.add(node)
            due = places[node]
            for n in reads:
                if first.get(n, due) >= due:
                    first[n] = due
            for n in read:
                if until.get(n, -1) < due:
                    until[n] = due
        return later

    def _forward(self, tensors: Sequence[Node], numbers: Sequence[Any]) -> Graph:
        front = Builder()
        for node in self.primals:
            front.input(node)
        for node in self.forward:
            if kind(node.op).random or kind(node.op).acts:
                front.need(node)
        for node in (*nodes_in(self.results), *tensors):
            front.need(node)
        front.in_order(self.forward)
        saved: list[Any] = [*tensors, *numbers]
        graph = front.finish((*self.results, *saved), self.primals)
        copies: dict[Node, Node] = {}
        outputs = list(graph.outputs)
        for i, node in enumerate(tensors, len(self.results)):
            value = outputs[i]
            if node in self.mutated:
                # The new value is written over the old one before the backward pass reads it.
                copies[value] = Node(aten.clone.default, (value,), spec=node.spec, name=graph.name("clone"))
            elif is_mask(node):
                packed = replace(node.spec, dtype=torch.bool)
                op, kwargs = aten._to_copy.default, {"dtype": torch.bool}
                copies[value] = Node(op, (value,), kwargs, packed, graph.name("packed"), node.where)
            outputs[i] = copies.get(value, value)
        if copies:
            graph.nodes = [
                *(copies[node] for node in graph.inputs if node in copies),
                *(n for node in graph.nodes for n in ((node, copies[node]) if node in copies else (node,))),
            ]
        graph.outputs = tuple(outputs)
        return graph


class Builder:
    """Copies nodes of a graph into a new one, with what they read, as they are needed."""

    def __init__(self) -> None:
        self.made: dict[Node, Node] = {}
        self.packed: dict[Node, Node] = {}
        self.nodes: list[Node] = []
        self.symbols: set[Symbol] = set()

    def input(self, node: Node, packed: bool = False) -> None:
        """Make a value of the old graph an input of the new one; a packed one is unpacked when needed."""
        made = Node(INPUT, (), {}, node.spec, node.name, node.where, node.backward, node.region)
        if packed:
            made.spec, made.name = replace(made.spec, dtype=torch.bool), f"{made.name}_packed"
            self.packed[node] = made
        else:
            self.made[node] = made

    def need(self, wanted: Node) -> None:
        """Copy a node, after what it reads."""
        stack = [wanted]
        made = self.made
        while stack:
            node = stack[-1]
            if node in made:
                stack.pop()
                continue
            if node in self.packed:
                args, kwargs = (self.packed[node],), {"dtype": node.spec.dtype}
                made[node] = replace(node, op=aten._to_copy.default, args=args, kwargs=kwargs)
                self.nodes.append(made[node])
                continue
            missing = [read for read in node.inputs() if read not in made]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            self.nodes.append(self._copy(node))

    def _copy(self, node: Node) -> Node:
        made, symbols = self.made, self.symbols

        def leaf(value: Any) -> Any:
            if type(value) is Node:
                return made[value]
            if isinstance(value, Expr):
                symbols.update(value.symbols())
            return value

        args = node.args if node.op is CONSTANT else mapped(node.args, leaf)
        made[node] = node.over(args, mapped(node.kwargs, leaf) if node.kwargs else {})
        return made[node]

    def sizes(self) -> set[Symbol]:
        """The symbols in the types of values.

        An input of such a size may not be there: the gradient of a result that nobody differentiated.
        """
        specs = [n.spec for n in self.made.values() if isinstance(n.spec, TensorSpec)]
        runs = {run for spec in specs for run in (spec.shape, spec.stride)}
        sizes = {size for run in runs for size in run if isinstance(size, Expr)}
        return {s for size in sizes for s in size.symbols()}

    def in_order(self, order: Iterable[Node]) -> None:
        """Put the copied nodes into the order of the old graph."""
        made = self.made
        self.nodes = [made[node] for node in order if node in made]

    def finish(self, outputs: Iterable[Any], inputs: Sequence[Any]) -> Graph:
        """The graph with these inputs, nodes or symbols, and these outputs."""
        graph = Graph()
        named: list[Node] = []
        for value in inputs:
            if isinstance(value, Symbol):
                named.append(Node(INPUT, spec=value, name=f"size_{value}"))
            else:
                named.append(self.packed.get(value) or self.made[value])
        graph.inputs = named
        graph.nodes = self.nodes
        graph.take_names((*named, *self.nodes))
        graph.outputs = tuple(self.made[out] if type(out) is Node else out for out in outputs)
        return graph.check()
