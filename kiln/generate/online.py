"""The largest of a row and the sum of exponentials below it, in one pass over memory.

The lanes carry the largest value met so far and sums in terms of it. A block of vectors in which some value
is larger, which is rare after the first ones, scales the sums anew.

Where the exponentials are kept for a later phase, and only their shares of the sum are asked for, they are
taken over a power of two near the largest of a few vectors. Rows that have values far above those, or far
from 0, are gone over again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from kiln.base.expressions import hinted
from kiln.fuse.nest import Fold, terms
from kiln.fuse.pairs import tree
from kiln.generate import avx512, functions
from kiln.generate.lanes import across_lanes, first_lane
from kiln.generate.late import Late
from kiln.generate.llvm import F32, I1, I32, I64, U32, Type, Value, fma
from kiln.generate.scalar import FOLDS
from kiln.generate.softmax import LOWEST, forgetful, guarded, pair, shares
from kiln.generate.words import Words

#: Vectors of a block.
VECTORS = 8
#: Elements of a row for which bringing lanes together does not count; of one that is kept.
LONG, LONG_KEPT = 1024, 512
#: Elements of a row of two bytes that is near by when it is gone over again; of others the first loop would
#: wait for memory alone.
NEAR = 4096
#: Vectors of a block whose exponentials are kept, and vectors that are looked at before.
KEPT, SAMPLES = 4, 4
#: How far above the largest of those a row may be, so that sums are floats, and how far from 0 they.
ABOVE, FAR = 45.0, 1024.0

_sum, _top = FOLDS["sum"][2], FOLDS["top"][2]


class Online(Words, Late):
    """Emits such pairs for rows in vectors whose lanes can be left out."""

    def online(self) -> tuple[Fold, Fold] | None:
        """The pair of folds that goes in one pass, if the nest has one."""
        axis = self.vector
        if axis is None or self.nest.reduced != (axis,) or self.width < 2 or hinted(axis.size) < LONG:
            return None
        found = pair(self.nest)
        return None if found is None or id(found[1].value) in self.kept_rows else found

    def over_powers(self) -> tuple[Fold, Fold] | None:
        """The pair whose exponentials are kept, over a power of two, if the nest has one."""
        axis = self.vector
        if axis is None or self.nest.reduced != (axis,) or self.width != avx512.LANES or axis.low != 0:
            return None
        found = shares(self.nest) if hinted(axis.size) >= LONG_KEPT else None
        return found if found is not None and id(found[1].value) in self.kept_rows else None

    def pass_over(self, top: Fold, total: Fold) -> None:
        """The loops of both folds; numbers as they are in memory go word by word, if they can."""
        loose, names = id(total.value) in self.loose, (id(top), id(total))
        for term in terms([top.value]) if self.pairs(top.value) else ():
            self.kept_rows.pop(id(term), None)  # two phases are too few for widening it once
        read = self.read_alone(top.value)
        if read is None:
            self.layers[-1].update(zip(names, self.largest_and_sum(top, total, loose), strict=True))
            return
        fine, *found = self.by_words(read, loose)
        found = self.fn.rarely(~fine, found, lambda: self.largest_and_sum(top, total, loose))
        self.layers[-1].update(zip(names, found, strict=True))

    def largest_and_sum(self, top: Fold, total: Fold, loose: bool) -> list[Value]:
        """Both of any row, in one loop, or in two over a row that is near by, which needs no branches."""
        fn = self.fn
        assert self.vector is not None
        lowest, none = (fn.constant(number, F32.wide(self.width)) for number in (LOWEST, 0.0))
        larger = FOLDS["top" if forgetful(self.nest) is top else "amax"][2]
        if loose and hinted(self.vector.size) <= NEAR:
            most = larger(lowest, self.largest(top, larger, VECTORS))
            (sums,) = self.blocks(top, [none], partial(self.more, loose, most))
        else:
            most, sums = self.blocks(top, [lowest, none], partial(self.several, loose, larger))
        result, largest = across_lanes([sums], lambda a, b: [_sum(a[0], b[0])])[0], first_lane(most)
        nothing = result < 0.5  # all values are -inf: of others the largest counts 1
        if guarded(total.value) is not None:
            result = self.unless_infinite(top, largest, nothing.where(0.0, result))
        else:
            result = nothing.where(math.nan, result)
        return [nothing.where(-math.inf, largest), result]

    def unless_infinite(self, top: Fold, largest: Value, result: Value) -> Value:
        """The sum of a row; where the largest value is infinite it is that, or NaN if there is one."""
        infinite, amax = largest.compare("eq", math.inf), FOLDS["amax"][2]
        return self.fn.rarely(infinite, [result], lambda: [first_lane(self.largest(top, amax))])[0]

    def blocks(
        self, top: Fold, held: list[Value], body: Callable[[list[Value], list[Value]], list[Value]],
        vectors: int = VECTORS,
    ) -> list[Value]:  # fmt: skip
        """A loop over the vectors of a row, some at once, and one over those that are left."""
        assert self.vector is not None
        low, end = self.index(self.vector.low), self.index(self.vector.size)

        pairs = self.pairs(top.value)

        def turn(count: int, last: Value | None, i: Value, held: list[Value]) -> list[Value]:
            if pairs and count % 2 == 0:
                places = [i + k * self.width for k in range(0, count, 2)]
                return body([half for place in places for half in self.two_elements(top, pairs, place)], held)
            return body([self.element(top, i + k * self.width, last) for k in range(count)], held)

        if vectors > 1:
            whole = low + (end - low) / (vectors * self.width) * (vectors * self.width)
            held = self.fn.loop(low, whole, vectors * self.width, held, partial(turn, vectors, None))
            low = whole
        return self.fn.loop(low, end, self.width, held, partial(turn, 1, end))

    def more(self, loose: bool, most: Value, values: list[Value], held: list[Value]) -> list[Value]:
        """The sums of powers below the largest value, with those of some vectors."""
        return [held[0] + tree([avx512.exp_summed(v - most, loose) for v in values], _sum)]

    def several(
        self, loose: bool, largest: Callable[..., Value], values: list[Value], held: list[Value]
    ) -> list[Value]:
        """The largest value so far and sums in terms of it, with those of some vectors."""
        fn = self.fn
        most, sums = held
        here = tree(values, largest)
        larger = fn.emit(f"fcmp ugt {here.type} {here.text}, {most.text}", I1.wide(self.width))

        def scaled() -> list[Value]:
            new = across_lanes([largest(most, here)], lambda a, b: [largest(a[0], b[0])])[0].splat(self.width)
            return [new, sums * functions.exp_below(most - new, loose)]

        now, rest = fn.rarely(larger, [most, sums], scaled)
        added = tree([avx512.exp_summed(v - now, loose) for v in values], _sum)
        return [now, rest + added]

    def pass_over_powers(self, top: Fold, total: Fold) -> None:
        """The loops of both folds, and the exponentials beside the row."""
        width = self.width
        assert self.vector is not None
        apart = hinted(self.vector.size) // width // SAMPLES * width
        looked_at = [self.element(top, self.index(k * apart), None) for k in range(SAMPLES)]
        near = _within(tree(looked_at, _top))
        rounded = fma(near, 1 / functions.LN2, functions.ROUNDER_32)
        loose = id(total.value) in self.loose
        tables = avx512.powers_near(rounded.bits(I32) - 0x4B400000, loose)
        # e^-106 is 0 times any power of two below 2.
        least, limit = (near - 106.0).splat(width), avx512.reach(near + ABOVE, loose)

        def usual(x: Value) -> tuple[Value, Value]:
            above = functions.at_least(x, least)
            power, reach = avx512.exp_near(above, tables, loose)
            return (above > least).where(power, 0.0), reach  # products of tiny numbers take long

        sums, reach = self.kept_powers(top, total, U32, usual, bool(self.late))
        fine = (_within(reach) <= limit) & (functions.absolute(near) <= FAR)

        def again() -> list[Value]:
            largest = self.largest(top)

            def careful(x: Value) -> tuple[Value, Value]:
                power = functions.exp_below(x - largest)
                return power, power

            return self.kept_powers(top, total, F32, careful)[:1]

        (result,) = self.fn.rarely(~fine, [sums], again)
        self.layers[-1][id(total)] = across_lanes([result], lambda a, b: [_sum(a[0], b[0])])[0]

    def largest(self, top: Fold, larger: Callable[..., Value] = _top, vectors: int = 1) -> Value:
        """The largest value of a row, in all lanes."""
        start = [self.fn.constant(-math.inf, F32.wide(self.width))]
        (most,) = self.blocks(
            top, start, lambda values, held: [larger(held[0], tree(values, larger))], vectors
        )
        return across_lanes([most], lambda a, b: [larger(a[0], b[0])])[0].splat(self.width)

    def kept_powers(
        self, top: Fold, total: Fold, kind: Type, power: Callable[[Value], tuple[Value, Value]],
        late: bool = False,
    ) -> list[Value]:  # fmt: skip
        """The sums of a row's exponentials, which are stored, and the largest of what comes with each.

        With `late`, the row before is stored beside.
        """
        fn, width, step = self.fn, self.width, KEPT * self.width
        assert self.vector is not None
        _, memory = self.kept_rows[id(total.value)]
        end = self.index(self.vector.size)

        def some(count: int, last: Value | None, i: Value, held: list[Value]) -> list[Value]:
            sums, most = held
            places = [i + k * width for k in range(count)]
            values = [self.element(top, place, last, ahead=last is None) for place in places]
            found = [power(value) for value in values]
            for place, (one, _) in zip(places, found, strict=True):
                fn.store(one, fn.at(memory, place, F32))
            powers, reach = (list(parts) for parts in zip(*found, strict=True))
            return [sums + tree(powers, _sum), _top(most, tree(reach, _top))]

        def both(first: Value, i: Value, held: list[Value]) -> list[Value]:
            self.store_late(first + i, step)
            return some(KEPT, None, i, held)

        held, begin = [fn.constant(0, k.wide(width)) for k in (F32, kind)], fn.constant(0, I64)
        if late:
            first, begin = self.store_edges(end, step)
            held = fn.loop(0, begin, step, held, partial(both, first))
        whole = end / step * step
        held = fn.loop(begin, whole, step, held, partial(some, KEPT, None))
        return fn.loop(whole, end, width, held, partial(some, 1, end))

    def element(self, top: Fold, place: Value, end: Value | None, ahead: bool = False) -> Value:
        """The values at a vector's places; -inf where none is. With `ahead`, the next row is asked for."""
        assert self.vector is not None
        self.push()
        self.variables[self.vector.variable], outside, self.lanes = place, self.lanes, self.width
        if end is not None:
            self.live = (place.splat(self.width) + self.ramp(self.width)) < end
        if ahead:
            self.fetch_next()
        value = self.value(top.value)
        value = value if value.type.width > 1 else value.splat(self.width)
        if self.live is not None:
            value = self.live.where(value, -math.inf)
        self.live, self.lanes = None, outside
        self.pop()
        return value


def _within(values: Value) -> Value:
    """The largest of the lanes."""
    return across_lanes([values], lambda a, b: [_top(a[0], b[0])])[0]
