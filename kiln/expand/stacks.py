"""Elements of stacked numbers: read where they come from, so that a stack connects nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kiln.base.graph import Graph, Node, nodes_in, substituted
from kiln.ops.table import aten

#: What gives a number a dimension.
RAISED = frozenset({aten.unsqueeze.default, aten.view.default})


def unstacked(graph: Graph) -> Graph:
    """The graph, changed in place, with numbers in the place of those read from a stack of them."""
    outputs = set(nodes_in(graph.outputs))

    def instead(node: Node) -> tuple[Sequence[Node], Any] | None:
        found = element(node) if node.op is aten.select.int and node not in outputs else None
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
