"""Room on Python's stack: the program may recurse as deep as Python allows, the interpreter needs more."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FRAMES_PER_CALL = 12  # at most so many frames of the interpreter for one of the program
_lock = threading.Lock()
_entered: list[int] = []  # the limits found on entry, the user's own first


@contextmanager
def deep() -> Iterator[int]:
    """Raise the recursion limit meanwhile; gives the number of frames that the program may still use."""
    with _lock:
        _entered.append(sys.getrecursionlimit())
        allowed = _entered[0]
        sys.setrecursionlimit(max(allowed * FRAMES_PER_CALL, sys.getrecursionlimit()))
    try:
        yield max(allowed - used(), 50)
    finally:
        with _lock:
            first = _entered[0]
            _entered.pop()
            if not _entered:
                sys.setrecursionlimit(first)


def used() -> int:
    """How many frames are on the stack."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    return depth
