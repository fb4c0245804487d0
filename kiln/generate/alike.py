"""What code for a nest follows from: nests that are alike in it share their code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kiln.base.expressions import SUM, poly_of
from kiln.base.symbols import LIMIT, Expr, Symbol
from kiln.fuse.nest import Apply, Buffer, Const, Fold, Load, Nest, Store, Term

#: Elements of a nest at most that is for any length: GPUs divide indices in 32 bits.
LONGEST = 1 << 31


def of_any_length(nest: Nest) -> tuple[Nest, dict[Any, int]] | None:
    """A nest of at most one loop with its length as a size, for all such nests; None for others."""
    if not nest.axes:
        return nest, {}
    (axis, *more) = nest.axes
    if more or axis.reduced or axis.low != 0 or type(axis.size) is not int or axis.size >= LONGEST:
        return None
    length = Symbol(axis.variable.scope, "n", axis.size, "", 0, LIMIT)
    return Nest((replace(axis, size=length),), nest.stores), {length: axis.size}


def form(nest: Nest) -> tuple[Any, tuple[int, ...]]:
    """A nest but for the names of its buffers and loops, and for where in its buffers, as used, it begins.

    That is given beside it. Where it has sizes that vary it is the nest itself, and begins at 0.
    """
    found = starts(nest)
    try:
        return _Form(found).of(nest), tuple([found[buffer] for buffer in nest.used()])
    except KeyError:  # a symbol that is not of a loop
        return nest, (0,) * len(nest.used())


def starts(nest: Nest) -> dict[Buffer, int]:
    """For each buffer the least number that is added to the places of all that is read or stored there."""
    found: dict[Buffer, int] = {}
    for part in (*nest.terms(), *nest.stores):
        if isinstance(part, (Load, Store)):
            start = poly_of(part.index).get((), 0)
            found[part.buffer] = min(found.get(part.buffer, start), start)
    return found


class _Form:
    """Numbers in place of terms, buffers and variables, in order of first use."""

    def __init__(self, starts: dict[Buffer, int]) -> None:
        self.starts = starts
        self.numbers: dict[int, int] = {}
        self.buffers: dict[Buffer, int] = {}
        self.known: dict[Expr, Any] = {}

    def of(self, nest: Nest) -> tuple[Any, ...]:
        axes = [
            (self.variable(a.variable), self.index(a.size), a.reduced, self.index(a.low)) for a in nest.axes
        ]
        part = nest.part and (self.variable(nest.part.variable), nest.part.rows)
        made = []
        for term in nest.terms():
            made.append(self.term(term))
            self.numbers[id(term)] = len(self.numbers)
        stores = [
            (*self.place(s), self.numbers[id(s.value)], s.phase, s.kept, s.adds) for s in nest.stores
        ]
        return tuple(axes), part, nest.ordered, nest.several, tuple(made), tuple(stores)

    def term(self, term: Term) -> tuple[Any, ...]:
        numbers = self.numbers
        if isinstance(term, Apply):
            return (term.op, term.dtype, *[numbers[id(a)] for a in term.args])
        if isinstance(term, Const):
            value = term.value
            return type(value), self.index(value) if isinstance(value, Expr) else repr(value), term.dtype
        if isinstance(term, Fold):
            return (Fold, term.kind, term.dtype, term.phase, *[numbers[id(part)] for part in term.parts])
        places = tuple([
            (self.variable(p.symbol), numbers[id(p.term)], self.index(p.size), p.wraps, p.dim)
            for p in term.places
        ])  # fmt: skip
        if isinstance(term, Load):
            valid = term.valid and numbers[id(term.valid)]
            return *self.place(term), term.dtype, valid, places
        return self.index(term.index), places, term.dtype

    def place(self, part: Load | Store) -> tuple[Any, ...]:
        """A buffer by its number, and a place in it from where its places begin."""
        buffer, sums = part.buffer, poly_of(part.index)
        ahead = sums.get((), 0) - self.starts[buffer]
        turns = tuple([(factor, *map(self.index, m)) for m, factor in sums.items() if m])
        return self.buffers.setdefault(buffer, len(self.buffers)), buffer.dtype, ahead, turns

    def variable(self, symbol: Symbol) -> tuple[Any, ...]:
        """A variable, from here on known by its number."""
        self.known.setdefault(symbol, (len(self.known),))
        return *self.known[symbol], symbol.low, symbol.high

    def index(self, index: Any) -> Any:
        """An expression over the variables."""
        if not isinstance(index, Expr):
            return index
        found = self.known.get(index)
        if found is None:
            if isinstance(index, Symbol):
                raise KeyError(index)
            if index.op is SUM:
                found = tuple([(factor, *map(self.index, m)) for m, factor in index.poly.items()])
            else:
                found = (index.op, *map(self.index, index.args))
            self.known[index] = found
        return found
