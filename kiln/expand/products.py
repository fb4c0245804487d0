"""Large products of f32 on the CPU by oneDNN, which multiplies faster than the library behind `mm`.

Its call is that of a linear layer; weights are read as they lie, and brought into its order in each call.
Where the rows lie the other way round, as for the gradients of weights, it would need a copy of them: those
are eager's.
"""

from __future__ import annotations

import torch

from kiln.base.graph import Graph, Node, TensorSpec, substituted
from kiln.expand.onednn import NONE, available
from kiln.ops.table import aten

#: Multiplications from which a product gains, and bytes of a weight up to which a copy of it is made.
LEAST, LARGEST = 1 << 26, 1 << 24
#: Where the operands stand among the arguments.
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}


def by_onednn(graph: Graph) -> Graph:
    """The graph of primitives, changed in place: large products are linear layers of oneDNN's."""
    large = {node for node in graph.nodes if node.op in PRODUCTS and fits(node)}
    if not large or not available():
        return graph

    def made(op: object, args: tuple[object, ...], spec: TensorSpec, like: Node) -> Node:
        node = graph.call(op, args, spec=spec, like=like)
        graph.nodes.pop()  # it stands where the product did
        return node

    def instead(node: Node) -> tuple[list[Node], Node] | None:
        if node not in large:
            return None
        first = PRODUCTS[node.op]
        bias = node.args[0] if first else None
        rows, columns = node.args[first : first + 2]
        spec: TensorSpec = columns.spec
        turned = TensorSpec(spec.shape[::-1], spec.stride[::-1], spec.dtype, spec.device)
        weight = made(aten.permute.default, (columns, [1, 0]), turned, node)
        args = (rows, weight, bias, *NONE.arguments())
        layer = made(torch.ops.mkldnn._linear_pointwise.default, args, node.spec, node)
        return [weight, layer], layer

    return substituted(graph, instead)


def fits(node: Node) -> bool:
    """Whether a product is large, and of matrices that lie right, with a bias for all rows if with any."""
    first = PRODUCTS[node.op]
    if node.kwargs or len(node.args) != first + 2:
        return False
    a, b = (operand.spec for operand in node.args[first:])
    specs = (a, b, node.spec)
    if any(spec.dtype is not torch.float32 or spec.device.type != "cpu" for spec in specs):
        return False
    if not all(type(n) is int for spec in specs for n in (*spec.shape, *spec.stride)):
        return False
    (rows, summed), columns = a.shape, b.shape[1]
    if rows * summed * columns < LEAST or summed * columns * 4 > LARGEST:
        return False
    if first:
        bias = node.args[0].spec
        if bias.shape != (columns,) or bias.stride != (1,) or bias.dtype is not torch.float32:
            return False
    return is_dense(node.spec) and is_dense(a) and (is_dense(b) or is_dense(b, turned=True))


def is_dense(spec: TensorSpec, turned: bool = False) -> bool:
    """Whether a matrix lies row by row without gaps, or column by column."""
    rows, columns = spec.shape
    return spec.stride == ((1, rows) if turned else (columns, 1))
