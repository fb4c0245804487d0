"""Roofline: how fast kernels move their bytes, against what a plain copy moves."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypedDict

import torch

from kiln import _launch
from kiln.base.records import KernelRecord, Records

COPIED = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Bytes of the copy that bandwidth is measured by."""
TURNS = 10
LAUNCHES = ("launch", "grid")
"""The kinds of steps that launch kernels."""


class Line(TypedDict):
    """A kernel: its bytes, the seconds of its fastest launch, what share of a copy's bandwidth that is."""

    kernel: str
    fused: list[str]
    bytes: int
    seconds: float
    bandwidth: float
    share: float
    launches: int


class Times:
    """The times of launches: by a plan's title and the kernel's number among its launches, in seconds."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, int], list[Any]] = defaultdict(list)
        self._lock = threading.Lock()

    def begin(self, plan: _launch.Plan, step: int) -> Callable[[], None] | None:
        """The marker of plans: begin the time of a step."""
        if step < 0:
            return _nothing
        steps = plan.owner.steps
        if steps[step][0] not in LAUNCHES:
            return None
        key = plan.title or "", sum(one[0] in LAUNCHES for one in steps[:step])
        begin = moment(steps[step][0] == "grid")

        def end() -> None:
            with self._lock:
                self._spans[key].append((begin, moment(begin is not None and not isinstance(begin, float))))

        return end if begin is not None else None

    def fastest(self) -> dict[tuple[str, int], tuple[float, int]]:
        """For each launch the seconds of the fastest, and how many there were."""
        found = {}
        for key, spans in self._spans.items():
            found[key] = min(seconds(a, b) for a, b in spans), len(spans)
        return found


def _nothing() -> None:
    pass


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


@contextmanager
def timing() -> Iterator[Times]:
    """Time all launches of plans meanwhile."""
    times = Times()
    _launch.set_marker(times.begin)
    try:
        yield times
    finally:
        _launch.set_marker(None)


def lines(records: Records, times: Times) -> list[Line]:
    """The kernels that were launched, the longest first."""
    known = {(one.graph, one.half, one.name): one for one in records.kernels}
    copies: dict[str, float] = {}
    found: dict[tuple[str, str, str], Line] = {}
    fastest = times.fastest()
    for plan in records.plans:
        names = [step.name for step in plan.steps if step.kind == "kernel"]
        for i, name in enumerate(names):
            kernel = known.get((plan.graph, plan.half, name))
            spent = fastest.get((f"{plan.graph} {plan.half}", i))
            if kernel is None or spent is None:
                continue
            if kernel.device not in copies:
                copies[kernel.device] = copy_bandwidth(kernel.device)
            key = plan.graph, plan.half, name
            line = line_of(kernel, *spent, copies[kernel.device])
            if key not in found or line["seconds"] < found[key]["seconds"]:
                found[key] = line
    return sorted(found.values(), key=lambda line: -line["seconds"])


def line_of(kernel: KernelRecord, spent: float, launches: int, copied: float) -> Line:
    size = kernel.reads + kernel.writes
    return {
        "kernel": f"{kernel.graph} {kernel.half} {kernel.name}",
        "fused": [one.op for one in kernel.fused],
        "bytes": size,
        "seconds": spent,
        "bandwidth": size / spent if spent else 0.0,
        "share": size / spent / copied if spent else 0.0,
        "launches": launches,
    }


def copy_bandwidth(device: str) -> float:
    """The bytes that a copy reads and writes in a second."""
    a = torch.ones(COPIED[device] // 4, device=device)
    b = torch.empty_like(a)
    spans = []
    for _ in range(TURNS):
        begin = moment(device == "cuda")
        b.copy_(a)
        spans.append((begin, moment(device == "cuda")))
    return 2 * COPIED[device] / min(seconds(*span) for span in spans)
