"""Gradients of convolutions that are products of matrices: kernels of one place over one image."""

from __future__ import annotations

from typing import Any

import torch

from kiln.ops.table import aten


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: list[bool],
) -> Any:  # fmt: skip
    """Two products in place of eager's three passes: its kernel unfolds images into columns first."""
    one = transposed is False and groups == 1 and all(n == 1 for n in (*weight.shape[2:], *stride))
    dense = grad.is_contiguous() and x.is_contiguous() and weight.is_contiguous()
    if not one or not dense or any(padding) or x.dim() < 3 or x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    if not all(type(n) is int for n in (*x.shape, *grad.shape)) or x.shape[0] != 1 or x.device.type != "cpu":
        return NotImplemented
    planes, image = grad.view([grad.shape[1], -1]), x.view([x.shape[1], -1])
    filters = weight.view([weight.shape[0], weight.shape[1]])
    return (
        aten.mm(filters.t(), planes).view(x.shape) if mask[0] else None,
        aten.mm(planes, image.t()).view(weight.shape) if mask[1] else None,
        planes.sum(1) if mask[2] else None,
    )
