"""Arithmetic and its form at level prims: operands of one dtype, numbers of its kind, no alpha."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce, wraps
from typing import Any

import torch
from torch import Tensor

from kiln.ops.expansions.support import HALF, rounded, widened
from kiln.ops.layout import FLOATS, INEXACT, INTEGERS
from kiln.ops.symint import SYMBOLIC
from kiln.ops.table import Rule, aten, expansion, expansions

Kind = Callable[[torch.dtype], torch.dtype]


def promoted(*operands: Any) -> torch.dtype:
    """The dtype in which operands, tensors and numbers, meet."""
    first, *rest = operands
    tensors = [x for x in operands if isinstance(x, Tensor)]
    if len(tensors) < 3:
        found = [torch.result_type(first, other) for other in rest] or [first.dtype]
        return reduce(torch.promote_types, found)
    # A tensor without dimensions counts only where it is of a higher kind than those with some.
    whole, single = ([x.dtype for x in tensors if bool(x.dim()) is some] for some in (True, False))
    if not whole or not single:
        return reduce(torch.promote_types, whole or single)
    most, other = reduce(torch.promote_types, whole), reduce(torch.promote_types, single)
    return most if _rank(most) >= _rank(other) else torch.promote_types(most, other)


def _rank(dtype: torch.dtype) -> int:
    """The kind of a dtype, for promotion: truths, whole numbers, real ones, complex ones."""
    return int(dtype is not torch.bool) + int(dtype in INEXACT) + int(dtype.is_complex)


def of_kind(value: Any, dtype: torch.dtype) -> Any:
    """An operand in `dtype`: a tensor converted, a number of the kind that the dtype holds."""
    if isinstance(value, Tensor):
        return value.to(dtype)
    if dtype in FLOATS and type(value) in (int, bool):
        return float(value)
    return int(value) if dtype in INTEGERS and type(value) is bool else value


def together(function: Rule) -> Rule:
    """Hand an expansion its operands in the dtype in which they meet."""

    @wraps(function)
    def convert(*operands: Any, **options: Any) -> Any:
        dtype = promoted(*operands)
        return function(*[of_kind(value, dtype) for value in operands], **options)

    return convert


def settled(operands: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Whether all operands have the form of level prims already."""
    for value in operands:
        if isinstance(value, Tensor):
            if value.dtype is not dtype:
                return False
        elif dtype in FLOATS and type(value) in (int, bool):
            return False
    return True


def _normal(operation: Rule, kind: Kind, *operands: Any) -> Any:
    """The expansion of an op at level prims: its operands converted to the dtype in which it computes."""
    dtype = kind(promoted(*operands))
    if settled(operands, dtype):
        return NotImplemented
    return operation(*[of_kind(value, dtype) for value in operands])


def _scaled(operation: Rule, kind: Kind, a: Any, b: Any) -> Any:
    """The same of products and quotients: one number that halves are scaled by keeps its places."""
    dtype = kind(promoted(a, b))
    single = isinstance(b, Tensor) and b.device.type == "cpu" and all(n == 1 for n in b.shape)
    if not single or dtype not in HALF or b.dtype is dtype:
        return _normal(operation, kind, a, b)
    return operation(widened(of_kind(a, dtype)), b.to(torch.float32)).to(dtype)


def _as_is(dtype: torch.dtype) -> torch.dtype:
    return dtype


def to_float(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in INEXACT else torch.get_default_dtype()


def _declare(names: str, overloads: str, kind: Kind) -> None:
    for name in names.split():
        for overload in overloads.split():
            packet = getattr(aten, name)
            if overload in packet.overloads():
                operation = getattr(packet, overload)
                expansion(operation, complex_too=True)(partial(_normal, operation, kind))


_declare(
    "exp exp2 expm1 log log2 log1p sin cos tan asin acos atan tanh sigmoid erf sqrt rsqrt reciprocal",
    "default",
    to_float,
)
_declare("maximum minimum", "default", _as_is)
_declare(
    "eq ne lt le gt ge fmod remainder bitwise_and bitwise_or bitwise_xor",
    "Tensor Scalar Scalar_Tensor",
    _as_is,
)
_declare("bitwise_left_shift bitwise_right_shift", "Tensor Tensor_Scalar Scalar_Tensor", _as_is)
_declare("atan2", "default", to_float)
_declare("pow", "Tensor_Tensor Scalar", _as_is)


def _arithmetic(operation: Rule, a: Any, b: Any, alpha: Any, plain: bool) -> Any:
    dtype = promoted(a, b)
    if dtype is torch.bool:
        # The sum of truths is `or`; a difference is refused by the op itself.
        if operation is not aten.add.Tensor:
            return NotImplemented
        return torch.bitwise_or(a, b if alpha else torch.bitwise_and(b, False))
    if plain and alpha == 1 and settled((a, b), dtype):
        return NotImplemented
    a, b = of_kind(a, dtype), of_kind(b, dtype)
    if alpha == 1:
        return operation(a, b)
    if isinstance(b, Tensor):
        a = widened(a) if isinstance(a, Tensor) else a
        return operation(a, widened(b) * of_kind(alpha, dtype)).to(dtype)
    return operation(a, b * alpha)


@expansion(aten.rsub.Scalar, aten.rsub.Tensor, complex_too=True)
def rsub(a: Tensor, b: Any, alpha: Any = 1) -> Any:
    if isinstance(b, Tensor):
        return torch.sub(b, a, alpha=alpha)
    if promoted(a, b) is not a.dtype or a.dtype is torch.bool:
        return NotImplemented if a.dtype is torch.bool else rsub(a.to(promoted(a, b)), b, alpha)
    # -a + b rounds as b - a does.
    return torch.add(-a if alpha == 1 else a * -alpha, b)


def _with_number(operation: Rule, kind: Kind, a: Any, b: Any) -> Any:
    """The expansion of an overload for numbers, which no graph at level prims has."""
    return operation(*[of_kind(value, kind(promoted(a, b))) for value in (a, b)])


#: At level prims: operands of one dtype, no alpha.
ARITHMETIC: dict[str, Rule] = {
    "add.Tensor": lambda a, b, *, alpha=1: _arithmetic(aten.add.Tensor, a, b, alpha, True),
    "add.Scalar": lambda a, b, alpha=1: _arithmetic(aten.add.Tensor, a, b, alpha, False),
    "sub.Tensor": lambda a, b, *, alpha=1: _arithmetic(aten.sub.Tensor, a, b, alpha, True),
    "sub.Scalar": lambda a, b, alpha=1: _arithmetic(aten.sub.Tensor, a, b, alpha, False),
    "mul.Tensor": lambda a, b: (
        torch.bitwise_and(a, b) if promoted(a, b) is torch.bool else _scaled(torch.mul, _as_is, a, b)
    ),
    "mul.Scalar": partial(_with_number, torch.mul, _as_is),
    "div.Tensor": partial(_scaled, torch.div, to_float),
    "div.Scalar": partial(_with_number, torch.div, to_float),
}
expansions(ARITHMETIC, complex_too=True)


@expansion(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_rounded(a: Any, b: Any, *, rounding_mode: str | None) -> Any:
    """At level prims: operands of one dtype; without a mode a plain quotient."""
    if rounding_mode is None:
        return torch.div(a, b)
    return _scaled(partial(torch.div, rounding_mode=rounding_mode), _as_is, a, b)


expansions({"floor_divide floor_divide.Scalar": lambda a, b: torch.div(a, b, rounding_mode="floor")})


_POWERS: dict[float, Callable[[Tensor], Tensor]] = {
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: torch.sqrt,
    -0.5: torch.rsqrt,
    -1: torch.reciprocal,
    -2: lambda x: torch.reciprocal(x * x),
}


@expansion(aten.pow.Tensor_Scalar)
def power(x: Tensor, exponent: Any) -> Any:
    """At level prims: small powers are products, as in eager's kernel."""
    dtype = promoted(x, exponent)
    if type(exponent) in SYMBOLIC:
        return NotImplemented if settled((x, exponent), dtype) else torch.pow(x.to(dtype), exponent)
    if exponent == 1:
        return x.to(dtype) if dtype is not x.dtype else x.clone()
    if exponent == 0:
        return torch.full_like(x, 1, dtype=dtype)
    if dtype in HALF and type(exponent) is float and x.device.type == "cpu":  # eager's is of that type, too
        near = rounded(exponent, dtype)
        if abs(near - exponent) > 0:
            return torch.pow(x, near)
    write = _POWERS.get(exponent)
    if write is not None and (dtype in FLOATS or exponent in (2, 3)) and dtype is not torch.bool:
        return write(widened(x.to(dtype))).to(dtype)
    if settled((x, exponent), dtype):
        return NotImplemented
    return torch.pow(of_kind(x, dtype), of_kind(exponent, dtype))


@expansion(aten.where.self, complex_too=True)
def where(condition: Tensor, a: Tensor, b: Tensor) -> Any:
    """At level prims: a bool chooses between tensors of one dtype."""
    dtype = promoted(a, b)
    if settled((a, b), dtype) and condition.dtype is torch.bool:
        return NotImplemented
    return torch.where(condition.to(torch.bool), a.to(dtype), b.to(dtype))
