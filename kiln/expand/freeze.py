"""Freeze: what a graph computes of held tensors alone is taken out of it, to be computed once."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.graph import (
    CONSTANT,
    Graph,
    Node,
    TensorSpec,
    expressions_in,
    mapped,
    nodes_in,
    retarget,
    substituted,
    tensors,
)
from kiln.expand.packed import PURE, packed
from kiln.ops.aliases import is_view, owner_of, shows
from kiln.ops.levels import name_of

#: Values up to so many bytes are kept whatever they are made of.
SMALL = 1 << 20
#: Others are kept where they take at most so many times the memory of the held tensors that they are made of.
TIMES = 2


@dataclass(frozen=True, slots=True)
class Frozen:
    """A graph in two parts: `once` computes values of held tensors, `rest` computes the outputs with them.

    `once` takes the inputs at `held`; `rest` takes those at `given`, then the outputs of `once`.
    """

    once: Graph
    rest: Graph
    held: tuple[int, ...]
    given: tuple[int, ...]


def freeze(graph: Graph, held: Collection[int]) -> Frozen | None:
    """The graph with what depends on the inputs at `held` alone taken out; None where that is nothing.

    The layers that it packs and the layouts that it chooses are those of `kiln.expand.packed`.
    """
    made = packed(graph, kept_of(graph, {graph.inputs[i] for i in held}))
    fixed = {made.inputs[i] for i in held}
    made = merged(made, kept_of(made, fixed) - fixed)
    kept = kept_of(made, fixed)
    wanted = [node for node in _wanted(made, kept) if owner_of(node) not in fixed]
    return _split(made, fixed, wanted, kept) if wanted else None


#: Only these are what their memory says.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def can_watch(tensor: torch.Tensor) -> bool:
    """Whether a change of a tensor shows: inference tensors count no versions."""
    plain = type(tensor) in PLAIN and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return plain and not tensor.is_inference() and not tensor.is_neg() and not tensor.is_conj()


def is_pure(node: Node) -> bool:
    """Whether a node only computes, and from its arguments alone."""
    op = node.op
    if op is CONSTANT:
        return isinstance(node.args[0], torch.Tensor) and can_watch(node.args[0])
    if op is operator.getitem or op in PURE:
        return True
    return _computes(op) and not expressions_in((node.args, node.kwargs))


@cache
def _computes(op: Any) -> bool:
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable or not op._schema.returns:
        return False
    drawn = torch.Tag.nondeterministic_seeded in op.tags
    return not drawn and op.namespace in ("aten", "mkldnn") and op._schema.name not in UNSET


#: Ops whose results follow from their places, and those that read or write at places that are data.
PLAIN_FORMS = frozenset("arange full ones zeros".split())
CHOICES = frozenset(
    "embedding gather index index_add index_copy index_put index_select masked_scatter scatter scatter_add"
    " scatter_reduce".split()
)
#: Ops whose results are not set, or that ask for data.
UNSET = frozenset({
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::_local_scalar_dense", "aten::empty_permuted",
})  # fmt: skip


def kept_of(graph: Graph, fixed: Collection[Node]) -> set[Node]:
    """The nodes whose values are the same in every call and worth their memory; `fixed` ones are."""
    sources: dict[Node, frozenset[Node]] = {node: frozenset([node]) for node in fixed}
    kept: set[Node] = set(fixed)
    shown = _shown(graph)
    for node in graph.nodes:
        reads = node.inputs()
        if not kept.issuperset(reads) or node in shown or not is_pure(node):
            continue
        below = sources[node] = frozenset().union(*[sources[read] for read in reads])
        # What a layer takes packed stands for what was kept already.
        if is_view(node) or node.op in PURE or nbytes(node.spec) <= limit_of(below):
            kept.add(node)
    return kept


def merged(graph: Graph, kept: Collection[Node]) -> Graph:
    """The graph, changed in place, with one node for equal ones of these: a weight is packed once."""
    first: dict[tuple[Any, str], Node] = {}

    def instead(node: Node) -> tuple[Sequence[Node], Node] | None:
        if node not in kept or node.op is CONSTANT:
            return None
        given = mapped((node.args, node.kwargs), lambda leaf: id(leaf) if type(leaf) is Node else leaf)
        same = first.setdefault((node.op, repr(given)), node)
        return None if same is node else ((), same)

    return substituted(graph, instead)


def limit_of(sources: Collection[Node]) -> int:
    """The bytes that a value made of these may take."""
    return max(SMALL, TIMES * sum([nbytes(node.spec) for node in sources]))


def _wanted(graph: Graph, kept: set[Node]) -> list[Node]:
    """The kept nodes that the rest reads, in order."""
    needed = set(nodes_in(graph.outputs))
    for node in graph.nodes:
        if node not in kept:
            needed.update(node.inputs())
    for node in reversed(graph.nodes):  # what is a view of a kept value is taken again
        if node in needed and node in kept and shows(node.op) and isinstance(node.args[0].spec, TensorSpec):
            needed.remove(node)
            needed.add(node.args[0])
    # Constants are at hand in either part, and a tuple is no value that a graph takes.
    at_hand = {node for node in graph.nodes if node.op is CONSTANT} | _made_by_loops(graph)
    wanted = [n for n in graph.nodes if n in kept and n in needed and n not in at_hand]
    return [n for n in wanted if isinstance(n.spec, TensorSpec)]


def _made_by_loops(graph: Graph) -> set[Node]:
    """Zeros, counts and the like that loops make: kept, they are read, or copied to be written to."""
    users = graph.users()
    found = [node for node in graph.nodes if name_of(node.op) in PLAIN_FORMS and not node.inputs()]
    return {node for node in found if users[node] and all(map(_in_loops, users[node]))}


def _in_loops(node: Node) -> bool:
    """Whether loops compute a node, as far as its op says."""
    pointwise = isinstance(node.op, torch._ops.OpOverload) and torch.Tag.pointwise in node.op.tags
    return pointwise or is_view(node) or name_of(node.op) in CHOICES


def _shown(graph: Graph) -> set[Node]:
    """The nodes whose memory the caller gets: it must be new in every call."""
    shown = set(nodes_in(graph.outputs))
    for node in reversed(graph.nodes):
        if node in shown and is_view(node):
            shown.update(node.inputs())
    return shown


def nbytes(spec: Any) -> int:
    """The memory of a value whose sizes are known."""
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in tensors([spec]))


def _split(graph: Graph, fixed: set[Node], wanted: Sequence[Node], kept: set[Node]) -> Frozen:
    """Two graphs over the nodes of one."""
    once = Graph()
    once.nodes = [node for node in graph.nodes if node in kept]
    once.outputs = tuple(wanted)
    once.drop_unused()
    used = once.read()
    held = tuple(i for i, node in enumerate(graph.inputs) if node in used)
    once.inputs = [graph.inputs[i] for i in held]
    rest = Graph()
    rest._names = graph._names
    rest.inputs = list(graph.inputs)
    replaced: dict[Node, Any] = {}
    for node in wanted:
        replaced[node] = rest.input(f"{node.name}_held", node.spec)
    for node in graph.nodes:
        if node in replaced:
            continue
        if node.op is CONSTANT or replaced.keys().isdisjoint(node.inputs()):
            rest.nodes.append(node)
            continue
        args, kwargs = retarget(node.args, replaced), retarget(node.kwargs, replaced)
        replaced[node] = rest.add(node.over(args, kwargs))
    rest.outputs = retarget(graph.outputs, replaced)
    acting = {replaced.get(node, node) for node in set(graph.nodes) - graph.read() - kept}
    rest.drop_unused(keep=acting.__contains__)
    needed = rest.read() | set(nodes_in(rest.outputs))
    plain = rest.inputs[: len(graph.inputs)]
    given = tuple(i for i, node in enumerate(plain) if node in needed or node not in fixed)
    rest.inputs = [*(plain[i] for i in given), *rest.inputs[len(graph.inputs) :]]
    return Frozen(once.check(), rest.check(), held, given)
