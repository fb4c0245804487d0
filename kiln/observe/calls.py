"""Calls: what the steps of compiled graphs take, one by one, while somebody measures them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any

from kiln import _launch
from kiln.base import profiling


@dataclass(slots=True)
class Call:
    """One call of a graph: its seconds, and for each step its name, when it began, and its seconds."""

    title: str
    began: float
    seconds: float = 0.0
    steps: list[tuple[str, float, float]] = field(default_factory=list)


class Calls:
    """Measures calls of compiled graphs within a `with` block, and keeps the quickest of each graph.

    `kiln.profile` takes precedence: while it marks steps, nothing is measured.
    """

    def __init__(self) -> None:
        self.best: dict[str, Call] = {}
        self._local = threading.local()

    def __enter__(self) -> Calls:
        if not profiling.active:
            _launch.set_marker(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not profiling.active:
            _launch.set_marker(None)

    def _begin(self, plan: Any, step: int) -> Callable[[], None] | None:
        now = perf_counter()
        stack: list[Call] = self._local.__dict__.setdefault("stack", [])
        if step < 0:
            call = Call(plan.title or "", now)
            stack.append(call)
            return lambda: self._end(call, stack)
        name = plan.failing.names[step] if plan.failing is not None else ""
        if not name or not stack:
            return None
        call = stack[-1]
        began = perf_counter()

        def end() -> None:
            call.steps.append((name, began - call.began, perf_counter() - began))

        return end

    def _end(self, call: Call, stack: list[Call]) -> None:
        call.seconds = perf_counter() - call.began
        if stack and stack[-1] is call:
            stack.pop()
        known = self.best.get(call.title)
        if known is None or call.seconds < known.seconds:
            self.best[call.title] = call
