"""Views in memory: where a view starts in the memory of what it shows, where that follows from the sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kiln.base.graph import Node, TensorSpec, argument
from kiln.ops.levels import name_of


def ahead_of(node: Node) -> Any:
    """How many elements after those of its first argument a view starts; None where only its op knows."""
    rule = RULES.get(name_of(node.op))
    if rule is None or not isinstance(node.spec, TensorSpec):
        return None
    base = node.args[0].spec
    return rule(node, base) if isinstance(base, TensorSpec) and base.dtype == node.spec.dtype else None


def _slice(node: Node, base: TensorSpec) -> Any:
    dim, step = argument(node, 1, "dim", 0) % len(base.shape), argument(node, 4, "step", 1)
    start = argument(node, 2, "start")
    start = 0 if start is None else start
    size = base.shape[dim]
    if type(start) is not int or type(step) is not int or (start != 0 and type(size) is not int):
        return None
    if start:
        start = min(max(start + size if start < 0 else start, 0), size)
    return start * base.stride[dim]


def _select(node: Node, base: TensorSpec) -> Any:
    dim, place = node.args[1] % len(base.shape), node.args[2]
    if type(place) is not int or place < 0 and type(base.shape[dim]) is not int:
        return None
    return (place + base.shape[dim] if place < 0 else place) * base.stride[dim]


RULES: dict[str, Callable[[Node, TensorSpec], Any]] = {
    "slice": _slice, "select": _select,
    **dict.fromkeys(("permute", "expand", "view", "_unsafe_view", "alias", "detach"), lambda node, base: 0),
}  # fmt: skip
