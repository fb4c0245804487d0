"""Products of matrices with what follows of each element, in Triton's language.

The epilogue comes from the nest that would have read the product: the same terms, over tiles.
"""

from __future__ import annotations

from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.expressions import Expr
from kiln.fuse.nest import Apply, Buffer, Const, Load, Nest, Term, terms
from kiln.generate.nvptx import Unsupported

TYPES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.float32: "tl.float32"}
HALVES = (torch.bfloat16, torch.float16)
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

    def buffers(self) -> list[Buffer]:
        """What the kernel is given, in order: operands, what the nest reads besides, what it writes."""
        reads, writes = self.nest.buffers()
        return [*self.operands, *[b for b in reads if b is not self.result], *writes]

    def blocks(self, tile: Tile) -> int:
        return -(-self.sizes[0] // tile.rows) * -(-self.sizes[1] // tile.columns)


def source(product: Product, tile: Tile, name: str) -> str:
    """The text of a module with one kernel, `name`."""
    (m, n, k), (a, b) = product.sizes, product.strides
    names = {buffer: f"p{i}" for i, buffer in enumerate(product.buffers())}
    first, second, *bias = (names[buffer] for buffer in product.operands)
    gm, gn, group = -(-m // tile.rows), -(-n // tile.columns), 8
    column = within("columns", n, tile.columns)
    lines = [
        "pid = tl.program_id(0)",
        f"first = pid // {group * gn} * {group}",
        f"size = min({gm} - first, {group})",
        f"rows = (first + pid % {group * gn} % size) * {tile.rows} + tl.arange(0, {tile.rows})",
        f"columns = pid % {group * gn} // size * {tile.columns} + tl.arange(0, {tile.columns})",
        f"ks = tl.arange(0, {tile.summed})",
        f"a = {first} + {within('rows', m, tile.rows)}[:, None] * {a[0]} + ks[None, :] * {a[1]}",
        f"b = {second} + ks[:, None] * {b[0]} + {column}[None, :] * {b[1]}",
        f"sums = tl.zeros(({tile.rows}, {tile.columns}), tl.float32)",
        f"for _ in range(0, {k}, {tile.summed}):",
        "    sums = tl.dot(tl.load(a), tl.load(b), sums)",
        f"    a += {tile.summed * a[1]}",
        f"    b += {tile.summed * b[0]}",
        f"there = (rows < {m})[:, None] & (columns < {n})[None, :]",
        *[f"sums += tl.load({p} + {column}).to(tl.float32)[None, :]" for p in bias],
        *Epilogue(product, names).lines(),
    ]
    given = ", ".join(names.values())
    body = "\n".join(f"    {line}" for line in lines)
    return f"import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef {name}({given}):\n{body}\n"


def within(name: str, size: int, tile: int) -> str:
    """Places of a tile, all of which are in a matrix."""
    return name if size % tile == 0 else f"({name} % {size})"


class Epilogue:
    """What is stored of a tile of sums, as text."""

    def __init__(self, product: Product, names: dict[Buffer, str]) -> None:
        self.product, self.names = product, names
        self.texts: dict[int, str] = {}

    def lines(self) -> list[str]:
        product, made = self.product, self.places()
        for number, term in enumerate(terms(s.value for s in product.nest.stores)):
            made.append(f"t{number} = {self.text(term)}")
            self.texts[id(term)] = f"t{number}"
        for store in product.nest.stores:
            if store.adds or store.kept or store.buffer.dtype not in TYPES:
                raise Unsupported("a store that is not of floats, one an element")
            value = f"({self.texts[id(store.value)]}).to({TYPES[store.buffer.dtype]})"
            made.append(f"tl.store({self.names[store.buffer]} + {store.index} + zeros, {value}, there)")
        return made

    def places(self) -> list[str]:
        """The loop variables of the nest in terms of rows and columns of the product."""
        columns, axes = self.product.sizes[1], list(self.product.nest.axes)
        made = ["zeros = tl.zeros_like(sums).to(tl.int32)"]
        rest = f"(rows[:, None] * {columns} + columns[None, :])"
        if axes[-1].size == columns:
            made.append(f"{axes.pop().variable} = columns[None, :]")
            rest = "rows[:, None]"
        inner = 1
        for axis in reversed(axes):
            text = rest if inner == 1 else f"{rest} // {inner}"
            made.append(f"{axis.variable} = {text}" + ("" if axis is axes[0] else f" % {axis.size}"))
            inner *= axis.size
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
        if term.buffer is self.product.result:
            if term.index != flat_index(self.product.nest):
                raise Unsupported("a product that is read in another order")
            return "sums"
        if term.dtype not in TYPES:
            raise Unsupported("a load that is not of floats")
        return f"tl.load({self.names[term.buffer]} + {term.index} + zeros, there).to(tl.float32)"


def flat_index(nest: Nest) -> Any:
    """The index of an element of a dense tensor over the axes of a nest."""
    index: Any = 0
    for axis in nest.axes:
        index = index * axis.size + axis.variable
    return index


def number(value: Any) -> str:
    text = repr(float(value)) if not isinstance(value, bool) else repr(value)
    return f'float("{text}")' if text.strip("-") in ("inf", "nan") else text
