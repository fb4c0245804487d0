"""Profile: compiled functions, graphs, kernels and calls by name in traces of torch.profiler."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kiln import _hook, _launch
from kiln.base import profiling

_lock = threading.Lock()


@contextmanager
def profile() -> Iterator[None]:
    """Mark what compiled code runs in traces of torch.profiler, by name, for a with block or a function.

    Ranges lie one inside the other: `kiln.function` for each compiled function, with its place; `kiln.graph`
    for each of its graphs, forward, backward or inference; `kiln.kernel` and `kiln.call` for the kernels of
    that graph and for the kernels of PyTorch that it calls. Enter it inside or outside of the profiler, in
    any thread: it holds for the whole process. While it is on, marks cost some microseconds a step; while it
    is off, nothing is marked.
    """
    with _lock:
        profiling.active.append(None)
        _switch(on=True)
    try:
        yield
    finally:
        with _lock:
            profiling.active.pop()
            if not profiling.active:
                _switch(on=False)


def _switch(on: bool) -> None:
    _hook.set_marker(_region_begins if on else None)
    _launch.set_marker(_step_begins if on else None)


def _region_begins(region: _hook.Region) -> Callable[[], None]:
    code = region.function.__code__
    line = next((line for _, _, line in code.co_lines() if line), code.co_firstlineno)
    place = f"{os.path.basename(code.co_filename)}:{line}"
    return profiling.begin(f"kiln.function {region.function.__qualname__} ({place})")


def _step_begins(plan: _launch.Plan, step: int) -> Callable[[], None] | None:
    """Begin the range of a plan, or of a step of it; steps that only make room have none."""
    if step < 0:
        return profiling.begin(f"kiln.graph {plan.title or ''}".rstrip())
    name = plan.failing.names[step] if plan.failing is not None else f"kiln.step {step}"
    return profiling.begin(name) if name else None
