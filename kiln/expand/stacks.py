"""Stacks and joined tensors: elements read where they come from, and what many are joined of, joined once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kiln.base.graph import Graph, Made, Node, TensorSpec, argument, nodes_in, reached, substituted
from kiln.expand.equals import SHOWS
from kiln.ops.layout import followed
from kiln.ops.levels import PIECES
from kiln.ops.table import aten

DEVICES = frozenset({"cuda"})
#: What gives a number a dimension.
RAISED = frozenset({aten.unsqueeze.default, aten.view.default})


def unstacked(graph: Graph) -> Graph:
    """The graph, changed in place, with numbers in the place of those read from a stack of them."""
    # Results, and what they are views of, are memory of their own.
    shown = reached(nodes_in(graph.outputs), lambda node: node.inputs() if SHOWS[node.op] else ())

    def instead(node: Node) -> tuple[Sequence[Node], Any] | None:
        found = element(node) if node.op is aten.select.int and node not in shown else None
        return None if found is None else ((), found)

    if any(node.op is aten.select.int and element(node) is not None for node in graph.nodes):
        return substituted(graph, instead)
    return graph


def element(node: Node) -> Node | None:
    """The number that a node takes from a stack of numbers."""
    stack, dim, place = node.args
    if stack.op is not aten.cat.default or dim != 0 or type(place) is not int:
        return None
    pieces = stack.args[0]
    if not 0 <= place < len(pieces) or any(piece.spec.shape != (1,) for piece in pieces[: place + 1]):
        return None
    piece = pieces[place]
    number = piece.args[0] if piece.op in RAISED else None
    return number if type(number) is Node and number.spec.shape == () else None


def joined_once(graph: Graph) -> Graph:
    """The graph, changed in place: of tensors that are joined again and again the first are joined once.

    Layers that read all that was made before them join more tensors than loops can choose from. What stands
    at the beginning of several of them is one tensor then, and loops read it and the few others. Eager's
    kernel for CPUs joins as fast as memory is; the one for GPUs does not.
    """
    many = [node for node in graph.nodes if node.op is aten.cat.default and joins_many(node)]
    counts = Counter((dim_of(node), tuple(node.args[0][:PIECES])) for node in many)
    known: dict[Any, Node] = {}

    def instead(node: Node) -> tuple[Sequence[Node], Any] | None:
        if node not in wanted:
            return None
        dim, pieces, made = dim_of(node), list(node.args[0]), Made(graph, node)
        while len(pieces) > PIECES:
            key = dim, *pieces[:PIECES]
            if key not in known:
                first = pieces[:PIECES]
                known[key] = made.call(node.op, joined(node.spec, dim, first), first, dim)
            pieces[:PIECES] = [known[key]]
        node.args = (pieces, dim)
        return [*made.nodes, node], node

    wanted = {node for node in many if counts[dim_of(node), tuple(node.args[0][:PIECES])] > 1}
    return substituted(graph, instead) if wanted else graph


def joins_many(node: Node) -> bool:
    """Whether an op on a GPU joins more tensors than loops choose from, of one kind and known sizes."""
    specs = [piece.spec for piece in node.args[0]]
    if len(specs) <= PIECES or node.spec.device.type not in DEVICES:
        return False
    if not all(isinstance(spec, TensorSpec) for spec in specs):
        return False
    alike = all(spec.dtype is node.spec.dtype and len(spec.shape) == len(node.spec.shape) for spec in specs)
    return alike and all(type(n) is int for spec in (node.spec, *specs) for n in (*spec.shape, *spec.stride))


def dim_of(node: Node) -> int:
    return int(argument(node, 1, "dim", 0)) % len(node.spec.shape)


def joined(spec: TensorSpec, dim: int, pieces: list[Node]) -> TensorSpec:
    """The type of some tensors joined, lying as all of them do."""
    shape = list(spec.shape)
    shape[dim] = sum(piece.spec.shape[dim] for piece in pieces)
    return replace(spec, shape=tuple(shape), stride=followed(shape, spec.shape, spec.stride), offset=0)
