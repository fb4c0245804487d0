"""The three levels of graphs: aten, core and prims, as closed lists of ops with what each means.

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

#: Elementwise functions of one tensor.
UNARY = {
    "neg": "-x",
    "abs": "|x|",
    "sign": "-1, 0 or 1 by the sign of x; 0 for NaN",
    "reciprocal": "1 / x",
    "sqrt": "the square root",
    "rsqrt": "1 / sqrt(x)",
    "exp": "e ** x",
    "exp2": "2 ** x",
    "expm1": "e ** x - 1, exact near 0",
    "log": "the natural logarithm",
    "log2": "the logarithm to base 2",
    "log1p": "log(1 + x), exact near 0",
    "sin": "sine",
    "cos": "cosine",
    "tan": "tangent",
    "asin": "inverse sine",
    "acos": "inverse cosine",
    "atan": "inverse tangent",
    "tanh": "hyperbolic tangent",
    "sigmoid": "1 / (1 + exp(-x))",
    "erf": "the error function",
    "floor": "the largest integer not above x",
    "ceil": "the smallest integer not below x",
    "round": "the nearest integer, halves to even",
    "trunc": "x without its fraction",
    "relu": "max(x, 0); NaN stays",
    "isnan": "whether x is NaN",
    "bitwise_not": "all bits inverted; `not` for bool",
}

#: Elementwise functions of two operands, of which one may be a number.
BINARY = {
    "add": "a + b",
    "sub": "a - b",
    "mul": "a * b",
    "div": "a / b; with a rounding mode the quotient rounded down (floor) or to zero (trunc)",
    "pow": "a ** b",
    "atan2": "the angle of the point (b, a)",
    "fmod": "the remainder of a / b with the sign of a",
    "remainder": "the remainder of a / b with the sign of b",
    "maximum": "the larger; NaN if one is NaN",
    "minimum": "the smaller; NaN if one is NaN",
    "eq": "a == b",
    "ne": "a != b",
    "lt": "a < b",
    "le": "a <= b",
    "gt": "a > b",
    "ge": "a >= b",
    "bitwise_and": "a & b",
    "bitwise_or": "a | b",
    "bitwise_xor": "a ^ b",
    "bitwise_left_shift": "a << b",
    "bitwise_right_shift": "a >> b, arithmetic",
}

#: Elementwise functions of three tensors.
TERNARY = {
    "addcmul": "a + b * c, rounded once",
}

CHOICE = {
    "where": "a where the condition holds, else b",
    "clamp": "x held between two numbers, either of which may be missing; NaN stays",
}

COPY = {
    "_to_copy": "the tensor in another dtype (or, as a kernel, on another device)",
    "clone": "a copy; a memory format says in which layout",
}

CREATE = {
    "full": "one number everywhere",
    "arange": "start, start + step, …",
    "rand": "uniform random numbers in [0, 1)",
    "randn": "normal random numbers",
}

REDUCE = {
    "sum": "the sum over some dimensions",
    "prod": "the product over one dimension, or all",
    "amax": "the largest over some dimensions; NaN wins",
    "amin": "the smallest over some dimensions; NaN wins",
    "argmax": "the place of the first largest",
    "argmin": "the place of the first smallest",
    "any": "whether one is true, over some dimensions",
    "all": "whether all are true, over some dimensions",
    "var_mean": "variance (divisor n - correction) and mean over some dimensions, by Welford's or two passes",
    "cumsum": "running sums along a dimension",
}

VIEW = {
    "view": "the same elements in another shape (or, `view.dtype`, the same bits as another dtype)",
    "expand": "dimensions of extent 1 repeated",
    "permute": "dimensions in another order",
    "slice": "every step-th place of a dimension, from start to end",
    "select": "one place of a dimension, which goes",
    "flip": "dimensions backwards",
    "diagonal": "the diagonal of two dimensions, as the last one",
    "as_strided": "any sizes and strides over the same memory",
}

MOVE = {
    "cat": "tensors joined along a dimension",
    "constant_pad_nd": "a border of one number",
    "slice_scatter": "a tensor with a slice replaced",
    "gather": "out[i][j] = x[index[i][j]][j]",
    "index": "elements at places given by index tensors",
    "index_put": "elements at places given by index tensors replaced, or added to",
    "scatter": "out[index[i][j]][j] = source[i][j]",
    "scatter_add": "out[index[i][j]][j] += source[i][j]",
    "scatter_reduce": "scatter with a sum, product, mean, largest or smallest",
}

#: What a code generator of loop nests lowers directly.
PRIMITIVES: dict[str, str] = {
    **UNARY, **BINARY, **TERNARY, **CHOICE, **COPY, **CREATE, **REDUCE, **VIEW, **MOVE,
}  # fmt: skip

#: Calls of eager kernels at every level: work that loops do worse than libraries, or too rare to write anew.
KERNELS: dict[str, str] = {
    "mm": "matrix product",
    "bmm": "batch of matrix products",
    "addmm": "matrix product plus a matrix or a bias",
    "baddbmm": "batch of matrix products plus one",
    "mv": "matrix times vector",
    "addmv": "matrix times vector plus a vector",
    "dot": "inner product",
    "convolution": "convolution, plain and transposed, of any rank",
    "convolution_backward": "its three gradients",
    "_scaled_dot_product_flash_attention": "attention in blocks",
    "_scaled_dot_product_flash_attention_backward": "its gradients",
    "_scaled_dot_product_flash_attention_for_cpu": "attention in blocks, on the CPU",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "its gradients",
    "_scaled_dot_product_efficient_attention": "attention with little memory",
    "_scaled_dot_product_efficient_attention_backward": "its gradients",
    "_scaled_dot_product_cudnn_attention": "attention by cuDNN",
    "_scaled_dot_product_cudnn_attention_backward": "its gradients",
    "mkldnn_rnn_layer": "one LSTM layer over a sequence",
    "mkldnn_rnn_layer_backward": "its gradients",
    "_thnn_fused_lstm_cell": "one step of an LSTM",
    "_thnn_fused_gru_cell": "one step of a GRU",
    "max_pool2d_with_indices": "the largest of each window, and its place",
    "max_pool2d_with_indices_backward": "its gradient",
    "max_pool3d_with_indices": "the largest of each window, and its place",
    "max_pool3d_with_indices_backward": "its gradient",
    "avg_pool2d": "the mean of each window",
    "avg_pool2d_backward": "its gradient",
    "avg_pool3d": "the mean of each window",
    "avg_pool3d_backward": "its gradient",
    "adaptive_max_pool2d": "the largest of windows that fill the output",
    "adaptive_max_pool2d_backward": "its gradient",
    "adaptive_max_pool3d": "the largest of windows that fill the output",
    "adaptive_max_pool3d_backward": "its gradient",
    "upsample_linear1d": "linear interpolation",
    "upsample_linear1d_backward": "its gradient",
    "upsample_bilinear2d": "linear interpolation in two dimensions",
    "upsample_bilinear2d_backward": "its gradient",
    "upsample_trilinear3d": "linear interpolation in three dimensions",
    "upsample_trilinear3d_backward": "its gradient",
    "upsample_bicubic2d": "cubic interpolation",
    "upsample_bicubic2d_backward": "its gradient",
    "grid_sampler_2d": "interpolation at given places",
    "grid_sampler_2d_backward": "its gradient",
    "col2im": "overlapping blocks summed into an image",
    "im2col": "the blocks of an image as columns",
    "_embedding_bag": "sums of rows of a table",
    "_embedding_bag_forward_only": "sums of rows of a table, without what gradients need",
    "_fft_c2c": "Fourier transform",
    "_fft_r2c": "Fourier transform of real numbers",
    "_fft_c2r": "Fourier transform to real numbers",
    "_cdist_forward": "distances of all pairs",
    "_cdist_backward": "its gradient",
    "_pdist_forward": "distances within one set",
    "sort": "sorted values and their places",
    "topk": "the k largest and their places",
    "median": "the middle value",
    "kthvalue": "the k-th smallest",
    "mode": "the most frequent value",
    "cumprod": "running products",
    "cummax": "running largest values and their places",
    "cummin": "running smallest values and their places",
    "logcumsumexp": "running logarithms of sums of exponentials",
    "nonzero": "the places of what is not zero",
    "masked_select": "the elements under a mask",
    "masked_scatter": "elements under a mask replaced in order",
    "searchsorted": "places in a sorted sequence",
    "bucketize": "places among sorted borders",
    "unfold": "windows of a dimension as a new one, a view",
    "as_strided_scatter": "a tensor with what as_strided shows replaced",
    "diagonal_scatter": "a tensor with a diagonal replaced",
    "randint": "uniform random integers",
    "randperm": "a random permutation",
    "multinomial": "draws by weight",
    "empty": "memory as it comes",
    "empty_strided": "memory as it comes, in this layout",
    "sinh": "hyperbolic sine",
    "cosh": "hyperbolic cosine",
    "asinh": "inverse hyperbolic sine",
    "acosh": "inverse hyperbolic cosine",
    "atanh": "inverse hyperbolic tangent",
    "log10": "the logarithm to base 10",
    "erfc": "1 - erf(x)",
    "erfinv": "the inverse of erf",
    "lgamma": "log of the gamma function",
    "digamma": "its derivative",
    "copysign": "|a| with the sign of b",
    "signbit": "whether the sign bit is set",
    "hypot": "sqrt(a * a + b * b) without overflow",
    "nextafter": "the next number towards another",
}

#: Core ops that are not primitive: each has an expansion, for most arguments.
COMPOSED: dict[str, str] = {
    "_softmax": "exponentials divided by their sum",
    "_softmax_backward_data": "its gradient",
    "_log_softmax": "the logarithm of softmax",
    "_log_softmax_backward_data": "its gradient",
    "native_layer_norm": "normalised over the last dimensions",
    "native_layer_norm_backward": "its gradients",
    "native_group_norm": "normalised over groups of channels",
    "native_group_norm_backward": "its gradients",
    "_native_batch_norm_legit_functional": "normalised over the batch, with the new running statistics",
    "_native_batch_norm_legit_no_training": "normalised by the running statistics",
    "native_batch_norm_backward": "its gradients",
    "native_dropout": "elements zeroed at random, and the mask",
    "native_dropout_backward": "its gradient",
    "embedding": "rows of a table",
    "embedding_dense_backward": "its gradient",
    "gelu": "x * Phi(x)",
    "gelu_backward": "its gradient",
    "silu": "x * sigmoid(x)",
    "silu_backward": "its gradient",
    "elu": "x, or an exponential below 0",
    "elu_backward": "its gradient",
    "leaky_relu": "x, or a fraction of it below 0",
    "leaky_relu_backward": "its gradient",
    "hardtanh": "x held between two numbers, by its own kernel",
    "threshold_backward": "the gradient where the input is above a threshold",
    "tanh_backward": "grad * (1 - y * y)",
    "sigmoid_backward": "grad * y * (1 - y)",
    "nll_loss_forward": "minus the chosen log-probabilities, and the weight of all",
    "nll_loss_backward": "its gradient",
    "mean": "the mean over some dimensions",
    "var": "the variance over some dimensions",
    "max": "the largest (and its place, by dimension)",
    "min": "the smallest (and its place, by dimension)",
    "logical_and": "a and b, of any dtype",
    "logical_or": "a or b, of any dtype",
    "logical_xor": "a xor b, of any dtype",
    "logical_not": "not a, of any dtype",
    "isinf": "whether x is infinite",
    "fmax": "the larger; a number wins over NaN",
    "fmin": "the smaller; a number wins over NaN",
    "alias": "the tensor itself",
    "squeeze": "dimensions of extent 1 dropped",
    "unsqueeze": "a dimension of extent 1 added",
    "split_with_sizes": "pieces along a dimension",
    "select_scatter": "a tensor with one place of a dimension replaced",
    "repeat": "copies side by side",
    "roll": "elements moved round a dimension",
    "index_select": "places of one dimension",
    "tril": "the lower triangle",
    "triu": "the upper triangle",
    "fill": "one value everywhere, in the shape of a tensor",
    "full_like": "one number everywhere, in the layout of a tensor",
    "scalar_tensor": "a number as a tensor",
    "bernoulli": "random zeros and ones",
    "reflection_pad1d": "a border that mirrors the inside",
    "reflection_pad2d": "a border that mirrors the inside",
    "reflection_pad3d": "a border that mirrors the inside",
    "replication_pad2d": "a border that repeats the edge",
    "replication_pad3d": "a border that repeats the edge",
    "upsample_nearest1d": "each element repeated",
    "upsample_nearest2d": "each element repeated",
    "upsample_nearest3d": "each element repeated",
    "_adaptive_avg_pool2d": "the mean of windows that fill the output",
    "_adaptive_avg_pool2d_backward": "its gradient",
    "_adaptive_avg_pool3d": "the mean of windows that fill the output",
    "_adaptive_avg_pool3d_backward": "its gradient",
    "pixel_shuffle": "channels spread into space",
    "pixel_unshuffle": "space gathered into channels",
}

CORE: dict[str, str] = {**PRIMITIVES, **KERNELS, **COMPOSED}

LEVELS = ("aten", "core", "prims")


def name_of(overload: Any) -> str:
    """The name of the op that an overload belongs to, without its namespace; other callables have none."""
    schema = getattr(overload, "_schema", None)
    return schema.name.removeprefix("aten::") if schema is not None else ""


def level_of(overload: Any) -> str:
    """The lowest level at which a graph may hold an op: prims, kernel (a call at every level), core, aten."""
    name = name_of(overload)
    if name in PRIMITIVES:
        return "prims"
    return "kernel" if name in KERNELS else "core" if name in CORE else "aten"


assert len(CORE) == len(PRIMITIVES) + len(KERNELS) + len(COMPOSED), "an op stands in two lists"
