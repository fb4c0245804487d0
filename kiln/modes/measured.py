"""What `kiln.measure` found: one row a module, and the table that people read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kiln.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One module, its submodules included."""

    name: str
    kind: str
    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    saved_bytes: int
    """What autograd keeps for the backward pass, each memory once, without parameters and buffers."""
    forward_flops: int
    backward_flops: int
    peak_bytes: int
    """The most that was alive at once while this module ran, forward or backward: of the whole program."""
    calls: int

    @property
    def depth(self) -> int:
        return self.name.count(".") + 1 if self.name else 0

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops


COLUMNS: dict[str, Callable[[Row], str]] = {
    "parameters": lambda row: scaled(row.parameters, 1000, ""),
    "weights": lambda row: scaled(row.parameter_bytes, 1024, "B"),
    "buffers": lambda row: scaled(row.buffer_bytes, 1024, "B"),
    "saved": lambda row: scaled(row.saved_bytes, 1024, "B"),
    "FLOPs forward": lambda row: scaled(row.forward_flops, 1000, ""),
    "FLOPs backward": lambda row: scaled(row.backward_flops, 1000, ""),
    "peak": lambda row: scaled(row.peak_bytes, 1024, "B"),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a model costs: the whole of it, and by module. Prints as a table."""

    rows: tuple[Row, ...]
    backward: bool

    @property
    def total(self) -> Row:
        """The row of the model itself."""
        return self.rows[0]

    @property
    def parameters(self) -> int:
        return self.total.parameters

    @property
    def parameter_bytes(self) -> int:
        return self.total.parameter_bytes

    @property
    def buffer_bytes(self) -> int:
        return self.total.buffer_bytes

    @property
    def saved_bytes(self) -> int:
        return self.total.saved_bytes

    @property
    def flops(self) -> int:
        return self.total.flops

    @property
    def peak_bytes(self) -> int:
        return self.total.peak_bytes

    def __getitem__(self, name: str) -> Row:
        """The row of a module by its name; the model's own is ''."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no module {name!r}: see .rows for all names")

    def table(self, depth: int | None = None) -> str:
        """The rows down to a depth as text; neighbours that cost the same are one line."""
        lines = [("module", *COLUMNS)]
        for row, times in merged([r for r in self.rows if depth is None or r.depth <= depth]):
            label = "  " * row.depth + (row.name.rpartition(".")[2] or row.kind)
            if row.name:
                label += f" ({row.kind})"
            if times > 1:
                label += f" x{times}"
            lines.append((label, *[show(row) for show in COLUMNS.values()]))
        first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]) for line in lines]
        return "\n".join([text[0], "-" * len(text[0]), *text[1:]])

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__


def merged(rows: list[Row]) -> Iterator[tuple[Row, int]]:
    """The rows in order; modules of a list that follow each other and cost the same, with all below them, are
    given once, with their number."""
    i = 0
    while i < len(rows):
        size = below(rows, i)
        block = [_cost(r, rows[i]) for r in rows[i : i + size]]
        times, after = 1, i + size
        while after < len(rows) and _siblings(rows[i], rows[after]):
            next_block = [_cost(r, rows[after]) for r in rows[after : after + size]]
            if next_block != block or below(rows, after) != size:
                break
            times, after = times + 1, after + size
        yield rows[i], times
        if times > 1:
            yield from merged(rows[i + 1 : i + size])
            i = after
        else:
            i += 1


def below(rows: list[Row], start: int) -> int:
    """The number of rows of the module at `start` and all in it."""
    end = start + 1
    while end < len(rows) and rows[end].depth > rows[start].depth:
        end += 1
    return end - start


def _siblings(a: Row, b: Row) -> bool:
    """Whether two modules stand in one list."""
    (above, _, one), (other, _, two) = a.name.rpartition("."), b.name.rpartition(".")
    return above == other and one.isdigit() and two.isdigit()


def _cost(row: Row, top: Row) -> tuple[object, ...]:
    """What two blocks must share to be shown as one; peaks grow from layer to layer and are left out."""
    flops = row.forward_flops, row.backward_flops
    return row.name[len(top.name) :], row.kind, row.parameter_bytes, row.buffer_bytes, row.saved_bytes, flops


def scaled(value: int, step: int, unit: str) -> str:
    """A number with three digits and a prefix."""
    if not value:
        return "-"
    amount, prefixes = float(value), ["", "K", "M", "G", "T", "P", "E"]
    while amount >= step and len(prefixes) > 1:
        amount /= step
        prefixes.pop(0)
    prefix = prefixes[0] + ("i" if step == 1024 and prefixes[0] else "")
    digits = f"{amount:.0f}" if not prefixes[0] or amount >= 100 else f"{amount:.3g}"
    return f"{digits} {prefix}{unit}".rstrip()
