"""How sizes of results follow from symbolic sizes of arguments, for ops that have no shape rule.

The meta kernel, asked at the sizes of now, says all else: dtypes, devices, the order of dimensions in memory.
It also confirms the sizes: a function of this table that is wrong at the sizes of now is not believed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from kiln.ops.layout import broadcast, reduced, wrap_dim
from kiln.ops.table import aten

Sizes = list[Any]
F = TypeVar("F", bound=Callable[..., Any])

#: A function receives the arguments of the overload and gives the size of each tensor that it returns, or of
#: the first few when the rest are like the last of them. NotImplemented leaves these to the concrete way.
SIZES: dict[Any, Callable[..., Any]] = {}


def sizes(names: str) -> Callable[[F], F]:
    """Declare the decorated function for overloads, named `op` (the default one) or `op.overload`."""

    def declare(function: F) -> F:
        for name in names.split():
            op, _, overload = name.partition(".")
            packet = getattr(aten, op)
            target = getattr(packet, overload or "default")
            assert target not in SIZES, f"{target} is declared twice"
            SIZES[target] = function
        return function

    return declare


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
                if isinstance(item, torch.Tensor):
                    shape = broadcast(shape, item.shape)
        return [shape]
    return NotImplemented


@sizes(
    "tril triu flip roll cumsum cumprod logcumsumexp cummax cummin sort sort.stable renorm native_dropout "
    "_fused_dropout bernoulli bernoulli.p log_sigmoid_forward log_sigmoid_backward _softmax _log_softmax "
    "_safe_softmax scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add "
    "scatter_reduce.two index_add index_copy index_fill.int_Scalar index_fill.int_Tensor index_put "
    "_unsafe_index_put masked_scatter put "
    "native_channel_shuffle rrelu_with_noise fill.Scalar fill.Tensor _conj_physical nan_to_num "
    "slice_scatter select_scatter diagonal_scatter as_strided_scatter tril_ triu_ _to_copy clone "
    "cholesky cholesky_inverse linalg_matrix_exp"
)
def _same(x: torch.Tensor, *_: Any, **__: Any) -> Sizes:
    return [x.shape]


@sizes(
    "_softmax_backward_data _log_softmax_backward_data glu_backward max_pool2d_with_indices_backward "
    "max_pool3d_with_indices_backward avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward "
    "adaptive_max_pool2d_backward nll_loss_backward nll_loss2d_backward mse_loss_backward "
    "huber_loss_backward smooth_l1_loss_backward binary_cross_entropy_backward soft_margin_loss_backward "
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward native_dropout_backward"
)
def _like_second(grad: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Sizes:
    return [x.shape]


@sizes("select_backward slice_backward diagonal_backward unfold_backward")
def _given(grad: torch.Tensor, size: Any, *_: Any, **__: Any) -> Sizes:
    return [tuple(size)]


@sizes("embedding_dense_backward")
def _embedding_backward(grad: torch.Tensor, indices: torch.Tensor, rows: Any, *_: Any) -> Sizes:
    return [(rows, grad.shape[-1])]


@sizes("max_pool2d_with_indices max_pool3d_with_indices")
def _max_pool(
    x: torch.Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    dilation: Any = (1,),
    ceil: bool = False,
) -> Any:
    return _pooled(x, kernel, stride, padding, dilation, ceil)


@sizes("avg_pool2d avg_pool3d")
def _average_pool(
    x: torch.Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    ceil: bool = False,
    *_: Any,
    **__: Any,
) -> Any:
    return _pooled(x, kernel, stride, padding, (1,), ceil)


def _pooled(x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Any:
    rank = 2 if len(kernel) in (1, 2) and x.dim() < 5 else 3
    kernel, padding, dilation = (_each(v, rank) for v in (kernel, padding, dilation))
    stride = _each(stride, rank) if stride else kernel
    size = list(x.shape)
    for i in range(rank):
        d = len(size) - rank + i
        extent = size[d] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1
        if extent < 0:
            return NotImplemented
        count = (extent + (stride[i] - 1 if ceil else 0)) // stride[i] + 1
        # The last window starts within the input or its padding on the left.
        size[d] = count - 1 if ceil and (count - 1) * stride[i] >= size[d] + padding[i] else count
    return [tuple(size)]


def _each(value: Any, rank: int) -> Any:
    return list(value) * rank if len(value) == 1 else list(value)


@sizes("_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d")
def _adaptive_pool(x: torch.Tensor, wanted: Any) -> Sizes:
    return [(*x.shape[: x.dim() - len(wanted)], *wanted)]


@sizes(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_linear1d "
    "upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)
def _resized(x: torch.Tensor, wanted: Any, *_: Any, **__: Any) -> Sizes:
    return [(*x.shape[:2], *wanted)]


@sizes(
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
    "upsample_bilinear2d_backward upsample_linear1d_backward upsample_trilinear3d_backward "
    "upsample_bicubic2d_backward"
)
def _resized_back(grad: torch.Tensor, wanted: Any, size: Any, *_: Any, **__: Any) -> Sizes:
    return [tuple(size)]


@sizes(
    "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d"
)
def _padded(x: torch.Tensor, padding: Any, *_: Any) -> Sizes:
    size = list(x.shape)
    for i in range(len(padding) // 2):
        size[-1 - i] = size[-1 - i] + padding[2 * i] + padding[2 * i + 1]
    return [tuple(size)]


@sizes("gather")
def _gathered(x: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> Sizes:
    return [index.shape]


@sizes("index_select")
def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    if not x.dim():
        return NotImplemented
    size = list(x.shape)
    size[wrap_dim(dim, x.dim())] = index.shape[0] if index.dim() else 1
    return [tuple(size)]


@sizes("index.Tensor _unsafe_index.Tensor")
def _indexed(x: torch.Tensor, indices: Any) -> Sizes:
    places = [i for i, index in enumerate(indices) if index is not None]
    shape: Any = ()
    for i in places:
        shape = broadcast(shape, indices[i].shape)
    # Indices that stand together keep their place; those with gaps between them go to the front.
    front = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    rest = [n for i, n in enumerate(x.shape) if i not in places]
    return [(*rest[:front], *shape, *rest[front:])]


@sizes("topk")
def _topk(x: torch.Tensor, k: Any, dim: int = -1, *_: Any, **__: Any) -> Any:
    if not x.dim():
        return NotImplemented
    size = list(x.shape)
    size[wrap_dim(dim, x.dim())] = k
    return [tuple(size)]


@sizes("kthvalue median.dim nanmedian.dim mode")
def _chosen(x: torch.Tensor, *rest: Any) -> Any:
    numbers = [v for v in rest if type(v) is int]
    keepdim = bool(rest) and rest[-1] is True
    return [reduced(x.shape, (numbers[-1],), keepdim)] if numbers else NotImplemented


@sizes("max min median nanmedian prod")
def _scalar(x: torch.Tensor, *_: Any, **__: Any) -> Sizes:
    return [()]


@sizes("prod.dim_int")
def _along(x: torch.Tensor, dim: int, keepdim: bool = False, **_: Any) -> Sizes:
    return [reduced(x.shape, (dim,), keepdim)]


@sizes("var.correction std.correction var_mean.correction std_mean.correction logsumexp any.dims all.dims")
def _over_dims(x: torch.Tensor, dims: Any = None, keepdim: bool = False, **_: Any) -> Sizes:
    return [reduced(x.shape, tuple(dims) if dims else None, keepdim)]


@sizes("linalg_vector_norm norm.ScalarOpt_dim")
def _norm(x: torch.Tensor, order: Any = 2, dims: Any = None, keepdim: bool = False, **_: Any) -> Sizes:
    if dims is not None and type(dims) is int:
        dims = [dims]
    return [reduced(x.shape, tuple(dims) if dims else None, keepdim)]


@sizes("norm.Scalar")
def _norm_of_all(x: torch.Tensor, order: Any = 2) -> Sizes:
    return [()]


@sizes("mse_loss smooth_l1_loss huber_loss soft_margin_loss")
def _loss(x: torch.Tensor, target: torch.Tensor, reduction: int = 1, *_: Any, **__: Any) -> Sizes:
    return [() if reduction else broadcast(x.shape, target.shape)]


@sizes("binary_cross_entropy binary_cross_entropy_with_logits")
def _weighted_loss(
    x: torch.Tensor, target: torch.Tensor, weight: Any = None, *rest: Any, **options: Any
) -> Sizes:
    reduction = next((v for v in rest if type(v) is int), options.get("reduction", 1))
    return [() if reduction else x.shape]


@sizes("nll_loss_forward nll_loss2d_forward")
def _nll_loss(x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: Any) -> Sizes:
    whole = reduction or x.dim() == 1
    return [() if whole else target.shape, ()]


@sizes("_scaled_dot_product_flash_attention_for_cpu")
def _attention_on_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Sizes:
    return [q.shape, q.shape[:3]]


@sizes("_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_on_cpu_backward(
    grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> Sizes:
    return [q.shape, k.shape, v.shape]


@sizes("repeat")
def _repeated(x: torch.Tensor, times: Any) -> Sizes:
    own = (1,) * (len(times) - x.dim()) + tuple(x.shape)
    return [tuple([n * t for n, t in zip(own, times, strict=True)])]


@sizes("convolution")
def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
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


@sizes("convolution_backward")
def _convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *rest: Any
) -> Sizes:
    mask = rest[-1]
    found = [x.shape, weight.shape, (grad.shape[1],)]
    return [size for size, wanted in zip(found, mask, strict=True) if wanted]


@sizes("native_batch_norm _native_batch_norm_legit")
def _batch_norm(x: torch.Tensor, *rest: Any) -> Sizes:
    channels = (x.shape[1] if rest[4] else 0,)
    return [x.shape, channels]


@sizes("native_group_norm_backward")
def _group_norm_backward(
    grad: Any, x: torch.Tensor, mean: Any, rstd: Any, weight: Any, n: Any, channels: Any, *rest: Any
) -> Sizes:
    return [s for s, wanted in zip([x.shape, (channels,), (channels,)], rest[-1], strict=True) if wanted]


@sizes("native_batch_norm_backward")
def _batch_norm_backward(grad: Any, x: torch.Tensor, *rest: Any) -> Sizes:
    channels = (x.shape[1],)
    return [s for s, wanted in zip([x.shape, channels, channels], rest[-1], strict=True) if wanted]


@sizes("native_layer_norm_backward")
def _layer_norm_backward(
    grad: Any, x: torch.Tensor, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any
) -> Sizes:
    return [n for n, wanted in zip([x.shape, tuple(shape), tuple(shape)], mask, strict=True) if wanted]


@sizes("cat")
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


@sizes("stack")
def _stacked(tensors: Any, dim: int = 0) -> Sizes:
    size = list(tensors[0].shape)
    size.insert(wrap_dim(dim, len(size) + 1), len(tensors))
    return [tuple(size)]


@sizes("eye")
def _eye(n: Any, **_: Any) -> Sizes:
    return [(n, n)]


@sizes("eye.m")
def _eye_of(n: Any, m: Any, **_: Any) -> Sizes:
    return [(n, m)]


@sizes("linspace logspace")
def _steps(start: Any, end: Any, steps: Any, *_: Any, **__: Any) -> Sizes:
    return [(steps,)]


@sizes("randint")
def _random(high: Any, size: Any, **_: Any) -> Sizes:
    return [tuple(size)]


@sizes("randint.low")
def _random_from(low: Any, high: Any, size: Any, **_: Any) -> Sizes:
    return [tuple(size)]


@sizes("randperm")
def _permutation(n: Any, **_: Any) -> Sizes:
    return [(n,)]


@sizes("multinomial")
def _drawn(x: torch.Tensor, count: Any, *_: Any, **__: Any) -> Sizes:
    return [(*x.shape[:-1], count)]


@sizes("glu")
def _glu(x: torch.Tensor, dim: int = -1) -> Sizes:
    size = list(x.shape)
    dim = wrap_dim(dim, len(size))
    size[dim] = size[dim] // 2
    return [tuple(size)]


@sizes("histc")
def _histogram(x: torch.Tensor, bins: Any = 100, *_: Any) -> Sizes:
    return [(bins,)]


@sizes("addmv")
def _matrix_vector(x: Any, a: torch.Tensor, b: torch.Tensor, **_: Any) -> Sizes:
    return [(a.shape[0],)]


@sizes("mv")
def _mv(a: torch.Tensor, b: torch.Tensor) -> Sizes:
    return [(a.shape[0],)]


@sizes("dot vdot")
def _dot(a: torch.Tensor, b: torch.Tensor) -> Sizes:
    return [()]


@sizes("_fused_rms_norm")
def _rms_norm(x: torch.Tensor, shape: Any, *_: Any) -> Sizes:
    outer = x.dim() - len(shape)
    return [x.shape, (*x.shape[:outer], *[1] * len(shape))]


@sizes("native_group_norm")
def _group_norm(
    x: torch.Tensor, weight: Any, bias: Any, n: Any, c: Any, hxw: Any, group: int, eps: float
) -> Sizes:
    return [x.shape, (n, group)]


@sizes("col2im")
def _col2im(x: torch.Tensor, size: Any, *_: Any) -> Sizes:
    return [(*x.shape[:-2], x.shape[-2], *size)]


@sizes("pixel_shuffle")
def _pixel_shuffle(x: torch.Tensor, factor: int) -> Sizes:
    *outer, c, h, w = x.shape
    return [(*outer, c // (factor * factor), h * factor, w * factor)]


@sizes("pixel_unshuffle")
def _pixel_unshuffle(x: torch.Tensor, factor: int) -> Sizes:
    *outer, c, h, w = x.shape
    return [(*outer, c * factor * factor, h // factor, w // factor)]


@sizes("trace")
def _trace(x: torch.Tensor) -> Sizes:
    return [()]


@sizes("_cdist_forward")
def _distances(a: torch.Tensor, b: torch.Tensor, *_: Any) -> Sizes:
    return [(*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2])]


@sizes("searchsorted.Tensor")
def _searched(sorted_sequence: torch.Tensor, values: torch.Tensor, **_: Any) -> Sizes:
    return [values.shape]


@sizes("bucketize.Tensor")
def _bucketized(values: torch.Tensor, boundaries: torch.Tensor, **_: Any) -> Sizes:
    return [values.shape]
