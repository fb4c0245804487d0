"""Calls: what the steps of compiled graphs take, one by one, while somebody measures them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import field
from time import perf_counter
from typing import Any

from kiln import _launch
from kiln.base import profiling
from kiln.base.dataclass import dataclass
from kiln.observe.roofline import moment, seconds

GRID = "grid"
"""The kind of steps that run on a GPU."""


@dataclass(slots=True)
class Call:
    """One call of a graph: its seconds on the clock, and for each step its name and the moments around it."""

    title: str
    began: float
    seconds: float = 0.0
    steps: list[tuple[str, Any, Any]] = field(default_factory=list)

    def spans(self) -> list[tuple[str, float, float]]:
        """For each step its name, when it began within the call, and its seconds; a GPU has its own clock."""
        first = next((begin for _, begin, _ in self.steps if not isinstance(begin, float)), None)

        def since(begin: Any) -> float:
            return begin - self.began if isinstance(begin, float) else seconds(first, begin)

        return [(name, since(begin), seconds(begin, end)) for name, begin, end in self.steps]


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

    def __exit__(self, *error: object) -> None:
        if not profiling.active:
            _launch.set_marker(None)

    def _begin(self, plan: _launch.Plan, step: int) -> Callable[[], None] | None:
        running: list[Call] = self._local.__dict__.setdefault("running", [])
        if step < 0:
            call = Call(plan.title or "", perf_counter())
            running.append(call)
            return lambda: self._end(call, running)
        name = plan.failing.names[step] if plan.failing is not None else ""
        if not name or not running:
            return None
        call, on_gpu = running[-1], plan.owner.steps[step][0] == GRID
        begin = moment(on_gpu)

        def end() -> None:
            call.steps.append((name, begin, moment(on_gpu)))

        return end if begin is not None else None

    def _end(self, call: Call, running: list[Call]) -> None:
        call.seconds = perf_counter() - call.began
        del running[running.index(call) :]
        known = self.best.get(call.title)
        if known is None or call.seconds < known.seconds:
            self.best[call.title] = call
