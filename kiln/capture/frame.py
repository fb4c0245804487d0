"""The state of one interpreted frame, and the sentinels that live on its stack."""

from __future__ import annotations

import linecache
import types
from itertools import islice
from typing import TYPE_CHECKING, Any

from kiln.base.errors import Break, Place
from kiln.bytecode.decode import Code, decode

if TYPE_CHECKING:
    from kiln.capture.machine import Machine as Machine
else:
    Machine = Any  # the interpreter, which imports all that works for it

NULL: Any = type("Null", (), {"__repr__": lambda self: "<NULL>"})()


LAST_INSTRUCTION: Any = type("LastInstruction", (), {})()  # the slot of the raising instruction's place


class Handled:
    """The stack slot under an exception being handled; `previous` is what was handled before it.

    Cleanup code copies the slot to restore `previous` and leaves the original below: then it is no longer
    active.
    """

    __slots__ = ("active", "error", "previous")

    def __init__(self, error: BaseException, previous: BaseException | None) -> None:
        self.error, self.previous, self.active = error, previous, True


class UserError(Exception):
    """An exception of the program being captured, on its way to a handler of that program."""

    def __init__(self, error: BaseException, step: int = -1) -> None:
        self.error, self.step = error, step


def set_context(error: BaseException, handled: BaseException | None) -> None:
    """What raising does: the exception being handled becomes the context, without a cycle."""
    if handled is None or handled is error:
        return
    at, seen = handled, set[int]()
    while at.__context__ is not None and id(at) not in seen:
        seen.add(id(at))
        if at.__context__ is error:
            at.__context__ = None
            break
        at = at.__context__
    error.__context__ = handled


RETURN: Any = object()  # what an opcode gives when its frame returns the top of the stack
YIELD: Any = object()  # likewise for a generator that gives the top of the stack


class Yielded(Exception):
    """A generator frame gave a value; it stays suspended at its next instruction."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Restart(Exception):
    """Capture must begin again and break at an earlier step, as this break cannot be resumed where it is."""

    def __init__(self, step: int, reason: Break) -> None:
        self.step, self.reason = step, reason


class Looked(Exception):
    """The program looked at a text that was left open: capture must begin again, for that text alone."""

    def __init__(self, source: str) -> None:
        self.source = source


class Differs(Exception):
    """A call of a module is not the same as an earlier one."""


class Recalled(Exception):
    """The program depends on how copied tensors were made; capture must begin again and copy none."""


class Replaced(Exception):
    """The program puts other tensors in the place of a module's: capture must begin again, for any there."""

    def __init__(self, sources: frozenset[str]) -> None:
        self.sources = sources


class Unfit(Exception):
    """The program does not go through with symbolic sizes; fixed ones will show why, or do."""


class Unsettled(Exception):
    """The graph breaks for the contents of tensors; some were left open that are known for fixed numbers."""

    def __init__(self, reason: Break) -> None:
        self.reason = reason


class Unread:
    """A value of a resumed frame's stack before anybody looks at it; what is only popped is never guarded."""

    __slots__ = ("source", "value")

    def __init__(self, value: Any, source: Any) -> None:
        self.value, self.source = value, source


class Frame:
    """One Python frame: code, variables, stack and position."""

    __slots__ = ("before", "cells", "code", "function", "globals", "handled", "index", "kwnames",
                 "lazy", "locals", "mode", "payload", "stack", "step", "unread")  # fmt: skip

    def __init__(
        self, function: types.FunctionType, values: dict[str, Any], cells: dict[str, types.CellType]
    ) -> None:
        self.function = function
        self.code: Code = decode(function.__code__)
        self.locals = values
        self.cells = cells
        #: Arguments of the captured frame that nobody has read: value, source.
        self.lazy: dict[str, tuple[Any, Any]] = {}
        self.globals: dict[str, Any] = function.__globals__
        self.stack: list[Any] = []
        self.before: list[Any] = []  # the stack as it was when the current instruction began
        self.index = 0
        self.step = 0
        self.unread = False  # the stack holds values of a resumed frame that nobody has looked at
        self.kwnames: tuple[str, ...] = ()
        self.handled: list[BaseException] = []
        #: What the caller does with the result: push, drop, object, or opaque (cannot be resumed).
        self.mode = "push"
        self.payload: Any = None  # for mode "object": what the caller pushes instead

    def place(self) -> Place:
        """Where in the source this frame stands."""
        return place_at(self.code, self.index)


def place_at(decoded: Code, index: int) -> Place:
    """Where in the source an instruction stands."""
    code, instruction = decoded.code, decoded.instructions[index]
    line = instruction.line or code.co_firstlineno
    whole = linecache.getline(code.co_filename, line)
    part = part_of(code, instruction.offset, whole)
    return Place(code.co_filename, line, code.co_qualname, whole.strip(), *part)


def part_of(code: types.CodeType, offset: int, text: str) -> tuple[int, int]:
    """The columns of a line, once stripped, that an instruction is made of: where they begin, how many."""
    positions = next(islice(code.co_positions(), offset // 2, None), None)
    if positions is None or positions[2] is None or positions[3] is None or not text.strip():
        return 0, 0
    first, last, begin, end = positions
    raw = text.rstrip().encode()
    end = end if last == first else len(raw)
    margin = len(text) - len(text.lstrip())
    start = len(raw[:begin].decode(errors="replace")) - margin
    return max(start, 0), max(len(raw[begin:end].decode(errors="replace")), 0)
