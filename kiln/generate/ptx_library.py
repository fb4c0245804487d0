"""Functions of f64 for GPUs, which have no C library: what kernels call by name, defined beside them.

Errors are a few units in the last place of f64. Series are Taylor's, long enough on their intervals.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

from kiln.generate.functions import (
    absolute,
    acos_64,
    asin_64,
    atan2_64,
    atan_64,
    is_nan,
    polynomial,
    with_sign,
)
from kiln.generate.llvm import F64, I64, PTR, U64, Module, Type, Value, fma
from kiln.generate.ptx_powers import erf, pow

LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
HALF_PI = (1.5707963267948966, 6.123233995736766e-17)
ROUNDER = 1.5 * 2.0**52
U128 = Type("i128", signed=False)
TABLE = "kiln_two_over_pi"

_EXP = tuple(1 / math.factorial(k + 2) for k in range(12))
_SIN = tuple((-1) ** (k + 1) / math.factorial(2 * k + 3) for k in range(8))
_COS = tuple((-1) ** k / math.factorial(2 * k + 4) for k in range(8))
_LOG = tuple(2 / (2 * k + 3) for k in range(10))
# (atan(x) / x - 1) / x^2 on 0 <= x^2 <= tan(pi / 8)^2
_ATAN = (-0.3333333333333333, 0.1999999999999999, -0.1428571428571135, 0.11111111110735426,
         -0.09090909065860553, 0.07692306695758537, -0.06666641129762908, 0.05881912324161644,
         -0.052579166225190925, 0.04718599511902937, -0.04101230609975993, 0.03056163878922734,
         -0.013843492321777154)  # fmt: skip
# (asin(x) / x - 1) / x^2 on 0 <= x^2 <= 1 / 4
_ASIN = (0.16666666666666666, 0.07500000000000118, 0.044642857142551895, 0.03038194447553234,
         0.02237215744350722, 0.017352816540325496, 0.01396378001220357, 0.011566459612121669,
         0.009621842970100282, 0.009319560794767446, 0.0030448799094556773, 0.019554513336123378,
         -0.01924167174674304, 0.02961201126495512)  # fmt: skip


def _power(x: Value, n: Value) -> Value:
    """x 2^n in two steps; n is whole."""
    half = n >> 1
    for part in (half, n - half):
        x = x * ((part + 1023) << 52).bits(F64)
    return x


def _exp_of(r: Value, rounded: Value) -> Value:
    return _power(fma(polynomial(r, _EXP), r * r, r) + 1.0, rounded.bits(I64) - 0x4338000000000000)


def _bounded(x: Value, low: float, high: float) -> Value:
    x = (x > high).where(high, x)
    return (x < low).where(low, x)


def exp(x: Value) -> Value:
    x = _bounded(x, -746.0, 710.0)
    rounded = fma(x, 1 / math.log(2), ROUNDER)
    n = rounded - ROUNDER
    return _exp_of(fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x)), rounded)


def exp2(x: Value) -> Value:
    x = _bounded(x, -1076.0, 1025.0)
    rounded = x + ROUNDER
    return _exp_of((x - (rounded - ROUNDER)) * math.log(2), rounded)


def expm1(x: Value) -> Value:
    near = fma(polynomial(x, _EXP), x * x, x)
    return with_sign((absolute(x) < 0.34).where(near, exp(x) - 1.0), x)


def log(x: Value) -> Value:
    tiny = x < 2.0**-1022
    scaled = tiny.where(x * 2.0**54, x)
    bits = scaled.bits(I64)
    e = (bits - 0x3FE6A09E667F3BCD) >> 52
    f = (bits - (e << 52)).bits(F64) - 1.0
    s = f / (f + 2.0)
    z = s * s
    n = e.to(F64) - tiny.where(x.like(54.0), 0.0)
    half = f * f * 0.5
    rest = s * (half + polynomial(z, _LOG) * z)
    y = fma(n, LN2_HIGH, f - (half - fma(n, LN2_LOW, rest)))
    y = x.compare("eq", 0.0).where(-math.inf, y)
    y = x.compare("eq", math.inf).where(math.inf, y)
    return (x >= 0.0).where(y, math.nan)


def log1p(x: Value) -> Value:
    u = x + 1.0
    lost = (x - (u - 1.0)) / u
    usual = log(u) + (absolute(u) < math.inf).where(lost, 0.0)
    return u.compare("eq", 1.0).where(x, usual)


def tanh(x: Value) -> Value:
    e = expm1(_bounded(absolute(x), 0.0, 30.0) * 2.0)
    return with_sign(is_nan(x).where(x, e / (e + 2.0)), x)


# Angles


def two_over_pi(words: int = 22) -> list[int]:
    """Bits of 2/pi in words of 64, after one word of zeros."""
    bits = 64 * (words + 2)

    def arctangent(n: int) -> int:
        total, power, k = 0, (1 << bits) // n, 1
        while power:
            total += power // k if k % 4 == 1 else -(power // k)
            power, k = power // (n * n), k + 2
        return total

    pi = 4 * (4 * arctangent(5) - arctangent(239))
    ratio = (2 << 2 * bits) // pi
    return [0, *[ratio >> bits - 64 * (i + 1) & (1 << 64) - 1 for i in range(words)]]


def _large(x: Value) -> tuple[Value, Value]:
    """The rest of |x| >= 2^20 by pi / 2 and the quadrant: its mantissa by the bits of 2/pi that matter."""
    fn = x.fn
    bits = Value(fn, absolute(x).bits(I64).text, U64)
    mantissa = bits & (1 << 52) - 1 | 1 << 52
    start = (bits >> 52) - (1075 + 2 - 64)
    start = (start > 22 * 64 - 256).where(0, start)  # what is not finite
    table = Value(fn, f"@{TABLE}", PTR)
    words = [fn.load(fn.at(table, (start >> 6) + i, I64), U64) for i in range(4)]
    shift = start & 63
    w0, w1, w2 = (words[i].intrinsic("fshl", words[i + 1], shift) for i in range(3))
    low2, high2 = _product(mantissa, w2)
    low1, high1 = _product(mantissa, w1)
    middle = low1 + high2
    top = mantissa * w0 + high1 + (middle < low1).to(U64)
    fraction = top << 2 | middle >> 62
    lower = (middle << 2 | low2 >> 62).to(F64)
    quadrant = (top >> 62) + (fraction >> 63)
    turns = fma(lower, 2.0**-128, Value(fn, fraction.text, I64).to(F64) * 2.0**-64)
    return turns * (math.pi / 2), Value(fn, quadrant.text, I64)


def _product(a: Value, b: Value) -> tuple[Value, Value]:
    whole = a.to(U128) * b.to(U128)
    return whole.to(U64), (whole >> 64).to(U64)


def _reduced(x: Value) -> tuple[Value, Value]:
    """|x| without multiples of pi / 2, and how many there were."""
    size = absolute(x)
    rounded = fma(size, 2 / math.pi, ROUNDER)
    n = rounded - ROUNDER
    r = fma(n, -HALF_PI[1], fma(n, -HALF_PI[0], size))
    rest, quadrant = _large(x)
    small = size < 2.0**20
    return small.where(r, rest), small.where(rounded.bits(I64), quadrant)


def _sine(r: Value) -> Value:
    z = r * r
    return fma(polynomial(z, _SIN) * z, r, r)


def _cosine(r: Value) -> Value:
    z = r * r
    return fma(polynomial(z, _COS), z * z, fma(z, -0.5, 1.0))


def _turned(r: Value, quadrant: Value) -> Value:
    value = (quadrant & 1).to_mask().where(_cosine(r), _sine(r))
    return (quadrant & 2).to_mask().where(-value, value)


def _finite(x: Value, y: Value) -> Value:
    return (absolute(x) < math.inf).where(y, math.nan)


def sin(x: Value) -> Value:
    y = _turned(*_reduced(x))
    return _finite(x, x.compare("eq", 0.0).where(x, (x < 0.0).where(-y, y)))


def cos(x: Value) -> Value:
    r, quadrant = _reduced(x)
    return _finite(x, _turned(r, quadrant + 1))


def tan(x: Value) -> Value:
    r, quadrant = _reduced(x)
    odd = (quadrant & 1).to_mask()
    y = odd.where(-_cosine(r), _sine(r)) / odd.where(_sine(r), _cosine(r))
    return _finite(x, x.compare("eq", 0.0).where(x, (x < 0.0).where(-y, y)))


def fmod(x: Value, y: Value) -> Value:
    """x less the largest multiple of y that is not larger: multiples by powers of two, each step exact."""
    fn = x.fn
    a, b = absolute(x), absolute(y)
    head, turn, done = fn.label("head"), fn.label("turn"), fn.label("done")
    usable = (a < math.inf) & (b > 0.0)
    begin, origin = usable.where(a, 0.0), fn.block
    fn.jump(head)
    fn.start(head)
    rest = fn.phi(F64)
    rest.arrive(begin, origin)
    fn.branch(rest >= (usable.where(b, math.inf)), turn, done)
    fn.start(turn)
    apart = (rest.bits(I64) >> 52) - (b.bits(I64) >> 52)
    multiple = (b.bits(I64) + (apart << 52)).bits(F64)
    multiple = (multiple > rest).where(multiple * 0.5, multiple)
    rest.arrive(rest - multiple, fn.block)
    fn.jump(head)
    fn.start(done)
    return (usable & (b >= 0.0)).where(with_sign(rest, x), math.nan)


LIBRARY: dict[str, Callable[..., Value]] = {
    "exp": exp, "exp2": exp2, "expm1": expm1, "log": log, "log1p": log1p, "tanh": tanh, "sin": sin,
    "cos": cos, "tan": tan, "fmod": fmod, "log2": lambda x: log(x) * (1 / math.log(2)),
    "atan": lambda x: atan_64(x, _ATAN), "asin": lambda x: asin_64(x, _ASIN),
    "acos": lambda x: acos_64(x, _ASIN), "atan2": lambda y, x: atan2_64(y, x, _ATAN),
    "erf": lambda x: erf(x, exp), "pow": lambda x, y: pow(x, y, exp, log),
}  # fmt: skip


OF_TWO = frozenset({"fmod", "atan2", "pow"})


@functools.cache
def defined(name: str) -> tuple[str, dict[str, str]]:
    """The text of one function, and what it calls."""
    module = Module()
    function = LIBRARY[name]
    fn = module.function(name, [(n, F64) for n in ("x", "y")[: 2 if name in OF_TWO else 1]], F64)
    fn.convention, fn.attributes = "internal ", "nounwind"
    fn.do(f"ret double {function(*fn.parameters.values()).text}")
    return module.definitions(), module.declarations()


def library(names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Definitions of these functions with their data, and what they call."""
    texts, calls = [], dict[str, str]()
    for name in names:
        text, called = defined(name)
        texts.append(text)
        calls.update(called)
    if any(TABLE in text for text in texts):
        words = ", ".join(f"i64 {w - (1 << 64) if w >> 63 else w}" for w in two_over_pi())
        texts.append(f"@{TABLE} = internal constant [{23} x i64] [{words}]")
    return "\n".join(texts), calls
