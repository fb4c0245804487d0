"""How sizes of results follow from symbolic sizes of arguments, for ops that have no shape rule.

The meta kernel, asked at the sizes of now, says all else: dtypes, devices, the order of dimensions in memory.
It also confirms the sizes: a function of this table that is wrong at the sizes of now is not believed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from kiln.ops.layout import broadcast, reduced, wrap_dim
from kiln.ops.table import aten, declare

Sizes = list[Any]

#: A function receives the arguments of the overload and gives the size of each tensor that it returns, or of
#: the first few when the rest are like the last of them. NotImplemented leaves these to the concrete way.
SIZES: dict[Any, Callable[..., Any]] = {}


#: Elementwise ops that are not tagged as such.
BROADCASTING = frozenset(
    {aten.rsub.Tensor, aten.rsub.Scalar, aten._prelu_kernel.default, aten.complex.default, aten.polar.default,
     aten.floor_divide.default, aten.floor_divide.Scalar}
)  # fmt: skip


def sizes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sizes of what `func` returns, or NotImplemented."""
    known = SIZES.get(func)
    if known is not None:
        return known(*args, **kwargs)
    if torch.Tag.pointwise in func.tags or func in BROADCASTING:
        shape: Any = ()
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor):
                    shape = broadcast(shape, item.shape)
        return [shape]
    return NotImplemented


def _average_pool(x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), ceil: bool = False,
                  *_: Any, **__: Any) -> Any:  # fmt: skip
    # Eager refuses volumes that are smaller than a window, padding or not.
    if len(kernel) == 3 and any(n < k for n, k in zip(x.shape[-3:], kernel, strict=True)):
        return NotImplemented
    return pooled(x, kernel, stride, padding, (1,), ceil)


def pooled(x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,),
            ceil: bool = False) -> Any:  # fmt: skip
    rank = 2 if len(kernel) in (1, 2) and x.dim() < 5 else 3
    kernel, padding, dilation = (_each(v, rank) for v in (kernel, padding, dilation))
    stride = _each(stride, rank) if stride else kernel
    size = list(x.shape)
    for i in range(rank):
        d = len(size) - rank + i
        extent = size[d] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1 + (stride[i] - 1 if ceil else 0)
        if extent < 0:
            return NotImplemented
        count = extent // stride[i] + 1
        # The last window starts within the input or its padding on the left.
        size[d] = count - 1 if ceil and (count - 1) * stride[i] >= size[d] + padding[i] else count
    return [tuple(size)]


def _each(value: Any, rank: int) -> Any:
    return list(value) * rank if len(value) == 1 else list(value)


def _padded(x: Tensor, padding: Any, *_: Any) -> Sizes:
    size = list(x.shape)
    for i in range(len(padding) // 2):
        size[-1 - i] = size[-1 - i] + padding[2 * i] + padding[2 * i + 1]
    return [tuple(size)]


def _windows_apart(x: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """The size of windows as columns."""
    count: Any = 1
    for n, k, step, border, turn in zip(x.shape[-2:], kernel, dilation, padding, stride, strict=True):
        extent = n + 2 * border - step * (k - 1) - 1
        if extent < 0:
            return NotImplemented
        count = count * (extent // turn + 1)
    return [(*x.shape[:-3], x.shape[-3] * prod(kernel), count)]


def _diagonal(x: Tensor, offset: int = 0, first: int = -2, second: int = -1) -> Sizes:
    """The size of matrices with the last dimension on a diagonal."""
    size, rank = list(x.shape), x.dim() + 1
    n = size.pop() + abs(offset)
    for d in sorted((wrap_dim(first, rank), wrap_dim(second, rank))):
        size.insert(d, n)
    return [tuple(size)]


def _with(x: Tensor, dim: int, n: Any) -> Any:
    """The size of `x` with another extent of one dimension."""
    if not x.dim():
        return NotImplemented
    size = list(x.shape)
    size[wrap_dim(dim, x.dim())] = n
    return [tuple(size)]


def _indexed(x: Tensor, indices: Any) -> Sizes:
    places = [i for i, index in enumerate(indices) if index is not None]
    shape: Any = ()
    for i in places:
        shape = broadcast(shape, indices[i].shape)
    # Indices that stand together keep their place; those with gaps between them go to the front.
    front = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    rest = [n for i, n in enumerate(x.shape) if i not in places]
    return [(*rest[:front], *shape, *rest[front:])]


def _chosen(x: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    return [reduced(x.shape, (dim,), keepdim)]


def _weighted_loss(x: Tensor, target: Tensor, weight: Any = None, *rest: Any, **options: Any) -> Sizes:
    reduction = next((v for v in rest if type(v) is int), options.get("reduction", 1))
    return [() if reduction else x.shape]


def _repeated(x: Tensor, times: Any) -> Sizes:
    own = (1,) * (len(times) - x.dim()) + tuple(x.shape)
    return [tuple([n * t for n, t in zip(own, times, strict=True)])]


def convolved(
    x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    rank = x.dim() - 2
    size, kernel = x.shape, weight.shape
    stride, padding, dilation = _each(stride, rank), _each(padding, rank), _each(dilation, rank)
    out: list[Any] = [size[0], kernel[1] * groups if transposed else kernel[0]]
    extra = _each(output_padding, rank)
    for i in range(rank):
        reach = dilation[i] * (kernel[i + 2] - 1)
        if transposed:
            out.append((size[i + 2] - 1) * stride[i] - 2 * padding[i] + reach + extra[i] + 1)
        else:
            out.append((size[i + 2] + 2 * padding[i] - reach - 1) // stride[i] + 1)
    return [tuple(out)]


def _joined(tensors: Any, dim: int = 0) -> Any:
    first = tensors[0]
    if any(t.dim() != first.dim() for t in tensors):
        return NotImplemented
    size = list(first.shape)
    dim = wrap_dim(dim, first.dim())
    size[dim] = sum([t.shape[dim] for t in tensors])
    for t in tensors:
        for i, n in enumerate(t.shape):
            if i != dim and n != size[i]:
                return NotImplemented
    return [tuple(size)]


def stacked(size: Any, count: int, dim: int) -> tuple[Any, ...]:
    """The size of so many tensors of one size, one beside the other."""
    at = wrap_dim(dim, len(size) + 1)
    return (*size[:at], count, *size[at:])


def _over(x: Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> Sizes:
    given = [dims] if type(dims) is int else dims
    return [reduced(x.shape, tuple(given) if given else None, keepdim)]


def _attention(q: Tensor, k: Tensor, v: Tensor, width: int, heads: int, *rest: Any, **named: Any) -> Sizes:
    """The sizes of attention's results and of its weights, the mean over heads unless told otherwise."""
    mean = rest[6] if len(rest) > 6 else named.get("average_attn_weights", True)
    return [q.shape, (q.shape[0], *([] if mean else [heads]), q.shape[1], k.shape[1])]


def _wanted(found: Any, mask: Any) -> Sizes:
    """The sizes of those gradients that a mask asks for."""
    return [size for size, wanted in zip(found, mask, strict=True) if wanted]


def _rms_norm(x: Tensor, shape: Any, *_: Any) -> Sizes:
    outer = x.dim() - len(shape)
    return [x.shape, (*x.shape[:outer], *[1] * len(shape))]


#: By overloads, named `op` (the default one) or `op.overload`.
NAMED: dict[str, Callable[..., Any]] = {
    "avg_pool2d avg_pool3d": _average_pool,
    "max_pool2d_with_indices max_pool3d_with_indices": pooled,
    "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d": _padded,
    "index.Tensor _unsafe_index.Tensor": _indexed,
    "median.dim nanmedian.dim mode": _chosen,
    "kthvalue": lambda x, k, *rest: _chosen(x, *rest),
    "binary_cross_entropy binary_cross_entropy_with_logits": _weighted_loss,
    "repeat": _repeated,
    "convolution": convolved,
    "cat": _joined,
    "tril triu flip roll cumsum cumprod logcumsumexp cummax cummin sort sort.stable renorm native_dropout "
    "_fused_dropout bernoulli bernoulli.p log_sigmoid_forward log_sigmoid_backward _softmax _log_softmax "
    "_safe_softmax scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add "
    "scatter_reduce.two index_add index_copy index_fill.int_Scalar index_fill.int_Tensor index_put "
    "_unsafe_index_put masked_scatter put "
    "native_channel_shuffle rrelu_with_noise fill.Scalar fill.Tensor _conj_physical nan_to_num "
    "slice_scatter select_scatter diagonal_scatter as_strided_scatter tril_ triu_ _to_copy clone "
    "cholesky cholesky_inverse linalg_matrix_exp bucketize.Tensor isin.Tensor_Tensor channel_shuffle "
    "elu_backward _prelu_kernel_backward rrelu_with_noise_functional rrelu_with_noise_backward _fft_c2c "
    "uniform normal_functional normal.Tensor_float log_normal exponential cauchy geometric randint_like "
    "randint_like.low_dtype": lambda x, *_, **__: [x.shape],
    "_softmax_backward_data _log_softmax_backward_data glu_backward max_pool2d_with_indices_backward "
    "max_pool3d_with_indices_backward avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward "
    "_adaptive_avg_pool3d_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward "
    "nll_loss_backward nll_loss2d_backward mse_loss_backward huber_loss_backward smooth_l1_loss_backward "
    "binary_cross_entropy_backward soft_margin_loss_backward "
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward "
    "native_dropout_backward searchsorted.Tensor _cdist_backward take":
        lambda grad, x, *_, **__: [x.shape],
    "select_backward slice_backward diagonal_backward unfold_backward randint":
        lambda _, size, *__, **___: [tuple(size)],
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
    "upsample_bilinear2d_backward upsample_linear1d_backward upsample_trilinear3d_backward "
    "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward "
    "_upsample_nearest_exact3d_backward upsample_bicubic2d_backward randint.low masked_scatter_backward "
    "normal.float_float": lambda _, __, size, *rest, **___: [tuple(size)],
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_linear1d "
    "upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa":
        lambda x, wanted, *_, **__: [(*x.shape[:2], *wanted)],
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d":
        lambda x, wanted: [(*x.shape[: x.dim() - len(wanted)], *wanted)],
    "embedding_dense_backward": lambda grad, indices, rows, *_: [(rows, grad.shape[-1])],
    "max min median nanmedian prod norm.Scalar dot vdot trace": lambda *_, **__: [()],
    "prod.dim_int": lambda x, dim, keepdim=False, **_: [reduced(x.shape, (dim,), keepdim)],
    "var.correction std.correction var_mean.correction std_mean.correction": _over,
    "logsumexp any.dims all.dims nansum": _over,
    "linalg_vector_norm norm.ScalarOpt_dim": lambda x, order=2, *given, **named: _over(x, *given, **named),
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss": lambda x, target, reduction=1, *_, **__: [
        () if reduction else broadcast(x.shape, target.shape)],
    "nll_loss_forward nll_loss2d_forward": lambda x, target, weight, reduction, ignored: [
        () if reduction or x.dim() == 1 else target.shape, ()],
    "convolution_backward": lambda grad, x, weight, bias_sizes, *rest: _wanted(
        [x.shape, weight.shape, (grad.shape[1],)], rest[-1]),
    "native_group_norm_backward": lambda grad, x, mean, rstd, weight, n, channels, *rest: _wanted(
        [x.shape, (channels,), (channels,)], rest[-1]),
    "native_batch_norm_backward": lambda grad, x, *rest: _wanted(
        [x.shape, (x.shape[1],), (x.shape[1],)], rest[-1]),
    "native_layer_norm_backward": lambda grad, x, shape, *rest: _wanted(
        [x.shape, tuple(shape), tuple(shape)], rest[-1]),
    "index_select": lambda x, dim, index: _with(x, dim, index.shape[0] if index.dim() else 1),
    "topk": lambda x, k, dim=-1, *_, **__: _with(x, dim, k),
    "glu": lambda x, dim=-1: _with(x, dim, x.shape[dim] // 2),
    "stack": lambda tensors, dim=0: [stacked(tensors[0].shape, len(tensors), dim)],
    "_fused_rms_norm": _rms_norm,
    "pixel_shuffle": lambda x, by: [
        (*x.shape[:-3], x.shape[-3] // (by * by), x.shape[-2] * by, x.shape[-1] * by)],
    "pixel_unshuffle": lambda x, by: [
        (*x.shape[:-3], x.shape[-3] * by * by, x.shape[-2] // by, x.shape[-1] // by)],
    "gather": lambda x, dim, index, **_: [index.shape],
    "_native_multi_head_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, *_, **__: [q.shape, q.shape[:3]],
    "_scaled_dot_product_flash_attention_for_cpu_backward":
        lambda grad, q, k, v, *_, **__: [q.shape, k.shape, v.shape],
    "native_batch_norm _native_batch_norm_legit":
        lambda x, *rest: [x.shape, (x.shape[1] if rest[4] else 0,)],
    "native_group_norm": lambda x, weight, bias, n, c, hxw, group, eps: [x.shape, (n, group)],
    "eye": lambda n, **_: [(n, n)],
    "eye.m": lambda n, m, **_: [(n, m)],
    "linspace logspace": lambda start, end, steps, *_, **__: [(steps,)],
    "randperm": lambda n, **_: [(n,)],
    "multinomial": lambda x, count, *_, **__: [(*x.shape[:-1], count)],
    "histc": lambda x, bins=100, *_: [(bins,)],
    "addmv": lambda x, a, b, **_: [(a.shape[0],)],
    "mv": lambda a, b: [(a.shape[0],)],
    "im2col": _windows_apart,
    "col2im": lambda x, size, kernel, *_: [(*x.shape[:-2], x.shape[-2] // prod(kernel), *size)],
    "grid_sampler_2d grid_sampler_3d": lambda x, grid, *_: [(*x.shape[:2], *grid.shape[1:-1])],
    "grid_sampler_2d_backward grid_sampler_3d_backward":
        lambda grad, x, grid, *rest: _wanted([x.shape, grid.shape], (rest[-1][0], True)),
    "max_unpool2d max_unpool3d": lambda x, places, size, *_: [(*x.shape[: x.dim() - len(size)], *size)],
    "aminmax": lambda x, dim=None, keepdim=False: _over(x, dim, keepdim),
    "diag_embed": _diagonal,
    "normal.Tensor_Tensor": lambda a, b, **_: [broadcast(a.shape, b.shape)],
    "linalg_cross": lambda a, b, dim=-1: (
        [broadcast(a.shape, b.shape)] if a.shape[dim] == 3 == b.shape[dim] else NotImplemented),
    "_fft_r2c": lambda x, dims, norm, half: (
        _with(x, dims[-1], x.shape[dims[-1]] // 2 + 1) if half else [x.shape]),
    "_fft_c2r": lambda x, dims, norm, last: _with(x, dims[-1], last),
    "linalg_inv_ex linalg_cholesky_ex": lambda x, **_: [x.shape, x.shape[:-2]],
    "_linalg_det": lambda x: [x.shape[:-2], x.shape, x.shape[:-1]],
    "_linalg_slogdet": lambda x: [x.shape[:-2], x.shape[:-2], x.shape, x.shape[:-1]],
    "_linalg_solve_ex": lambda a, b, **_: (
        [b.shape, a.shape, a.shape[:-1], a.shape[:-2]] if a.dim() == b.dim() else NotImplemented),
    "linalg_solve_triangular": lambda a, b, **_: [b.shape] if a.dim() == b.dim() else NotImplemented,
    "linalg_lu_solve": lambda a, pivots, b, **_: [b.shape] if a.dim() == b.dim() else NotImplemented,
    "_linalg_eigh": lambda x, *_: [x.shape[:-1], x.shape],
    "_cdist_forward _euclidean_dist":
        lambda a, b, *_: [(*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2])],
}  # fmt: skip
declare(SIZES, NAMED)
