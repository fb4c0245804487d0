"""Facts: collected records as plain data, which `--json`, the page and tests share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from kiln.base.errors import Place
from kiln.base.records import (
    BreakRecord,
    Failure,
    GraphRecord,
    KernelRecord,
    PlanRecord,
    RecompileRecord,
    Records,
    StageRecord,
    ValuesRecord,
)
from kiln.observe.shape import (
    BreakFact,
    Facts,
    GraphFact,
    KernelFact,
    PlaceFact,
    PlanFact,
    RecompileFact,
    StageFact,
    SummaryFact,
    ValuesFact,
)

VERSION = 1
"""The shape of the facts: a change of it that is no addition counts up."""


def facts(records: Records, texts: bool = False) -> Facts:
    """The facts of collected records; the stages' texts and values only where asked for, as they are long."""
    kernels = [kernel_fact(one, records) for one in records.kernels]
    breaks = break_facts(records.breaks)
    recompiles = recompile_facts(records.recompiles)
    plans = [plan_fact(one) for one in records.plans]
    stages = stage_facts(records.stages)
    return {
        "version": VERSION,
        "summary": summary(records, stages, plans),
        "graphs": [graph_fact(one, records) for one in records.graphs],
        "breaks": breaks,
        "recompiles": recompiles,
        "stages": stages,
        "kernels": kernels,
        "plans": plans,
        "values": [values_fact(one) for one in records.values] if texts else [],
        "fallbacks": [{"region": r.region, "error": r.error, "file": r.file} for r in records.fallbacks],
        "texts": [
            {"graph": r.graph, "half": r.half, "stage": r.stage, "language": r.language, "text": r.text}
            for r in (records.texts if texts else ())
        ],
        "cache": {
            "hits": sum(one.event == "hit" for one in records.caches),
            "misses": sum(one.event == "miss" for one in records.caches),
            "written": sum(one.event == "written" for one in records.caches),
        },
    }


def place_fact(place: Place | None) -> PlaceFact | None:
    """A place as data."""
    if place is None:
        return None
    return {
        "file": place.file, "line": place.line, "function": place.function, "text": place.text,
        "column": place.column, "width": place.width,
    }  # fmt: skip


def kernel_id(graph: str, half: str, name: str) -> str:
    return f"{graph} {half} {name}"


def graph_fact(record: GraphRecord, records: Records) -> GraphFact:
    """A graph, its nodes with the kernels and eager kernels that compute them."""
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
        "name": record.name,
        "region": record.region,
        "ops": record.ops,
        "inputs": record.inputs,
        "start": place_fact(record.start),
        "end": place_fact(record.end),
        "operations": [
            {
                "name": op.name, "op": op.op, "kind": op.kind, "inputs": list(op.inputs), "spec": op.spec,
                "module": op.module, "place": place_fact(op.place),
                "stack": [fact for place in op.places if (fact := place_fact(place)) is not None],
                "kernels": kernels.get(op.name, []), "calls": calls.get(op.name, []),
            }
            for op in record.operations
        ],
        "guards": [{"text": text, "place": place_fact(place)} for text, place in record.guarded],
    }  # fmt: skip


def break_facts(records: Iterable[BreakRecord]) -> list[BreakFact]:
    """The breaks, those of one place together."""
    found: dict[object, BreakFact] = {}
    for record in records:
        key = record.kind, record.place, record.why, record.region
        fact = found.setdefault(key, {
            "kind": record.kind, "region": record.region, "graphs": [], "place": place_fact(record.place),
            "reason": record.why, "remedy": record.hint, "count": 0,
        })  # fmt: skip
        fact["count"] += 1
        if record.graph:
            fact["graphs"].append(record.graph)
    return list(found.values())


def recompile_facts(records: Iterable[RecompileRecord]) -> list[RecompileFact]:
    """The recompiles by the value that was another than in the entry that is nearest."""
    found: dict[object, RecompileFact] = {}
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


def add_failure(
    found: dict[object, RecompileFact], record: RecompileRecord, failure: Failure, follows: bool
) -> None:
    key = record.region, record.place, failure.source, follows
    fact = found.setdefault(key, {
        "region": record.region, "function": place_fact(record.place), "source": failure.source,
        "guard": "", "place": None, "remedy": "", "count": 0, "changes": [],
        "limited": False, "follows": follows,
    })  # fmt: skip
    fact["guard"], fact["remedy"], fact["place"] = failure.guard, failure.advice, place_fact(failure.place)
    fact["count"] += 1
    fact["changes"].append({"old": failure.old, "new": failure.new})
    fact["limited"] |= record.limited


def stage_facts(records: Sequence[StageRecord]) -> list[StageFact]:
    """The stages in the order in which they began."""
    ordered = sorted(records, key=lambda one: (one.start, -one.seconds))
    made: list[StageFact] = []
    around: list[tuple[float, StageFact]] = []
    for one in ordered:
        fact: StageFact = {
            "graph": one.graph, "half": one.half, "stage": one.stage, "start": one.start - ordered[0].start,
            "seconds": one.seconds, "own": one.seconds,
        }  # fmt: skip
        while around and around[-1][0] <= one.start:
            around.pop()
        if around:
            around[-1][1]["own"] -= one.seconds
        around.append((one.start + one.seconds, fact))
        made.append(fact)
    return made


def kernel_fact(record: KernelRecord, records: Records) -> KernelFact:
    """A kernel, its ops under the names that the captured graph has for them."""
    graph = next((one for one in records.graphs if one.name == record.graph), None)
    ops = {op.name: op for op in graph.operations} if graph else {}
    return {
        "id": kernel_id(record.graph, record.half, record.name),
        "graph": record.graph,
        "half": record.half,
        "name": record.name,
        "device": record.device,
        "nest": record.nest,
        "fused": [
            {
                "origin": one.origin if one.origin in ops else "",
                "op": ops[one.origin].op if one.origin in ops else one.op,
                "place": place_fact(one.place),
            }
            for one in record.fused
        ],
        "reads": record.reads,
        "writes": record.writes,
        "launches": record.launches,
        "functions": list(record.functions),
    }


def plan_fact(record: PlanRecord) -> PlanFact:
    """A plan with its memory."""
    return {
        "graph": record.graph,
        "half": record.half,
        "steps": [
            {
                "kind": step.kind, "name": step.name,
                "kernel": kernel_id(record.graph, record.half, step.name) if step.kind == "kernel" else "",
                "origin": step.origin, "place": place_fact(step.place), "bytes": step.bytes,
            }
            for step in record.steps
        ],
        "arena": record.arena,
        "peak": record.peak,
        "eager_peak": record.eager_peak,
        "eager": list(record.eager),
    }  # fmt: skip


def values_fact(record: ValuesRecord) -> ValuesFact:
    """The values of a half, with their memory."""
    return {
        "graph": record.graph,
        "half": record.half,
        "values": [
            {
                "name": one.name, "op": one.op, "kind": one.kind, "inputs": list(one.inputs),
                "spec": one.spec, "origin": one.origin, "step": one.step, "call": one.call,
            }
            for one in record.values
        ],
        "lodged": [
            {"name": one.name, "bytes": one.bytes, "offset": one.offset, "first": one.first, "last": one.last}
            for one in record.lodged
        ],
    }  # fmt: skip


def summary(records: Records, stages: Iterable[StageFact], plans: Iterable[PlanFact]) -> SummaryFact:
    """The counts of everything."""
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
