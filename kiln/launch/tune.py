"""Autotuning: variants of kernels and graphs are timed on tensors of their shapes; winners are remembered.

A winner is kept on disk beside the machine code, by the text of the usual module, the processor, the code
generator and the number of threads: the next process takes it without timing anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch

from kiln.base import records
from kiln.base.expressions import Expr
from kiln.base.graph import Graph, TensorSpec
from kiln.base.progress import watched
from kiln.fuse.nest import Kernel
from kiln.fuse.program import Program
from kiln.fuse.steps import Launch
from kiln.generate.code import Compiled, Store, variant
from kiln.generate.cpu import depends_on
from kiln.generate.schedule import USUAL, Schedule, alternatives, schedule_of
from kiln.launch.plan import plan_for

K = TypeVar("K")
Run: TypeAlias = Callable[[list[Any]], Sequence[Any]]

Way: TypeAlias = Callable[[], tuple[str, Callable[[], Run]]]
"""Gives what tells a way to run a graph from others, and a function that makes it ready."""

ROUNDS = 7  # in which every variant is timed once more
TURN = 0.002  # seconds of one timing at least
GAIN = 0.97  # of the usual time that another schedule must not exceed
FORMAT = "schedule 1"


def tuned(program: Program, store: Store | None, title: str = "a graph") -> dict[Kernel, Schedule]:
    """The schedule for each kernel whose sizes do not vary, where another than the usual one is faster.

    `title` is the graph's name, for a person who waits.
    """
    first = {step.kernel: step for step in reversed(program.steps) if isinstance(step, Launch)}
    found: dict[Kernel, Schedule] = {}
    missing: list[tuple[Launch, str]] = []
    for kernel, launch in first.items():
        if not fixed(launch):
            continue
        key = key_of(kernel)
        known = read(store.get(key) if store is not None else None)
        if known is None:
            missing.append((launch, key))
        else:
            found[kernel] = known
    for launch, key in watched(missing, f"timing kernels of {title}"):
        best = found[launch.kernel] = fastest(launch)
        if store is not None:
            store.put(key, json.dumps(best.data()).encode())
    return {kernel: schedule for kernel, schedule in found.items() if schedule != USUAL}


def key_of(kernel: Kernel) -> str:
    """What a winner depends on."""
    return key(FORMAT, variant(kernel, USUAL)[0])


def key(*texts: str) -> str:
    parts = (depends_on(), str(torch.get_num_threads()), *texts)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def choice(
    text: str,
    ways: Mapping[str, Way],
    specs: Sequence[Any],
    store: Store | None,
    held: Mapping[int, torch.Tensor] = MappingProxyType({}),
    title: str = "a graph",
) -> str:
    """The name of the fastest of several ways to run a graph, the first unless another gains visibly.

    `text` says what is chosen for, `specs` are the types of the inputs, some of which are these tensors;
    where sizes vary nothing is timed.
    """
    usual = next(iter(ways))
    if not all(isinstance(spec, TensorSpec) and settled(spec) for spec in specs):
        return usual
    place = key(FORMAT, text, *ways)
    known = (store.get(place) or b"").decode(errors="replace") if store is not None else ""
    if known in ways:
        return known
    different: dict[str, tuple[str, Callable[[], Run]]] = {}
    for name, way in ways.items():
        what, make = way()
        different.setdefault(what, (name, make))
    best = usual
    if len(different) > 1:
        values = [held[i] if i in held else example(spec) for i, spec in enumerate(specs)]
        makers = watched(list(different.values()), f"timing ways to run {title}")
        try:
            times = timed({name: calls(make(), values) for name, make in makers})
        except (IndexError, RuntimeError, ZeroDivisionError):
            return usual
        best = min(times, key=times.__getitem__)
        records.emit(records.TunedRecord("graph", len(different), times[usual], times[best], best))
        best = best if times[best] <= GAIN * times[usual] else usual
    if store is not None:
        store.put(place, best.encode())
    return best


def read(data: bytes | None) -> Schedule | None:
    """A remembered winner; what is not one counts as none."""
    if data is None:
        return None
    try:
        return schedule_of(json.loads(data))
    except ValueError:  # not JSON, or not even text
        return None


def fixed(launch: Launch) -> bool:
    """Whether all sizes of a launch are numbers."""
    specs = [*(n.spec for n in (*launch.reads.values(), *launch.writes.values())), *launch.scratch.values()]
    numbers = [part for nest in launch.kernel.nests for a in nest.axes for part in (a.low, a.size)]
    variables = {a.variable for nest in launch.kernel.nests for a in nest.axes}
    inside = not any(isinstance(n, Expr) and not n.symbols() <= variables for n in numbers)
    return inside and all(map(settled, specs))


def settled(spec: TensorSpec) -> bool:
    """Whether the sizes of a tensor are numbers."""
    return not any(isinstance(n, Expr) for n in (*spec.shape, *spec.stride))


def fastest(launch: Launch) -> Schedule:
    """The schedule under which a launch takes least time, the usual one unless another gains visibly."""
    kernel, tensors = launch.kernel, [example(node.spec) for node in launch.reads.values()]
    runs: dict[Schedule, Callable[[], Any]] = {}
    seen: set[str] = set()
    for schedule in alternatives():
        text, compiled = variant(kernel, schedule)
        if text not in seen:
            seen.add(text)
            runs[schedule] = calls(plan_for(*alone(launch, compiled())), tensors)
    if len(runs) == 1:
        return USUAL
    try:
        times = timed(runs)
    except (IndexError, RuntimeError, ZeroDivisionError):
        return USUAL  # it refuses the values of the examples
    best = min(times, key=times.__getitem__)
    joined = USUAL.joined([schedule for schedule in times if times[schedule] <= GAIN * times[USUAL]])
    text, compiled = variant(kernel, joined)
    if text not in seen:
        runs = {best: runs[best], joined: calls(plan_for(*alone(launch, compiled())), tensors)}
        times.update(timed(runs))
        best = min(runs, key=times.__getitem__)
    records.emit(records.TunedRecord(kernel.name, len(times), times[USUAL], times[best], str(best)))
    return best if times[best] <= GAIN * times[USUAL] else USUAL


def alone(launch: Launch, compiled: Compiled) -> tuple[Program, list[Compiled]]:
    """A program that does nothing but one launch."""
    graph = Graph()
    reads = {b: graph.input(n.name, n.spec) for b, n in launch.reads.items()}
    writes = {
        b: graph.call(n.op, tuple(reads.values()), spec=n.spec) for b, n in launch.writes.items()
    }
    graph.outputs = tuple(writes.values())
    return Program(graph, [Launch(launch.kernel, reads, writes, launch.scratch)]), [compiled]


def calls(run: Run, values: Sequence[Any]) -> Callable[[], Any]:
    """A function that runs with these values; it may empty the list that it gets."""
    return lambda: run(list(values))


def timed(runs: Mapping[K, Callable[[], Any]]) -> dict[K, float]:
    """The least time of each variant; they take turns, so that a busy machine slows all."""
    counts = {}
    for name, run in runs.items():
        run()
        counts[name] = max(1, round(TURN / max(once(run, 1), 1e-7)))
    times = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name] = min(times[name], once(run, counts[name]))
    return times


def once(run: Callable[[], Any], count: int) -> float:
    start = perf_counter()
    for _ in range(count):
        run()
    return (perf_counter() - start) / count


def example(spec: TensorSpec) -> torch.Tensor:
    """A tensor of a type, with values that any kernel takes: indices are 0, divisors are not."""
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    return made.fill_(0.5) if spec.dtype.is_floating_point else made.zero_()
