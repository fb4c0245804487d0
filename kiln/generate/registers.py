"""Instructions of AVX-512 on values of f32 that fill whole registers."""

from __future__ import annotations

from collections.abc import Callable

from kiln.generate.lanes import lanes, shuffled
from kiln.generate.llvm import F32, I1, I16, I32, Value, literal

LANES = 16
_DOWN, _POSITIVE, _LESS, _NEGATIVE = 0x09, 0x04, 0x02, 0x40  # as the instructions are told


def in_registers(function: Callable[..., Value], *values: Value) -> Value:
    """A function of single registers on several in a row, a power of two."""
    width, whole = values[0].type.width, 512 // values[0].type.bits
    if width == whole:
        return function(*values)
    half = width // 2
    low, high = (in_registers(function, *[lanes(v, start, half) for v in values]) for start in (0, half))
    return shuffled(low, range(width), high)


def _done(name: str, *values: Value, told: int | None = None) -> Value:
    """What an instruction gives in all lanes."""
    fn = values[0].fn
    word = () if told is None else (fn.constant(told, I32),)
    everywhere, rounding = fn.constant(-1, I16), fn.constant(4, I32)

    def one(*parts: Value) -> Value:
        called = f"llvm.x86.avx512.mask.{name}.ps.512"
        return fn.call(called, parts[0].type, *parts, *word, parts[0], everywhere, rounding)

    return in_registers(one, *values)


def exponent(x: Value) -> Value:
    """n of |x| = 2^n m with 1 <= m < 2; -inf for zeros, inf for infinities."""
    return _done("getexp", x)


def mantissa(x: Value, told: int = _POSITIVE) -> Value:
    """m of it, or as the instruction is told; of zeros and infinities 1."""
    return _done("getmant", x, told=told)


def scaled(x: Value, n: Value) -> Value:
    """x 2^floor(n)."""
    return _done("scalef", x, n)


def fraction(x: Value) -> Value:
    """x less floor(x); 0 for infinities."""
    return _done("reduce", x, told=_DOWN)


def bounded(x: Value, bound: float, told: int = _LESS) -> Value:
    """The smaller of |x| and a bound, with the sign of x; the bound where x is no number."""
    return _done("range", x, x.like(bound), told=told)


def _near(name: str, x: Value) -> Value:
    everywhere = x.fn.constant(-1, I16)
    return in_registers(
        lambda part: x.fn.call(f"llvm.x86.avx512.{name}.ps.512", part.type, part, part, everywhere), x
    )


def inverse(x: Value) -> Value:
    """To 2^-14."""
    return _near("rcp14", x)


def inverse_root(x: Value) -> Value:
    """To 2^-14."""
    return _near("rsqrt14", x)


def below_zero(x: Value) -> Value:
    """Whether x is finite and less than 0."""
    told, mask = x.fn.constant(_NEGATIVE, I32), I1.wide(LANES)
    return in_registers(lambda part: x.fn.call("llvm.x86.avx512.fpclass.ps.512", mask, part, told), x)


def looked_up(table: tuple[float, ...], places: Value) -> Value:
    """The entry of a table of one or two registers at each lane's place, of which the last bits count."""
    fn, wide = places.fn, F32.wide(LANES)
    entries = [f"float {literal(c, F32)}" for c in table]
    parts = (", ".join(entries[i : i + LANES]) for i in range(0, len(entries), LANES))
    low, *high = [Value(fn, f"<{part}>", wide) for part in parts]
    if high:
        name = "llvm.x86.avx512.vpermi2var.ps.512"
        return in_registers(lambda part: fn.call(name, wide, low, part, *high), places)
    name = "llvm.x86.avx512.permvar.sf.512"
    return in_registers(lambda part: fn.call(name, wide, low, part), places)
