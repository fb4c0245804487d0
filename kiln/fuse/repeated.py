"""Elements repeated a whole number of times, and their sums: for loop nests.

Neighbours at whole factors are reads at quotients of loops; the gradients of windows that do not overlap are
too, and the gradients of repeated elements are sums of windows. Eager's kernels add scattered elements one by
one; where windows overlap or factors are no whole numbers that is left to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kiln.fuse.windows import pair
from kiln.ops.table import aten

REALS = (torch.float32, torch.float64)
IN_VECTORS = (2, 4, 8)  # repeats that vectors are made of without reading elements one by one


def repeated(x: torch.Tensor, factors: tuple[int, ...]) -> torch.Tensor:
    """Each element of the last dimensions as often as these say, side by side."""
    for i, factor in enumerate(factors):
        dim = x.dim() - len(factors) + i
        places = torch.arange(x.shape[dim] * factor, device=x.device)
        x = aten.index(x, [None] * dim + [torch.div(places, factor, rounding_mode="floor")])
    return x


def factors_of(large: Any, small: Any) -> tuple[int, ...] | None:
    """How many times each of some sizes goes into another; None where that is no whole number."""
    if any(type(n) is not int or n < 1 for n in (*large, *small)):
        return None
    if any(n % m for n, m in zip(large, small, strict=True)):
        return None
    return tuple([n // m for n, m in zip(large, small, strict=True)])


def nearest_backward(grad: torch.Tensor, sizes: Any, shape: Any, *scales: Any) -> Any:
    """The gradients of all that an element was repeated to, summed."""
    inner = list(shape)[2:]
    factors = factors_of(sizes, inner)
    if factors is None or grad.dtype not in REALS or not grad.is_contiguous() or 0 in shape:
        return NotImplemented
    if any(s is not None and s > 0 and s != f for s, f in zip(scales, factors, strict=False)):
        return NotImplemented
    split = [n for size, factor in zip(inner, factors, strict=True) for n in (size, factor)]
    windows = grad.view(*shape[:2], *split)
    return windows.sum([3 + 2 * d for d in range(len(inner))])


def _windows(x: torch.Tensor, kernel: Any, stride: Any, padding: Any) -> tuple[int, int] | None:
    """The sides of windows that cover all of the last two dimensions once; None for others."""
    sides = pair(kernel)
    if sides is None or pair(stride if stride else kernel) != sides or pair(padding) != (0, 0):
        return None
    if x.dtype not in REALS or not x.is_contiguous() or 0 in x.shape:
        return None
    last = x.shape[-2:]
    if any(type(n) is not int for n in x.shape) or any(n % k for n, k in zip(last, sides, strict=True)):
        return None
    return sides


def avg_pool_backward(
    grad: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: Any,
) -> Any:  # fmt: skip
    sides = _windows(x, kernel, stride, padding)
    if sides is None or not grad.is_contiguous():
        return NotImplemented
    return repeated(grad / float(divisor_override or math.prod(sides)), sides)


def max_pool_backward(
    grad: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool, indices: torch.Tensor,
) -> Any:  # fmt: skip
    sides = _windows(x, kernel, stride, padding)
    if sides is None or pair(dilation) != (1, 1) or not grad.is_contiguous() or not indices.is_contiguous():
        return NotImplemented
    if sides[1] not in IN_VECTORS:
        return NotImplemented
    places = torch.arange(math.prod(x.shape[-2:]), device=x.device).view(x.shape[-2:])
    chosen = repeated(indices, sides) == places
    return torch.where(chosen, repeated(grad, sides), torch.zeros((), dtype=x.dtype, device=x.device))


REPEATED: dict[Any, Callable[..., Any]] = {
    aten.upsample_nearest1d_backward.default: nearest_backward,
    aten.upsample_nearest2d_backward.default: nearest_backward,
    aten.avg_pool2d_backward.default: avg_pool_backward,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
}
