"""Expansions of losses and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, clamp, exp, log1p, sigmoid, where

from kiln.ops.expansions.support import (
    MEAN,
    NONE,
    Some,
    in_wide,
    number,
    of_one_dtype,
    reduce_loss,
    share,
    zero,
)
from kiln.ops.table import Rule, aten, expansion, expansions


def smooth_l1_loss(x: Tensor, y: Tensor, reduction: int = MEAN, beta: float = 1) -> Tensor:
    distance = torch.abs(x - y)
    if beta:
        near = distance * 0.5 * distance / beta
        distance = where(distance < beta, near, distance - 0.5 * beta)
    return reduce_loss(distance, reduction)


def smooth_l1_loss_backward(grad: Tensor, x: Tensor, y: Tensor, reduction: int, beta: float) -> Tensor:
    distance = x - y
    slope = clamp(distance / beta, -1, 1) if beta else torch.sign(distance)
    return slope * share(grad, x, reduction)


def huber_loss(x: Tensor, y: Tensor, reduction: int = MEAN, delta: float = 1) -> Tensor:
    distance = torch.abs(x - y)
    far = (distance - 0.5 * delta) * delta
    return reduce_loss(where(distance <= delta, distance * 0.5 * distance, far), reduction)


def binary_cross_entropy(
    x: Tensor, y: Tensor, weight: Some = None, reduction: int = MEAN, checked: Rule | None = None
) -> Tensor:
    """`checked` gives a loss, or raises where a condition does not hold of all elements."""
    loss = (y - 1) * clamp(log1p(-x), min=-100) - y * clamp(torch.log(x), min=-100)
    if checked is not None:
        loss = checked(loss, (x >= 0) & (x <= 1))
        loss = checked(loss, (y >= 0) & (y <= 1)) if x.device.type == "cpu" else loss
    return reduce_loss(loss if weight is None else loss * weight, reduction)


def binary_cross_entropy_backward(
    grad: Tensor, x: Tensor, y: Tensor, weight: Some = None, reduction: int = MEAN
) -> Tensor:
    out = grad * (x - y) / clamp((1 - x) * x, min=1e-12)
    return share(out if weight is None else out * weight, x, reduction)


def binary_cross_entropy_with_logits(
    x: Tensor, y: Tensor, weight: Some = None, pos_weight: Some = None, reduction: int = MEAN
) -> Tensor:
    logarithm = clamp(x, max=0) - log1p(exp(-torch.abs(x)))
    if pos_weight is not None:
        logarithm = logarithm * ((pos_weight - 1) * y + 1)
    loss = (1 - y) * x - logarithm
    return reduce_loss(loss if weight is None else loss * weight, reduction)


def mse_loss(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    distance = x - y
    return reduce_loss(distance * distance, reduction)


OF_ONE_DTYPE: dict[str, Rule] = {
    "mse_loss": mse_loss,
    "mse_loss_backward": lambda grad, x, y, reduction: (
        (x - y) * (2 / x.numel() if reduction == MEAN and x.numel() else 2) * grad
    ),
    "smooth_l1_loss": smooth_l1_loss,
    "smooth_l1_loss_backward": smooth_l1_loss_backward,
    "huber_loss": huber_loss,
    "huber_loss_backward": lambda grad, x, y, reduction, delta: (
        clamp(x - y, -delta, delta) * share(grad, x, reduction)
    ),
    "soft_margin_loss": lambda x, y, reduction=MEAN: reduce_loss(log1p(exp(-y * x)), reduction),
    "soft_margin_loss_backward": lambda grad, x, y, reduction: (
        -y * sigmoid(-y * x) * share(grad, x, reduction)
    ),
    "binary_cross_entropy": binary_cross_entropy,
    "binary_cross_entropy_backward": binary_cross_entropy_backward,
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
}
expansions(OF_ONE_DTYPE, lambda function: of_one_dtype(in_wide(function)))


def _chosen(x: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor, int]:
    """Which targets count, targets that are safe to read with, and the dimension of the classes."""
    counts = target != ignored
    return counts, where(counts, target, number(0, target)), 0 if x.dim() == 1 else 1


def _weights(x: Tensor, weight: Some, counts: Tensor, safe: Tensor) -> Tensor:
    """The weight of each target; zero for those that do not count."""
    if weight is None:
        return counts.to(x.dtype)
    return where(counts, aten.index(weight, [safe]), zero(weight))


@expansion(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
@in_wide
def nll_loss(x: Tensor, target: Tensor, weight: Some, reduction: int, ignored: int) -> Any:
    if target.dtype is not torch.int64:
        return NotImplemented
    counts, safe, dim = _chosen(x, target, ignored)
    picked = torch.gather(x, dim, safe.unsqueeze(dim)).squeeze(dim)
    weights = _weights(x, weight, counts, safe)
    # A probability of zero is not multiplied by the weight of a target that does not count.
    loss = where(counts, -picked * weights, zero(x))
    if reduction == NONE and x.dim() != 1:
        return loss, zero(x)
    total = weights.sum()
    return (loss.sum() / total if reduction == MEAN else loss.sum()), total


@expansion(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
@in_wide
def nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Some, reduction: int, ignored: int, total: Tensor
) -> Any:
    if target.dtype is not torch.int64:
        return NotImplemented
    counts, safe, dim = _chosen(x, target, ignored)
    each = -_weights(x, weight, counts, safe) * (grad / total if reduction == MEAN else grad)
    each = where(counts, each, zero(x))
    # Each class compares itself with the target: one loop over the result, where a scatter would be two.
    classes = torch.arange(x.shape[dim], device=x.device)
    classes = classes.view([-1] + [1] * (x.dim() - 1 - dim))
    return where(classes == safe.unsqueeze(dim), each.unsqueeze(dim), zero(x))
