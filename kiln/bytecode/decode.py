"""Reading code objects: instructions with resolved arguments, exception handlers, stack depths."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

from kiln.bytecode.versions import (
    CACHES,
    COMPARISONS,
    EXTENDED_ARG,
    HERE,
    INTRINSICS_1,
    INTRINSICS_2,
    KIND,
    OPERATORS,
    OPNAME,
    SHIFT,
    Kind,
)


class Instruction(NamedTuple):
    """One instruction; `value` is its argument resolved, for a jump the index of the target."""

    index: int  # type: ignore[assignment]  # in place of the method of tuples
    offset: int
    op: int
    name: str
    arg: int | None
    value: Any
    line: int | None
    flag: bool = False


class Handler(NamedTuple):
    """Where an exception goes: the stack is cut to `depth`, then lasti if asked for and the exception."""

    target: int
    depth: int
    lasti: bool


class Code:
    """A decoded code object."""

    __slots__ = ("_starts", "_units", "code", "handlers", "instructions", "locals")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.locals = local_names(code)
        self._units, self.instructions = _read(code, self.locals)
        #: The exception table as (first index, index after the last, handler), in order.
        self.handlers = tuple(self._parse_handlers())
        self._starts = [start for start, _, _ in self.handlers]

    def handler(self, index: int) -> Handler | None:
        """The handler that covers the instruction at `index`, if any."""
        at = bisect_right(self._starts, index) - 1
        if at < 0:
            return None
        _, end, handler = self.handlers[at]
        return handler if index < end else None

    def _parse_handlers(self) -> Iterator[tuple[int, int, Handler]]:
        units = [*self._units, len(self.instructions)]
        numbers = _varints(self.code.co_exceptiontable)
        for start in numbers:
            length, target, mode = next(numbers), next(numbers), next(numbers)
            handler = Handler(units[target], mode >> 1, bool(mode & 1))
            yield units[start], units[start + length], handler


def local_names(code: CodeType) -> tuple[str, ...]:
    """Names of the frame's variable slots in order: locals, cells that are not locals, free variables."""
    fast = code.co_varnames
    return (*fast, *(c for c in code.co_cellvars if c not in fast), *code.co_freevars)


_cache: dict[int, Code] = {}
_CACHE_LIMIT = 4096


def decode(code: CodeType) -> Code:
    """The decoded form of `code`; the same object for the same code object."""
    # An entry keeps its code object alive, so an id cannot be taken by another one while the entry stands.
    found = _cache.get(id(code))
    if found is None:
        while len(_cache) >= _CACHE_LIMIT:
            _cache.pop(next(iter(_cache)), None)
        found = _cache.setdefault(id(code), Code(code))
    return found


def _varints(table: bytes) -> Iterator[int]:
    at = iter(table)
    for byte in at:
        value = byte & 63
        while byte & 64:
            byte = next(at)
            value = (value << 6) | (byte & 63)
        yield value


def _read(code: CodeType, names: tuple[str, ...]) -> tuple[list[int], tuple[Instruction, ...]]:
    """The index of the instruction in each code unit, and the instructions."""
    raw = code.co_code
    size = len(raw)
    units: list[int] = []
    rows: list[tuple[int, int, int]] = []
    offset = index = extended = 0
    while offset < size:
        op = raw[offset]
        arg = raw[offset + 1] | extended
        units.append(index)
        if op == EXTENDED_ARG:
            extended = arg << 8
            offset += 2
            continue
        extended = 0
        rows.append((offset, op, arg))
        caches = CACHES[op]
        if caches:
            units.extend([index] * caches)
        offset += 2 + 2 * caches
        index += 1
    return units, tuple(_resolve(code, names, rows, units))


def _resolve(
    code: CodeType, names: tuple[str, ...], rows: list[tuple[int, int, int]], units: list[int]
) -> list[Instruction]:
    consts, attributes = code.co_consts, code.co_names
    make = tuple.__new__
    local, const, none, name, plain = Kind.LOCAL, Kind.CONST, Kind.NONE, Kind.NAME, Kind.PLAIN
    result: list[Instruction] = []
    lines = code.co_lines()
    _, end, line = next(lines, (0, len(code.co_code), None))
    for index, (offset, op, number) in enumerate(rows):
        while offset >= end:
            _, end, line = next(lines)
        kind = KIND[op]
        arg: int | None = number
        value: Any = number
        flag = False
        if kind == local:
            value = names[number]
        elif kind == const:
            value = consts[number]
        elif kind == none:
            arg = value = None
        elif kind == name:
            shift = SHIFT[op]
            value = attributes[number >> shift]
            flag = bool(shift and number & 1)
        elif kind != plain:
            value, flag = _special(kind, op, number, offset, names, units)
        result.append(make(Instruction, (index, offset, op, OPNAME[op], arg, value, line, flag)))
    return result


def _special(
    kind: int, op: int, number: int, offset: int, names: tuple[str, ...], units: list[int]
) -> tuple[Any, bool]:
    after = (offset >> 1) + 1 + CACHES[op]
    match kind:
        case Kind.FORWARD:
            return units[after + number], False
        case Kind.BACKWARD:
            return units[after - number], False
        case Kind.PAIR:
            return (names[number >> 4], names[number & 15]), False
        case Kind.COMPARE:
            return COMPARISONS[number >> HERE.compare_shift], bool(number & HERE.compare_bool)
    return _NAMED[kind][number], False


#: What numbers of other kinds stand for.
_NAMED = {Kind.BINARY: OPERATORS, Kind.INTRINSIC_1: INTRINSICS_1, Kind.INTRINSIC_2: INTRINSICS_2}
