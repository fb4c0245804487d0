"""Values of which rows are folded again and again lie along these rows.

What a convolution gave, turned into rows of words and added to, keeps the order of its memory in eager, and
so does all that is added to it later: each norm of a transformer would read its rows across memory.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from kiln.base.graph import Graph, Node, TensorSpec, nodes_in, reached
from kiln.expand.relayout import Relayout
from kiln.ops.layout import is_dense
from kiln.ops.table import aten

#: Elements of a value from which on it matters how it lies.
LARGE = 1 << 14
#: Ops that fold rows, and where they say which dimensions are those of a row.
FOLDS: dict[Any, int] = {
    aten.native_layer_norm.default: 1, aten._fused_rms_norm.default: 1, aten.mean.dim: 1,
    aten.sum.dim_IntList: 1,
}  # fmt: skip


def along_rows(graph: Graph) -> Graph:
    """The graph with values that are read several times, and folded by rows, in the order of these rows."""
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if node.op in FOLDS and folds_last(node) and lies_across(node.args[0]):
            found.update(dict.fromkeys(sources(node.args[0])))
    users, shown = graph.users() if found else {}, set(nodes_in(graph.outputs))
    made = {node: partial(turned, node) for node in found if len(users[node]) > 1 and node not in shown}
    return Relayout(graph, made, ()).run() if made else graph


def folds_last(node: Node) -> bool:
    """Whether a fold goes along the last dimension alone."""
    dims, rank = node.args[FOLDS[node.op]], len(node.args[0].spec.shape)
    if node.op in (aten.mean.dim, aten.sum.dim_IntList):
        return list(dims or ()) in ([-1], [rank - 1])
    return len(dims) == 1


def lies_across(node: Any) -> bool:
    """Whether a large value is computed element by element, and its last dimension does not lie in order."""
    spec = node.spec
    if not isinstance(spec, TensorSpec) or not elementwise(node) or spec.stride[-1:] in ((), (1,)):
        return False
    if not all(type(n) is int for n in (*spec.shape, *spec.stride)) or spec.shape[-1] == 1:
        return False
    return math.prod(spec.shape) >= LARGE and is_dense(spec.shape, spec.stride)


def elementwise(node: Node) -> bool:
    return isinstance(node.op, torch._ops.OpOverload) and torch.Tag.pointwise in node.op.tags


def sources(node: Node) -> list[Node]:
    """The first values of those from which one follows element by element that lie as it does."""

    def before(one: Node) -> list[Node]:
        return [n for n in one.inputs() if lies_across(n) and n.spec.shape == one.spec.shape]

    return [one for one in reached([node], before) if not before(one)]


def turned(node: Node, walk: Relayout) -> Node:
    """The value in the order of its dimensions."""
    with walk.recording:
        made = aten.clone.default(walk.fake(walk.follow(node)), memory_format=torch.contiguous_format)
    return walk.recording.node(made)
