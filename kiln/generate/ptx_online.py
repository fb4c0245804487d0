"""The largest of a row and the sum of powers relative to it, in one pass over the row."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from kiln.fuse.nest import Fold
from kiln.generate.lanes import across_lanes, combined
from kiln.generate.llvm import F32, Value
from kiln.generate.ptx_functions import exp_of_small
from kiln.generate.ptx_team import Team, Turn
from kiln.generate.softmax import LOWEST

#: Turns of which the largest is found before their powers are: in loops, and written out where all is copied.
AT_ONCE, TOGETHER = 4, 2


class Online(Team):
    """A kernel that may find the largest of a row and the sum of powers at once."""

    def online(self, largest: Fold, total: Fold) -> None:
        """Both folds, by the turns of a loop that the team shares."""
        greater, add = (partial(combined, [fold]) for fold in (largest, total))

        def some(turns: list[Turn], carried: list[Value]) -> list[Value]:
            top, sums = carried
            first, found = self.turn, list[Value]()
            for number, turn in enumerate(turns):
                self.turn = first + number
                found.append(self.at_turn(largest, *turn))
            highest = found
            while len(highest) > 1:
                highest = [*greater(highest[:1], highest[1:2]), *highest[2:]]
            (now,) = greater([top], across_lanes(highest, greater))
            powers = [exp_of_small(value - now) for value in found]
            while len(powers) > 1:
                powers = [powers[0] + powers[1], *powers[2:]]
            (here,) = across_lanes(powers, add)
            return [now, sums * exp_of_small(top - now) + here]

        start = [self.fn.constant(LOWEST, F32), self.fn.constant(0.0, F32)]
        outside, self.lanes = self.lanes, self.grid.width
        stores = any(not store.kept and not store.phase for store in self.nest.stores)
        top, one = self.row_turns(start, some, AT_ONCE, TOGETHER if stores else 1)
        self.lanes = outside
        top, one = self.exchanged([top, one], both, start)
        empty = one.compare("eq", 0.0)  # all are the negative infinity
        self.layers[-1][id(largest)] = empty.where(-math.inf, top)
        self.layers[-1][id(total)] = empty.where(math.nan, one)

    def across(self, values: list[Value], combine: Callable[..., list[Value]], many: int) -> list[Value]:
        """What threads have; of pairs the largest first, so that each thread takes one power."""
        if combine is not both:
            return super().across(values, combine, many)
        top, one = values
        (now,) = self.shuffled([top], lambda a, b: [a[0].intrinsic("maximum", b[0])], many)
        one = one * exp_of_small(top - now)
        return [now, *self.shuffled([one], lambda a, b: [a[0] + b[0]], many)]

    def in_all_threads(self, combine: Callable[..., list[Value]], count: int) -> bool:
        return combine is not both and super().in_all_threads(combine, count)

    def at_turn(self, largest: Fold, place: Value, valid: Value | None) -> Value:
        """What is folded, at a place of the row, and stored; the least of all where that is not in it."""
        self.push()
        self.along_row(place)
        value = self.value(largest.value)
        with self.only_if(valid):
            for store in self.nest.stores:
                if not store.kept and not store.phase:
                    self.store(store)
        self.pop()
        value = value if value.type.width == self.lanes else value.splat(self.lanes)
        return value if valid is None else valid.where(value, -math.inf)


def both(left: list[Value], right: list[Value]) -> list[Value]:
    """The largest and the sum of two parts of a row as those of both."""
    (a, x), (b, y) = left, right
    now = a.intrinsic("maximum", b)
    return [now, x * exp_of_small(a - now) + y * exp_of_small(b - now)]
