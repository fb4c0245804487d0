"""Elementary functions as LLVM instructions, for scalars and vectors of f32 and f64.

f32: the hot ones (exp, log, sin, tanh, erf, sigmoid) stay in f32, others go through f64 and are rounded once;
every error is at most 4 units in the last place, tested over the whole range. f64: the C library, lane by
lane. Coefficients were fitted for least relative error on the intervals that the comments name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kiln.generate.llvm import F32, F64, I32, I64, Type, Value, fma

LN2 = math.log(2)
LN2_HIGH_32, LN2_LOW_32 = 0.693359375, -2.12194440e-4
LN2_HIGH_64, LN2_LOW_64 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
HALF_PI_HIGH, HALF_PI_LOW = 1.5707963267948966, 6.123233995736766e-17
PI_PARTS = (3.141592502593994, 1.5099578831723193e-07, 1.0780605906948477e-14)  # of 24 bits, all positive
FEW_TURNS = 2.0**16  # below it a rest of half turns is a float that is good to the last place
ROUNDER_32, ROUNDER_64 = 1.5 * 2.0**23, 1.5 * 2.0**52  # adding one rounds to an integer, in the low bits

# (e^r - 1 - r) / r^2 on |r| <= ln(2)/2
_EXP_32 = (0.49999993099904772, 0.16666514762697297, 0.041668442668280431, 0.0083694173284948848,
           0.0013813975148197035)  # fmt: skip
# The same, to one place more: the coefficients of the library that torch's vector kernels call
_EXP_EAGER = (0.5, 0.1666666716337204, 0.041666485369205475, 0.0083333607763051987, 0.0013930435525253415,
              0.00019852761761285365)  # fmt: skip
LN2_EAGER = (0.693145751953125, 1.428606765330187e-06)  # ln(2), in two parts
_EXP_64 = (0.49999999999998149, 0.16666666666607007, 0.041666666668259964, 0.0083333333731625674,
           0.0013888888492310566, 0.00019841181830208358, 2.4801947143003822e-5, 2.7636538426424112e-6,
           2.7474571391534382e-7)  # fmt: skip
# (log(1 + f) - f + f^2/2) / f^3 on sqrt(1/2) - 1 <= f <= sqrt(2) - 1
_LOG_32 = (0.33333331500590919, -0.25000818921155241, 0.20001237036848211, -0.16623431236474392,
           0.14201642207476652, -0.13159426005440801, 0.12761820738345432, -0.076365134573192724)  # fmt: skip
# (log((1 + s) / (1 - s)) - 2 s) / s^3 in s^2, |s| <= 0.172
_LOG_64 = (0.66666666666667343, 0.39999999999415283, 0.28571428742260226, 0.22222198585161987,
           0.18183563755145203, 0.15314064058590718, 0.14795823680050237)  # fmt: skip
# (tanh(x) - x) / x^3 in x^2, |x| <= 0.625
_TANH = (-0.33333283947302401, 0.13331492192410533, -0.053743595948466091, 0.020650958774603018,
         -0.0057174998172945676)  # fmt: skip
# erf(x) / x in x^2, |x| <= 1; -log(erfc(x)) / x on 0.95 <= x <= 3.95
_ERF_NEAR = (1.1283791659109106, -0.37612627133692703, 0.11283600174803443, -0.026854444591390571,
             0.0051895352918339376, -0.00080208414408843159, 7.8891255863896834e-5)  # fmt: skip
_ERF_FAR = (1.1284714761287866, 0.63606524763008487, 0.10422967838280225, -0.021318174729641585,
            0.0018425827831751879, 0.00049590147492555527, -0.00021258277034029932, 3.3461143070427901e-5,
            -2.0802862552287972e-6)  # fmt: skip
# (sin(r) - r) / r^3 and (cos(r) - 1 + r^2/2) / r^4 in r^2, |r| <= pi/4
_SIN = (-0.16666666666629841, 0.0083333333249493105, -0.00019841263643318405, 2.7555318985207563e-6,
        -2.4758804564636329e-8)  # fmt: skip
_COS = (0.04166666666659894, -0.0013888888877840229, 2.4801580778872735e-5, -2.7555531804652925e-7,
        2.0645446857668296e-9)  # fmt: skip
# (sin(r) - r) / r^3 in r^2, |r| <= pi/2, and to 2^-19, where the sine of pi/2 is 1
_SIN_32 = (-0.16666659491808064, 0.008333064611480775, -0.00019809474924225646, 2.6054815128039212e-06)
_SIN_LOOSE = (-0.166655780875863, 0.00831093791654366, -0.0001844748698842692)
# (atan(x) - x) / x^3 in x^2, |x| <= tan(pi/8)
_ATAN = (-0.3333333181341731, 0.1999955007576437, -0.14264232549904662, 0.10746298409933513,
         -0.06459376214998759)  # fmt: skip
# (asin(x) - x) / x^3 in x^2, |x| <= 1/2
_ASIN = (0.16666672764719395, 0.07498809174645212, 0.045010700217836534, 0.02649427592166881,
         0.03820645360332359)  # fmt: skip


def polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """c[0] + c[1] x + c[2] x^2 + …"""
    result = x.like(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = fma(result, x, c)
    return result


def absolute(x: Value) -> Value:
    return x.intrinsic("fabs")


def square_root(x: Value) -> Value:
    return x.intrinsic("sqrt")


def with_sign(x: Value, sign: Value) -> Value:
    """The magnitude of x with the sign bit of `sign`."""
    return x.intrinsic("copysign", sign)


def is_nan(x: Value) -> Value:
    return x.compare("ne", x)


def sign_bit(x: Value) -> Value:
    """Whether the sign bit is set; that of a zero counts."""
    return x.bits(I32 if x.type.kind == "f32" else I64) < 0


def at_most(x: Value, bound: float) -> Value:
    """The smaller; a NaN stays one."""
    return (x > bound).where(bound, x)


def at_least(x: Value, bound: Value | float) -> Value:
    """The larger; a NaN stays one."""
    return (x < bound).where(bound, x)


# exp and log in f32


def _exp_32(x: Value) -> Value:
    return exp_by_polynomial(at_most(x, 89.0))


def exp_below(x: Value, loose: bool = False) -> Value:
    """The exponential of f32 up to 88."""
    own = own_function("loose exp_below" if loose else "exp_below", x)
    return exp_by_polynomial(x) if own is None else own(x)


def exp_by_polynomial(x: Value) -> Value:
    """The same on any machine."""
    rounded, r = _reduced_32(at_least(x, -104.0))
    return _scaled_32(polynomial(r, (1.0, 1.0, *_EXP_32)), rounded)


def _reduced_32(x: Value, parts: Sequence[float] = (LN2_HIGH_32, LN2_LOW_32)) -> tuple[Value, Value]:
    """How many times ln(2), of these parts, x is, in the low bits, and the rest of x."""
    rounded = fma(x, 1 / LN2, ROUNDER_32)
    n = rounded - ROUNDER_32
    return rounded, fma(n, -parts[1], fma(n, -parts[0], x))


def expm1_by_polynomial(x: Value) -> Value:
    """e^x - 1 in f32, exact near 0."""
    rounded, r = _reduced_32(at_least(at_most(x, 89.0), -20.0))
    half = _power_of_two_32(rounded.bits(I32) - 0x4B400001)  # the whole power may be too large for a float
    m = fma(half, fma(polynomial(r, _EXP_32) * r, r, r), half - 0.5)
    return with_sign(m + m, x)


def _exp2_32(x: Value) -> Value:
    x = at_least(at_most(x, 129.0), -151.0)
    rounded = x + ROUNDER_32
    r = (x - (rounded - ROUNDER_32)) * LN2
    return _scaled_32(polynomial(r, (1.0, 1.0, *_EXP_32)), rounded)


def _scaled_32(x: Value, rounded: Value) -> Value:
    """x 2^n, n in the low bits of `rounded`, in two steps: overflow and subnormals come out right."""
    own = x.fn.module.own.get("scaled")
    if own is not None:
        return own(x, rounded - ROUNDER_32)
    n = rounded.bits(I32) - 0x4B400000
    half = n >> 1
    return x * _power_of_two_32(half) * _power_of_two_32(n - half)


def _power_of_two_32(n: Value) -> Value:
    return ((n + 127) << 23).bits(F32)


def log_by_polynomial(x: Value, more: Value | None = None) -> Value:
    """The logarithm, and a little more."""
    tiny = x < 2.0**-126
    scaled = tiny.where(x * 2.0**23, x)
    bits = scaled.bits(I32)
    e = (bits - 0x3F3504F3) >> 23
    f = (bits - (e << 23)).bits(F32) - 1.0
    n = e.to(F32) - tiny.where(x.like(23.0), 0.0)
    square = f * f
    y = fma(n, LN2_LOW_32, polynomial(f, _LOG_32) * square * f)
    y = y if more is None else y + more
    y = fma(n, LN2_HIGH_32, fma(square, -0.5, y) + f)
    return log_edges(x, y)


def log1p_by_polynomial(x: Value) -> Value:
    """log(1 + x), made good for what the sum loses."""
    u = x + 1.0
    return u.compare("eq", 1.0).where(x, log_by_polynomial(u, (x - (u - 1.0)) / u))


def log_edges(x: Value, y: Value) -> Value:
    """The logarithm y of x, or what it is of zero, of an infinity and of what has none."""
    y = x.compare("eq", 0.0).where(-math.inf, y)
    y = x.compare("eq", math.inf).where(math.inf, y)
    return (x >= 0.0).where(y, math.nan)


# The same in f64, exact enough to be rounded to f32; the arguments come from f32


def _exp_64(x: Value) -> Value:
    x = at_least(at_most(x, 700.0), -700.0)
    rounded = fma(x, 1 / LN2, ROUNDER_64)
    n = rounded - ROUNDER_64
    r = fma(n, -LN2_LOW_64, fma(n, -LN2_HIGH_64, x))
    power = ((rounded.bits(I64) + (1023 - 0x4338000000000000)) << 52).bits(F64)
    return (fma(polynomial(r, _EXP_64), r * r, r) + 1.0) * power


def expm1_64(x: Value, exp: Callable[[Value], Value] = _exp_64, terms: Sequence[float] = _EXP_64) -> Value:
    """e^x - 1, by an exponential and a polynomial of as many digits."""
    near = fma(polynomial(x, terms), x * x, x)
    return with_sign((absolute(x) < 0.34).where(near, exp(x) - 1.0), x)


def _log_64(x: Value) -> Value:
    bits = x.bits(I64)
    e = (bits - 0x3FE6A09E667F3BCD) >> 52
    f = (bits - (e << 52)).bits(F64) - 1.0
    s = f / (f + 2.0)
    z = s * s
    n = e.to(F64)
    y = fma(polynomial(z, _LOG_64) * z, s, s * 2.0)
    return log_edges(x, fma(n, LN2_HIGH_64, fma(n, LN2_LOW_64, y)))


def _log1p_64(x: Value) -> Value:
    near = fma(x * x, fma(x, 1 / 3, -0.5), x)
    return (absolute(x) < 2.0**-14).where(near, _log_64(x + 1.0))


def turned_64(x: Value) -> tuple[Value, Value]:
    """x without multiples of pi / 2, and how many there were, in the low bits."""
    rounded = fma(x, 2 / math.pi, ROUNDER_64)
    n = rounded - ROUNDER_64
    return fma(n, -HALF_PI_LOW, fma(n, -HALF_PI_HIGH, x)), rounded.bits(I64)


def sine_and_cosine(
    r: Value, sine: Sequence[float] = _SIN, cosine: Sequence[float] = _COS
) -> tuple[Value, Value]:
    """The sine and cosine of |r| <= pi / 4, to as many digits as the polynomials have."""
    z = r * r
    return fma(polynomial(z, sine) * z, r, r), fma(polynomial(z, cosine), z * z, fma(z, -0.5, 1.0))


def in_quadrant(sine: Value, cosine: Value, quadrant: Value) -> Value:
    """The sine of an angle that is so many quarters of a turn further."""
    value = (quadrant & 1).to_mask().where(cosine, sine)
    return (quadrant & 2).to_mask().where(-value, value)


def tangent(sine: Value, cosine: Value, quadrant: Value) -> Value:
    """The tangent of such an angle."""
    odd = (quadrant & 1).to_mask()
    return odd.where(-cosine, sine) / odd.where(sine, cosine)


def zero_kept(x: Value, y: Value) -> Value:
    """y, or x itself where it is a zero, whose sign the arithmetic loses."""
    return x.compare("eq", 0.0).where(x, y)


def _sin_64(x: Value) -> Value:
    r, quadrant = turned_64(x)
    return zero_kept(x, in_quadrant(*sine_and_cosine(r), quadrant))


def _cos_64(x: Value) -> Value:
    r, quadrant = turned_64(x)
    return in_quadrant(*sine_and_cosine(r), quadrant + 1)


def _tan_64(x: Value) -> Value:
    r, quadrant = turned_64(x)
    return zero_kept(x, tangent(*sine_and_cosine(r), quadrant))


def _near_zero(x: Value, terms: Sequence[float]) -> Value:
    z = x * x
    return fma(polynomial(z, terms) * z, x, x)


def arctangent(x: Value, terms: Sequence[float] = _ATAN) -> Value:
    """The angle of a tangent, to as many digits as the polynomial has."""
    a = absolute(x)
    far, middle = a > 2.414213562373095, a > 0.41421356237309503
    above, below = far.where(-1.0, middle.where(a - 1.0, a)), far.where(a, middle.where(a + 1.0, 1.0))
    reduced = above / below
    base = far.where(math.pi / 2, middle.where(x.like(math.pi / 4), 0.0))
    return with_sign(base + _near_zero(reduced, terms), x)


def angle_of(y: Value, x: Value, terms: Sequence[float] = _ATAN) -> Value:
    ax, ay = absolute(x), absolute(y)
    both_infinite = ax.compare("eq", math.inf) & ay.compare("eq", math.inf)
    ax, ay = both_infinite.where(1.0, ax), both_infinite.where(1.0, ay)
    steep = ay > ax
    low, high = steep.where(ax, ay), steep.where(ay, ax)
    half = (high > 1.0).where(x.like(0.5), 1.0)  # so that no sum is infinite
    low, high = low * half, high * half
    middle = low > high * 0.41421356237309503
    ratio = middle.where(low - high, low) / middle.where(low + high, high)
    angle = middle.where(x.like(math.pi / 4), 0.0) + _near_zero(ratio, terms)
    angle = high.compare("eq", 0.0).where(0.0, angle)
    angle = steep.where(math.pi / 2 - angle, angle)
    angle = sign_bit(x).where(math.pi - angle, angle)
    return (is_nan(x) | is_nan(y)).where(math.nan, with_sign(angle, y))


def arcsine(x: Value, terms: Sequence[float] = _ASIN) -> Value:
    """The angle of a sine, to as many digits as the polynomial has."""
    a = absolute(x)
    far = a > 0.5
    root = square_root((1.0 - a) * 0.5)
    value = _near_zero(far.where(root, a), terms)
    return with_sign(far.where(fma(value, -2.0, math.pi / 2), value), x)


def arccosine(x: Value, terms: Sequence[float] = _ASIN) -> Value:
    a = absolute(x)
    far = a > 0.5
    root = square_root((1.0 - a) * 0.5)
    value = _near_zero(far.where(root, x), terms)
    outer = (x < 0.0).where(fma(value, -2.0, math.pi), value * 2.0)
    return far.where(outer, math.pi / 2 - value)


def _sinh_64(x: Value) -> Value:
    e = expm1_64(absolute(x))
    return with_sign((e + e / (e + 1.0)) * 0.5, x)


def _cosh_64(x: Value) -> Value:
    e = _exp_64(absolute(x))
    return (e + 1.0 / e) * 0.5


def _asinh_64(x: Value) -> Value:
    a = absolute(x)
    square = a * a
    value = _log1p_64(a + a * (a / (square_root(square + 1.0) + 1.0)))
    return with_sign(a.compare("eq", math.inf).where(a, value), x)


def _acosh_64(x: Value) -> Value:
    d = x - 1.0
    return (d < 0.0).where(math.nan, _log1p_64(d + square_root(d * (x + 1.0))))


def _atanh_64(x: Value) -> Value:
    a = absolute(x)
    return with_sign(_log1p_64(a * 2.0 / (1.0 - a)) * 0.5, x)


def _pow_64(x: Value, y: Value) -> Value:
    return with_edges_of_pow(x, y, _exp_64(y * _log_64(absolute(x))))


def with_edges_of_pow(x: Value, y: Value, result: Value) -> Value:
    a = absolute(x)
    half = y * 0.5
    whole = y.intrinsic("trunc").compare("eq", y)
    odd = whole & half.intrinsic("trunc").compare("ne", half)
    result = (sign_bit(x) & odd).where(-result, result)
    result = ((x < 0.0) & (a < math.inf) & ~whole).where(math.nan, result)
    one = y.compare("eq", 0.0) | x.compare("eq", 1.0)
    one = one | (a.compare("eq", 1.0) & absolute(y).compare("eq", math.inf))
    return one.where(1.0, result)


# Hot functions of f32


def _tanh_32(x: Value) -> Value:
    """m / (m + 2) with m = e^(2 |x|) - 1, exact near 0."""
    a = at_most(absolute(x), 9.1)
    rounded, r = _reduced_32(a + a)
    power = _power_of_two_32(rounded.bits(I32) - 0x4B400000)
    m = fma(power, fma(polynomial(r, _EXP_32) * r, r, r), power - 1.0)
    return with_sign(m / (m + 2.0), x)


def erf(x: Value) -> Value:
    """The error function of f32."""
    a = absolute(x)
    near = polynomial(x * x, _ERF_NEAR) * x
    bounded = at_most(a, 3.95)
    far = with_sign(1.0 - _exp_32(-(polynomial(bounded, _ERF_FAR) * bounded)), x)
    return (a < 1.0).where(near, far)


def _widened(function: Callable[..., Value]) -> Callable[..., Value]:
    """A function of f32 computed in f64 and rounded once."""

    def rounded(*arguments: Value) -> Value:
        return function(*[a.to(F64) for a in arguments]).to(F32)

    return rounded


pow_by_doubles = _widened(_pow_64)
log2_by_doubles = _widened(lambda x: _log_64(x) * (1 / LN2))


def _or_rarely(
    near: Callable[..., Value], beyond: Callable[..., Value], far: Callable[..., Value]
) -> Callable[..., Value]:
    """A function of f32, and another one for arguments, which are rare, that are `beyond` its reach."""

    def chosen(*arguments: Value) -> Value:
        usual, outside = near(*arguments), beyond(*arguments)
        (result,) = usual.fn.rarely(outside, [usual], lambda: [outside.where(far(*arguments), usual)])
        return result

    return chosen


def _or_by_library(
    function: Callable[..., Value], beyond: Callable[..., Value], name: str
) -> Callable[..., Value]:
    """A function computed in f64 that leaves arguments beyond its reach to the C library."""
    return _or_rarely(_widened(function), beyond, _widened(_library(name)))


def _from(bound: float) -> Callable[[Value], Value]:
    return lambda x: absolute(x) >= bound


def _half_turns(x: Value, odd: bool, parts: int, terms: Sequence[float]) -> Value:
    """The sine of x, or its cosine with `odd` quarters of a turn in between, of an x whose turns are few.

    x is a number of half turns and a rest. Each step of taking them off is exact but for a rounding of what
    is left.
    """
    turns = fma(x, 1 / math.pi, -0.5) + ROUNDER_32 if odd else fma(x, 1 / math.pi, ROUNDER_32)
    n = turns - ROUNDER_32
    n = n + 0.5 if odd else n
    for part in PI_PARTS[:parts]:
        x = fma(n, -part, x)
    sign = -1.0 if odd else 1.0
    value = x * polynomial(x * x, [sign, *[sign * c for c in terms]])
    return (value.bits(I32) ^ (turns.bits(I32) << 31)).bits(F32)


def _sine(odd: bool, wide: Callable[[Value], Value], name: str) -> Callable[[Value], Value]:
    """The sine or cosine: of small numbers in f32, of larger ones in f64, of huge ones by the C library."""
    further = _or_by_library(wide, _from(2.0**30), name)
    return _or_rarely(lambda x: _half_turns(x, odd, 3, _SIN_32), _from(FEW_TURNS), further)


def _tan_32(x: Value) -> Value:
    return _half_turns(x, False, 3, _SIN_32) / _half_turns(x, True, 3, _SIN_32)


def sine_loose(odd: bool, name: str) -> Callable[[Value], Value]:
    """The same for numbers of types of two bytes, to 2^-19."""
    exact = _sine(odd, _cos_64 if odd else _sin_64, name)
    return _or_rarely(lambda x: _half_turns(x, odd, 2, _SIN_LOOSE), _from(FEW_TURNS), exact)


def _fmod_64(x: Value, y: Value) -> Value:
    size = at_most(absolute(y), 1e300)  # what is finite is far below it
    rest = fma(-(absolute(x) / size).intrinsic("trunc"), size, absolute(x))
    return with_sign((rest < 0.0).where(rest + size, rest), x)


def _inexact_quotient(x: Value, y: Value) -> Value:
    x, y = x.to(F64), y.to(F64)
    return ~(absolute(x) < absolute(y) * 2.0**28)


def by_library(name: str, *arguments: Value) -> Value:
    """A function of the C library on f64, lane by lane."""
    first = arguments[0]
    fn, width = first.fn, first.type.width
    if width == 1:
        return fn.call(name, F64, *arguments)
    result = Value(fn, "poison", first.type)
    for lane in range(width):
        given = [fn.emit(f"extractelement {a.type} {a.text}, i64 {lane}", F64) for a in arguments]
        value = fn.call(name, F64, *given)
        result = fn.emit(
            f"insertelement {first.type} {result.text}, double {value.text}, i64 {lane}", first.type
        )
    return result


def _library(name: str) -> Callable[..., Value]:
    return lambda *arguments: by_library(name, *arguments)


_SINGLE: dict[str, Callable[..., Value]] = {
    "exp": _exp_32, "exp2": _exp2_32, "log": log_by_polynomial, "tanh": _tanh_32, "erf": erf,
    "expm1": _widened(expm1_64), "log1p": log1p_by_polynomial,
    "log2": log2_by_doubles,
    "log10": _widened(lambda x: _log_64(x) * (1 / math.log(10))),
    "sin": _sine(False, _sin_64, "sin"), "cos": _sine(True, _cos_64, "cos"),
    "tan": _or_rarely(_tan_32, _from(FEW_TURNS), _or_by_library(_tan_64, _from(2.0**30), "tan")),
    "asin": arcsine, "acos": arccosine, "atan": arctangent, "atan2": angle_of,
    "sinh": _widened(_sinh_64), "cosh": _widened(_cosh_64),
    "asinh": _widened(_asinh_64), "acosh": _widened(_acosh_64), "atanh": _widened(_atanh_64),
    "pow": pow_by_doubles, "fmod": _or_by_library(_fmod_64, _inexact_quotient, "fmod"),
}  # fmt: skip

#: Functions by name; each takes values of one float type, f32 or f64.
FUNCTIONS = frozenset(_SINGLE)
#: Those that ask the C library for some values of type f32, lane by lane.
PARTLY_BY_LIBRARY = frozenset({"sin", "cos", "tan", "fmod", "remainder"})


def own_function(name: str, x: Value) -> Callable[..., Value] | None:
    """What the machine does better, for values such as this one."""
    return x.fn.module.own.get(name) if x.type.kind == "f32" else None


def apply(name: str, *arguments: Value) -> Value:
    """The function of this name on values of type f32 or f64."""
    own = own_function(name, arguments[0])
    if own is not None:
        return own(*arguments)
    if arguments[0].type.kind == "f64":
        return by_library(name, *arguments)
    return _SINGLE[name](*arguments)


def sigmoid(x: Value) -> Value:
    own = own_function("sigmoid", x)
    if own is not None:
        return own(x)
    if x.type.kind == "f32":
        tiny = x < -87.0  # where the exponential of -x would overflow
        e = _exp_as_eager(tiny.where(x, -x))
        return tiny.where(e, 1.0 / (e + 1.0))
    e = apply("exp", -absolute(x))
    return (x < 0.0).where(e, 1.0) / (e + 1.0)


def _exp_as_eager(x: Value) -> Value:
    """The exponential in eager's sigmoid, to the bit: gradients that cancel behind it show its last ones."""
    rounded, r = _reduced_32(at_least(at_most(x, 100.0), -104.0), LN2_EAGER)
    return _scaled_32(fma(polynomial(r, _EXP_EAGER), r * r, r) + 1.0, rounded)


HALVES = frozenset(("f16", "bf16", "b16"))


def compute_type(type: Type) -> Type:
    """The type in which arithmetic on values of this type is done: half types compute in f32."""
    return F32.wide(type.width) if type.kind in HALVES else type
