"""Equal nodes: what expansions of several ops have in common, as a border around an image that all read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kiln.base.graph import Graph, Node, call_key, nodes_in, substituted
from kiln.ops.aliases import base_of
from kiln.ops.table import aten

#: Ops that compute nothing: equal ones are read in the place of another without more loops or work between.
MOVES = frozenset({
    aten.as_strided.default, aten.clone.default, aten.constant_pad_nd.default, aten.expand.default,
    aten.full.default, aten.permute.default, aten.select.int, aten.slice.Tensor, aten.view.default,
})  # fmt: skip


def merged(graph: Graph) -> Graph:
    """The graph, changed in place, with one node for those that move the same elements alike.

    Outputs stay apart, each in memory of its own.
    """
    apart, todo = set[Node](), nodes_in(graph.outputs)
    while todo:
        node = todo.pop()
        if node not in apart:
            apart.add(node)
            base = base_of(node.op, node.args, node.kwargs, 0) if node.op in MOVES else None
            todo += [base] if type(base) is Node else []
    seen: dict[Any, Node] = {}

    def instead(node: Node) -> tuple[Sequence[Node], Any] | None:
        if node.op not in MOVES or node in apart:
            return None
        key = call_key(node)  # a copy has strides that its arguments need not say
        known = node if key is None else seen.setdefault((key, node.spec.stride), node)
        return None if known is node else ((), known)

    return substituted(graph, instead)
