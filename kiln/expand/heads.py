"""Attention in which a head of keys and values serves several of queries: they are not repeated in memory.

Eager's kernels for the CPU take fewer heads of keys and values, and give gradients that are sums over the
heads that read one. The results are the same: what was repeated is read as often.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

from kiln.base.graph import Graph, Node, nodes_in
from kiln.expand.relayout import Relayout
from kiln.ops.table import aten

#: Where keys and values stand among the arguments.
KEYS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: 1,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 2,
}
#: Ops that leave the elements of a tensor in their order.
ORDERED = frozenset({aten.clone.default, aten.view.default, aten._unsafe_view.default})
HEADS = 2  # the dimension along which heads are repeated


def grouped(graph: Graph) -> Graph:
    """The graph with attention over keys and values as they were before they were repeated."""
    attending = [node for node in graph.nodes if node.op in KEYS]
    made: dict[Node, Any] = {}
    covered: set[Node] = set()
    outputs, users = set(nodes_in(graph.outputs)), graph.users() if attending else {}
    for node in attending:
        first = KEYS[node.op]
        given = node.args[first : first + 2]
        sources = [source for one in given if (source := before(one)) is not None]
        if len(sources) != 2 or sources[0].spec.shape != sources[1].spec.shape:
            continue
        sums: list[tuple[Node, Node, Node]] | None = []
        if first == 2:
            sums = sums_of(node, sources[0], users, outputs)
        if sums is not None:
            made[node] = partial(attended, node, dict(zip(given, sources, strict=True)))
            made.update((total, partial(unsqueezed, part)) for part, _, total in sums)
            covered.update(view for _, view, _ in sums)
    return Relayout(graph, made, covered).run() if made else graph


def before(node: Node) -> Node | None:
    """What the heads of a tensor repeat: of extents (batch, heads, 1, rows, width)."""
    wanted = node.spec.shape
    while node.op in ORDERED:
        node = node.args[0]
    if node.op is not aten.expand.default:
        return None
    source, shape = node.args[0], node.spec.shape
    mine = source.spec.shape
    if (len(mine), len(shape), len(wanted)) != (5, 5, 4) or mine[HEADS] != 1 or source.spec.stride[-1] != 1:
        return None
    heads, times = shape[1:3]
    known = type(heads) is int and type(times) is int and times > 1
    fits = known and mine == (*shape[:2], 1, *shape[3:]) and wanted == (shape[0], heads * times, *shape[3:])
    return source if fits else None


def sums_of(
    node: Node, source: Node, users: dict[Node, list[Node]], outputs: set[Node]
) -> list[tuple[Node, Node, Node]] | None:
    """The gradients of keys and values, each with its view by heads and the sum; None for other readers."""
    found = []
    for part in users[node]:
        if part.op is not operator.getitem or node in outputs:
            return None
        if part.args[1] == 0:
            continue
        (view, *others), totals = users[part] or [part], list[Node]()
        if view.op is aten.view.default and not others:
            totals = users[view]
        if len(totals) != 1 or not {part, view}.isdisjoint(outputs):
            return None
        (total,) = totals
        summed = total.op is aten.sum.dim_IntList and total.args == (view, [HEADS], True) and not total.kwargs
        if not summed or total.spec.shape != source.spec.shape:
            return None
        found.append((part, view, total))
    return found


def attended(node: Node, sources: dict[Node, Node], walk: Relayout) -> Any:
    """The call over keys and values of fewer heads."""
    made: dict[Node, Node] = {}
    for given, source in sources.items():
        with walk.recording:
            made[given] = walk.recording.node(aten.squeeze.dim(walk.fake(walk.values[source]), HEADS))
    return walk.again(node, lambda leaf: made.get(leaf) or walk.values[leaf])


def unsqueezed(part: Node, walk: Relayout) -> Node:
    """A gradient, which is a sum already, in the shape of the sum."""
    with walk.recording:
        return walk.recording.node(aten.unsqueeze.default(walk.fake(walk.values[part]), HEADS))
