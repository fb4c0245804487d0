"""Copying the instructions of a function into another, its cells as plain variables that hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import CellType, CodeType

from kiln.base.errors import Skip
from kiln.bytecode.assemble import Emitter, Label
from kiln.bytecode.decode import Instruction, decode
from kiln.bytecode.flow import reachable
from kiln.bytecode.versions import CACHES, HERE, REAL

_UNBOUND_LOCAL = "cannot access local variable '{}' where it is not associated with a value"
_UNBOUND_FREE = "cannot access free variable '{}' where it is not associated with a value in enclosing scope"

_Cover = tuple[Label, int, bool]


class Body:
    """The part of `code` that control may come to, behind what `emitter` holds already.

    `depths` gives the depth of the stack before each instruction.
    """

    def __init__(self, code: CodeType, emitter: Emitter, depths: Sequence[int]) -> None:
        self.code, self.decoded, self.e = code, decode(code), emitter
        self._cells = frozenset(code.co_cellvars) | frozenset(code.co_freevars)
        self._depths = depths
        self._positions = list(code.co_positions())
        self._labels: defaultdict[int, Label] = defaultdict(Label)
        self._cover: dict[int, _Cover] = {}
        self._pads: list[tuple[Label, Instruction]] = []

    def label(self, index: int) -> Label:
        """The label of an instruction, which will be copied."""
        return self._labels[index]

    def at(self, index: int) -> None:
        """The steps that follow belong to the place of an instruction in the source."""
        self.e.position = self._positions[self.decoded.instructions[index].offset >> 1]

    def cover(self, start: int, index: int) -> None:
        """The steps from row `start` on are covered by the handlers of an instruction."""
        entry = self._entry(index)
        if entry is not None:
            for row in range(start, len(self.e)):
                self._cover.setdefault(row, entry)

    def _entry(self, index: int) -> _Cover | None:
        handler = self.decoded.handler(index)
        return handler and (self.label(handler.target), handler.depth, handler.lasti)

    def settle(self, index: int) -> None:
        """Make sure that the unit before an instruction has the same handler, where CPython looks there."""
        if HERE.handler_before_call and self.decoded.instructions[index].op in _MAY_CALL:
            if self._cover.get(len(self.e) - 1) != self._entry(index):
                start = len(self.e)
                self.at(index)
                self.e.raw("NOP")
                self.cover(start, index)

    def emit(self, index: int, labels: Mapping[int, Label]) -> None:
        """Emit one instruction, covered by its handlers; `labels` gives the target of a jump."""
        i = self.decoded.instructions[index]
        self.at(index)
        start = len(self.e)
        rule = _RULES.get(i.op)
        if rule is None or rule(self, i) is False:
            self.e.repeat(i, labels)
        self.cover(start, index)

    def copy(self, first: int | None = None) -> None:
        """Copy all that control may come to from the labels asked for and from `first`, which is next."""
        kept = sorted(reachable(self.code, (*self._labels, *(() if first is None else (first,)))))
        if first is not None and kept[0] != first:
            self.at(first)
            self.e.jump(self.label(first))
        instructions = self.decoded.instructions
        for index in kept:
            self.settle(index)
            self.e.place(self.label(index))
            if not _starts(instructions[index]):
                self.emit(index, self._labels)
        for label, i in self._pads:
            self._unbound(label, i)
        self._protect()

    def places(self) -> dict[int, int]:
        """The index of each copied instruction in the original, by its index in the copy."""
        return {label.row: index for index, label in self._labels.items()}

    def read(self, name: str) -> None:
        """Push the value of a variable, through its cell if it has one."""
        self.e.load(name)
        if name in self._cells:
            self.e.attr("cell_contents")

    def read_cell(self, i: Instruction) -> None:
        """Push the contents of a cell; an empty one raises what Python raises for an unbound variable."""
        pad = Label()
        self._pads.append((pad, i))
        self.e.load(i.value)
        self._cover[len(self.e)] = (pad, self._depths[i.index], False)
        self.e.attr("cell_contents")

    def _unbound(self, label: Label, i: Instruction) -> None:
        e, free = self.e, i.value in self.code.co_freevars
        self.at(i.index)
        e.place(label)
        e.raw("PUSH_EXC_INFO")
        e.pop()
        e.raw("POP_EXCEPT")
        start = len(e)
        e.callee(NameError if free else UnboundLocalError)
        e.const((_UNBOUND_FREE if free else _UNBOUND_LOCAL).format(i.value))
        if free:
            e.const(i.value)
        e.end_call(1 + free, ("name",) * free)
        e.raw("RAISE_VARARGS", 1)
        self.cover(start, i.index)

    def _protect(self) -> None:
        runs: list[tuple[int, int, _Cover]] = []
        for row, cover in sorted(self._cover.items(), key=lambda item: item[0]):
            if runs and runs[-1][1] == row and runs[-1][2] == cover:
                runs[-1] = (runs[-1][0], row + 1, cover)
            else:
                runs.append((row, row + 1, cover))
        for start, end, cover in runs:
            self.e.protect(Label(start), Label(end), *cover)

    def calls_super(self, i: Instruction) -> bool:
        """Whether the call is `super()`, which looks for its arguments in the original frame."""
        before = self.decoded.instructions[i.index - (2 if i.name == "CALL" and _PRECALL >= 0 else 1)]
        return (
            not i.arg and before.name == "LOAD_GLOBAL" and before.value == "super" and before.flag
            and "__class__" in self.code.co_freevars and self.code.co_argcount > 0
        )  # fmt: skip


def _starts(i: Instruction) -> bool:
    """Whether this is the RESUME at the start of a function, not one behind a yield."""
    return i.op == _RESUME and not (i.arg or 0) & 3


# Rules for instructions that do not stay as they are; a rule that answers False leaves the instruction alone.


def _store_deref(body: Body, i: Instruction) -> None:
    body.e.load(i.value)
    body.e.set_attr("cell_contents")


def _delete_deref(body: Body, i: Instruction) -> None:
    # Deleting the contents of an empty cell is no error, deleting an unbound variable is one.
    body.read_cell(i)
    body.e.pop()
    body.e.load(i.value)
    body.e.raw("DELETE_ATTR", "cell_contents")


def _call(body: Body, i: Instruction) -> bool | None:
    if not body.calls_super(i):
        return False
    if i.op == _PRECALL or _PRECALL < 0:
        body.read("__class__")
        body.read(body.code.co_varnames[0])
    body.e.raw(i.name, 2)
    return None


def _class_body(body: Body, i: Instruction) -> None:
    raise Skip(f"{body.code.co_qualname} looks names up as a class body does ({i.name})")


def make_cell(e: Emitter, name: str) -> None:
    """Bind a variable to a new, empty cell."""
    e.callee(CellType)
    e.end_call(0)
    e.store(name)


_MAY_CALL = frozenset(op for name, op in REAL.items() if CACHES[op] or name.startswith("CALL"))
_RESUME = REAL["RESUME"]
_PRECALL = REAL.get("PRECALL", -1)
_NAMED: dict[str, Callable[[Body, Instruction], bool | None]] = {
    "LOAD_DEREF": Body.read_cell,
    "STORE_DEREF": _store_deref,
    "DELETE_DEREF": _delete_deref,
    "LOAD_CLOSURE": lambda body, i: body.e.load(i.value),
    # Behind the start of a function this is a comprehension whose variable was put away: it is unbound.
    "MAKE_CELL": lambda body, i: make_cell(body.e, i.value),
    "PRECALL": _call,
    "CALL": _call,
    # Without the second bit super() is called without arguments and looks for them in the frame.
    "LOAD_SUPER_ATTR": lambda body, i: body.e.raw(i.name, i.value, 2 | i.flag),
    **dict.fromkeys(("LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_NAME"), _class_body),
}
_RULES = {REAL[name]: rule for name, rule in _NAMED.items() if name in REAL}
CELL_USERS = frozenset(
    REAL[name] for name in ("LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_CLOSURE") if name in REAL
)
"""Instructions that need the cell of their variable."""
