"""Check: does a graph keep the promises of its level?"""

from __future__ import annotations

from typing import Any

from kiln.base.errors import Bug
from kiln.base.graph import CONSTANT, Graph, Node, TensorSpec
from kiln.ops.layout import FLOATS
from kiln.ops.levels import BINARY, CHOICE, TERNARY, UNARY, name_of

#: Overloads that a graph at level prims does not hold: another one says the same.
SUPERSEDED = frozenset({"aten.add.Scalar", "aten.sub.Scalar", "aten.mul.Scalar", "aten.div.Scalar"})
ELEMENTWISE = UNARY | BINARY | TERNARY | CHOICE


def check(graph: Graph, level: str) -> Graph:
    """The graph; Bug where a node breaks a promise of the level, as `kiln.ops.levels` states them."""
    graph.check()
    if level == "prims":
        for node in graph.nodes:
            reason = broken(node) if node.op is not CONSTANT else ""
            if reason:
                raise Bug(f"{node.name} = {node.op} {reason}, which level prims does not allow")
    return graph


def broken(node: Node) -> str:
    """The promise about elementwise primitives that a node breaks, in words; empty if it keeps all."""
    name = name_of(node.op)
    if name not in ELEMENTWISE:
        return ""
    if str(node.op) in SUPERSEDED:
        return "is a superseded form"
    operands: tuple[Any, ...] = node.args[1:] if name == "where" else node.args[: 3 if name in TERNARY else 2]
    dtypes = {a.spec.dtype for a in operands if isinstance(a, Node) and isinstance(a.spec, TensorSpec)}
    if len(dtypes) > 1:
        return f"mixes {' and '.join(sorted(map(str, dtypes)))}"
    if node.kwargs.get("alpha", 1) != 1:
        return "has an alpha"
    if name in BINARY and dtypes & FLOATS and any(type(a) in (int, bool) for a in operands):
        return "has an integer beside floating numbers"
    return ""
