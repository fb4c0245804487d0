"""Clean: what a functional graph does twice or for nothing."""

from __future__ import annotations

import operator
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kiln.base.graph import (
    CONSTANT,
    INPUT,
    Graph,
    Made,
    Node,
    TensorSpec,
    call_key,
    nodes_in,
    retarget,
    tensors,
)
from kiln.differentiate.kinds import kind
from kiln.differentiate.writes import FORMS
from kiln.ops.aliases import GIVES_BACK
from kiln.ops.layout import is_dense
from kiln.ops.raising import raises
from kiln.ops.symint import wrap
from kiln.ops.table import aten

if TYPE_CHECKING:
    from kiln.differentiate.results import Results

#: Ops whose result is their first argument where the types are the same.
SAME = frozenset({
    aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default, aten.clone.default,
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten._to_copy.default,
    aten._reshape_alias.default, aten.permute.default, aten.lift_fresh_copy.default, aten.slice.Tensor,
})  # fmt: skip
#: For ops with a flag, by its place: the places of what they do not read where it is set.
UNREAD = {aten.native_batch_norm_backward.default: (7, (3, 4))}  # training: the batch has its own statistics
#: Ops that read or write some places along one dimension, and where in their arguments that stands.
SCATTERS = frozenset({aten.select_scatter.default, aten.slice_scatter.default})
PARTS = {aten.select.int: 1, aten.slice.Tensor: 1, **dict.fromkeys(SCATTERS, 2)}
Span: TypeAlias = tuple[int, int, int]
"""The dimension along which a part of a value is read or written, and where it begins and ends."""
#: How many places a part has at most whose writes are found by place.
SHORT = 16
SINGLE = frozenset({aten.select.int, aten.select_scatter.default})
#: Views that undo themselves.
SWAPS = frozenset({aten.t.default, aten.transpose.int})


def acts(node: Node) -> bool:
    """Whether a node matters for what it does and not only for its value."""
    return kind(node.op).acts or kind(node.op).random


def clean(graph: Graph, results: Results) -> None:
    """Drop what changes nothing, merge what is computed twice, remove what nobody needs, part the results."""
    replaced: dict[Node, Node] = {}
    seen: dict[Any, Node] = {}
    kept: list[Node] = []
    written = Written()
    shown: set[Node] | None = None
    for node in graph.nodes:
        if node.backward and shown is None:
            shown = shown_only(graph, results, replaced)
        if replaced:
            node.args, node.kwargs = retarget(node.args, replaced), retarget(node.kwargs, replaced)
        if node.op in SAME and node.spec == node.args[0].spec:
            replaced[node] = node.args[0]
            continue
        flag, unread = UNREAD.get(node.op, (0, ()))
        if unread and len(node.args) > flag and node.args[flag] is True:
            node.args = tuple([None if i in unread else value for i, value in enumerate(node.args)])
        if node.op in PARTS and node.op not in SCATTERS:
            node.args = (written.read_by(node), *node.args[1:])
        inner = node.args[0] if node.op in SWAPS else None
        if inner is not None and inner.op is node.op and inner.args[1:] == node.args[1:]:
            source = inner.args[0]
            if source.spec == node.spec:
                replaced[node] = source
                continue
        key = key_of(node)
        if key is not None:
            known = seen.setdefault(key, node)
            if shown and known in shown and node.op is not operator.getitem:
                known = seen[key] = node
            if known is not node:
                replaced[node] = known
                continue
        if node.op in SCATTERS:
            written.note(node)
        kept.append(node)
    graph.nodes = kept
    graph.outputs = part(graph, retarget(graph.outputs, replaced), results)
    graph.drop_unused(lambda node: acts(node) or may_raise(node))
    look_at_unread(graph)


def shown_only(graph: Graph, results: Results, replaced: dict[Node, Node]) -> set[Node]:
    """The results that eager does not keep for the backward pass: the program may write to them before it.

    A backward node that computes such a value once more is not merged with it.
    """
    reads = (read for node in graph.nodes if node.backward for read in node.inputs())
    kept = {root_of(replaced.get(read, read)) for read in reads}
    return {root_of(node) for node in retarget(graph.outputs[: len(results.values)], replaced)} - kept


def may_raise(node: Node) -> bool:
    """Whether eager may raise where the program computes this, by the contents of tensors."""
    return not node.backward and any(raises(node.op, spec.dtype) for spec in tensors([node.spec]))


def look_at_unread(graph: Graph) -> None:
    """Have what may raise and is read by nobody be read at once by an op that does nothing."""
    read, listed = graph.read() | set(nodes_in(graph.outputs)), list[Node]()
    for node in graph.nodes:
        listed.append(node)
        if node not in read and may_raise(node):
            made, value = Made(graph, node), node
            if not isinstance(node.spec, TensorSpec):
                value = made.call(operator.getitem, node.spec[0], node, 0)
            made.call(aten._assert_tensor_metadata.default, None, value)
            listed += made.nodes
    graph.nodes = listed


class Written:
    """Values whose parts are written one after the other, each made of the one before it."""

    def __init__(self) -> None:
        self.turns: dict[Node, tuple[Turns, int]] = {}

    def note(self, node: Node) -> None:
        """A part of a value is written."""
        whole: Node = node.args[0]
        if node.spec == whole.spec:
            turns, place = self.turns.get(whole, (None, 0))
            span = places(node)
            if turns is None or place < len(turns.nodes) - 1:
                turns = Turns(whole, -1 if span is None else span[0])
            self.turns[node] = turns, turns.add(node, span)

    def read_by(self, part: Node) -> Node:
        """What a part is read of: what that was before others were written, as loops do in their turns."""
        whole: Node = part.args[0]
        mine = places(part) if whole in self.turns else None
        while mine is not None and whole in self.turns:
            turns, last = self.turns[whole]
            if (at := turns.last(mine, last)) >= 0:
                return turns.nodes[at]
            whole = turns.start
        return whole


class Turns:
    """Writes to parts of one value, in their order; short ones are found by the places that they are to."""

    def __init__(self, start: Node, dim: int) -> None:
        self.start, self.dim = start, dim
        self.nodes: list[Node] = []
        self.spans: list[Span | None] = []
        self.at: dict[int, list[int]] = {}
        self.long: list[int] = []

    def add(self, node: Node, span: Span | None) -> int:
        number = len(self.nodes)
        self.nodes.append(node)
        self.spans.append(span)
        if span is None or not self.short(span):
            self.long.append(number)
        else:
            for place in range(*span[1:]):
                self.at.setdefault(place, []).append(number)
        return number

    def short(self, span: Span) -> bool:
        """Whether writes to these places are found one by one."""
        return span[0] == self.dim and span[2] - span[1] <= SHORT

    def last(self, mine: Span, until: int) -> int:
        """The last write up to one of them that may be to a part of these places; less than 0 for none."""
        if not self.short(mine):
            return next((i for i in range(until, -1, -1) if _meet(self.spans[i], mine)), -1)
        latest = -1
        for place in range(*mine[1:]):
            turns = self.at.get(place, [])
            if known := bisect_right(turns, until):
                latest = max(latest, turns[known - 1])
        for i in range(bisect_right(self.long, until) - 1, -1, -1):
            if self.long[i] < latest:
                break
            if _meet(self.spans[self.long[i]], mine):
                return self.long[i]
        return latest


def _meet(its: Span | None, mine: Span) -> bool:
    """Whether a write may be to one of these places."""
    return its is None or its[0] != mine[0] or mine[1] < its[2] and its[1] < mine[2]


def places(part: Node) -> Span | None:
    """The dimension along which a part of a value is read or written, and where it begins and ends."""
    shape, (dim, start, end, *_) = part.args[0].spec.shape, (*part.args[PARTS[part.op] :], None, None, None)
    dim = (dim or 0) % len(shape)
    if part.kwargs or not all(n is None or type(n) is int for n in (shape[dim], start, end)):
        return None
    if part.op in SINGLE:
        return dim, start % shape[dim], start % shape[dim] + 1
    start, end, _ = slice(start, end).indices(shape[dim])
    return dim, start, end


def key_of(node: Node) -> Any:
    """What two nodes have in common when they compute the same; None for those that must stay."""
    op = node.op
    if op is operator.getitem:
        return node.args
    if op is CONSTANT or not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or acts(node):
        return None
    return call_key(node)


def source_of(node: Node) -> Node | None:
    """The value whose memory a view, or the getitem of one, looks at; None for what has memory of its own."""
    op = node.op
    if op is INPUT or op is CONSTANT:
        return None
    if op is operator.getitem:
        whole: Node = node.args[0]
        return whole if FORMS[whole.op].views else None
    source: Node | None = node.args[0] if op in GIVES_BACK or FORMS[op].views else None
    return source


def root_of(node: Node) -> Node:
    """The value whose memory a node's result lies in."""
    while (source := source_of(node)) is not None:
        node = source
    return node


def part(graph: Graph, outputs: tuple[Any, ...], results: Results) -> tuple[Any, ...]:
    """The outputs, with copies where results would share memory that are apart in the program."""
    taken: set[Node] = set()
    written = {m.index: graph.inputs[m.primal] for m in results.mutated}
    new = list(outputs)
    own = set(results.own.values())
    for i in sorted(own):
        root = root_of(new[i])
        if root in taken or root.op is INPUT or root.op is CONSTANT:
            new[i] = copied(graph, new[i])
        taken.add(root)
    for i in range(len(results.values)):
        if i in own:
            continue
        root = root_of(new[i])
        if root in written.values() and (root is not new[i] or root is not written.get(i)):
            new[i] = copied(graph, new[i])
    for i in range(len(results.values), len(new)):
        if type(new[i]) is Node and (root := root_of(new[i])).op is INPUT and not root.backward:
            # Eager gives an empty argument for its own gradient, with its history.
            new[i] = copied(graph, new[i])
            new[i].backward = True
    return tuple(new)


def fills_memory(spec: TensorSpec) -> bool:
    """Whether a tensor leaves no holes between its elements, so that a copy has its strides."""
    return bool(is_dense(tuple(map(wrap, spec.shape)), tuple(map(wrap, spec.stride))))


def copied(graph: Graph, node: Node) -> Node:
    """A copy of a value with its layout; where that has holes, the view is taken anew of a copy."""
    spec: Any = node.spec
    source = source_of(node)
    if source is not None and not (isinstance(spec, TensorSpec) and fills_memory(spec)):
        return graph.call(node.op, (copied(graph, source), *node.args[1:]), node.kwargs, spec, node)
    own = TensorSpec(spec.shape, spec.stride, spec.dtype, spec.device)
    return graph.call(aten.clone.default, (node,), {}, own, node)
