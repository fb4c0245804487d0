"""Convolutions of half types on a GPU with the channels of a place side by side, as matrix units take them.

Images and filters are turned once, and what lies between convolutions stays so: elementwise ops, norms and
pooling follow.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kiln.base.graph import Graph, Node, TensorSpec
from kiln.expand.relayout import Maker, Relayout
from kiln.ops.table import aten

DEVICES = frozenset({"cuda"})
#: Convolutions of a graph from which on the copies of its inputs and outputs are worth it.
FEWEST = 3


def side_by_side(graph: Graph) -> Graph:
    """The graph with its convolutions over channels that lie side by side."""
    layers = [node for node in graph.nodes if node.op is aten.convolution.default]
    if len(layers) < FEWEST or not all(map(fits, layers)):
        return graph
    made: dict[Node, Maker] = {node: partial(convolution, node) for node in layers}
    return Relayout(graph, made, ()).run()


def fits(node: Node) -> bool:
    """Whether a convolution is a plain one of two dimensions, of a half type and known sizes."""
    specs = [operand.spec for operand in node.args[:2]]
    transposed, groups = node.args[6], node.args[8]
    return not transposed and groups == 1 and all(
        spec.dtype.itemsize == 2 and spec.device.type in DEVICES and len(spec.shape) == 4
        and all(type(n) is int and n > 0 for n in spec.shape)
        for spec in specs
    )  # fmt: skip


def turned(spec: TensorSpec) -> TensorSpec:
    """The type of a tensor with its channels side by side."""
    _, channels, height, width = spec.shape
    row = channels * width
    return replace(spec, stride=(row * height, 1, row, channels), offset=0)


def operand(walk: Relayout, read: Node) -> Node:
    """An image or a filter, turned; a filter for single places lies in both ways at once."""
    node: Node = walk.values[read]
    single = node.spec.shape[2:] == (1, 1) and node.spec.stride[1] == 1
    return node if single else walk.with_strides(node, turned(node.spec).stride)


def convolution(node: Node, walk: Relayout) -> Node:
    image, filters, *rest = node.args
    given = (operand(walk, image), operand(walk, filters), *[walk.value(one) for one in rest])
    return walk.graph.call(node.op, given, dict(node.kwargs), spec=turned(node.spec), like=node)
