"""Elementary functions of f32 that AVX-512 does better: scaling by powers of two, tables in registers."""

from __future__ import annotations

from collections.abc import Callable

from kiln.generate import functions
from kiln.generate.llvm import F32, I16, I32, Value, fma, literal

LANES = 16
STEP = 17 / 64  # between the centres of the pieces of erf; multiples are exact

# erf(n STEP + t), |t| <= STEP / 2, for n = 0 … 15: the coefficients of 1, t, t^2, …; relative error 2^-25
_ERF = (
    (0.0, 0.292823225, 0.547528446, 0.740236998, 0.867058277, 0.939653337, 0.975797713, 0.99145031,
     0.997345984, 0.999277413, 0.999827683, 0.999964058, 0.999993443, 0.999998987, 0.999999881, 1),
    (1.12837923, 1.05150843, 0.850914001, 0.597962379, 0.364902914, 0.193373099, 0.0889877155, 0.0355614424,
     0.0123408185, 0.00371898082, 0.000973238784, 0.000221172188, 4.36473092e-05, 7.4799832e-06,
     1.11316717e-06, 1.43850883e-07),
    (3.01968953e-07, -0.279299706, -0.45203957, -0.47649762, -0.387711167, -0.256827533, -0.141826943,
     -0.0661228895, -0.0262239333, -0.00889014918, -0.00258479663, -0.000646064756, -0.00013906385,
     -2.58115233e-05, -4.13540192e-06, -5.7307625e-07),
    (-0.376143098, -0.301067859, -0.123555399, 0.0538102239, 0.152989388, 0.162939012, 0.121028103,
     0.070111908, 0.0330380909, 0.0129298037, 0.00425322959, 0.00118491391, 0.00028101221, 5.6940411e-05,
     9.88429019e-06, 1.48633501e-06),
    (0.000308713963, 0.131980866, 0.182218269, 0.136842564, 0.0482384637, -0.0220044311, -0.0487514287,
     -0.0430158935, -0.0264082067, -0.0125733027, -0.00484292395, -0.00154180394, -0.000410857756,
     -9.23918778e-05, -1.76318081e-05, -2.49569666e-06),
    (0.11086493, 0.0770592615, -0.00098218245, -0.0591224916, -0.0658787563, -0.036907848, -0.00518619781,
     0.0108710332, 0.0124295903, 0.00807288382, 0.00383464922, 0.00143303594, 0.000435322261,
     0.000109440589, 2.30245751e-05, 5.88480043e-06),
)  # fmt: skip


# (e^r - 1 - r) / r^2 on |r| <= ln(2)/32
_EXP = (0.5000162220356067, 0.16666718660599164)
_POWERS = tuple(2.0 ** (n / LANES) for n in range(LANES))
ROUNDER = 1.5 * 2.0**19  # adding it rounds to sixteenths, in the low bits


def exp_below(x: Value) -> Value:
    """The exponential of f32 up to 89: a short polynomial times a sixteenth power of two looked up."""
    if x.type.width != LANES:
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
    if x.type.width != LANES:
        whole = (n + functions.ROUNDER_32).bits(I32) - 0x4B400000
        return fn.call(f"llvm.ldexp.{x.type.suffix}.{whole.type.suffix}", x.type, x, whole)
    everywhere, rounding = Value(fn, "-1", I16), Value(fn, "4", I32)
    return fn.call("llvm.x86.avx512.mask.scalef.ps.512", x.type, x, n, x, everywhere, rounding)


def erf(x: Value) -> Value:
    """One polynomial whose coefficients are looked up by the piece; to one unit in the last place."""
    if x.type.width != LANES:
        return functions.erf(x)
    a = functions.at_most(functions.absolute(x), 4.0)
    rounded = fma(a, 1 / STEP, functions.ROUNDER_32)
    t = fma(rounded - functions.ROUNDER_32, -STEP, a)
    *rest, last = [_looked_up(table, rounded.bits(I32)) for table in _ERF]
    for c in reversed(rest):
        last = fma(last, t, c)
    return functions.with_sign(last, x)


def _looked_up(table: tuple[float, ...], places: Value) -> Value:
    """The entry of a table at each lane's place, of which the last four bits count."""
    fn, wide = places.fn, F32.wide(LANES)
    entries = Value(fn, f"<{', '.join(f'float {literal(c, F32)}' for c in table)}>", wide)
    return fn.call("llvm.x86.avx512.permvar.sf.512", wide, entries, places)


#: By name, what stands in place of the functions of `kiln.generate.functions`.
OWN: dict[str, Callable[..., Value]] = {"scaled": scaled, "exp_below": exp_below, "erf": erf}
