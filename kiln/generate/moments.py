"""Sums of long rows and of squares of their distances from the mean, in one pass over memory.

The distances are taken from the first element, in double. Eager takes them from the mean in single precision:
over so many elements its rounding averages out, and both give the same number in single precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kiln.fuse.moments import is_call
from kiln.fuse.nest import Apply, Const, Fold, Load, Store, Term
from kiln.generate.functions import absolute
from kiln.generate.llvm import F64
from kiln.generate.values import Values

#: Elements of a row that the nearest cache does not hold.
LONG = 1 << 15


class Moments(Values):
    """Emits such pairs of folds."""

    phase: Callable[[list[Fold], list[Store]], None]

    def moments(self) -> tuple[Fold, Fold] | None:
        """The pair of folds that goes in one pass, if the nest has one."""
        reduced, folds = self.nest.reduced, sorted(self.nest.folds(), key=lambda f: f.phase)
        if self.vector not in reduced or [f.phase for f in folds] != [0, 1]:
            return None
        if not all(type(a.size) is int for a in reduced) or math.prod([a.size for a in reduced]) < LONG:
            return None
        total, squares = folds
        early = any(s.phase < 2 and not s.kept for s in self.nest.stores)
        return None if early or not _are_moments(total, squares) else (total, squares)

    def pass_for_moments(self, total: Fold, squares: Fold) -> None:
        """The loops of both folds."""
        element, power = _widened(total), _widened(squares)
        assert element is not None and is_call(power, "mul")
        distance = power.args[0]
        assert is_call(distance, "sub")
        self.push()
        for axis in self.nest.reduced:
            self.variables[axis.variable] = self.index(axis.low)
        first = self.value(element).to(F64)
        self.pop()
        first = (absolute(first) < math.inf).where(first, 0.0)
        start = Const(0.0, torch.float64)  # stands for the first element
        step = Apply("sub", (total.value, start), torch.float64)
        square = Apply("mul", (step, step), torch.float64)
        both = [Fold("sum", value, torch.float64, 0) for value in (step, square)]
        self.layers[-1][id(start)] = first
        self.phase(both, [])
        far, wide = (self.layers[-1].pop(id(fold)) for fold in both)
        del self.layers[-1][id(start)]
        count = float(math.prod([a.size - a.low for a in self.nest.reduced]))
        self.layers[-1][id(total)] = far + first * count
        # The distances are those from the mean as eager rounds it.
        mean = self.value(distance.args[1]).to(F64) - first
        self.layers[-1][id(squares)] = wide + mean * (mean * count - far * 2.0)


def _are_moments(total: Fold, squares: Fold) -> bool:
    """Whether folds are the sum of elements of f32 and that of squares of their distances from its share."""
    element, power = _widened(total), _widened(squares)
    source = element.args[0] if is_call(element, "convert") else element
    if not isinstance(source, Load) or not is_call(power, "mul") or power.args[0] is not power.args[1]:
        return False
    distance = power.args[0]
    if (
        not is_call(distance, "sub")
        or distance.args[0] is not element
        or not is_call(distance.args[1], "convert")
    ):
        return False
    mean = distance.args[1].args[0]
    return is_call(mean, "div") and mean.args[0] is total and isinstance(mean.args[1], Const)


def _widened(fold: Fold) -> Term | None:
    """The f32 that is summed in double; None for other folds."""
    value = fold.value
    if fold.kind != "sum" or fold.dtype is not torch.float64 or not is_call(value, "convert"):
        return None
    return value.args[0] if value.args[0].dtype is torch.float32 else None
