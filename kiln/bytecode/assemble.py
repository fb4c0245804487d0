"""Emitter: builds a code object from steps that mean the same on every supported CPython."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
from types import CodeType
from typing import Any

from kiln.base.errors import Bug
from kiln.bytecode.decode import Instruction
from kiln.bytecode.decompile import statement_lines
from kiln.bytecode.encode import NOWHERE, Position, encode
from kiln.bytecode.flow import Guarded, Row, deepest, depths
from kiln.bytecode.versions import HERE, JUMPS, KIND, OPNAME, REAL, SHIFT, Kind

_PAIR_PARTS = {f"{a}_{b}": (a, b) for a in ("LOAD_FAST", "STORE_FAST") for b in ("LOAD_FAST", "STORE_FAST")}
_OPPOSITE = {"TRUE": "FALSE", "FALSE": "TRUE", "NONE": "NOT_NONE", "NOT_NONE": "NONE"}
_BY_VALUE = frozenset((Kind.CONST, Kind.NAME, Kind.LOCAL, Kind.PAIR))


class Label:
    """A place in the code, known once it is placed."""

    __slots__ = ("row",)

    def __init__(self, row: int = -1) -> None:
        self.row = row


def _step(name: str, *fixed: Any) -> Callable[..., None]:
    """The method of a step that is one instruction: its argument, where it has one, is the method's."""

    def step(self: Emitter, *arg: Any) -> None:
        self.raw(name, *fixed, *arg)

    return step


class Emitter:
    """Collects instructions; `finish` gives the code object.

    Variables are named; their slots are given out at the end, arguments first. With `slots` the caller fixes
    the order of all variable slots beforehand, which keeps the fused instructions of 3.13 whole.
    """

    def __init__(self, slots: Sequence[str] = ()) -> None:
        self.position: Position = NOWHERE
        self._slots = {name: at for at, name in enumerate(slots)}
        self._fixed = bool(slots)
        self._rows: list[tuple[int, Any]] = []
        self._positions: list[Position] = []
        self._guarded: list[tuple[Label, Label, Label, int, bool]] = []
        self._consts: list[Any] = []
        self._const_at: dict[int, int] = {}
        self._names: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    # Places

    def place(self, label: Label) -> Label:
        """Put the label before the next step."""
        if label.row >= 0:
            raise Bug("a label is placed twice")
        label.row = len(self._rows)
        return label

    def here(self) -> Label:
        """A label before the next step."""
        return self.place(Label())

    def protect(self, start: Label, end: Label, handler: Label, depth: int, lasti: bool = False) -> None:
        """Exceptions between two labels go to `handler`, the stack cut to `depth`; ranges never overlap."""
        self._guarded.append((start, end, handler, depth, lasti))

    # Values and variables

    const = _step("LOAD_CONST")  # push this very object
    load = _step("LOAD_FAST")  # push a local variable, which must be bound
    store = _step("STORE_FAST")  # pop into a local variable
    delete = _step("DELETE_FAST")  # unbind a local variable, which must be bound
    attr = _step("LOAD_ATTR")  # object -> object.name
    set_attr = _step("STORE_ATTR")  # value, object -> (object.name = value)
    item = _step("BINARY_SUBSCR")  # container, key -> container[key]

    def take(self, name: str) -> None:
        """Push a bound local variable and unbind it."""
        if "LOAD_FAST_AND_CLEAR" in REAL:
            self.raw("LOAD_FAST_AND_CLEAR", name)
        else:
            self.load(name)
            self.delete(name)

    def build(self, kind: str, count: int) -> None:
        """Collect `count` values (pairs for a map) in a tuple, list, set, map, string or slice."""
        self.raw(f"BUILD_{kind.upper()}", count)

    # Stack

    pop = _step("POP_TOP")  # drop the top of the stack
    copy = _step("COPY")  # push the value at a depth, the top being 1
    push_null = _step("PUSH_NULL")  # push the NULL that call sequences expect

    def swap(self, depth: int) -> None:
        """Exchange the top with the value at `depth`, the top being 1."""
        if depth > 1:
            self.raw("SWAP", depth)

    # Calls

    def callee(self, function: Any) -> None:
        """Open a call of this very object; the arguments follow."""
        if HERE.null_first:
            self.push_null()
        self.const(function)
        if not HERE.null_first:
            self.push_null()

    def end_call(self, count: int, kwnames: Sequence[str] = ()) -> None:
        """Call with `count` arguments in all, the last of which are the keywords `kwnames`."""
        if kwnames and not HERE.kw_names:
            self.const(tuple(kwnames))
            self.raw("CALL_KW", count)
            return
        if kwnames:
            self.raw("KW_NAMES", tuple(kwnames))
        if HERE.precall:
            self.raw("PRECALL", count)
        self.raw("CALL", count)

    # Control

    ret = _step("RETURN_VALUE")  # return the top of the stack

    def jump(self, label: Label) -> None:
        """Go on at the label."""
        self.raw("JUMP_FORWARD" if label.row < 0 else "JUMP_BACKWARD", label)

    def jump_on(self, name: str, label: Label) -> None:
        """A conditional jump named without its direction; on 3.13 a truth test wants a bool."""
        if HERE.directed_jumps:
            direction = "FORWARD" if label.row < 0 else "BACKWARD"
            self.raw(name.replace("JUMP_IF", f"JUMP_{direction}_IF"), label)
        elif label.row < 0:
            self.raw(name, label)
        else:
            past = Label()
            self.raw(f"POP_JUMP_IF_{_OPPOSITE[name.removeprefix('POP_JUMP_IF_')]}", past)
            self.jump(label)
            self.place(past)

    def raw(self, name: str, arg: Any = None, bits: int = 0) -> None:
        """Any instruction: its argument is an object, a name, two names, a label or a number, as decoded.

        `bits` are the flags that stand to the right of a name's index.
        """
        op = REAL.get(name, -1)
        if op < 0:
            raise Bug(f"this CPython has no instruction {name}")
        kind = KIND[op]
        if kind == Kind.PAIR and not (self._fixed and all(self._slots.get(n, 16) < 16 for n in arg)):
            for part, variable in zip(_PAIR_PARTS[name], arg, strict=True):
                self.raw(part, variable)
            return
        if kind == Kind.CONST:
            arg = self._const(arg)
        elif kind == Kind.NAME:
            arg = self._names.setdefault(arg, len(self._names)) << SHIFT[op] | bits
        elif (op in JUMPS) != isinstance(arg, Label) or (kind == Kind.NONE) != (arg is None):
            raise Bug(f"{name} does not take {arg!r}")
        self._rows.append((op, arg))
        self._positions.append(self.position)

    def repeat(self, instruction: Instruction, labels: Mapping[int, Label]) -> None:
        """Emit a decoded instruction again; `labels` gives the label for the index of a jump's target."""
        op, value = instruction.op, instruction.value
        if op in JUMPS:
            self._repeat_jump(instruction.name, labels[value])
        elif KIND[op] in _BY_VALUE:
            self.raw(instruction.name, value, (instruction.arg or 0) & ((1 << SHIFT[op]) - 1))
        else:
            self.raw(instruction.name, instruction.arg)

    def _repeat_jump(self, name: str, label: Label) -> None:
        if name.startswith("POP_JUMP"):
            self.jump_on(name.replace("FORWARD_", "").replace("BACKWARD_", ""), label)
        elif name in ("JUMP_FORWARD", "JUMP_BACKWARD"):
            self.jump(label)
        else:
            self.raw(name, label)

    def _const(self, value: Any) -> int:
        at = self._const_at.get(id(value))
        if at is None:
            at = self._const_at[id(value)] = len(self._consts)
            self._consts.append(value)
        return at

    # The end

    def finish(
        self,
        name: str,
        filename: str,
        firstlineno: int,
        argcount: int,
        argnames: Sequence[str],
        flags: int = CO_OPTIMIZED | CO_NEWLOCALS,
        *,
        qualname: str | None = None,
        statements: bool = False,
    ) -> CodeType:
        """The code object; with `statements` it has a line for each statement and not those of a source."""
        slots = self._slots if self._fixed else {n: at for at, n in enumerate(argnames)}
        rows = [self._settle(op, arg, slots) for op, arg in self._rows]
        guarded = [
            Guarded(start.row, end.row, handler.row, depth, lasti)
            for start, end, handler, depth, lasti in self._guarded
        ]
        positions = self._positions
        if statements:
            positions = [(line, line, None, None) for line in statement_lines(rows, guarded)]
        encoded = encode(rows, positions, guarded, firstlineno)
        return CodeType(
            argcount, 0, 0, len(slots), deepest(rows, depths(rows, guarded)), flags, encoded.code,
            tuple(self._consts), tuple(self._names), tuple(slots), filename, name, qualname or name,
            firstlineno, encoded.lines, encoded.exceptions,
        )  # fmt: skip

    def _settle(self, op: int, arg: Any, slots: dict[str, int]) -> Row:
        kind = KIND[op]
        if kind == Kind.LOCAL:
            return Row(op, slots.setdefault(arg, len(slots)))
        if kind == Kind.PAIR:
            return Row(op, slots[arg[0]] << 4 | slots[arg[1]])
        if isinstance(arg, Label):
            if arg.row < 0:
                raise Bug(f"{OPNAME[op]} jumps to a label that was never placed")
            return Row(op, 0, arg.row)
        return Row(op, arg)
