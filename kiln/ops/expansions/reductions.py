"""Expansions of reductions: means, variances, norms, extremes, softmax."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kiln.ops.expansions.support import HALF, dims_of, extent, in_wide, number, wide, widened, zero
from kiln.ops.layout import COMPLEX, FLOATS, INEXACT
from kiln.ops.table import Rule, aten, expansion, expansions


def _gathered(x: Tensor, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """The dtype in which a sum or product of `x` is taken, and that of the result.

    Integers are added in 64 bits; half types, which a primitive adds in float32, are rounded last.
    """
    end = dtype or (x.dtype if x.dtype in INEXACT else torch.int64)
    if end in INEXACT:
        return end if x.dtype is end else wide(end), end
    return torch.int64, end


def _alone(x: Tensor) -> Tensor:
    """The sum of one number: of -0.0 it is 0.0, since sums start there."""
    return x + zero(x)


@expansion(aten.sum.default, aten.sum.dim_IntList, complex_too=True)
def total(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """At level prims: a sum is of its operand's dtype, and names its dimensions."""
    start, end = _gathered(x, dtype)
    if end is torch.bool or (dims and dtype is None and x.dtype is start):
        return NotImplemented
    if not x.dim():
        return _alone(x.to(end)) if end in INEXACT else x.to(end).clone()
    return torch.sum(x.to(start), dims_of(dims, x.dim()), keepdim).to(end)


def _of_own_dtype(fold: Rule, x: Tensor, *dims: Any, dtype: Any = None) -> Any:
    """A product or running sums; at level prims they are of their operand's dtype."""
    start, end = _gathered(x, dtype)
    if end is torch.bool or (dtype is None and x.dtype is start):
        return NotImplemented
    return fold(x.to(start), *dims).to(end)


product = partial(_of_own_dtype, torch.prod)
expansions({"prod prod.dim_int": product, "cumsum": partial(_of_own_dtype, torch.cumsum)}, complex_too=True)


def _truth(fold: Rule, x: Tensor, *dims: Any, **keep: Any) -> Any:
    """Whether some or all are true; at level prims the operand is bool."""
    if x.dtype is torch.bool:
        return NotImplemented
    out = fold(x != 0, *dims, **keep)
    return out.to(torch.uint8) if x.dtype is torch.uint8 else out


@expansion(aten.mean.default, aten.mean.dim)
def mean(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    wanted = dtype or x.dtype
    over = dims_of(dims, x.dim())
    summed = torch.sum(x.to(wide(wanted)), over, keepdim) if x.dim() else _alone(x.to(wide(wanted)))
    return (summed / extent(x, over)).to(wanted)


@expansion(aten.nansum.default)
def nansum(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    present = torch.where(torch.isnan(x), zero(x), x) if x.dtype in INEXACT else x
    return torch.sum(present, dims, keepdim, dtype=dtype)


def _moments(x: Tensor, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    return torch.var_mean(x, dims, correction=1 if correction is None else correction, keepdim=keepdim)


def _or_none(x: Tensor, dims: Any, found: Tensor, keepdim: bool) -> Tensor:
    """A variance that is 0 for equal numbers, though their mean was rounded: its root's gradient asks."""
    if not x.numel() or x.dtype not in FLOATS:
        return found
    dims = [] if dims is None else dims
    same = torch.amax(x, dims, keepdim) - torch.amin(x, dims, keepdim) == 0
    return torch.where(same, found * 0, found)


def _deviation(x: Tensor, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    if x.device.type == "cpu" and x.dtype is torch.float32:  # a mean of float64 is that of equal floats
        spread, middle = _moments(x.to(torch.float64), dims, correction, keepdim)
        return torch.sqrt(spread).to(x.dtype), middle.to(x.dtype)
    spread, middle = _moments(x, dims, correction, keepdim)
    return torch.sqrt(_or_none(x, dims, spread, keepdim)), middle


def _with_place(x: Tensor, value: Any, place: Any, dim: int, keepdim: bool = False) -> Any:
    if not x.dim():
        return x.clone(), number(0, x, torch.int64)
    ordered = x.to(torch.uint8) if x.dtype is torch.bool else x
    return value(x, dim, keepdim), place(ordered, dim, keepdim)


@expansion(aten.aminmax.default)
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    over = dims_of(dim, x.dim())
    return torch.amin(x, over, keepdim), torch.amax(x, over, keepdim)


@expansion(aten.logsumexp.default)
@in_wide
def logsumexp(x: Tensor, dims: Any, keepdim: bool = False) -> Any:
    if x.dtype not in INEXACT or 0 in x.shape:
        return NotImplemented
    over = dims_of(dims, x.dim())
    largest = torch.amax(x, over, keepdim=True)
    shift = torch.where(torch.abs(largest) == math.inf, zero(x), largest)
    logs = torch.log(torch.sum(torch.exp(x - shift), over, keepdim)) if x.dim() else x - shift
    return logs + (shift if keepdim or not x.dim() else torch.squeeze(shift, over))


@expansion(aten.linalg_vector_norm.default)
def vector_norm(
    x: Tensor, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """A norm of elements; powers of large numbers overflow, as they do in eager."""
    wanted = dtype or x.dtype
    if x.dtype in COMPLEX or wanted in COMPLEX or wanted not in INEXACT or 0 in x.shape:
        return NotImplemented
    if not x.dim():
        return vector_norm(x.view(1), order, None, False, dtype=dtype)
    over = dims_of(dims, x.dim())
    return _norm(x.to(wide(wanted)), order, over, keepdim).to(wanted)


def _norm(x: Tensor, order: Any, over: list[int], keepdim: bool) -> Tensor:
    size = torch.abs(x)
    if order and all(x.shape[d] == 1 for d in over):
        return size if keepdim else torch.squeeze(size, over)  # no power is taken that could overflow
    if order == 2:
        return torch.sqrt(torch.sum(x * x, over, keepdim))
    if order == 1:
        return torch.sum(size, over, keepdim)
    if order == math.inf:
        return torch.amax(size, over, keepdim)
    if order == -math.inf:
        return torch.amin(size, over, keepdim)
    if order == 0:
        return torch.sum((x != 0).to(x.dtype), over, keepdim)
    return torch.pow(torch.sum(torch.pow(size, order), over, keepdim), 1 / order)


# Softmax


def _shifted(x: Tensor, dim: int) -> Tensor:
    return x - torch.amax(x, dim, keepdim=True)


@expansion(aten._softmax.default)
def softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    if 0 in x.shape or not x.dim():
        return NotImplemented
    powers = torch.exp(_shifted(widened(x), dim))
    return (powers / torch.sum(powers, dim, keepdim=True)).to(torch.float32 if half_to_float else x.dtype)


@expansion(aten._safe_softmax.default)
def safe_softmax(x: Tensor, dim: int, dtype: Any = None) -> Any:
    if 0 in x.shape or not x.dim():
        return NotImplemented
    hidden = torch.all(x == -math.inf, dim, keepdim=True)
    out = torch.softmax(torch.where(hidden, zero(x), x), dim, dtype=dtype)
    return torch.where(hidden, zero(out), out)


@expansion(aten._log_softmax.default)
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    if 0 in x.shape or not x.dim():
        return NotImplemented
    shifted = _shifted(widened(x), dim)
    out = shifted - torch.log(torch.sum(torch.exp(shifted), dim, keepdim=True))
    return out.to(torch.float32 if half_to_float else x.dtype)


@expansion(aten._softmax_backward_data.default)
def softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Any:
    if not y.dim():
        return NotImplemented
    y, grad = widened(y), widened(grad)
    return (y * (grad - torch.sum(grad * y, dim, keepdim=True))).to(dtype)


@expansion(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Any:
    if not y.dim():
        return NotImplemented
    grad = widened(grad)
    return (grad - torch.exp(widened(y)) * torch.sum(grad, dim, keepdim=True)).to(dtype)


@expansion(aten.renorm.default)
def renorm(x: Tensor, order: Any, dim: int, largest: Any) -> Any:
    if x.dtype in HALF or 0 in x.shape:
        return NotImplemented
    over = [d for d in range(x.dim()) if d != dim % x.dim()]
    norm = _norm(x, order, over, True)
    return x * torch.where(norm > largest, largest / (norm + 1e-7), number(1, norm))


# Means of windows that fill the output, where they are all of one size


def _windows(shape: Any, sizes: Any) -> list[int] | None:
    """The extents of the windows that cut the last dimensions of `shape` into `sizes` equal parts."""
    inner = list(shape[len(shape) - len(sizes) :])
    if 0 in shape or any(s == 0 or n % s for n, s in zip(inner, sizes)):
        return None
    return [n // s for n, s in zip(inner, sizes)]


@expansion(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(x: Tensor, sizes: list[int]) -> Any:
    windows = _windows(x.shape, sizes)
    if windows is None:
        return NotImplemented
    outer = x.dim() - len(sizes)
    if all(s == 1 for s in sizes):
        return torch.mean(x, list(range(outer, x.dim())), keepdim=True)
    apart = x.view([*x.shape[:outer], *[n for pair in zip(sizes, windows) for n in pair]])
    return torch.mean(apart, [outer + 1 + 2 * i for i in range(len(sizes))])


def spread(grad: Tensor, x: Tensor, inner: int) -> Any:
    """The gradient of means over windows of the last `inner` dimensions."""
    outer = x.dim() - inner
    sizes = list(grad.shape[outer:])
    windows = _windows(x.shape, sizes)
    if windows is None:
        return NotImplemented
    count = extent(x, list(range(outer, x.dim()))) // extent(grad, list(range(outer, x.dim())))
    each = (widened(grad) / count).to(grad.dtype)
    if all(s == 1 for s in sizes):
        return each.expand(x.shape)
    lead = list(x.shape[:outer])
    apart = each.view([*lead, *[n for s in sizes for n in (s, 1)]])
    return apart.expand([*lead, *[n for pair in zip(sizes, windows) for n in pair]]).reshape(x.shape)


ONE_LINERS: dict[str, Rule] = {
    "any any.dim any.dims": partial(_truth, torch.any),
    "all all.dim all.dims": partial(_truth, torch.all),
    "_is_any_true": lambda x: torch.any(x),
    "_is_all_true": lambda x: torch.all(x),
    "var.correction": lambda x, dims=None, **how: _moments(x, dims, **how)[0],
    "std.correction": in_wide(lambda x, dims=None, **how: _deviation(x, dims, **how)[0]),
    "std_mean.correction": in_wide(_deviation),
    "max": lambda x: torch.amax(x, list(range(x.dim()))),
    "min": lambda x: torch.amin(x, list(range(x.dim()))),
    "max.dim": lambda x, *given: _with_place(x, torch.amax, torch.argmax, *given),
    "min.dim": lambda x, *given: _with_place(x, torch.amin, torch.argmin, *given),
    "count_nonzero count_nonzero.dim_IntList": lambda x, dims=None: torch.sum(x != 0, dims_of(dims, x.dim())),
    "trace": lambda x: torch.sum(x.diagonal()),
    "norm.Scalar": lambda x, order=2: vector_norm(x, order),
    "norm.ScalarOpt_dim": lambda x, order, *given: vector_norm(x, 2 if order is None else order, *given),
    "dist": lambda a, b, order=2: torch.linalg.vector_norm(a - b, order),
    "_adaptive_avg_pool2d_backward": lambda grad, x: spread(grad, x, 2),
    "_adaptive_avg_pool3d_backward": lambda grad, x: spread(grad, x, 3),
}
expansions(ONE_LINERS)
