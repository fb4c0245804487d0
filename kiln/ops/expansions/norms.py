"""Expansions of normalisation: layer, group and batch norm and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kiln.ops.expansions.support import Some, extent, narrowed, wide, widened
from kiln.ops.table import Rule, aten, expansion, expansions


def statistics(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Variance, mean and the reciprocal of the deviation over `dims`, which stay with the extent 1."""
    spread, middle = torch.var_mean(x, dims, correction=0, keepdim=True)
    return spread, middle, torch.rsqrt(spread + eps)


def _kept_dtype(x: Tensor, *others: Some) -> torch.dtype:
    """The dtype in which eager keeps statistics for the gradient: on CPUs that of the first of `others`."""
    given = [t.dtype for t in others if t is not None]
    return wide(x.dtype) if x.device.type != "cpu" else given[0] if given else x.dtype


def _affine(x: Tensor, weight: Some, bias: Some) -> Tensor:
    if weight is not None:
        x = x * widened(weight)
    return x if bias is None else x + widened(bias)


def _input_gradient(grad: Tensor, normal: Tensor, scale: Tensor, dims: list[int]) -> Tensor:
    """The gradient through `normal = (x - mean) * scale` with mean and scale taken over `dims`."""
    count = extent(grad, dims)
    level = torch.sum(grad, dims, keepdim=True) / count
    tilt = torch.sum(grad * normal, dims, keepdim=True) / count
    return (grad - level - normal * tilt) * scale


def _summed(x: Tensor, dims: list[int], like: Tensor) -> Tensor:
    """`x` summed over `dims`, in the shape and dtype of `like`."""
    return (torch.sum(x, dims) if dims else x).view(like.shape).to(like.dtype)


# Layer norm


@expansion(aten.native_layer_norm.default)
def layer_norm(
    x: Tensor, shape: list[int], weight: Some, bias: Some, eps: float, *, statistics: Rule = statistics
) -> Any:
    if 0 in x.shape:
        return NotImplemented
    dims = list(range(x.dim() - len(shape), x.dim()))
    wider = widened(x)
    _, middle, scale = statistics(wider, dims, eps)
    out = _affine((wider - middle) * scale, weight, bias).to(x.dtype)
    return out, *narrowed((middle, scale), _kept_dtype(x, weight))


@expansion(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], middle: Tensor, scale: Tensor, weight: Some, bias: Some,
    mask: list[bool],
) -> Any:  # fmt: skip
    if 0 in x.shape:
        return NotImplemented
    outer = x.dim() - len(shape)
    inside, outside = list(range(outer, x.dim())), list(range(outer))
    kept = [*x.shape[:outer], *[1] * len(shape)]
    middle, scale = widened(middle).view(kept), widened(scale).view(kept)
    wider = widened(grad)
    normal = (widened(x) - middle) * scale
    through = wider if weight is None else wider * widened(weight)
    return (
        _input_gradient(through, normal, scale, inside).to(x.dtype) if mask[0] else None,
        _summed(wider * normal, outside, weight) if mask[1] and weight is not None else None,
        _summed(wider, outside, bias) if mask[2] and bias is not None else None,
    )


# Group norm: channels are split into groups by a view, which any memory format allows


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.view([x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]])


def _channels(t: Tensor, rank: int) -> Tensor:
    """One number a channel, shaped to go with a tensor of `rank` dimensions."""
    return widened(t).view([1, -1, *[1] * (rank - 2)])


def _by_channel(x: Tensor, weight: Some, bias: Some) -> Tensor:
    return _affine(x, *[None if t is None else _channels(t, x.dim()) for t in (weight, bias)])


def _side_by_side(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """What a group norm makes of channels that lie side by side: sums by channel first, line by line."""
    n, c, *inside = x.shape
    places = list(range(2, x.dim()))
    count = extent(x, places) * (c // groups)

    def mean(x: Tensor) -> Tensor:
        return x.sum(places).view(n, groups, -1).sum(-1) / count

    def by_channel(t: Tensor) -> Tensor:
        return t.unsqueeze(-1).expand(n, groups, c // groups).reshape(n, c, *[1] * len(inside))

    middle = mean(x)
    centred = x - by_channel(middle)
    scale = torch.rsqrt(mean(centred * centred) + eps)
    return centred * by_channel(scale), middle, scale


@expansion(aten.native_group_norm.default)
def group_norm(
    x: Tensor, weight: Some, bias: Some, n: int, c: int, hxw: int, groups: int, eps: float, *,
    statistics: Rule = statistics,
) -> Any:  # fmt: skip
    if 0 in x.shape:
        return NotImplemented
    if x.device.type == "cpu" and x.dim() > 2 and x.stride(1) == 1 and c > 1:
        out, middle, scale = _side_by_side(widened(x), groups, eps)
    else:
        parts = _grouped(widened(x), groups)
        _, middle, scale = statistics(parts, list(range(2, parts.dim())), eps)
        out = ((parts - middle) * scale).reshape(x.shape)
    kept = x.dtype if weight is None else weight.dtype
    out = _by_channel(out, weight, bias).to(x.dtype)
    return out, middle.view(n, groups).to(kept), scale.view(n, groups).to(kept)


@expansion(aten.native_group_norm_backward.default)
def group_norm_backward(
    grad: Tensor, x: Tensor, middle: Tensor, scale: Tensor, weight: Some, n: int, c: int, hxw: int,
    groups: int, mask: list[bool],
) -> Any:  # fmt: skip
    if 0 in x.shape or (weight is None and (mask[1] or mask[2])):
        return NotImplemented
    wider, parts = widened(grad), _grouped(widened(x), groups)
    shape = [n, groups, *[1] * (parts.dim() - 2)]
    scale = widened(scale).view(shape)
    normal = (parts - widened(middle).view(shape)) * scale
    through = wider if weight is None else wider * _channels(weight, x.dim())
    inside, others = list(range(2, parts.dim())), [0, *range(2, x.dim())]
    own = None
    if mask[0]:
        own = _input_gradient(through.reshape(parts.shape), normal, scale, inside)
        own = own.reshape(x.shape).to(x.dtype)
    return (
        own,
        _summed(wider * normal.reshape(x.shape), others, weight) if mask[1] and weight is not None else None,
        _summed(wider, others, weight) if mask[2] and weight is not None else None,
    )


# Batch norm


def _normalised(x: Tensor, middle: Tensor, scale: Tensor, weight: Some, bias: Some) -> Tensor:
    out = (widened(x) - _channels(middle, x.dim())) * _channels(scale, x.dim())
    return _by_channel(out, weight, bias).to(x.dtype)


def _by_running(x: Tensor, weight: Some, bias: Some, mean: Tensor, var: Tensor, eps: float) -> Any:
    """The result, and two empty tensors in the place of the batch's statistics."""
    none = torch.empty(0, dtype=_kept_dtype(x, weight, bias, mean), device=x.device)
    return _normalised(x, mean, torch.rsqrt(widened(var) + eps), weight, bias), none, torch.empty_like(none)


def _by_batch(x: Tensor, weight: Some, bias: Some, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, the batch's mean, the reciprocal of its deviation, and its variance."""
    dims = [0, *range(2, x.dim())]
    if x.device.type == "cpu" and widened(x).dtype is torch.float32:
        return _by_batch_as_eager(widened(x), weight, bias, eps, x.dtype)
    spread, middle = torch.var_mean(widened(x), dims, correction=0)
    scale = torch.rsqrt(spread + eps)
    return _normalised(x, middle, scale, weight, bias), middle, scale, spread


def _by_batch_as_eager(
    x: Tensor, weight: Some, bias: Some, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with eager's rounding at each step: sums in double, results rounded once.

    Gradients of normalised batches are small differences of large numbers: where the statistics differ from
    eager's in the last bit, so do the gradients in leading ones.
    """
    double, rank, dims = torch.float64, x.dim(), [0, *range(2, x.dim())]
    count = extent(x, dims)
    middle = (torch.sum(x.to(double), dims) / count).to(x.dtype)
    centred = x - _channels(middle, rank)
    spread = torch.sum((centred * centred).to(double), dims).to(x.dtype) / count
    scale = torch.reciprocal(torch.sqrt(spread.to(double) + eps)).to(x.dtype)
    slope = scale if weight is None else scale * widened(weight)
    lift = middle.to(double) * slope.to(double)
    start = (-lift if bias is None else widened(bias).to(double) - lift).to(x.dtype)
    out = torch.addcmul(_channels(start, rank), x, _channels(slope, rank))
    return out.to(dtype), middle, scale, spread


def _moved(running: Tensor, batch: Tensor, momentum: float) -> Tensor:
    return (widened(running) * (1 - momentum) + batch * momentum).to(running.dtype)


@expansion(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    x: Tensor, weight: Some, bias: Some, mean: Tensor, var: Tensor, training: bool, momentum: float,
    eps: float,
) -> Any:  # fmt: skip
    if 0 in x.shape:
        return NotImplemented
    kept = _kept_dtype(x, weight, bias, mean)
    if not training:
        return *_by_running(x, weight, bias, mean, var, eps), mean, var
    out, middle, scale, spread = _by_batch(x, weight, bias, eps)
    count = extent(x, [0, *range(2, x.dim())])
    unbiased = spread * (count / (count - 1)) if count != 1 else spread
    new = _moved(mean, middle, momentum), _moved(var, unbiased, momentum)
    return out, middle.to(kept), scale.to(kept), *new


@expansion(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    x: Tensor, weight: Some, bias: Some, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> Any:
    found = batch_norm_functional(x, weight, bias, mean, var, True, momentum, eps)
    if found is NotImplemented:
        return NotImplemented
    out, middle, scale, *new = found
    return out, middle, scale, torch.empty(0, dtype=torch.uint8, device=x.device), *new


@expansion(aten.native_batch_norm.default)
def batch_norm(
    x: Tensor, weight: Some, bias: Some, mean: Some, var: Some, training: bool, momentum: float, eps: float
) -> Any:
    # In training with running statistics the op writes into them: the functional form is for that.
    if 0 in x.shape or (training and mean is not None):
        return NotImplemented
    kept = _kept_dtype(x, weight, bias, mean)
    if training:
        out, middle, scale, _ = _by_batch(x, weight, bias, eps)
        return out, middle.to(kept), scale.to(kept)
    if mean is None or var is None:
        return NotImplemented
    return _by_running(x, weight, bias, mean, var, eps)


@expansion(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Some, mean: Some, var: Some, middle: Some, scale: Some, training: bool,
    eps: float, mask: list[bool],
) -> Any:  # fmt: skip
    if 0 in x.shape or (weight is None and (mask[1] or mask[2])):
        return NotImplemented
    if not training:
        if mean is None or var is None:
            return NotImplemented
        middle, scale = mean, torch.rsqrt(widened(var) + eps)
    if middle is None or scale is None:
        return NotImplemented
    rank, dims = x.dim(), [0, *range(2, x.dim())]
    spread = _channels(scale, rank)
    wider = widened(grad)
    normal = (widened(x) - _channels(middle, rank)) * spread
    through = wider if weight is None else wider * _channels(weight, rank)
    own = None
    if mask[0]:
        own = _input_gradient(through, normal, spread, dims) if training else through * spread
    return (
        None if own is None else own.to(x.dtype),
        _summed(wider * normal, dims, weight) if mask[1] and weight is not None else None,
        _summed(wider, dims, weight) if mask[2] and weight is not None else None,
    )


FORMS: dict[str, Rule] = {
    "_native_batch_norm_legit.no_stats": lambda x, weight, bias, *rest: batch_norm(
        x, weight, bias, None, None, *rest
    ),
    "_native_batch_norm_legit_no_training": lambda x, weight, bias, mean, var, *rest: batch_norm(
        x, weight, bias, mean, var, False, *rest
    ),
    "cudnn_batch_norm_backward": lambda x, grad, weight, mean, var, middle, scale, eps, reserved: (
        batch_norm_backward(grad, x, weight, mean, var, middle, scale, True, eps, [True, True, True])
    ),
}
expansions(FORMS)
