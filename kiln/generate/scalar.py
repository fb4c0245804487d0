"""The scalar functions of kernels: what each primitive is on LLVM values, scalars or vectors alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from kiln.generate import functions
from kiln.generate.llvm import BF16, F16, F32, F64, I1, I8, I16, I32, I64, U8, U32, U64, Type, Value, fma

TYPES: dict[torch.dtype, Type] = {
    torch.float32: F32, torch.float64: F64, torch.float16: F16, torch.bfloat16: BF16, torch.int64: I64,
    torch.int32: I32, torch.int16: I16, torch.int8: I8, torch.uint8: U8, torch.bool: I1,
}  # fmt: skip

Scalar = Callable[..., Value]
MULTIPLIER, KEY_STEP, ROUNDS = 0xD256D193, 0x9E3779B9, 10  # of Philox 2x32
LOW_HALF = 0xFFFFFFFF


def _either(float_form: Scalar, integer_form: Scalar) -> Scalar:
    return lambda *args: (float_form if args[0].type.is_float else integer_form)(*args)


def _choice(name: str, relation: str) -> Scalar:
    """The larger or the smaller of two; a NaN wins."""

    def choose(a: Value, b: Value) -> Value:
        if (own := functions.own_function(name, a)) is not None:
            return own(a, b)
        wins = a.compare(relation, b)
        return (wins | functions.is_nan(a)).where(a, b) if a.type.is_float else wins.where(a, b)

    return choose


maximum, minimum = _choice("maximum", "gt"), _choice("minimum", "lt")


def _extreme(name: str) -> Scalar:
    """The larger or smaller of floats in a fold, where either zero will do; a NaN wins."""
    return lambda a, b: b.intrinsic(name, a, flags="nsz ")  # what is new is asked for NaN: folds wait less


def _sign(x: Value) -> Value:
    positive, negative = (x > 0).where(x.like(1), 0), (x < 0).where(x.like(1), 0)
    return positive - negative


def _abs(x: Value) -> Value:
    if x.type.is_float:
        return functions.absolute(x)
    return (x < 0).where(-x, x) if x.type.signed else x


def _remainder(a: Value, b: Value) -> Value:
    rest = SCALARS["fmod"](a, b)
    if not a.type.is_float and not a.type.signed:
        return rest
    other_side = rest.compare("ne", 0) & ((rest < 0) ^ (b < 0))
    return other_side.where(rest + b, rest)


def _div_floor(a: Value, b: Value) -> Value:
    if a.type.is_float:
        rest = functions.apply("fmod", a, b)
        quotient = (a - rest) / b
        other_side = rest.compare("ne", 0.0) & ((rest < 0.0) ^ (b < 0.0))
        quotient = other_side.where(quotient - 1.0, quotient)
        floor = quotient.intrinsic("floor")
        floor = ((quotient - floor) > 0.5).where(floor + 1.0, floor)
        zero = functions.with_sign(a.like(0.0), a / b)
        floor = quotient.compare("eq", 0.0).where(zero, floor)
        return b.compare("eq", 0.0).where(a / b, floor)
    quotient = _quotient(a, b)
    if not a.type.signed:
        return quotient
    rest = a - quotient * b
    return (rest.compare("ne", 0) & ((rest < 0) ^ (b < 0))).where(quotient - 1, quotient)


def _pow(a: Value, b: Value) -> Value:
    if a.type.is_float:
        return functions.apply("pow", a, b)
    result, base, exponent = a.like(1), a, b
    for _ in range(a.type.bits - a.type.signed):  # of a constant exponent the rest folds away
        odd = (exponent & 1).to_mask()
        result = odd.where(result * base, result)
        base, exponent = base * base, exponent >> 1
    if not a.type.signed:
        return result
    sign = (b & 1).to_mask().where(a, 1)
    unit = a.compare("eq", 1) | a.compare("eq", -1)
    return (b < 0).where(unit.where(sign, 0), result)


def _left_shift(a: Value, b: Value) -> Value:
    fits = _shiftable(b)
    return fits.where(a << fits.where(b, 0), 0)


def _right_shift(a: Value, b: Value) -> Value:
    fits = _shiftable(b)
    if not a.type.signed:
        return fits.where(a >> fits.where(b, 0), 0)
    return a >> fits.where(b, a.type.bits - 1)


def _shiftable(count: Value) -> Value:
    """Whether an integer can be shifted by this much; by more, and by less than nothing, all bits go."""
    return (count >= 0) & (count < count.type.bits)


def _quotient(a: Value, b: Value) -> Value:
    """a / b of integers towards zero; the divisor is not 0. The smallest number divided by -1 is itself."""
    if not a.type.signed:
        return a / b
    minus = b.compare("eq", -1)
    return minus.where(-a, a / minus.where(1, b))


def _rest(a: Value, b: Value) -> Value:
    """a - b * (a / b) of integers."""
    return a % (b.compare("eq", -1).where(1, b) if a.type.signed else b)


def _halves(x: Value) -> tuple[Value, Value]:
    """The high and the low 32 bits of x times MULTIPLIER."""
    if x.type.width % 2:
        product = x.to(U64) * MULTIPLIER
        return (product >> 32).to(U32), product.to(U32)
    # Processors multiply every second lane to 64 bits: lanes are taken in pairs and not spread and packed.
    pairs = x.bits(U64)
    even, odd = (pairs & LOW_HALF) * MULTIPLIER, (pairs >> 32) * MULTIPLIER
    high = (even >> 32) | (odd & ~LOW_HALF)
    return high.bits(U32), x * MULTIPLIER


def _uniform(word: int) -> Scalar:
    """A number in [0, 1) of a seed and a place: half of Philox 2x32-10, as `kiln.ops.random` defines it."""

    def draw(seed: Value, place: Value) -> Value:
        key = seed.to(U32)
        left = place.to(U32)
        right = left.like((place >> 32).to(U32)) ^ left.like((seed >> 32).to(U32))
        for _ in range(ROUNDS):
            high, low = _halves(left)
            left, right = high ^ left.like(key) ^ right, low
            key = key + KEY_STEP
        return ((left, right)[word] >> 8).to(I32).to(F32) * 2.0**-24

    return draw


def _whole(name: str) -> Scalar:
    """A number rounded in this way; integers stay."""
    return _either(lambda x: x.intrinsic(name), lambda x: x)


#: A primitive's name to what it is on values of its operands' type; comparisons give masks.
SCALARS: dict[str, Scalar] = {
    "neg": lambda x: -x,
    "abs": _abs,
    "sign": _sign,
    "reciprocal": lambda x: 1.0 / x,
    "sqrt": functions.square_root,
    "rsqrt": lambda x: 1.0 / functions.square_root(x),
    "sigmoid": functions.sigmoid,
    "exp_below": functions.exp_below,
    **{name: partial(functions.apply, name) for name in (
        "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "tanh",
        "erf", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "log10")},
    **{name: _whole(name) for name in ("floor", "ceil", "trunc")},
    "round": _whole("roundeven"),
    "relu": lambda x: (x < 0).where(x.like(0), x),
    "isnan": functions.is_nan,
    "bitwise_not": lambda x: ~x,
    "add": lambda a, b: a | b if a.type.kind == "i1" else a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a & b if a.type.kind == "i1" else a * b,
    "div": lambda a, b: a / b,
    "div_floor": _div_floor,
    "div_trunc": _either(lambda a, b: (a / b).intrinsic("trunc"), _quotient),
    "pow": _pow,
    "fmod": _either(partial(functions.apply, "fmod"), _rest),
    "remainder": _remainder,
    "maximum": maximum,
    "minimum": minimum,
    **{name: lambda a, b, name=name: a.compare(name, b) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "bitwise_left_shift": _left_shift,
    "bitwise_right_shift": _right_shift,
    "where": lambda c, a, b: c.where(a, b),
    "addcmul": lambda a, b, c: fma(b, c, a),
    "uniform_0": _uniform(0),
    "uniform_1": _uniform(1),
}  # fmt: skip

#: A fold's kind to its neutral element (floats, integers) and to how two values become one.
FOLDS: dict[str, tuple[float, Callable[[Type], int], Scalar]] = {
    "sum": (0.0, lambda t: 0, lambda a, b: a + b),
    "prod": (1.0, lambda t: 1, lambda a, b: a * b),
    "amax": (-math.inf, lambda t: -(1 << t.bits - 1) if t.signed and t.kind != "i1" else 0,
             _either(_extreme("maximum"), lambda a, b: maximum(b, a))),
    "amin": (math.inf, lambda t: (1 << t.bits - t.signed) - 1 if t.kind != "i1" else 1,
             _either(_extreme("minimum"), lambda a, b: minimum(b, a))),
    "top": (-math.inf, lambda t: 0, lambda a, b: (b > a).where(b, a)),
    "any": (0.0, lambda t: 0, lambda a, b: a | b),
    "all": (1.0, lambda t: 1, lambda a, b: a & b),
}  # fmt: skip
RUNNING = {
    "cumsum": "sum", "cumprod": "prod", "kiln::running_max": "amax", "kiln::running_min": "amin",
    "kiln::running_sum": "sum", "kiln::running_product": "prod", "kiln::recurrence": "sum",
}  # fmt: skip
FOLDS |= {running: FOLDS[kind] for running, kind in RUNNING.items()}


Combine: TypeAlias = Callable[..., tuple[Value, Value]]


def _first(relation: str, last: bool = False) -> Combine:
    """The better of two values with its place, of equals the earlier; NaN is better than any number.

    Of two NaN it is the earlier, or the later where it is the `last` that is asked for.
    """

    def combine(a: Value, here: Value, b: Value, there: Value) -> tuple[Value, Value]:
        better, same = b.compare(relation, a), b.compare("eq", a)
        taken = better | (same & (there < here))
        if a.type.is_float:
            mine, other = functions.is_nan(a), functions.is_nan(b)
            later = (there > here) if last else (there < here)
            taken = taken | (other & (~mine | later))
        return taken.where(b, a), taken.where(there, here)

    return combine


def _further(relation: str, last: bool = False) -> Combine:
    """The same of a value with a place before the other's."""

    def combine(a: Value, here: Value, b: Value, there: Value) -> tuple[Value, Value]:
        taken = b.compare(relation, a)
        if a.type.is_float and last:
            taken = taken | functions.is_nan(b)
        elif a.type.is_float:  # better or not comparable, and what is held is a number
            other = b.fn.emit(f"fcmp u{relation} {b.type} {b.text}, {a.text}", taken.type)
            taken = other & a.compare("eq", a)
        return taken.where(b, a), taken.where(there, here)

    return combine


#: Folds that carry a place with each value, which is 0 at first: of what is no better than nothing at all the
#: first element is the best. How two of them become one, in any order and where the second comes later.
_KINDS: dict[str, tuple[str, bool]] = {
    "argmax": ("gt", False), "argmin": ("lt", False), "kiln::pooled_place": ("gt", True),
}  # fmt: skip
PLACED: dict[str, Combine] = {name: _first(*kind) for name, kind in _KINDS.items()}
IN_ORDER: dict[str, Combine] = {name: _further(*kind) for name, kind in _KINDS.items()}
FOLDS |= {name: FOLDS["amax" if relation == "gt" else "amin"] for name, (relation, _) in _KINDS.items()}


def convert(x: Value, dtype: torch.dtype) -> Value:
    """A value as another dtype; half types stay f32 in registers and are rounded."""
    wanted = TYPES[dtype]
    held = functions.compute_type(wanted)
    if wanted.kind == held.kind:
        return x.to(held)
    return x.to(held).to(wanted).to(held)
