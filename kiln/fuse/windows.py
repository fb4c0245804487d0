"""Pooling for loop nests: windows are views, what they give is folded over them.

Largest values and means of windows are several times faster this way than eager's kernels, which go through
them element by element. The gradient of the largest asks, for each place, which of the windows around it
chose it; that of a mean adds what the windows around it share out, one dimension after the other. Left to
eager's kernels: the largest of three dimensions; half types, whose sums eager rounds in ways of its own;
channels that lie together, where eager's kernels run in vectors. On a GPU sums are of float32 and its kernels
read nothing in vectors: means of all types and layouts are loops there.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from typing import Any

import torch

from kiln.ops.expansions.support import widened
from kiln.ops.reductions import pooled_place
from kiln.ops.sizes import pooled
from kiln.ops.table import aten

DEVICES = frozenset({"cuda"})
FEW = 16  # places of a window that are added one by one; twice as many where sizes vary
ASKED = 4  # windows that a place is compared with; of more, eager's kernel is faster
IN_VECTORS = (1, 2, 4, 8)  # strides at which vectors are read without taking elements one by one


def sides(value: Any, rank: int) -> list[int] | None:
    """As many numbers as dimensions, of one or all."""
    given = [value] if isinstance(value, int) else list(value)
    if not all(type(n) is int for n in given) or len(given) not in (1, rank):
        return None
    return given * rank if len(given) == 1 else given


class Windows:
    """The windows of the last dimensions, by the sizes of kernel, stride, padding and dilation."""

    def __init__(
        self, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool,
        any_type: bool = False, rank: int = 2,
    ) -> None:  # fmt: skip
        given = [sides(v, rank) for v in (kernel, stride if stride else kernel, padding, dilation)]
        self.known = x.dim() - rank in (1, 2) and None not in given
        # Of sizes that vary the last window ends where it does by its floor.
        self.fixed = all(type(n) is int for n in x.shape[-rank:])
        self.known = self.known and (self.fixed or not ceil)
        plain = x.dtype in (torch.float32, torch.float64) and x.is_contiguous()
        self.known = self.known and (plain or any_type and x.is_floating_point())
        self.known = self.known and 0 not in x.shape
        if not self.known:
            return
        self.x, self.ceil, self.rank = x, ceil, rank
        self.kernel, self.stride, self.padding, self.dilation = (side for side in given if side is not None)
        (size,) = pooled(x, self.kernel, self.stride, self.padding, self.dilation, ceil)
        self.size, self.out = x.shape[-rank:], size[-rank:]

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
        return self.along(dim, places)

    def along(self, dim: int, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers for the places of one dimension."""
        return numbers.view([-1, *[1] * (self.rank - 1 - dim)])

    def seen(self, fill: float) -> torch.Tensor:
        """The elements of the windows as last dimensions, with one number in the padding."""
        borders: list[int] = []
        for d in reversed(range(self.rank)):
            after = self.padding[d]
            if self.fixed:
                needed = (self.out[d] - 1) * self.stride[d] + self.reach(d)
                after = max(needed - self.padding[d] - self.size[d], 0)
            borders += [self.padding[d], after]
        seen = aten.constant_pad_nd(self.x, borders, fill) if any(borders) else self.x
        for d in range(self.rank):
            dim = self.x.dim() - self.rank + d
            seen = aten.unfold(seen, dim, self.reach(d), self.stride[d])
            seen = aten.slice(seen, -1, 0, self.reach(d), self.dilation[d])
            seen = aten.slice(seen, dim, 0, self.out[d])
        return seen

    def values(self, fill: float) -> torch.Tensor:
        """The elements of the windows as a last dimension, with one number in the padding."""
        seen = self.seen(fill)
        return seen.reshape([*seen.shape[: -self.rank], math.prod(self.kernel)])


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
    rank: int, x: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Any = None,
) -> Any:  # fmt: skip
    most = FEW if all(type(n) is int for n in x.shape[-rank:]) else 2 * FEW
    few = math.prod(sides(kernel, rank) or [most + 1]) <= most
    windows = Windows(x, kernel, stride, padding, 1, ceil_mode, few and x.device.type in DEVICES, rank)
    if not windows.known:
        return NotImplemented
    if few:  # one after the other, as eager adds them: what cancels shows the order
        parts = [windows.seen(0.0)]
        for d in reversed(range(rank)):
            parts = [one for part in parts for one in part.unbind(-1 - d)]
        total = functools.reduce(torch.add, [widened(part) for part in parts])
    else:
        total = widened(windows.values(0.0)).sum(-1)
    return (total / _count(windows, count_include_pad, divisor_override, total.dtype)).to(x.dtype)


def avg_pool_backward(
    rank: int, grad: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor: Any,
) -> Any:  # fmt: skip
    """For each place the shares of the windows that it is in, one dimension after the other."""
    windows = Windows(x, kernel, stride, padding, 1, ceil_mode, x.device.type in DEVICES, rank)
    if not windows.known:
        return NotImplemented
    share = widened(grad)
    share = share / _count(windows, count_include_pad, divisor, share.dtype)
    for d in reversed(range(rank)):
        share = _at_places(windows, d, share)
    return share.to(grad.dtype)


def _at_places(windows: Windows, d: int, share: torch.Tensor) -> torch.Tensor:
    """What windows have, at each of their places along a dimension, added from the first window on."""
    size, kernel, stride, padding = (
        one[d] for one in (windows.size, windows.kernel, windows.stride, windows.padding)
    )
    if kernel == stride == 1 and not padding:
        return share
    many, dim = -(-kernel // stride), share.dim() - windows.rank + d
    before = max(many - 1 - padding // stride, 0)
    after = max(-(-(kernel - padding + stride - 1) // stride) - 1, 0)
    if type(size) is int:
        after = max(-(-(size + padding) // stride) - windows.out[d], 0)
    if before or after:
        share = aten.constant_pad_nd(share, [0, 0] * (windows.rank - 1 - d) + [before, after])
    if stride > 1:
        shape = list(share.shape)
        turns = share.unsqueeze(dim + 1).expand([*shape[: dim + 1], stride, *shape[dim + 1 :]])
        turns = aten.clone(turns, memory_format=torch.contiguous_format)
        share = turns.view([*shape[:dim], shape[dim] * stride, *shape[dim + 1 :]])
    starts = [padding + (before - j) * stride for j in reversed(range(many))]
    parts = [aten.slice(share, dim, start, start + size) for start in starts]
    if kernel % stride:
        places = torch.arange(size, device=share.device) + padding
        within = windows.along(d, places % stride < kernel % stride)
        parts[0] = torch.where(within, parts[0], torch.zeros((), dtype=share.dtype, device=share.device))
    return functools.reduce(torch.add, parts)


def _count(windows: Windows, padded: bool, divisor: Any, dtype: torch.dtype) -> Any:
    """By what the sums of windows are divided: one number, or one for each window."""
    counts = [_counted(windows, d, padded) for d in range(windows.rank)]
    count = divisor or functools.reduce(operator.mul, counts)
    return count.to(dtype) if isinstance(count, torch.Tensor) else float(count)


def _counted(windows: Windows, dim: int, padded: bool) -> Any:
    """How many places of a window along a dimension count: one number, or one for each window."""
    size, padding, kernel = windows.size[dim], windows.padding[dim], windows.kernel[dim]
    border = padding if padded else 0
    last = (windows.out[dim] - 1) * windows.stride[dim] + kernel
    if border == padding and (not windows.ceil or last <= size + padding + border):
        return kernel
    starts = windows.starts(dim)
    return (starts + kernel).clamp(max=size + border) - starts.clamp(min=-border)
