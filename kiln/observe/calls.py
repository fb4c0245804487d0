"""Calls: what the steps of compiled graphs take, one by one, while somebody measures them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import field
from time import perf_counter
from typing import Any

import torch

from kiln import _launch
from kiln.base import profiling
from kiln.base.dataclass import dataclass

GRID = "grid"
"""The kind of steps that run on a GPU."""


def moment(on_gpu: bool) -> Any:
    """Now: on the clock, or in the GPU's stream; None while a graph of the GPU is being recorded."""
    if not on_gpu:
        return perf_counter()
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


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
    """Measures calls of compiled graphs in a `with` block; keeps the quickest of each graph, or `every` one.

    `kiln.profile` takes precedence: while it marks steps, nothing is measured.
    """

    def __init__(self, every: bool = False) -> None:
        self.every = every
        self.made: dict[str, list[Call]] = {}
        self._local = threading.local()

    @property
    def best(self) -> dict[str, Call]:
        """The quickest call of each graph."""
        return {title: min(made, key=lambda call: call.seconds) for title, made in self.made.items()}

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
        made = self.made.setdefault(call.title, [])
        if self.every or not made:
            made.append(call)
        elif call.seconds < made[0].seconds:
            made[0] = call
