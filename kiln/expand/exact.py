"""Eager's numerics: which ops kernels compute to the last bit as eager does; the others stay eager calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kiln.base.graph import Graph, Node, TensorSpec, argument, copied
from kiln.ops.aliases import shows
from kiln.ops.levels import VIEW, name_of

#: Arithmetic that rounds as IEEE says. Not so `sqrt`: eager's comes from a library and may be off by a bit.
ROUNDED_ONCE = frozenset({"add", "sub", "rsub", "mul", "div", "neg", "abs", "reciprocal", "rsqrt"})
CHOICES = frozenset({
    "relu", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "where", "threshold",
    "threshold_backward", "hardtanh", "eq", "ne", "lt", "le", "gt", "ge", "sign", "isnan", "isinf",
    "floor", "ceil", "trunc", "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "logical_and",
    "logical_or", "logical_not", "logical_xor", "masked_fill", "fill", "tril", "triu",
})  # fmt: skip
MOVES = frozenset({
    "_to_copy", "clone", "copy", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_full",
    "new_zeros", "new_ones", "scalar_tensor", "arange", "cat", "stack", "constant_pad_nd", "slice_scatter",
    "select_scatter", "gather", "index", "index_select", "embedding", "repeat", "roll", "lift_fresh_copy",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "kiln::uniform", "kiln::seeds",
})  # fmt: skip
#: Folds whose result does not depend on the order.
ANY_ORDER = frozenset({"amax", "amin", "any", "all", "argmax", "argmin"})
EXACT = ROUNDED_ONCE | CHOICES | MOVES | ANY_ORDER | VIEW
#: These are exact for integers.
OF_INTEGERS = frozenset({"sum", "prod", "cumsum", "mean"})


class Eager:
    """An op that no later stage may open: a call of eager's kernel."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.__name__ = op._schema.name.rpartition("::")[2]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


#: One for each op: nodes of equal ops are equal.
eager = functools.cache(Eager)


def sealed(graph: Graph) -> Graph:
    """A copy of the graph with every op that kernels would compute otherwise than eager kept a call."""
    made = copied(graph)
    for node in made.nodes:
        node.op = node.op if is_exact(node) else eager(node.op)
    return made


def opened(node: Node) -> Node:
    """A call with the op itself: what runs it may know a shorter way."""
    if isinstance(node.op, Eager):
        node.op = node.op.op
    return node


def is_exact(node: Node) -> bool:
    """Whether a kernel of ours gives eager's bits for a node."""
    op = node.op
    if not isinstance(op, torch._ops.OpOverload) or shows(op):
        return True
    name = name_of(op)
    if name in OF_INTEGERS:
        return _integral(node) and all(map(_integral, node.inputs()))
    return name in EXACT and (name not in CONDITIONS or CONDITIONS[name](node))


def _integral(node: Node) -> bool:
    spec = node.spec
    return isinstance(spec, TensorSpec) and not spec.dtype.is_floating_point and not spec.dtype.is_complex


def _plain(node: Node) -> bool:
    """Without a factor, which eager's kernels join to the sum in one rounding or in two as they see fit."""
    return bool(argument(node, 2, "alpha", 1) == 1)


def _whole(node: Node) -> bool:
    """Not of a half type: eager rounds on the way."""
    return node.spec.dtype not in (torch.float16, torch.bfloat16)


#: Ops that are exact for some arguments only.
CONDITIONS: dict[str, Callable[[Node], bool]] = {
    "add": _plain,
    "sub": _plain,
    "rsub": _plain,
    "rsqrt": _whole,
    "div": lambda node: not node.kwargs.get("rounding_mode"),
}
