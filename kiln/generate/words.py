"""Rows as they are in memory: of words of bf16 two numbers become floats by one instruction each.

Sums of powers are taken in terms of the first number of a row. The largest and the smallest, which say
afterwards whether all powers were floats, are found among the numbers as they are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from kiln.fuse.nest import Apply, Fold, Load, Place, Term, terms
from kiln.fuse.pairs import tree
from kiln.generate import avx512, shorts
from kiln.generate.functions import absolute
from kiln.generate.lanes import across_lanes, first_lane, lanes, shuffled
from kiln.generate.llvm import F32, F64, I16, I32, Type, Value, fma
from kiln.generate.rows import Rows
from kiln.generate.scalar import FOLDS

#: Bytes of a register.
LINE = 64
#: Vectors of a block.
VECTORS = 8
#: Sums that are carried, so that they do not wait for each other.
SUMS = 4
#: What is found of bits: the largest number if it is positive, the smallest if it is negative.
BOUNDS = ("smax", "umax")
#: How far above and below the first number of a row others may be, and how far that may be from 0.
ABOVE, BELOW, FAR = 64.0, 80.0, 2.0**15


Known: TypeAlias = "tuple[dict[int, Value], dict[int, Value]]"
Read: TypeAlias = "list[tuple[Value, list[Any]]]"
"""Registers of bits, and which of their halves count."""


class Words(Rows):
    """Emits such folds."""

    in_words = False
    """Whether functions of one number may be computed in words."""

    def pairs(self, value: Term) -> list[Load]:
        """The numbers of bf16, side by side, that a value is made of, where nothing else in it varies."""
        found = [t for t in terms([value]) if isinstance(t, (Load, Place)) and self.varies(t)]
        loads = [t for t in found if isinstance(t, Load) and t.dtype is torch.bfloat16]
        if self.width != avx512.LANES:
            return []
        plain = all(not t.places and t.valid is None and self.stride(t.index) == 1 for t in loads)
        return loads if plain and len(loads) == len(found) else []

    def pairs_alone(self, value: Term) -> list[Load]:
        """The same where nothing of it is kept beside the row, in order."""
        kept = any(id(t) in self.kept_rows for t in terms([value]))
        return [] if kept else self.pairs(value)

    def two_elements(self, top: Fold, pairs: list[Load], place: Value) -> list[Value]:
        """The values at the even and at the odd places of two vectors."""
        self.push()
        assert self.vector is not None
        self.variables[self.vector.variable], outside, self.lanes = place, self.lanes, self.width
        found = self.apart(top.value, pairs, ({}, {}))
        self.lanes = outside
        self.pop()
        return found

    def apart(self, value: Term, pairs: list[Load], known: Known) -> list[Value]:
        """A value at the even and at the odd of twice as many places as there are lanes.

        What is known of vectors of neighbours is not known here.
        """
        found, outside = [], self.layers
        ids = {id(t) for t in terms([value]) if not isinstance(t, Fold)}
        self.layers = [
            layer if ids.isdisjoint(layer)
            else {key: v for key, v in layer.items() if key not in ids or v.type.width == 1}
            for layer in outside
        ]  # fmt: skip
        for load in pairs:
            if id(load) not in known[0]:
                for half, layer in zip(_halves(self.words_at(load, known)), known, strict=True):
                    layer[id(load)] = half
        for layer in known:
            self.push()
            self.layers[-1] = layer
            found.append(self.value(value))
            self.pop()
        self.layers = outside
        return found

    def of_registers(self, term: Term) -> Value:
        """The value of a term of bf16 where lanes are those of two registers."""
        while isinstance(term, Apply) and term.op == "convert" and term.args[0].dtype is torch.float32:
            term = term.args[0]  # it is rounded where it is stored
        if not (pairs := self.pairs_alone(term)):
            value = self.value(term)
            value = value if value.type.width > 1 else value.splat(self.lanes)
            return self.module.own["to_bf16"](*[lanes(value, start, self.width) for start in (0, self.width)])
        assert self.even_and_odd is not None
        given = shorts.expression(term) if len(pairs) == 1 and self.in_words else None
        short = None if given is None else shorts.fitted(given)
        if short is None:
            return self.rounded(term, pairs, self.even_and_odd)
        word = self.words_at(pairs[0], self.even_and_odd)
        found, outside = shorts.computed(short, word)
        known: Known = {~id(pairs[0]): word}, {}
        return self.fn.rarely(
            outside, [found], lambda: [outside.where(self.rounded(term, pairs, known), found)]
        )[0]

    def words_at(self, load: Load, known: Known) -> Value:
        """The words of even and odd places, read once: what is stored next may lie where they do."""
        if (key := ~id(load)) not in known[0]:
            self.foresee(load, 2 * self.width)
            known[0][key] = self.fn.load(self.address(load, I16), I16.wide(2 * self.width))
        return known[0][key]

    def rounded(self, term: Term, pairs: list[Load], known: Known) -> Value:
        """A value that is computed of even and odd numbers, rounded."""
        self.lanes //= 2
        low, high = self.apart(term, pairs, known)
        self.lanes *= 2
        order = [lane // 2 + lane % 2 * self.width for lane in range(2 * self.width)]
        return shuffled(self.module.own["to_bf16"](low, high), order)

    def address(self, load: Load, kind: Type) -> Value:
        return self.fn.at(self.pointers[load.buffer], self.index(load.index), kind)

    def read_alone(self, value: Term) -> Load | None:
        """The numbers of f32 or bf16, side by side, that a value is as they are; None for others."""
        while isinstance(value, Apply) and value.op == "convert" and value.dtype is torch.float32:
            (value,) = value.args
        if not isinstance(value, Load) or value.places or value.valid is not None:
            return None
        fits = self.width == avx512.LANES and value.dtype in (torch.float32, torch.bfloat16)
        return value if fits and self.stride(value.index) == 1 else None

    def word(self, load: Load, place: Value, end: Value | None, other: Value) -> tuple[Value, list[Any]]:
        """The bits of a register of numbers, and which of the halves count: `other` stands for the rest."""
        assert self.vector is not None
        fn, kind = self.fn, other.type
        self.push()
        self.variables[self.vector.variable] = place
        address = self.address(load, kind)
        if end is None:
            self.foresee(load, kind.width)
        self.pop()
        parts = kind.width // self.width
        if end is None:
            return fn.load(address, kind), [None] * parts
        live = (place.splat(kind.width) + self.ramp(kind.width)) < end
        name, align = f"llvm.masked.load.{kind.suffix}.p0", fn.constant(kind.bits // 8, I32)
        read = fn.call(name, kind, address, align, live, other)
        return read, [live] if parts == 1 else [shuffled(live, range(k, kind.width, 2)) for k in range(2)]

    def by_words(self, read: Load, loose: bool) -> list[Value]:
        """Whether all is well, the largest of a row, and the sum of powers below it, to 2^-22 or 2^-11.

        The sum is divided by what the largest value counts in it, which is 1 then.
        """
        kind = I16 if read.dtype is torch.bfloat16 else I32
        assert self.vector is not None
        self.push()
        self.variables[self.vector.variable] = self.index(self.vector.low)
        first = self.fn.load(self.address(read, kind), kind).splat(8 * LINE // kind.bits)
        self.pop()
        return self.loosely(read, first) if loose else self.exactly(read, first)

    def each_word(
        self, read: Load, first: Value, held: list[Value], body: Callable[..., list[Value]], vectors: int = 1
    ) -> list[Value]:
        """A loop over the words of a row, of so many vectors at once, and one over those that are left.

        The body is given, for each word, its bits and which of its halves count, and what is held; the first
        number of the row stands for those that do not count.
        """
        assert self.vector is not None
        low, end = self.index(self.vector.low), self.index(self.vector.size)
        step = first.type.width
        block = max(vectors * self.width, step)

        def some(count: int, last: Value | None, i: Value, held: list[Value]) -> list[Value]:
            return body([self.word(read, i + k * step, last, first) for k in range(count)], held)

        whole = low + (end - low) / block * block
        held = self.fn.loop(low, whole, block, held, partial(some, block // step, None))
        return self.fn.loop(whole, end, step, held, partial(some, 1, end))

    def largest_word(self, read: Load, first: Value, bits: Value) -> Value:
        """The largest number of a row, given the largest one of the signed numbers that the bits are."""

        def least_negative() -> list[Value]:
            def less(words: Read, held: list[Value]) -> list[Value]:
                return [held[0].intrinsic("umin", words[0][0])]

            return [_reduced(self.each_word(read, first, [first], less)[0], "umin")]

        positive = _reduced(bits, "smax")
        return _float(self.fn.rarely(positive < 0, [positive], least_negative)[0])  # all are below 0

    def loosely(self, read: Load, first: Value) -> list[Value]:
        """The same to 2^-11; powers of what is far below 0 are 0."""
        fn, width = self.fn, self.width

        def some(words: Read, held: list[Value]) -> list[Value]:
            most, *sums = held
            for half, counts in _floats(words):
                power, rest = avx512.loose_factors(half)
                power = power if counts is None else counts.where(power, 0.0)
                sums = [*sums[1:], fma(power, rest, sums[0])]
            return [_folded("smax", most, words), *sums]

        held = [first, *[fn.constant(0.0, F32.wide(width))] * SUMS]
        most, *sums = self.each_word(read, first, held, some, VECTORS)
        (total,) = across_lanes([tree(sums, FOLDS["sum"][2])], lambda a, b: [a[0] + b[0]])
        largest = self.largest_word(read, first, most)
        power, rest = map(first_lane, avx512.loose_factors(largest.splat(width)))
        return [(absolute(largest) <= ABOVE) & total.compare("eq", total), largest, total / (power * rest)]

    def exactly(self, read: Load, first: Value) -> list[Value]:
        """The same to 2^-22, in terms of the first number, where all powers are floats."""
        fn, width, near = self.fn, self.width, _float(first_lane(first))
        rounder = avx512.rounder(near).splat(width)

        def some(words: Read, held: list[Value]) -> list[Value]:
            *bounds, sums, rests, squares = held
            powers = []
            for half, counts in _floats(words):
                power, rest = avx512.power_and_rest(half, rounder)
                powers.append(power if counts is None else counts.where(power, 0.0))
                part = powers[-1] * rest
                rests, squares = rests + part, fma(part, rest, squares)
            bounds = [_folded(name, b, words) for b, name in zip(bounds, BOUNDS, strict=True)]
            return [*bounds, sums + tree(powers, FOLDS["sum"][2]), rests, squares]

        held = [first] * len(BOUNDS) + [fn.constant(0.0, F32.wide(width))] * 3
        most, negative, sums, rests, squares = self.each_word(read, first, held, some, VECTORS)
        negative = _reduced(negative, "umax")
        smallest = (negative < 0).where(_float(negative), 0.0)
        largest = self.largest_word(read, first, most)
        fine = (absolute(near) <= FAR) & (largest <= near + ABOVE) & (smallest >= near - BELOW)
        power, rest = map(first_lane, avx512.power_and_rest(largest.splat(width), rounder))
        rests = fma(squares, 0.5, rests)
        both = across_lanes([sums, rests], lambda a, b: [x + y for x, y in zip(a, b, strict=True)])
        power, rest, total, more = (v.to(F64) for v in (power, rest * fma(rest, 0.5, 1.0), *both))
        return [fine, largest, ((total + more) / fma(power, rest, power)).to(F32)]


def _reduced(bits: Value, name: str) -> Value:
    """One of the lanes of a register."""
    return bits.fn.call(f"llvm.vector.reduce.{name}.{bits.type.suffix}", bits.type.scalar, bits)


def _halves(word: Value) -> list[Value]:
    """The even and the odd numbers of a register of bf16, as floats; those of f32 as they are."""
    if word.type.kind == "i32":
        return [word.bits(F32)]
    both = word.bits(I32)
    return [(both << 16).bits(F32), (both & -0x10000).bits(F32)]


def _floats(words: Read) -> list[tuple[Value, Any]]:
    """The halves of words, and which lanes of them count."""
    return [pair for word, live in words for pair in zip(_halves(word), live, strict=True)]


def _folded(name: str, value: Value, words: Read) -> Value:
    for word, _ in words:
        value = value.intrinsic(name, word)
    return value


def _float(bits: Value) -> Value:
    return (bits if bits.type == I32 else bits.to(I32) << 16).bits(F32)
