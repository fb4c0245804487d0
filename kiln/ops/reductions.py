"""Shape rules of reductions and scans."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import generic_associative_scan

from kiln.ops.fake import FakeTensor, make, similar
from kiln.ops.layout import COMPLEX, FLOATS, INEXACT, Mismatch, reduced, row_major, wrap_dim
from kiln.ops.table import RULES, aten, declare, rule


def _reduce(x: Tensor, dims: Any, keepdim: bool, dtype: torch.dtype) -> FakeTensor:
    if dims is not None:
        dims = (dims,) if type(dims) is int else tuple(dims)
    return make(reduced(x.shape, dims, keepdim), None, dtype, x.device)


@rule(aten.sum.dim_IntList, aten.sum.default)
def _sum(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _reduce(x, dims, keepdim, dtype or (x.dtype if x.dtype in INEXACT else torch.int64))


def _spread(x: Tensor, dims: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    if x.dtype in FLOATS:
        return _reduce(x, dims or None, keepdim, x.dtype)
    if x.dtype not in COMPLEX:
        raise Mismatch("integers have no variance")
    return NotImplemented


def _twice(out: Any, dtype: torch.dtype | None = None) -> Any:
    """Two results of one shape, the second of another dtype where one is given."""
    return out if out is NotImplemented else (out, similar(out, dtype))


@rule(aten.mean.dim, aten.mean.default)
def _mean(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dtype = dtype or x.dtype
    return _reduce(x, dims, keepdim, dtype) if dtype in INEXACT else NotImplemented


@rule(aten.linalg_vector_norm.default)
def _norm(x: Tensor, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    # Meta kernels of some versions forget to drop dimensions of extent 1.
    wanted = dtype or x.dtype
    if x.dtype not in FLOATS or 0 in x.shape or torch.promote_types(x.dtype, wanted) is not wanted:
        return NotImplemented
    return _reduce(x, dims, keepdim, wanted) if wanted in FLOATS else NotImplemented


@rule(aten.amax.default, aten.amin.default)
def _extreme(x: Tensor, dims: Any = (), keepdim: bool = False) -> Any:
    if x.dtype in COMPLEX:
        raise Mismatch("complex numbers have no order")
    if 0 in x.shape and (not dims or any(x.shape[wrap_dim(d, x.dim())] == 0 for d in dims)):
        raise Mismatch("no element to choose")
    return _reduce(x, dims, keepdim, x.dtype)


@rule(aten.argmax.default, aten.argmin.default)
def _arg_extreme(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    if x.dtype in COMPLEX or x.dtype is torch.bool:
        raise Mismatch("no order for this dtype")
    if 0 in x.shape:
        return NotImplemented
    return _reduce(x, dim, keepdim, torch.int64)


@rule(aten.cumsum.default)
def _cumsum(x: Tensor, dim: int, *, dtype: Any = None) -> Any:
    wrap_dim(dim, x.dim())
    if not row_major(x.shape, x.stride()):
        return NotImplemented
    return make(x.shape, None, dtype or (x.dtype if x.dtype in INEXACT else torch.int64), x.device)


def _along(x: Tensor, dim: int, half_to_float: bool) -> Any:
    wrap_dim(dim, x.dim())
    if x.dtype not in FLOATS or half_to_float:
        return NotImplemented
    return similar(x)


def _truth(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    return NotImplemented if x.dtype is torch.uint8 else _reduce(x, dim, keepdim, torch.bool)


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Any:
    if grad.dtype is not dtype or grad.shape != out.shape or out.stride() != grad.stride():
        return NotImplemented
    return _along(grad, dim, False)


def _extreme_and_place(x: Tensor, dim: int, keepdim: bool = False) -> Any:
    if x.dtype in COMPLEX:
        raise Mismatch("complex numbers have no order")
    if x.dim() and x.shape[wrap_dim(dim, x.dim())] == 0:
        raise Mismatch("no element to choose")
    return _twice(_reduce(x, dim, keepdim, x.dtype), torch.int64)


declare(RULES, {
    "var.correction std.correction": _spread,
    "var_mean.correction std_mean.correction": lambda x, *given, **named: _twice(_spread(x, *given, **named)),
    "max.dim min.dim": _extreme_and_place,
    "any any.dim all all.dim": _truth,
    "_is_any_true _is_all_true": lambda x: _truth(x) if x.dtype is torch.bool else NotImplemented,
    "_softmax _log_softmax": _along,
})  # fmt: skip


library = torch.library.Library("kiln", "FRAGMENT")
for name in ("running_max", "running_min", "running_sum", "running_product"):
    library.define(f"{name}(Tensor x, int dim) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.impl("running_max", lambda x, dim: x.cummax(dim).values, "CPU")
library.impl("running_min", lambda x, dim: x.cummin(dim).values, "CPU")
library.impl("running_sum", lambda x, dim: x.cumsum(dim), "CPU")
library.impl("running_product", lambda x, dim: x.cumprod(dim), "CPU")
running_max, running_min = torch.ops.kiln.running_max.default, torch.ops.kiln.running_min.default
running_sum, running_product = torch.ops.kiln.running_sum.default, torch.ops.kiln.running_product.default
for op in (running_max, running_min, running_sum, running_product):
    RULES[op] = lambda x, dim: similar(x)


def _step(factor: Tensor, value: Tensor, factor_after: Tensor, value_after: Tensor) -> tuple[Tensor, Tensor]:
    """Two steps of a recurrence as one."""
    return factor * factor_after, factor_after * value + value_after


def _recurrence(x: Tensor, dim: int, factor: Tensor) -> Tensor:
    """Each element and a factor times the result before it; the first factor counts for nothing."""
    _, found = generic_associative_scan(_step, [factor, x], dim)
    return found.clone(memory_format=torch.contiguous_format)


def _recurrence_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    """The same from the end: the gradient of a result is its own and what comes through the next one."""
    (factor, out), dim = ctx.saved_tensors, ctx.dim
    through = recurrence(grad.flip(dim), dim, factor.roll(-1, dim).flip(dim)).flip(dim)
    before = torch.cat([torch.zeros_like(out.narrow(dim, 0, 1)), out.narrow(dim, 0, out.shape[dim] - 1)], dim)
    return through, None, through * before


def _recurrence_saved(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.dim, factor = inputs
    ctx.save_for_backward(factor, output)


name = "recurrence(Tensor x, int dim, Tensor factor) -> Tensor"
library.define(name, tags=(torch.Tag.pt2_compliant_tag,))
for device in ("CPU", "CUDA"):
    library.impl("recurrence", _recurrence, device)
recurrence = torch.ops.kiln.recurrence.default
RULES[recurrence] = lambda x, dim, factor: similar(x)


@functools.cache
def differentiable() -> Any:
    """The op of a recurrence, with gradients: that is declared, which takes time, when there is one."""
    saved = {"setup_context": _recurrence_saved, "lib": library}
    torch.library.register_autograd("kiln::recurrence", _recurrence_backward, **saved)  # type: ignore[arg-type]
    return recurrence


def _pooled_place(x: Tensor, dim: int) -> Tensor:
    """The place of the largest element, of equal ones the first, but of several NaN the last."""
    none = x.isnan()
    last = x.shape[dim] - 1 - none.flip(dim).to(torch.uint8).argmax(dim)
    return torch.where(none.any(dim), last, x.argmax(dim))


library.define("pooled_place(Tensor x, int dim) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.impl("pooled_place", _pooled_place, "CPU")
pooled_place = torch.ops.kiln.pooled_place.default
RULES[pooled_place] = _arg_extreme
