"""Powers of f32 with AVX-512: logarithms by tables in registers, in two floats where all places count."""

from __future__ import annotations

import math

from kiln.generate import functions, registers
from kiln.generate.llvm import I32, Value, fma, rounded
from kiln.generate.registers import LANES, bounded, exponent, fraction, looked_up, mantissa

#: Steps between 1 and 2, each with a number that is near to the inverses of all in it. It has few digits, so
#: that products with it less 1 are floats; of what is next to powers of two it is one.
_STEPS = 32
_INVERSES = tuple(1.0 if n == 0 else round(64 / (1 + (n + 0.5) / _STEPS)) / 64 for n in range(_STEPS))
_LOGS = tuple(-math.log2(inverse) for inverse in _INVERSES)


def _line(low: float, high: float) -> tuple[float, float]:
    """The slope of a line that log2 is near to between two numbers, and where it starts."""
    slope = math.log2(high / low) / (high - low)
    furthest = 1 / (slope * math.log(2))
    return slope, (math.log2(low) - slope * low + math.log2(furthest) - slope * furthest) / 2


_LINES = tuple(zip(*[_line(1 + n / _STEPS, 1 + (n + 1) / _STEPS) for n in range(_STEPS)], strict=True))
# log2(1 + f) / f on |f| <= 1/32, to 2^-31, and to 2^-19
_LOG = (-0.7213474493505564, 0.48089821844585934, -0.36096672862194945, 0.28887201215477876)
_LOG_LOOSE = (1.4426950408889634, -0.721610739480912, 0.4811802771333209)
# The same where its error counts as it is and not beside f
_LOG_ABSOLUTE = (1.442694998315602, -0.7213494213806029, 0.4811467276035612, -0.35686894845307254)
# 2^f on -0.19 <= f <= 1.19, where 0 gives 1; on 0 <= f <= 1, to 2^-13
_POWER = (1.0, 0.6931472988835534, 0.24022518506681587, 0.05550105030714559, 0.009653041159058268,
          0.0012585731300100874, 0.0002148414155244775)  # fmt: skip
_POWER_LOOSE = (1.0, 0.6951167944857565, 0.22764495663299483, 0.07706707321018796)
#: Logarithms that are multiples of it, whole numbers up to 256 beside them, are floats.
_UNIT = 2.0**-15
#: Constant exponents up to it need logarithms to so many places alone, not to so many digits.
_SMALL = 4.0


def _in_two(number: float, unit: float) -> tuple[float, float]:
    """A multiple of a unit, and the rest."""
    high = round(number / unit) * unit
    return high, number - high


def _tables(numbers: tuple[float, ...], unit: float = _UNIT) -> tuple[tuple[float, ...], ...]:
    return tuple(zip(*[_in_two(number, unit) for number in numbers], strict=True))


_LOGS_IN_TWO = _tables(_LOGS)
LOG2E = rounded(1 / functions.LN2), 1 / functions.LN2 - rounded(1 / functions.LN2)  # in two floats


def pow(x: Value, y: Value) -> Value:
    """The power of f32."""
    if x.type.width % LANES:
        return functions.pow_by_doubles(x, y)
    base, power = x.number(), y.number()
    if base is not None and 0 < base < math.inf and base != 1:
        high = rounded(math.log2(base))
        return _exp2(*_product(y, x.like(high), x.like(math.log2(base) - high)))
    if power is not None and 0 < abs(power) <= _SMALL:
        return _with_edges(x, power, _exp2(*_small_power(x, power)))
    result = _exp2(*_product(y, *_log2(x)))
    if power is not None and _SMALL < abs(power) < math.inf:
        return _with_edges(x, power, result)
    return functions.with_edges_of_pow(x, y, result)


def pow_loose(x: Value, y: Value) -> Value:
    """The power to 2^-12."""
    if x.type.width % LANES:
        return functions.pow_by_doubles(x, y)
    base, power = x.number(), y.number()
    if base is not None and 0 < base < math.inf and base != 1:
        return power_of_two(y * math.log2(base))
    if power is not None and 0 < abs(power) <= _SMALL:
        return _with_edges(x, power, power_of_two(_by_lines(x, power)))
    e, f, places = _reduced(x)
    if power is not None and 0 < abs(power) < math.inf:
        whole = fma(e, power, looked_up(tuple(log * power for log in _LOGS), places))
        terms = [c * power for c in _LOG_LOOSE]
        return _with_edges(x, power, power_of_two(fma(functions.polynomial(f, terms), f, whole)))
    logarithm = fma(functions.polynomial(f, _LOG_LOOSE), f, e + looked_up(_LOGS, places))
    return functions.with_edges_of_pow(x, y, power_of_two(y * logarithm))


def _places(m: Value) -> Value:
    """The step that a number from 1 to 2 is in."""
    return m.bits(I32) >> 18


def _reduced(x: Value) -> tuple[Value, Value, Value]:
    """e, f and a place in the tables, with |x| = 2^e (1 + f) over the inverse that stands there."""
    m = mantissa(x)
    places = _places(m)
    return exponent(x), fma(m, looked_up(_INVERSES, places), -1.0), places


def _by_lines(x: Value, power: float) -> Value:
    """log2 |x| times a number, to 2^-13 of that number."""
    m = mantissa(x)
    slopes, starts = (looked_up(tuple(c * power for c in table), _places(m)) for table in _LINES)
    return fma(exponent(x), power, fma(m, slopes, starts))


def _log2(x: Value) -> tuple[Value, Value]:
    """log2 |x| in two floats, to 2^-29 of it."""
    e, f, places = _reduced(x)
    high, low = (looked_up(table, places) for table in _LOGS_IN_TWO)
    whole, part = e + high, f * LOG2E[0]
    lost = fma(f, LOG2E[0], -part)
    total, left = _sum(whole, part)
    rest = fma(fma(functions.polynomial(f, _LOG), f, LOG2E[1]), f, lost) + (left + low)
    return _sum(total, bounded(rest, 1.0))


def _sum(large: Value, small: Value) -> tuple[Value, Value]:
    """A sum and what it lost; the first is 0 or the larger one."""
    total = large + small
    return total, (large - total) + small


def _product(y: Value, high: Value, low: Value) -> tuple[Value, Value]:
    product = y * high
    return product, fma(y, low, fma(y, high, -product))


def _small_power(x: Value, power: float) -> tuple[Value, Value]:
    """log2 |x| times a number, in two floats."""
    e, f, places = _reduced(x)
    near, rest = _in_two(power, _UNIT)
    highs, lows = _tables(tuple(log * power for log in _LOGS))
    low = looked_up(lows, places)
    low = fma(e, rest, low) if rest else low
    low = fma(functions.polynomial(f, [c * power for c in _LOG_ABSOLUTE]), f, low)
    return fma(e, near, looked_up(highs, places)), low


def power_of_two(x: Value) -> Value:
    """2^x, to 2^-13."""
    return registers.scaled(functions.polynomial(fraction(x), _POWER_LOOSE), x)


def _exp2(high: Value, low: Value) -> Value:
    """The power of two of a sum; the second is less than 0.19, and anything where the first is infinite."""
    return registers.scaled(functions.polynomial(fraction(high) + bounded(low, 1.0), _POWER), high)


def _with_edges(x: Value, exponent: float, power: Value) -> Value:
    """A power of x, given that of |x|; the exponent is finite and not 0."""
    if exponent % 2 == 1:
        return functions.with_sign(power, x)
    return power if exponent % 1 == 0 else registers.below_zero(x).where(math.nan, power)
