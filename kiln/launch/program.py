"""Programs that run: a fused graph as a function from the inputs' values to the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch

from kiln._launch import set_limit
from kiln.base import log, records
from kiln.base.begun import Begun
from kiln.base.dump import NOWHERE, Dump
from kiln.base.errors import Uneven
from kiln.base.expressions import hinted
from kiln.base.fx import runner
from kiln.base.graph import Graph, Node, TensorSpec, nodes_in, tensors
from kiln.base.later import later
from kiln.base.options import Settings, config
from kiln.base.progress import working
from kiln.expand.edited import EditedFile, revisable
from kiln.expand.epilogues import with_biases_apart, with_epilogues
from kiln.expand.equals import merged
from kiln.expand.exact import opened, sealed
from kiln.expand.expand import expand
from kiln.expand.fit import filled
from kiln.expand.heads import grouped
from kiln.expand.onednn import available
from kiln.expand.padding import padded
from kiln.expand.products import by_onednn, summed_up
from kiln.expand.sizes import determined
from kiln.expand.stacks import joined_once, unstacked
from kiln.fuse.attention import ATTENTION
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.lower import is_pointwise
from kiln.fuse.program import WAYS, Fusing, Program, fuse
from kiln.fuse.show import show_kernels
from kiln.fuse.split import GRIDS
from kiln.fuse.steps import Call
from kiln.fuse.views import supported
from kiln.generate.code import generate
from kiln.generate.cpu import assembly, host
from kiln.launch.cache import disk
from kiln.launch.few import Few, few_of
from kiln.launch.inplace import with_writes_last
from kiln.launch.kept import keeping
from kiln.launch.native import multiplies_in_place
from kiln.launch.plan import Planner, linked
from kiln.ops.aliases import owner_of

aten = torch.ops.aten
#: Elements of results that loops make of nothing.
SHORT = 1 << 16

# What few programs need: graphs over a GPU and the CPU, those that somebody wants explained or tuned.
parted, Sides = later("kiln.launch.sides:parted"), later("kiln.launch.sides:Sides")
choice, tuned = later("kiln.launch.tune:choice"), later("kiln.launch.tune:tuned")
tell = later("kiln.launch.told:tell")

Run: TypeAlias = Callable[[list[Any]], Sequence[Any]]


Link: TypeAlias = Callable[[Program, torch.device, Settings, Dump], Begun]


def on_cpu(program: Program, device: torch.device, settings: Settings, dump: Dump) -> Begun:
    """A program as a plan."""
    program.steps = with_writes_last(program)
    store = disk(settings.cache_bytes)
    schedules = tuned(program, store, dump.title) if settings.tunes else {}
    with records.timed("generate", dump.name, dump.half), working(f"generating code for {dump.title}"):
        compiled = generate(program.kernels, store, partial(revised, dump), schedules)
        code = compiled[0].code if compiled else None
        if code is not None and records.listening():
            code.wait()
    set_limit(settings.arena_bytes)
    with records.timed("plan", dump.name, dump.half):
        made = Planner(program, compiled).described()

    def finish() -> Run:
        plan = linked(made, code.wait() if code is not None else None)
        plan.title = dump.title
        dump.show("plan", "plan", "txt", lambda: str(plan))
        return plan

    return Begun(finish, code is None or code.is_here, made)


def revised(dump: Dump, text: str) -> str:
    """The text of a module, shown, or the one of the edited file in its place."""
    revision = dump.show("llvm", "kernels", "ll", lambda: text)
    if revision is not None:
        text = revision.text
    try:
        dump.show("", "kernels", "s", lambda: assembly(text))
    except RuntimeError as error:
        if revision is None:
            raise
        raise EditedFile(f"{revision.path}: {error}") from error
    return text


def compile_graph(graph: Graph, settings: Settings | None = None, dump: Dump = NOWHERE) -> Run:
    """A graph of aten ops as native kernels and eager calls."""
    run: Run = begin_graph(graph, settings or config.now, dump).finish()
    return run


def begin_graph(graph: Graph, settings: Settings, dump: Dump = NOWHERE) -> Begun:
    """A graph of aten ops as native kernels and eager calls, whose machine code other threads may be at."""
    graph = determined(graph)
    device = device_of(graph)
    if device is not None:
        return begin_on(device, graph, settings, dump)
    found = None if settings.exact or dump.folder is not None else parted(graph)
    if found is None:
        name = dump.title or "a graph"
        log.warn_once(("sides", name), f"{name} computes on several devices at once and runs op by op")
        return Begun(partial(runner, graph, dump.title))
    begun = [begin_on(part.device, part.graph, settings, dump) for part in found[1]]
    return Begun(lambda: Sides(*found, [one.finish() for one in begun]), all(one.is_done for one in begun))


def begin_on(
    device: torch.device, graph: Graph, settings: Settings, dump: Dump, left: int = 0,
    marks: Sequence[int] = (),
) -> Begun:  # fmt: skip
    """A graph whose tensors are on one device, which leaves so many bytes beside its own outputs.

    `marks` are those of its nodes, where they are known.
    """
    kept = None
    if device.type == "cpu" and not is_watched(dump):
        found = None if settings.tunes else few_of(graph, marks)
        if found is not None:
            try:
                part = begin_on(device, found.graph, settings, dump, left + found.left, found.marks)
                return begin_few(found, part)
            except Uneven:
                pass
        kept = keeping(graph, settings, disk(settings.cache_bytes), left)
        plan = kept.find() if kept is not None else None
        if plan is not None:
            plan.title = dump.title
            set_limit(settings.arena_bytes)
            return Begun(lambda: plan, made=plan.owner)
    fusing, link = TARGETS[device.type]
    if settings.tunes and device.type == "cpu":
        untuned = replace(settings, mode="default")

        def made(way: Fusing) -> tuple[str, Callable[[], Run]]:
            program = fused(graph, untuned, way)
            return show_kernels(program.kernels), lambda: link(program, device, untuned, NOWHERE).finish()

        ways = {name: partial(made, way) for name, way in WAYS.items()}
        specs = [node.spec for node in graph.inputs]
        fusing = WAYS[choice(str(graph), ways, specs, disk(settings.cache_bytes), title=dump.title)]
    program = fused(graph, settings, fusing, dump)
    program.left = left
    outputs, inputs = program.graph.outputs, program.graph.inputs
    owners = [owner_of(node) for node in nodes_in(outputs)]
    program.overwrites = {
        outputs[i]: inputs[k] for i, k in graph.overwrites.items()
        if type(outputs[i]) is Node and owners.count(owner_of(outputs[i])) == 1 and inputs[k] not in owners
    }  # fmt: skip
    begun = link(program, device, settings, dump)
    if kept is not None:
        return replace(begun, finish=partial(kept.keep, begun.finish))
    if not records.listening() or dump is NOWHERE:
        return begun
    run = begun.finish()
    tell(program, graph, device, dump, run)
    return Begun(lambda: run)


def begin_few(few: Few, begun: Begun) -> Begun:
    """The plan of a graph by that of few of its blocks; Uneven where its steps do not repeat."""
    if begun.made is None:
        raise Uneven
    made = few.whole(begun.made)

    def finish() -> Run:
        plan = begun.finish()
        whole = linked(made, plan.owner.code)
        whole.title = plan.title
        return whole

    return Begun(finish, begun.is_done, made)


def is_watched(dump: Dump) -> bool:
    """Whether somebody wants to see what the stages make of a graph: then they all run."""
    shown = any(map(log.wants, ("kernels", "llvm", "plan")))
    return shown or dump.folder is not None or records.listening()


def fused(graph: Graph, settings: Settings, fusing: Fusing, dump: Dump = NOWHERE) -> Program:
    """A graph of aten ops as a program, fused in one way."""
    given = revisable(graph, dump)
    given = sealed(given) if settings.exact else padded(grouped(given))
    also: dict[Any, Any] = FOR_LOOPS
    if not settings.exact and any(node.op in ATTENTION for node in given.nodes) and host().is_called_slowly:
        also = FOR_LOOPS | ATTENTION
    with records.timed("expand", dump.name, dump.half):
        prims = revisable(expand(given, "prims", also), dump, "prims")
        prims = joined_once(filled(merged(unstacked(prims))))
    if not settings.exact:
        prims = summed_up(by_onednn(with_biases_apart(with_epilogues(prims)), multiplies_in_place()))
    with records.timed("fuse", dump.name, dump.half):
        program = fuse(conformed(prims, graph.outputs), settings.exact, fusing)
    program.by_onednn = not settings.exact and available()
    for step in program.steps:
        if isinstance(step, Call):
            opened(step.node)
    dump.show("kernels", "loops", "txt", lambda: show_kernels(program.kernels))
    return program


#: For each device how its graphs are fused, and how a program becomes a function.
TARGETS: dict[str, tuple[Fusing, Link]] = {
    "cpu": (WAYS["usual"], on_cpu),
    "cuda": (Fusing(GRIDS), later("kiln.launch.gpu:on_gpu")),
}


def device_of(graph: Graph) -> torch.device | None:
    """The device that a graph's tensors are on; None where they are on a GPU and elsewhere."""
    found = {spec.device for spec in tensors([node.spec for node in (*graph.inputs, *graph.nodes)])}
    if not any(device.type == "cuda" for device in found):
        return torch.device("cpu")
    return found.pop() if len(found) == 1 else None


def few(node: Node) -> bool:
    """Whether a value is so short that a call of its own counts."""
    return math.prod(map(hinted, node.spec.shape)) <= SHORT


def conformed(graph: Graph, outputs: Sequence[Any]) -> Graph:
    """The graph with its outputs in the layouts of `outputs`: other graphs read them by those.

    An expansion gives a dense tensor where the op gave one with gaps, as a copy into a view does. What loops
    make without reading is copied, so that they do: eager's kernels are calls of their own.
    """
    made: list[Any] = []
    for mine, wanted in zip(graph.outputs, outputs, strict=True):
        own = type(mine) is Node and isinstance(mine.spec, TensorSpec)
        if own and (moved(mine.spec, wanted.spec) or not mine.inputs() and is_pointwise(mine) and few(mine)):
            mine = graph.call(aten.clone.default, (mine,), spec=replace(mine.spec, stride=wanted.spec.stride))
        made.append(mine)
    graph.outputs = type(graph.outputs)(made)
    return graph


def moved(spec: TensorSpec, wanted: TensorSpec) -> bool:
    """Whether elements lie at other places, each at one of its own."""
    if not supported(spec) or 0 in wanted.stride:
        return False
    return any(n != 1 and a != b for n, a, b in zip(spec.shape, spec.stride, wanted.stride, strict=True))
