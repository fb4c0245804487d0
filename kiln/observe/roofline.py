"""Roofline: how fast kernels move their bytes, against what a plain copy moves."""

from __future__ import annotations

from collections import defaultdict
from typing import TypedDict

import torch

from kiln.base.records import KernelRecord, Records
from kiln.observe.calls import Calls, moment, seconds

COPIED = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Bytes of the copy that bandwidth is measured by."""
TURNS = 10
KERNEL = "kiln.kernel"
"""How the names of steps that launch kernels begin."""


class Line(TypedDict):
    """A kernel: its bytes, the seconds of its fastest launch, what share of a copy's bandwidth that is."""

    kernel: str
    fused: list[str]
    bytes: int
    seconds: float
    bandwidth: float
    share: float
    launches: int


def fastest(calls: Calls) -> dict[tuple[str, int], tuple[float, int]]:
    """For each launch, by its graph and its number there, the least seconds and how many there were."""
    spans: dict[tuple[str, int], list[float]] = defaultdict(list)
    for title, made in calls.made.items():
        for call in made:
            launches = [step for step in call.steps if step[0].startswith(KERNEL)]
            for i, (_, begin, end) in enumerate(launches):
                spans[title, i].append(seconds(begin, end))
    return {key: (min(times), len(times)) for key, times in spans.items()}


def lines(records: Records, calls: Calls) -> list[Line]:
    """The kernels that were launched, the longest first."""
    known = {(one.graph, one.half, one.name): one for one in records.kernels}
    copies: dict[str, float] = {}
    found: dict[tuple[str, str, str], Line] = {}
    times = fastest(calls)
    for plan in records.plans:
        names = [step.name for step in plan.steps if step.kind == "kernel"]
        for i, name in enumerate(names):
            kernel = known.get((plan.graph, plan.half, name))
            spent = times.get((f"{plan.graph} {plan.half}", i))
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
