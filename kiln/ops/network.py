"""Shape rules of networks: products, convolution, pooling, normalisation, embedding, joining."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from kiln.ops.fake import in_order, make, similar
from kiln.ops.layout import (
    FLOATS,
    INEXACT,
    INTEGERS,
    Mismatch,
    broadcast,
    channels_last,
    contiguous,
    is_channels_last,
    row_major,
    suggests_channels_last,
    wrap_dim,
)
from kiln.ops.pointwise import two_devices
from kiln.ops.sizes import convolved, pooled, stacked
from kiln.ops.table import RULES, aten, declare, rule

WIDE = frozenset({torch.float32, torch.float64})


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether all are contiguous with the usual strides; other orders are for the meta kernels."""
    return all(t is None or row_major(t.shape, t.stride()) for t in tensors)


#: Devices whose eager kernels these rules were compared with.
KNOWN = ("cpu", "cuda")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that GPUs keep statistics in."""
    return dtype if dtype in WIDE else torch.float32


@rule(aten.convolution.default)
def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int],
                 padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int],
                 groups: int) -> Any:  # fmt: skip
    size, kernel, dtype = x.shape, weight.shape, x.dtype
    rank = len(size) - 2
    if rank > 0 and not size[1] and dtype is not weight.dtype:  # eager multiplies the two, which promotes
        both = [t.to(torch.promote_types(dtype, weight.dtype)) for t in (x, weight)]
        rest = stride, padding, dilation, transposed, output_padding, groups
        return aten.convolution.default(*both, bias, *rest)
    if rank < 1 or len(kernel) != len(size) or 0 in size or 0 in kernel:
        return NotImplemented
    if dtype is not weight.dtype or dtype not in FLOATS or x.device != weight.device:
        return NotImplemented
    if size[1] != (kernel[0] if transposed else kernel[1] * groups) or kernel[0] % groups:
        return NotImplemented
    if not {len(stride), len(padding), len(dilation), len(output_padding)} <= {1, rank} or min(stride) < 1:
        return NotImplemented
    if transposed and max(output_padding) >= max(*stride, *dilation):
        return NotImplemented
    if min(padding) < 0 or min(dilation) < 1:
        raise Mismatch("negative padding, or no dilation")
    (out,) = convolved(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if bias is not None and (bias.dtype is not dtype or bias.shape != (out[1],)):
        return NotImplemented
    if any(n < 1 for n in out[2:]):
        return NotImplemented
    if is_plain(x, weight):
        return make(out, None, dtype, x.device)
    if x.device.type != "cpu":
        return NotImplemented
    if rank == 1:
        # One dimension is run as two, of which the first has the extent 1, over a contiguous input.
        layouts = (size, x.stride() if x.is_contiguous() else contiguous(size)), (kernel, weight.stride())
        last = any(suggests_channels_last((*n[:2], 1, n[2]), _with_unit(n, s)) for n, s in layouts)
        step = channels_last((out[0], out[1], 1, out[2]))
        return make(out, (step[0], step[1], step[3]) if last else None, dtype, x.device)
    last = any(suggests_channels_last(t.shape, t.stride()) for t in (x, weight))
    if rank == 3 and last and dtype is not torch.bfloat16:
        last = dtype is torch.float32 and not _small(size, kernel, groups)
    return make(out, channels_last(out) if last else None, dtype, x.device)


def _with_unit(size: Any, stride: Any) -> tuple[int, ...]:
    """The strides of a tensor of three dimensions seen as four, the third of extent 1."""
    return (*stride[:2], size[2] * stride[2], stride[2])


def _small(size: Any, kernel: Any, groups: int) -> bool:
    """Whether the CPU runs a convolution over volumes with its plain kernel, which knows no channels-last."""
    large_kernel = kernel[-1] > 3 and kernel[-2] > 3
    return groups == 1 and size[0] == 1 and not large_kernel and prod(size[:4]) <= 20480


@rule(aten.convolution_backward.default)
def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any) -> Any:
    mask = rest[-1]
    if not is_plain(grad, x, weight) or x.device.type != "cpu" and x.dim() != 4:
        return NotImplemented
    channels = grad.shape[1] if rest[3] else weight.shape[0]
    bias = make((channels,), None, grad.dtype, grad.device) if mask[2] else None
    return similar(x) if mask[0] else None, similar(weight) if mask[1] else None, bias


@rule(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool,
                momentum: float, eps: float, *, cudnn: bool = False) -> Any:  # fmt: skip
    given = (weight, bias, mean, var)
    dtypes = {t.dtype for t in given if t is not None} or {x.dtype}
    kind = dtypes.pop()
    if x.device.type not in KNOWN or x.dtype not in FLOATS or x.dim() < 2 or dtypes:
        return NotImplemented
    if kind is not x.dtype and (x.dtype in WIDE or kind is not torch.float32):
        return NotImplemented
    channels = x.shape[1]
    if any(t is not None and t.shape != (channels,) for t in given):
        return NotImplemented
    if 0 in x.shape:
        raise Mismatch("no values to normalise")
    if not training and (mean is None or var is None):
        return NotImplemented
    last = is_channels_last(x.shape, x.stride()) or (
        x.device.type == "cpu" and suggests_channels_last(x.shape, x.stride())
    )
    last = last and not x.is_contiguous()
    own = x.device.type == "cuda" and not cudnn  # the GPU's own kernels keep any order of dimensions
    out = in_order(x) if own else make(x.shape, channels_last(x.shape) if last else None, x.dtype, x.device)
    stats, kind = (channels if training else 0,), kind if x.device.type == "cpu" else _wide(x.dtype)
    return out, make(stats, None, kind, x.device), make(stats, None, kind, x.device)


def _with_statistics(out: Any, mean: Tensor, var: Tensor, *_: Any) -> Any:
    """What a functional form gives beside: the running statistics, new."""
    return out if out is NotImplemented else (*out, similar(mean), similar(var))


@rule(aten.native_batch_norm_backward.default)
def _batch_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> Any:
    mask = rest[-1]
    last = not x.is_contiguous() and is_channels_last(x.shape, x.stride())
    if x.device.type not in KNOWN or weight is None:
        return NotImplemented
    return (
        make(x.shape, channels_last(x.shape) if last else None, x.dtype, x.device) if mask[0] else None,
        similar(weight) if mask[1] else None,
        similar(weight) if mask[2] else None,
    )


def _by_cudnn(x: Tensor, *rest: Any) -> Any:
    out = _batch_norm(x, *rest, cudnn=True)
    return out if out is NotImplemented else (*out, make((0,), None, torch.uint8, x.device))


declare(RULES, {
    "_native_batch_norm_legit.no_stats":
        lambda x, weight, bias, *rest: _batch_norm(x, weight, bias, None, None, *rest),
    "_native_batch_norm_legit_functional":
        lambda x, weight, bias, *rest: _with_statistics(_batch_norm(x, weight, bias, *rest), *rest),
    "_native_batch_norm_legit_no_training":
        lambda x, weight, bias, mean, var, *rest: _batch_norm(x, weight, bias, mean, var, False, *rest),
    "cudnn_batch_norm": _by_cudnn,
    "_batch_norm_with_update":
        lambda x, weight, bias, mean, var, *rest: _by_cudnn(x, weight, bias, mean, var, True, *rest),
    "_batch_norm_with_update_functional": lambda x, weight, bias, mean, var, *rest: _with_statistics(
        _by_cudnn(x, weight, bias, mean, var, True, *rest), mean, var),
    "cudnn_batch_norm_backward":
        lambda x, grad, weight, *rest: _batch_norm_backward(grad, x, weight, [True, True, True]),
})  # fmt: skip


@rule(aten.native_layer_norm.default)
def _layer_norm(x: Tensor, shape: list[int], weight: Any, bias: Any, eps: float) -> Any:
    size, inner = x.shape, len(shape)
    if not inner or tuple(size[len(size) - inner :]) != tuple(shape) or x.dtype not in FLOATS:
        return NotImplemented
    if x.dtype not in WIDE and x.device.type not in KNOWN:
        return NotImplemented
    given = [t for t in (weight, bias) if t is not None]
    if any(t.dtype is not x.dtype or tuple(t.shape) != tuple(shape) for t in given):
        return NotImplemented
    stats = (*size[: len(size) - inner], *[1] * inner)
    kind = x.dtype if x.device.type == "cpu" else _wide(x.dtype)
    return similar(x), make(stats, None, kind, x.device), make(stats, None, kind, x.device)


@rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any
) -> Any:
    if x.dtype not in WIDE and x.device.type not in KNOWN:
        return NotImplemented
    pairs = zip((x, weight, bias), mask, strict=True)
    return tuple([similar(t) if wanted and t is not None else None for t, wanted in pairs])


@rule(aten.native_group_norm.default)
def _group_norm(x: Tensor, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float) -> Any:
    given = {t.dtype for t in (weight, bias) if t is not None} or {x.dtype}
    if x.device.type not in KNOWN or x.dtype not in FLOATS or len(given) > 1 or 0 in x.shape:
        return NotImplemented
    out, kind = _in_own_order(x), given.pop()
    if out is NotImplemented or kind is not x.dtype and (x.dtype in WIDE or kind is not torch.float32):
        return NotImplemented
    return out, make((n, group), None, kind, x.device), make((n, group), None, kind, x.device)


@rule(aten.native_group_norm_backward.default)
def _group_norm_backward(
    grad: Tensor, x: Tensor, mean: Any, rstd: Any, weight: Tensor | None, *rest: Any
) -> Any:
    mask, out = rest[-1], _in_own_order(x)
    if x.device.type not in KNOWN or weight is None or out is NotImplemented:
        return NotImplemented
    return out if mask[0] else None, *[similar(weight) if wanted else None for wanted in mask[1:]]


def _in_own_order(x: Tensor) -> Any:
    """A tensor like `x`, contiguous or channels-last as it is; on GPUs contiguous."""
    if x.is_contiguous() or x.device.type != "cpu":
        return similar(x)
    last = x.dim() == 4 and is_channels_last(x.shape, x.stride())
    return make(x.shape, channels_last(x.shape), x.dtype, x.device) if last else NotImplemented


@rule(aten.embedding.default)
def _embedding(weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Any:
    known = indices.dtype in (torch.int64, torch.int32)
    if weight.dim() != 2 or not known or weight.device != indices.device:
        return NotImplemented
    return make((*indices.shape, weight.shape[1]), None, weight.dtype, weight.device)


BAG_SUM, BAG_MAX = 0, 2


@rule(aten._embedding_bag.default)
def _embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor, scale: bool = False,
                   mode: int = BAG_SUM, sparse: bool = False, scales: Tensor | None = None,
                   include_last: bool = False, padding: int = -1) -> Any:  # fmt: skip
    if weight.device.type != "cpu" or weight.dim() != 2 or indices.dim() != 1 or offsets.dim() != 1:
        return NotImplemented
    bags, width = offsets.shape[0] - int(include_last), weight.shape[1]
    # The quick kernel for sums does not need to know which bag an index is in.
    quick = weight.dtype is not torch.float64 and weight.stride(1) == 1 and padding < 0
    quick = quick and mode == BAG_SUM and (scales is None or scales.stride(0) == 1)
    places = (0,) if quick else indices.shape

    def numbers(size: Any) -> Any:
        return make(size, None, offsets.dtype, weight.device)

    best = numbers((bags, width) if mode == BAG_MAX else (bags,))
    return make((bags, width), None, weight.dtype, weight.device), numbers(places), numbers((bags,)), best


@rule(aten.cat.default)
def _cat(tensors: list[Tensor], dim: int = 0) -> Any:
    if not tensors:
        raise Mismatch("nothing to join")
    first = tensors[0]
    if len(tensors) > 1 and first.dim() == 1 and first.shape[0] == 0:
        # An empty tensor of one dimension goes with tensors of any shape.
        same = tensors[1].dtype is first.dtype and tensors[1].device == first.device
        return _cat(tensors[1:], dim) if same else NotImplemented
    size = list(first.shape)
    if not size or 0 in size:
        return NotImplemented
    dim = wrap_dim(dim, len(size))
    total, last = 0, True
    for t in tensors:
        other = t.shape
        if len(other) != len(size) or t.dtype is not first.dtype or t.device != first.device:
            return NotImplemented
        total += other[dim]
        last = last and not is_plain(t) and suggests_channels_last(other, t.stride())
        if any(i != dim and n != size[i] for i, n in enumerate(other)):
            return NotImplemented
    size[dim] = total
    return make(size, channels_last(tuple(size)) if last else None, first.dtype, first.device)


@rule(aten.stack.default)
def _stack(tensors: list[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    facts = first.shape, first.dtype, first.device
    if any((t.shape, t.dtype, t.device) != facts or not is_plain(t) for t in tensors):
        return NotImplemented
    return make(stacked(first.shape, len(tensors), dim), None, first.dtype, first.device)


def _product(a: Tensor, b: Tensor, rank: int) -> Any:
    """The product of two matrices, or of two batches of them."""
    left, right, dtype = a.shape, b.shape, a.dtype
    if len(left) != rank or len(right) != rank or left[-1] != right[-2] or dtype is not b.dtype:
        raise Mismatch("the matrices do not fit")
    if left[: rank - 2] != right[: rank - 2]:
        raise Mismatch("the batches do not fit")
    if a.device != b.device:
        raise two_devices(a.device, b.device)
    if dtype not in INEXACT and dtype not in INTEGERS:
        raise Mismatch("no product for this dtype")
    return make((*left[:-1], right[-1]), None, dtype, a.device)


def _added(bias: Tensor, a: Tensor, out: Any) -> Any:
    if bias.dtype is not a.dtype or a.dtype not in INEXACT or bias.device != a.device:
        return NotImplemented
    return out if broadcast(out.shape, bias.shape) == out.shape else NotImplemented


declare(RULES, {
    "mm": lambda a, b: _product(a, b, 2),
    "bmm": lambda a, b: _product(a, b, 3),
    "addmm": lambda bias, a, b, **_: _added(bias, a, _product(a, b, 2)),
    "baddbmm": lambda bias, a, b, **_: _added(bias, a, _product(a, b, 3)),
})  # fmt: skip


def _size(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Any:
    """The size after pooling over the last two dimensions; None for what the meta kernel is to judge."""
    given = [kernel, stride or kernel, padding, dilation]
    if ceil or x.dim() not in (3, 4) or any(len(value) not in (1, 2) for value in given):
        return None
    for k, s, p, d in zip(*[(value[0], value[-1]) for value in given]):
        if k < 1 or s < 1 or d < 1 or p < 0 or 2 * p > k:
            return None
    found = pooled(x, kernel, stride, padding, dilation)
    return None if found is NotImplemented else found[0]


def _applies(x: Tensor) -> bool:
    return x.dtype in FLOATS and is_plain(x) and 0 not in x.shape


@rule(aten.max_pool2d_with_indices.default)
def _max_pool(x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,),
              ceil: bool = False) -> Any:  # fmt: skip
    size = _size(x, kernel, stride, padding, dilation, ceil) if _applies(x) else None
    if size is None:
        return NotImplemented
    return make(size, None, x.dtype, x.device), make(size, None, torch.int64, x.device)


@rule(aten.avg_pool2d.default)
def _average_pool(x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), ceil: bool = False,
                  count_include_pad: bool = True, divisor: Any = None) -> Any:  # fmt: skip
    size = _size(x, kernel, stride, padding, (1,), ceil) if _applies(x) and divisor is None else None
    return NotImplemented if size is None else make(size, None, x.dtype, x.device)


@rule(aten._adaptive_avg_pool2d.default)
def _adaptive_pool(x: Tensor, size: Any) -> Any:
    if not _applies(x) or x.dim() not in (3, 4) or len(size) != 2 or any(n < 1 for n in size):
        return NotImplemented
    return make((*x.shape[:-2], *size), None, x.dtype, x.device)


@rule(
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
)
def _backward(grad: Tensor, x: Tensor, *_: Any, **__: Any) -> Any:
    if not _applies(x) or not is_plain(grad) or grad.dtype is not x.dtype:
        return NotImplemented
    if grad.dim() != x.dim() or x.dim() not in (3, 4):
        return NotImplemented
    return similar(x)
