"""Facts: collected records as plain data, which `--json`, the page and tests share.

A fact is a dict of the fields of its record (`kiln.base.recorded` says what they are), places and other parts
of it dicts as well. What is added, left out or put together differently is said here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

from kiln.base.records import (
    BreakRecord,
    Failure,
    GraphRecord,
    KernelRecord,
    PlanRecord,
    RecompileRecord,
    Records,
    StageRecord,
)

VERSION = 1
"""The shape of the facts: a change of it that is no addition counts up."""

Fact: TypeAlias = dict[str, Any]


def plain(value: Any, *without: str) -> Any:
    """A record as data, but for some of its fields."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if not is_dataclass(value):
        return value
    names = [field.name for field in fields(value) if field.name not in without]
    return {name: plain(getattr(value, name)) for name in names}


def facts(records: Records, texts: bool = False) -> Fact:
    """The facts of collected records; the stages' texts and values only where asked for, as they are long."""
    plans = [plan_fact(one) for one in records.plans]
    stages = stage_facts(records.stages)
    events = [one.event for one in records.caches]
    return {
        "version": VERSION,
        "summary": summary(records, stages, plans),
        "graphs": [graph_fact(one, records) for one in records.graphs],
        "breaks": break_facts(records.breaks),
        "recompiles": recompile_facts(records.recompiles),
        "stages": stages,
        "kernels": [kernel_fact(one, records) for one in records.kernels],
        "plans": plans,
        "values": [plain(one) for one in records.values] if texts else [],
        "fallbacks": [plain(one) for one in records.fallbacks],
        "texts": [plain(one) for one in records.texts] if texts else [],
        "cache": {"hits": events.count("hit"), "misses": events.count("miss"),
                  "written": events.count("written")},
    }  # fmt: skip


def kernel_id(graph: str, half: str, name: str) -> str:
    return f"{graph} {half} {name}"


def graph_fact(record: GraphRecord, records: Records) -> Fact:
    """A graph; its nodes have the ids of the kernels, and the eager kernels, that compute them."""
    kernels: dict[str, list[str]] = defaultdict(list)
    calls: dict[str, list[str]] = defaultdict(list)
    for plan in records.plans:
        if plan.graph == record.name:
            for step in plan.steps:
                if step.kind in ("native", "python"):
                    calls[step.origin].append(f"{plan.half} {step.name}")
                for origin in step.origins:
                    kernels[origin].append(kernel_id(plan.graph, plan.half, step.name))
    return {
        **plain(record, "graph", "guards", "operations", "guarded"),
        "operations": [
            {
                **plain(op, "places"), "place": plain(op.place), "stack": plain(op.places),
                "kernels": kernels.get(op.name, []), "calls": calls.get(op.name, []),
            }
            for op in record.operations
        ],
        "guards": [{"text": text, "place": plain(place)} for text, place in record.guarded],
    }  # fmt: skip


def break_facts(records: Iterable[BreakRecord]) -> list[Fact]:
    """The breaks, those of one place together."""
    found: dict[object, Fact] = {}
    for record in records:
        key = record.kind, record.place, record.why, record.region
        fact = found.setdefault(key, {
            "kind": record.kind, "region": record.region, "graphs": [], "place": plain(record.place),
            "reason": record.why, "remedy": record.hint, "count": 0,
        })  # fmt: skip
        fact["count"] += 1
        if record.graph:
            fact["graphs"].append(record.graph)
    return list(found.values())


def recompile_facts(records: Iterable[RecompileRecord]) -> list[Fact]:
    """The recompiles by the value that was another than in the entry that is nearest."""
    found: dict[object, Fact] = {}
    followed: dict[str, set[object]] = {}
    """For each region that was compiled again, the places after its breaks that were too, since then."""
    for record in records:
        if not record.resumed:
            followed[record.region] = set()
        for failure in record.failures:
            follows = record.resumed and failure.place not in followed.get(record.region, {failure.place})
            if follows:
                followed[record.region].add(failure.place)
            add_failure(found, record, failure, follows)
    return list(found.values())


def add_failure(found: dict[object, Fact], record: RecompileRecord, failure: Failure, follows: bool) -> None:
    key = record.region, record.place, failure.source, follows
    fact = found.setdefault(key, {
        "region": record.region, "function": plain(record.place), "source": failure.source,
        "guard": "", "place": None, "remedy": "", "count": 0, "changes": [],
        "limited": False, "follows": follows,
    })  # fmt: skip
    fact["guard"], fact["remedy"], fact["place"] = failure.guard, failure.advice, plain(failure.place)
    fact["count"] += 1
    fact["changes"].append({"old": failure.old, "new": failure.new})
    fact["limited"] |= record.limited


def stage_facts(records: Sequence[StageRecord]) -> list[Fact]:
    """The stages in the order in which they began, since the first; `own` leaves out the stages within."""
    ordered = sorted(records, key=lambda one: (one.start, -one.seconds))
    made: list[Fact] = []
    around: list[tuple[float, Fact]] = []
    for one in ordered:
        fact = {**plain(one), "start": one.start - ordered[0].start, "own": one.seconds}
        while around and around[-1][0] <= one.start:
            around.pop()
        if around:
            around[-1][1]["own"] -= one.seconds
        around.append((one.start + one.seconds, fact))
        made.append(fact)
    return made


def kernel_fact(record: KernelRecord, records: Records) -> Fact:
    """A kernel with a unique id, its ops under the names that the captured graph has for them."""
    graph = next((one for one in records.graphs if one.name == record.graph), None)
    ops = {op.name: op for op in graph.operations} if graph else {}
    fused = [
        {**plain(one), "op": ops[one.origin].op} if one.origin in ops else {**plain(one), "origin": ""}
        for one in record.fused
    ]
    return {"id": kernel_id(record.graph, record.half, record.name), **plain(record), "fused": fused}


def plan_fact(record: PlanRecord) -> Fact:
    """A plan with its memory; steps that run a kernel have its id."""
    steps = [
        {**plain(step, "origins"),
         "kernel": kernel_id(record.graph, record.half, step.name) if step.kind == "kernel" else ""}
        for step in record.steps
    ]  # fmt: skip
    return {**plain(record), "steps": steps, "peak": record.peak, "eager_peak": record.eager_peak}


def summary(records: Records, stages: Iterable[Fact], plans: Iterable[Fact]) -> Fact:
    """The counts of everything, bytes and calls of one run of every graph, seconds spent compiling.

    `outside` are the operations between graphs, the instructions that broke them; `share` of all operations
    were captured.
    """
    ops = sum(one.ops for one in records.graphs)
    outside = len({(one.place, one.kind) for one in records.breaks if one.place is not None})
    return {
        "graphs": len(records.graphs),
        "ops": ops,
        "outside": outside,
        "share": ops / (ops + outside) if ops + outside else 0.0,
        "breaks": len(records.breaks),
        "recompiles": len(records.recompiles),
        "fallbacks": len(records.fallbacks),
        "kernels": len(records.kernels) or sum(one.distinct for one in records.codes),
        "calls": sum(step["kind"] in ("native", "python") for plan in plans for step in plan["steps"]),
        "bytes": sum((one.reads + one.writes) * one.launches for one in records.kernels),
        "peak": max((plan["peak"] for plan in plans), default=0),
        "eager_peak": max((plan["eager_peak"] for plan in plans), default=0),
        "seconds": sum(stage["own"] for stage in stages),
    }
