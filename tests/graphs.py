"""Graphs run op by op, on real tensors."""

from collections.abc import Callable
from typing import Any

from kiln.base.graph import CONSTANT, Graph, Node, mapped


def run_graph(graph: Graph, *values: Any, resolve: Callable[[Any], Any] = lambda leaf: leaf) -> tuple[Any, ...]:
    """The outputs on these input values; `resolve` turns other leaves than nodes to values."""
    known: dict[Node, Any] = dict(zip(graph.inputs, values, strict=True))

    def value_of(leaf: Any) -> Any:
        return known[leaf] if type(leaf) is Node else resolve(leaf)

    for node in graph.nodes:
        if node.op is CONSTANT:
            known[node] = node.args[0]
        else:
            known[node] = node.op(*mapped(node.args, value_of), **mapped(node.kwargs, value_of))
    return tuple([mapped(out, value_of) for out in graph.outputs])
