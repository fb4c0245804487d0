"""Shape rules of elementwise ops: arithmetic, comparisons, activations and their gradients, writes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from kiln.ops.fake import FakeTensor, in_order, make, overlaps, similar
from kiln.ops.layout import (
    COMPLEX,
    COMPLEX_OF,
    FLOATS,
    INEXACT,
    INTEGERS,
    NUMBERS,
    PLAIN_DTYPES,
    REAL_OF,
    Mismatch,
    Size,
    alike,
    broadcast,
    pointwise,
    preserved,
    row_major,
)
from kiln.ops.meta import common_device
from kiln.ops.symint import below_zero
from kiln.ops.table import RULES, Rule, declare

Operand = Any
SCALAR: tuple[Size, Size] = ((), ())
WHOLE = INTEGERS | {torch.bool}


def like(x: Tensor, dtype: torch.dtype, computed: torch.dtype | None = None) -> FakeTensor:
    """The result of an elementwise op over one tensor, computed in another dtype where one is given."""
    size = x.shape
    if x.is_contiguous():
        return make(size, None, dtype, x.device)
    stride = x.stride()
    if computed is not None and computed is not x.dtype and x.device.type == "cpu":
        stride = preserved(size, stride)
    return make(size, pointwise(size, (size, stride)), dtype, x.device)


def over(operands: Iterable[Operand], computed: torch.dtype, dtype: torch.dtype | None = None) -> FakeTensor:
    """The result of an elementwise op over tensors and numbers, in the order in which the op reads them.

    On the CPU an operand of another dtype than the computation's is copied first, which closes gaps in it.
    """
    layouts = []
    shape: Size = ()
    device = None
    plain = True
    for operand in operands:
        if type(operand) in NUMBERS:
            layouts.append(SCALAR)
            continue
        size, stride = operand.shape, operand.stride()
        if not row_major(size, stride):
            plain = False
            if operand.dtype is not computed and operand.device.type == "cpu":
                stride = preserved(size, stride)
        # Tuples of different length are compared by their first elements, which may be symbolic.
        if len(size) != len(shape) or size != shape:
            shape = broadcast(shape, size)
        here = operand.device
        if device is None or (len(size) and device.type == "cpu"):
            device = here
        elif len(size) and here != device:
            raise two_devices(device, here)
        layouts.append((size, stride))
    assert device is not None
    strides = None if plain and 0 not in shape else pointwise(shape, *layouts)
    return make(shape, strides, dtype or computed, device)


def two_devices(a: torch.device, b: torch.device) -> RuntimeError:
    """The error for operands that live apart."""
    text = "Expected all tensors to be on the same device, but found at least two devices"
    return RuntimeError(f"{text}, {a} and {b}!")


#: Numbers of the kinds of symbolic ones.
LIKE: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}


def common_dtype(a: Operand, b: Operand) -> torch.dtype:
    """The dtype to which two operands, a tensor at least, are promoted."""
    tensor, other = (b, a) if type(a) in NUMBERS else (a, b)
    dtype, kind = tensor.dtype, type(other)
    if kind in NUMBERS:
        same = dtype in FLOATS and kind is not complex or kind is int and dtype in INTEGERS or kind is bool
        return dtype if same else torch.result_type(tensor, LIKE.get(kind, other))
    return dtype if dtype is other.dtype else torch.result_type(tensor, other)


def _same(x: Tensor, *_: Any, **__: Any) -> Any:
    return like(x, x.dtype) if x.dtype in FLOATS else NotImplemented


def _gelu(x: Tensor, *, approximate: str = "none") -> Any:
    if approximate not in ("none", "tanh"):
        raise Mismatch("no such approximation")
    return _same(x)


def _softshrink(x: Tensor, width: Any = 0.5) -> Any:
    if width < 0:
        raise Mismatch("a negative width")
    return _same(x)


def _float(x: Tensor, *_: Any, **__: Any) -> Any:
    dtype = x.dtype
    if dtype not in INEXACT:
        if dtype not in PLAIN_DTYPES:
            return NotImplemented
        dtype = torch.get_default_dtype()
    return like(x, dtype, dtype)


def _abs(x: Tensor) -> Any:
    dtype = x.dtype
    if dtype in COMPLEX:
        return in_order(x, REAL_OF[dtype])
    return NotImplemented if dtype is torch.bool else like(x, dtype)


def _hardtanh(x: Tensor, *_: Any) -> Any:
    if x.dtype not in FLOATS and x.dtype not in INTEGERS or x.dtype is torch.uint8:
        return NotImplemented
    return in_order(x)


def _subtract(a: Operand, b: Operand, *, alpha: Any = 1) -> Any:
    if any(v.dtype is torch.bool if isinstance(v, Tensor) else type(v) is bool for v in (a, b)):
        raise Mismatch("booleans are not subtracted")
    return _arithmetic(a, b, alpha=alpha)


def _arithmetic(a: Operand, b: Operand, *, alpha: Any = 1) -> Any:
    dtype = common_dtype(a, b)
    kind = type(alpha)
    if dtype is torch.bool or dtype not in PLAIN_DTYPES or kind is bool:
        return NotImplemented
    if dtype not in INEXACT and kind is not int:
        return NotImplemented
    return over((a, b), dtype)


def _to_float(a: Operand, b: Operand) -> Any:
    dtype = common_dtype(a, b)
    if dtype not in INEXACT:
        dtype = torch.get_default_dtype()
    return over((a, b), dtype)


def _complex(a: Tensor, b: Tensor) -> Any:
    dtype = a.dtype
    if dtype is not b.dtype or dtype not in FLOATS or dtype is torch.bfloat16:
        raise Mismatch("no complex dtype has these parts")
    return over((a, b), dtype, COMPLEX_OF[dtype])


def _heaviside(x: Tensor, values: Tensor) -> Any:
    if x.dtype is not values.dtype or x.dtype in COMPLEX:
        raise Mismatch("a step between tensors of two dtypes, or of complex numbers")
    return _real(x, values)


def _real(a: Operand, b: Operand) -> Any:
    dtype = common_dtype(a, b)
    return NotImplemented if dtype in COMPLEX or dtype is torch.bool else over((a, b), dtype)


def _of_kinds(a: Operand, b: Operand, kinds: frozenset[torch.dtype]) -> Any:
    dtype = common_dtype(a, b)
    return over((a, b), dtype) if dtype in kinds else NotImplemented


def _power(a: Operand, b: Operand) -> Any:
    dtype = common_dtype(a, b)
    if dtype not in INEXACT and type(b) in (int, torch.SymInt) and below_zero(b):
        raise Mismatch("an integer to a negative power")
    if dtype is torch.bool:
        return NotImplemented
    return like(a, dtype) if type(b) in NUMBERS else over((a, b), dtype)


def _gradient(a: Tensor, b: Tensor, *_: Any, **__: Any) -> Any:
    if a.dtype is not b.dtype or a.dtype not in INEXACT or a.shape != b.shape:
        return NotImplemented
    return over((a, b), a.dtype)


def where(condition: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> FakeTensor:
    """A choice between two tensors, each cast to `dtype` before."""
    layouts = [(condition.shape, condition.stride())]
    for t in (a, b):
        stride = t.stride() if t.dtype is dtype else preserved(t.shape, t.stride())
        layouts.append((t.shape, stride))
    shape = broadcast(broadcast(condition.shape, a.shape), b.shape)
    device = common_device([condition, a, b])
    return make(shape, pointwise(shape, *layouts), dtype, device)


def _ternary(a: Tensor, b: Tensor, c: Tensor, *, value: Any = 1) -> Any:
    if not a.dtype is b.dtype is c.dtype or a.dtype not in FLOATS:
        return NotImplemented
    return over((a, b, c), a.dtype)


def _lerp(a: Tensor, b: Tensor, weight: Operand) -> Any:
    if a.dtype is not b.dtype or a.dtype not in FLOATS:
        return NotImplemented
    return over((a, b) if type(weight) in NUMBERS else (a, b, weight), a.dtype)


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    if (low is None and high is None) or x.dtype in COMPLEX:
        return NotImplemented
    dtype = reduce(torch.promote_types, [common_dtype(x, v) for v in (low, high) if v is not None])
    return like(x, dtype, dtype)


def in_place(x: Any, *operands: Operand, **_: Any) -> Any:
    """`x`, when operands fit into it by shape and dtype."""
    size = x.shape
    for operand in operands:
        kind = type(operand)
        if kind in NUMBERS:
            if not torch.can_cast(common_dtype(x, operand), x.dtype):
                raise Mismatch("the result does not fit the dtype")
            continue
        other = operand.shape
        if not alike(other, size) and broadcast(size, other) != size:
            raise Mismatch("the result does not fit the shape")
        if operand.dtype is not x.dtype and not torch.can_cast(common_dtype(x, operand), x.dtype):
            raise Mismatch("the result does not fit the dtype")
    return writable(x)


def writable(x: Any) -> Any:
    """`x`, unless elements of it share a place."""
    if overlaps(x):
        raise Mismatch("elements share a place")
    return x


def _uniform(x: Any, low: float = 0, high: float = 1, **_: Any) -> Any:
    if low > high:
        raise Mismatch("the range is empty")
    return _floats(x)


def _subtract_in_place(x: Any, other: Operand, *, alpha: Any = 1) -> Any:
    kind = other.dtype if isinstance(other, Tensor) else type(other)
    if x.dtype is torch.bool or kind in (bool, torch.bool):
        raise Mismatch("booleans are not subtracted")
    return in_place(x, other)


def _copy(x: Any, source: Tensor, non_blocking: bool = False) -> Any:
    fits = not isinstance(source, Tensor) or alike(source.shape, x.shape)
    if not fits and broadcast(x.shape, source.shape) != x.shape:
        raise Mismatch("the source does not fit")
    return writable(x)


def _fills(x: Tensor, mask: Tensor, value: Any) -> bool:
    """Whether this is the plain case of filling: a mask of booleans, a value of the tensor's own kind."""
    if mask.dtype is not torch.bool or x.device != mask.device and mask.dim():
        return False
    if type(value) in NUMBERS:
        return type(value) is not complex or x.dtype in COMPLEX
    return value.dim() == 0 and (value.dtype not in COMPLEX or x.dtype in COMPLEX)


def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Any:
    if not _fills(x, mask, value):
        return NotImplemented
    size = x.shape
    return make(size if alike(mask.shape, size) else broadcast(size, mask.shape), None, x.dtype, x.device)


def _masked_fill_in_place(x: Any, mask: Tensor, value: Any) -> Any:
    if not _fills(x, mask, value):
        return NotImplemented
    if not alike(mask.shape, x.shape) and broadcast(x.shape, mask.shape) != x.shape:
        raise Mismatch("the mask does not fit")
    return writable(x)


def _dropout(x: Tensor, p: float, train: bool | None) -> Any:
    if x.dtype not in FLOATS or not x.is_contiguous() or x.device.type not in ("cpu", "cuda"):
        return NotImplemented
    return like(x, x.dtype), like(x, torch.bool)


def _log_sigmoid(x: Tensor) -> Any:
    if x.dtype not in FLOATS or x.device.type not in ("cpu", "cuda"):
        return NotImplemented
    if x.device.type == "cuda":  # which keeps nothing for the gradient
        return like(x, x.dtype), make((0,), None, x.dtype, x.device)
    # The CPU's kernel works on contiguous memory, whatever the layout of its input.
    return similar(x), similar(x)


def _floats(x: Any, fits: bool = True) -> Any:
    """`x`, where it is of floats and may be written: what eager's kernels in place take."""
    return writable(x) if x.dtype in FLOATS and fits else NotImplemented


DECLARED: dict[str, Rule] = {
    "silu mish hardswish hardsigmoid leaky_relu elu softplus hardshrink ceil floor trunc round frac": _same,
    "threshold": _same,
    "gelu": _gelu,
    "log_sigmoid_forward": _log_sigmoid,
    "softshrink": _softshrink,
    "neg sgn relu": lambda x: (
        like(x, x.dtype) if x.dtype in INEXACT or x.dtype in INTEGERS else NotImplemented),
    "hardtanh": _hardtanh,
    "acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh exp exp2 expm1 log log10 log1p log2 erf "
    "erfc erfinv sqrt rsqrt reciprocal sigmoid lgamma digamma": _float,
    "isnan logical_not": lambda x: like(x, torch.bool),
    "abs": _abs,
    "add.Tensor mul.Tensor mul.Scalar": _arithmetic,
    "add.Scalar": lambda a, b, alpha=1: _arithmetic(a, b, alpha=alpha),
    "sub.Tensor": _subtract,
    "sub.Scalar rsub.Scalar": lambda a, b, alpha=1: _subtract(a, b, alpha=alpha),
    "div.Tensor div.Scalar": _to_float,
    "div.Tensor_mode": lambda a, b, *, rounding_mode=None: (_real if rounding_mode else _to_float)(a, b),
    "maximum minimum fmax fmin remainder.Tensor fmod.Tensor": _real,
    "heaviside": _heaviside,
    "atan2 special_xlog1py xlogy.Tensor copysign.Tensor": _to_float,
    # The meta kernel makes a contiguous result whatever the operands are.
    "logaddexp logaddexp2": lambda a, b: _of_kinds(a, b, INEXACT),
    "complex polar": _complex,
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor": lambda a, b: _of_kinds(a, b, WHOLE),
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar "
    "gt.Scalar ge.Scalar logical_and logical_or logical_xor":
        lambda a, b: over((a, b), common_dtype(a, b), torch.bool),
    "pow.Tensor_Tensor pow.Tensor_Scalar": _power,
    "gelu_backward silu_backward tanh_backward sigmoid_backward hardswish_backward hardsigmoid_backward "
    "hardtanh_backward softplus_backward mish_backward softshrink_backward hardshrink_backward": _gradient,
    "threshold_backward leaky_relu_backward": lambda grad, x, *_: _gradient(x, grad),
    "where.self": lambda condition, a, b: (
        where(condition, a, b, common_dtype(a, b)) if condition.dtype is torch.bool else NotImplemented),
    "addcmul addcdiv": _ternary,
    "lerp.Scalar lerp.Tensor": _lerp,
    "clamp": _clamp,
    "clamp_min clamp_max": lambda x, bound: _clamp(x, bound),
    "add_.Tensor mul_.Tensor mul_.Scalar": in_place,
    "sub_.Tensor": _subtract_in_place,
    "div_.Tensor div_.Scalar addcmul_ addcdiv_ lerp_.Scalar":
        lambda x, *operands, **_: in_place(x, *operands) if x.dtype in FLOATS else NotImplemented,
    "relu_ silu_ gelu_ hardswish_ hardsigmoid_ hardtanh_ leaky_relu_ elu_ tanh_ sigmoid_ exp_ sqrt_ rsqrt_ "
    "neg_ abs_ log_ sin_ cos_": lambda x, *_, **__: _floats(x),
    "uniform_": _uniform,
    "normal_": lambda x, mean=0, std=1, **_: _floats(x, std >= 0),
    "bernoulli_.float": lambda x, p=0.5, **_: _floats(x, 0 <= p <= 1),
    "zero_": lambda x: writable(x),
    "fill_.Scalar": lambda x, value: NotImplemented if type(value) is complex else writable(x),
    "copy_": _copy,
    "masked_fill.Scalar masked_fill.Tensor": _masked_fill,
    "masked_fill_.Scalar masked_fill_.Tensor": _masked_fill_in_place,
    "native_dropout": _dropout,
}  # fmt: skip
declare(RULES, DECLARED)


def _checked(x: Tensor, holds: Tensor) -> Tensor:
    """The tensor, unless a condition does not hold for one of its elements."""
    torch._assert_async(holds.all(), "value out of range")
    return x.clone()


library = torch.library.Library("kiln", "FRAGMENT")
library.define("checked(Tensor x, Tensor holds) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for device in ("CPU", "CUDA"):
    library.impl("checked", _checked, device)
checked = torch.ops.kiln.checked.default
RULES[checked] = lambda x, holds: in_order(x)
