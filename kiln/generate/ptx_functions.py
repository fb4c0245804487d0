"""Elementary functions of f32 that a GPU does better than polynomials: powers and quotients in hardware."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from kiln.generate.functions import _ERF_FAR, _ERF_NEAR, _TANH, absolute, polynomial, with_sign
from kiln.generate.lanes import lanes
from kiln.generate.llvm import Value

# -log2(erfc(x)) / x on 0 <= x <= 4.3, for least absolute error of erfc; grows without end beyond
_ERFC = (1.627907028466312, 0.9184483787143083, 0.14826620032980398, -0.027573991047924656,
         -0.0003822098614101877, 0.0026190715917704904, -0.001086700693647956, 0.00024974984926620593,
         -3.273920715956846e-05, 1.9093162370966422e-06)  # fmt: skip
LOG2_E = 1.44269502162933349609375  # as f32


def _f32(number: float) -> str:
    """A number as PTX writes it."""
    return f"0f{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"


#: e^x = 2^n 2^f: n by one fma that saturates, so that it stays in range, and one that rounds down into the
#: low bits; f from the product with log2(e) in two parts; 2^n by shifting n + 127 to the exponent.
_EXP = (
    "{ .reg .f32 t, j; .reg .b32 s; "
    f"fma.rn.sat.f32 t, $1, {_f32(LOG2_E / 252)}, {_f32(0.5)}; "
    f"fma.rm.f32 t, t, {_f32(252.0)}, {_f32(1.5 * 2**23 + 1)}; "
    f"sub.rn.f32 j, {_f32(1.5 * 2**23 + 127)}, t; "
    f"fma.rn.f32 j, $1, {_f32(LOG2_E)}, j; "
    f"fma.rn.f32 j, $1, {_f32(math.log2(math.e) - LOG2_E)}, j; "
    "ex2.approx.ftz.f32 j, j; mov.b32 s, t; shl.b32 s, s, 23; mov.b32 t, s; mul.rn.f32 $0, j, t; }"
)
_EXP2 = "ex2.approx.f32 $0, $1;"
_SMALL_EXP2 = "ex2.approx.ftz.f32 $0, $1;"  # what is subnormal becomes 0
_QUOTIENT = "rcp.approx.ftz.f32 $0, $1;"  # LLVM's own loses its leave to be inexact in products


def _instructions(text: str, x: Value) -> Value:
    """PTX of a float for a float, in each lane."""
    fn, width = x.fn, x.type.width
    call = f'call float asm "{text}", "=f,f"(float '
    if width == 1:
        return fn.emit(f"{call}{x.text})", x.type)
    result = Value(fn, "poison", x.type)
    for lane in range(width):
        value = fn.emit(f"{call}{lanes(x, lane, 1).text})", x.type.scalar)
        result = fn.emit(f"insertelement {x.type} {result.text}, float {value.text}, i64 {lane}", x.type)
    return result


def exp(x: Value) -> Value:
    return _instructions(_EXP, x)


def exp_of_small(x: Value) -> Value:
    """e^x to as many digits as x has after the point; what is subnormal becomes 0."""
    return _instructions(_SMALL_EXP2, x * math.log2(math.e))


def over(a: float, b: Value) -> Value:
    """a / b for b that is not subnormal, to two units in the last place; what is subnormal becomes 0."""
    return _instructions(_QUOTIENT, b) * a


Power: TypeAlias = Callable[[Value], Value]


def sigmoid(x: Value, power: Power = exp) -> Value:
    return over(1.0, power(-x) + 1.0)


def tanh(x: Value, power: Power = exp) -> Value:
    a, z = absolute(x), x * x
    near = a * z * polynomial(z, _TANH) + a
    far = 1.0 - over(2.0, power(a * 2.0) + 1.0)
    return with_sign((a < 0.625).where(near, far), x)


def erf(x: Value, power: Power = exp) -> Value:
    a = absolute(x)
    near = polynomial(x * x, _ERF_NEAR) * x
    bounded = a.intrinsic("minimum", 3.95)
    far = with_sign(1.0 - power(-(polynomial(bounded, _ERF_FAR) * bounded)), x)
    return (a < 1.0).where(near, far)


def erf_and_one(x: Value) -> Value:
    """1 + erf(x), where near 0 no digits of erf alone are needed."""
    a = absolute(x)
    rest = _instructions(_SMALL_EXP2, -(polynomial(a, _ERFC) * a))
    return (x < 0.0).where(rest, 2.0 - rest)


def tanh_and_one(x: Value, power: Power = exp) -> Value:
    return over(2.0, power(x * -2.0) + 1.0)


OWN: dict[str, Callable[..., Value]] = {
    "exp": exp, "exp2": partial(_instructions, _EXP2), "sigmoid": sigmoid, "tanh": tanh, "erf": erf,
    "maximum": lambda a, b: a.intrinsic("maximum", b), "minimum": lambda a, b: a.intrinsic("minimum", b),
}  # fmt: skip
#: Functions with 1 added.
AND_ONE: dict[str, Callable[[Value], Value]] = {"erf": erf_and_one, "tanh": tanh_and_one}
#: The same where results are rounded to half types: powers to fewer digits than f32 has, at less cost.
OWN_OF_HALVES: dict[str, Callable[..., Value]] = {
    **OWN, "exp": exp_of_small,
    **{name: partial(OWN[name], power=exp_of_small) for name in ("sigmoid", "tanh", "erf")},
}  # fmt: skip
AND_ONE_OF_HALVES: dict[str, Callable[[Value], Value]] = {
    **AND_ONE,
    "tanh": partial(tanh_and_one, power=exp_of_small),
}
