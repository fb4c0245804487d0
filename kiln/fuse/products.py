"""Gradients of convolutions as products of matrices, and as loops: of one place, and of one channel each."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kiln.fuse import turns, volumes
from kiln.ops.table import aten

#: Places of a kernel that loops go through, at most.
PLACES = 9
#: Columns of a kernel at most, where each has a sum of its own.
WIDEST = 11
#: Elements from which on new memory costs eager's kernel more than its better loops with a stride save.
LARGE = 1 << 19


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: list[bool],
) -> Any:  # fmt: skip
    """The gradients of convolutions that are something simpler; others stay calls of eager's kernel."""
    how = bias_sizes, stride, padding, dilation, transposed, output_padding, groups
    if x.dim() == 5:
        return volumes.convolution_backward(grad, x, weight, *how, mask)
    if transposed is not False or x.dtype not in (torch.float32, torch.float64) or x.dim() != 4:
        return NotImplemented
    if not all(type(n) is int for n in (*x.shape, *grad.shape)) or x.device.type != "cpu" or 0 in grad.shape:
        return NotImplemented
    dense = grad.is_contiguous() and x.is_contiguous() and weight.is_contiguous()
    one = all(n == 1 for n in (groups, x.shape[0], *weight.shape[2:])) and not any(padding)
    if one and dense:
        return _of_one_place(grad, x, weight, stride, mask)
    alone = groups == x.shape[1] == weight.shape[0] and tuple(dilation) == (1, 1)
    if not alone or tuple(stride) not in ((1, 1), (2, 2)):
        return NotImplemented
    few = weight[0][0].numel() <= PLACES
    image = mask[0] and few and dense and (stride[0] == 1 or x.numel() >= LARGE)
    filters = mask[1] and not few and weight.shape[2] > 2 * stride[0] and weight.shape[3] <= WIDEST
    if not image and not filters:
        return NotImplemented
    left = [mask[0] and not image, mask[1] and not filters, mask[2] and not filters]
    rest = functools.partial(aten.convolution_backward, grad, x, weight, *how, left)
    # Eager's kernel needs more memory than loops in turns; other copies with borders lie beside all else.
    first = filters and any(left) and _in_turns(grad, weight, stride[0])
    others = rest() if first else (None, None, None)
    found = _filters(grad, x, weight, stride[0], padding) if filters else None
    if any(left) and not first:
        others = rest()
    return (
        _of_one_channel(grad, x, weight, stride[0], padding) if image else others[0],
        found if filters else others[1],
        grad.sum([0, 2, 3]) if mask[2] and filters else others[2],
    )


def _of_one_place(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stride: Any, mask: list[bool]
) -> Any:
    """Two products over one image, where eager's kernel unfolds images into columns first."""
    planes = grad.view([grad.shape[1], -1])
    filters = weight.view([weight.shape[0], weight.shape[1]])
    seen = x[:, :, :: stride[0], :: stride[1]].contiguous().view([x.shape[1], -1])
    return (
        _spread(aten.mm(filters.t(), planes), grad.shape[2:], stride, x.shape) if mask[0] else None,
        aten.mm(planes, seen.t()).view(weight.shape) if mask[1] else None,
        planes.sum(1) if mask[2] else None,
    )


def _spread(planes: torch.Tensor, places: Any, stride: Any, shape: Any) -> torch.Tensor:
    """An image with the elements of planes at every so many places, and zeros between them."""
    if tuple(stride) == (1, 1):
        return planes.view(shape)
    rows, columns = (n * step for n, step in zip(places, stride, strict=True))
    apart = planes.view([shape[1], places[0], 1, places[1], 1])
    whole = aten.constant_pad_nd(apart, [0, stride[1] - 1, 0, 0, 0, stride[0] - 1], 0.0)
    return whole.view([1, shape[1], rows, columns])[:, :, : shape[2], : shape[3]].contiguous()


def _of_one_channel(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, step: int, padding: Any
) -> torch.Tensor:
    """The gradient of the input where each channel has a kernel of its own.

    Places of the input fall into classes by what is left of them modulo the stride: each class gets its share
    of the same few places of each kernel.
    """
    counts = [-(-n // step) for n in x.shape[2:]]

    def taps(dim: int, left: int) -> list[tuple[int, int]]:
        """The places of a kernel that reach a class, and how far from it what they multiply lies."""
        reach = [(k, left + padding[dim] - k) for k in range(weight.shape[dim + 2])]
        return [(k, ahead // step) for k, ahead in reach if ahead % step == 0]

    def share(row: int, column: int) -> torch.Tensor:
        total: torch.Tensor | None = None
        for kh, down in taps(0, row):
            for kw, right in taps(1, column):
                border = [-right, counts[1] + right - grad.shape[3], -down, counts[0] + down - grad.shape[2]]
                part = aten.constant_pad_nd(grad, border, 0.0) * weight[:, 0, kh, kw].view([-1, 1, 1])
                total = part if total is None else total + part
        return grad.new_zeros([*grad.shape[:2], *counts]) if total is None else total

    if step == 1:
        return share(0, 0)
    rows = [torch.stack([share(a, b) for b in range(step)], -1) for a in range(step)]
    whole = torch.stack(rows, 3).view([*x.shape[:2], *[n * step for n in counts]])
    return whole[:, :, : x.shape[2], : x.shape[3]].contiguous()


def _filters(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, step: int, padding: Any
) -> torch.Tensor:
    """The gradient of kernels of one channel each: for every place of them a sum over the image.

    With borders around both images a sum runs on over the ends of rows, where products do not count. Rows and
    columns of the image fall into classes by what is left of them modulo the stride; each is an image of its
    own.
    """
    count, channels, *places = grad.shape
    (rows, columns), (high, wide) = _turns(grad, weight, step)
    below, right = (n * step - padding[d] - x.shape[d + 2] for d, n in enumerate((high, wide)))
    image = aten.constant_pad_nd(x, [padding[1], right, padding[0], below], 0.0)
    image = image.view([count, channels, high, step, wide, step]).permute([1, 0, 3, 5, 2, 4]).contiguous()
    length = places[0] * wide - (columns - 1)
    given = aten.constant_pad_nd(grad, [0, columns - 1], 0.0).permute([1, 0, 2, 3]).contiguous()
    given = given.view([channels, count, 1, 1, 1, -1])[..., :length]
    inside = aten.constant_pad_nd(grad.new_ones(places), [0, columns - 1], 0.0).view([-1])[:length] > 0
    shape, strides = [channels, count, step, step, rows, length], [*image.stride()[:4], wide, 1]
    sums = [
        torch.where(inside, aten.as_strided(image, shape, strides, place) * given, 0.0).sum([1, 5])
        for place in range(columns)
    ]
    whole = torch.stack(sums, -1).permute([0, 3, 1, 4, 2]).reshape([channels, 1, rows * step, columns * step])
    return whole[:, :, : weight.shape[2], : weight.shape[3]].contiguous()


def _turns(grad: torch.Tensor, weight: torch.Tensor, step: int) -> tuple[list[int], list[int]]:
    """Rows and columns of a class of a kernel's places, and those of an image with borders."""
    sizes = [-(-n // step) for n in weight.shape[2:]]
    return sizes, [n + size - 1 for n, size in zip(grad.shape[2:], sizes, strict=True)]


def _in_turns(grad: torch.Tensor, weight: torch.Tensor, step: int) -> bool:
    """Whether images with borders lie on the stack, those of a channel at a time."""
    high, wide = _turns(grad, weight, step)[1]
    return turns.fits(grad.shape[1], grad.shape[0] * high * wide * (step**2 + 1) * grad.dtype.itemsize)
