"""Running sums in double along rows: some rows at once, turned in registers, so that lanes are rows.

A sum then takes one addition for a number; along the lanes of a vector it takes as many steps as these have
powers of two, in registers that hold half as many numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kiln.base.expressions import hinted
from kiln.fuse.moments import is_call, source
from kiln.fuse.nest import Fold, Load, Term, children, is_affine, terms
from kiln.generate import avx512
from kiln.generate.lanes import shuffled
from kiln.generate.llvm import F32, F64, Value
from kiln.generate.scalar import FOLDS
from kiln.generate.streams import FAR, SHORTEST, Streams, in_rows, moved

#: Rows at once: the doubles of a register.
BESIDE = avx512.DOUBLES
#: Rows that are worth it, so that there are some tasks.
FEWEST = 128

_LANES = range(avx512.LANES)
#: Neighbours of two registers in turn, in each quarter of them: single ones, and pairs.
_SINGLE, _PAIRS = (
    [[k // 4 * 4 + half + k // n % 2 * avx512.LANES + k % 4 * n // 2 % 2 for k in _LANES] for half in (0, 2)]
    for n in (1, 2)
)


class Scans(Streams):
    """Emits such folds."""

    def beside(self) -> list[Term]:
        """What running sums in double become, floats, where rows go so: long ones in whole lines."""
        nest, axis = self.nest, self.vector
        if axis is None or nest.reduced != (axis,) or self.width != avx512.LANES or not self.outer():
            return []
        if hinted(self.outer()[-1].size) < FEWEST or self.row_length() < SHORTEST or axis.low != 0:
            return []
        if not isinstance(axis.size, int) or axis.size % self.width or nest.part is not None:
            return []
        plain = [s for s in nest.stores if not (s.kept or s.phase or s.adds or isinstance(s.value, Fold))]
        if not all(s in plain and in_rows(s, axis) and self.in_lines(s, axis) for s in nest.stores):
            return []
        found = [_rounded(fold, nest.terms()) for fold in nest.folds() if _is_running(fold)]
        whole = [term for term in found if term is not None]
        return whole if len(whole) == len(nest.folds()) else []

    def rows_beside(self, low: Value, high: Value) -> Value:
        """The rows from `low` on that go so; the first one that is left."""
        whole = low + (high - low) / BESIDE * BESIDE

        def some(first: Value, _: list[Value]) -> list[Value]:
            assert self.vector is not None
            held = [part for fold in self.nest.folds() for part in self.neutral(fold, BESIDE)]
            self.fn.loop(0, self.index(self.vector.size), self.width, held, partial(self.square, first))
            return []

        self.fn.loop(low, whole, BESIDE, [], some)
        return whole

    def square(self, first: Value, i: Value, held: list[Value]) -> list[Value]:
        """A vector of each of the rows: what is summed, the sums, and what is stored."""
        folds, outside, self.lanes = self.nest.folds(), self.lanes, self.width
        known: list[dict[int, Value]] = [{} for _ in range(BESIDE)]
        for _ in self.each_beside(first, i, known):
            self.ask_beside()
            for fold in folds:
                self.value(source(fold.value))
        results = []
        for fold, sums, term in zip(folds, held, self.beside(), strict=True):
            given, found = [layer[id(source(fold.value))] for layer in known], []
            combine = avx512.add_64 if fold.kind == "cumsum" else FOLDS[fold.kind][2]
            for column in _columns([row if row.type.width > 1 else row.splat(self.width) for row in given]):
                sums = combine(sums, column.to(F64))
                found.append(sums.to(F32))
            for layer, row in zip(known, _rows(found), strict=True):
                layer[id(term)] = row
            results.append(sums)
        for _ in self.each_beside(first, i, known):
            for store in self.nest.stores:
                self.store(store)
        self.lanes = outside
        return results

    def each_beside(self, first: Value, i: Value, known: list[dict[int, Value]]) -> Iterator[None]:
        """The rows, one after the other, with what is known of each."""
        assert self.vector is not None
        for k, layer in enumerate(known):
            self.push()
            self.layers[-1] = layer
            self.variables[self.outer()[-1].variable] = first + k
            self.variables[self.vector.variable] = i
            yield
            self.pop()

    def ask_beside(self) -> None:
        """Ask for what the next rows read."""
        if moved(self.nest) >= FAR:
            loads = [t for t in self.nest.terms() if isinstance(t, Load) and not t.places and not t.valid]
            near = [t for t in loads if self.varies(t) and self.stride(t.index) == 1]
            self.ask_for(self.outer()[-1], BESIDE, near, 2)


def _is_running(fold: Fold) -> bool:
    """Whether a fold is running, in double, of floats that no fold gave."""
    if not fold.running or fold.place or fold.dtype is not torch.float64 or is_affine(fold.value):
        return False
    floats = is_call(fold.value, "convert") and source(fold.value).dtype is torch.float32
    return floats and not any(isinstance(term, Fold) for term in terms([fold.value]))


def _rounded(fold: Fold, found: list[Term]) -> Term | None:
    """The float that a fold becomes, where it is used as such alone."""
    users = {id(term): term for term in found if any(child is fold for child in children(term))}
    (term,) = users.values() if len(users) == 1 else (None,)
    return term if term is not None and is_call(term, "convert") and term.dtype is torch.float32 else None


def _quarters(rows: list[Value]) -> list[Value]:
    """Four registers, of which squares of four are turned in each quarter."""
    a, b, c, d = rows
    pairs = [shuffled(x, order, y) for x, y in ((a, b), (c, d)) for order in _SINGLE]
    return [shuffled(pairs[n], order, pairs[n + 2]) for n in (0, 1) for order in _PAIRS]


def _columns(rows: list[Value]) -> list[Value]:
    """The columns of eight rows of 16."""
    upper, lower = _quarters(rows[:4]), _quarters(rows[4:])
    parts = [[*range(4 * q, 4 * q + 4), *range(16 + 4 * q, 20 + 4 * q)] for q in range(4)]
    return [shuffled(upper[n], part, lower[n]) for part in parts for n in range(4)]


def _rows(columns: list[Value]) -> list[Value]:
    """The eight rows of 16 columns."""
    found: list[Value] = []
    for half in (0, 4):
        order = [*range(half, half + 4), *range(8 + half, 12 + half)]
        pairs = [[shuffled(columns[n + q], order, columns[n + q + 4]) for q in (0, 8)] for n in range(4)]
        found += _quarters([shuffled(low, _LANES, high) for low, high in pairs])
    return found
