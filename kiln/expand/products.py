"""Products on the CPU: large ones of f32 by oneDNN, and sums of others as they are multiplied.

OneDNN multiplies faster than the library behind `mm`. Its call is that of a linear layer; weights are read as
they lie, and brought into its order in each call: in small parts if they lie as those of layers do, as a
whole otherwise, which pays where the library has slow code for the processor. Where the rows lie the other
way round, as for the gradients of weights, it would need a copy of them: those are eager's. Where `mm` itself
is called in oneDNN (`kiln/_products.c`), layers with a bias alone are its layers. The gradients of a weight
that is used again and again are added to what there is, so that they are not all in memory until the last is
made.
"""

from __future__ import annotations

import torch

from kiln.base.graph import Graph, Made, Node, TensorSpec, nodes_in, substituted
from kiln.base.processor import is_multiplied_narrowly, maker
from kiln.expand.onednn import NONE, available
from kiln.ops.levels import name_of
from kiln.ops.table import aten

#: Multiplications from which a product gains, also where the library multiplies half of the vectors; bytes
#: of a weight up to which a copy of it may be made.
LEAST, LEAST_NARROWLY, LARGEST = 1 << 26, 1 << 22, 1 << 24
#: The maker of the processors that the library behind `mm` is written for.
MKL = "GenuineIntel"
#: Where the operands stand among the arguments.
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}


def by_onednn(graph: Graph, biased: bool = False) -> Graph:
    """The graph of primitives, changed in place: large products are layers of oneDNN's, or those `biased`."""
    sought = {aten.addmm.default} if biased else PRODUCTS
    large = {node for node in graph.nodes if node.op in sought and fits(node)}
    if not large or not available():
        return graph

    def instead(node: Node) -> tuple[list[Node], Node] | None:
        if node not in large:
            return None
        first = PRODUCTS[node.op]
        bias = node.args[0] if first else None
        rows, columns = node.args[first : first + 2]
        spec: TensorSpec = columns.spec
        turned = TensorSpec(spec.shape[::-1], spec.stride[::-1], spec.dtype, spec.device)
        made = Made(graph, node)
        weight = made.call(aten.permute.default, turned, columns, [1, 0])
        args = (rows, weight, bias, *NONE.arguments())
        layer = made.call(torch.ops.mkldnn._linear_pointwise.default, node.spec, *args)
        return made.nodes, layer

    return substituted(graph, instead)


def summed_up(graph: Graph) -> Graph:
    """The graph of primitives, changed in place: a product is added to a sum of products by its own call."""
    places = {node: i for i, node in enumerate(graph.nodes) if node.op is aten.mm.default}
    if len(places) < 2:
        return graph
    users, shown = graph.users(), set(nodes_in(graph.outputs))
    later: dict[Node, Node] = {}  # for a sum, the product that is made last
    given: dict[Node, Node] = {}  # for such a product, what it is added to
    for node in graph.nodes:
        if name_of(node.op) != "add" or node.kwargs or len(node.args) != 2 or not is_summed(node):
            continue
        if len({*node.args} & places.keys() - shown) == 2 and all(users[arg] == [node] for arg in node.args):
            before, last = sorted(node.args, key=places.__getitem__)
            if last.op is aten.mm.default and last not in given:
                later[node], given[last], places[node] = last, before, places[last]

    def instead(node: Node) -> tuple[list[Node], Node] | None:
        if node in later:
            return [], sums[later[node]]
        if node not in given:
            return None
        before = given[node]
        made = node.over((sums[later[before]] if before in later else before, *node.args), {})
        made.op = aten.addmm.default
        sums[node] = made
        return [made], made

    sums: dict[Node, Node] = {}
    return substituted(graph, instead) if later else graph


def is_summed(node: Node) -> bool:
    """Whether a sum is of two equal matrices on the CPU that are added without rounding in between."""
    specs = [arg.spec if type(arg) is Node else None for arg in node.args]
    plain = isinstance(node.spec, TensorSpec) and node.spec.dtype in (torch.float32, torch.float64)
    return plain and node.spec.device.type == "cpu" and specs == [node.spec, node.spec]


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
    as_layer, least = is_dense(b, turned=True), LEAST_NARROWLY if is_multiplied_narrowly() else LEAST
    if rows * summed * columns < least or not as_layer and (maker() == MKL or summed * columns * 4 > LARGEST):
        return False
    if first:
        bias = node.args[0].spec
        if bias.shape != (columns,) or bias.stride != (1,) or bias.dtype is not torch.float32:
            return False
    return is_dense(node.spec) and is_dense(a) and (as_layer or is_dense(b))


def is_dense(spec: TensorSpec, turned: bool = False) -> bool:
    """Whether a matrix lies row by row without gaps, or column by column."""
    rows, columns = spec.shape
    return spec.stride == ((1, rows) if turned else (columns, 1))
