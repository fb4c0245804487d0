"""Shape rules of attention and of the losses of classifiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kiln.ops.fake import in_order, make, similar
from kiln.ops.layout import COMPLEX, FLOATS, INEXACT, Mismatch, broadcast, pointwise, wrap_dim
from kiln.ops.pointwise import like
from kiln.ops.table import RULES, aten, rule


def _by_rows(x: Tensor, size: Any) -> Any:
    """A tensor of (batch, heads, rows, width) in which the heads of one row lie together."""
    _, heads, rows, width = size
    return make(size, (heads * rows * width, width, heads * width, 1), x.dtype, x.device)


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    size = query.shape
    if len(size) != 4 or query.dtype not in FLOATS or 0 in size or 0 in key.shape:
        return NotImplemented
    batch, heads, rows, width = size
    if key.shape != value.shape or key.shape[0] != batch or key.shape[3] != width or heads % key.shape[1]:
        return NotImplemented
    kind = torch.float32 if query.dtype in (torch.float16, torch.bfloat16) else query.dtype
    sums = make((batch, heads, rows), (heads * rows, 1, heads), kind, query.device)
    return RULES[aten.empty_like.default](query), sums


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    if any(t.dim() != 4 or 0 in t.shape for t in (query, key, value)) or grad.dtype is not query.dtype:
        return NotImplemented
    return _by_rows(query, query.shape), _by_rows(key, key.shape), _by_rows(value, value.shape)


RULES[aten._transformer_encoder_layer_fwd.default] = lambda x, *_, **__: (
    similar(x) if x.dim() == 3 and not x.is_nested else NotImplemented
)


@rule(aten._safe_softmax.default)
def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    wrap_dim(dim, x.dim())
    if x.dtype not in FLOATS or dtype not in (None, x.dtype) or 0 in x.shape:
        return NotImplemented
    return similar(x)


def _classes(x: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Whether these are scores and classes of a batch, as the losses take them."""
    if x.dim() != 2 or target.dim() != 1 or x.dtype not in FLOATS or x.shape[0] != target.shape[0]:
        return False
    return target.dtype is torch.int64 and (weight is None or weight.shape == x.shape[1:])


@rule(aten.nll_loss_forward.default)
def _nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> Any:
    if not _classes(x, target, weight) or x.device.type not in ("cpu", "cuda"):
        return NotImplemented
    size = () if reduction else target.shape
    return make(size, None, x.dtype, x.device), make((), None, x.dtype, x.device)


@rule(aten.nll_loss_backward.default)
def _nll_loss_backward(grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, *_: Any) -> Any:
    if not _classes(x, target, weight) or not x.is_contiguous():
        return NotImplemented
    return similar(x)


@rule(aten.nll_loss2d_forward.default)
def _nll_loss2d(x: Tensor, target: Tensor, weight: Tensor | None, *_: Any) -> Any:
    if x.dim() == 4 and target.dim() == 3:
        fits = (x.shape[0], *x.shape[2:]) == tuple(target.shape)
        if not fits or weight is not None and tuple(weight.shape) != (x.shape[1],):
            raise Mismatch("the classes or their weights do not fit the scores")
    return NotImplemented


@rule(aten.binary_cross_entropy_with_logits.default)
def _binary_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Any:
    # Eager computes it in place of a tensor like the target; meta kernels of some versions promote.
    fits = broadcast(x.shape, target.shape) == target.shape
    if x.dtype not in FLOATS or target.dtype not in INEXACT or not fits:
        raise Mismatch("the loss does not fit into the target")
    if x.dtype is target.dtype or target.dtype not in FLOATS or x.device != target.device:
        return NotImplemented
    if weight is not None or pos_weight is not None:
        return NotImplemented
    return make((), None, target.dtype, x.device) if reduction else like(target, target.dtype)


@rule(aten.binary_cross_entropy.default)
def _entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Any:
    if reduction or x.device.type != "cpu" or x.dtype not in FLOATS:
        return NotImplemented
    same = x.shape == target.shape and x.dtype is target.dtype and x.device == target.device
    return in_order(x) if same and weight is None else NotImplemented


@rule(aten.binary_cross_entropy_backward.default)
def _entropy_backward(grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None, *_: Any) -> Any:
    return _entropy(x, target, weight, 0)


@rule(aten.huber_loss.default, aten.soft_margin_loss.default)
def _loss_like_input(x: Tensor, target: Tensor, reduction: int = 1, *_: Any, **__: Any) -> Any:
    # Eager computes it in place of a tensor like the input; meta kernels promote.
    if x.dtype not in FLOATS or target.dtype in COMPLEX or x.shape != target.shape:
        raise Mismatch("the loss may not fit into the input")
    if x.dtype is target.dtype:
        return NotImplemented
    strides = pointwise(x.shape, (x.shape, x.stride()), (target.shape, target.stride()))
    return make((), None, x.dtype, x.device) if reduction else make(x.shape, strides, x.dtype, x.device)


@rule(aten.multilabel_margin_loss_forward.default)
def _multilabel_loss(x: Tensor, target: Tensor, reduction: int) -> Any:
    if x.dim() > 2 or x.shape != target.shape or x.dtype not in FLOATS or target.dtype is not torch.int64:
        return NotImplemented
    if x.device.type != "cpu":
        return NotImplemented
    size = x.shape[:1] if x.dim() == 2 and not reduction else ()
    return make(size, None, x.dtype, x.device), similar(x)
