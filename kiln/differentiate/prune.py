"""Backward graphs for some of the gradients only: what the others would have added is left out."""

from __future__ import annotations

from typing import Any

from kiln.base.graph import CONSTANT, Graph, Node, TensorSpec, mapped, nodes_in
from kiln.ops.table import aten


def reach(graph: Graph, tangents: int) -> dict[Node, int]:
    """For each value, the set of tangents that it depends on, as bits; the tangents are the last inputs."""
    first = len(graph.inputs) - tangents
    found = {node: 1 << (i - first) if i >= first else 0 for i, node in enumerate(graph.inputs)}
    for node in graph.nodes:
        bits = 0
        for read in node.inputs():
            bits |= found[read]
        found[node] = bits
    return found


def uses(graph: Graph, tangents: int) -> list[frozenset[int]]:
    """For each input before the tangents, its readers: of each, the set of tangents it runs for, as bits.

    In eager each of these readers would have saved the value for itself.
    """
    reached = reach(graph, tangents)
    everything = (1 << tangents) - 1
    found: dict[Node, set[int]] = {}
    for out in nodes_in(graph.outputs):
        found.setdefault(out, set()).add(reached[out] or everything)
    for node in reversed(graph.nodes):
        # What depends on no tangent is computed for those who read it.
        readers = {reached[node]} if reached[node] else found.get(node, set())
        for read in node.inputs():
            found.setdefault(read, set()).update(readers)
    return [frozenset(found.get(node, ())) for node in graph.inputs[: len(graph.inputs) - tangents]]


def pruned(graph: Graph, tangents: int, present: int) -> tuple[Graph, tuple[int, ...]]:
    """The backward graph when only the tangents in the set `present` are there, and which inputs it takes.

    Gradients are linear in the tangents: a value that depends on absent ones alone is zero. A sum with it is
    the other summand, a gradient that would be zero is None, as in autograd; elsewhere zeros take its place.
    """
    absent = {node for node, bits in reach(graph, tangents).items() if bits and not bits & present}
    inputs = [node.over((), {}) for node in graph.inputs]
    made = {node: twin for node, twin in zip(graph.inputs, inputs, strict=True) if node not in absent}
    zeros: dict[Node, Node] = {}
    new = Graph()
    new.take_names((*graph.inputs, *graph.nodes))

    def leaf(value: Any) -> Any:
        if type(value) is not Node:
            return value
        if value in made:
            return made[value]
        if value not in zeros:
            zeros[value] = _zeros(new, value.spec)
        return zeros[value]

    for node in graph.nodes:
        if node in absent:
            continue
        rest = _other_summand(node, absent)
        if rest is not None:
            made[node] = made[rest]
            continue
        args = node.args if node.op is CONSTANT else mapped(node.args, leaf)
        made[node] = node.over(args, mapped(node.kwargs, leaf) if node.kwargs else {})
        new.nodes.append(made[node])
    new.outputs = tuple(
        None if out in absent else made[out] if type(out) is Node else out for out in graph.outputs
    )
    new.drop_unused()
    read = {n for node in new.nodes for n in node.inputs()} | set(nodes_in(new.outputs))
    symbolic = [type(node.spec) is not TensorSpec for node in inputs]
    kept = tuple(i for i, node in enumerate(inputs) if node in read or symbolic[i])
    new.inputs = [inputs[i] for i in kept]
    return new.check(), kept


def _other_summand(node: Node, absent: set[Node]) -> Node | None:
    """The summand that a sum comes down to, of the same type; None where it is no such sum."""
    if node.op is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    if type(a) is not Node or type(b) is not Node or (a in absent) == (b in absent):
        return None
    rest = b if a in absent else a
    return rest if rest.spec == node.spec else None


def _zeros(graph: Graph, spec: Any) -> Node:
    """New nodes for zeros of this type."""
    if not isinstance(spec, TensorSpec):
        raise TypeError(f"no zeros of type {spec}")
    layout = {"dtype": spec.dtype, "device": spec.device}
    empty = graph.call(aten.empty_strided.default, (list(spec.shape), list(spec.stride)), layout, spec)
    return graph.call(aten.zero.default, (empty,), spec=spec)
