"""Shape rules of indexing by tensors, of parts of matrices, and of the gradients of views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kiln.ops.fake import in_order, make, similar
from kiln.ops.layout import Mismatch, contiguous, preserved, wrap_dim
from kiln.ops.network import is_plain
from kiln.ops.table import RULES, aten, declare, rule


@rule(aten.gather.default)
def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    out = _scatter_value(x, dim, index, 0)
    return out if out is NotImplemented else make(index.shape, None, x.dtype, x.device)


@rule(aten.scatter.src, aten.scatter_add.default)
def _scatter(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    if index.shape != src.shape or x.dtype is not src.dtype or src.device != x.device:
        return NotImplemented
    return _scatter_value(x, dim, index, 0)


@rule(aten.scatter.value)
def _scatter_value(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    rank = x.dim()
    if index.dtype is not torch.int64 or index.dim() != rank or not rank or index.device != x.device:
        return NotImplemented
    dim = wrap_dim(dim, rank)
    if any(n > m and d != dim for d, (n, m) in enumerate(zip(index.shape, x.shape, strict=True))):
        raise Mismatch("the index reaches further than the tensor")
    return similar(x)


@rule(aten.index_select.default)
def _index_select(x: Tensor, dim: int, index: Tensor) -> Any:
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32) or not x.dim() or 0 in x.shape:
        return NotImplemented
    if index.device != x.device:
        return NotImplemented
    size = list(x.shape)
    size[wrap_dim(dim, len(size))] = index.shape[0]
    return make(size, None, x.dtype, x.device)


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    # Eager writes into a copy that keeps the order of the dimensions; meta kernels give a contiguous one.
    number = value.dim() == 0 if isinstance(value, Tensor) else not isinstance(value, complex)
    plain = index.dim() < 2 and index.dtype is torch.int64 and index.device == x.device
    if not x.dim() or not plain or not number:
        return NotImplemented
    wrap_dim(dim, x.dim())
    return in_order(x)


@rule(aten.index_add.default)
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Any:
    if not x.dim() or index.dim() != 1 or not is_plain(x):
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    expected = (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
    if tuple(source.shape) != expected or source.dtype is not x.dtype:
        raise Mismatch("the source does not fit")
    if index.dtype not in (torch.int64, torch.int32) or not x.device == index.device == source.device:
        return NotImplemented
    return similar(x)


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(grad: Tensor, indices: Tensor, rows: int, padding: int, scale: bool) -> Any:
    if not grad.dim() or indices.dtype not in (torch.int64, torch.int32) or grad.device != indices.device:
        return NotImplemented
    return make((rows, grad.shape[-1]), None, grad.dtype, grad.device)


declare(RULES, {"slice_backward select_backward diagonal_backward":
                lambda grad, size, *_: make(size, None, grad.dtype, grad.device)})  # fmt: skip


@rule(aten.tril.default, aten.triu.default)
def _triangle(x: Tensor, diagonal: int = 0) -> Any:
    if x.dim() < 2:
        raise Mismatch("not a matrix")
    return similar(x)


@rule(aten.sort.default, aten.sort.stable)
def _sort(x: Tensor, *given: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
    if given:
        dim = given[0]
    wrap_dim(dim, x.dim())
    if x.dtype.is_complex:
        raise Mismatch("complex numbers have no order")
    stride = preserved(x.shape, x.stride())
    return make(x.shape, stride, x.dtype, x.device), make(x.shape, stride, torch.int64, x.device)


@rule(aten.repeat_interleave.Tensor)
def _repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Any:
    if repeats.dim() != 1 or repeats.dtype not in (torch.int64, torch.int32):
        raise Mismatch("repeats are a vector of integers")
    if output_size is None:
        return NotImplemented
    return make((output_size,), None, repeats.dtype, repeats.device)


@rule(aten.nonzero_static.default)
def _nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Any:
    if x.device.type != "cpu" or size < 0:
        return NotImplemented
    shape = (size, x.dim())
    # No dimension is counted as one in the strides.
    return make(shape, contiguous(shape) if x.dim() else (1, 1), torch.int64, x.device)
