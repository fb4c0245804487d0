"""What tests write code with: steps that Kiln itself does not emit, and a code object written once more."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType

from kiln.bytecode.assemble import Emitter, Label
from kiln.bytecode.decode import decode
from kiln.bytecode.resume import Slot, resume_places
from kiln.bytecode.versions import COMPARISONS, HERE, OPERATORS, REAL


class Writer(Emitter):
    """An emitter of more steps."""

    def line(self, number: int | None) -> None:
        """The steps that follow belong to this line of the source."""
        self.position = (number, number, None, None)

    def load_global(self, name: str) -> None:
        """Push a global or builtin."""
        self.raw("LOAD_GLOBAL", name)

    def set_item(self) -> None:
        """value, container, key -> (container[key] = value)"""
        self.raw("STORE_SUBSCR")

    def del_item(self) -> None:
        """container, key -> (del container[key])"""
        self.raw("DELETE_SUBSCR")

    def del_attr(self, name: str) -> None:
        """object -> (del object.name)"""
        self.raw("DELETE_ATTR", name)

    def raise_(self) -> None:
        """Raise the top of the stack."""
        self.raw("RAISE_VARARGS", 1)

    def begin_call(self) -> None:
        """Open a call; the callable follows."""
        if HERE.null_first:
            self.push_null()

    def mid_call(self) -> None:
        """The callable is pushed; the arguments follow."""
        if not HERE.null_first:
            self.push_null()

    def call_with_keywords(self) -> None:
        """Call with an argument tuple and a dict of keywords."""
        self.raw("CALL_FUNCTION_EX", 1)

    def unpack(self, count: int) -> None:
        """sequence -> its `count` items, the first on top."""
        self.raw("UNPACK_SEQUENCE", count)

    def binary(self, sign: str) -> None:
        """left, right -> left + right, or any other operator, in-place ones too."""
        self.raw("BINARY_OP", OPERATORS.index(sign))

    def compare(self, sign: str) -> None:
        """left, right -> left < right, or any other comparison."""
        self.raw("COMPARE_OP", COMPARISONS.index(sign) << HERE.compare_shift)

    def is_(self, negated: bool = False) -> None:
        """left, right -> left is right"""
        self.raw("IS_OP", int(negated))

    def contains(self, negated: bool = False) -> None:
        """item, container -> item in container"""
        self.raw("CONTAINS_OP", int(negated))

    def jump_if(self, label: Label, truth: bool) -> None:
        """value -> go on at the label if the value is true (or false)."""
        if "TO_BOOL" in REAL:
            self.raw("TO_BOOL")
        self.jump_on("POP_JUMP_IF_TRUE" if truth else "POP_JUMP_IF_FALSE", label)

    def jump_if_none(self, label: Label, none: bool = True) -> None:
        """value -> go on at the label if the value is None (or is not)."""
        self.jump_on("POP_JUMP_IF_NONE" if none else "POP_JUMP_IF_NOT_NONE", label)


def relocate(code: CodeType) -> CodeType:
    """The same code object, taken apart and put together again."""
    decoded = decode(code)
    e = Emitter(decoded.locals)
    labels = {at: Label() for at in range(len(decoded.instructions) + 1)}
    positions = list(code.co_positions())
    for i in decoded.instructions:
        e.place(labels[i.index])
        e.position = positions[i.offset >> 1]
        e.repeat(i, labels)
    e.place(labels[len(decoded.instructions)])
    for start, end, handler in decoded.handlers:
        e.protect(labels[start], labels[end], labels[handler.target], handler.depth, handler.lasti)
    parameters = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    return e.finish(
        code.co_name, code.co_filename, code.co_firstlineno, code.co_argcount, code.co_varnames[:parameters],
        code.co_flags, qualname=code.co_qualname,
    ).replace(
        co_posonlyargcount=code.co_posonlyargcount, co_kwonlyargcount=code.co_kwonlyargcount,
        co_varnames=code.co_varnames, co_nlocals=len(code.co_varnames), co_cellvars=code.co_cellvars,
        co_freevars=code.co_freevars,
    )  # fmt: skip


def resume_code(code: CodeType, index: int, stack: Sequence[Slot], locals: Sequence[str]) -> CodeType:
    """The code of a function that goes on at instruction `index`."""
    return resume_places(code, index, stack, locals)[0]
