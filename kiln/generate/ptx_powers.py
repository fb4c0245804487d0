"""Functions of f64 for GPUs that take many digits: powers and the error function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from kiln.generate.functions import absolute, is_nan, polynomial, with_sign
from kiln.generate.llvm import F64, I64, Value, fma

Elementary: TypeAlias = Callable[[Value], Value]
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10

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
_LOG_REST = tuple(2 / (2 * k + 3) for k in range(10))


def erf(x: Value, exp: Elementary) -> Value:
    a = absolute(x)
    near = polynomial(x * x, _ERF) * x
    b = (a > 6.1).where(6.1, a)
    t = 1.0 / (b + 2.0)
    far = with_sign(1.0 - polynomial(t, _ERFC) * t * exp(-(b * b)), x)
    return is_nan(x).where(x, (a < 1.0).where(near, far))


def _log_in_two(a: Value) -> tuple[Value, Value]:
    """The logarithm of a positive finite number as a sum of two, to more digits than one has."""
    tiny = a < 2.0**-1022
    bits = tiny.where(a * 2.0**54, a).bits(I64)
    e = (bits - 0x3FE6A09E667F3BCD) >> 52
    f = (bits - (e << 52)).bits(F64) - 1.0
    n = e.to(F64) - tiny.where(a.like(54.0), 0.0)
    below = f + 2.0
    s = f / below
    lost = fma(-s, below, f) + s * -(f - (below - 2.0))
    low = lost / below
    z = s * s
    rest = fma(polynomial(z, _LOG_REST) * z, s, fma(n, LN2_LOW, low * 2.0))
    base, part = n * LN2_HIGH, s * 2.0
    high = base + part
    # `base` is 0 or the larger one, and exact.
    less = n.compare("eq", 0.0).where(a.like(0.0), part - (high - base))
    total = high + (less + rest)
    return total, (high - total) + (less + rest)


def pow(x: Value, y: Value, exp: Elementary, log: Elementary) -> Value:
    a = absolute(x)
    high, low = _log_in_two(a)
    product = y * high
    lost = fma(y, high, -product) + y * low
    power: Value = exp(product)
    fine = fma(power, lost, power)
    finite = (a > 0.0) & (a < math.inf) & (absolute(product) < 700.0)
    value = finite.where(fine, exp(y * log(a)))
    value = a.compare("eq", 1.0).where(1.0, value)
    whole = y.intrinsic("floor").compare("eq", y)
    half = y * 0.5
    odd = whole & half.intrinsic("floor").compare("ne", half) & (absolute(y) < 2.0**53)
    negative = x.bits(I64) < 0
    value = (negative & odd).where(-value, value)
    strange = (x < 0.0) & (a < math.inf) & whole.compare("eq", 0)
    value = (strange | is_nan(x) | is_nan(y)).where(math.nan, value)
    return (y.compare("eq", 0.0) | x.compare("eq", 1.0)).where(1.0, value)
