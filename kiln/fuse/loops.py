"""Primitives that loop nests do better as smaller ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kiln.fuse.windows import avg_pool, max_pool
from kiln.ops.expansions.norms import batch_norm_backward
from kiln.ops.table import aten


def _var_mean(
    x: torch.Tensor, dims: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    """Two passes over a row that stays in the cache."""
    if not x.dim() or not x.is_floating_point():
        return NotImplemented
    dims = list(range(x.dim())) if not dims else [d % x.dim() for d in dims]
    count: Any = 1
    for d in dims:
        count = count * x.shape[d]
    if type(count) is not int or not count:
        return NotImplemented
    mean = aten.sum.dim_IntList(x, dims, True) / float(count)
    centred = x - mean
    divisor = count - (1 if correction is None else correction)
    spread = aten.sum.dim_IntList(centred * centred, dims, keepdim) / float(max(divisor, 0))
    if not keepdim:
        mean = mean.reshape([n for d, n in enumerate(x.shape) if d not in dims])
    return spread, mean


def _counted(index: torch.Tensor, size: Any) -> torch.Tensor:
    """Indices that may not count from the end: negative ones become too large."""
    return torch.where(index < 0, size, index)


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    if not x.dim():
        return NotImplemented
    dim %= x.dim()
    places: list[Any] = [None] * dim + [_counted(index.reshape(-1), x.shape[dim])]
    return aten.index(x, places)


def _embedding(
    weight: torch.Tensor,
    index: torch.Tensor,
    padding: int = -1,
    scale_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    return aten.index(weight, [_counted(index, weight.shape[0])]) if weight.dim() == 2 else NotImplemented


def _eager(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def _batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: Any, mean: Any, var: Any, middle: Any, scale: Any,
    training: bool, eps: float, mask: list[bool],
) -> Any:  # fmt: skip
    """In training with sums in float64, as eager's kernel has them: gradients cancel to their leading digits."""
    if not training or x.device.type != "cpu" or x.dtype is not torch.float32 or grad.dtype is not x.dtype:
        return batch_norm_backward(grad, x, weight, mean, var, middle, scale, training, eps, mask)
    if 0 in x.shape or middle is None or scale is None or (weight is None and (mask[1] or mask[2])):
        return NotImplemented
    dims, sides = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
    count: Any = x.numel() // x.shape[1]
    middle, scale = middle.view(sides), scale.view(sides)
    centred = x - middle
    total = grad.sum(dims, keepdim=True, dtype=torch.float64)
    dot = (centred.double() * grad.double()).sum(dims, keepdim=True)
    wide = scale.double()
    own = None
    if mask[0]:
        slope, level = (dot * wide * wide / count).float(), (total / count).float()
        factor = scale if weight is None else scale * weight.view(sides)
        own = (grad - level - centred * slope) * factor
    return (
        own,
        (dot * wide).float().view([-1]) if mask[1] else None,
        total.float().view([-1]) if mask[2] else None,
    )


#: Expansions in addition to those of the level of primitives.
FOR_LOOPS: dict[Any, Callable[..., Any]] = {
    aten.var_mean.correction: _var_mean,
    aten.index_select.default: _index_select,
    aten.embedding.default: _embedding,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.max_pool2d_with_indices.default: max_pool,
    aten.avg_pool2d.default: avg_pool,
    # What `kiln.ops.random` left: those draw eager's numbers.
    aten.bernoulli.p: _eager,
    aten.bernoulli.default: _eager,
}
