"""Equal nodes: what expansions of several ops have in common, as a border around an image that all read."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kiln.base.graph import CONSTANT, Graph, Node, call_key, nodes_in, reached, retarget, substituted
from kiln.ops.aliases import GIVES_BACK, shows
from kiln.ops.meta import Facts
from kiln.ops.table import aten

#: Ops that compute nothing.
MOVES = frozenset({
    aten.as_strided.default, aten.clone.default, aten.constant_pad_nd.default, aten.expand.default,
    aten.full.default, aten.permute.default, aten.select.int, aten.slice.Tensor, aten.view.default,
})  # fmt: skip
#: Those whose results lie in memory of their own: of equal ones there is one. Loops read others as they are.
STORED = frozenset({aten.clone.default, aten.constant_pad_nd.default})
#: Whether an op may write to what it is given, or keep it.
WRITES = Facts(lambda op: op is not operator.getitem and op is not CONSTANT and not _is_pure(op))
#: Whether what an op gives is memory that it was given.
SHOWS = Facts(lambda op: op is operator.getitem or shows(op))


def _is_pure(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and op.namespace == "aten" and not op._schema.is_mutable


def merged(graph: Graph) -> Graph:
    """The graph, changed in place, with one node for borders and copies that are equal.

    Outputs, and what other code may write to, stay apart, each in memory of its own. A copy of a value that
    is neither is that value.
    """

    def memory_of(given: Iterable[Node]) -> dict[Node, None]:
        return reached(given, lambda node: node.inputs() if SHOWS[node.op] else ())

    written = memory_of([read for node in graph.nodes if WRITES[node.op] for read in node.inputs()])
    apart = memory_of([*nodes_in(graph.outputs), *written])
    seen: dict[Any, Node] = {}
    same: dict[Node, Node] = {}

    def is_needless(source: Node, copy: Node) -> bool:
        made = _is_pure(source.op) and not SHOWS[source.op] and source.op not in GIVES_BACK
        return made and source not in apart and source.spec == copy.spec

    def instead(node: Node) -> tuple[Sequence[Node], Any] | None:
        if node.op is aten.clone.default and node not in written and is_needless(node.args[0], node):
            if node in apart:
                apart[node.args[0]] = None
            return (), node.args[0]
        if node.op not in MOVES or node in apart:
            return None
        reads = retarget(node.args, same) if same else node.args
        key = call_key(node if reads is node.args else node.over(reads, node.kwargs))
        # A copy has strides that its arguments need not say.
        known = node if key is None else seen.setdefault((key, node.spec.stride), node)
        if known is node:
            return None
        same[node] = known
        return ((), known) if node.op in STORED else None

    return substituted(graph, instead)
