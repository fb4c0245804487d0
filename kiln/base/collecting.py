"""Garbage collection while something compiles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects that compilations may leave before one of them looks which are garbage.
LIMIT = 1_000_000
#: How many whole collections there were, and how many objects compilations have left since.
_left = [0, 0]


@contextmanager
def uncollected() -> Iterator[None]:
    """Let no collection happen meanwhile, nor for what was made meanwhile.

    A collection would walk all objects of the process for the many made here, of which most stay. So they
    count as old at once, without a walk; where many were left since the last collection of old objects, there
    is one.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            _settle()
            gc.enable()


def _settle() -> None:
    if gc.get_freeze_count():  # somebody else's, which must stay frozen
        return
    collections = gc.get_stats()[2]["collections"]
    if collections != _left[0]:
        _left[:] = collections, 0
    _left[1] += gc.get_count()[0]
    if _left[1] > LIMIT:
        gc.collect()
    else:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
