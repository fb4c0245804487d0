"""Gradients of convolutions as products of matrices, and as loops: of one place, and of one channel each."""

from __future__ import annotations

from typing import Any

import torch

from kiln.ops.table import aten

#: Places of a kernel that loops go through, at most.
PLACES = 9
#: Elements from which on new memory costs eager's kernel more than its better loops with a stride save.
LARGE = 1 << 19


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: list[bool],
) -> Any:  # fmt: skip
    """The gradients of convolutions that are something simpler; others stay calls of eager's kernel."""
    dense = grad.is_contiguous() and x.is_contiguous() and weight.is_contiguous()
    if transposed is not False or not dense or x.dtype not in (torch.float32, torch.float64) or x.dim() != 4:
        return NotImplemented
    if not all(type(n) is int for n in (*x.shape, *grad.shape)) or x.device.type != "cpu" or 0 in grad.shape:
        return NotImplemented
    one = all(n == 1 for n in (groups, x.shape[0], *weight.shape[2:], *stride))
    if one and not any(padding):
        return _of_one_place(grad, x, weight, mask)
    alone = groups == x.shape[1] == weight.shape[0] and weight[0][0].numel() <= PLACES
    if not alone or not mask[0] or tuple(dilation) != (1, 1) or tuple(stride) not in ((1, 1), (2, 2)):
        return NotImplemented
    if stride[0] == 2 and x.numel() < LARGE:
        return NotImplemented
    others = (None, None)
    if mask[1] or mask[2]:
        others = aten.convolution_backward(
            grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
            [False, mask[1], mask[2]],
        )[1:]  # fmt: skip
    return _of_one_channel(grad, x, weight, stride[0], padding), *others


def _of_one_place(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mask: list[bool]) -> Any:
    """Two products over one image, where eager's kernel unfolds images into columns first."""
    planes, image = grad.view([grad.shape[1], -1]), x.view([x.shape[1], -1])
    filters = weight.view([weight.shape[0], weight.shape[1]])
    return (
        aten.mm(filters.t(), planes).view(x.shape) if mask[0] else None,
        aten.mm(planes, image.t()).view(weight.shape) if mask[1] else None,
        planes.sum(1) if mask[2] else None,
    )


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
