"""Products of half types on a GPU whose rows do not start at multiples of 16 bytes, over padded operands.

The matrix units read 16 bytes at once; the kernels for rows that start elsewhere are several times slower. So
operands get columns or rows of zeros up to the next multiple, and what reads the result reads a part of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kiln.base.graph import Graph, Node, TensorSpec
from kiln.expand.products import PRODUCTS
from kiln.expand.relayout import Relayout
from kiln.ops.levels import name_of
from kiln.ops.table import aten

STEP = 8  # elements of 16 bits in 16 bytes
DEVICES = frozenset({"cuda"})
#: Multiplications below which copies cost more than they gain.
LEAST = 1 << 30


def padded(graph: Graph) -> Graph:
    """The graph with products over operands whose rows are aligned."""
    known: dict[Any, Node] = {}
    made = {
        node: partial(product, node, dims, known)
        for node in graph.nodes
        if node.op in PRODUCTS and (dims := uneven(node))
    }
    return Relayout(graph, made, ()).run() if made else graph


def uneven(node: Node) -> frozenset[str]:
    """The extents of a product to be padded: rows and columns of the result, and what is summed over."""
    first = PRODUCTS[node.op]
    a, b = (operand.spec for operand in node.args[first : first + 2])
    specs = (a, b, node.spec)
    if any(spec.dtype.itemsize != 2 or spec.device.type not in DEVICES for spec in specs):
        return frozenset()
    if not all(type(n) is int for spec in specs for n in (*spec.shape, *spec.stride)):
        return frozenset()
    (rows, summed), columns = a.shape, b.shape[1]
    if rows * summed * columns < LEAST or min(rows, summed, columns) < STEP:
        return frozenset()
    if first and (node.args[0].spec.shape != (columns,) or node.args[0].spec.dtype != node.spec.dtype):
        return frozenset()
    found = set[str]()
    for spec, names in ((a, "rk"), (b, "kc")):
        if spec.stride[1] == 1 and spec.stride[0] % STEP:
            found.add(names[1])
        elif spec.stride[0] == 1 and spec.stride[1] != 1 and spec.stride[1] % STEP:
            found.add(names[0])
    if columns % STEP:
        found.add("c")
    extents = {"r": rows, "k": summed, "c": columns}
    return frozenset(name for name in found if extents[name] % STEP)


def product(node: Node, dims: frozenset[str], known: dict[Any, Node], walk: Relayout) -> Node:
    """The product over padded operands, and the part of it that was asked for."""
    first = PRODUCTS[node.op]
    operands = [walk.restored(walk.values[read], read.spec) for read in node.args[: first + 2]]
    names = [*["c"] * first, "rk", "kc"]
    given = [widened(walk, one, name, dims, known) for one, name in zip(operands, names, strict=True)]
    with walk.recording:
        out = node.op(*[walk.fake(one) for one in given], *node.args[first + 2 :], **node.kwargs)
        for dim, name in enumerate("rc"):
            if name in dims:
                out = aten.slice.Tensor(out, dim, 0, node.spec.shape[dim])
    return walk.recording.node(out)


def widened(walk: Relayout, node: Node, names: str, dims: frozenset[str], known: dict[Any, Node]) -> Node:
    """An operand with zeros after the extents of these names that are in `dims`."""
    more = [-n % STEP if name in dims else 0 for n, name in zip(node.spec.shape, names, strict=True)]
    if not any(more):
        return node
    spec: TensorSpec = node.spec
    turned = len(more) == 2 and spec.stride[0] == 1 and spec.stride[1] != 1
    # What lies the other way round is padded as it lies; another product may read it so.
    shown = turned and name_of(node.op) in ("permute", "t", "transpose")
    source = node.args[0] if shown else node
    pads = more if turned else more[::-1]
    key = (source, turned and not shown, tuple(pads))
    if key not in known:
        with walk.recording:
            x = walk.fake(source)
            x = aten.permute.default(x, [1, 0]) if turned and not shown else x
            x = aten.constant_pad_nd.default(x, [part for n in pads for part in (0, n)])
            known[key] = walk.recording.node(x)
    if not turned:
        return known[key]
    with walk.recording:
        return walk.recording.node(aten.permute.default(walk.fake(known[key]), [1, 0]))
