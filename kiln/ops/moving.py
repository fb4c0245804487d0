"""Shape rules of ops whose kernels for the CPU give other strides than the meta kernels say."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kiln.ops.fake import FakeTensor, general, make, similar
from kiln.ops.layout import Mismatch, alike, channels_last, row_major, suggests_channels_last, wrap_dim
from kiln.ops.table import Rule, aten, overload, rule

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


def _keeping(op: Any, ranks: tuple[int, ...]) -> Rule:
    def keep(x: Tensor, *rest: Any) -> Any:
        if x.dim() not in ranks or not _is_last(x):
            return NotImplemented
        return _last(general(op, (similar(x), *rest), {}))

    return keep


for _names, _ranks in KEEPING.items():
    for _op in map(overload, _names.split()):
        rule(_op)(_keeping(_op, _ranks))


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
