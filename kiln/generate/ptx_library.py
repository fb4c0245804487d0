"""Functions of f64 for GPUs, which have no C library: what kernels call by name, defined beside them.

Errors are a few units in the last place of f64. Series are Taylor's, long enough on their intervals.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

from kiln.generate.functions import (
    LN2,
    LN2_HIGH_64,
    LN2_LOW_64,
    ROUNDER_64,
    absolute,
    angle_of,
    arccosine,
    arcsine,
    arctangent,
    at_least,
    at_most,
    expm1_64,
    in_quadrant,
    is_nan,
    log_edges,
    polynomial,
    sine_and_cosine,
    tangent,
    turned_64,
    with_edges_of_pow,
    with_sign,
    zero_kept,
)
from kiln.generate.llvm import F64, I64, PTR, U64, Module, Type, Value, fma

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
# erf(x) / x on 0 <= x^2 <= 1
_ERF = (1.1283791670955126, -0.37612638903183754, 0.1128379167095512, -0.02686617064512984,
        0.0052239776254232985, -0.000854832702193483, 0.00012055332902888736, -1.4925647567519332e-05,
        1.6462045441468418e-06, -1.6364642158167616e-07, 1.4792401209404813e-08, -1.216456005728345e-09,
        8.709045129053106e-11, -4.230945824295338e-12)  # fmt: skip
# erfc(x) e^(x^2) (x + 2) by 1 / (x + 2) on 1 <= x <= 6.1
_ERFC = (0.5641896842346473, 1.1283705651275502, 1.9750057670158723, 2.8125361873292554,
         2.8227550866289217, -2.057245899469926, 9.398757126100092, -133.81992098541832,
         667.0450203361081, -2811.4457843638843, 9353.359935101478, -21747.758730795693,
         33958.68538296832, -34313.225584487256, 20471.420159643363, -5518.741823737343)  # fmt: skip


def _exp_of(r: Value, rounded: Value) -> Value:
    """e^r 2^n, n in the low bits of `rounded`, in two steps."""
    value, n = fma(polynomial(r, _EXP), r * r, r) + 1.0, rounded.bits(I64) - 0x4338000000000000
    half = n >> 1
    for part in (half, n - half):
        value = value * ((part + 1023) << 52).bits(F64)
    return value


def exp(x: Value) -> Value:
    x = at_least(at_most(x, 710.0), -746.0)
    rounded = fma(x, 1 / LN2, ROUNDER_64)
    n = rounded - ROUNDER_64
    return _exp_of(fma(n, -LN2_LOW_64, fma(n, -LN2_HIGH_64, x)), rounded)


def exp2(x: Value) -> Value:
    x = at_least(at_most(x, 1025.0), -1076.0)
    rounded = x + ROUNDER_64
    return _exp_of((x - (rounded - ROUNDER_64)) * LN2, rounded)


def expm1(x: Value) -> Value:
    return expm1_64(x, exp, _EXP)


def _parts(x: Value) -> tuple[Value, Value]:
    """n and f with x = 2^n (1 + f), 1 + f near 1."""
    tiny = x < 2.0**-1022
    bits = tiny.where(x * 2.0**54, x).bits(I64)
    e = (bits - 0x3FE6A09E667F3BCD) >> 52
    return e.to(F64) - tiny.where(x.like(54.0), 0.0), (bits - (e << 52)).bits(F64) - 1.0


def log(x: Value) -> Value:
    n, f = _parts(x)
    s = f / (f + 2.0)
    z = s * s
    half = f * f * 0.5
    rest = s * (half + polynomial(z, _LOG) * z)
    return log_edges(x, fma(n, LN2_HIGH_64, f - (half - fma(n, LN2_LOW_64, rest))))


def log1p(x: Value) -> Value:
    u = x + 1.0
    lost = (x - (u - 1.0)) / u
    usual = log(u) + (absolute(u) < math.inf).where(lost, 0.0)
    return u.compare("eq", 1.0).where(x, usual)


def tanh(x: Value) -> Value:
    e = expm1(at_most(absolute(x), 30.0) * 2.0)
    return with_sign(is_nan(x).where(x, e / (e + 2.0)), x)


def erf(x: Value) -> Value:
    a = absolute(x)
    near = polynomial(x * x, _ERF) * x
    b = (a > 6.1).where(6.1, a)
    t = 1.0 / (b + 2.0)
    far = with_sign(1.0 - polynomial(t, _ERFC) * t * exp(-(b * b)), x)
    return is_nan(x).where(x, (a < 1.0).where(near, far))


def _log_in_two(a: Value) -> tuple[Value, Value]:
    """The logarithm of a positive finite number as a sum of two, to more digits than one has."""
    n, f = _parts(a)
    below = f + 2.0
    s = f / below
    lost = fma(-s, below, f) + s * -(f - (below - 2.0))
    low = lost / below
    z = s * s
    rest = fma(polynomial(z, _LOG) * z, s, fma(n, LN2_LOW_64, low * 2.0))
    base, part = n * LN2_HIGH_64, s * 2.0
    high = base + part
    # `base` is 0 or the larger one, and exact.
    less = n.compare("eq", 0.0).where(a.like(0.0), part - (high - base))
    total = high + (less + rest)
    return total, (high - total) + (less + rest)


def pow(x: Value, y: Value) -> Value:
    a = absolute(x)
    high, low = _log_in_two(a)
    product = y * high
    lost = fma(y, high, -product) + y * low
    power = exp(product)
    finite = (a > 0.0) & (a < math.inf) & (absolute(product) < 700.0)
    return with_edges_of_pow(x, y, finite.where(fma(power, lost, power), exp(y * log(a))))


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


def _reduced(x: Value) -> tuple[Value, Value, Value]:
    """The sine and cosine of what is left of |x| without multiples of pi / 2, and how many there were."""
    size = absolute(x)
    near, turns = turned_64(size)
    rest, quadrant = _large(x)
    small = size < 2.0**20
    return *sine_and_cosine(small.where(near, rest), _SIN, _COS), small.where(turns, quadrant)


def _finite(x: Value, y: Value) -> Value:
    return (absolute(x) < math.inf).where(y, math.nan)


def _odd(x: Value, y: Value) -> Value:
    """What a function gives for x by what it gives for |x|, with the opposite sign for a negative one."""
    return _finite(x, zero_kept(x, (x < 0.0).where(-y, y)))


def sin(x: Value) -> Value:
    return _odd(x, in_quadrant(*_reduced(x)))


def cos(x: Value) -> Value:
    sine, cosine, quadrant = _reduced(x)
    return _finite(x, in_quadrant(sine, cosine, quadrant + 1))


def tan(x: Value) -> Value:
    return _odd(x, tangent(*_reduced(x)))


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
    "cos": cos, "tan": tan, "fmod": fmod, "log2": lambda x: log(x) * (1 / LN2),
    "atan": lambda x: arctangent(x, _ATAN), "asin": lambda x: arcsine(x, _ASIN),
    "acos": lambda x: arccosine(x, _ASIN), "atan2": lambda y, x: angle_of(y, x, _ATAN),
    "erf": erf, "pow": pow,
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
