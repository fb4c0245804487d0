"""Tracebacks of code that did not run as Python: entries for the lines of the program that it stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from opcode import opmap
from types import CodeType, FunctionType, TracebackType
from typing import Any

from kiln.base.errors import Place
from kiln.base.places import places_of


def add_lines(error: BaseException, places: Sequence[Place]) -> None:
    """Put entries for these places, outermost first, before the traceback of an error."""
    trace = error.__traceback__
    for place in reversed(places):
        frame = FunctionType(_code(place), {})().gi_frame
        trace = TracebackType(trace, frame, frame.f_lasti, place.line)
    error.__traceback__ = trace


def add_place(error: BaseException, code: CodeType, space: dict[str, Any], offset: int, line: int) -> None:
    """Put an entry for a place in this code before the traceback of an error, as if its frame had run."""
    here, length = _never.__code__, len(code.co_code)
    shown = here.replace(
        co_code=here.co_code + bytes((_NOP, 0)) * ((length - len(here.co_code)) // 2),
        co_filename=code.co_filename, co_name=code.co_name, co_qualname=code.co_qualname,
        co_firstlineno=code.co_firstlineno, co_linetable=code.co_linetable,
    )  # fmt: skip
    frame = FunctionType(shown, space)().gi_frame
    error.__traceback__ = TracebackType(error.__traceback__, frame, offset, line)


def _never() -> Iterator[None]:
    """The frame of a generator that never runs has no caller, which one that ran would keep alive."""
    yield


_NOP = opmap["NOP"]


def retold(places: Mapping[int, str], error: BaseException) -> None:
    """Have the first entry of a traceback show lines of the program: `places` has them by line of a graph."""
    trace = error.__traceback__
    if trace is not None and (where := places.get(trace.tb_lineno)):
        error.__traceback__ = trace.tb_next
        add_lines(error, places_of(where))


@lru_cache(1024)
def _code(place: Place) -> CodeType:
    """Code of a generator under the name and at the line of a place."""
    code = _never.__code__
    units = len(code.co_code) // 2
    # Entries of the line table without columns, eight units each; the line is the first one.
    lines = b"".join(bytes((0x80 | 13 << 3 | min(8, units - at) - 1, 0)) for at in range(0, units, 8))
    return code.replace(
        co_filename=place.file, co_name=place.function, co_qualname=place.function,
        co_firstlineno=place.line, co_linetable=lines,
    )  # fmt: skip
