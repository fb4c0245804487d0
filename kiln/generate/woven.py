"""Stores of few numbers side by side, one of each vector in turn: joined last dimensions, shuffled pixels."""

from __future__ import annotations

from kiln.base.expressions import grows
from kiln.fuse.nest import Axis, Nest, Store
from kiln.generate.lanes import shuffled
from kiln.generate.llvm import I64, Value
from kiln.generate.pieces import decided
from kiln.generate.scalar import TYPES
from kiln.generate.values import Values

#: Numbers that lie side by side, at most.
MOST = 4


def woven(nest: Nest, vector: Axis | None) -> Axis | None:
    """The axis of few turns whose results lie side by side where vectors run along the next one."""
    if vector is None or nest.reduced or nest.several or nest.part is not None:
        return None
    *_, last = nest.kept
    if last is vector or type(last.size) is not int or not 1 < last.size <= MOST or last.low != 0:
        return None
    for store in nest.stores:
        along, across = (grows(store.index, a.variable) for a in (last, vector))
        if (along, across) != (1, last.size) or store.adds or store.buffer.dtype.itemsize < 4:
            return None
    return last


class Woven(Values):
    """Emits the stores of all turns of such an axis at once, in whole vectors."""

    weaves: Axis | None = None

    def store_woven(self, axis: Axis, stores: list[Store]) -> None:
        """Whole vectors are woven; of what is left each turn is stored by itself."""
        whole = self.lanes == self.width and self.live is None
        found: list[list[Value]] = [[] for _ in stores]
        usual = self.decided
        for turn in range(axis.size):
            self.push()
            self.variables[axis.variable] = self.fn.constant(turn, I64)
            self.decided = {**usual, **decided(self.nest, axis, turn, turn + 1)}
            for store, values in zip(stores, found, strict=True):
                if whole:
                    value = self.value(store.value)
                    value = value if value.type.width > 1 else value.splat(self.lanes)
                    values.append(value.to(TYPES[store.buffer.dtype]))
                else:
                    self.store(store)
            self.pop()
        self.decided = usual
        self.push()
        self.variables[axis.variable] = self.fn.constant(0, I64)
        for store, values in zip(stores, found, strict=True):
            first, kind = self.index(store.index), TYPES[store.buffer.dtype]
            for part in range(axis.size) if values else ():
                address = self.fn.at(self.pointers[store.buffer], first + part * self.lanes, kind)
                self.fn.store(_part(values, part), address)
        self.pop()


def _part(values: list[Value], part: int) -> Value:
    """One of as many vectors as there are values, with one number of each value in turn."""
    count = values[0].type.width
    places = [divmod(part * count + lane, len(values)) for lane in range(count)]
    found = shuffled(values[0], [i + count * (which == 1) for i, which in places], values[1])
    for number, value in enumerate(values[2:], 2):
        order = [count + i if which == number else lane for lane, (i, which) in enumerate(places)]
        found = shuffled(found, order, value)
    return found
