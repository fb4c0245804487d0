"""Resampling along one dimension after the other: each result is a weighted sum of neighbours.

Linear and cubic interpolation, averages of windows of several sizes and nearest neighbours are matrices with
few entries a row, one matrix for each dimension; their gradients are the transposed ones. What eager's
kernels add to scattered places is gathered here, so that results are computed once each, in any order. The
entries are known when a graph is compiled: where they start in a row and what they weigh are constants.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from kiln.base.dataclass import dataclass
from kiln.fuse.windows import FEW, IN_VECTORS, avg_pool_backward, sides
from kiln.ops.expansions.reductions import adaptive_avg_pool, spread
from kiln.ops.expansions.support import widened
from kiln.ops.layout import FLOATS
from kiln.ops.table import aten, declare

Array = np.ndarray[Any, Any]
Given: TypeAlias = "torch.Tensor | None"
#: Results a neighbour has, and neighbours from one result to the next, that vectors are made of in one piece.
REGULAR = {(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (3, 1), (4, 1)}
#: Neighbours of one result at most.
MOST = 64


@dataclass(frozen=True, slots=True)
class Entries:
    """A matrix: rows, columns and weights of its entries; equal places are added."""

    shape: tuple[int, int]
    rows: Array
    columns: Array
    weights: Array

    def transposed(self) -> Entries:
        return Entries((self.shape[1], self.shape[0]), self.columns, self.rows, self.weights)

    def first(self) -> Array:
        """The first column of each row; the last of all where a row has none."""
        found = np.full(self.shape[0], self.shape[1] - 1)
        np.minimum.at(found, self.rows, self.columns)
        return found

    def longest(self, first: Array) -> int:
        """How many columns a row takes at most, from its first one on."""
        return int((self.columns - first[self.rows]).max()) + 1

    def block(self) -> int:
        """How many columns each row adds up, one after the other; 0 for other matrices."""
        count = self.shape[1] // self.shape[0]
        whole = count * self.shape[0] == self.shape[1] == len(self.rows)
        whole = whole and bool((self.columns // count == self.rows).all())
        return count if whole and np.ptp(self.weights) == 0 else 0

    def table(self, first: Array, count: int) -> Array:
        """The weights of `count` columns from the first ones on, by column; NaN where there is no entry."""
        found = np.full((count, self.shape[0]), np.nan, self.weights.dtype)
        places = self.columns - first[self.rows], self.rows
        found[places] = 0
        np.add.at(found, places, self.weights)
        return found

    def mixed(self) -> tuple[Array, Array]:
        """Places that have entries of several signs, 0 being one."""
        keys, where = np.unique(self.rows * self.shape[1] + self.columns, return_inverse=True)
        low, high = np.ones(len(keys)), -np.ones(len(keys))
        np.minimum.at(low, where, np.sign(self.weights))
        np.maximum.at(high, where, np.sign(self.weights))
        return np.divmod(keys[low < high], self.shape[1])


def apply(x: torch.Tensor, dim: int, matrix: Entries) -> torch.Tensor:
    """A dimension resampled."""
    if times := matrix.transposed().block():
        places = torch.arange(matrix.shape[0], device=x.device)
        places = torch.div(places, times, rounding_mode="floor") if times > 1 else places
        return _scaled(aten.index(x, [None] * dim + [places]), float(matrix.weights[0]))
    first = matrix.first()
    count = matrix.longest(first)
    regular = steps_of(matrix, first) if x.stride(dim) == 1 else None
    if regular is not None:
        x, count, places, first = in_steps(x, dim, matrix, first, *regular)
    else:
        first = np.minimum(first, matrix.shape[1] - count)
        places = torch.from_numpy(first)
    table = matrix.table(first, count)
    windows, along = aten.unfold(x, dim, count, 1), [-1, *[1] * (x.dim() - 1 - dim)]
    if count > FEW:
        weights = _weights(table.T, [*along, count], x.dtype)
        return _weighted(aten.index(windows, [None] * dim + [places]), *weights).sum(-1)
    taps = [_weights(table[k], along, x.dtype) for k in range(count)]
    parts = [
        _weighted(aten.index(aten.select(windows, -1, k), [None] * dim + [places]), *taps[k])
        for k in range(count)
    ]
    return functools.reduce(torch.add, parts)


def spoilt(out: torch.Tensor, x: torch.Tensor, dim: int, matrix: Entries) -> torch.Tensor:
    """A dimension resampled, NaN where eager adds an infinite element by weights that cancel or are 0."""
    rows, columns = matrix.mixed()
    if len(rows) == matrix.shape[0] == matrix.shape[1]:  # each element twice, once with the weight 0
        return out + x * 0
    by_row = len({*rows.tolist()}) < len({*columns.tolist()})
    fixed, others = (rows, columns) if by_row else (columns, rows)
    # Beyond the ends, elements repeat.
    for end in {*fixed.tolist()} & {0, matrix.shape[0 if by_row else 1] - 1}:
        found = others[fixed == end]
        here = np.isin(np.arange(matrix.shape[0]), end if by_row else found)
        mask = torch.from_numpy(here).view([-1, *[1] * (x.dim() - 1 - dim)])
        if by_row:
            read = aten.index(x, [None] * dim + [torch.from_numpy(found)])
            nothing = (read * 0).sum(dim, keepdim=True)
        else:
            nothing = x.narrow(dim, end, 1) * 0
        out = torch.where(mask, out + nothing, out)
    return out


def _weights(table: Array, shape: list[int], dtype: torch.dtype) -> tuple[Given, Given]:
    """Weights, unless all are 1, and where there are entries, unless everywhere.

    They come before the values they are for: what is made of these goes on in the same loops.
    """
    absent = np.isnan(table)
    weights = torch.from_numpy(np.ascontiguousarray(table)).view(shape).to(dtype)
    present = weights == weights if absent.any() else None
    return None if (absent | (table == 1)).all() else weights, present


def _weighted(values: torch.Tensor, weights: Given, present: Given) -> torch.Tensor:
    """Values times weights; what has no entry is left out, as it may be infinite."""
    found = values if weights is None else values * weights
    return found if present is None else torch.where(present, found, torch.zeros((), dtype=values.dtype))


def steps_of(matrix: Entries, first: Array) -> tuple[int, int] | None:
    """By how much columns move on from row to row, a fraction that vectors are read by; None for others."""
    shared = math.gcd(*matrix.shape)
    step = matrix.shape[1] // shared, matrix.shape[0] // shared
    if step not in REGULAR:
        return None
    low = (first - np.arange(matrix.shape[0]) * step[0] // step[1])[np.unique(matrix.rows)]
    return step if int(low.max() - low.min()) <= 1 else None


def in_steps(
    x: torch.Tensor, dim: int, matrix: Entries, first: Array, up: int, down: int
) -> tuple[torch.Tensor, int, torch.Tensor, Array]:
    """Neighbours that start at a multiple or a quotient of the place, in what is padded for that."""
    turns = np.arange(matrix.shape[0]) * up // down
    start = int((first - turns)[np.unique(matrix.rows)].min())
    count = matrix.longest(turns + start)
    before, after = max(-start, 0), max(int(turns[-1]) + start + count - matrix.shape[1], 0)
    if before or after:
        x = aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [before, after])
    places = torch.arange(matrix.shape[0]) * up
    places = torch.div(places, down, rounding_mode="floor") if down > 1 else places
    return x, count, places + (start + before), turns + start


def resampled(x: torch.Tensor, matrices: Sequence[Entries]) -> Any:
    """The last dimensions resampled: those that shrink first, then the last one, whose reads cost most."""
    if x.dtype not in FLOATS or any(m.longest(m.first()) > MOST for m in matrices):
        return NotImplemented
    first = x.dim() - len(matrices)
    last = first == 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()
    out = widened(x.movedim(1, -1) if last else x)
    first -= last
    blocks = [matrix.block() for matrix in matrices]
    if all(blocks) and out.is_contiguous():
        out = _sums(out, first, blocks, math.prod([float(m.weights[0]) for m in matrices]))
    elif x.device.type == "cpu" or all(m.transposed().block() for m in matrices):
        *others, inner = [(first + i, matrix) for i, matrix in enumerate(matrices)]
        shrinks = [d for d in others if d[1].shape[0] < d[1].shape[1]]
        for dim, matrix in (*shrinks, inner, *[d for d in reversed(others) if d not in shrinks]):
            out = spoilt(apply(out, dim, matrix), out, dim, matrix)
    else:
        return NotImplemented  # tables lie in the memory of the processor
    out = out.to(x.dtype)
    return out.movedim(-1, 1) if last else out


def _sums(x: torch.Tensor, first: int, blocks: list[int], weight: float) -> torch.Tensor:
    """Sums of blocks that lie side by side, in one pass."""
    shape = list(x.shape)
    inner = [n for size, count in zip(shape[first:], blocks, strict=False) for n in (size // count, count)]
    apart = x.view(shape[:first] + inner + shape[first + len(blocks) :])
    return _scaled(apart.sum([first + 1 + 2 * i for i in range(len(blocks))]), weight)


def _scaled(x: torch.Tensor, weight: float) -> torch.Tensor:
    return x if weight == 1 else x * weight


# The matrices


def places_of(size: int, out: int, corners: bool, scale: float | None, dtype: Any, cubic: bool) -> Any:
    """Where results lie among the elements, computed as eager does: in float32 for float32."""
    turns = np.arange(out).astype(dtype)
    if corners:
        return turns * dtype((size - 1) / dtype(out - 1) if out > 1 else 0)
    step = dtype(1.0 / scale) if scale is not None and scale > 0 else dtype(size) / dtype(out)
    half = dtype(0.5)
    # Eager's compiler joins the product and the difference in one rounding.
    found = ((turns + half).astype(np.longdouble) * step - 0.5).astype(dtype)
    return found if cubic else np.maximum(found, dtype(0))


def linear(size: int, out: int, corners: bool, scale: float | None, dtype: Any) -> Entries:
    places = places_of(size, out, corners, scale, dtype, False)
    first = np.minimum(np.floor(places).astype(np.int64), size - 1)
    share = np.clip(places - first.astype(dtype), dtype(0), dtype(1))
    second = first if size == out else np.minimum(first + 1, size - 1)
    return _entries(size, out, [first, second], [dtype(1) - share, share])


def cubic(size: int, out: int, corners: bool, scale: float | None, dtype: Any) -> Entries:
    places = places_of(size, out, corners, scale, dtype, True)
    first = np.minimum(np.floor(places).astype(np.int64), size - 1)
    t = np.clip(places - first.astype(dtype), dtype(0), dtype(1))
    a = dtype(-0.75)

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    columns = [np.clip(first + k, 0, size - 1) for k in range(-1, 3)]
    return _entries(size, out, columns, [far(t + 1), near(t), near(1 - t), far(2 - t)])


def nearest(size: int, out: int, exact: bool, scale: float | None) -> Entries:
    step = np.float32(1.0 / scale) if scale is not None and scale > 0 else np.float32(size) / np.float32(out)
    places = np.floor((np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0)) * step)
    return _entries(size, out, [np.minimum(places.astype(np.int64), size - 1)], [np.ones(out, np.float32)])


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows along a dimension: where they start and end, and how many places of each count."""

    size: int
    starts: Array
    ends: Array
    counts: Array

    @classmethod
    def sliding(cls, size: int, out: int, kernel: int, step: int, padding: int, padded: bool) -> Windows:
        starts = np.arange(out) * step - padding
        ends = np.minimum(starts + kernel, size + padding)
        inside = np.maximum(starts, 0), np.minimum(ends, size)
        return cls(size, *inside, ends - starts if padded else inside[1] - inside[0])

    @classmethod
    def adaptive(cls, size: int, out: int) -> Windows:
        turns = np.arange(out)
        starts, ends = turns * size // out, -(-(turns + 1) * size // out)
        return cls(size, starts, ends, ends - starts)

    def sums(self, weights: Array) -> Entries:
        """The sums of the windows, each times its weight."""
        lengths = self.ends - self.starts
        rows = np.repeat(np.arange(len(lengths)), lengths)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return Entries((len(lengths), self.size), rows, self.starts[rows] + within, weights[rows])


def _entries(size: int, out: int, columns: list[Array], weights: list[Array]) -> Entries:
    rows = np.tile(np.arange(out), len(columns))
    return Entries((out, size), rows, np.concatenate(columns), np.concatenate(weights))


# The ops


def _known(*sizes: Any) -> bool:
    return all(type(n) is int and n > 0 for size in sizes for n in size)


def _interpolating(kind: Callable[..., Entries]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An interpolation and its gradient."""

    def matrices(x: torch.Tensor, sizes: Any, out: Any, corners: bool, scales: tuple[Any, ...]) -> Any:
        dtype = np.float64 if x.dtype is torch.float64 else np.float32
        given = zip(sizes, out, scales + (None,) * (len(out) - len(scales)), strict=True)
        return [kind(n, m, corners, scale, dtype) for n, m, scale in given]

    def forward(x: torch.Tensor, sizes: Any, corners: bool, *scales: Any) -> Any:
        if not _known(x.shape, sizes):
            return NotImplemented
        return resampled(x, matrices(x, x.shape[2:], sizes, corners, scales))

    def backward(grad: torch.Tensor, sizes: Any, shape: Any, corners: bool, *scales: Any) -> Any:
        if not _known(grad.shape, shape):
            return NotImplemented
        if kind is cubic and grad.shape == tuple(shape):
            return grad.clone()  # eager's forward adds neighbours by weights of 0, its gradient does not
        return resampled(grad, [m.transposed() for m in matrices(grad, shape[2:], sizes, corners, scales)])

    return forward, backward


def nearest_backward(exact: bool) -> Callable[..., Any]:
    def backward(grad: torch.Tensor, sizes: Any, shape: Any, *scales: Any) -> Any:
        if not _known(grad.shape, shape):
            return NotImplemented
        given = zip(shape[2:], sizes, scales + (None,) * (len(sizes) - len(scales)), strict=True)
        return resampled(grad, [nearest(n, m, exact, scale).transposed() for n, m, scale in given])

    return backward


def average_forward(x: torch.Tensor, sizes: Any) -> Any:
    """Means of windows that fill the result."""
    if all(n == 1 for n in sizes) or 0 in x.shape:
        return adaptive_avg_pool(x, sizes)
    if not _known(x.shape[-len(sizes) :], sizes):
        return NotImplemented
    windows = [Windows.adaptive(n, m) for n, m in zip(x.shape[-len(sizes) :], sizes, strict=True)]
    return resampled(x, [w.sums(1 / w.counts) for w in windows])


def average_backward(rank: int, grad: torch.Tensor, x: torch.Tensor) -> Any:
    if all(n == 1 for n in grad.shape[-rank:]) or 0 in x.shape:
        return spread(grad, x, rank)
    if not _known(x.shape[-rank:], grad.shape[-rank:]):
        return NotImplemented
    sizes = zip(x.shape[-rank:], grad.shape[-rank:], strict=True)
    return _shared_out(grad, [Windows.adaptive(n, m) for n, m in sizes])


def pool_backward(
    grad: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor: Any,
) -> Any:  # fmt: skip
    numbers = sides(kernel, 2), sides(stride if stride else kernel, 2), sides(padding, 2)
    if None in numbers or 0 in x.shape:
        return NotImplemented
    apart = numbers[0] == numbers[1] and numbers[2] == [0, 0] and numbers[0][1] not in IN_VECTORS  # type: ignore[index]
    if apart or not _known(x.shape[-2:], grad.shape[-2:]):
        return avg_pool_backward(2, grad, x, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
    given = zip(x.shape[-2:], grad.shape[-2:], *numbers, strict=True)  # type: ignore[arg-type]
    return _shared_out(grad, [Windows.sliding(*each, count_include_pad) for each in given], divisor)


def _shared_out(grad: torch.Tensor, windows: list[Windows], divisor: Any = None) -> Any:
    """The gradient of a window's mean, at each of its places."""
    if divisor is None and any(len({*w.counts.tolist()}) > 1 for w in windows):
        return resampled(grad, [w.sums(1 / w.counts).transposed() for w in windows])
    divisor = divisor or math.prod([int(w.counts[0]) for w in windows])
    sums = [w.sums(np.ones(len(w.counts))).transposed() for w in windows]
    out = resampled(widened(grad) / float(divisor), sums)
    return out if out is NotImplemented else out.to(grad.dtype)


linear_forward, linear_backward = _interpolating(linear)
cubic_forward, cubic_backward = _interpolating(cubic)

TAPS: dict[Any, Callable[..., Any]] = {}
declare(TAPS, {
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d": linear_forward,
    "upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward": linear_backward,
    "upsample_bicubic2d": cubic_forward,
    "upsample_bicubic2d_backward": cubic_backward,
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward":
        nearest_backward(False),
    "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward "
    "_upsample_nearest_exact3d_backward": nearest_backward(True),
    "_adaptive_avg_pool2d _adaptive_avg_pool3d": average_forward,
    "_adaptive_avg_pool2d_backward": functools.partial(average_backward, 2),
    "_adaptive_avg_pool3d_backward": functools.partial(average_backward, 3),
    "avg_pool2d_backward": pool_backward,
})  # fmt: skip
