"""The largest of a row and the sum of exponentials below it, in one pass over memory.

The lanes carry the largest value met so far and sums in terms of it. A block of vectors in which some value
is larger, which is rare after the first ones, scales the sums anew.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from kiln.base.expressions import hinted
from kiln.fuse.nest import Fold
from kiln.generate import functions
from kiln.generate.lanes import across_lanes, first_lane
from kiln.generate.llvm import F32, I1, Value
from kiln.generate.scalar import FOLDS
from kiln.generate.softmax import forgetful, pair
from kiln.generate.values import Values

#: Vectors of a block.
VECTORS = 8
#: Elements of a row for which bringing lanes together does not count.
LONG = 1024
#: What lanes carry before their first value: less than any but -inf.
LOWEST = -3.4028234663852886e38

_sum = FOLDS["sum"][2]


class Online(Values):
    """Emits such pairs for rows in vectors whose lanes can be left out."""

    def online(self) -> tuple[Fold, Fold] | None:
        """The pair of folds that goes in one pass, if the nest has one."""
        axis = self.vector
        if axis is None or self.nest.reduced != (axis,) or self.width < 2 or hinted(axis.size) < LONG:
            return None
        found = pair(self.nest)
        return None if found is None or id(found[1].value) in self.kept_rows else found

    def pass_over(self, top: Fold, total: Fold) -> None:
        """The loops of both folds."""
        fn, width = self.fn, self.width
        assert self.vector is not None
        wide = F32.wide(width)
        low, end = self.index(self.vector.low), self.index(self.vector.size)
        step = VECTORS * width
        whole = low + (end - low) / step * step
        held = [fn.constant(LOWEST, wide), fn.constant(0.0, wide)]
        held = fn.loop(low, whole, step, held, partial(self.several, top, VECTORS, None))
        held = fn.loop(whole, end, width, held, partial(self.several, top, 1, end))
        most, sums = held
        result, largest = across_lanes([sums], lambda a, b: [_sum(a[0], b[0])])[0], first_lane(most)
        nothing = result.compare("eq", 0.0)  # all values are -inf
        self.layers[-1][id(top)] = nothing.where(-math.inf, largest)
        self.layers[-1][id(total)] = nothing.where(math.nan, result)

    def several(self, top: Fold, count: int, end: Value | None, i: Value, held: list[Value]) -> list[Value]:
        """Some vectors from place `i` on; with an `end`, those before it count."""
        fn = self.fn
        most, sums = held
        values = [self.element(top, i + k * self.width, end) for k in range(count)]
        largest = FOLDS["top" if forgetful(self.nest) is top else "amax"][2]
        here = _tree(values, largest)
        larger = fn.emit(f"fcmp ugt {here.type} {here.text}, {most.text}", I1.wide(self.width))
        any_larger = fn.call(f"llvm.vector.reduce.or.v{self.width}i1", I1, larger)
        rare, usual, before = fn.label("rare"), fn.label("usual"), fn.block
        fn.branch(any_larger, rare, usual)
        fn.start(rare)
        new = across_lanes([largest(most, here)], lambda a, b: [largest(a[0], b[0])])[0].splat(self.width)
        scaled = sums * functions.exp_below(most - new)
        after = fn.block
        fn.jump(usual)
        fn.start(usual)
        now, rest = fn.phi(most.type), fn.phi(sums.type)
        for phi, old, changed in ((now, most, new), (rest, sums, scaled)):
            phi.arrive(old, before)
            phi.arrive(changed, after)
        added = _tree([functions.exp_below(v - now) for v in values], _sum)
        return [now, rest + added]

    def element(self, top: Fold, place: Value, end: Value | None) -> Value:
        """The values at a vector's places; -inf where none is."""
        assert self.vector is not None
        self.push()
        self.variables[self.vector.variable], outside, self.lanes = place, self.lanes, self.width
        if end is not None:
            self.live = (place.splat(self.width) + self.ramp(self.width)) < end
        value = self.value(top.value)
        value = value if value.type.width > 1 else value.splat(self.width)
        if self.live is not None:
            value = self.live.where(value, -math.inf)
        self.live, self.lanes = None, outside
        self.pop()
        return value


def _tree(values: list[Value], combine: Any) -> Value:
    """Values combined by halves."""
    while len(values) > 1:
        paired = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[len(paired) * 2 :]
    return values[0]
