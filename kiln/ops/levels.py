"""The three levels of graphs: aten, core and prims, as closed lists of ops (docs/levels.md: their meaning).

A graph at level `aten` holds whatever autograd and the dispatcher gave. At level `core` an op is one of CORE;
at level `prims` it is one of PRIMITIVES or one of KERNELS. An op in none of the lists that has no expansion,
or whose expansion declines its arguments (most decline complex numbers), stays a call of the eager kernel.

What holds for all elementwise primitives at level `prims`:
  - operands broadcast; tensors among them have one dtype, in which the op computes and (comparisons aside)
    which it gives; every change of dtype is a `_to_copy` node of its own;
  - a number operand is of the kind of that dtype (float for float, int for int) and is taken in it;
  - `add`, `mul` and other arithmetic is of numbers: what it means for bool is written as `bitwise_or`, …;
  - float16 and bfloat16 are computed in float32 and rounded once, at the end; their sums too;
  - `Tensor` overloads take the number of a `Scalar` overload where torch allows it; `alpha` is gone.
"""

from __future__ import annotations

from typing import Any

from kiln.base.graph import name_of as name_of

#: Elementwise functions of one tensor.
UNARY = frozenset((
    "neg abs sign reciprocal sqrt rsqrt exp exp2 expm1 log log2 log1p sin cos tan asin acos atan tanh "
    "sigmoid erf floor ceil round trunc relu isnan bitwise_not"
).split())  # fmt: skip
#: Elementwise functions of two operands, of which one may be a number.
BINARY = frozenset((
    "add sub mul div pow atan2 fmod remainder maximum minimum eq ne lt le gt ge bitwise_and bitwise_or "
    "bitwise_xor bitwise_left_shift bitwise_right_shift"
).split())  # fmt: skip
#: Elementwise functions of three tensors.
TERNARY = frozenset({"addcmul"})
CHOICE = frozenset({"where", "clamp"})
COPY = frozenset({"_to_copy", "clone"})
CREATE = frozenset({"full", "arange", "rand", "randn"})
REDUCE = frozenset("sum prod amax amin argmax argmin any all var_mean cumsum".split())
VIEW = frozenset("view expand permute slice select flip diagonal as_strided".split())
MOVE = frozenset(
    "cat constant_pad_nd slice_scatter gather index index_put scatter scatter_add scatter_reduce".split()
)
#: Tensors that are joined in loops: of more, each element would ask which one it is of, in code whose
#: compilation takes more than a second.
PIECES = 8

#: What a code generator of loop nests lowers directly.
PRIMITIVES = UNARY | BINARY | TERNARY | CHOICE | COPY | CREATE | REDUCE | VIEW | MOVE


def with_gradients(names: str) -> set[str]:
    """The ops of these names and those of their gradients."""
    return {name + end for name in names.split() for end in ("", "_backward")}


#: Calls of eager kernels at every level: work that loops do worse than libraries, or too rare to write anew.
KERNELS = frozenset(with_gradients(
    "convolution mkldnn_rnn_layer grid_sampler_2d "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d adaptive_max_pool2d "
    "adaptive_max_pool3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
)) | frozenset((
    "mm bmm addmm baddbmm mv addmv dot _cdist_forward _cdist_backward _pdist_forward col2im im2col "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell _embedding_bag _embedding_bag_forward_only "
    "_fft_c2c _fft_r2c _fft_c2r sort topk median kthvalue mode cumprod cummax cummin logcumsumexp "
    "nonzero masked_select masked_scatter searchsorted bucketize unfold as_strided_scatter diagonal_scatter "
    "randint randperm multinomial empty empty_strided sinh cosh asinh acosh atanh log10 erfc erfinv lgamma "
    "digamma copysign signbit hypot nextafter"
).split())  # fmt: skip

#: Core ops that are not primitive: each has an expansion, for most arguments.
COMPOSED = frozenset(with_gradients(
    "native_layer_norm native_group_norm native_dropout gelu silu elu leaky_relu _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d"
)) | frozenset((
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data nll_loss_forward "
    "nll_loss_backward embedding embedding_dense_backward _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training native_batch_norm_backward hardtanh threshold_backward "
    "tanh_backward sigmoid_backward mean var max min fmax fmin isinf logical_and logical_or logical_xor "
    "logical_not alias squeeze unsqueeze split_with_sizes select_scatter repeat roll index_select tril triu "
    "fill full_like scalar_tensor bernoulli reflection_pad1d reflection_pad2d reflection_pad3d "
    "replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "pixel_shuffle pixel_unshuffle"
).split())  # fmt: skip

CORE = PRIMITIVES | KERNELS | COMPOSED

LEVELS = ("aten", "core", "prims")


def level_of(overload: Any) -> str:
    """The lowest level at which a graph may hold an op: prims, kernel (a call at every level), core, aten."""
    name = name_of(overload)
    if name in PRIMITIVES:
        return "prims"
    return "kernel" if name in KERNELS else "core" if name in CORE else "aten"


assert len(CORE) == len(PRIMITIVES) + len(KERNELS) + len(COMPOSED), "an op stands in two lists"
