"""Marks: what the user said about single callables, looked up by the interpreter when it meets them."""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any

DISABLE = "disable"
"""Calls break the graph, and nothing below the call is captured."""
SKIP = "skip"
"""The frame is not captured, calls of it break the graph; what it calls may be captured on its own."""
ALLOW = "allow"
"""Calls are put into the graph as one node, unseen inside."""
DISALLOW = "disallow"
"""Calls break the graph and run in Python."""
CONSTANT = "constant"
"""The result of the first call is a constant of the graph."""
BREAK = "break"
"""`graph_break` itself: the graph ends at the call, with the message as the reason."""

SKIP_FRAME = "skip-frame"
"""`skip_frame` itself: the frame that calls it is not captured."""
STOP = "stop"
"""`step_unsupported` itself: the graph ends at the call and the rest of the frame runs in Python."""

NONE: frozenset[str] = frozenset()

# id -> (a reference that keeps the entry true to its object, the marks). Objects that take no weak reference
# (method descriptors, slots) are kept alive, so that the id is not used again.
_table: dict[int, tuple[object, frozenset[str]]] = {}


def _target(fn: Any) -> Any:
    return fn.__func__ if type(fn) is MethodType else fn


def of(fn: Any) -> frozenset[str]:
    """The marks of a callable; those of a bound method are its function's."""
    entry = _table.get(id(_target(fn)))
    return NONE if entry is None else entry[1]


def add(fn: Any, mark: str) -> None:
    """Give a callable one more mark."""
    target = _target(fn)
    key = id(target)
    entry = _table.get(key)
    if entry is not None:
        _table[key] = (entry[0], entry[1] | {mark})
        return

    def forget(_: object) -> None:
        _table.pop(key, None)

    try:
        keeper: object = weakref.ref(target, forget)
    except TypeError:
        keeper = target
    _table[key] = (keeper, frozenset({mark}))


def remove(fn: Any, mark: str) -> None:
    """Take one mark away; a callable without it stays as it is."""
    key = id(_target(fn))
    entry = _table.get(key)
    if entry is None:
        return
    left = entry[1] - {mark}
    if left:
        _table[key] = (entry[0], left)
    else:
        del _table[key]
