"""Pools: largest values of windows over channels-last images, without the places that only gradients need."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kiln.base.graph import Graph, Node, TensorSpec
from kiln.expand.relayout import Maker, Relayout
from kiln.ops.layout import is_channels_last, is_contiguous
from kiln.ops.table import aten

#: Elements of a window up to which each result reads them all.
WINDOW = 25


def pools(graph: Graph, outputs: set[Node]) -> Iterator[tuple[Node, Node]]:
    """The poolings of a graph whose places nobody reads, each with the node of its values."""
    users = graph.users()
    for node in graph.nodes:
        if node.op is aten.max_pool2d_with_indices.default and node not in outputs:
            read = users[node]
            if len(read) == 1 and read[0].op is operator.getitem and read[0].args[1] == 0:
                yield node, read[0]


def pooling(node: Node, item: Node) -> Maker:
    """Makes the values of a pooling: in loops where its input lies channels-last, else by eager's kernel."""

    def make(new: Relayout) -> Node:
        x = new.values[node.args[0]]
        spec: TensorSpec = x.spec
        window = settings(node.args)
        fits = all(type(n) is int for n in spec.shape) and math.prod(window[0]) <= WINDOW
        last = is_channels_last(spec.shape, spec.stride) and not is_contiguous(spec.shape, spec.stride)
        if not fits or not last or spec.dtype is not torch.float32:
            new.values[node] = new.follow(node)
            made: Node = new.follow(item)
            return made
        new.recording.where = node.where
        with new.recording:
            out = largest(new.fake(x), item.spec.shape[2:], *window)
        return new.recording.node(out)

    return make


def settings(args: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Kernel, stride, padding and dilation of a pooling, two numbers each."""
    _, kernel, stride, padding, dilation, _ = (*args, *(None, [], 0, 1, False)[len(args) - 1 :])
    both = []
    for value in (kernel, stride or kernel, padding, dilation):
        given = [value] if isinstance(value, int) else list(value)
        both.append((given[0], given[-1]))
    return tuple(both)


def largest(
    x: torch.Tensor,
    out: Sequence[int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> torch.Tensor:
    """The largest elements of windows; those in the padding do not count."""
    reach = [(out[d] - 1) * stride[d] + dilation[d] * (kernel[d] - 1) + 1 for d in range(2)]
    after = [max(reach[d] - x.shape[d + 2] - padding[d], 0) for d in range(2)]
    border = [padding[1], after[1], padding[0], after[0]]
    if any(border):
        x = aten.constant_pad_nd.default(x, border, -math.inf)
    found: torch.Tensor | None = None
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            part = x
            for d, start in enumerate((i * dilation[0], j * dilation[1])):
                end = start + (out[d] - 1) * stride[d] + 1
                part = aten.slice.Tensor(part, d + 2, start, end, stride[d])
            found = part if found is None else aten.maximum.default(found, part)
    assert found is not None
    return found
