"""Shape rules of pooling over images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kiln.ops.fake import make, similar
from kiln.ops.layout import FLOATS
from kiln.ops.network import is_plain
from kiln.ops.sizes import pooled
from kiln.ops.table import aten, rule


def _size(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Any:
    """The size after pooling over the last two dimensions; None for what the meta kernel is to judge."""
    given = [kernel, stride or kernel, padding, dilation]
    if ceil or x.dim() not in (3, 4) or any(len(value) not in (1, 2) for value in given):
        return None
    for k, s, p, d in zip(*[(value[0], value[-1]) for value in given]):
        if k < 1 or s < 1 or d < 1 or p < 0 or 2 * p > k:
            return None
    found = pooled(x, kernel, stride, padding, dilation)
    return None if found is NotImplemented else found[0]


def _applies(x: Tensor) -> bool:
    return x.dtype in FLOATS and is_plain(x) and 0 not in x.shape


@rule(aten.max_pool2d_with_indices.default)
def _max_pool(x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,),
              ceil: bool = False) -> Any:  # fmt: skip
    size = _size(x, kernel, stride, padding, dilation, ceil) if _applies(x) else None
    if size is None:
        return NotImplemented
    return make(size, None, x.dtype, x.device), make(size, None, torch.int64, x.device)


@rule(aten.avg_pool2d.default)
def _average_pool(x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), ceil: bool = False,
                  count_include_pad: bool = True, divisor: Any = None) -> Any:  # fmt: skip
    size = _size(x, kernel, stride, padding, (1,), ceil) if _applies(x) and divisor is None else None
    return NotImplemented if size is None else make(size, None, x.dtype, x.device)


@rule(aten._adaptive_avg_pool2d.default)
def _adaptive_pool(x: Tensor, size: Any) -> Any:
    if not _applies(x) or x.dim() not in (3, 4) or len(size) != 2 or any(n < 1 for n in size):
        return NotImplemented
    return make((*x.shape[:-2], *size), None, x.dtype, x.device)


@rule(
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
)
def _backward(grad: Tensor, x: Tensor, *_: Any, **__: Any) -> Any:
    if not _applies(x) or not is_plain(grad) or grad.dtype is not x.dtype:
        return NotImplemented
    if grad.dim() != x.dim() or x.dim() not in (3, 4):
        return NotImplemented
    return similar(x)
