"""Sizes: those that have become known are numbers everywhere in a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kiln.base.expressions import Expr, Symbol
from kiln.base.graph import CONSTANT, Graph, Node, TensorSpec, mapped


def determined(graph: Graph) -> Graph:
    """The graph with a number for each size that is known by now, one symbol for those known to be equal."""
    specs = [node.spec for node in graph.inputs if isinstance(node.spec, TensorSpec)]
    sizes = [n for spec in specs for n in (*spec.shape, *spec.stride)]
    sizes += [node.spec for node in graph.inputs]
    scope = next((n.scope for n in sizes if isinstance(n, Expr)), None)
    if scope is None or not scope.settles:
        return graph
    made, known = Graph(), dict[Node, Node]()

    def leaf(value: Any) -> Any:
        if type(value) is Node:
            return known[value]
        return value.scope.determined(value) if isinstance(value, Expr) else value

    def typed(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            shape, stride = (tuple([leaf(n) for n in numbers]) for numbers in (value.shape, value.stride))
            return replace(value, shape=shape, stride=stride, offset=leaf(value.offset))
        if isinstance(value, Symbol):
            known = leaf(value)
            return known if isinstance(known, Symbol) else value
        return type(value)([typed(v) for v in value]) if isinstance(value, (tuple, list)) else value

    for node in graph.inputs:
        known[node] = made.input(node.name, typed(node.spec), node.backward)
    for node in graph.nodes:
        args = node.args if node.op is CONSTANT else mapped(node.args, leaf)
        kwargs, name = mapped(node.kwargs, leaf), made.name(node.name)
        known[node] = made.add(replace(node, args=args, kwargs=kwargs, spec=typed(node.spec), name=name))
    made.outputs, made.overwrites = mapped(graph.outputs, leaf), graph.overwrites
    return made.check()
