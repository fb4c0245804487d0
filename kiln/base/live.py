"""The regions that are alive, and the stance: what `reset` clears and what a change of stance switches."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

from kiln.base.options import unknown

#: Stances under which the first call of a function runs its graphs as they are, without the backend.
FIRST_AS_IS = ("eager_then_compile", "aot_eager_then_compile")
STANCES = ("default", "force_eager", "eager_on_recompile", "fail_on_recompile", *FIRST_AS_IS)

_lock = threading.Lock()
_regions: WeakSet[Any] = WeakSet()
#: Those that are to be one graph each, also where another one calls them.
whole: WeakSet[Any] = WeakSet()
_stance = "default"


def stance() -> str:
    """The stance in force, one of STANCES."""
    return _stance


def register(region: Any) -> None:
    """Make a new region known and give it the stance in force; owed for every region that is made."""
    with _lock:
        _regions.add(region)
        region.enabled = _stance != "force_eager"


def regions() -> list[Any]:
    """The regions alive now."""
    with _lock:
        return list(_regions)


def set_stance(name: str) -> str:
    """Put a stance in force for all regions and give the one before."""
    global _stance
    if name not in STANCES:
        raise unknown("stance", name, STANCES)
    with _lock:
        before, _stance = _stance, name
        for region in list(_regions):
            region.enabled = name != "force_eager"
        return before


def clear() -> None:
    """Forget every entry of every region: the next call of each captures anew."""
    for region in regions():
        region.clear()
        region.limit_hit = False
