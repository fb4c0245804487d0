"""Elementary functions of f32 that AVX-512 does better: scaling by powers of two, tables in registers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kiln.generate import functions
from kiln.generate.lanes import lanes, shuffled
from kiln.generate.llvm import F32, I16, I32, Value, fma, literal

LANES = 16
ROOT_TWO = math.sqrt(2)

# Odd functions in pieces around n STEP, n = 0 … 15: the coefficients of 1, t, t^2, … for |t| <= STEP / 2, to
# 2^-24 of the value. Multiples of the steps are exact.
# The area below the normal curve from 0 to x
AREA_STEP = 3 / 8
_AREA = (
    (0, 0.146169767, 0.27337265, 0.369705468, 0.43319279, 0.469603628, 0.487775534, 0.495667547, 0.498650104,
     0.499630928, 0.499911577, 0.499981463, 0.499996603, 0.499999464, 0.499999911, 0.5),
    (0.398942292, 0.37185514, 0.301137447, 0.211876631, 0.1295176, 0.0687862709, 0.0317396522, 0.0127241816,
     0.00443184841, 0.00134111894, 0.000352595671, 8.05404488e-05, 1.59837418e-05, 2.75594266e-06,
     4.12847101e-07, 5.37323288e-08),
    (-1.88602905e-06, -0.0697214901, -0.112925291, -0.119176589, -0.0971365348, -0.0644857287, -0.0357092619,
     -0.016699627, -0.00664812047, -0.00226449128, -0.000659626676, -0.000166011523, -3.59958976e-05,
     -8.44007718e-06, 1.95136772e-06, -2.25786061e-06),
    (-0.0664414689, -0.053265661, -0.0219606683, 0.00938203186, 0.0269825235, 0.0288406834, 0.0214904286,
     0.0124923978, 0.00590918539, 0.00232249731, 0.000767613761, 0.000214974265, 5.12742663e-05,
     1.04547244e-05, 1.82715667e-06, 2.74277085e-07),
    (-0.000401384779, 0.0164868776, 0.0227990113, 0.0170653146, 0.00604683813, -0.00276187761,
     -0.00604123296, -0.00542852981, -0.00331785181, -0.0015507933, -0.000656451273, -0.000199132017,
     -5.15608699e-05, 3.70650268e-05, -8.8463843e-05, 5.94572484e-05),
    (0.0109673422, 0.006839382, -6.43691601e-05, -0.0053068148, -0.00584609155, -0.00330070802,
     -0.000472027052, 0.000955968979, 0.00110345893, 0.000720362877, 0.000343488035, 0.000128844214,
     3.93714799e-05, 9.9370609e-06, 2.10103121e-06, 3.74842699e-07),
)  # fmt: skip
# The slope of x times the area up to x, less 1/2
SLOPE_STEP = 25 / 64
_SLOPE = (
    (0, 0.296352416, 0.512373805, 0.614656389, 0.624816477, 0.590285838, 0.55043304, 0.522828817,
     0.508555532, 0.50268501, 0.500710428, 0.500159144, 0.500030279, 0.500004888, 0.500000656, 0.50000006),
    (0.797884583, 0.682872772, 0.408581644, 0.125825778, -0.0519521981, -0.107488818, -0.0893930197,
     -0.0519839823, -0.0234697219, -0.00855848007, -0.00257045496, -0.000642989413, -0.00013491002,
     -2.38563516e-05, -3.56743567e-06, -4.52261531e-07),
    (-5.83795236e-06, -0.277758688, -0.389296949, -0.309014052, -0.143323317, -0.0107260589, 0.0447901748,
     0.045116704, 0.027226707, 0.0121504962, 0.00426281523, 0.00122046866, 0.000284932466, 6.23968081e-05,
     1.8841467e-05, 1.06826565e-05),
    (-0.265720606, -0.18204847, -0.00490332954, 0.124714449, 0.139851227, 0.0804689601, 0.0182426628,
     -0.0119671067, -0.0156193301, -0.00967196282, -0.00420111464, -0.00140371069, -0.000374866911,
     -8.16353422e-05, -1.46768552e-05, -2.19590584e-06),
    (-0.00349594234, 0.0980521441, 0.111148514, 0.0473982617, -0.0215345733, -0.0448435359, -0.0313849859,
     -0.00892540067, 0.00235045934, 0.00346612372, 0.00263951393, 0.000609747425, 0.000313996599,
     -0.000398456585, -0.000666558451, -0.000656570948),
    (0.0807887465, 0.032224264, -0.0179840457, -0.0406343602, -0.0251654498, 0.000234273073, 0.0116574848,
     0.00892810524, 0.00290901121, -0.000365136075, -0.000944538042, -0.000574646692, -0.000225642274,
     -6.61764425e-05, -1.51657341e-05, -2.79538267e-06),
    (-0.0459332541, -0.0161403306, -0.0113522476, -0.00949948281, 2.30448077e-05, -0.000301498978,
     0.0143487388, -0.00423869444, -0.00231093192, 0.0123251397, -0.000293758232, 0.00856324658,
     0.000589739124, 0.00847851299, 0.0119497394, 0.0115192598),
)  # fmt: skip
# (e^r - 1 - r) / r^2 on |r| <= ln(2)/32
_EXP = (0.5000162220356067, 0.16666718660599164)
_POWERS = tuple(2.0 ** (n / LANES) for n in range(LANES))
ROUNDER = 1.5 * 2.0**19  # adding it rounds to sixteenths, in the low bits


def exp_below(x: Value) -> Value:
    """The exponential of f32 up to 89: a short polynomial times a sixteenth power of two looked up."""
    if x.type.width % LANES:
        return functions.exp_by_polynomial(x)
    x = functions.at_least(x, -104.0)
    rounded = fma(x, 1 / functions.LN2, ROUNDER)
    n = rounded - ROUNDER
    r = fma(n, -functions.LN2_LOW_32, fma(n, -functions.LN2_HIGH_32, x))
    power = _looked_up(_POWERS, rounded.bits(I32))
    return scaled(fma(power * r, functions.polynomial(r, (1.0, *_EXP)), power), n)


def scaled(x: Value, n: Value) -> Value:
    """x 2^n, n a whole number."""
    fn = x.fn
    if x.type.width % LANES:
        whole = (n + functions.ROUNDER_32).bits(I32) - 0x4B400000
        return fn.call(f"llvm.ldexp.{x.type.suffix}.{whole.type.suffix}", x.type, x, whole)
    everywhere, rounding = Value(fn, "-1", I16), Value(fn, "4", I32)
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    return _in_registers(lambda x, n: fn.call(name, x.type, x, n, x, everywhere, rounding), x, n)


def erf(x: Value) -> Value:
    """To two units in the last place."""
    return area(x * ROOT_TWO) * 2.0 if x.type.width % LANES == 0 else functions.erf(x)


def area(x: Value) -> Value:
    """Below the normal curve, from 0 to x: half of what `erf` says of x / sqrt(2)."""
    if x.type.width % LANES:
        return functions.erf(x * (1 / ROOT_TWO)) * 0.5
    return _in_pieces(x, 5.8, AREA_STEP, _AREA)


def gelu(x: Value) -> Value:
    """x times the area up to it."""
    return x * (area(x) + 0.5)


def gelu_slope(x: Value) -> Value:
    """The derivative of `gelu`; NaN at infinities, where eager's is. What is below 3e-8 for x < -6 is 0."""
    if x.type.width % LANES:
        bell = functions.apply("exp", x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
        return area(x) + 0.5 + x * bell
    return fma(x, 0.0, 0.5) + _in_pieces(x, 6.05, SLOPE_STEP, _SLOPE)


def _in_pieces(x: Value, end: float, step: float, tables: Sequence[tuple[float, ...]]) -> Value:
    """An odd function, constant from `end` on: one polynomial, whose coefficients are looked up."""
    a = functions.at_most(functions.absolute(x), end)
    rounded = fma(a, 1 / step, functions.ROUNDER_32)
    t = fma(rounded - functions.ROUNDER_32, -step, a)
    *rest, last = [_looked_up(table, rounded.bits(I32)) for table in tables]
    for c in reversed(rest):
        last = fma(last, t, c)
    return functions.with_sign(last, x)


def _looked_up(table: tuple[float, ...], places: Value) -> Value:
    """The entry of a table at each lane's place, of which the last four bits count."""
    fn, wide = places.fn, F32.wide(LANES)
    entries = Value(fn, f"<{', '.join(f'float {literal(c, F32)}' for c in table)}>", wide)
    name = "llvm.x86.avx512.permvar.sf.512"
    return _in_registers(lambda part: fn.call(name, wide, entries, part), places)


def _in_registers(function: Callable[..., Value], *values: Value) -> Value:
    """A function of single registers on one or two in a row."""
    width = values[0].type.width
    if width == LANES:
        return function(*values)
    low, high = (function(*[lanes(v, start, LANES) for v in values]) for start in (0, LANES))
    return shuffled(low, range(width), high)


#: By name, what stands in place of the functions of `kiln.generate.functions`.
OWN: dict[str, Callable[..., Value]] = {"scaled": scaled, "exp_below": exp_below, "erf": erf, "gelu": gelu,
                                     "gelu_slope": gelu_slope}  # fmt: skip
