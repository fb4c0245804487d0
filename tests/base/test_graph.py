"""Graphs: what is read of a node is what it holds now."""

from __future__ import annotations

import torch

from kiln.base.graph import Graph, argument, substituted

aten = torch.ops.aten


def clamped() -> Graph:
    """clamp(x, relu(low)), which reads its bound by place."""
    graph = Graph()
    x, low = graph.input("x", None), graph.input("low", None)
    bound = graph.call(aten.relu.default, (low,))
    graph.outputs = (graph.call(aten.clamp.Tensor, (x, bound)),)
    return graph


def test_an_argument_is_read_anew_after_a_replacement() -> None:
    graph = clamped()
    clamp, low = graph.nodes[-1], graph.inputs[1]
    assert argument(clamp, 1, "min").op is aten.relu.default
    substituted(graph, lambda node: ([], low) if node.op is aten.relu.default else None)
    assert argument(clamp, 1, "min") is low and argument(clamp, 2, "max") is None


def test_what_nobody_needs_goes_where_something_is_replaced_alone() -> None:
    graph = clamped()
    low = graph.inputs[1]
    unread = graph.call(aten.relu.default, (graph.call(aten.neg.default, (low,)),))
    nodes = list(graph.nodes)
    assert substituted(graph, lambda node: None) is graph and graph.nodes == nodes
    (clamp,) = graph.outputs
    substituted(graph, lambda node: ([], low) if node is clamp.args[1] else None)
    assert graph.nodes == [clamp, *unread.inputs(), unread] and clamp.args[1] is low
