"""Pooling for loop nests: windows are views, what they give is folded over them.

Largest values and means of windows are several times faster this way than eager's kernels, which go through
them element by element. The gradient of the largest asks, for each place, which of the windows around it
chose it. Left to eager's kernels: three dimensions; half types, whose sums eager rounds in ways of its own;
channels that lie together, where eager's kernels run in vectors. On a GPU sums are of float32 and its kernels
read nothing in vectors: means of all types and layouts are loops there.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch

from kiln.ops.expansions.support import widened
from kiln.ops.reductions import pooled_place
from kiln.ops.sizes import pooled
from kiln.ops.table import aten

DEVICES = frozenset({"cuda"})
FEW = 16  # places of a window that are added one by one
ASKED = 4  # windows that a place is compared with; of more, eager's kernel is faster
IN_VECTORS = (1, 2, 4, 8)  # strides at which vectors are read without taking elements one by one


def pair(value: Any) -> tuple[int, int] | None:
    """Two numbers of one or two."""
    given = [value] if isinstance(value, int) else list(value)
    if not all(type(n) is int for n in given):
        return None
    return (given[0], given[-1]) if given else None


class Windows:
    """The windows of the last two dimensions, by the sizes of kernel, stride, padding and dilation."""

    def __init__(
        self, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool,
        any_type: bool = False,
    ) -> None:  # fmt: skip
        sides = [pair(kernel), pair(stride if stride else kernel), pair(padding), pair(dilation)]
        self.known = x.dim() in (3, 4) and None not in sides
        # Of sizes that vary the last window ends where it does by its floor.
        self.fixed = all(type(n) is int for n in x.shape[-2:])
        self.known = self.known and (self.fixed or not ceil)
        plain = x.dtype in (torch.float32, torch.float64) and x.is_contiguous()
        self.known = self.known and (plain or any_type and x.is_floating_point())
        self.known = self.known and 0 not in x.shape
        if not self.known:
            return
        self.x, self.ceil = x, ceil
        self.kernel, self.stride, self.padding, self.dilation = (side for side in sides if side is not None)
        (size,) = pooled(x, self.kernel, self.stride, self.padding, self.dilation, ceil)
        self.out = size[-2:]

    def reach(self, dim: int) -> int:
        """The places from the first to the last of a window."""
        return self.dilation[dim] * (self.kernel[dim] - 1) + 1

    def around(self, dim: int) -> range:
        """The windows that places may be of, counted from the quotient of the place and the stride."""
        stride, padding = self.stride[dim], self.padding[dim]
        return range(-((self.reach(dim) - 1 - padding) // stride), (stride - 1 + padding) // stride + 1)

    def starts(self, dim: int) -> torch.Tensor:
        """Where windows start; in the padding, before 0."""
        places = torch.arange(self.out[dim], device=self.x.device) * self.stride[dim] - self.padding[dim]
        return places.view([-1, 1][: 2 - dim]) if dim == 0 else places

    def seen(self, fill: float) -> torch.Tensor:
        """The elements of the windows as two last dimensions, with one number in the padding."""
        borders: list[int] = []
        for d in (1, 0):
            after = self.padding[d]
            if self.fixed:
                needed = (self.out[d] - 1) * self.stride[d] + self.reach(d)
                after = max(needed - self.padding[d] - self.x.shape[d - 2], 0)
            borders += [self.padding[d], after]
        seen = aten.constant_pad_nd(self.x, borders, fill) if any(borders) else self.x
        for d in (0, 1):
            seen = aten.unfold(seen, self.x.dim() - 2 + d, self.reach(d), self.stride[d])
            seen = aten.slice(seen, -1, 0, self.reach(d), self.dilation[d])
        return seen[..., : self.out[0], : self.out[1], :, :]

    def values(self, fill: float) -> torch.Tensor:
        """The elements of the windows as a last dimension, with one number in the padding."""
        seen = self.seen(fill)
        return seen.reshape([*seen.shape[:-2], math.prod(self.kernel)])


def max_pool(
    x: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:  # fmt: skip
    """The largest of each window and its place: of several NaN the last; on other devices the first."""
    windows = Windows(x, kernel, stride, padding, dilation, ceil_mode)
    if not windows.known:
        return NotImplemented
    values = windows.values(-math.inf)
    place = pooled_place(values, -1) if x.device.type == "cpu" else values.argmax(-1)
    within = place.to(torch.int32)
    width = windows.kernel[1]
    row, column = within // width, within % width
    row = (windows.starts(0) + row.to(torch.int64) * windows.dilation[0]).clamp(min=0)
    column = (windows.starts(1) + column.to(torch.int64) * windows.dilation[1]).clamp(min=0)
    return values.amax(-1), row * x.shape[-1] + column


def max_pool_backward(
    grad: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool, indices: torch.Tensor,
) -> Any:  # fmt: skip
    """For each place the gradients of the windows that chose it, added in eager's order."""
    windows = Windows(x, kernel, stride, padding, dilation, ceil_mode)
    if not (windows.known and windows.fixed and grad.is_contiguous() and indices.is_contiguous()):
        return NotImplemented
    around = [windows.around(d) for d in range(2)]
    most = ASKED if x.device.type == "cpu" else 1
    dense = all(step == 1 for step in windows.dilation)
    if len(around[0]) * len(around[1]) > most or windows.stride[1] not in IN_VECTORS or not dense:
        return NotImplemented
    borders: list[int] = []
    quotients: list[torch.Tensor] = []
    for d in (0, 1):
        size, stride, first = x.shape[d - 2], windows.stride[d], around[d][0]
        last = (size - 1) // stride + around[d][-1]
        borders = [max(-first, 0), max(last + 1 - windows.out[d], 0), *borders]
        turns = torch.arange(size, device=x.device)
        turns = torch.div(turns, stride, rounding_mode="floor") if stride > 1 else turns
        quotients.append(turns + borders[0])
    chosen = aten.constant_pad_nd(indices, borders, -1) if any(borders) else indices
    given = aten.constant_pad_nd(grad, borders) if any(borders) else grad
    places = torch.arange(x.shape[-2] * x.shape[-1], device=x.device).view(x.shape[-2:])
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    parts: list[torch.Tensor] = []
    for row, column in itertools.product(*around):
        at = [None] * (x.dim() - 2) + [(quotients[0] + row).view(-1, 1), quotients[1] + column]
        parts.append(torch.where(aten.index(chosen, at) == places, aten.index(given, at), zero))
    return functools.reduce(torch.add, parts)


def avg_pool(
    x: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Any = None,
) -> Any:  # fmt: skip
    dtype = x.dtype
    few = math.prod(pair(kernel) or [FEW + 1]) <= FEW
    windows = Windows(x, kernel, stride, padding, 1, ceil_mode, few and x.device.type in DEVICES)
    if not windows.known:
        return NotImplemented
    if few:  # one after the other, as eager adds them: what cancels shows the order
        total = functools.reduce(torch.add, [
            widened(part) for row in windows.seen(0.0).unbind(-2) for part in row.unbind(-1)
        ])  # fmt: skip
    else:
        total = widened(windows.values(0.0)).sum(-1)
    count: Any = divisor_override
    if not count:
        down, along = (_counted(windows, d, count_include_pad) for d in range(2))
        count = down * along
    return (total / (count.to(total.dtype) if isinstance(count, torch.Tensor) else float(count))).to(dtype)


def _counted(windows: Windows, dim: int, padded: bool) -> Any:
    """How many places of a window along a dimension count: one number, or one for each window."""
    size, padding, kernel = windows.x.shape[dim - 2], windows.padding[dim], windows.kernel[dim]
    border = padding if padded else 0
    last = (windows.out[dim] - 1) * windows.stride[dim] + kernel
    if border == padding and (not windows.ceil or last <= size + padding + border):
        return kernel
    starts = windows.starts(dim)
    return (starts + kernel).clamp(max=size + border) - starts.clamp(min=-border)
