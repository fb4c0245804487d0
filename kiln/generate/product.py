"""Products of matrices with what comes before and follows of each element, in Triton's language.

What follows comes from the nest that would have read the product, what comes before from nests that would
have written its matrices: the same terms, over tiles.
"""

from __future__ import annotations

from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.expressions import Expr
from kiln.base.symbols import Scope
from kiln.fuse.axes import axes_for
from kiln.fuse.lower import HALVES
from kiln.fuse.nest import Apply, Buffer, Const, Load, Nest, Store, Term
from kiln.generate.nvptx import Unsupported

TYPES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.float32: "tl.float32"}
_EXTREME = "tl.{}({{}}, {{}}, propagate_nan=tl.PropagateNan.ALL)"
#: Functions of floats, by the names of primitives.
FUNCTIONS = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "div": "({} / {})", "neg": "(-{})",
    "abs": "tl.abs({})", "reciprocal": "(1.0 / {})", "sqrt": "tl.sqrt({})", "rsqrt": "tl.rsqrt({})",
    "exp": "tl.exp({})", "exp2": "tl.exp2({})", "log": "tl.log({})", "erf": "tl.erf({})",
    "sigmoid": "tl.sigmoid({})", "tanh": "(2.0 * tl.sigmoid(2.0 * {}) - 1.0)",
    "relu": "tl.maximum({}, 0.0, propagate_nan=tl.PropagateNan.ALL)", "where": "tl.where({}, {}, {})",
    "maximum": _EXTREME.format("maximum"), "minimum": _EXTREME.format("minimum"),
    "eq": "({} == {})", "ne": "({} != {})", "lt": "({} < {})", "le": "({} <= {})", "gt": "({} > {})",
    "ge": "({} >= {})",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a block's tile, elements summed at once, reads ahead, and warps."""

    rows: int
    columns: int
    summed: int
    stages: int
    warps: int

    def __str__(self) -> str:
        return "x".join(map(str, (self.rows, self.columns, self.summed, self.stages, self.warps)))


#: Those that are timed.
TILES = (Tile(128, 128, 64, 3, 4), Tile(128, 256, 64, 3, 8), Tile(64, 128, 64, 4, 4))


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """A product of two matrices, as their strides tell, and the nest that reads `result` alone of it."""

    sizes: tuple[int, int, int]
    strides: tuple[tuple[int, int], tuple[int, int]]
    operands: tuple[Buffer, ...]
    """The matrices, and a bias for the columns where there is one."""
    result: Buffer
    nest: Nest
    makers: dict[Buffer, Nest]
    """For matrices that are made where they are read: the nest that would have written them."""

    def buffers(self) -> list[Buffer]:
        """What the kernel is given, in order: operands, what nests read besides, what is written."""
        reads, writes = self.nest.buffers()
        given = [b for b in self.operands if b not in self.makers]
        given += [read for maker in self.makers.values() for read in maker.buffers()[0]]
        return [*dict.fromkeys([*given, *[b for b in reads if b is not self.result]]), *writes]

    def blocks(self, tile: Tile) -> int:
        return -(-self.sizes[0] // tile.rows) * -(-self.sizes[1] // tile.columns)


def source(product: Product, tile: Tile, name: str) -> str:
    """The text of a module with one kernel, `name`."""
    (m, n, k), (a, b) = product.sizes, product.strides
    names = {buffer: f"p{i}" for i, buffer in enumerate(product.buffers())}
    gm, gn, group = -(-m // tile.rows), -(-n // tile.columns), 8
    row, column = within("rows", m, tile.rows), within("columns", n, tile.columns)
    sides = (
        Side("a", f"{row}[:, None]", "ks[None, :]", a, f"({tile.rows}, {tile.summed})", 1),
        Side("b", "ks[:, None]", f"{column}[None, :]", b, f"({tile.summed}, {tile.columns})", 0),
    )
    loop: list[str] = []
    before: list[str] = []
    after: list[str] = []
    for side, buffer in zip(sides, product.operands[:2], strict=True):
        if buffer in product.makers:
            loop += made_in(side, product.makers[buffer], names)
        else:
            before.append(f"{side.name} = {names[buffer]} + {side.first} * {side.strides[0]} + "
                          f"{side.second} * {side.strides[1]}")  # fmt: skip
            loop.append(f"{side.name}_tile = tl.load({side.name})")
            after.append(f"{side.name} += {tile.summed * side.strides[side.along]}")
    steps = [f"ks += {tile.summed}"] if product.makers else []
    lines = [
        "pid = tl.program_id(0)",
        f"first = pid // {group * gn} * {group}",
        f"size = min({gm} - first, {group})",
        f"rows = (first + pid % {group * gn} % size) * {tile.rows} + tl.arange(0, {tile.rows})",
        f"columns = pid % {group * gn} // size * {tile.columns} + tl.arange(0, {tile.columns})",
        f"ks = tl.arange(0, {tile.summed})",
        *before,
        f"sums = tl.zeros(({tile.rows}, {tile.columns}), tl.float32)",
        f"for _ in range(0, {k}, {tile.summed}):",
        *[f"    {line}" for line in (*loop, "sums = tl.dot(a_tile, b_tile, sums)", *after, *steps)],
        f"there = (rows < {m})[:, None] & (columns < {n})[None, :]",
        *[f"sums += tl.load({names[p]} + {column}).to(tl.float32)[None, :]" for p in product.operands[2:]],
        *stored(product, names),
    ]
    given = ", ".join(names.values())
    body = "\n".join(f"    {line}" for line in lines)
    return f"import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef {name}({given}):\n{body}\n"


@dataclass(frozen=True, slots=True)
class Side:
    """A matrix of a product: its name, the places of a tile along both dimensions, and how it lies."""

    name: str
    first: str
    second: str
    strides: tuple[int, int]
    tile: str
    along: int
    """The dimension that is summed over."""


def within(name: str, size: int, tile: int) -> str:
    """Places of a tile, all of which are in a matrix."""
    return name if size % tile == 0 else f"({name} % {size})"


def made_in(side: Side, nest: Nest, names: dict[Buffer, str]) -> list[str]:
    """The lines that make a tile of a matrix, which a nest would have written."""
    (store,) = nest.stores
    if store.index != flat_index(nest) or store.adds or store.kept or store.buffer.dtype not in HALVES:
        raise Unsupported("a matrix that is not stored element by element, in order")
    turned = side.strides[1] != 1
    outer, inner = (side.second, side.first) if turned else (side.first, side.second)
    made = Elements(nest, names, f"{side.name}_", {}, "")
    lines = [f"{made.zeros} = tl.zeros({side.tile}, tl.int32)"]
    lines += [*made.places(outer, inner, max(side.strides)), *made.values()]
    return [*lines, f"{side.name}_tile = {made.texts[id(store.value)]}.to({TYPES[store.buffer.dtype]})"]


def stored(product: Product, names: dict[Buffer, str]) -> list[str]:
    """The lines that store what follows from a tile of sums."""
    made = Elements(product.nest, names, "", {product.result: "sums"}, ", there")
    lines = [f"{made.zeros} = tl.zeros_like(sums).to(tl.int32)"]
    lines += [*made.places("rows[:, None]", "columns[None, :]", product.sizes[1]), *made.values()]
    for store in product.nest.stores:
        if store.adds or store.kept or store.buffer.dtype not in TYPES:
            raise Unsupported("a store that is not of floats, one an element")
        value = f"({made.texts[id(store.value)]}).to({TYPES[store.buffer.dtype]})"
        lines.append(f"tl.store({names[store.buffer]} + {store.index} + {made.zeros}, {value}, there)")
    return lines


class Elements:
    """What a nest computes, over a tile, as text; `given` are buffers whose tile is at hand."""

    def __init__(
        self, nest: Nest, names: dict[Buffer, str], prefix: str, given: dict[Buffer, str], mask: str
    ) -> None:
        self.nest, self.names, self.prefix, self.given, self.mask = nest, names, prefix, given, mask
        self.zeros = f"{prefix}zeros"
        self.texts: dict[int, str] = {}

    def values(self) -> list[str]:
        made = []
        for number, term in enumerate(self.nest.terms()):
            made.append(f"{self.prefix}t{number} = {self.text(term)}")
            self.texts[id(term)] = f"{self.prefix}t{number}"
        return made

    def places(self, outer: str, inner: str, size: int) -> list[str]:
        """The loop variables by the places of a matrix whose rows in memory are of `size` elements."""
        axes, made = list(self.nest.axes), list[str]()
        rest = f"({outer} * {size} + {inner})"
        if axes[-1].size == size:
            made.append(f"{axes.pop().variable} = {inner}")
            rest = outer
        step = 1
        for axis in reversed(axes):
            text = rest if step == 1 else f"{rest} // {step}"
            made.append(f"{axis.variable} = {text}" + ("" if axis is axes[0] else f" % {axis.size}"))
            step *= axis.size
        return made

    def text(self, term: Term) -> str:
        if isinstance(term, Const) and isinstance(term.value, (bool, int, float)):
            return number(term.value)
        if isinstance(term, Load):
            return self.load(term)
        if isinstance(term, Apply):
            given = [self.texts[id(a)] for a in term.args]
            if term.op == "convert" and term.dtype in TYPES:
                text = f"{given[0]}.to({TYPES[term.dtype]})"
                return f"{text}.to(tl.float32)" if term.dtype in HALVES else text
            if term.op in FUNCTIONS and (term.dtype in TYPES or term.dtype is torch.bool):
                return FUNCTIONS[term.op].format(*given)
        raise Unsupported(f"what is not a function of floats: {getattr(term, 'op', type(term).__name__)}")

    def load(self, term: Load) -> str:
        if term.valid is not None or term.places or not isinstance(term.index, (Expr, int)):
            raise Unsupported("a load that is not of all elements")
        if term.buffer in self.given:
            if term.index != flat_index(self.nest):
                raise Unsupported("a product that is read in another order")
            return self.given[term.buffer]
        if term.dtype not in TYPES:
            raise Unsupported("a load that is not of floats")
        place = f"{self.names[term.buffer]} + {term.index} + {self.zeros}{self.mask}"
        return f"tl.load({place}).to(tl.float32)"


def flat_index(nest: Nest) -> Any:
    """The index of an element of a dense tensor over the axes of a nest."""
    index: Any = 0
    for axis in nest.axes:
        index = index * axis.size + axis.variable
    return index


def copying(rows: int, columns: int, read: Buffer, written: Buffer) -> Nest:
    """The nest that copies a matrix."""
    nest = Nest(tuple(axes_for(Scope(), (rows, columns))))
    index = flat_index(nest)
    nest.stores.append(Store(written, index, Load(read, index, read.dtype), 0, False))
    return nest


def number(value: Any) -> str:
    text = repr(float(value)) if not isinstance(value, bool) else repr(value)
    return f'float("{text}")' if text.strip("-") in ("inf", "nan") else text
