"""Expansions of activations and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kiln.ops.expansions.support import in_wide, number, zero
from kiln.ops.table import aten, expansion

ROOT_HALF = math.sqrt(0.5)
BELL = 1 / math.sqrt(2 * math.pi)
SLOPE = math.sqrt(2 / math.pi)
CUBE = 0.044715


@expansion(aten.gelu.default)
@in_wide
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return x * 0.5 * (torch.tanh((x + x * x * x * CUBE) * SLOPE) + 1)
    return x * 0.5 * (torch.erf(x * ROOT_HALF) + 1)


@expansion(aten.gelu_backward.default)
@in_wide
def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        square = x * x
        t = torch.tanh((x + square * x * CUBE) * SLOPE)
        inner = (square * (3 * CUBE) + 1) * SLOPE
        return grad * ((t + 1) * 0.5 + x * 0.5 * (1 - t * t) * inner)
    area = (torch.erf(x * ROOT_HALF) + 1) * 0.5
    return grad * (area + x * (torch.exp(x * x * -0.5) * BELL))


@expansion(aten.silu.default)
@in_wide
def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@expansion(aten.silu_backward.default)
@in_wide
def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return grad * s * (x * (1 - s) + 1)


@expansion(aten.mish.default)
@in_wide
def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(torch.log1p(torch.exp(x)))


@expansion(aten.mish_backward.default)
@in_wide
def mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    t = torch.tanh(torch.log1p(torch.exp(x)))
    return grad * (t + x * torch.sigmoid(x) * (1 - t * t))


@expansion(aten.hardswish.default)
@in_wide
def hardswish(x: Tensor) -> Tensor:
    return x * torch.clamp(x + 3, 0, 6) / 6


@expansion(aten.hardswish_backward.default)
@in_wide
def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    middle = torch.where(x < 3, grad * (x / 3 + 0.5), grad)
    return torch.where(x <= -3, zero(grad), middle)


@expansion(aten.hardsigmoid.default)
@in_wide
def hardsigmoid(x: Tensor) -> Tensor:
    return torch.clamp(x + 3, 0, 6) / 6


#: A sixth as eager's kernel has it, for doubles too: of single precision.
SIXTH = 0.1666666716337204


@expansion(aten.hardsigmoid_backward.default)
@in_wide
def hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where((x > -3) & (x < 3), grad * SIXTH, zero(grad))


@expansion(aten.elu.default)
@in_wide
def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


@expansion(aten.elu_backward.default)
@in_wide
def elu_backward(
    grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor
) -> Tensor:
    if is_result:
        below = grad * input_scale * (x + alpha * scale)
    else:
        below = grad * (input_scale * alpha * scale) * torch.exp(x * input_scale)
    if x.device.type == "cpu":  # eager's vectors take NaN for negative, what is left over does not
        return torch.where(x > 0, grad * scale, below)
    return torch.where(x <= 0, below, grad * scale)


@expansion(aten.leaky_relu.default)
@in_wide
def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    return torch.where(x > 0, x, x * slope)


@expansion(aten.leaky_relu_backward.default)
@in_wide
def leaky_relu_backward(grad: Tensor, x: Tensor, slope: float, is_result: bool) -> Tensor:
    return torch.where(x > 0, grad, grad * slope)


@expansion(aten.rrelu_with_noise_backward.default)
def rrelu_backward(
    grad: Tensor, x: Tensor, noise: Tensor, low: float, high: float, training: bool, is_result: bool
) -> Tensor:
    if training and high - low > 1e-6:
        return grad * noise
    return aten.leaky_relu_backward(grad, x, (low + high) / 2, is_result)


@expansion(aten._prelu_kernel.default)
@in_wide
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.where(x > 0, x, weight * x)


@expansion(aten._prelu_kernel_backward.default)
@in_wide
def prelu_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(x > 0, grad, weight * grad), torch.where(x > 0, zero(grad), x * grad)


@expansion(aten.softplus.default)
@in_wide
def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.log1p(torch.exp(scaled)) / beta)


@expansion(aten.softplus_backward.default)
@in_wide
def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, grad, grad * torch.sigmoid(scaled))


@expansion(aten.softshrink.default)
@in_wide
def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    # A NaN is neither above nor below: it comes out of the product.
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0))


@expansion(aten.hardshrink.default)
@in_wide
def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), zero(x), x)


@expansion(aten.hardshrink_backward.default, aten.softshrink_backward.default)
@in_wide
def shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), zero(grad), grad)


@expansion(aten.threshold.default)
def threshold(x: Tensor, bound: float, value: float) -> Tensor:
    return torch.where(x <= bound, number(value, x), x)


@expansion(aten.threshold_backward.default)
def threshold_backward(grad: Tensor, x: Tensor, bound: float) -> Tensor:
    return torch.where(x <= bound, zero(grad), grad)


@expansion(aten.hardtanh.default)
def hardtanh(x: Tensor, low: float = -1, high: float = 1) -> Any:
    # Over integers the bounds are cut to integers first.
    return torch.clamp(x, low, high) if x.dtype.is_floating_point else NotImplemented


@expansion(aten.hardtanh_backward.default)
def hardtanh_backward(grad: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    return torch.where((x <= low) | (x >= high), zero(grad), grad)


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    half = x.shape[dim] // 2
    return x.narrow(dim, 0, half), x.narrow(dim, half, half)


@expansion(aten.glu.default)
@in_wide
def glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = _halves(x, dim)
    return a * torch.sigmoid(b)


@expansion(aten.glu_backward.default)
@in_wide
def glu_backward(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    a, b = _halves(x, dim)
    s = torch.sigmoid(b)
    first = grad * s
    return torch.cat([first, (1 - s) * first * a], dim)


@expansion(aten.log_sigmoid_forward.default)
@in_wide
def log_sigmoid(x: Tensor) -> Any:
    fading = torch.exp(-torch.abs(x))
    out = torch.clamp(x, max=0) - torch.log1p(fading)
    # Only the CPU's kernel keeps the exponential for the gradient.
    return out, fading if x.device.type == "cpu" else x.new_empty(0)


@expansion(aten.log_sigmoid_backward.default)
@in_wide
def log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    fading = torch.exp(-torch.abs(x))
    part = fading / (fading + 1)
    return grad * torch.where(x < 0, 1 - part, part)


@expansion(aten.sigmoid_backward.default)
@in_wide
def sigmoid_backward(grad: Tensor, y: Tensor) -> Tensor:
    return grad * (1 - y) * y


@expansion(aten.tanh_backward.default)
@in_wide
def tanh_backward(grad: Tensor, y: Tensor) -> Tensor:
    return grad * (1 - y * y)


@expansion(aten.logit.default)
@in_wide
def logit(x: Tensor, eps: float | None = None) -> Any:
    if not x.dtype.is_floating_point:
        return NotImplemented
    z = x if eps is None else torch.clamp(x, eps, 1 - eps)
    return torch.log(z / (1 - z))


@expansion(aten.logit_backward.default)
@in_wide
def logit_backward(grad: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    inner = grad / (x * (1 - x))
    if eps is None:
        return torch.where((x < 0) | (x > 1), number(math.nan, grad), inner)
    return torch.where((x < eps) | (x > 1 - eps), zero(grad), inner)
