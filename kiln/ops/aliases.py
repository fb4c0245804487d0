"""Which results of an op share memory with which arguments."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch

from kiln.base.graph import Node
from kiln.ops.table import aten

#: Results that share the memory of the first argument though the schema does not say so.
QUIETLY_SHARED = frozenset({
    aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
})  # fmt: skip

#: Ops whose result may lie in the memory of their argument though their schema does not say so.
GIVES_BACK = frozenset({aten._unsafe_view.default, aten.conj_physical.default})


@cache
def shows(op: Any) -> bool:
    """Whether what an op gives is memory that it was given: a view of it, or what it wrote."""
    return isinstance(op, torch._ops.OpOverload) and any(r.alias_info for r in op._schema.returns)


def is_view(node: Node) -> bool:
    """Whether a node shows memory of what it reads, or takes a part of such a result."""
    return node.op is operator.getitem or shows(node.op) or node.op in QUIETLY_SHARED


def owner_of(node: Node) -> Node:
    """The node whose memory a chain of views shows; each of several results has memory of its own."""
    while is_view(node) and type(node.args[0]) is Node:
        whole = node.args[0]
        while whole.op is operator.getitem:
            whole = whole.args[0]
        if node.op is operator.getitem and not is_view(whole):
            break
        node = node.args[0]
    return node


def base_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> Any:
    """The argument whose memory the result at this place shares; None for a new one."""
    bases = bases_in(func)
    index = bases[place] if place < len(bases) else None
    if index is None:
        return None
    return args[index] if index < len(args) else kwargs.get(func._schema.arguments[index].name)


@cache
def bases_in(func: Any) -> tuple[int | None, ...]:
    """For each result of an overload, the position of the argument whose memory it shares."""
    if func in QUIETLY_SHARED:
        return (0,)
    schema = func._schema
    owners = {
        mark: i for i, a in enumerate(schema.arguments) if a.alias_info for mark in a.alias_info.before_set
    }
    found = []
    for result in schema.returns:
        marks = result.alias_info.before_set if result.alias_info else ()
        owner = next((owners[mark] for mark in marks if mark in owners), None)
        if owner is None and result.alias_info and owners:
            # The schema of a list of views does not name its owner.
            owner = min(owners.values())
        found.append(owner)
    return tuple(found)
