"""Sums of columns within the loops over rows: what both read is read once.

The gradients of a layer norm fold each row, and sum columns of the same values for the weights; a bias's
gradient sums the columns of what such loops store. Rows go in strips, each adds its columns to a part of its
own, and a small nest sums the parts, so that the result depends on the sizes alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kiln.base.graph import TensorSpec
from kiln.base.symbols import Scope
from kiln.fuse.axes import axis
from kiln.fuse.merge import rewritten, substituted
from kiln.fuse.nest import (
    Axis,
    Buffer,
    Fold,
    Load,
    Nest,
    Part,
    Store,
    Term,
    changed,
    children,
    read_again,
    terms,
)
from kiln.fuse.split import Cuts, Split

#: Rows of a strip at least and at most, and strips that are enough.
SHORTEST, LONGEST, ENOUGH = 16, 64, 64
#: On a GPU: strips, the columns of which their threads keep sums, and how many elements are worth a strip.
STRIPS, NARROWEST, WIDEST, FEW = 132, 256, 8192, 1 << 15
#: Elements from which on it pays.
WORTH = 1 << 16


def with_sums(rows: Split, columns: Nest, scope: Scope, name: str, cuts: Cuts) -> Split | None:
    """Nests that do what a nest over rows, and what followed of it before, and one over columns do."""
    home = rows.nests[0]
    columns = replace(columns, axes=(*columns.reduced, *columns.kept))
    if not _fit(home, columns):
        return None
    (row, column), (down, along) = home.axes, columns.axes
    length = strip(row.size, column.size, cuts)
    if not length:
        return None
    moves = {down.variable: row.variable, along.variable: column.variable}
    moved = rewritten(columns.stores, lambda index: substituted(index, moves))
    known = read_again(moved, home.stores, lambda s: s.buffer.dtype is torch.float32 and not s.adds)
    if known is None:
        return None
    stores = changed(moved, known)
    folds = [t for t in terms([s.value for s in stores if s.kept]) if isinstance(t, Fold) and t.parts]
    folds = [f for f in folds if f not in home.folds()]
    last = max((s.phase for s in home.stores if not s.kept), default=0)
    part = home.part or Part(axis(scope, -(-row.size // length), f"{name}_p").variable, length)
    again = replace(axis(scope, -(-row.size // part.rows), f"{name}_f"), reduced=True)
    scratch: dict[Buffer, TensorSpec] = {}
    totals: dict[int, Term] = {}
    added: list[Store] = []
    for fold, original in zip(folds, columns.folds(), strict=True):
        held = Buffer(f"{name}_part{len(scratch)}", torch.float32)
        scratch[held] = TensorSpec((again.size * column.size,), (1,), held.dtype, torch.device("cpu"))
        place = part.variable * column.size + column.variable
        phase = _phase(fold.value) if cuts.kept_first else max(_phase(fold.value), last)
        added.append(Store(held, place, fold.value, phase, False, adds=True))
        value = Load(held, again.variable * column.size + along.variable, held.dtype)
        totals[id(original)] = replace(original, value=value)
    plain = [replace(s, phase=max(_phase(s.value), last)) for s in stores if not s.kept]
    ends = [s for s in columns.stores if s.kept]
    joined, final = Nest(home.axes, [*added, *home.stores, *plain], part), changed(ends, totals)
    return Split([joined, *rows.nests[1:], Nest((along, again), final)], {**rows.scratch, **scratch})


def strip(rows: int, columns: int, cuts: Cuts) -> int:
    """How many rows a strip has; 0 where nothing is gained."""
    if not cuts.kept_first:
        return min(max(rows // ENOUGH, SHORTEST), LONGEST)
    length = -(-rows // STRIPS)
    return length if length * columns >= FEW and NARROWEST <= columns <= WIDEST else 0


def _fit(rows: Nest, columns: Nest) -> bool:
    """Whether one nest folds the rows of a matrix, and the other sums its columns in one phase."""
    if [a.reduced for a in rows.axes] != [False, True] or [a.reduced for a in columns.axes] != [True, False]:
        return False
    if any(type(a.size) is not int or a.size != b.size for a, b in zip(rows.axes, columns.axes, strict=True)):
        return False
    if rows.volume() < WORTH or rows.axes[0].size < 2 * SHORTEST or not columns.folds():
        return False
    if any(f.kind != "sum" or f.phase or f.dtype != torch.float32 for f in columns.folds()):
        return False
    if any(s.phase > (1 if s.kept else 0) for s in columns.stores):
        return False
    if any(f.dtype.itemsize != 4 or f.running for f in rows.folds()):
        return False
    if not _in_line(rows) or not _in_line(columns):
        return False
    (reads, writes), (others, results) = rows.buffers(), columns.buffers()
    shared = {b for b in (*reads, *writes) if b in others}
    return bool(_large(columns) & shared) and not set(results) & {*reads, *writes}


def _in_line(nest: Nest) -> bool:
    """Whether elements of a row that are read lie side by side."""
    column: Axis = nest.axes[1]
    loads = [t for t in nest.terms() if isinstance(t, Load)]
    return all(
        not hasattr(t.index, "poly") or t.index.poly.get((column.variable,), 0) in (0, 1) for t in loads
    )


def _large(nest: Nest) -> set[Buffer]:
    """The buffers whose elements are read for each turn of both loops."""
    variables = {a.variable for a in nest.axes}
    loads = [t for t in nest.terms() if isinstance(t, Load)]
    return {t.buffer for t in loads if hasattr(t.index, "symbols") and variables <= t.index.symbols()}


def _phase(term: Term) -> int:
    """The first phase in which a term can be computed."""
    phases: dict[int, int] = {}
    for t in terms([term]):
        below = max((phases[id(child)] for child in children(t)), default=0)
        phases[id(t)] = t.ready if isinstance(t, Fold) else below
    return phases[id(term)]
