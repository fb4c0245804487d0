"""Reading a local variable for the first time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kiln.capture.frame import Frame, Unread, UserError

if TYPE_CHECKING:
    from kiln.capture.machine import Machine


def first_read(m: Machine, f: Frame, name: str) -> Any:
    """An argument from outside is looked at, and guarded, when it is first read."""
    if name in f.lazy and name.startswith("__stack"):
        f.unread = True
        value = f.locals[name] = Unread(*f.lazy.pop(name))
        return value
    if name in f.lazy:
        value = f.locals[name] = m.world.outside(*f.lazy.pop(name))
        return value
    if name not in f.cells:
        raise unbound(name)
    return f.cells[name]


def unbound(name: str) -> UserError:
    text = f"cannot access local variable '{name}' where it is not associated with a value"
    return UserError(UnboundLocalError(text))


def read_all(m: Machine, f: Frame) -> None:
    """Look at what stands on the stack of a resumed frame."""
    f.unread = False
    for i, value in enumerate(f.stack):
        if type(value) is Unread:
            f.stack[i] = m.world.outside(value.value, value.source)


PASSIVE = frozenset({"LOAD_FAST", "POP_TOP", "JUMP_FORWARD", "JUMP_BACKWARD", "NOP", "PUSH_NULL", "RESUME", "DELETE_FAST", "COPY", "SWAP",
                     "STORE_FAST"})  # fmt: skip
