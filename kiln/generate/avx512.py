"""Elementary functions of f32 that AVX-512 does better: scaling by powers of two, tables in registers."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

from kiln.generate import avx512_powers, functions, registers
from kiln.generate.lanes import first_lane, shuffled
from kiln.generate.llvm import B16, BF16, F32, F64, I32, U32, Value, fma
from kiln.generate.registers import in_registers, inverse, looked_up

Tables: TypeAlias = "tuple[tuple[float, ...], ...]"
"""The coefficients of 1, x, x^2, … for each piece."""
Scalar: TypeAlias = "Callable[[Value], Value]"

LANES, DOUBLES = registers.LANES, 8
ROOT_TWO = math.sqrt(2)
_POSITIVE = 0x0A  # of smaller ones the absolute value
_AROUND_ONE = 0x0B  # mantissas from 3/4 to 3/2, NaN for what is negative

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
SLOPE_STEP = 53 / 128
_SLOPE = (
    (0, 0.312202364, 0.530670702, 0.622020245, 0.618799686, 0.577663243, 0.538787127, 0.515456259,
     0.505012691, 0.50133723, 0.500295341, 0.50005424, 0.500008285, 0.500001073, 0.500000119, 0.5),
    (0.797884583, 0.669557691, 0.372097582, 0.0842817351, -0.0752184317, -0.10697639, -0.0760340542,
     -0.0382747985, -0.0148302708, -0.00457520084, -0.00114348962, -0.000233906118, -3.94167982e-05,
     -5.49664719e-06, -6.36338086e-07, 0),
    (-5.52640495e-06, -0.290235817, -0.388539404, -0.281450689, -0.105343983, 0.0138657726, 0.0491619594,
     0.0381300077, 0.0190775488, 0.00709219882, 0.00204396411, 0.000463640987, 9.35910502e-05,
     8.37360949e-06, -7.33571369e-07, 0),
    (-0.265745521, -0.172656819, 0.0155827031, 0.135867804, 0.129506618, 0.0595197193, 0.00337251485,
     -0.0157150663, -0.0131099494, -0.0063920822, -0.0022390869, -0.000601302658, -0.000127584091,
     -2.17521774e-05, -3.01172577e-06, 0),
    (-0.00297333696, 0.101979002, 0.106604934, 0.0325291231, -0.0325403772, -0.0436883867, -0.0216032509,
     -0.00232678279, 0.00466207135, 0.00337351649, 0.00227733143, 0.00128043804, -0.000139159951,
     0.000355565397, 0.000156791881, 0),
    (0.0768144727, 0.0293697845, -0.0228152443, -0.0399584956, -0.0186791644, 0.00557374256, 0.0116822971,
     0.00626477506, 0.000899071048, -0.000894652272, -0.000749169441, -0.000322647335, -9.59796234e-05,
     -2.14326265e-05, -3.72713089e-06, 0),
    (-0.0360200368, -0.0210625306, -0.014678536, 0.00268695713, 0.0126371095, 0.00911676884, -0.010966016,
     -0.0095528746, -0.0110777412, 0.00133610785, -0.0102422396, -0.0116644446, 0.0042063822, -0.00513083441,
     -0.00237588468, 0),
)  # fmt: skip
# (log(1 + f) - f + f^2/2) / f^3 on -1/4 <= f <= 1/2; (log(1 + f) - f) / f^2 on the same, to 2^-13
_LOG = (0.33333449112478436, -0.25000095841991365, 0.1999086123934421, -0.1664731216533302,
        0.14478394782422344, -0.13161193500149865, 0.10463023307031803, -0.04507481456778046)  # fmt: skip
_LOG_LOOSE = (-0.4999805895448732, 0.3374478454551848, -0.2571728369773627, 0.1401491907178048)
# (e^r - 1 - r) / r^2 on |r| <= ln(2)/32
_EXP = (0.5000162220356067, 0.16666718660599164)
_POWERS = tuple(2.0 ** (n / LANES) for n in range(LANES))
ROUNDER = 1.5 * 2.0**19  # adding it rounds to sixteenths, in the low bits
# (e^r - 1) / r on |r| <= ln(2)/64
_NEAR = (1.00000000022928, 0.5000048874158588, 0.16666568946832963)
_NEAR_STEPS = 32
_FRACTIONS = tuple(2.0 ** (n / _NEAR_STEPS) for n in range(_NEAR_STEPS))
# A factor of all powers by which each of them lies twice as near to a float
_NEAR_FACTOR = 1.0000754351754526


def _entries(steps: int, factor: float = 1.0) -> tuple[int, ...]:
    """The bits of a factor times 2^(n/steps), less n where it stands in what is added to them."""
    powers = [_bits(factor * 2.0 ** (n / steps)) for n in range(steps)]
    return tuple(bits - n * (1 << 23) // steps for n, bits in enumerate(powers))


def _bits(number: float) -> int:
    """Those of a float."""
    return int.from_bytes(struct.pack("<f", number), "little")


# The float nearest to ln(2), and the rest: 32nds times the first, less what they are near to, are exact.
LN2_FLOAT, LN2_REST = 0.693147182464599609375, -1.904654299957768e-09
ROUNDER_NEAR = 1.5 * 2.0**18  # the same for 32nds
_ONE_MORE = round(LANES / functions.LN2)  # sixteenths of a power of two that are nearest to e
#: Whether powers may be loose, to how many parts of one a table has, and to what is added to round to them.
_PARTS, _ROUNDERS = {False: _NEAR_STEPS, True: LANES}, {False: ROUNDER_NEAR, True: ROUNDER}
#: How far `exp_reaching` reaches: sums of such exponentials are floats.
FURTHEST = 44.0
#: So much above 1 are exponentials that are kept: what is 0 in shares of them is a normal number.
ROOM = 40


def _cubic(function: Callable[[float], float], low: float, high: float) -> list[float]:
    """The coefficients of 1, x, x^2, x^3 in what is near to a function between two numbers."""
    places = [(low + high) / 2 + (high - low) / 2 * math.cos((2 * k + 1) * math.pi / 8) for k in range(4)]
    steps = [function(x) for x in places]
    for order in range(1, 4):
        for k in range(3, order - 1, -1):
            steps[k] = (steps[k] - steps[k - 1]) / (places[k] - places[k - order])
    found = [0.0] * 4
    for x, step in zip(reversed(places), reversed(steps), strict=True):
        found = [step - x * found[0], *[found[k - 1] - x * found[k] for k in range(1, 4)]]
    return found


def _odd_cubics(function: Callable[[float], float], step: float, count: int) -> Tables:
    """The same of an odd function in pieces around n `step`; that of the first one is odd, too."""
    near, far = (step * math.sin(k * math.pi / 8) / 2 for k in (1, 3))
    slope = (function(far) / far - function(near) / near) / (far * far - near * near)
    pieces = [[0.0, function(near) / near - slope * near * near, 0.0, slope]]
    pieces += [_cubic(function, (n - 0.5) * step, (n + 0.5) * step) for n in range(1, count)]
    return tuple(zip(*pieces, strict=True))


def _slope_less_half(x: float) -> float:
    """Of x times the area up to x, as it is in floats from 6 on."""
    bell = math.exp(x * x * -0.5) / math.sqrt(2 * math.pi)
    return 0.5 if x > 5.9 else math.erf(x / ROOT_TWO) / 2 + x * bell


#: Odd functions, where they end, the steps of their pieces and how many there are.
_ODD = {
    "tanh": (math.tanh, 4.6, 19 / 64, LANES),
    "erf": (math.erf, 3.1, 13 / 64, LANES),
    "slope": (_slope_less_half, 6.2, 13 / 64, 2 * LANES),
}


@functools.cache
def _odd(name: str) -> tuple[float, float, Tables]:
    function, end, step, count = _ODD[name]
    return end, step, _odd_cubics(function, step, count)


_TAIL_END, _TAIL_SCALE = 5.8, 0.516


@functools.cache
def _tail() -> Tables:
    """The area below the normal curve from |x| on, for u = 1 + _TAIL_SCALE |x|.

    Pieces are around those u whose squares are 1 ... 15, 16: the further on, the shorter. The last one, at
    whose place the table begins, is 0.
    """
    edges = [1.0, *[math.sqrt(n + 0.5) for n in range(1, LANES)]]
    pieces = [
        _cubic(lambda u: math.erfc((u - 1) / (_TAIL_SCALE * ROOT_TWO)) / 2, low, high)
        for low, high in pairwise(edges)
    ]
    return tuple(zip([0.0] * 4, *pieces, strict=True))


@functools.cache
def _soft() -> Tables:
    """log(1 + y) / y in pieces around n / 15, n = 0 … 15, to 2^-25."""
    edges = [0.0, *[(n + 0.5) / 15 for n in range(15)], 1.0]
    pieces = [_cubic(lambda y: math.log1p(y) / y, low, high) for low, high in pairwise(edges)]
    return tuple(zip(*pieces, strict=True))


def _or(narrow: Scalar) -> Callable[[Scalar], Scalar]:
    """A function of values that fill whole registers; `narrow` stands for it where they do not."""

    def declared(function: Scalar) -> Scalar:
        return lambda x: (narrow if x.type.width % LANES else function)(x)

    return declared


@_or(lambda x: functions.exp_by_polynomial(functions.at_most(x, 89.0)))
def exp(x: Value) -> Value:
    """The exponential of f32."""
    power, r, n = _reduced(functions.at_most(x, 89.0), _POWERS, ROUNDER)
    return scaled(_near(power, r, _EXP), n)


@_or(functions.exp_by_polynomial)
def exp_below(x: Value) -> Value:
    """The exponential of f32 up to 88: powers of two are floats."""
    power, r, n = _reduced(x, _POWERS, ROUNDER)
    return _near(scaled(power, n), r, _EXP)


@_or(functools.partial(functions.apply, "exp"))
def exp_loose(x: Value) -> Value:
    """The exponential to 2^-13."""
    return avx512_powers.power_of_two(x * (1 / functions.LN2))


@_or(functions.exp_by_polynomial)
def exp_below_loose(x: Value) -> Value:
    """The same up to 88; of 0 it is 1."""
    power, r, n = _reduced(x, _FRACTIONS, ROUNDER_NEAR)
    power = scaled(power, n)
    return fma(power, r, power)


def _near(power: Value, r: Value, terms: tuple[float, ...]) -> Value:
    """A power times e^r."""
    return fma(power * r, functions.polynomial(r, (1.0, *terms)), power)


def _reduced(x: Value, table: tuple[float, ...], rounder: float) -> tuple[Value, Value, Value]:
    """x as a multiple n of ln(2), in parts of which a table has the powers of two, and a rest r.

    Gives the power of two of n's fraction, r and n: the exponential is the power times e^r times 2^floor(n).
    """
    x = functions.at_least(x, -104.0)
    rounded = fma(x, 1 / functions.LN2, rounder)
    n = rounded - rounder
    r = fma(n, -LN2_FLOAT, x)
    if table is _POWERS:
        r = fma(n, -LN2_REST, r)
    return looked_up(table, rounded.bits(I32)), r, n


@_or(lambda x: 1.0 / (functions.apply("exp2", x) + 1.0))
def share_loose(x: Value) -> Value:
    """1 / (1 + 2^x), to 2^-13."""
    return inverse(avx512_powers.power_of_two(x) + 1.0)


def log(x: Value, more: Value | None = None) -> Value:
    """The logarithm of f32, and a little more."""
    if x.type.width == 1 and more is None:
        return first_lane(log(x.splat(LANES)))  # what waits for it waits less
    if x.type.width % LANES:
        return functions.log_by_polynomial(x, more)
    n, f = _exponent_and_rest(x)
    square = f * f
    high, low = functions.LN2_EAGER  # both positive: of infinite exponents their products are alike
    y = fma(n, low, functions.polynomial(f, _LOG) * square * f)
    y = y if more is None else y + more
    return fma(n, high, fma(square, -0.5, y) + f)


def log_loose(x: Value) -> Value:
    """To 2^-13."""
    if x.type.width == 1:
        return first_lane(log_loose(x.splat(LANES)))
    if x.type.width % LANES:
        return functions.log_by_polynomial(x)
    n, f = _exponent_and_rest(x)
    return fma(n, functions.LN2, functions.polynomial(f, (1.0, *_LOG_LOOSE)) * f)


@_or(functions.log2_by_doubles)
def log2(x: Value) -> Value:
    """The logarithm of f32 to base 2; what is left of the largest part is added at last."""
    n, f = _exponent_and_rest(x)
    square, (high, low) = f * f, avx512_powers.LOG2E
    part = f * high
    rest = fma(f, low, fma(f, high, -part))
    rest = fma(fma(functions.polynomial(f, _LOG), f, -0.5) * square, high, rest)
    return (n + part) + rest


@_or(functions.log2_by_doubles)
def log2_loose(x: Value) -> Value:
    """To 2^-13."""
    n, f = _exponent_and_rest(x)
    return fma(functions.polynomial(f, [c / functions.LN2 for c in (1.0, *_LOG_LOOSE)]), f, n)


@_or(functions.log1p_by_polynomial)
def log1p(x: Value) -> Value:
    """log(1 + x), made good for what the sum loses."""
    u = x + 1.0
    inside = (u.bits(U32) - 1) < 0x4E800000  # more than 0, and 2^30 at most
    near = inverse(u)
    near = fma(near, fma(-u, near, 1.0), near)
    lost = inside.where((x - (u - 1.0)) * near, 0.0)
    return u.compare("eq", 1.0).where(x, log(u, lost))


def log1p_loose(x: Value) -> Value:
    """To 2^-13."""
    near = functions.absolute(x) < 2.0**-10
    return near.where(fma(x * x, -0.5, x), log_loose(x + 1.0))


def _exponent_and_rest(x: Value) -> tuple[Value, Value]:
    """n and f, of -1/4 up to 1/2, with x = 2^n (1 + f); -inf and 0 for zeros, inf and 0 for inf, else NaN."""
    m, n = registers.mantissa(x, _AROUND_ONE), registers.exponent(x)
    return (m < 1.0).where(n + 1.0, n), m - 1.0


def powers_near(whole: Value, loose: bool) -> tuple[Value, ...]:
    """The tables of `exp_near` for exponentials over 2^(whole - ROOM)."""
    shift = ((ROOM - whole) << 23).splat(LANES)
    return tuple(part + shift for part in _registers(whole, _entries(_PARTS[loose], _NEAR_FACTOR)))


def _registers(near: Value, table: tuple[int, ...]) -> tuple[Value, ...]:
    """A table of one or two registers."""
    entries = [f"i32 {bits}" for bits in table]
    parts = [", ".join(entries[start : start + LANES]) for start in range(0, len(entries), LANES)]
    return tuple(Value(near.fn, f"<{part}>", I32.wide(LANES)) for part in parts)


def reach(x: Value, loose: bool) -> Value:
    """Bits that grow with x; those of what is no number are above all others."""
    return fma(x, 1 / functions.LN2, _ROUNDERS[loose]).bits(U32)


def exp_near(x: Value, tables: tuple[Value, ...], loose: bool) -> tuple[Value, Value]:
    """e^x over the power of two of these tables, and how far it reaches.

    Right where it is a normal number: the exponent is added to that of the factor looked up. To 2^-12 where
    it may be `loose`.
    """
    power, n, r, bits = _power_and_rest(x, tables, _ROUNDERS[loose])
    if loose:
        return fma(power, r, power), bits
    r = fma(n, -LN2_REST, r)
    return fma(power * r, functions.polynomial(r, _NEAR), power), bits


def rounder(near: Value) -> Value:
    """What `power_and_rest` adds to take powers over one near to that of a number."""
    return fma(near, -1 / functions.LN2, ROUNDER_NEAR)


def power_and_rest(x: Value, rounder: Value) -> tuple[Value, Value]:
    """A float p and a small r: e^x is p e^r over the power that the rounder was made for.

    With r^2 / 2 it is as exact as `exp_summed`, which see.
    """
    power, _, r, _ = _power_and_rest(x, _registers(x, _entries(_NEAR_STEPS)), rounder)
    return power, r


def loose_factors(x: Value) -> tuple[Value, Value]:
    """Two floats whose product is e^x, but for a factor that all x have, to 2^-11; 0 and any far below 0.

    The second is what is left of x, and 1: its power, nearly.
    """
    t = fma(x, 1 / functions.LN2, ROUNDER)
    n = t - (ROUNDER + _ONE_MORE / LANES)
    turned = tuple(_POWERS[(k - _ONE_MORE) % LANES] for k in range(LANES))
    return registers.scaled(looked_up(turned, t.bits(I32)), n), fma(n, -LN2_FLOAT, x)


def _power_and_rest(
    x: Value, tables: tuple[Value, ...], rounder: Value | float
) -> tuple[Value, Value, Value, Value]:
    """The power of two, its exponent, the rest, and the bits that have it."""
    bits = fma(x, 1 / functions.LN2, rounder).bits(U32)
    n = bits.bits(F32) - rounder
    # Looking up in one register leaves the units that multiply alone.
    low, *high = tables
    name = "vpermi2var.d" if high else "permvar.si"
    entry = x.fn.call(f"llvm.x86.avx512.{name}.512", bits.type, low, bits, *high)
    places = 23 - (LANES * len(tables)).bit_length() + 1
    return (entry + (bits << places)).bits(F32), n, fma(n, -LN2_FLOAT, x), bits


def exp_summed(x: Value, loose: bool) -> Value:
    """e^x, x at most 0, for sums that are 1 or more: what is less than e^-75 counts as that.

    Then no product of a power and a small rest is so small that it takes long. Errors of single powers, of
    either sign, are up to 2^-22; where they may be `loose`, 2^-12.
    """
    if x.type.width != LANES:
        return functions.exp_below(x, loose)
    tables = _registers(x, _entries(_PARTS[loose]))
    power, _, r, _ = _power_and_rest(functions.at_least(x, -75.0), tables, _ROUNDERS[loose])
    return _and_rest(power, r, loose)


def exp_reaching(x: Value, loose: bool) -> Value:
    """The same up to `FURTHEST`, of what is far below 0 it is 0, and of infinities no number."""
    table, rounder = (_POWERS, ROUNDER) if loose else (_FRACTIONS, ROUNDER_NEAR)
    rounded = fma(x, 1 / functions.LN2, rounder)
    n = rounded - rounder
    return _and_rest(registers.scaled(looked_up(table, rounded.bits(I32)), n), fma(n, -LN2_FLOAT, x), loose)


def _and_rest(power: Value, r: Value, loose: bool) -> Value:
    """A power times e^r, r small, for sums."""
    return fma(power, r, power) if loose else fma(power * r, fma(r, 0.5, 1.0), power)


def scaled(x: Value, n: Value) -> Value:
    """x 2^n, n a whole number."""
    if x.type.width % LANES:
        whole = (n + functions.ROUNDER_32).bits(I32) - 0x4B400000
        return x.fn.call(f"llvm.ldexp.{x.type.suffix}.{whole.type.suffix}", x.type, x, whole)
    return registers.scaled(x, n)


def add_64(a: Value, b: Value) -> Value:
    """The sum of doubles by the units that multiply: those that add convert them from and to floats."""
    name, wide, nearest = "llvm.x86.avx512.vfmadd.pd.512", F64.wide(DOUBLES), Value(a.fn, "8", I32)
    one = a.fn.constant(1.0, wide)
    return in_registers(lambda a, b: a.fn.call(name, wide, a, one, b, nearest), a, b)


@_or(lambda x: functions.erf(x * (1 / ROOT_TWO)) * 0.5)
def area(x: Value) -> Value:
    """Below the normal curve, from 0 to x: half of what `erf` says of x / sqrt(2)."""
    return _in_pieces(x, 5.8, AREA_STEP, _AREA)


def gelu(x: Value) -> Value:
    """x times the area up to it."""
    return x * (area(x) + 0.5)


@_or(gelu)
def gelu_loose(x: Value) -> Value:
    """x, or 0 for less, less |x| times the area from |x| on, to 2^-10; 0 below -5.8, where eager's is."""
    below = functions.at_most(x, _TAIL_END)
    u = fma(registers.bounded(below, _TAIL_END, _POSITIVE), _TAIL_SCALE, 1.0)
    places = fma(u, u, functions.ROUNDER_32).bits(I32)
    return fma(-functions.absolute(below), _piece(u, places, _tail()), functions.at_least(x, 0.0))


def gelu_slope(x: Value) -> Value:
    """The derivative of `gelu`; NaN at infinities, as eager's. It is 0 for x < -6, where it is small."""
    if x.type.width % LANES:
        bell = functions.apply("exp", x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
        return area(x) + 0.5 + x * bell
    return fma(x, 0.0, 0.5) + _in_pieces(x, 6.2, SLOPE_STEP, _SLOPE)


def silu_slope_loose(g: Value, x: Value) -> Value:
    """g times the derivative of x s, where s is 1 / (1 + e^-x); NaN at infinities, as eager's."""
    y = _bounded(x, 87.0)
    return g * _share_slope(y, y, x - x)


def gelu_by_tanh_slope_loose(x: Value, cube: float, slope: float) -> Value:
    """The derivative of x s, where s is 1 / (1 + e^-z) and z is x (slope + cube x^2).

    It is NaN where eager's is: squares are infinite.
    """
    y, large = _bounded(x, 10.0), x * x
    square = y * y
    return _share_slope(y * fma(square, cube, slope), y * fma(square, 3 * cube, slope), large - large)


def _bounded(x: Value, bound: float) -> Value:
    return x if x.type.width % LANES else registers.bounded(x, bound)


def _share_slope(z: Value, v: Value, nothing: Value) -> Value:
    """s (1 + v (1 - s)), where s is 1 / (1 + e) and 1 - s is e s, of e = e^-z; the sum is right to 2^-19."""
    if z.type.width % LANES:
        s = functions.sigmoid(z)
        return s * fma(v, 1.0 - s, 1.0)
    rounded = fma(z, -1 / functions.LN2, ROUNDER)
    n = rounded - ROUNDER
    power, r = scaled(looked_up(_POWERS, rounded.bits(I32)), n), fma(n, LN2_FLOAT, z)
    e = fma(power * r, fma(r, 0.5, -1.0), power)
    whole = e + 1.0 + nothing
    s = inverse(whole)
    s = fma(s, fma(-whole, s, 1.0), s)
    return s * fma(v, e * s, 1.0)


def _in_cubics(x: Value, end: float, step: float, tables: Tables) -> Value:
    """An odd function as `_in_pieces`, of polynomials in x itself, which lose some of the last places."""
    a = functions.at_most(functions.absolute(x), end)
    places = fma(a, 1 / step, functions.ROUNDER_32).bits(I32)
    return functions.with_sign(_piece(a, places, tables), x)


def _in_pieces(x: Value, end: float, step: float, tables: Tables) -> Value:
    """An odd function, constant from `end` on: one polynomial, whose coefficients are looked up."""
    a = functions.at_most(functions.absolute(x), end)
    rounded = fma(a, 1 / step, functions.ROUNDER_32)
    t = fma(rounded - functions.ROUNDER_32, -step, a)
    return functions.with_sign(_piece(t, rounded.bits(I32), tables), x)


def soft(y: Value) -> Value:
    """log(1 + y) / y of y from 0 to 1."""
    return _piece(y, fma(y, LANES - 1.0, functions.ROUNDER_32).bits(I32), _soft())


def _piece(t: Value, places: Value, tables: Tables) -> Value:
    """A polynomial whose coefficients are looked up."""
    *rest, last = [looked_up(table, places) for table in tables]
    for c in reversed(rest):
        last = fma(last, t, c)
    return last


def to_bf16(low: Value, high: Value) -> Value:
    """Two registers rounded to one of bf16."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    low, high = (value if value.type.width > 1 else value.splat(LANES) for value in (low, high))
    return low.fn.call(name, BF16.wide(2 * LANES), high, low)


def to_bf16_by_words(low: Value, high: Value) -> Value:
    """The same without an instruction for it."""
    low, high = (value if value.type.width > 1 else value.splat(LANES) for value in (low, high))
    first, second = (value.rounded().bits(B16) for value in (low, high))
    return shuffled(first, range(1, 4 * LANES, 2), second)


def products_of_pairs(total: Value, a: Value, b: Value) -> Value:
    """Sums of floats, with two products of neighbours in bf16 each; what is no normal number counts as 0."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return total.fn.call(name, total.type, total, a.bits(BF16), b.bits(BF16))


#: By name, what stands in place of the functions of `kiln.generate.functions`; loose ones where results are
#: rounded to types of two bytes.
OWN: dict[str, Callable[..., Value]] = {
    "scaled": scaled, "exp": exp, "exp_below": exp_below, "log": log, "log1p": log1p,
    # To two units in the last place.
    "erf": _or(functions.erf)(lambda x: area(x * ROOT_TWO) * 2.0),
    "expm1": functions.expm1_by_polynomial,
    "gelu": gelu, "gelu_slope": gelu_slope, "add_64": add_64,
    "loose exp": exp_loose, "loose exp_below": exp_below_loose, "loose log": log_loose,
    "loose log1p": log1p_loose, "loose gelu": gelu_loose, "loose silu_slope": silu_slope_loose,
    "loose gelu_by_tanh_slope": gelu_by_tanh_slope_loose, "loose share": share_loose,
    "pow": avx512_powers.pow, "loose pow": avx512_powers.pow_loose,
    "log2": log2, "loose log2": log2_loose, "soft": soft,
    # To 2^-13; to 2^-14 the others, the slope to 2^-19 of 1; the inverse of what is neither tiny nor huge.
    "loose sigmoid": _or(functions.sigmoid)(lambda x: share_loose(x * (-1 / functions.LN2))),
    "loose tanh": _or(functools.partial(functions.apply, "tanh"))(lambda x: _in_cubics(x, *_odd("tanh"))),
    "loose erf": _or(functions.erf)(lambda x: _in_cubics(x, *_odd("erf"))),
    "loose rsqrt": _or(lambda x: 1.0 / functions.square_root(x))(registers.inverse_root),
    "loose inverse": _or(lambda x: 1.0 / x)(inverse),
    "loose gelu_slope": _or(gelu_slope)(lambda x: fma(x, 0.0, 0.5) + _in_cubics(x, *_odd("slope"))),
    "loose sin": functions.sine_loose(False, "sin"), "loose cos": functions.sine_loose(True, "cos"),
}  # fmt: skip
#: What stands in their place where there are results of eleven places.
FINER = {"loose gelu_slope": gelu_slope}
