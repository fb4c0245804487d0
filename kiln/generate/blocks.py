"""Products of matrices in blocks: several rows at once, so that what columns are multiplied by is read once.

A sum of products of two values, of which one is the same along the rows and the other along the columns, is
bound by what it reads. With a block of rows in each turn of the loops both are read for many products, whose
sums stay in registers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.expressions import grows
from kiln.base.symbols import Expr
from kiln.fuse.axes import axis
from kiln.fuse.neighbours import at_once
from kiln.fuse.nest import Apply, Axis, Fold, Load, Nest, Place
from kiln.fuse.peel import in_line

#: Vectors of sums that registers hold at once, by the lanes of a vector.
REGISTERS = {16: 28, 8: 12}
#: Rows of a block at most, and vectors side by side where columns come in panels.
ROWS, BESIDE = 14, 3
#: Neighbours at once, by what their number is a multiple of, and elements that they share at least.
SIDES, SHARED = (5, 4, 6, 3), 4
#: Turns of all loops from which on blocks are worth it: of products, of neighbours.
WORTH, LARGE = 1 << 12, 1 << 14


@dataclass(frozen=True, slots=True)
class Product:
    """The loops of a product: columns lie side by side, in panels; the rows are those of the other factor."""

    rows: Axis
    panels: Axis | None
    columns: Axis
    sums: int = 1
    """How many products of the same loops there are."""

    def block(self, lanes: int) -> tuple[int, int]:
        """The rows and panels of a block: as many as there is room for, or fewer that leave no rest."""
        vectors = max(self.columns.size // lanes, 1)
        beside = [n for n in range(1, BESIDE // vectors + 1) if self.panels and self.panels.size % n == 0]
        panels = max(beside, default=1)
        most = min(REGISTERS[lanes] // (vectors * panels * self.sums), ROWS, self.rows.size)
        even = [n for n in range(most, most // 2, -1) if self.rows.size % n == 0]
        return even[0] if even else most, panels


def product_of(nest: Nest) -> Product | None:
    """The product that a nest computes; None where it computes something else."""
    folds = nest.folds()
    if not folds or not all(map(is_product, folds)) or not all(store.kept for store in nest.stores):
        return None
    found = [factors_of(nest, fold) for fold in folds]
    return None if found[0] is None or len(set(found)) > 1 else replace(found[0], sums=len(found))


def factors_of(nest: Nest, fold: Fold) -> Product | None:
    """The loops of the rows and of the columns of one product."""
    value: Any = fold.value
    (left, right), kept = value.args, nest.kept
    for one, other in ((left, right), (right, left)):
        rows = [a for a in kept if reads(one, a) and not reads(other, a)]
        columns = [a for a in kept if reads(other, a) and not reads(one, a)]
        if rows and columns and columns[-1] is kept[-1] and grows(other.index, kept[-1].variable) == 1:
            panels = columns[0] if len(columns) == 2 else None
            return Product(max(reversed(rows), key=lambda a: int(a.size)), panels, kept[-1])
    return None


def is_product(fold: Fold) -> bool:
    """Whether a fold is the sum of products of two values in memory."""
    value = fold.value
    if fold.kind != "sum" or fold.dtype is not torch.float32 or not isinstance(value, Apply):
        return False
    return value.op == "mul" and fold.phase == 0 and all(
        isinstance(part, Load) and part.valid is None and not part.places and part.dtype is torch.float32
        for part in value.args
    )  # fmt: skip


def reads(term: Any, along: Axis) -> bool:
    """Whether the place of a load depends on a loop."""
    return isinstance(term.index, Expr) and along.variable in term.index.symbols()


def blocked(nest: Nest, lanes: int) -> list[Nest]:
    """The nest, or nests over blocks of rows and over the rows that are left."""
    known = all(type(a.size) is int and type(a.low) is int and a.low == 0 for a in nest.axes)
    if not known or nest.ordered or nest.part is not None or lanes not in REGISTERS or nest.volume() < WORTH:
        return [nest]
    if any(term.places for term in nest.terms() if isinstance(term, (Load, Place))):
        return [nest]
    product = product_of(nest)
    if product is not None:
        return of_product(nest, product, lanes)
    rows = neighbours(nest)
    if rows is None or nest.volume() < LARGE:
        return [nest]
    count = next((n for n in SIDES if rows.size % n == 0), min(SIDES[0], rows.size))
    many = axis(rows.variable.scope, rows.size // count, rows.variable.name)
    axes = tuple([many if a is rows else a for a in nest.axes])
    parts = [at_once(nest, axes, [{rows.variable: many.variable * count + place} for place in range(count)])]
    if rows.size % count:
        left = range(rows.size // count * count, rows.size)
        others = tuple([a for a in nest.axes if a is not rows])
        parts.append(at_once(nest, others, [{rows.variable: place} for place in left]))
    return parts


def neighbours(nest: Nest) -> Axis | None:
    """The loop whose neighbouring turns read many of the same elements; None where there is none."""
    loads = [t for t in nest.terms() if isinstance(t, Load)]
    if nest.reduced or len(nest.axes) < 2 or len(nest.stores) != 1:
        return None
    inner = in_line(nest)
    for a in reversed([a for a in nest.axes if a is not inner]):
        same = sum(reads(t, inner) and not reads(t, a) for t in loads)
        if same >= SHARED and same * 2 <= len(loads) + 1 and a.size > 1:
            return a
    return None


def of_product(nest: Nest, product: Product, lanes: int) -> list[Nest]:
    """The nest over blocks of rows and panels, and one over the rows that are left."""
    height, width = product.block(lanes)
    if height < 2:
        return [nest]
    rows, panels = product.rows, product.panels
    scope = rows.variable.scope
    outer = [a for a in nest.kept if a is not rows and a is not product.columns]
    beside: list[dict[Any, Any]] = [{}]
    if panels is not None and width > 1:
        fewer = axis(scope, panels.size // width, panels.variable.name)
        beside = [{panels.variable: fewer.variable * width + place} for place in range(width)]
        outer = [fewer if a is panels else a for a in outer]
    many = axis(scope, rows.size // height, rows.variable.name)
    # What is smaller is read again for each block of what is larger.
    high = rows.size > product.columns.size * math.prod([int(a.size) for a in outer]) * width
    inner = (product.columns, *nest.reduced)
    whole = (many, *outer, *inner) if high else (*outer, many, *inner)
    places = [many.variable * height + place for place in range(height)]
    parts = [at_once(nest, whole, [{rows.variable: place, **more} for place in places for more in beside])]
    if rows.size % height:
        left = range(rows.size // height * height, rows.size)
        moves = [{rows.variable: place, **more} for place in left for more in beside]
        parts.append(at_once(nest, (*outer, *inner), moves))
    return parts
