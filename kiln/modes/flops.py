"""Floating-point operations of aten ops: a multiplication and an addition count as two."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from kiln.ops.table import aten, overload

Counter = Callable[[Any, Any], Any]


def _product(place: int) -> Counter:
    """What counts a product whose left factor is the argument at this place."""
    return lambda args, out: 2 * out.numel() * args[place].shape[-1]


def _conv(x: Any, weight: Any, out: Any, transposed: bool) -> Any:
    """Every element of the weight meets every place of the side on which it stands: input or output."""
    side = x if transposed else out
    return 2 * int(weight.numel()) * int(side.shape[0]) * prod(side.shape[2:])


def _convolution_backward(args: Any, out: Any) -> Any:
    grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    return _conv(x, weight, grad, transposed) * (int(mask[0]) + int(mask[1]))


def attention(query: Any, key: Any, value: Any, scores: int = 1, values: int = 1) -> Any:
    """So many products of the scores' kind and of the values': masks do not make it less than it is."""
    *batch, rows, width = query.shape
    return 2 * prod(batch) * rows * key.shape[-2] * (scores * width + values * value.shape[-1])


def _linear_backward(args: Any, out: Any) -> Any:
    grad, weight, mask = args[1], args[2], args[3]
    return 2 * (grad.numel() // weight.shape[0]) * weight.numel() * (int(mask[0]) + int(mask[1]))


ATTENTION = [f"_scaled_dot_product_{name}" for name in (
    "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
    "fused_attention_overrideable", "attention_math")]  # fmt: skip
COUNTERS: dict[str, Counter] = {
    "mm bmm _int_mm _scaled_mm mm.dtype bmm.dtype mv dot vdot": _product(0),
    "addmm baddbmm addmm.dtype baddbmm.dtype addmm_ baddbmm_ addmv _addmm_activation linear": _product(1),
    "convolution _convolution": lambda args, out: _conv(args[0], args[1], out, args[6]),
    "convolution_backward": _convolution_backward,
    " ".join(ATTENTION): lambda args, out: attention(*args[:3]),
    # The scores again, then the gradients of the scores, of values, of queries and of keys.
    " ".join(f"{name}_backward" for name in ATTENTION):
        lambda args, out: attention(args[1], args[2], args[3], 3, 2),
    "linear_backward": _linear_backward,
}  # fmt: skip
#: From an overload to what counts the operations of one call; those that torch lacks are left out.
FLOPS: dict[Any, Counter] = {
    overload(name): counter
    for names, counter in COUNTERS.items()
    for name in names.split()
    if hasattr(aten, name.partition(".")[0])
}
