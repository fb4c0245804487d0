"""The regions that are alive: what `reset` clears and what a change of stance switches."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

from kiln.base import options

_lock = threading.Lock()
_regions: WeakSet[Any] = WeakSet()


def register(region: Any) -> None:
    """Make a new region known and give it the stance in force; owed for every region that is made."""
    with _lock:
        _regions.add(region)
        region.enabled = options.stance() != "force_eager"


def regions() -> list[Any]:
    """The regions alive now."""
    with _lock:
        return list(_regions)


def set_stance(name: str) -> str:
    """Put a stance in force for all regions and give the one before."""
    with _lock:
        before = options.put_stance(name)
        for region in list(_regions):
            region.enabled = name != "force_eager"
        return before


def clear() -> None:
    """Forget every entry of every region: the next call of each captures anew."""
    for region in regions():
        region.clear()
        region.limit_hit = False
