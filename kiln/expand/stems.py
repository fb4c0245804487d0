"""Convolutions of half types on a GPU over few channels, those of an image: matrix units take eight at once.

Filters that lie side by side on the image (patches) are one product over copies of the patches. Of others
that take several columns at a step, the columns of a filter are taken for channels: filters of one column
remain, over an image as wide as the result, in which zeros fill up what eight channels lack. Each product is
one of the convolution's own, so that an infinity reaches what it reaches there.
"""

from __future__ import annotations

from typing import Any

from kiln.base.graph import Node, TensorSpec
from kiln.expand.relayout import Relayout
from kiln.ops.fake import FakeTensor
from kiln.ops.table import aten

FEW = 8
"""Channels that a matrix unit takes at once."""


def is_plain(node: Node, first: int) -> bool:
    """Whether a convolution, whose image is this argument, is one of two dimensions over few channels."""
    image, filters = (read.spec for read in node.args[first : first + 2])
    _, dilation, transposed, _, groups = node.args[first + 4 : first + 9]
    specs: tuple[TensorSpec, ...] = image, filters, *([node.args[0].spec] if first else [node.spec])
    known = all(len(s.shape) == 4 and all(type(n) is int and n > 0 for n in s.shape) for s in specs)
    plain = not transposed and groups == 1 and all(n == 1 for n in dilation)
    return known and plain and image.shape[1] < FEW and all(s.dtype.itemsize == 2 for s in specs)


def takes_patches(node: Node, first: int) -> bool:
    """Whether the filters of such a convolution lie side by side on its image."""
    if not is_plain(node, first):
        return False
    size, (stride, padding) = node.args[first + 1].spec.shape[2:], node.args[first + 3 : first + 5]
    return list(size) == pair(stride) and max(size) > 1 and not any(padding)


def takes_columns(node: Node, first: int) -> bool:
    """Whether the columns of the filters of a convolution are to be channels."""
    wanted = bool(first) and node.spec[0] is not None  # the image's gradient stays as it is
    return is_plain(node, first) and pair(node.args[first + 3])[1] > 1 and not wanted


def pair(given: Any) -> list[Any]:
    """What is given for height and width, or for both at once."""
    return [given[d % len(given)] for d in range(2)]


# Patches


def patches(x: FakeTensor, size: Any, count: Any) -> Any:
    """A matrix with a row for each patch of these sizes, of which there are so many in height and width."""
    for d in range(2):
        x = aten.slice.Tensor(x, d + 2, 0, size[d] * count[d])
    x = aten.reshape.default(x, [*x.shape[:2], count[0], size[0], count[1], size[1]])
    x = aten.permute.default(x, [0, 2, 4, 1, 3, 5])
    return aten.reshape.default(x, [x.shape[0] * count[0] * count[1], -1])


def product(node: Node, walk: Relayout) -> Node:
    """A convolution over patches."""
    x, filters = (walk.fake(walk.values[read]) for read in node.args[:2])
    batch, many, *count = node.spec.shape
    with walk.recording:
        rows = patches(x, filters.shape[2:], count)
        columns = aten.permute.default(aten.reshape.default(filters, [many, -1]), [1, 0])
        if node.args[2] is None:
            out = aten.mm.default(rows, columns)
        else:
            out = aten.addmm.default(walk.fake(walk.values[node.args[2]]), rows, columns)
        out = aten.permute.default(aten.reshape.default(out, [batch, *count, many]), [0, 3, 1, 2])
    return walk.recording.node(out)


def gradients(node: Node, walk: Relayout) -> tuple[Node | None, ...]:
    """The gradients of an image, of filters over its patches, and of what was added."""
    grad, x, filters = (walk.fake(walk.values[read]) for read in node.args[:3])
    (batch, many, *count), (_, channels, *whole), size = grad.shape, x.shape, filters.shape[2:]
    made: list[Any] = [None] * 3
    with walk.recording:
        given = aten.reshape.default(aten.permute.default(grad, [0, 2, 3, 1]), [-1, many])
        if node.spec[0] is not None:
            rows = aten.mm.default(given, aten.reshape.default(filters, [many, -1]))
            rows = aten.reshape.default(rows, [batch, *count, channels, *size])
            rows = aten.permute.default(rows, [0, 3, 1, 4, 2, 5])
            part = [n * k for n, k in zip(count, size, strict=True)]
            image = aten.reshape.default(rows, [batch, channels, *part])
            left = [n - k for n, k in zip(whole, part, strict=True)]
            made[0] = aten.constant_pad_nd.default(image, [0, left[1], 0, left[0]]) if any(left) else image
        if node.spec[1] is not None:
            sums = aten.mm.default(aten.permute.default(given, [1, 0]), patches(x, size, count))
            made[1] = aten.reshape.default(sums, list(filters.shape))
        if node.spec[2] is not None:
            made[2] = aten.sum.dim_IntList(given, [0])
    return tuple([None if one is None else walk.recording.node(one) for one in made])


# Columns of filters as channels


def zeros_for(channels: int, size: int) -> int:
    """How many columns of zeros are added to those of each channel: all that eight lack, or none."""
    more = -size % FEW
    return more if channels * more == -(channels * size) % FEW else 0


def columns(x: FakeTensor, size: int, step: int) -> Any:
    """Each window of so many columns as channels; those of zeros are added up to a multiple of eight."""
    batch, channels, height, _ = x.shape
    x = aten.permute.default(aten.unfold.default(x, 3, size, step), [0, 1, 4, 2, 3])
    x = aten.constant_pad_nd.default(x, [0, 0, 0, 0, 0, zeros_for(channels, size)])
    x = aten.reshape.default(x, [batch, -1, height, x.shape[-1]])
    return aten.constant_pad_nd.default(x, [0, 0, 0, 0, 0, -x.shape[1] % FEW])


def folded(node: Node, like: TensorSpec, walk: Relayout) -> Node:
    """What such filters have in their columns as filters of this type."""
    many, channels, height, size = like.shape
    each = size + zeros_for(channels, size)
    with walk.recording:
        x = aten.slice.Tensor(walk.fake(node), 1, 0, channels * each)
        x = aten.reshape.default(x, [many, channels, each, height])
        x = aten.permute.default(aten.slice.Tensor(x, 2, 0, size), [0, 1, 3, 2])
    return walk.recording.node(x)


def unfolded(
    node: Node, first: int, operands: list[Node], walk: Relayout
) -> tuple[Node, Node, list[int], list[int]]:
    """The image and the filters of a convolution with columns as channels, its steps and its zeros around."""
    x, filters = map(walk.fake, operands)
    (down, along), (above, beside) = map(pair, node.args[first + 3 : first + 5])
    size, width = filters.shape[3], (node.args[0] if first else node).spec.shape[3]
    with walk.recording:
        reach = along * (width - 1) + size - beside
        x = aten.slice.Tensor(x, 3, 0, reach) if reach < x.shape[3] else x
        x = aten.constant_pad_nd.default(x, [beside, reach - x.shape[3]])
        given = columns(x, size, along), columns(filters, size, 1)
        image, turned = map(walk.recording.node, given)
    return image, turned, [down, 1], [above, 0]
