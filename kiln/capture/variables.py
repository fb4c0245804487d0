"""Reading a local variable for the first time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kiln.capture.frame import Frame, UserError

if TYPE_CHECKING:
    from kiln.capture.machine import Machine


def first_read(m: Machine, f: Frame, name: str) -> Any:
    """An argument from outside is looked at, and guarded, when it is first read."""
    if name in f.lazy:
        value = f.locals[name] = m.world.outside(*f.lazy.pop(name))
        return value
    if name not in f.cells:
        raise unbound(name)
    return f.cells[name]


def unbound(name: str) -> UserError:
    text = f"cannot access local variable '{name}' where it is not associated with a value"
    return UserError(UnboundLocalError(text))
