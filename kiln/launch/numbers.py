"""The numbers of a plan: sizes, strides and offsets in one table, and what fills it where sizes vary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.errors import Bug
from kiln.base.expressions import Expr, Symbol
from kiln.base.fx import bindings
from kiln.base.graph import Graph
from kiln.launch.memory import LINE, Lodging, arrange, shelved


class Numbers:
    """A table in the making; equal runs of numbers stand in it once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.objects: list[Any] = []
        self._runs: dict[tuple[Any, ...], int] = {}
        self._places: dict[tuple[Lodging, Any], int] = {}
        self._objects: dict[Any, int] = {}

    def run(self, values: tuple[Any, ...]) -> int:
        """Where these numbers stand, one after the other."""
        place = self._runs.get(values)
        if place is None:
            place = self._runs[values] = len(self.values)
            self.values += values
        return place

    def place(self, lodging: Lodging, ahead: Any = 0) -> int:
        """Where the offset of the byte `ahead` of a lodging stands."""
        found = self._places.get((lodging, ahead))
        if found is None:
            found = self._places[lodging, ahead] = len(self.values)
            self.values.append(None)
        return found

    def object(self, value: Expr) -> int:
        """Where the value of an expression stands among those for calls of Python."""
        found = self._objects.get(value)
        if found is None:
            found = self._objects[value] = len(self.objects)
            self.objects.append(value)
        return found

    def settle(self, lodgings: Sequence[Lodging], graph: Graph) -> Settled:
        """The table for the memory that these need in all."""
        varying = [
            v for v in (*self.values, *self.objects, *(one.size for one in lodgings)) if isinstance(v, Expr)
        ]
        if varying or any(isinstance(ahead, Expr) for _, ahead in self._places):
            return self._function(lodgings, graph, varying)
        total = arrange(lodgings)
        for (lodging, ahead), place in self._places.items():
            self.values[place] = lodging.offset + ahead
        self.values.append(total)
        return Settled((), (tuple(self.values), ()), None)

    def _function(self, lodgings: Sequence[Lodging], graph: Graph, varying: list[Expr]) -> Settled:
        """A function from the values of symbols to the table."""
        shelves = shelved(lodgings)
        lines, known = [], dict[Any, str]()

        def text(value: Any) -> str:
            if not isinstance(value, Expr) or isinstance(value, Symbol):
                return str(value)
            name = known.get(value)
            if name is None:
                name = known[value] = f"_{len(known)}"
                lines.append(f"    {name} = {value}")
            return name

        offsets = dict[Lodging, str]()
        total = "0"
        for i, shelf in enumerate(shelves):
            offsets.update(dict.fromkeys(shelf, f"_at{i}"))
            sizes = ", ".join(dict.fromkeys(text(one.size) for one in shelf))
            lines.append(f"    _at{i} = {total}")
            lines.append(f"    _size{i} = max({sizes}, 1)")
            total = f"_at{i} + -(-_size{i} // {LINE}) * {LINE}"
        entries = [None if v is None else text(v) for v in self.values]
        for (lodging, ahead), place in self._places.items():
            entries[place] = f"{offsets[lodging]} + {text(ahead)}"
            varying += [ahead] if isinstance(ahead, Expr) else []
        objects = [text(v) for v in self.objects]
        symbols = sorted({s for value in varying for s in value.symbols()}, key=str)
        table, others = ("".join(f"{one}, " for one in some) for some in ([*entries, total], objects))
        lines.append(f"    return ({table}), ({others})")
        head = ["def resolve(_key):", f"    {', '.join(map(str, symbols))}, = _key"]
        self.values.append(None)
        return Settled(_bound(symbols, graph), None, "\n".join([*head, *lines]))


@dataclass(frozen=True, slots=True)
class Settled:
    """The table: fixed numbers, or the text of a function from the sizes, which are dimensions of inputs."""

    symbols: tuple[tuple[int, int], ...]
    fixed: tuple[tuple[int, ...], tuple[()]] | None
    text: str | None

    def function(self) -> Callable[[tuple[Any, ...]], Any] | None:
        """From the values of the symbols to the table."""
        if self.text is None:
            return None
        space: dict[str, Any] = {"math": math}
        exec(self.text, space)
        return space["resolve"]  # type: ignore[no-any-return]


def _bound(symbols: Sequence[Symbol], graph: Graph) -> tuple[tuple[int, int], ...]:
    """For each symbol an input and what of it: a size by dimension, -1 the number itself, less: a stride."""
    bound, places = bindings(graph), {node: i for i, node in enumerate(graph.inputs)}
    made = []
    for symbol in symbols:
        if symbol not in bound:
            raise Bug(f"no input of the graph has the size {symbol}")
        node, what, dim = bound[symbol]
        made.append(({"size": dim, "stride": -2 - dim, "": -1}[what], places[node]))
    return tuple(made)
