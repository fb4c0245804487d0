"""Whether a graph break is an error: said for a block or a function, inside compiled code or around it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class _Now(threading.local):
    error: bool | None = None


_now = _Now()


def now() -> bool | None:
    """What holds here; None where nobody said anything."""
    return _now.error


def put(error: bool | None) -> None:
    """Say what holds from here on, in this thread."""
    _now.error = error


class error_on_graph_break:  # noqa: N801
    """Make graph breaks errors (True) or not (False) in a with block, or in a function as its decorator.

    It decides at the instruction that breaks. `compile(..., fullgraph=True)` is stronger: there a break is
    always an error.
    """

    def __init__(self, error: bool) -> None:
        self.error = error
        self.before: bool | None = None

    def __enter__(self) -> None:
        self.before = now()
        put(self.error)

    def __exit__(self, *error: object) -> None:
        put(self.before)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        error = self.error

        @functools.wraps(fn, updated=())
        def inside(*args: Any, **kwargs: Any) -> Any:
            with error_on_graph_break(error):
                return fn(*args, **kwargs)

        return inside
