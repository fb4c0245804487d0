"""Convolutions of half types on a GPU with the channels of a place side by side, as matrix units take them.

Images and filters are turned once, and what lies between convolutions stays so: elementwise ops, norms and
pooling follow.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from operator import getitem
from typing import Any

from kiln.base.graph import Graph, Node, TensorSpec, nodes_in
from kiln.expand import activated, depth, stems
from kiln.expand.pools import WINDOW, Window
from kiln.expand.relayout import Relayout
from kiln.ops.table import aten

DEVICES = frozenset({"cuda"})
POOL, POOL_GRADIENT = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default
ASKED = 4  # windows around a place that its gradient is gathered from
#: Convolutions of a graph from which on the copies of its inputs and outputs are worth it.
FEWEST = 3


def side_by_side(graph: Graph, records: bool = False) -> Graph:
    """The graph with its convolutions, and their gradients, over channels that lie side by side.

    `records`: calls are recorded, so that it does not matter that those which do more take the host longer.
    """
    found = [node for node in graph.nodes if node.op in MAKERS]
    made: dict[Node, Any] = {node: partial(PATCHES[node.op], node) for node in found if takes_patches(node)}
    rest, covered = [node for node in found if node not in made], set[Node]()
    if len(rest) >= FEWEST and all(map(fits, rest)):
        gaining = [node for node in rest if gains(node)]
        made |= {node: lambda walk, node=node: walk.as_before(node) for node in rest}
        made |= {node: partial(MAKERS[node.op], node) for node in gaining}
        chains = activated.chains(graph, gaining)
        if chains and (records or activated.are_large(chains)) and activated.can_fuse(rest[0].spec.device):
            for end, chain in chains.items():
                made[end] = partial(fused, end, chain)
                covered |= {*chain.between}
        users, outputs = graph.users(), set(nodes_in(graph.outputs))
        for node in graph.nodes:
            if node.op is POOL and pools_in_loops(node, users, outputs):
                made[node] = partial(pool, node)
                made.update((user, partial(pool_gradient, user)) for user in gradients_of(node, users))
    made = {node: maker for node, maker in made.items() if node not in covered}
    return Relayout(graph, made, covered).run() if made else graph


def takes_patches(node: Node) -> bool:
    """Whether a convolution is a product over the patches of an image of few channels."""
    on_device = node.args[0].spec.device.type in DEVICES
    return on_device and stems.takes_patches(node, OPERANDS[node.op] - 2)


# Pooling


def gradients_of(node: Node, users: dict[Node, list[Node]]) -> list[Node]:
    """What reads the places that a pooling gives."""
    return [user for item in users[node] if item.args[1] == 1 for user in users[item]]


def pools_in_loops(node: Node, users: dict[Node, list[Node]], outputs: set[Node]) -> bool:
    """Whether loops do a pooling: of a half type, few windows around a place, places that none else sees."""
    spec, window = node.args[0].spec, Window.of(node.args)
    plain = all(n == 1 for n in window.dilation) and math.prod(window.kernel) <= WINDOW
    known = len(spec.shape) == 4 and all(type(n) is int and n > 0 for n in spec.shape)
    if not plain or not known or spec.dtype.itemsize != 2 or spec.device.type not in DEVICES:
        return False
    if len(window.around(0)) * len(window.around(1)) > ASKED:
        return False
    shown = any(item in outputs for item in users[node] if item.args[1] == 1)
    return not shown and all(user.op is POOL_GRADIENT for user in gradients_of(node, users))


def pool(node: Node, walk: Relayout) -> tuple[Node, Node]:
    """The largest of windows, and where in them they are."""
    x = walk.values[node.args[0]]
    with walk.recording:
        found, place = Window.of(node.args).largest_at(walk.fake(x), node.spec[0].shape[2:])
        rows = walk.recording.node(place.unsqueeze(-1))
    spec = turned(walk.recording.node(place).spec)
    # No elementwise op: it is kept for the gradient, which takes less than the image that it follows from.
    kept = walk.graph.call(aten.amax.default, (rows, [-1]), spec=spec, like=rows)
    return walk.with_strides(walk.recording.node(found), turned(node.spec[0]).stride), kept


def pool_gradient(node: Node, walk: Relayout) -> Node:
    grad, image, *_, places = node.args
    with walk.recording:
        given = walk.fake(walk.values[grad]), walk.fake(walk.values[places])
        out = Window.of(node.args[1:]).spread(*given, image.spec.shape[2:])
    return walk.with_strides(walk.recording.node(out), turned(node.spec).stride)


# Convolutions


def fits(node: Node) -> bool:
    """Whether a convolution takes images of a half type and known sizes."""
    specs = [operand.spec for operand in node.args[: OPERANDS[node.op]]]
    transposed = node.args[OPERANDS[node.op] + 4]
    return not transposed and all(
        spec.dtype.itemsize == 2 and spec.device.type in DEVICES and len(spec.shape) == 4
        and all(type(n) is int and n > 0 for n in spec.shape)
        for spec in specs
    )  # fmt: skip


def gains(node: Node) -> bool:
    """Whether a convolution is as fast over channels side by side.

    Of several groups the library takes those of one channel each, or of 4, 8, 16, … ; it goes through others
    one by one, up to twenty times slower than over images as eager has them.
    """
    filters, groups = node.args[OPERANDS[node.op] - 1].spec, node.args[OPERANDS[node.op] + 6]
    widths = {filters.shape[0] // groups, filters.shape[1]}
    return groups == 1 or widths == {1} or all(n >= 4 and n & n - 1 == 0 for n in widths)


def turned(spec: TensorSpec) -> TensorSpec:
    """The type of a tensor with its channels side by side; one of single places may lie in both ways."""
    _, channels, height, width = spec.shape
    if height == width == 1 and spec.stride[1] == 1:
        return spec
    row = channels * width
    return replace(spec, stride=(row * height, 1, row, channels), offset=0)


def beside(spec: TensorSpec) -> TensorSpec:
    """The type itself where its elements lie so already, as filters of one channel do; otherwise turned."""
    made = turned(spec)
    same = all(n == 1 or a == b for n, a, b in zip(spec.shape, spec.stride, made.stride, strict=True))
    return spec if same else made


def operands(node: Node, walk: Relayout, *instead: Any) -> list[Any]:
    """The arguments of a convolution, with its images and filters turned; filters and bias may be others."""
    many = OPERANDS[node.op]
    given = [walk.value(one) for one in node.args]
    given[1 : 1 + len(instead)] = instead
    if stems.takes_columns(node, many - 2):
        made = stems.unfolded(node, many - 2, given[many - 2 : many], walk)
        given[many - 2 : many], given[many + 1 : many + 3] = made[:2], made[2:]
    given[:many] = [walk.with_strides(one, beside(one.spec).stride) for one in given[:many]]
    return given


def convolution(node: Node, walk: Relayout) -> Node:
    given = operands(node, walk)
    if depth.takes(node, 0):
        return depth.convolution(node, walk, given, turned(node.spec))
    return walk.graph.call(node.op, tuple(given), dict(node.kwargs), spec=turned(node.spec), like=node)


def fused(end: Node, chain: activated.Chain, walk: Relayout) -> Node:
    """A convolution with what follows it, up to a relu."""
    image, filters, bias, *how = operands(chain.convolution, walk, *activated.folded(chain, walk))
    step, around, apart, _, _, groups = how
    spec, more = turned(end.spec), []
    if chain.added is not None:
        more = [walk.with_strides(walk.values[chain.added], spec.stride), 1.0]
    op = activated.ADD_RELU if more else activated.RELU
    given = image, filters, *more, bias, step, around, apart, groups
    return walk.graph.call(op, given, {}, spec=spec, like=end)


def gradients(node: Node, walk: Relayout) -> tuple[Node | None, ...]:
    """The gradients of an image and of filters, turned, and of what was added."""
    image, filters, added = node.spec
    given, columns = operands(node, walk), stems.takes_columns(node, 1)
    of_filters = given[2].spec if columns and filters is not None else filters
    specs = [image and turned(image), of_filters and beside(of_filters), added]
    own: list[Node | None] = [None] * 3
    if depth.takes(node, 1):
        own = depth.gradients(node, walk, given, turned(node.args[1].spec))
        specs = [spec if one is None else None for spec, one in zip(specs, own, strict=True)]
        given[-1] = [spec is not None for spec in specs]
    made = own
    if any(spec is not None for spec in specs):
        whole = walk.graph.call(node.op, tuple(given), dict(node.kwargs), spec=tuple(specs), like=node)
        made = [one if spec is None else result(walk, whole, i, spec)
                for i, (spec, one) in enumerate(zip(specs, own, strict=True))]  # fmt: skip
    if columns and made[1] is not None:
        made[1] = stems.folded(made[1], filters, walk)
    return tuple(made)


def result(walk: Relayout, whole: Node, place: int, spec: TensorSpec) -> Node:
    """One of several results; the kernel's strides for extents of 1 are any, so a view gives those traced."""
    found = walk.graph.call(getitem, (whole, place), spec=spec, like=whole)
    if 1 not in spec.shape:
        return found
    return walk.graph.call(aten.view.default, (found, list(spec.shape)), spec=spec, like=whole)


#: How many images and filters the ops take first, and what makes them anew.
OPERANDS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
MAKERS: dict[Any, Any] = {
    aten.convolution.default: convolution, aten.convolution_backward.default: gradients,
}  # fmt: skip
PATCHES = {aten.convolution.default: stems.product, aten.convolution_backward.default: stems.gradients}
