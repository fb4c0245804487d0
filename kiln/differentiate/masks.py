"""Masks of attention that hide nothing: libraries make them where they cannot look whether they need one."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec, mapped
from kiln.ops.record import Recording

aten = torch.ops.aten
#: Elements of what is computed to look at a mask at most.
LARGEST = 1 << 24
#: What gives one number everywhere, whatever the contents of its first argument.
FILLED: dict[Any, float] = {
    aten.new_ones.default: 1, aten.ones_like.default: 1,
    aten.new_zeros.default: 0, aten.zeros_like.default: 0,
}  # fmt: skip


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **named: Any) -> Any:
    """Attention; on a GPU, whose fused kernels take few kinds of masks, without one that hides nothing."""
    if attn_mask is not None and attn_mask.device.type == "cuda" and hides_nothing(attn_mask):
        attn_mask = None
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **named)


def hides_nothing(mask: Any) -> bool:
    """Whether a mask in a trace follows from constants, and is true everywhere, or zero where it is added."""
    node = getattr(mask, "node", None)
    if type(node) is not Node:
        return False
    below, recording = sources(node), _get_current_dispatch_mode()
    if below is None or not isinstance(recording, Recording) or written(recording.graph, set(below)):
        return False
    known: dict[Node, Any] = {}
    with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
        for each in below:
            known[each] = made(each, known)
        found = known[node]
        return bool(found.all() if found.dtype is torch.bool else not found.any())


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
            count += elements(node)
            todo.append((node, True))
            todo += [(n, False) for n in (() if node.op in FILLED else node.inputs())]
    return list(ordered) if count <= LARGEST else None


def written(graph: Graph, nodes: set[Node]) -> bool:
    """Whether the program writes to memory that one of these stands for, or to a view of it."""
    for node in graph.nodes:
        schema = getattr(node.op, "_schema", None)
        if schema is not None and schema.is_mutable and nodes_below(node) & nodes:
            return True
    return False


def nodes_below(root: Node) -> set[Node]:
    found: set[Node] = set()
    todo = list(root.inputs())
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.inputs()
    return found


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


def elements(node: Node) -> int:
    count = 1
    for n in node.spec.shape:
        count *= n
    return count


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
