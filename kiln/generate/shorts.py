"""Functions of one number of bf16 that are rounded to such a number: 32 at once, in words of 16 bits.

The logarithm of the result is a polynomial in the last six bits of the number, whose coefficients are looked
up by its sign and the bits before; that of a power is a sum of what is looked up by the exponent and by the
digits. What turns the fraction of a logarithm into digits is looked up as well. Everything is tried, when the
kernel is made, on all numbers: from the first one on whose result is more than a unit in the last place off,
and for all that is no number, the function is computed as others are.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy
import torch

from kiln.base.dataclass import dataclass
from kiln.fuse.costs import COSTLY
from kiln.fuse.nest import Apply, Const, Load, Term
from kiln.generate.llvm import BF16, I8, I16, U16, Value

Numbers: TypeAlias = Any
"""An array."""
Expression: TypeAlias = Any
"""A number, the name of the argument, or the name of a function and what it is given."""

TIMES = "llvm.x86.avx512.pmul.hr.sw.512"  # of numbers of 15 bits after the point
X = "x"
#: Bits of the first number, 2^-9, that has a piece: what is nearer to 0 follows from it. Each piece has so
#: many numbers; both signs have as many pieces, up to 2^7.
FIRST, LENGTH, PIECES = 118 << 7, 64, 32
END = FIRST + LENGTH * PIECES
#: Parts of one in logarithms; a multiple of those in numbers.
PARTS, MORE = 512, 4
#: What is subtracted from logarithms, so that what is added to them is positive: at most as much as a line is
#: above the power of two.
ABOVE = 46
#: How far the functions should go, how far at least, and how far off results may be.
FAR, NEAR, UNITS = 5.0, 4.0, 1.0
DEGREES = (2, 3)
#: Terms of an expression.
LARGEST = 48

EXACT: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg,
    "abs": torch.abs, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log1p": torch.log1p,
    "tanh": torch.tanh, "erf": torch.erf, "sigmoid": torch.sigmoid, "sqrt": torch.sqrt, "pow": torch.pow,
    "reciprocal": torch.reciprocal, "where": torch.where, "gt": torch.gt, "ge": torch.ge, "lt": torch.lt,
    "le": torch.le, "maximum": torch.maximum, "minimum": torch.minimum, "sin": torch.sin, "cos": torch.cos,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Short:
    """How a function is computed: for each degree the coefficients of all pieces, and what follows."""

    tables: tuple[tuple[int, ...], ...]
    exponent: int
    """What is added to those of results."""
    follows: bool
    """Whether results grow with the number below the first piece; otherwise they stay the same there."""
    odd: bool
    """Whether results have the sign of the number; otherwise none has one."""
    last: tuple[int, int]
    """The largest numbers, of either sign, that may be taken."""


@dataclass(frozen=True, slots=True)
class Power:
    """The same of a power: logarithms of factors by exponents and by digits, and what the last digit adds."""

    tables: tuple[tuple[int, ...], ...]
    first: int
    last: int
    """The least and the largest number that may be taken."""


def expression(term: Term) -> Expression | None:
    """What a term computes of one number of bf16; None where it is more or less than a costly function."""
    found: list[Load] = []
    count = itertools.count()

    def visit(term: Term) -> Expression:
        if next(count) >= LARGEST:
            return None
        if isinstance(term, Load):
            found.append(term)
            return X if term.dtype is torch.bfloat16 and term is found[0] else None
        if isinstance(term, Const) and isinstance(term.value, (int, float)):
            return float(term.value)
        if not isinstance(term, Apply):
            return None
        if term.op == "convert":
            return visit(term.args[0]) if isinstance(term.args[0], Load) else None
        below = [visit(child) for child in term.args] if term.op in EXACT else [None]
        return None if None in below else (term.op, *below)

    made = visit(term)
    alone = isinstance(made, tuple) and made[0] in ("exp", "exp2")  # it costs less in floats
    return made if _is_costly(made) and not alone else None


def _is_costly(given: Expression) -> bool:
    return isinstance(given, tuple) and (given[0] in COSTLY or any(map(_is_costly, given[1:])))


def evaluated(given: Expression, x: torch.Tensor) -> torch.Tensor:
    """An expression; in doubles nothing is lost where 1 is added to what is near to -1."""
    match given:
        case "x":
            return x
        case float():
            return torch.full_like(x, given)
        case ("add", ("tanh", below), 1.0) if x.dtype is torch.float64:
            return 2 * torch.sigmoid(2 * evaluated(below, x))
        case ("add", ("erf", below), 1.0) if x.dtype is torch.float64:
            return torch.special.erfc(-evaluated(below, x))
    return EXACT[given[0]](*[evaluated(below, x) for below in given[1:]])


@functools.cache
def fitted(given: Expression) -> Short | Power | None:
    """How an expression is computed in words; None where that does not go far enough."""
    return power(given) or in_pieces(given)


def power(given: Expression) -> Power | None:
    """The same of what is a factor for the exponent of a number and one for its digits, if it is positive."""
    if not evaluated(given, torch.tensor([-0.7, -1.0, -3.0], dtype=torch.float64)).isnan().all():
        return None
    bits = numpy.arange(0x7F80, dtype=numpy.int16)
    exact = evaluated(given, torch.from_numpy(bits).view(torch.bfloat16).double()).numpy()
    with numpy.errstate(divide="ignore", invalid="ignore"):
        logarithms = numpy.log2(exact) * PARTS
    least, one, most = (128 * (127 + n) for n in (-PIECES, 0, PIECES))
    digits, exponents = logarithms[one : one + 128], logarithms[least:most:128] - logarithms[one]
    if not numpy.isfinite([*digits, *exponents]).all():
        return None
    tables = numpy.rint([
        numpy.roll(exponents, least // 128), digits[::2] + (63 * PARTS - ABOVE), digits[::2] - digits[1::2]
    ]).astype(numpy.int64)  # fmt: skip
    pair = bits >> 1 & 63
    got = _ended(tables[0][bits >> 7 & 63] + tables[1][pair] - tables[2][pair] * (bits & 1), 64)
    right = (_off(got, exact) <= UNITS) & (numpy.abs(logarithms) < 62 * PARTS)
    right[:least] = right[most:] = False
    first, last = one - int(right[one::-1].argmin()) + 1, one + int(right[one:].argmin()) - 1
    if first > _word(1 / FAR**2) or last < _word(FAR**2):
        return None
    return Power(tuple(tuple(map(int, _signed(row))) for row in tables), first, last)


def in_pieces(given: Expression) -> Short | None:
    """The same by pieces of polynomials."""
    places = numpy.arange(END, dtype=numpy.int32)
    words = numpy.stack([places, places | 0x8000]).astype(numpy.uint16).view(numpy.int16)
    x = torch.from_numpy(words).view(torch.bfloat16)
    exact, usual = (evaluated(given, x.to(kind)).numpy() for kind in (torch.float64, torch.float32))
    ends = (usual == 0) & (exact != 0) | ~numpy.isfinite(usual) & numpy.isfinite(exact)  # what eager loses
    below = exact[1] < 0
    odd = bool(below.any())
    if (exact[0] < 0).any() or odd and (exact[1] > 0).any() or numpy.isnan(exact).any():
        return None
    size = numpy.abs(exact)
    with numpy.errstate(divide="ignore"):
        logarithms = numpy.log2(size)
    finite = logarithms[:, FIRST:][numpy.isfinite(logarithms[:, FIRST:])]
    exponent = min(max(math.ceil(finite.max(initial=0.0)), 0), 64)
    wanted = (logarithms[:, FIRST:] + (127 - exponent)) * PARTS - ABOVE
    wanted = numpy.where(numpy.isfinite(wanted), wanted, 0.0).reshape(2 * PIECES, LENGTH)
    follows, made = bool((size[:, 0] == 0).all()), None
    first = _rounded(size[:, FIRST] if follows else size[:, 0])
    for degree in DEGREES:
        tables = _tables(wanted, degree, size[:, FIRST:].reshape(2 * PIECES, LENGTH), exponent, first)
        made = _tried(tables, exponent, numpy.where(ends, math.inf, size), follows, odd) or made
        if made is not None and min(made.last) >= _word(FAR):
            break
    return made


def _word(number: float) -> int:
    return int(_rounded(numpy.array(number)))


def _rounded(numbers: Numbers) -> Numbers:
    """The bits of the nearest numbers of bf16."""
    return torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy()


@functools.cache
def _steps() -> Numbers:
    """What polynomials are taken of, in each piece: the last bits of numbers, then those that say which."""
    last, which = numpy.arange(LENGTH) - LENGTH // 2, numpy.arange(PIECES) + FIRST // LENGTH
    return last * 1024 + numpy.concatenate([which, which + 512])[:, None]


@functools.cache
def _order() -> Numbers:
    """Where the pieces stand in the tables."""
    which = (numpy.arange(PIECES) + FIRST // LENGTH) % (2 * PIECES)
    return numpy.concatenate([which, which ^ PIECES])


@functools.cache
def _digits() -> tuple[int, ...]:
    """What is added to a logarithm, by 7 bits of its fraction, and to round it."""
    fractions = ((numpy.arange(128) * MORE + (MORE - 1) / 2 + ABOVE) % PARTS) / PARTS
    lines = PARTS * (fractions - (2.0**fractions - 1))
    return tuple(map(int, numpy.rint(ABOVE - lines + MORE / 2)))


def _results(tables: Numbers, exponent: int) -> Numbers:
    """The bits of results without their signs, of all pieces, as the instructions give them."""
    steps = _steps()
    *rest, value = tables[:, :, None]
    for table in reversed(rest):
        value = table + ((steps * _signed(value) + 0x4000) >> 15)
    return _ended(value, exponent)


def _ended(value: Numbers, exponent: int) -> Numbers:
    """The bits of results, of their logarithms."""
    value, digits = value & 0xFFFF, numpy.array(_digits())
    return ((value + digits[(value // MORE) & 127]) & 0xFFFF) // MORE + exponent * 128


def _signed(value: Numbers) -> Numbers:
    return (value + 0x8000 & 0xFFFF) - 0x8000


def _off(words: Numbers, size: Numbers) -> Numbers:
    """How far off results are, in units of the last place; those that are not normal may be any such."""
    bits = torch.from_numpy((words & 0x7FFF).astype(numpy.int16))
    got = bits.view(torch.bfloat16).double().numpy()
    with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
        unit = 2.0 ** (numpy.floor(numpy.log2(size)) - 7)
        off = numpy.abs(got - size) / unit
    small = size < 2.0**-126
    return numpy.where(small, numpy.where(got <= 2.0**-126, 0.0, math.inf), off)


def _tables(wanted: Numbers, degree: int, size: Numbers, exponent: int, first: Numbers) -> Numbers:
    """Coefficients of polynomials that are near to logarithms: of some that are nearest the best.

    The first results, of either sign, are given: what is below follows from them.
    """
    powers = numpy.stack([(_steps() / 0x8000) ** n for n in range(degree + 1)], 2)
    near = (numpy.linalg.pinv(powers) @ wanted[:, :, None])[:, :, 0].T.clip(-0x7FFF, 0xFFFF)
    best, least = numpy.rint(near).astype(numpy.int64), numpy.full(2 * PIECES, math.inf)
    for slope in (0, -1, 1):
        for start in (0.0, -0.5, 0.5, -1.0, 1.0, -2.0, 2.0):
            other = numpy.array([start, slope, *[0] * (degree - 1)])
            tables = numpy.rint(near + other[:, None]).astype(numpy.int64)
            results = _results(tables, exponent)
            off = numpy.nan_to_num(_off(results, size), nan=math.inf).max(1)
            off[::PIECES] += results[::PIECES, 0] != first
            best, least = numpy.where(off < least, tables, best), numpy.minimum(off, least)
    return best


def _tried(tables: Numbers, exponent: int, size: Numbers, follows: bool, odd: bool) -> Short | None:
    """The function on all numbers, up to where it is right."""
    far = _results(tables, exponent).reshape(2, LENGTH * PIECES)
    less = FIRST - numpy.arange(FIRST) if follows else numpy.zeros(FIRST, dtype=numpy.int64)
    near = numpy.maximum(far[:, :1] - less, 0)
    right = _off(far, size[:, FIRST:]) <= UNITS
    last = [FIRST - 1 + int(len(side) if side.all() else side.argmin()) for side in right]
    if min(last) < _word(NEAR) or not (_off(near, size[:, :FIRST]) <= UNITS).all():
        return None
    turned = numpy.empty_like(tables)
    turned[:, _order()] = _signed(tables)
    rows = tuple(tuple(map(int, row)) for row in turned)
    return Short(rows, exponent, follows, odd, (last[0], last[1]))


def computed(short: Short | Power, word: Value) -> tuple[Value, Value]:
    """The results for a register of numbers, and for which of them these are none."""
    word = word.to(U16)
    if isinstance(short, Power):
        exponents, digits, steps = short.tables
        pair = word >> 1
        step = word.fn.call(TIMES, word.type, word << 15, _looked_up(steps, pair))
        value = _looked_up(exponents, word >> 7) + (_looked_up(digits, pair) + step)
        return _end(value, 64).bits(BF16), (word - short.first) > short.last - short.first
    inside = word.intrinsic("umax", FIRST).intrinsic("smax", FIRST - 0x8000)
    turned = inside.intrinsic("fshl", inside, 10)
    piece, step = turned ^ ((word >> 10) & PIECES), turned ^ -0x8000
    *rest, value = [_looked_up(table, piece) for table in short.tables]
    for start in reversed(rest):
        value = start + word.fn.call(TIMES, value.type, step, value)
    value = _end(value, short.exponent)
    value = value.intrinsic("usub.sat", inside - word) if short.follows else value
    value = value | (word & -0x8000) if short.odd else value
    positive, negative = short.last
    return value.bits(BF16), (word.to(I16) > positive) | (word > (0x8000 | negative) - 0x10000)


def _end(value: Value, exponent: int) -> Value:
    """The bits of results, of their logarithms."""
    digits = _looked_up(_digits(), (value >> 2).bits(I8)).bits(U16)
    value = (value + (digits & 0xFF)) >> 2
    return value + exponent * 128 if exponent else value


def _looked_up(table: tuple[int, ...], places: Value) -> Value:
    """The entries of a table of two registers."""
    kind, half = places.type, len(table) // 2
    entries = [f"{kind.scalar} {n}" for n in table]
    low, high = (Value(places.fn, f"<{', '.join(part)}>", kind) for part in (entries[:half], entries[half:]))
    name = f"llvm.x86.avx512.vpermi2var.{'hi' if kind.bits == 16 else 'qi'}.512"
    return places.fn.call(name, kind, low, places, high)
