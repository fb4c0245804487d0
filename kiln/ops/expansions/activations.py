"""Expansions of activations and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, clamp, exp, log1p, sigmoid, tanh, where

from kiln.ops.expansions.support import in_wide, number, widened, zero
from kiln.ops.symint import SYMBOLIC
from kiln.ops.table import Rule, aten, expansions

ROOT_HALF = math.sqrt(0.5)
BELL = 1 / math.sqrt(2 * math.pi)
SLOPE = math.sqrt(2 / math.pi)
CUBE = 0.044715
#: A sixth as eager's kernel has it, for doubles too: of single precision.
SIXTH = 0.1666666716337204


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return x * 0.5 * (tanh((x + x * x * x * CUBE) * SLOPE) + 1)
    return x * 0.5 * (torch.erf(x * ROOT_HALF) + 1)


def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        square = x * x
        t = tanh((x + square * x * CUBE) * SLOPE)
        inner = (square * (3 * CUBE) + 1) * SLOPE
        return grad * ((t + 1) * 0.5 + x * 0.5 * (1 - t * t) * inner)
    area = (torch.erf(x * ROOT_HALF) + 1) * 0.5
    return grad * (area + x * (exp(x * x * -0.5) * BELL))


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    s = sigmoid(x)
    return grad * s * (x * (1 - s) + 1)


def mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    t = tanh(log1p(exp(x)))
    return grad * (t + x * sigmoid(x) * (1 - t * t))


# The gradients of eager's vectors at NaN are not those of its loops for what is left over, nor of its GPUs.


def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    middle = grad * (x / 3 + 0.5)
    above = where(x >= 3, grad, middle) if x.device.type == "cpu" else where(x < 3, middle, grad)
    return where(x <= -3, zero(grad), above)


def elu_backward(
    grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor
) -> Tensor:
    if is_result:
        below = grad * input_scale * (x + alpha * scale)
    else:
        below = grad * (input_scale * alpha * scale) * exp(x * input_scale)
    if x.device.type == "cpu":
        return where(x > 0, grad * scale, below)
    return where(x <= 0, below, grad * scale)


def rrelu_backward(
    grad: Tensor, x: Tensor, noise: Tensor, low: float, high: float, training: bool, is_result: bool
) -> Tensor:
    if training and high - low > 1e-6:
        return grad * noise
    return aten.leaky_relu_backward(grad, x, (low + high) / 2, is_result)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    if beta == 1:
        return where(x > threshold, x, log1p(exp(x)))
    scaled = x * beta
    return where(scaled > threshold, x, log1p(exp(scaled)) / beta)


def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    scaled = x * beta
    return where(scaled > threshold, grad, grad * sigmoid(scaled))


def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    # A NaN is neither above nor below: it comes out of the product.
    return where(x > lambd, x - lambd, where(x < -lambd, x + lambd, x * 0))


def shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    if x.device.type == "cpu":
        return where((x < -lambd) | (x > lambd), grad, zero(grad))
    return where((x >= -lambd) & (x <= lambd), zero(grad), grad)


def hardtanh_backward(grad: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    x = widened(x)
    if x.device.type == "cpu":
        return where((x > low) & (x < high), grad, zero(grad))
    return where((x <= low) | (x >= high), zero(grad), grad)


def threshold(x: Tensor, bound: float, value: float) -> Any:
    if not x.dtype.is_floating_point:  # eager takes the bound in the dtype
        if type(bound) in SYMBOLIC:
            return NotImplemented
        bound = int(bound)
    return where(widened(x) <= bound, number(value, x), x)


def hardtanh(x: Tensor, low: float = -1, high: float = 1) -> Any:
    # Over integers the bounds are cut to integers first.
    return clamp(x, low, high) if x.dtype.is_floating_point else NotImplemented


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    half = x.shape[dim] // 2
    return x.narrow(dim, 0, half), x.narrow(dim, half, half)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = _halves(x, dim)
    return a * sigmoid(b)


def glu_backward(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    a, b = _halves(x, dim)
    s = sigmoid(b)
    first = grad * s
    return torch.cat([first, (1 - s) * first * a], dim)


def log_sigmoid(x: Tensor) -> Any:
    fading = exp(-torch.abs(x))
    out = clamp(x, max=0) - log1p(fading)
    # Only the CPU's kernel keeps the exponential for the gradient.
    return out, fading if x.device.type == "cpu" else x.new_empty(0)


def log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    fading = exp(-torch.abs(x))
    part = fading / (fading + 1)
    return grad * where(x < 0, 1 - part, part)


def logit(x: Tensor, eps: float | None = None) -> Any:
    if not x.dtype.is_floating_point:
        return NotImplemented
    z = x if eps is None else clamp(x, eps, 1 - eps)
    return torch.log(z / (1 - z))


def logit_backward(grad: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    inner = grad / (x * (1 - x))
    if eps is None:
        return where((x < 0) | (x > 1), number(math.nan, grad), inner)
    return where((x < eps) | (x > 1 - eps), zero(grad), inner)


WIDE: dict[str, Rule] = {
    "gelu": gelu,
    "gelu_backward": gelu_backward,
    "silu": lambda x: x * sigmoid(x),
    "silu_backward": silu_backward,
    "mish": lambda x: x * tanh(log1p(exp(x))),
    "mish_backward": mish_backward,
    "hardswish": lambda x: x * clamp(x + 3, 0, 6) / 6,
    "hardswish_backward": hardswish_backward,
    "hardsigmoid": lambda x: clamp(x + 3, 0, 6) / 6,
    "hardsigmoid_backward": lambda grad, x: where((x > -3) & (x < 3), grad * SIXTH, zero(grad)),
    "elu": lambda x, alpha=1, scale=1, input_scale=1: where(
        x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale)
    ),
    "elu_backward": elu_backward,
    "leaky_relu": lambda x, slope=0.01: where(x > 0, x, x * slope),
    "leaky_relu_backward": lambda grad, x, slope, is_result: where(x > 0, grad, grad * slope),
    "_prelu_kernel": lambda x, weight: where(x > 0, x, weight * x),
    "_prelu_kernel_backward": lambda grad, x, weight: (
        where(x > 0, grad, weight * grad), where(x > 0, zero(grad), x * grad)
    ),
    "softplus": softplus,
    "softplus_backward": softplus_backward,
    "softshrink": softshrink,
    "glu": glu,
    "glu_backward": glu_backward,
    "log_sigmoid_forward": log_sigmoid,
    "log_sigmoid_backward": log_sigmoid_backward,
    "sigmoid_backward": lambda grad, y: grad * (1 - y) * y,
    "tanh_backward": lambda grad, y: grad * (1 - y * y),
    "logit": logit,
    "logit_backward": logit_backward,
}  # fmt: skip
#: Those that round nothing but their result; halves are compared with numbers as halves, or are widened.
PLAIN: dict[str, Rule] = {
    "rrelu_with_noise_backward": rrelu_backward,
    "hardshrink": lambda x, lambd=0.5: where((x >= -lambd) & (x <= lambd), zero(x), x),
    "hardshrink_backward softshrink_backward": shrink_backward,
    "threshold": threshold,
    "threshold_backward": lambda grad, x, bound: where(widened(x) <= bound, zero(grad), grad),
    "hardtanh": hardtanh,
    "hardtanh_backward": hardtanh_backward,
}
expansions(WIDE, in_wide)
expansions(PLAIN)
