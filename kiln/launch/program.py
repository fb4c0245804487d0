"""Programs that run: a fused graph as a function from the inputs' values to the outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kiln._launch import Kernel
from kiln.base.dump import NOWHERE, Dump
from kiln.base.fx import runner
from kiln.base.graph import CONSTANT, Graph, Node, TensorSpec, mapped
from kiln.base.options import Settings, config
from kiln.expand.edited import EditedFile, revisable
from kiln.expand.exact import opened, sealed
from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.nest import Nest, terms
from kiln.fuse.program import Program, fuse
from kiln.fuse.show import show_kernels, show_program
from kiln.fuse.split import CORES, GRIDS, Cuts
from kiln.fuse.steps import Call, Launch
from kiln.fuse.views import supported
from kiln.generate.code import Compiled, generate
from kiln.generate.cpu import assembly
from kiln.launch.cache import disk
from kiln.launch.device import linked as on_device
from kiln.launch.native import set_up

_empty = torch.empty_strided
aten = torch.ops.aten


GRAIN = 60_000.0  # operations worth a thread


def callable_kernel(
    compiled: Compiled, places: dict[Any, int], inputs: int, outputs: Sequence[TensorSpec]
) -> Kernel:
    """A kernel as a function from tensors to a tuple of new ones; see `_launch.c` for what it takes."""
    set_up()
    moving = is_moving(compiled, outputs)
    made = tuple([
        (None if moving else (spec.shape, spec.stride), {"dtype": spec.dtype, "device": spec.device})
        for spec in outputs
    ])  # fmt: skip
    return Kernel(
        stages_of(compiled, moving), compiled, _empty, made, compiled.kernel.name, inputs,
        tuple(places[buffer] for buffer in compiled.buffers), len(compiled.sizes), moving, GRAIN,
    )  # fmt: skip


def is_moving(compiled: Compiled, outputs: Sequence[TensorSpec]) -> bool:
    """Whether the sizes of a kernel vary from call to call."""
    numbers = [*compiled.tasks, *(n for spec in outputs for n in (*spec.shape, *spec.stride))]
    return bool(compiled.sizes) or not all(type(n) is int for n in numbers)


def stages_of(compiled: Compiled, moving: bool) -> tuple[tuple[int, int, float], ...]:
    """For each stage its address, tasks, and the operations of one task, by the sizes when traced."""
    made = []
    for nests, address, tasks in zip(compiled.kernel.stages, compiled.addresses, compiled.tasks, strict=True):
        count = max(float(getattr(tasks, "hint", tasks)), 1.0)
        made.append((address, 0 if moving else tasks, sum(map(work_of, nests)) / count))
    return tuple(made)


def work_of(nest: Nest) -> float:
    """The operations of a nest."""
    computed = terms(store.value for store in nest.stores)
    return nest.volume() * sum(COSTS.get(getattr(term, "op", ""), 1.0) for term in computed)


#: Operations that a function is worth, where it is more than one.
COSTS = {
    **dict.fromkeys(("exp", "log", "tanh", "erf", "sigmoid", "exp2", "expm1", "log1p", "log2"), 12.0),
    **dict.fromkeys(("sin", "cos", "tan", "pow", "atan2", "asin", "acos", "atan", "fmod", "remainder"), 30.0),
    **dict.fromkeys(("div", "sqrt", "rsqrt", "reciprocal"), 6.0),
}


def linked(program: Program, settings: Settings, dump: Dump = NOWHERE) -> Graph:
    """The program as a graph whose nodes are eager calls and kernels."""
    launches = [step for step in program.steps if isinstance(step, Launch)]
    store = disk(settings.cache_bytes)
    kernels = [launch.kernel for launch in launches]
    compiled = dict(zip(launches, generate(kernels, store, partial(revised, dump)), strict=True))
    dump.show("plan", "plan", "txt", lambda: show_program(program))
    graph, known = Graph(), dict[Node, Node]()
    for node in program.graph.inputs:
        known[node] = graph.input(node.name, node.spec)

    def value(leaf: Any) -> Any:
        return known[leaf] if type(leaf) is Node else leaf

    for node in program.graph.nodes:
        if node.op is CONSTANT:
            known[node] = graph.add(Node(CONSTANT, node.args, {}, node.spec, graph.name(node.name)))
    for step in program.steps:
        if isinstance(step, Launch):
            outputs = list(step.writes.values())
            inputs = list(step.reads.values())
            places = {b: i for i, b in enumerate([*step.reads, *step.writes, *step.scratch])}
            made = compiled[step]
            specs = [*[n.spec for n in outputs], *step.scratch.values()]
            call = callable_kernel(made, places, len(inputs), specs)
            arguments = tuple(known[n] for n in inputs)
            if is_moving(made, specs):
                layouts = [part for spec in specs for part in (spec.shape, spec.stride)]
                arguments = (*arguments, *layouts, *made.sizes, *made.tasks)
            whole = graph.call(call, arguments, spec=tuple(specs))
            for i, node in enumerate(outputs):
                known[node] = graph.call(operator.getitem, (whole, i), spec=node.spec, like=node)
        else:
            node = step.node
            known[node] = graph.add(
                Node(
                    node.op,
                    mapped(node.args, value),
                    mapped(node.kwargs, value),
                    node.spec,
                    graph.name(node.name),
                )
            )
    graph.outputs = mapped(program.graph.outputs, value)
    return graph.check()


def revised(dump: Dump, text: str) -> str:
    """The text of a module, shown, or the one of the edited file in its place."""
    revision = dump.revised("kernels", "kernels", "ll", lambda: text)
    if revision is not None:
        text = revision.text
    try:
        dump.show("", "kernels", "s", lambda: assembly(text))
    except RuntimeError as error:
        if revision is None:
            raise
        raise EditedFile(f"{revision.path}: {error}") from error
    return text


def compile_graph(
    graph: Graph, settings: Settings | None = None, dump: Dump = NOWHERE
) -> Callable[[list[Any]], Sequence[Any]]:
    """A graph of aten ops as native kernels and eager calls."""
    settings = settings or config.now
    device = device_of(graph)
    if device is None:
        return runner(graph)
    cuts, link = TARGETS[device.type]
    given = revisable(graph, dump)
    if settings.exact:
        given = sealed(given)
    prims = revisable(expand(given, "prims", FOR_LOOPS), dump, "prims")
    program = fuse(conformed(prims, graph.outputs), settings.exact, cuts)
    for step in program.steps:
        if isinstance(step, Call):
            opened(step.node)
    dump.show("loops", "loops", "txt", lambda: show_kernels(program.kernels))
    return runner(link(program, device, settings, dump))


#: For each device how folds are cut, and how a program becomes a graph of eager calls and callable kernels.
TARGETS: dict[str, tuple[Cuts, Callable[[Program, torch.device, Settings, Dump], Graph]]] = {
    "cpu": (CORES, lambda program, device, settings, dump: linked(program, settings, dump)),
    "cuda": (GRIDS, lambda program, device, settings, dump: on_device(program, device)),
}


def device_of(graph: Graph) -> torch.device | None:
    """The device that a graph's tensors are on; None where they are on a GPU and elsewhere."""
    specs = [spec for node in (*graph.inputs, *graph.nodes) for spec in specs_in(node.spec)]
    found = {spec.device for spec in specs}
    if not any(device.type == "cuda" for device in found):
        return torch.device("cpu")
    return found.pop() if len(found) == 1 else None


def specs_in(spec: Any) -> list[TensorSpec]:
    if isinstance(spec, (tuple, list)):
        return [one for part in spec for one in specs_in(part)]
    return [spec] if isinstance(spec, TensorSpec) else []


def conformed(graph: Graph, outputs: Sequence[Any]) -> Graph:
    """The graph with its outputs in the layouts of `outputs`: other graphs read them by those.

    An expansion gives a dense tensor where the op gave one with gaps, as a copy into a view does.
    """
    made: list[Any] = []
    for mine, wanted in zip(graph.outputs, outputs, strict=True):
        if type(mine) is Node and isinstance(mine.spec, TensorSpec) and moved(mine.spec, wanted.spec):
            mine = graph.call(aten.clone.default, (mine,), spec=replace(mine.spec, stride=wanted.spec.stride))
        made.append(mine)
    graph.outputs = type(graph.outputs)(made)
    return graph


def moved(spec: TensorSpec, wanted: TensorSpec) -> bool:
    """Whether elements lie at other places, each at one of its own."""
    if not supported(spec) or 0 in wanted.stride:
        return False
    return any(n != 1 and a != b for n, a, b in zip(spec.shape, spec.stride, wanted.stride, strict=True))
