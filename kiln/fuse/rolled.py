"""Rows of a wide filter as a loop of each thread: written out, compilers take half a second for one kernel.

A convolution of one channel each is a sum of products, those of a row of the filter after those of the one
before. From row to row what is seen, the filter and the borders move by numbers: one row stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.symbols import Expr, Scope
from kiln.fuse.axes import axis
from kiln.fuse.nest import Apply, Axis, Const, Fold, Load, Nest, Place, Term, changed
from kiln.fuse.peel import Border, border_of, holds

#: Products of one result from which on rows are a loop.
WIDE = 20
WIDER = torch.float32


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """What is seen of an image within its borders, times an element of a filter."""

    seen: Load
    borders: frozenset[Border]
    factor: Load


def rolled(nest: Nest, scope: Scope) -> Nest:
    """The nest with a loop over the rows of its filter."""
    for top in (t for t in reversed(nest.terms()) if isinstance(t, Apply) and t.op == "addcmul"):
        products, before = products_below(top)
        if len(products) < WIDE:
            continue
        for rows in range(3, len(products) // 3 + 1):
            made = Rows(products, rows, scope).fold() if len(products) % rows == 0 else None
            if made is not None:
                fold, loop = made
                total = fold if before is None else Apply("add", (fold, before), fold.dtype)
                stores = changed(nest.stores, {id(top): total})
                return replace(nest, stores=stores, rolled=loop, like=None)
        return nest
    return nest


def products_below(top: Apply) -> tuple[list[Product], Term | None]:
    """The products that are added up one after the other, and what they are added to."""
    found: list[Product] = []
    term: Term | None = top
    while isinstance(term, Apply) and term.op in ("addcmul", "mul"):
        *before, seen, factor = term.args
        product = product_of(seen, factor)
        if product is None:
            break
        found.append(product)
        term = before[0] if before else None
    return found[::-1], term


def product_of(seen: Term, factor: Term) -> Product | None:
    """A product of an image's element, 0 outside of it, and one of a filter."""
    borders: frozenset[Border] | None = frozenset()
    if isinstance(seen, Apply) and seen.op == "where":
        condition, seen, other = seen.args
        borders = borders_of(condition) if isinstance(other, Const) and other.value == 0 else None
    image, of_filter = loaded(seen), loaded(factor)
    if image is None or of_filter is None or of_filter.valid is not None or borders is None:
        return None
    if image.valid is not None and borders_of(image.valid) != borders:
        return None
    return Product(image, borders, of_filter)


def loaded(term: Term) -> Load | None:
    """What a term is in memory, of a half type."""
    load = term.args[0] if isinstance(term, Apply) and term.op == "convert" else None
    plain = isinstance(load, Load) and not load.places and isinstance(load.index, Expr)
    return load if plain and term.dtype is WIDER else None  # type: ignore[return-value]


def borders_of(condition: Term) -> frozenset[Border] | None:
    """The comparisons that a condition is made of; None for another one."""
    if isinstance(condition, Apply) and condition.op == "bitwise_and":
        parts = [borders_of(arg) for arg in condition.args]
        return None if None in parts else frozenset().union(*[part for part in parts if part is not None])
    border = border_of(condition)
    return None if border is None or border[0] == "eq" else frozenset({border})


class Rows:
    """Products as rows of equal length."""

    def __init__(self, products: Sequence[Product], count: int, scope: Scope) -> None:
        self.count, self.scope = count, scope
        each = len(products) // count
        self.rows = [products[i * each : (i + 1) * each] for i in range(count)]

    def fold(self) -> tuple[Fold, Axis] | None:
        """The sum of the rows and its loop; None where they are not one row that moves."""
        steps = [self.step([[load(p).index for p in row] for row in self.rows]) for load in LOADS]
        down = [step for step in steps if step is not None]
        one = all(len({load(p).buffer for row in self.rows for p in row}) == 1 for load in LOADS)
        moves = ((move, self.across(move)) for move in (1, -1))
        move, across = next((found for found in moves if found[1] is not None), (0, None))
        if not one or len(down) < len(LOADS) or across is None:
            return None
        loop = axis(self.scope, self.count, "row")
        known: dict[Border, Term] = {}
        moved = [(name, place + loop.variable * move, border) for name, place, border in across]
        here = self.all(moved, known)
        total: Term | None = None
        for column, product in enumerate(self.rows[0]):
            beside = self.all(self.along(column), known)
            inside = Apply("bitwise_and", (here, beside), torch.bool) if here and beside else here or beside
            loads = [
                replace(load(product), index=load(product).index + loop.variable * step, valid=valid)
                for load, step, valid in zip(LOADS, down, (inside, None), strict=True)
            ]
            seen, factor = (Apply("convert", (load,), WIDER) for load in loads)
            if inside is not None:
                seen = Apply("where", (inside, seen, Const(0.0, WIDER)), WIDER)
            parts = (seen, factor) if total is None else (total, seen, factor)
            total = Apply("mul" if total is None else "addcmul", parts, WIDER)
        assert total is not None
        return Fold("sum", total, WIDER, 0), loop

    def step(self, indices: list[list[Any]]) -> int | None:
        """What all indices of a row move by to the next one; None where that is not one number."""
        first, second, *_ = indices
        step = second[0] - first[0]
        if type(step) is not int:
            return None
        return step if all(row == [at + step * i for at in first] for i, row in enumerate(indices)) else None

    def along(self, column: int) -> list[Border]:
        """The borders of a column, which are the same in all rows."""
        return sorted(frozenset.intersection(*[row[column].borders for row in self.rows]), key=str)

    def across(self, move: int) -> list[Border] | None:
        """The borders of the first row, whose places move so from row to row; None where a row has others."""
        found: dict[Border, None] = {}
        own: list[set[Border]] = []
        for i, row in enumerate(self.rows):
            rest = [product.borders.difference(self.along(k)) for k, product in enumerate(row)]
            if any(one != rest[0] for one in rest):
                return None
            own.append({(name, place - i * move, border) for name, place, border in rest[0]})
            found.update(dict.fromkeys(sorted(own[-1], key=str)))
        for name, place, border in found:
            for i, here in enumerate(own):
                known = (name, place, border) in here or holds(self.scope, name, place + i * move, border)
                if not known:
                    return None
        return list(found)

    def all(self, borders: Sequence[Border], known: dict[Border, Term]) -> Term | None:
        """The condition that all of some borders hold."""
        found: Term | None = None
        for name, place, border in borders:
            parts = Place(place), Const(border, torch.int64)
            one = known.setdefault((name, place, border), Apply(name, parts, torch.bool))
            found = one if found is None else Apply("bitwise_and", (found, one), torch.bool)
        return found


#: What a product reads.
LOADS = attrgetter("seen"), attrgetter("factor")
