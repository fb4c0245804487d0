"""Which sizes and numbers of one capture are symbolic, and where each symbol's value is read in a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from itertools import chain
from typing import Any

import torch

from kiln import _hook
from kiln.base.dataclass import dataclass
from kiln.base.errors import Break, Specialised
from kiln.base.expressions import Expr, Symbol, function_of
from kiln.base.source import Source
from kiln.base.symbols import LIMIT, Record, Scope
from kiln.capture.frame import Unfit
from kiln.check import layout
from kiln.check.shapes import Conditions, Extent, Follows, Free, Read, Stride, plan
from kiln.ops.symint import wrap


@dataclass(frozen=True, slots=True)
class Dynamic:
    """What the user asked for (None, True or False), and what earlier calls showed to vary."""

    mode: bool | None = None
    reads: frozenset[Read] = field(default_factory=frozenset)


STATIC = Dynamic(False)
#: No int that varies is greater than this one; those that no machine word holds are only handed on.
WIDE = 1 << 128


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor some of whose sizes are symbolic: what its guard asks, and what its fake has."""

    extents: tuple[Extent, ...]
    strides: tuple[Stride, ...]
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    symbols: tuple[Symbol, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """A call that gives a number before the graph runs: the local variable that holds it, and the call."""

    name: str
    function: Callable[..., Any]
    owner: Source | None  # the generator, if that is the first argument
    args: tuple[Any, ...]
    lasting: bool = True  # whether it changes what was there before


@dataclass(frozen=True, slots=True)
class Item:
    """A number that the graph reads from a tensor: by which call, and where the program asks for it.

    `reason` is that of the break without it, `text` what a check says that it is a size of two or more.
    """

    call: tuple[Any, ...]
    step: int
    reason: Break
    text: str = ""


class Varying:
    """The symbols of one capture."""

    def __init__(self, dynamic: Dynamic) -> None:
        self.dynamic = dynamic
        self.scope = Scope()
        self.reads: dict[Symbol, Read] = {}
        self.items: dict[Symbol, Item] = {}  # numbers that the graph reads
        #: What was read of tensors of one number, and how often they had been written then.
        self.only: dict[int, tuple[torch.Tensor, int, Symbol]] = {}
        #: Bounds of slices that the graph reads, the tensors whose numbers they are within their dimensions,
        #: and by their ids what such tensors were made of.
        self.bounds: dict[Symbol, torch.Tensor] = {}
        self.placed: dict[int, tuple[torch.Tensor, Any]] = {}
        self.draws: dict[Symbol, Draw] = {}  # in the order of the program
        #: Of floats that are drawn: the least, the most, and whether that one can be.
        self.spans: dict[Any, tuple[float, float, bool]] = {}
        self.marked: list[Symbol] = []
        self.numbers = dynamic.mode is True or any(read.what == "value" for read in dynamic.reads)
        self.plain = True  # the sizes of all tensors with symbols may be read as memory
        self._numbers: dict[Source, Any] = {}

    def number(self, value: int | float, source: Source, argument: bool, varies: bool = False) -> Any:
        """What stands for a number from outside: a symbolic one where it varies, else None."""
        known = self._numbers.get(source)
        if known is None:
            if not varies and not self._varies(value, source, argument):
                return None
            most = WIDE if type(value) is int and abs(value) > LIMIT else LIMIT
            symbol = self.scope.symbol(value, str(source), low=-most, high=most)
            self.reads[symbol] = Read(source)
            if most == WIDE:
                self.scope.open[symbol] = Unfit()  # neither guards nor graphs compute with it
            known = self._numbers[source] = wrap(symbol, self.scope)
        return known

    def item(self, kind: type, low: int = -LIMIT, needed: Exception | None = None) -> Symbol:
        """A number that the graph reads, of which no more is known than its type and what is the least."""
        hint: int | float = 3 if kind is int else 0.5
        symbol = self.scope.symbol(hint, "a number of a tensor", low=low)
        self.scope.open[symbol] = needed
        return symbol

    def of_only(self, tensor: torch.Tensor) -> Symbol | None:
        """What was read as the only number of a tensor that was not written since."""
        known = None if tensor.is_inference() else self.only.get(id(tensor))
        return known[2] if known is not None and known[1] == tensor._version else None

    def number_within(self, bound: Symbol) -> Any:
        """The number that a bound of a slice is where that lies within its dimension, if it was read."""
        tensor = self.bounds.get(bound)
        placed = self.placed.get(id(tensor))
        return placed[1] if placed is not None else None if tensor is None else self.of_only(tensor)

    def drawn(self, draw: Draw, low: int | None, high: int | None, needed: Exception | None) -> Symbol:
        """A number that is drawn before the graph runs, of which its range is known at most."""
        hint: int | float = 0.5 if low is None else low
        symbol = self.scope.symbol(hint, draw.name, low=low, high=high)
        self.draws[symbol] = draw
        self.scope.open[symbol] = needed
        return symbol

    def settle(self) -> None:
        """From now on nothing begins again: who needs the value of a number that is drawn is refused it."""
        for symbol, error in self.scope.open.items():
            self.scope.open[symbol] = getattr(error, "reason", None)

    def _varies(self, value: int | float, source: Source, argument: bool) -> bool:
        mode = self.dynamic.mode
        if mode is False or type(value) is int and abs(value) > WIDE:
            return False
        if Read(source) in self.dynamic.reads:
            # A condition does not tell zeros of both signs apart.
            return type(value) is int or math.isfinite(value) and value != 0
        word = type(value) is int and abs(value) <= LIMIT
        return mode is True and argument and word and value not in (0, 1)

    def tensor(
        self, value: torch.Tensor, source: Source, argument: bool, marks: dict[int, Any] | None = None
    ) -> Shape | None:
        """How a tensor from outside varies; None where all its sizes are fixed."""
        marks = marks_of(value) if marks is None else marks
        free, loose = self._free(value, source, argument, marks)
        if not free and not loose:
            return None
        self.plain = self.plain and layout.is_plain(layout.keys_of(value))
        extents, strides = plan(value.shape, value.stride(), free, loose)
        if not free and not any(isinstance(stride, Free) for stride in strides):
            return None
        symbols: list[Symbol] = []
        size: list[Any] = list(value.shape)
        for dim, bounds in free.items():
            symbols.append(self._symbol(size[dim], Read(source, "size", dim), bounds))
            size[dim] = symbols[-1]
            if dim in marks:
                self.marked.append(symbols[-1])
        stride: list[Any] = list(value.stride())
        for dim in sorted(range(len(stride)), key=lambda i: (value.stride(i), -i)):
            want = strides[dim]
            if isinstance(want, Free):
                symbols.append(self._symbol(stride[dim], Read(source, "stride", dim), want))
                stride[dim] = symbols[-1]
            elif isinstance(want, Follows):
                stride[dim] = size[want.dim] * stride[want.dim]
        made = [[wrap(n, self.scope) if isinstance(n, Expr) else n for n in part] for part in (size, stride)]
        return Shape(extents, strides, tuple(made[0]), tuple(made[1]), tuple(symbols))

    def _symbol(self, hint: int, read: Read, bounds: Free) -> Symbol:
        symbol = self.scope.symbol(hint, str(read), bounds.low, bounds.high)
        self.reads[symbol] = read
        return symbol

    def _free(
        self, value: torch.Tensor, source: Source, argument: bool, marks: dict[int, Any]
    ) -> tuple[dict[int, Free], frozenset[int]]:
        """The dimensions whose sizes are symbolic, with their bounds, and those whose strides may be."""
        mode, reads = self.dynamic.mode, self.dynamic.reads
        if mode is False or not value.dim():
            return {}, frozenset()
        every = mode is True and argument and type(value) is torch.Tensor
        if not every and not reads and not marks:
            return {}, frozenset()
        free: dict[int, Free] = {}
        for dim, size in enumerate(value.shape):
            kind, low, high = marks.get(dim, ("", None, None))
            if kind == "dynamic":
                free[dim] = Free(0 if low is None else low, LIMIT if high is None else high)
            elif kind != "static" and size > 1 and (every or Read(source, "size", dim) in reads):
                free[dim] = Free(2)
        loose = frozenset(i for i in range(value.dim()) if Read(source, "stride", i) in reads)
        return free, loose

    def refuse_specialised(self) -> None:
        """Raise where the program holds a marked dimension to one size; 0 and 1 are special by nature."""
        for symbol in self.marked:
            if not isinstance(self.scope.simplify(symbol), Expr) and symbol.hint > 1:
                record = self._settled_by(symbol)
                raise Specialised(
                    f"{self.reads[symbol]} was marked dynamic, but the program holds it to {symbol.hint}"
                    + (f" ({self.spelled(record.condition)})" if record is not None else ""),
                    "let the program work for any size, or take the mark away",
                    None if record is None else record.where,
                )

    def _settled_by(self, symbol: Symbol) -> Record | None:
        """The decision that left the symbol one value: an equation of its own, or of one that it equals."""
        equal, found = {symbol}, None
        for record in self.scope.records:
            symbols = record.condition.symbols()
            if record.condition.op == "==" and len(symbols) > 1 and symbols & equal:
                equal |= symbols
        for record in self.scope.records:
            symbols = record.condition.symbols()
            if symbols & equal:
                found = record
                if record.condition.op == "==" and len(symbols) == 1:
                    break
        return found

    def conditions(self) -> Conditions | None:
        """The guard that holds what capture decided; None when it decided nothing."""
        decided = self.scope.conditions
        if not decided:
            return None
        used = set().union(*[condition.symbols() for condition in decided])
        symbols = [symbol for symbol in self.scope.symbols if symbol in used]
        texts = [f"({c})" if c.op in ("or", "not") else str(c) for c in decided]
        function = quiet(symbols, " and ".join(texts))
        statements = tuple((self.spelled(c), quiet(symbols, str(c))) for c in decided)
        reads = tuple(self.reads[symbol] for symbol in symbols)
        seen, places = tuple(s.hint for s in symbols), tuple(map(self._asked_at, decided))
        return Conditions(reads, function, statements, seen, self.plain, places)

    def _asked_at(self, condition: Any) -> Any:
        """The line that asked a condition, or the first that asked about the same numbers."""
        about = condition.symbols()
        exact = (record.where for record in self.scope.records if record.condition is condition)
        near = (record.where for record in self.scope.records if record.condition.symbols() & about)
        return next(chain(exact, near), None)

    def spelled(self, value: Any) -> str:
        """An expression or condition in the words of the program."""
        text = str(value)
        for symbol in sorted(value.symbols(), key=lambda s: -len(s.name)):
            text = text.replace(symbol.name, f"\0{symbol.order}\0")
        for symbol in value.symbols():
            text = text.replace(f"\0{symbol.order}\0", str(self.reads[symbol]))
        return text


def quiet(symbols: list[Symbol], text: str) -> Callable[..., Any]:
    """A function of the symbols that gives the value of `text`, and that the frame hook leaves alone."""
    function = function_of(symbols, text)
    _hook.skip(function.__code__)  # type: ignore[attr-defined]
    return function


def marks_of(tensor: torch.Tensor) -> dict[int, Any]:
    """What the user said of the dimensions of a tensor: "dynamic" or "static", with bounds."""
    marks: dict[int, Any] = getattr(tensor, "__dict__", {}).get("_kiln_dims", {})
    return marks
