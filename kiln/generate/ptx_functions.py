"""Elementary functions of f32 that a GPU does better than polynomials: powers and quotients in hardware."""

from __future__ import annotations

import math
from collections.abc import Callable

from kiln.generate.functions import _ERF_FAR, _ERF_NEAR, _TANH, absolute, polynomial, with_sign
from kiln.generate.lanes import lanes
from kiln.generate.llvm import Value, fma

LOG2_E = 1.44269502162933349609375  # as f32
LOG2_E_REST = math.log2(math.e) - LOG2_E


def by_lanes(name: str, x: Value) -> Value:
    """An instruction of the machine, which takes scalars."""
    fn, width = x.fn, x.type.width
    if width == 1:
        return fn.call(name, x.type, x)
    result = Value(fn, "poison", x.type)
    for lane in range(width):
        value = fn.call(name, x.type.scalar, lanes(x, lane, 1))
        result = fn.emit(f"insertelement {x.type} {result.text}, float {value.text}, i64 {lane}", x.type)
    return result


def exp2(x: Value) -> Value:
    return by_lanes("llvm.nvvm.ex2.approx.f", x)


def exp(x: Value) -> Value:
    """2 to the power x log2(e), with the part of the product that its rounding loses."""
    x = x.intrinsic("minimum", 89.0).intrinsic("maximum", -104.0)
    high = x * LOG2_E
    low = fma(x, LOG2_E_REST, fma(x, LOG2_E, -high))
    return exp2(high) * fma(low, math.log(2), 1.0)


def over(a: Value, b: Value) -> Value:
    """a / b, to two units in the last place."""
    return a.fn.emit(f"fdiv afn {b.type} {b.like(a).text}, {b.text}", b.type)


def sigmoid(x: Value) -> Value:
    return over(x.like(1.0), exp(-x) + 1.0)


def tanh(x: Value) -> Value:
    a, z = absolute(x), x * x
    near = fma(polynomial(z, _TANH) * z, a, a)
    far = 1.0 - over(x.like(2.0), exp(a * 2.0) + 1.0)
    return with_sign((a < 0.625).where(near, far), x)


def erf(x: Value) -> Value:
    a = absolute(x)
    near = polynomial(x * x, _ERF_NEAR) * x
    bounded = a.intrinsic("minimum", 3.95)
    far = with_sign(1.0 - exp(-(polynomial(bounded, _ERF_FAR) * bounded)), x)
    return (a < 1.0).where(near, far)


OWN: dict[str, Callable[..., Value]] = {
    "exp": exp, "exp2": exp2, "sigmoid": sigmoid, "tanh": tanh, "erf": erf,
}  # fmt: skip
