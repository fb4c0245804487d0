"""Laying rows out as bytes: jump distances, EXTENDED_ARG, caches, line table, exception table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from kiln.base.errors import Bug
from kiln.bytecode.flow import Guarded, Row
from kiln.bytecode.versions import CACHES, EXTENDED_ARG

Position = tuple[int | None, int | None, int | None, int | None]
"""Line, end line, column, end column, as `co_positions` gives them."""

NOWHERE: Position = (None, None, None, None)

_NO_COLUMNS, _LONG, _NONE = 13, 14, 15


class Encoded(NamedTuple):
    """The three tables of a code object that depend on the layout."""

    code: bytes
    lines: bytes
    exceptions: bytes


def encode(
    rows: Sequence[Row], positions: Sequence[Position], guarded: Sequence[Guarded], first_line: int
) -> Encoded:
    """The bytes of `rows`, with the line table and the exception table that belong to them."""
    args, sizes = _layout(rows)
    starts = list(accumulate(sizes, initial=0))
    code = bytearray()
    for row, arg in zip(rows, args, strict=True):
        if arg > 0xFF:
            for shift in (24, 16, 8):
                if arg >> shift:
                    code += bytes((EXTENDED_ARG, arg >> shift & 0xFF))
        op = row.op
        code.append(op)
        code.append(arg & 0xFF)
        if CACHES[op]:
            code += bytes(2 * CACHES[op])
    return Encoded(bytes(code), _line_table(sizes, positions, first_line), _exception_table(guarded, starts))


def _layout(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """The argument of each row with jump distances filled in, and its size in code units."""
    args = [row.arg or 0 for row in rows]
    jumps = [(at, row.target) for at, row in enumerate(rows) if row.target >= 0]
    for at, _ in jumps:
        args[at] = 0
    sizes = [1 + CACHES[row.op] + _extra(arg) for row, arg in zip(rows, args, strict=True)]
    settled = False
    while not settled:
        settled = True
        starts = list(accumulate(sizes, initial=0))
        for at, target in jumps:
            args[at] = abs(starts[target] - starts[at + 1])
            needed = 1 + CACHES[rows[at].op] + _extra(args[at])
            # Distances only grow with sizes, so the first layout that fits is the smallest.
            if needed > sizes[at]:
                sizes[at] = needed
                settled = False
    return args, sizes


def _extra(arg: int) -> int:
    return 0 if arg < 0x100 else 1 if arg < 0x10000 else 2 if arg < 0x1000000 else 3


@cache
def _varint(value: int) -> bytes:
    """Six bits a byte, least significant first, as in the line table."""
    out = bytearray()
    while value >= 64:
        out.append(0x40 | value & 0x3F)
        value >>= 6
    out.append(value)
    return bytes(out)


@cache
def _signed(value: int) -> bytes:
    return _varint(-value << 1 | 1 if value < 0 else value << 1)


def _line_table(sizes: Sequence[int], positions: Sequence[Position], line: int) -> bytes:
    out = bytearray()
    pending, current = 0, NOWHERE
    for size, position in zip(sizes, positions, strict=True):
        if position == current:
            pending += size
            continue
        line = _location(out, pending, current, line)
        pending, current = size, position
    _location(out, pending, current, line)
    return bytes(out)


def _location(out: bytearray, units: int, position: Position, line: int) -> int:
    """Append the entries for `units` code units; gives the line that the next entry counts from."""
    start, end, column, end_column = position
    while units > 0:
        length = min(units, 8) - 1
        units -= 8
        if start is None:
            out.append(0x80 | _NONE << 3 | length)
        elif column is None or end is None or end_column is None:
            out.append(0x80 | _NO_COLUMNS << 3 | length)
            out += _signed(start - line)
            line = start
        else:
            out.append(0x80 | _LONG << 3 | length)
            out += (
                _signed(start - line) + _varint(end - start) + _varint(column + 1) + _varint(end_column + 1)
            )
            line = start
    return line


def _exception_table(guarded: Sequence[Guarded], starts: Sequence[int]) -> bytes:
    out = bytearray()
    for start, end, target, depth, lasti in sorted(guarded):
        if depth < 0:
            raise Bug("a handler expects a stack of negative depth")
        if starts[start] == starts[end]:
            continue
        out += _big_varint(starts[start], 0x80)
        out += _big_varint(starts[end] - starts[start])
        out += _big_varint(starts[target])
        out += _big_varint(depth << 1 | lasti)
    return bytes(out)


def _big_varint(value: int, mark: int = 0) -> bytes:
    """Six bits a byte, most significant first, as in the exception table; `mark` flags the first byte."""
    out = [value & 0x3F]
    value >>= 6
    while value:
        out.append(0x40 | value & 0x3F)
        value >>= 6
    out[-1] |= mark
    return bytes(reversed(out))
