"""Compilations that are begun and finished later, while other threads work on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kiln.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Begun:
    """Something in the making: `finish` waits for it; `is_done` says that there is nothing to wait for.

    `made` is what is there of it already, where that is worth a look.
    """

    finish: Callable[[], Any]
    is_done: bool = True
    made: Any = None


def begin(compiler: Callable[[Any], Any], graph: Any) -> Begun:
    """What a compiler makes of a graph, begun if it can be; else it is made when it is wanted."""
    start = getattr(compiler, "begin", None)
    return Begun(partial(compiler, graph)) if start is None else start(graph)
