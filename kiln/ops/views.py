"""Shape rules of views: the result shares the memory of the argument."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from kiln.base.symbols import LIMIT
from kiln.ops.fake import FakeTensor, make
from kiln.ops.layout import FLOATS, Mismatch, Size, contiguous, row_major, wrap_dim
from kiln.ops.meta import flagged
from kiln.ops.remember import remembered, same
from kiln.ops.symint import assume
from kiln.ops.table import RULES, aten, rule


def _view_of(x: Tensor, size: Any, stride: Any, offset: int) -> FakeTensor:
    if torch.is_inference_mode_enabled() and not x.is_inference():
        with torch.inference_mode(False):  # a view of a tensor made outside inference mode is one as well
            return _view_of(x, size, stride, offset)
    return flagged(make(size, stride, x.dtype, x.device, offset), x.is_conj(), x.is_neg())


@remembered
def inferred_size(size: Size, numel: int) -> Size:
    """`size` with its -1 filled in."""
    if any(n < -1 for n in size) or size.count(-1) > 1:
        raise Mismatch("invalid shape")
    if -1 in size:
        known = -prod(size)
        if known == 0 or numel % known:
            raise Mismatch("the elements do not fit into this shape")
        size = tuple([numel // known if n == -1 else n for n in size])
    if prod(size) != numel:
        raise Mismatch("the elements do not fit into this shape")
    return size


@remembered
def view_strides(old: Size, stride: Size, new: Size) -> Size:
    """The strides of a view of the shape `new`; dimensions that lie evenly in memory are split and merged."""
    if not old:
        return (1,) * len(new)
    strides = [0] * len(new)
    place = len(new) - 1
    step, in_old, in_new = stride[-1], 1, 1
    for d in range(len(old) - 1, -1, -1):
        in_old *= old[d]
        if d and (old[d - 1] == 1 or stride[d - 1] == in_old * step):
            continue
        while place >= 0 and (in_new < in_old or new[place] == 1):
            strides[place] = in_new * step
            in_new *= new[place]
            place -= 1
        if in_new != in_old:
            raise Mismatch("the view spans two memory runs")
        if d:
            step, in_old, in_new = stride[d - 1], 1, 1
    if place != -1:
        raise Mismatch("the view spans two memory runs")
    return tuple(strides)


@rule(aten.view.default, aten._unsafe_view.default)
def _view(x: Tensor, size: list[int]) -> Any:
    old, stride = x.shape, x.stride()
    new = inferred_size(tuple(size), x.numel())
    if 0 in new:  # of no elements any view is one
        strides = stride if same(old, new) else contiguous(new)
    else:
        strides = contiguous(new) if row_major(old, stride) else view_strides(old, stride, new)
    return _view_of(x, new, strides, x.storage_offset())


@rule(aten._reshape_alias.default, aten.as_strided.default)
def _strided(x: Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Any:
    if any(n < 0 for n in size) or any(s < 0 for s in stride) or len(size) != len(stride):
        return NotImplemented
    return _view_of(x, size, stride, x.storage_offset() if offset is None else offset)


@rule(aten.detach.default, aten.alias.default)
def _alias(x: Tensor) -> FakeTensor:
    fake = _view_of(x, x.shape, x.stride(), x.storage_offset())
    if isinstance(x, FakeTensor) and x.value is not None:
        fake.value, fake.value_version = x.value, x.value_version
    return fake


@rule(aten.view_as_real.default)
def _as_pairs(x: Tensor) -> Any:
    if not x.is_complex() or x.is_conj():
        return NotImplemented
    stride = [*[2 * s for s in x.stride()], 1]
    return make([*x.shape, 2], stride, x.dtype.to_real(), x.device, 2 * x.storage_offset())


@rule(aten.view_as_complex.default)
def _of_pairs(x: Tensor) -> Any:
    *stride, last = x.stride() or [0]
    fits = x.dtype in FLOATS and x.dtype is not torch.bfloat16 and x.dim() and x.shape[-1] == 2 and last == 1
    if not fits or any(s % 2 != 0 for s in (*stride, x.storage_offset())):
        return NotImplemented
    steps = [s // 2 for s in stride]
    return make(x.shape[:-1], steps, x.dtype.to_complex(), x.device, x.storage_offset() // 2)


@rule(aten._conj.default)
def _conjugated(x: Tensor | complex) -> Any:
    if isinstance(x, complex):  # a number that autograd holds
        return make((), None, torch.complex128, torch.device("cpu"))
    if not x.is_complex():
        return NotImplemented
    view = make(x.shape, x.stride(), x.dtype, x.device, x.storage_offset())
    return flagged(view, not x.is_conj(), x.is_neg())


@rule(aten._neg_view.default)
def _negated(x: Tensor) -> Any:
    view = make(x.shape, x.stride(), x.dtype, x.device, x.storage_offset())
    return flagged(view, x.is_conj(), not x.is_neg())


@remembered
def expanded(size: Size, stride: Size, wanted: Size) -> tuple[Size, Size]:
    """Size and strides of an expansion."""
    lead = len(wanted) - len(size)
    if lead < 0:
        raise Mismatch("fewer dimensions than the tensor has")
    sizes, strides = list(wanted), [0] * len(wanted)
    for i in range(len(wanted) - 1, -1, -1):
        own = size[i - lead] if i >= lead else 1
        step = (
            stride[i - lead] if i >= lead else (sizes[i + 1] * strides[i + 1] if i + 1 < len(wanted) else 1)
        )
        if sizes[i] == -1 and i >= lead:
            sizes[i] = own
        if sizes[i] != own:
            if own != 1 or sizes[i] < 0:
                raise Mismatch("an expanded dimension must have the extent 1")
            step = 0
        strides[i] = step
    return tuple(sizes), tuple(strides)


@rule(aten.expand.default)
def _expand(x: Tensor, size: list[int], *, implicit: bool = False) -> Any:
    if x.dim() == 0:
        if any(n < 0 for n in size):
            raise Mismatch("a scalar has no extent to keep")
        return _view_of(x, size, [0] * len(size), x.storage_offset())
    sizes, strides = expanded(x.shape, x.stride(), tuple(size))
    return _view_of(x, sizes, strides, x.storage_offset())


@rule(aten.permute.default)
def _permute(x: Tensor, dims: list[int]) -> Any:
    size, stride = x.shape, x.stride()
    rank = len(size)
    order = [wrap_dim(d, rank) for d in dims]
    if len(order) != rank or len(set(order)) != rank:
        return NotImplemented
    return _view_of(x, [size[d] for d in order], [stride[d] for d in order], x.storage_offset())


@rule(aten.transpose.int)
def _transpose(x: Tensor, a: int, b: int) -> Any:
    size, stride = list(x.shape), list(x.stride())
    rank = len(size)
    a, b = wrap_dim(a, rank), wrap_dim(b, rank)
    if rank:
        size[a], size[b] = size[b], size[a]
        stride[a], stride[b] = stride[b], stride[a]
    return _view_of(x, size, stride, x.storage_offset())


@rule(aten.t.default)
def _t(x: Tensor) -> Any:
    size, stride = x.shape, x.stride()
    if len(size) > 2:
        return NotImplemented
    return _view_of(x, size[::-1], stride[::-1], x.storage_offset())


@rule(aten.unsqueeze.default)
def _unsqueeze(x: Tensor, dim: int) -> Any:
    size, stride = list(x.shape), list(x.stride())
    dim = wrap_dim(dim, len(size) + 1)
    step = size[dim] * stride[dim] if dim < len(size) else 1
    size.insert(dim, 1)
    stride.insert(dim, step)
    return _view_of(x, size, stride, x.storage_offset())


def _without(x: Tensor, dropped: set[int]) -> FakeTensor:
    size, stride = x.shape, x.stride()
    kept = [d for d in range(len(size)) if d not in dropped or size[d] != 1]
    return _view_of(x, [size[d] for d in kept], [stride[d] for d in kept], x.storage_offset())


RULES[aten.squeeze.default] = lambda x: _without(x, set(range(x.dim())))
RULES[aten.squeeze.dim] = lambda x, dim: _without(x, {wrap_dim(dim, x.dim())})


@rule(aten.squeeze.dims)
def _squeeze_dims(x: Tensor, dims: list[int]) -> Any:
    dropped = {wrap_dim(d, x.dim()) for d in dims}
    return _without(x, dropped) if len(dropped) == len(dims) else NotImplemented


def within(start: Any, end: Any, extent: Any) -> tuple[Any, Any]:
    """The range of a slice, within the extent of its dimension."""
    if torch.SymInt not in (type(start), type(end), type(extent)):
        return slice(start, end).indices(extent)[:2]
    return _place(0 if start is None else start, extent), _place(LIMIT if end is None else end, extent)


def _place(place: Any, extent: Any) -> Any:
    """An end of a slice counted from the front; the largest size stands for the end of the dimension."""
    if type(place) is int and place == LIMIT:
        return extent
    if place < 0:
        place = place + extent
        return 0 if place < 0 else place
    return extent if place > extent else place


@rule(aten.slice.Tensor)
def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    size, stride = list(x.shape), list(x.stride())
    if not size or step <= 0:
        return NotImplemented
    dim = wrap_dim(dim, len(size))
    first, last = within(start, end, size[dim])
    size[dim] = (max(last - first, 0) + step - 1) // step
    offset = x.storage_offset() + first * stride[dim]
    stride[dim] *= step
    return _view_of(x, size, stride, offset)


@rule(aten.select.int)
def _select(x: Tensor, dim: int, index: int) -> Any:
    size, stride = list(x.shape), list(x.stride())
    if not size:
        return NotImplemented
    dim = wrap_dim(dim, len(size))
    extent, step = size.pop(dim), stride.pop(dim)
    if not -extent <= index < extent:
        return NotImplemented
    return _view_of(x, size, stride, x.storage_offset() + (index + extent if index < 0 else index) * step)


@rule(aten.unbind.int)
def _unbind(x: Tensor, dim: int = 0) -> Any:
    size, stride = list(x.shape), list(x.stride())
    if not size:
        return NotImplemented
    dim = wrap_dim(dim, len(size))
    extent, step = size.pop(dim), stride.pop(dim)
    start = x.storage_offset()
    return [_view_of(x, size, stride, start + i * step) for i in range(extent)]


@rule(aten.diagonal.default)
def _diagonal(x: Tensor, shift: int = 0, a: int = 0, b: int = 1) -> Any:
    size, stride, start = list(x.shape), list(x.stride()), x.storage_offset()
    if len(size) < 2:
        return NotImplemented
    a, b = wrap_dim(a, len(size)), wrap_dim(b, len(size))
    if a == b:
        return NotImplemented
    extent = min(size[a], size[b] - shift) if shift >= 0 else min(size[a] + shift, size[b])
    if extent > 0:
        start = start + (shift * stride[b] if shift >= 0 else -shift * stride[a])
    kept = [d for d in range(len(size)) if d not in (a, b)]
    sizes, strides = [size[d] for d in kept], [stride[d] for d in kept]
    return _view_of(x, [*sizes, max(extent, 0)], [*strides, stride[a] + stride[b]], start)


@rule(aten.unfold.default)
def _unfold(x: Tensor, dim: int, extent: int, step: int) -> Any:
    size, stride = list(x.shape), list(x.stride())
    if not size or extent < 0 or step <= 0:
        return NotImplemented
    dim = wrap_dim(dim, len(size))
    if extent > size[dim]:
        return NotImplemented
    size[dim] = (size[dim] - extent) // step + 1
    stride.append(stride[dim])
    size.append(extent)
    stride[dim] *= step
    return _view_of(x, size, stride, x.storage_offset())


def _cut(x: Tensor, parts: list[int], dim: int) -> list[FakeTensor]:
    size, stride, start = list(x.shape), x.stride(), x.storage_offset()
    out = []
    for part in parts:
        size[dim] = part
        out.append(_view_of(x, size, stride, start))
        start += part * stride[dim]
    return out


@rule(aten.split.Tensor, aten.unsafe_split.Tensor)
def _split(x: Tensor, part: int, dim: int = 0) -> Any:
    if not x.dim() or part <= 0:
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    extent = x.shape[dim]
    # How many parts there are is known to the program, whatever their size; nothing has one.
    count = int((extent + part - 1) // part) if extent else 1
    assume(extent > part * (count - 1))
    return _cut(x, [*[part] * (count - 1), extent - part * (count - 1)], dim)


@rule(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def _split_with_sizes(x: Tensor, parts: list[int], dim: int = 0) -> Any:
    if not x.dim():
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    if any(p < 0 for p in parts) or sum(parts) != x.shape[dim]:
        return NotImplemented
    return _cut(x, parts, dim)
