"""Masks of attention that hide nothing, or what comes later: libraries make them where they cannot look."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec, ancestors, mapped
from kiln.ops.record import Recording
from kiln.ops.table import aten

#: Elements of what is computed to look at a mask at most.
LARGEST = 1 << 27
#: Where fused kernels take few kinds of masks.
DEVICES = frozenset({"cuda"})
#: What masks hide.
NOTHING, LATER, SOMETHING = "nothing", "later", "something"
#: What gives one number everywhere, whatever the contents of its first argument.
FILLED: dict[Any, float] = {
    aten.new_ones.default: 1, aten.ones_like.default: 1,
    aten.new_zeros.default: 0, aten.zeros_like.default: 0,
}  # fmt: skip


_known: WeakKeyDictionary[Recording, dict[Node, Any]] = WeakKeyDictionary()
"""The values that were computed to look at masks: a model has one for all of its layers."""


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> Any:
    """Attention; on a GPU without a mask that hides nothing, or nothing but what comes later."""
    if attn_mask is not None and attn_mask.device.type in DEVICES and not is_causal:
        hidden = what_it_hides(attn_mask)
        square = query.shape[-2] == key.shape[-2]
        if hidden == NOTHING or hidden == LATER and square:
            attn_mask, is_causal = None, hidden == LATER
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, **named
    )


def what_it_hides(mask: Any) -> str:
    """What a mask in a trace hides, where it follows from constants: nothing, or all that comes later."""
    node, recording = getattr(mask, "node", None), _get_current_dispatch_mode()
    if type(node) is not Node or not isinstance(recording, Recording):
        return SOMETHING
    below = sources(node)
    if below is None or written(recording.graph, set(below)):
        return SOMETHING
    known = _known.setdefault(recording, {})
    with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
        for each in below:
            if each not in known:
                known[each] = made(each, known)
        return kind_of(known[node])


def kind_of(mask: torch.Tensor) -> str:
    """What a mask hides, by its values: where it is false, or adds what leaves nothing of any value."""
    shown = mask if mask.dtype is torch.bool else mask == 0
    if bool(shown.all()):
        return NOTHING
    lower = torch.ones(mask.shape[-2:], dtype=torch.bool).tril() if mask.dim() > 1 else shown
    if mask.shape[-1] != lower.shape[0] or not torch.equal(shown, lower.expand_as(shown)):
        return SOMETHING
    lost = mask.dtype is torch.bool or bool((shown | (mask <= torch.finfo(mask.dtype).min)).all())
    return LATER if lost else SOMETHING


def sources(root: Node) -> list[Node] | None:
    """All nodes that a value is computed from, in order; None where that cannot be done without inputs."""
    ordered: dict[Node, None] = {}
    todo = [(root, False)]
    count = 0
    while todo:
        node, done = todo.pop()
        if done:
            ordered[node] = None
        elif node not in ordered:
            if not computable(node):
                return None
            count += math.prod(node.spec.shape)
            todo.append((node, True))
            todo += [(n, False) for n in (() if node.op in FILLED else node.inputs())]
    return list(ordered) if count <= LARGEST else None


def written(graph: Graph, nodes: set[Node]) -> bool:
    """Whether the program writes to memory that one of these stands for, or to a view of it."""
    for node in graph.nodes:
        schema = getattr(node.op, "_schema", None)
        if schema is not None and schema.is_mutable and not nodes.isdisjoint(ancestors(node.inputs())):
            return True
    return False


def computable(node: Node) -> bool:
    """Whether a node's value is the same in every call, and nothing is written."""
    if node.op is INPUT or not isinstance(node.spec, TensorSpec):
        return False
    if not all(type(n) is int for n in node.spec.shape):
        return False
    if node.op is CONSTANT:
        return bool(node.spec.device.type == "cpu")
    op = node.op
    return isinstance(op, torch._ops.OpOverload) and not (
        op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags
    )


def made(node: Node, known: dict[Node, Any]) -> Any:
    """The value of a node, on the CPU."""
    if node.op is CONSTANT:
        return node.args[0]
    if node.op in FILLED:
        return torch.full(node.spec.shape, FILLED[node.op], dtype=node.spec.dtype)

    def value(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return known[leaf] if type(leaf) is Node else leaf

    return node.op(*mapped(node.args, value), **mapped(node.kwargs, value))
