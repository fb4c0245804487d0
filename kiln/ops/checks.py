"""Where meta kernels are not eager: what it refuses and they let pass, and the strides of its kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kiln.base.errors import Break
from kiln.ops.fake import FakeTensor, general, in_order, make, overlaps, similar
from kiln.ops.layout import (
    FLOATS,
    Mismatch,
    alike,
    broadcast,
    channels_last,
    row_major,
    suggests_channels_last,
    wrap_dim,
)
from kiln.ops.lift import is_symbolic
from kiln.ops.meta import by_mask
from kiln.ops.table import aten, overload, rule
from kiln.ops.views import within


@rule(aten.bucketize.Tensor)
def _bucketize(x: Tensor, boundaries: Tensor, **_: Any) -> Any:
    if boundaries.dim() != 1:
        raise Mismatch("boundaries are a list")
    return NotImplemented


@rule(aten.masked_scatter.default)
def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Any:
    if mask.dtype is not torch.bool or x.dtype is not source.dtype:
        raise Mismatch("the mask or the source has the wrong dtype")
    return NotImplemented


@rule(aten.masked_scatter_.default)
def _masked_scatter_in_place(x: Tensor, mask: Tensor, source: Tensor) -> Any:
    if broadcast(x.shape, mask.shape) != x.shape:
        raise Mismatch("the mask does not fit")
    return _masked_scatter(x, mask, source)


@rule(aten.index_put_.default)
def _index_put_in_place(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    at = 0
    for index in indices:
        mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if mask and list(x.shape[at : at + index.dim()]) != list(index.shape):
            raise Mismatch("a mask has another shape than what it chooses from")
        at += index.dim() if mask else 1
    return NotImplemented


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    _index_put_in_place(x, indices, values)
    # On zeros a mask would choose nothing, and values of any other number not fit.
    return in_order(x) if by_mask(indices) and x.dtype is values.dtype else NotImplemented


@rule(aten.multinomial.default)
def _multinomial(x: Tensor, samples: int, replacement: bool = False, **_: Any) -> Any:
    if x.dtype not in FLOATS or samples <= 0 or not replacement and x.dim() and samples > x.shape[-1]:
        raise Mismatch("these samples cannot be drawn")
    return NotImplemented


@rule(aten.slice_scatter.default)
def _slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    if not x.dim():
        raise Mismatch("a number has no slices")
    size = list(x.shape)
    dim = wrap_dim(dim, len(size))
    first, last = within(start, end, size[dim])
    size[dim] = (max(last - first, 0) + step - 1) // step
    if list(source.shape) != size:
        raise Mismatch("the source has another shape than the slice")
    if overlaps(x) and x.device == source.device:
        return in_order(x)  # each element has its place
    if is_symbolic((x, source, start, end)) and x.device == source.device and not x.is_complex():
        return make(x.shape, x.stride(), x.dtype, x.device, x.storage_offset())
    return NotImplemented


@rule(aten.glu.default)
def _glu(x: Tensor, dim: int = -1) -> Any:
    if x.dim() and x.shape[wrap_dim(dim, x.dim())] % 2 != 0:
        raise Mismatch("what is halved has an odd extent")
    return NotImplemented


@rule(aten.as_strided_scatter.default)
def _as_strided_scatter(x: Tensor, source: Tensor, size: Any, stride: Any, offset: Any = None) -> Any:
    start = x.storage_offset() if offset is None else offset
    reach = start + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=False))
    if source.numel() and reach > x.storage_offset() + x.numel() and x.is_contiguous():
        raise Mismatch("the strides lead out of the memory")
    return NotImplemented


@rule(aten.addbmm_.default, aten.addr_.default)
def _grows(x: Tensor, a: Tensor, b: Tensor, **_: Any) -> Any:
    shape = (a.shape[-2], b.shape[-1]) if a.dim() == 3 else (*a.shape, *b.shape)
    if tuple(x.shape) != shape:
        why = "the result does not fit into the tensor, which eager resizes"
        raise Break("metadata-mutation", why, "use the form that returns a new tensor")
    return NotImplemented


#: Ops that leave images in the channels-last order, and the ranks at which they do.
KEEPING: dict[str, tuple[int, ...]] = {
    "pixel_shuffle reflection_pad2d replication_pad2d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_bilinear2d upsample_bicubic2d": (4,),
    "reflection_pad3d replication_pad3d upsample_trilinear3d": (5,),
    "native_channel_shuffle": (4, 5),
}


def _is_last(x: Tensor) -> bool:
    """Whether the kernels of the CPU take `x` for channels-last."""
    return (
        x.device.type == "cpu"
        and x.dim() in (4, 5)
        and 0 not in x.shape
        and not row_major(x.shape, x.stride())
        and suggests_channels_last(x.shape, x.stride())
    )


def _last(x: Tensor) -> FakeTensor:
    return make(x.shape, channels_last(tuple(x.shape)), x.dtype, x.device)


def _keep(op: Any, ranks: tuple[int, ...], x: Tensor, *rest: Any) -> Any:
    if x.dim() not in ranks or not _is_last(x):
        return NotImplemented
    return _last(general(op, (similar(x), *rest), {}))


for _names, _ranks in KEEPING.items():
    for _op in map(overload, _names.split()):
        rule(_op)(partial(_keep, _op, _ranks))


@rule(aten.roll.default)
def _roll(x: Tensor, shifts: Any, dims: Any = ()) -> Any:
    """The two pieces of each dimension are joined, and it is they that count as channels-last or not."""
    if not dims or not _is_last(x):
        return NotImplemented
    out = general(aten.roll.default, (similar(x), shifts, dims), {})
    stride = x.stride()
    for shift, dim in zip(shifts, dims, strict=True):
        size = list(x.shape)
        d = wrap_dim(dim, len(size))
        cut = (size[d] - shift) % size[d]
        for extent in (cut, size[d] - cut):
            size[d] = extent
            if not suggests_channels_last(tuple(size), stride):
                return out
            size[d] = x.shape[d]
        stride = channels_last(tuple(size))
    return _last(out)


@rule(aten.rrelu_with_noise.default)
def _rrelu(x: Tensor, noise: Tensor, *rest: Any, **named: Any) -> Any:
    if not alike(x.shape, noise.shape):
        raise Mismatch("noise of another shape")
    if x.device.type != "cpu" or row_major(x.shape, x.stride()):
        return NotImplemented
    return similar(general(aten.rrelu_with_noise.default, (x, noise, *rest), named))
