"""The largest of a row and the sum of powers relative to it, in one pass over the row."""

from __future__ import annotations

import math
from functools import partial

from kiln.fuse.nest import Fold
from kiln.generate.lanes import across_lanes, combined
from kiln.generate.llvm import F32, Value
from kiln.generate.ptx_functions import exp_of_small
from kiln.generate.ptx_team import Team, Turn

#: The lowest finite number: powers relative to it are 0 or 1, those relative to an infinity are no numbers.
LOWEST = -3.4028234663852886e38
#: Turns of which the largest is found before their powers are.
AT_ONCE = 4


class Online(Team):
    """A kernel that may find the largest of a row and the sum of powers at once."""

    def online(self, largest: Fold, total: Fold) -> None:
        """Both folds, by the turns of a loop that the team shares."""
        greater, add = (partial(combined, [fold]) for fold in (largest, total))

        def some(turns: list[Turn], carried: list[Value]) -> list[Value]:
            top, sums = carried
            found = [self.at_turn(largest, *turn) for turn in turns]
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
        top, one = self.row_turns(start, some, AT_ONCE)
        self.lanes = outside
        top, one = self.exchanged([top, one], both, start)
        empty = one.compare("eq", 0.0)  # all are the negative infinity
        self.layers[-1][id(largest)] = empty.where(-math.inf, top)
        self.layers[-1][id(total)] = empty.where(math.nan, one)

    def at_turn(self, largest: Fold, place: Value, valid: Value | None) -> Value:
        """What is folded, at a place of the row; the least of all where that is not in it."""
        self.push()
        self.along_row(place)
        value = self.value(largest.value)
        self.pop()
        value = value if value.type.width == self.lanes else value.splat(self.lanes)
        return value if valid is None else valid.where(value, -math.inf)


def both(left: list[Value], right: list[Value]) -> list[Value]:
    """The largest and the sum of two parts of a row as those of both."""
    (a, x), (b, y) = left, right
    now = a.intrinsic("maximum", b)
    return [now, x * exp_of_small(a - now) + y * exp_of_small(b - now)]
