"""Programs that run on a GPU: kernels that a plan starts, or recordings of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from kiln.base import records
from kiln.base.begun import Begun
from kiln.base.dump import Dump
from kiln.base.options import Settings
from kiln.base.progress import working
from kiln.fuse.program import Program
from kiln.launch.cache import disk
from kiln.launch.device import plan_on
from kiln.launch.graphs import Recorded, can_record
from kiln.launch.inplace import with_writes_last
from kiln.launch.templates import with_templates

Run: TypeAlias = Callable[[list[Any]], Sequence[Any]]


def on_gpu(program: Program, device: torch.device, settings: Settings, dump: Dump) -> Begun:
    """A program as a plan that starts kernels on a GPU."""
    if settings.tunes:
        program = with_templates(program, device, disk(settings.cache_bytes), dump.title)
    program.steps = with_writes_last(program)
    with records.timed("generate", dump.name, dump.half), working(f"generating code for {dump.title}"):
        planned = plan_on(program, device, disk(settings.cache_bytes), apart=not settings.records)

    def finish() -> Run:
        plan = planned()
        plan.title = dump.title
        dump.show("plan", "plan", "txt", lambda: str(plan))
        places = {node: i for i, node in enumerate(program.graph.inputs)}
        written = frozenset(places[node] for node in program.overwrites.values())
        recorded = settings.records and can_record(program)
        return Recorded(plan, device.index or 0, written) if recorded else plan

    return Begun(finish, is_done=False)
