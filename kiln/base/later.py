"""Parts that load when they are first used: a program on a CPU does not pay for what GPUs or reports need."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pkgutil import resolve_name
from typing import Any

_found = cache(resolve_name)


def later(place: str) -> Callable[..., Any]:
    """The function or class at `module:name`, whose module is imported when it is first called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _found(place)(*args, **kwargs)

    return call
