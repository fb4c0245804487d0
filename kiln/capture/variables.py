"""Reading a local variable for the first time."""

from __future__ import annotations

from typing import Any

from kiln.bytecode.decode import Instruction
from kiln.capture.frame import Frame, Machine, Unread, UserError
from kiln.capture.runtime import Within
from kiln.capture.shape import operands


def first_read(m: Machine, f: Frame, name: str) -> Any:
    """An argument from outside is looked at, and guarded, when it is first read."""
    if name in f.lazy and (name.startswith("__stack") or INSIDE in name):
        f.unread = True
        value = f.locals[name] = Unread(*f.lazy.pop(name))
        return value
    if name in f.lazy:
        value = f.locals[name] = m.world.outside(*f.lazy[name])
        del f.lazy[name]
        return value
    if name not in f.cells:
        raise unbound(name)
    return f.cells[name]


def unbound(name: str) -> UserError:
    text = f"cannot access local variable '{name}' where it is not associated with a value"
    return UserError(UnboundLocalError(text))


def read_all(m: Machine, f: Frame, i: Instruction) -> None:
    """Look at what an instruction takes from the stack of a resumed frame."""
    if i.name == "CALL" and any(type(value) is Within for value in f.stack):
        return  # what is left of a call looks at its state itself
    first = 0 if i.name in DEEP else max(0, len(f.stack) - max(1, operands(i)))
    f.unread = False
    for at, value in enumerate(f.stack):
        if type(value) is Unread:
            if at < first:
                f.unread = True
            else:
                f.stack[at] = m.world.outside(value.value, value.source)


INSIDE = " in "  # in the names of parameters that are for the rest of a call within
#: Instructions that reach below their operands.
DEEP = frozenset("""
    LIST_APPEND SET_ADD MAP_ADD LIST_EXTEND SET_UPDATE DICT_UPDATE DICT_MERGE WITH_EXCEPT_START SEND
    YIELD_VALUE RERAISE MATCH_KEYS MATCH_CLASS POP_EXCEPT CHECK_EXC_MATCH END_ASYNC_FOR CALL_KW
    CALL_FUNCTION_EX RETURN_VALUE
""".split())  # fmt: skip
#: Instructions that do not look at what they move.
PASSIVE = frozenset("""
    LOAD_FAST LOAD_FAST_AND_CLEAR POP_TOP JUMP_FORWARD JUMP_BACKWARD NOP PUSH_NULL RESUME DELETE_FAST COPY
    SWAP STORE_FAST PRECALL
""".split())  # fmt: skip
