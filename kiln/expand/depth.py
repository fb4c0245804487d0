"""Convolutions of half types of one channel each, on a GPU, as loops, and their gradients.

Filters are laid out by their places, as loops read them (`kiln/fuse/filters.py`): a convolution of such ones,
and a transposed one, which is the gradient of the image, are sums of neighbours. The gradient of the filters
is a sum over images for each place; of more than nine places it stays the library's.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kiln.base.graph import Node, TensorSpec
from kiln.expand import stems
from kiln.expand.relayout import Relayout
from kiln.ops.table import aten

#: Places of a filter at most, those whose gradients loops sum up, and channels at once.
PLACES, SUMS, STEP = 49, range(6, 10), 2


def takes(node: Node, first: int) -> bool:
    """Whether loops do a convolution, whose image is this argument."""
    image, filters = (read.spec for read in node.args[first : first + 2])
    (_, *size), (steps, _, apart, _, _, groups) = filters.shape[1:], node.args[first + 3 : first + 9]
    alone = groups == image.shape[1] == filters.shape[0] and filters.shape[1] == 1 and groups % STEP == 0
    plain = all(n == 1 for n in apart) and 1 < math.prod(size) <= PLACES and len(set(steps)) == 1
    # Of an image that falls into classes modulo the stride, all are as large.
    even = all(n % steps[0] == 0 for n in image.shape[2:])
    return bool(alone and plain and steps[0] <= 2 and (even or not first))


def by_place(filters: Node, walk: Relayout) -> Node:
    """Filters that lie place by place, channels side by side."""

    def make() -> Node:
        with walk.recording:
            rows = aten.permute.default(walk.fake(filters), [2, 3, 1, 0])
            rows = aten.clone.default(rows, memory_format=torch.contiguous_format)
            return walk.recording.node(aten.permute.default(rows, [3, 2, 0, 1]))

    return walk.once(filters, "by place", make)


def convolution(node: Node, walk: Relayout, given: list[Any], spec: TensorSpec) -> Node:
    """A convolution of this type over images as they are given."""
    given[1] = by_place(given[1], walk)
    return walk.graph.call(node.op, tuple(given), dict(node.kwargs), spec=spec, like=node)


def gradients(node: Node, walk: Relayout, given: list[Any], turned: TensorSpec) -> list[Node | None]:
    """The gradients of an image, of this type, of filters, unless they have many places, and of a bias."""
    grad, image, filters, _, steps, around, apart, _, _, groups, _ = given
    steps, around = stems.pair(steps), stems.pair(around)
    made: list[Node | None] = [None] * 3
    if node.spec[0] is not None:
        size = filters.spec.shape[2:]
        more = [n - (m - 1) * step - k + 2 * zeros for n, m, k, step, zeros in zip(
            image.spec.shape[2:], grad.spec.shape[2:], size, steps, around, strict=True)]  # fmt: skip
        asked = grad, by_place(filters, walk), None, steps, around, apart, True
        op = aten.convolution.default
        made[0] = walk.graph.call(op, (*asked, more, groups), spec=turned, like=node)
    with walk.recording:
        if node.spec[1] is not None and math.prod(filters.spec.shape[2:]) in SUMS:
            sums = of_filters(walk.fake(grad), walk.fake(image), filters.spec.shape[2:], steps, around)
            half = aten._to_copy.default(sums, dtype=node.spec[1].dtype)
            made[1] = walk.recording.node(aten.view.default(half, list(node.spec[1].shape)))
        if node.spec[2] is not None:
            sums = aten.sum.dim_IntList(widened(walk.fake(grad)), [0, 2, 3])
            made[2] = walk.recording.node(aten._to_copy.default(sums, dtype=node.spec[2].dtype))
    return made


def of_filters(grad: Any, image: Any, size: Any, steps: Any, around: Any) -> Any:
    """For each channel and place of a filter the sum of what was seen there, times the gradient."""
    image = widened(image)
    if any(around):
        image = aten.constant_pad_nd.default(image, [n for n in reversed(around) for _ in range(2)], 0.0)
    for dim in range(2):
        image = aten.unfold.default(image, dim + 2, size[dim], steps[dim])
    grad = widened(aten.view.default(grad, [*grad.shape, 1, 1]))
    return aten.sum.dim_IntList(aten.mul.Tensor(image, grad), [0, 2, 3])


def widened(x: Any) -> Any:
    return aten._to_copy.default(x, dtype=torch.float32)
