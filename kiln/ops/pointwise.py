"""Shape rules of elementwise ops: arithmetic, comparisons, activations and their gradients, casts in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from kiln.ops.fake import FakeTensor, make
from kiln.ops.layout import (
    COMPLEX,
    FLOATS,
    INEXACT,
    INTEGERS,
    NUMBERS,
    PLAIN_DTYPES,
    REAL_OF,
    Mismatch,
    Size,
    broadcast,
    casts,
    contiguous,
    of_number,
    outranked,
    pointwise,
    promote,
    promote_number,
)
from kiln.ops.table import RULES, aten

Operand = Any
SCALAR: tuple[Size, Size] = ((), ())


def like(x: torch.Tensor, dtype: torch.dtype) -> FakeTensor:
    """The result of an elementwise op over one tensor."""
    size = x.shape
    return make(size, None if x.is_contiguous() else pointwise(size, (size, x.stride())), dtype, x.device)


def over(operands: Iterable[Operand], dtype: torch.dtype) -> FakeTensor:
    """The result of an elementwise op over tensors and numbers, in the order in which the op reads them."""
    layouts = []
    shape: Size = ()
    device = None
    plain = True
    for operand in operands:
        if type(operand) in NUMBERS:
            layouts.append(SCALAR)
            continue
        size, stride = operand.shape, operand.stride()
        if stride != contiguous(size):
            plain = False
        if size != shape:
            shape = broadcast(shape, size)
        here = operand.device
        if device is None or (len(size) and device.type == "cpu"):
            device = here
        elif len(size) and here is not device and here != device:
            raise Mismatch("two devices")
        layouts.append((size, stride))
    assert device is not None
    return make(shape, None if plain and 0 not in shape else pointwise(shape, *layouts), dtype, device)


def common_dtype(a: Operand, b: Operand) -> torch.dtype:
    """The dtype to which two operands are promoted."""
    if type(b) in NUMBERS:
        return promote_number(a.dtype, type(b))
    if type(a) in NUMBERS:
        return promote_number(b.dtype, type(a))
    one, other = a.dtype, b.dtype
    return one if one is other else promote(one, a.dim(), other, b.dim())


def common_dtype_of_all(*operands: Operand) -> torch.dtype:
    """The dtype to which operands are promoted: dimensions before scalars before numbers."""
    ranks: list[torch.dtype | None] = [None, None, None]
    for operand in operands:
        if type(operand) in NUMBERS:
            rank, dtype = 2, of_number(type(operand))
        else:
            rank, dtype = 0 if operand.dim() else 1, operand.dtype
        seen = ranks[rank]
        ranks[rank] = dtype if seen is None else torch.promote_types(seen, dtype)
    result: torch.dtype | None = None
    for found in reversed(ranks):
        if found is not None:
            result = found if result is None else outranked(found, result)
    assert result is not None
    return result


def _same(x: torch.Tensor, *_: Any, **__: Any) -> Any:
    return like(x, x.dtype) if x.dtype in FLOATS else NotImplemented


def _any(x: torch.Tensor, *_: Any, **__: Any) -> Any:
    return like(x, x.dtype) if x.dtype in INEXACT or x.dtype in INTEGERS else NotImplemented


def _float(x: torch.Tensor, *_: Any, **__: Any) -> Any:
    dtype = x.dtype
    if dtype not in INEXACT:
        if dtype not in PLAIN_DTYPES:
            return NotImplemented
        dtype = torch.get_default_dtype()
    return like(x, dtype)


def _bool(x: torch.Tensor, *_: Any, **__: Any) -> Any:
    return like(x, torch.bool)


def _abs(x: torch.Tensor) -> Any:
    dtype = x.dtype
    return NotImplemented if dtype is torch.bool else like(x, REAL_OF.get(dtype, dtype))


def _arithmetic(a: Operand, b: Operand, *, alpha: Any = 1) -> Any:
    dtype = common_dtype(a, b)
    if dtype is torch.bool or dtype not in PLAIN_DTYPES or (alpha != 1 and dtype not in INEXACT):
        return NotImplemented
    return over((a, b), dtype)


def _to_float(a: Operand, b: Operand) -> Any:
    dtype = common_dtype(a, b)
    if dtype not in INEXACT:
        dtype = torch.get_default_dtype()
    return over((a, b), dtype)


def _real(a: Operand, b: Operand) -> Any:
    dtype = common_dtype(a, b)
    return NotImplemented if dtype in COMPLEX or dtype is torch.bool else over((a, b), dtype)


def _integral(a: Operand, b: Operand) -> Any:
    dtype = common_dtype(a, b)
    return over((a, b), dtype) if dtype in INTEGERS or dtype is torch.bool else NotImplemented


def _divide(a: Operand, b: Operand, *, rounding_mode: str | None = None) -> Any:
    return _to_float(a, b) if rounding_mode is None else _real(a, b)


def _compare(a: Operand, b: Operand) -> Any:
    return over((a, b), torch.bool)


def _power(a: Operand, b: Operand) -> Any:
    dtype = common_dtype(a, b)
    if dtype not in INEXACT:
        return NotImplemented
    return like(a, dtype) if type(b) in NUMBERS else over((a, b), dtype)


def _gradient(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> Any:
    return over((a, b), a.dtype) if a.dtype is b.dtype and a.dtype in FLOATS else NotImplemented


def _where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    if condition.dtype is not torch.bool:
        return NotImplemented
    return over((condition, a, b), common_dtype(a, b))


def _ternary(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, value: Any = 1) -> Any:
    if not a.dtype is b.dtype is c.dtype or a.dtype not in FLOATS:
        return NotImplemented
    return over((a, b, c), a.dtype)


def _lerp(a: torch.Tensor, b: torch.Tensor, weight: Operand) -> Any:
    if a.dtype is not b.dtype or a.dtype not in FLOATS:
        return NotImplemented
    return over((a, b) if type(weight) in NUMBERS else (a, b, weight), a.dtype)


def _clamp(x: torch.Tensor, low: Any = None, high: Any = None) -> Any:
    if (low is None and high is None) or x.dtype in COMPLEX:
        return NotImplemented
    dtype = common_dtype_of_all(x, *[v for v in (low, high) if v is not None])
    return like(x, dtype)


def _bound(x: torch.Tensor, bound: Any) -> Any:
    return _clamp(x, bound)


def in_place(x: Any, *operands: Operand, **_: Any) -> Any:
    """`x`, when operands fit into it by shape and dtype."""
    size = x.shape
    for operand in operands:
        kind = type(operand)
        if kind in NUMBERS:
            if not casts(promote_number(x.dtype, kind), x.dtype):
                return NotImplemented
            continue
        other = operand.shape
        if other != size and broadcast(size, other) != size:
            return NotImplemented
        if operand.dtype is not x.dtype and not casts(common_dtype(x, operand), x.dtype):
            return NotImplemented
    # Writing through a broadcast dimension is an error that the meta kernels find.
    return NotImplemented if 0 in x.stride() else x


def _in_place_float(x: Any, *operands: Operand, **kwargs: Any) -> Any:
    return in_place(x, *operands) if x.dtype in FLOATS and not kwargs.get("rounding_mode") else NotImplemented


def _in_place_activation(x: Any, *_: Any, **__: Any) -> Any:
    return x if x.dtype in FLOATS and 0 not in x.stride() else NotImplemented


def _fill(x: Any, *_: Any, **__: Any) -> Any:
    return NotImplemented if 0 in x.stride() else x


def _copy(x: Any, source: torch.Tensor, non_blocking: bool = False) -> Any:
    if source.shape != x.shape and broadcast(x.shape, source.shape) != x.shape:
        return NotImplemented
    return NotImplemented if 0 in x.stride() else x


def _masked_fill(x: torch.Tensor, mask: torch.Tensor, value: Any) -> Any:
    if mask.dtype is not torch.bool or not (type(value) in NUMBERS or value.dim() == 0):
        return NotImplemented
    if type(value) in NUMBERS and not casts(of_number(type(value)), x.dtype) and x.dtype not in FLOATS:
        return NotImplemented
    if type(value) not in NUMBERS and value.dtype is not x.dtype:
        return NotImplemented
    size = x.shape
    shape = size if mask.shape == size else broadcast(mask.shape, size)
    if shape != size or not x.is_contiguous():
        return NotImplemented
    return make(shape, None, x.dtype, x.device)


def _masked_fill_in_place(x: Any, mask: torch.Tensor, value: Any) -> Any:
    if mask.dtype is not torch.bool or type(value) not in NUMBERS or x.dtype not in FLOATS or type(value) is complex:
        return NotImplemented
    if mask.shape != x.shape and broadcast(x.shape, mask.shape) != x.shape:
        return NotImplemented
    return NotImplemented if 0 in x.stride() else x


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    if x.dtype not in FLOATS or not x.is_contiguous() or not train or x.device.type != "cpu":
        return NotImplemented
    return like(x, x.dtype), like(x, torch.bool)


def declare(rule: Callable[..., Any], names: str, overload: str = "default") -> None:
    """Give `rule` to one overload of each named op."""
    for name in names.split():
        target = getattr(getattr(aten, name), overload)
        assert target not in RULES, f"{target} has two shape rules"
        RULES[target] = rule


declare(
    _same,
    "relu gelu silu mish hardswish hardsigmoid hardtanh leaky_relu elu softplus softshrink hardshrink "
    "ceil floor trunc round frac threshold",
)
declare(_any, "neg sgn")
declare(
    _float,
    "acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh exp exp2 expm1 log log10 log1p log2 "
    "erf erfc erfinv sqrt rsqrt reciprocal sigmoid lgamma digamma",
)
declare(_bool, "isnan logical_not")
declare(_abs, "abs")
declare(_arithmetic, "add sub mul", "Tensor")
declare(_divide, "div", "Tensor")
declare(_divide, "div", "Tensor_mode")
declare(_real, "maximum minimum fmax fmin")
declare(_real, "remainder fmod", "Tensor")
declare(_to_float, "atan2")
declare(_integral, "bitwise_and bitwise_or bitwise_xor", "Tensor")
declare(_compare, "eq ne lt le gt ge", "Tensor")
declare(_compare, "eq ne lt le gt ge", "Scalar")
declare(_compare, "logical_and logical_or logical_xor")
declare(_power, "pow", "Tensor_Tensor")
declare(_power, "pow", "Tensor_Scalar")
declare(_gradient, "threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward")
declare(_where, "where", "self")
declare(_ternary, "addcmul addcdiv")
declare(_lerp, "lerp", "Scalar")
declare(_lerp, "lerp", "Tensor")
declare(_clamp, "clamp")
declare(_bound, "clamp_min clamp_max")
declare(in_place, "add_ sub_ mul_", "Tensor")
declare(_in_place_float, "div_", "Tensor")
declare(_in_place_float, "addcmul_ addcdiv_")
declare(_in_place_float, "lerp_", "Scalar")
declare(
    _in_place_activation,
    "relu_ silu_ gelu_ hardswish_ hardsigmoid_ hardtanh_ leaky_relu_ elu_ tanh_ sigmoid_ exp_ sqrt_ rsqrt_ neg_ "
    "abs_ log_ sin_ cos_ normal_ uniform_",
)
declare(_in_place_activation, "bernoulli_", "float")
declare(_fill, "zero_")
declare(_copy, "copy_")
declare(_masked_fill, "masked_fill", "Scalar")
declare(_masked_fill, "masked_fill", "Tensor")
declare(_masked_fill_in_place, "masked_fill_", "Scalar")
declare(_dropout, "native_dropout")
