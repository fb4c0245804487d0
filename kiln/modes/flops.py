"""Floating-point operations of aten ops: a multiplication and an addition count as two."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

aten = torch.ops.aten

#: From an overload to what counts the operations of one call: `(args, kwargs, result) -> int`.
FLOPS: dict[Any, Callable[[Any, Any, Any], Any]] = {}


def counts(*overloads: str) -> Callable[[Any], Any]:
    """Declare the decorated function as the counter of overloads; those that torch lacks are left out."""

    def declare(function: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        for overload in overloads:
            name, _, variant = overload.partition(".")
            packet = getattr(aten, name, None)
            if packet is not None:
                FLOPS[getattr(packet, variant or "default")] = function
        return function

    return declare


def _product(place: int) -> Callable[[Any, Any, Any], Any]:
    """What counts a product whose left factor is the argument at this place."""
    return lambda args, kwargs, out: 2 * out.numel() * args[place].shape[-1]


counts("mm", "bmm", "_int_mm", "_scaled_mm", "mm.dtype", "bmm.dtype", "mv", "dot", "vdot")(_product(0))
counts("addmm", "baddbmm", "addmm.dtype", "baddbmm.dtype", "addmm_", "baddbmm_", "addmv", "_addmm_activation",
       "linear")(_product(1))  # fmt: skip


def _conv(x: Any, weight: Any, out: Any, transposed: bool) -> Any:
    """Every element of the weight meets every place of the side on which it stands: input or output."""
    side = x if transposed else out
    return 2 * int(weight.numel()) * int(side.shape[0]) * prod(side.shape[2:])


@counts("convolution", "_convolution")
def _convolution(args: Any, kwargs: Any, out: Any) -> Any:
    return _conv(args[0], args[1], out, args[6])


@counts("convolution_backward")
def _convolution_backward(args: Any, kwargs: Any, out: Any) -> Any:
    grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    return _conv(x, weight, grad, transposed) * (int(mask[0]) + int(mask[1]))


def attention(query: Any, key: Any, value: Any, scores: int = 1, values: int = 1) -> Any:
    """So many products of the scores' kind and of the values': masks do not make it less than it is."""
    *batch, rows, width = query.shape
    return 2 * prod(batch) * rows * key.shape[-2] * (scores * width + values * value.shape[-1])


FORWARD_ATTENTION = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math",
)  # fmt: skip


@counts(*FORWARD_ATTENTION)
def _attention(args: Any, kwargs: Any, out: Any) -> Any:
    return attention(*args[:3])


@counts(*[f"{name}_backward" for name in FORWARD_ATTENTION])
def _attention_backward(args: Any, kwargs: Any, out: Any) -> Any:
    """The scores again, then the gradients of the scores, of values, of queries and of keys."""
    query, key, value = args[1:4]
    return attention(query, key, value, scores=3, values=2)


@counts("linear_backward")
def _linear_backward(args: Any, kwargs: Any, out: Any) -> Any:
    grad, weight, mask = args[1], args[2], args[3]
    return 2 * (grad.numel() // weight.shape[0]) * weight.numel() * (int(mask[0]) + int(mask[1]))
