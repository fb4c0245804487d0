"""Packed: convolutions and products with held weights as calls that take them packed, with epilogues."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod
from operator import getitem
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.graph import Graph, Node, TensorSpec, nodes_in
from kiln.expand.chains import Chain, Matcher
from kiln.expand.convolved import PACKS as LOOPED
from kiln.expand.convolved import (
    is_of_channels,
    is_product,
    of_channels,
    of_one_place,
    product,
    row,
    wide_vectors,
    windows_of,
)
from kiln.expand.onednn import NONE, PACKS, Window, available, convolution, linear
from kiln.expand.pools import pooling, pools
from kiln.expand.relayout import Maker, Relayout
from kiln.ops.layout import channels_last, contiguous, suggests_channels_last
from kiln.ops.table import aten

#: Rows from which on a packed weight pays; a single row is bound by reading the weight, packed or not.
ROWS = 2
#: Elements of a weight from which on: the packed call takes up to 30 µs to set up, a plain product 4.
WEIGHT = 1 << 17
#: Elements of a weight from which on windows over rows are copied.
LONG = 1 << 19


def packed(graph: Graph, known: Collection[Node]) -> Graph:
    """The graph with its layers of held weights as packed calls; `known` values are always the same."""
    anchors = [(node, form) for node in graph.nodes if (form := ANCHORS.get(node.op)) is not None]
    anchors = [(node, form) for node, form in anchors if form.fits(node, known)] if available() else []
    if not anchors:
        return graph
    outputs = set(nodes_in(graph.outputs))
    users = graph.users()
    matcher = Matcher(users, outputs, known, set())
    made: dict[Node, Maker] = {}
    covered: set[Node] = set()
    for node, item in pools(graph, users, outputs):
        made[item] = pooling(node, item)
        covered.add(node)
    for node, form in anchors:
        chain = matcher.chain(node, form.in_loops(node))
        made[chain.last] = form.maker(chain)
        covered |= chain.covered
    return Relayout(graph, made, covered).run()


def normalised(
    weight: torch.Tensor, bias: torch.Tensor | None, norm: list[torch.Tensor | None], eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and bias of a layer whose result is then normalised by held statistics."""
    scale, shift, mean, var = [None if part is None else part.double() for part in norm]
    assert mean is not None and var is not None
    factor = (var + eps).rsqrt()
    if scale is not None:
        factor = factor * scale
    start = -mean if bias is None else bias.double() - mean
    moved = start * factor if shift is None else start * factor + shift
    # In single precision, as a normalisation computes: a double copy of all weights takes long.
    kind = torch.promote_types(weight.dtype, torch.float32)
    spread = factor.to(kind).reshape(-1, *[1] * (weight.dim() - 1))
    return (weight * spread).to(weight.dtype), moved.to(weight.dtype)


#: Functions of ours that only compute: values of them are known where their arguments are.
PURE = PACKS | LOOPED | {normalised}


class Convolution:
    """Convolutions over rows, images and volumes: channels-last from one to the next."""

    @staticmethod
    def fits(node: Node, known: Collection[Node]) -> bool:
        x, weight, bias, *how, transposed, more, groups = node.args
        if weight not in known or x in known or bias is not None and bias not in known:
            return False
        spec: TensorSpec = x.spec
        numbers = (*spec.shape, *weight.spec.shape, *[n for part in (*how, more) for n in part])
        if not 3 <= len(spec.shape) <= 5 or not all(type(n) is int for n in numbers):
            return False
        if not is_plain(x, weight, bias) or transposed and groups != 1:
            return False
        shape = with_rows(spec.shape)
        return suggests_channels_last(shape, channels_last(shape))

    @staticmethod
    def window(node: Node) -> Window:
        rank = len(node.spec.shape) - 2
        *steps, transposed, more, groups = node.args[3:]
        stride, padding, dilation, beyond = (
            (*[one] * (rank == 1), *(n * rank if len(n) == 1 else n))
            for n, one in zip((*steps, more), (1, 0, 1, 0), strict=True)
        )
        return Window(padding, stride, dilation, groups, beyond if transposed else None)

    @staticmethod
    def in_loops(node: Node) -> bool:
        """Whether loops do a convolution."""
        window = Convolution.window(node)
        if window.more is not None or len(node.spec.shape) != 4:
            return False
        return wide_vectors() and (is_product(node, window) or is_of_channels(node, window))

    @staticmethod
    def maker(chain: Chain) -> Maker:
        x, weight, bias = chain.anchor.args[:3]
        window = Convolution.window(chain.anchor)

        def make(new: Relayout) -> Node:
            filters = new.value(weight)
            if window.more is not None:
                filters = turned(new, filters, [1, 0, *range(2, len(weight.spec.shape))], chain.anchor)
            w, b = with_norm(new, chain, filters, new.value(bias))
            if chain.loops and is_product(chain.anchor, window):
                return product(new, chain, new.values[x], w, b, window)
            source, w = beside(new, chain, new.values[x]), raised(new, w, chain.anchor)
            if chain.loops:
                return of_channels(new, chain, source, w, b, window)
            other = None if chain.other is None else beside(new, chain, new.values[chain.other])
            rows = of_one_place(w, window) or is_long(chain.anchor)
            if rows and (other is None or chain.epilogue == NONE):
                made = at_each_place(new, chain, source, w, b, window, other)
            else:
                made = convolution(new.graph, chain.last, source, w, b, window, chain.epilogue, other)
            if made.spec.shape == chain.last.spec.shape:
                return made
            spec = without_rows(made.spec)
            return new.graph.call(aten.squeeze.dim, (made, 2), spec=spec, like=chain.last)

        return make


def with_rows(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """The size of rows as that of images one high; of others the same."""
    return shape if len(shape) > 3 else (*shape[:2], 1, *shape[2:])


def without_rows(spec: TensorSpec) -> TensorSpec:
    """The type of images one high as that of rows."""
    shape, stride = ((*part[:2], *part[3:]) for part in (spec.shape, spec.stride))
    return replace(spec, shape=shape, stride=stride)


def raised(new: Relayout, node: Node, like: Node) -> Node:
    """Rows as images one high; others as they are."""
    if len(node.spec.shape) > 3:
        return node
    count, channels, step = node.spec.stride
    stride = (count, channels, step * node.spec.shape[2], step)
    spec = replace(node.spec, shape=with_rows(node.spec.shape), stride=stride)
    return new.graph.call(aten.unsqueeze.default, (node, 2), spec=spec, like=like)


def beside(new: Relayout, chain: Chain, node: Node) -> Node:
    """A value with its channels side by side, rows as images."""
    spec = node.spec
    wanted = channels_last(with_rows(spec.shape))
    kept = wanted if len(spec.shape) > 3 else (*wanted[:2], *wanted[3:])
    return raised(new, new.with_strides(node, kept), chain.anchor)


def turned(new: Relayout, node: Node, order: list[int], like: Node) -> Node:
    """A view with its dimensions in another order."""
    shape, stride = (tuple([part[d] for d in order]) for part in (node.spec.shape, node.spec.stride))
    there = replace(node.spec, shape=shape, stride=stride)
    return new.graph.call(aten.permute.default, (node, order), spec=there, like=like)


def is_long(node: Node) -> bool:
    """Whether a convolution over rows has a weight so large that a product over copied windows is faster."""
    weight, transposed, groups = node.args[1], node.args[6], node.args[8]
    plain = not transposed and groups == 1 and len(weight.spec.shape) == 3
    return plain and prod(weight.spec.shape) >= LONG


def at_each_place(
    new: Relayout, chain: Chain, x: Node, weight: Node, bias: Node | None, window: Window, other: Node | None
) -> Node:
    """A convolution as a linear layer over what each place sees; of one place it takes less to set up."""
    rank = len(x.spec.shape)
    last = [0, *range(2, rank), 1]
    if of_one_place(weight, window):
        rows = turned(new, x, last, chain.last)
    else:
        with new.recording:
            seen = windows_of(new.fake(x), window, weight.spec.shape[2:]).permute(0, 1, 2, 4, 5, 3)
            copied = aten.clone.default(seen, memory_format=torch.contiguous_format)  # windows overlap
            rows = new.recording.node(copied.view(*seen.shape[:3], -1))
        weight = turned(new, weight, last, chain.last)
    added = None if other is None else turned(new, other, last, chain.last)
    made = linear(new.graph, chain.last, rows, weight, bias, chain.epilogue, added)
    return turned(new, made, [0, rank - 1, *range(1, rank - 1)], chain.last)


@dataclass(frozen=True, slots=True)
class Product:
    """Products of rows with a matrix, or with a bias added; `first` is the place of the rows."""

    first: int

    def in_loops(self, node: Node) -> bool:
        """Whether loops do a product: of one row, which is bound by reading the weight as it lies."""
        x, weight = node.args[self.first :][:2]
        return bool(x.spec.shape[0] == 1 and weight.spec.stride[0] == 1)

    def fits(self, node: Node, known: Collection[Node]) -> bool:
        bias = node.args[0] if self.first else None
        x, weight = node.args[self.first :][:2]
        if node.kwargs or weight not in known or x in known or bias is not None and bias not in known:
            return False
        if not is_plain(x, weight, bias) or bias is not None and bias.spec.shape != weight.spec.shape[1:]:
            return False
        rows, width = x.spec.shape
        if type(width) is not int or 0 in x.spec.shape or x.spec.stride != (width, 1):
            return False
        if prod(weight.spec.shape) < WEIGHT:
            return False
        return bool(getattr(rows, "hint", rows) >= ROWS) or self.in_loops(node)

    def maker(self, chain: Chain) -> Maker:
        bias = chain.anchor.args[0] if self.first else None
        x, weight = chain.anchor.args[self.first :][:2]

        def make(new: Relayout) -> Node:
            value, matrix = new.values[x], new.values[weight]
            source = new.with_strides(value, (value.spec.shape[1], 1))
            if matrix.op is aten.t.default:
                outputs_first = matrix.args[0]
            else:
                spec = matrix.spec
                turned = TensorSpec(spec.shape[::-1], spec.stride[::-1], spec.dtype, spec.device, spec.offset)
                outputs_first = new.graph.call(aten.t.default, (matrix,), spec=turned, like=chain.anchor)
            w, b = with_norm(new, chain, outputs_first, new.value(bias))
            if chain.loops:
                return row(new, chain, source, w, b)
            made = linear(new.graph, chain.last, source, w, b, chain.epilogue)
            if not chain.views:
                return made
            shape, stride = chain.last.spec.shape, chain.last.spec.stride
            spec = TensorSpec(shape, stride, made.spec.dtype, made.spec.device)
            return new.graph.call(aten.view.default, (made, list(shape)), spec=spec, like=chain.last)

        return make


def is_plain(*nodes: Node | None) -> bool:
    """Whether all are float32 on the CPU, which is what was measured."""
    return all(n is None or n.spec.dtype is torch.float32 and n.spec.device.type == "cpu" for n in nodes)


def with_norm(new: Relayout, chain: Chain, weight: Node, bias: Node | None) -> tuple[Node, Node | None]:
    """The weight and bias of a chain, its normalisation in them."""
    if chain.norm is None:
        return weight, bias
    parts = [new.value(part) for part in chain.norm.args[1:5]]
    shape = weight.spec.shape
    specs = [TensorSpec(n, contiguous(n), weight.spec.dtype, weight.spec.device) for n in (shape, shape[:1])]
    args: tuple[Any, ...] = (weight, bias, parts, chain.norm.args[7])
    whole = new.graph.call(normalised, args, spec=tuple(specs), like=chain.norm)
    made = [new.graph.call(getitem, (whole, i), spec=spec, like=chain.norm) for i, spec in enumerate(specs)]
    return made[0], made[1]


#: What a chain starts with, by op.
ANCHORS: dict[Any, Any] = {
    aten.convolution.default: Convolution(),
    aten.addmm.default: Product(1),
    aten.mm.default: Product(0),
}
