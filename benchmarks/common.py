"""What the benchmarks share: interleaved timing in one process, and runs in fresh processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleaved(
    ways: Mapping[str, Callable[[], object]], rounds: int = 30, calls: int = 500
) -> dict[str, float]:
    """The median over rounds of the seconds of one call of each way; every round times every way."""
    for call in ways.values():
        for _ in range(20):
            call()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def fresh(script: str, *arguments: str) -> Any:
    """The JSON that a script prints as its last line, run in a new process."""
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def verdict(name: str, value: float, limit: float) -> str:
    """One line that says whether a figure keeps its limit."""
    return f"{name}: {value:.2f} (limit {limit:.2f}) {'ok' if value <= limit else 'MISSED'}"
