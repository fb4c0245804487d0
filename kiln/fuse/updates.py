"""Updates of few places in a large value: added to what is there, in its own memory where nobody minds."""

from __future__ import annotations

from typing import Any

import torch

from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec, nodes_in
from kiln.fuse.ordered import writes_of
from kiln.fuse.views import is_view
from kiln.ops.levels import name_of
from kiln.ops.table import aten

#: Ops that give their first argument with some places changed, and those that change it.
IN_PLACE: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
    aten.index_add.default: aten.index_add_.default,
}


def updated(graph: Graph, exact: bool = False, runs: bool = True) -> Graph:
    """The graph with updates where they cost least: `exact` keeps the order of sums.

    Where loops `run` in order, some updates are loops.
    """
    if not any(node.op in IN_PLACE for node in graph.nodes):
        return graph
    if not exact:
        while (found := _sum_with_zeros(graph)) is not None:
            _join(graph, *found)
    outputs, users = set(nodes_in(graph.outputs)), graph.users()
    for node in graph.nodes:
        if runs and writes_of(node) is not None:
            continue
        if node.op in IN_PLACE and _is_last_use(node, users, outputs):
            node.op = IN_PLACE[node.op]
    return graph


def _sum_with_zeros(graph: Graph) -> tuple[Node, Node, Node] | None:
    """A sum, the update of zeros that is its one term, and the other term."""
    outputs, users = set(nodes_in(graph.outputs)), graph.users()
    for node in graph.nodes:
        if node.op is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        for update, other in (node.args, node.args[::-1]):
            if not isinstance(update, Node) or not isinstance(other, Node) or update is other:
                continue
            if update in outputs or len(users[update]) != 1 or not _adds_to_zeros(update):
                continue
            same = isinstance(other.spec, TensorSpec) and (other.spec.shape, other.spec.dtype) == (
                update.spec.shape,
                update.spec.dtype,
            )
            if same and other.spec.stride == node.spec.stride:
                return node, update, other
    return None


def _adds_to_zeros(node: Node) -> bool:
    adds = node.op is aten.index_put.default and len(node.args) > 3 and node.args[3] is True
    adds = adds or node.op in (aten.scatter_add.default, aten.index_add.default)
    if not adds or not node.spec.dtype.is_floating_point:
        return False
    base = node.args[0]
    return isinstance(base, Node) and name_of(base.op) == "full" and base.args[1] == 0


def _join(graph: Graph, total: Node, update: Node, other: Node) -> None:
    """The update made to the other term in place of zeros, where the sum was."""
    total.op, total.args, total.kwargs = update.op, (other, *update.args[1:]), dict(update.kwargs)
    graph.nodes.remove(update)
    if not any(update.args[0] in node.inputs() for node in graph.nodes):
        graph.nodes.remove(update.args[0])


def _is_last_use(node: Node, users: dict[Node, list[Node]], outputs: set[Node]) -> bool:
    """Whether an update may use the memory of what it changes: new memory that nobody reads afterwards."""
    base: Node = node.args[0]
    if base.spec.stride != node.spec.stride or 0 in base.spec.stride:
        return False
    if any(base is read for read in nodes_in(node.args[1:])):
        return False
    while True:
        if base in outputs or base.op is INPUT or base.op is CONSTANT or len(users[base]) != 1:
            return False
        if not isinstance(base.op, torch._ops.OpOverload):
            return False
        if not base.op.is_view and not is_view(base):
            return True
        base = base.args[0]
