"""What a program tells: its kernels with what is fused in them, its steps, and the memory that they need."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from kiln._launch import Plan
from kiln.base import records
from kiln.base.dump import Dump
from kiln.base.expressions import hinted
from kiln.base.graph import CONSTANT, INPUT, Graph, Node, call_text, label, nodes_in, show_spec, tensors
from kiln.base.places import origin_of, places_of, user_place
from kiln.base.records import Fused, KernelRecord, Lodged, PlanRecord, Step, Value, ValuesRecord
from kiln.fuse.folds import folded_dims
from kiln.fuse.program import Program
from kiln.fuse.repeats import nodes_of
from kiln.fuse.show import show_kernel
from kiln.fuse.steps import Launch
from kiln.fuse.views import is_view
from kiln.generate.device import generate
from kiln.generate.nvptx import WAITING
from kiln.launch.device import capability
from kiln.launch.memory import size_of
from kiln.launch.shims import shim_of
from kiln.launch.shown import ahead_of
from kiln.launch.sources import computed_in
from kiln.ops.aliases import base_of


def tell(program: Program, graph: Graph, device: torch.device, dump: Dump, run: Any) -> None:
    """Leave the records of a program, of the graph of aten ops that it computes, and of what runs it."""
    launches = [step for step in program.steps if isinstance(step, Launch)]
    often = Counter(step.kernel for step in launches)
    functions = dict(zip(program.kernels, functions_of(program, device, dump, run), strict=True))
    names: dict[Any, str] = {}
    for step in launches:
        if step.kernel in names:
            continue
        taken = step.kernel.name in names.values()
        names[step.kernel] = name = f"{step.kernel.name}.{len(names)}" if taken else step.kernel.name
        reads = sum(map(nbytes, dict.fromkeys(step.reads.values())))
        records.emit(KernelRecord(
            dump.name, dump.half, name, show_kernel(step.kernel), tuple(fused_in(step)), reads,
            sum(map(nbytes, step.writes.values())), device.type, often[step.kernel], functions[step.kernel],
        ))  # fmt: skip
    arena = run.owner.numbers[-1] if isinstance(run, Plan) else 0
    steps = tuple(steps_of(program, names))
    records.emit(PlanRecord(dump.name, dump.half, steps, arena or 0, tuple(held_by(graph))))
    lodged = [Lodged(one.name, hinted(one.size), one.offset, one.first, one.last)
              for one in (run.owner.lodgings if isinstance(run, Plan) else ())]  # fmt: skip
    records.emit(ValuesRecord(dump.name, dump.half, tuple(values_of(program)), tuple(lodged)))


def functions_of(
    program: Program, device: torch.device, dump: Dump, run: Any
) -> Sequence[tuple[str, ...]]:
    """For each launch the names of its functions in the text of the half's code."""
    if device.type != "cuda":
        steps = run.owner.steps if isinstance(run, Plan) else ()
        found = [tuple([name for name, *_ in step[1]]) for step in steps if step[0] == "launch"]
        return found or [()] * len(program.kernels)
    made = generate(program.kernels, clusters=capability(device) >= WAITING)
    dump.show("llvm", "kernels", "ptx", lambda: made.ptx(capability(device)))
    return [tuple(dict.fromkeys(start.function.name for start in starts)) for starts in made.starts]


def values_of(program: Program) -> Iterable[Value]:
    """The values of a program, each with the step that stores it, or else the first that computes it."""
    steps = {node: i for i, step in enumerate(program.steps) for node in nodes_of(step)[0]}
    for i, step in enumerate(program.steps):
        for node in computed_in(step) if isinstance(step, Launch) else ():
            steps.setdefault(node, i)
    graph = program.graph
    for node in (*graph.inputs, *graph.nodes):
        reads = tuple(dict.fromkeys(one.name for one in node.inputs()))
        spec = show_spec(node.spec)
        called = node in steps and not isinstance(program.steps[steps[node]], Launch)
        text = "" if node.op is INPUT or node.op is CONSTANT else call_text(node)
        yield Value(
            node.name, label(node.op), kind_of(node, called), reads, spec, origin_of(node.where),
            steps.get(node, -1), text,
        )  # fmt: skip
    outputs = tuple(dict.fromkeys(node.name for node in nodes_in(graph.outputs)))
    yield Value("output", "output", "output", outputs)


def kind_of(node: Node, called: bool) -> str:
    """What a value is to a person who looks at a graph."""
    if node.op is INPUT or node.op is CONSTANT:
        return str(node.op)
    if is_view(node) or node.op is operator.getitem:
        return "view"
    if called:
        return "call"
    return "pointwise" if folded_dims(node) is None else "reduction"


def fused_in(launch: Launch) -> Iterable[Fused]:
    """The operations between what a kernel reads and what it writes; those of one captured op as one."""
    told: dict[Any, Fused] = {}
    for node in computed_in(launch):
        one = fused(node)
        told.setdefault(one.origin or (one.op, one.place), one)
    return told.values()


def fused(node: Node) -> Fused:
    """A node as part of a kernel, with the name of the captured op that it comes from."""
    return Fused(label(node.op), origin_of(node.where), user_place(places_of(node.where)))


def steps_of(program: Program, names: dict[Any, str]) -> Iterable[Step]:
    """The steps of a program, each with the bytes that are alive after it."""
    done = [Made(*nodes_of(step), isinstance(step, Launch)) for step in program.steps]
    for step, size in zip(program.steps, alive(done, program.graph.outputs), strict=True):
        if isinstance(step, Launch):
            origins = tuple([one.origin for one in fused_in(step) if one.origin])
            yield Step("kernel", names[step.kernel], bytes=size, origins=origins)
            continue
        one = fused(step.node)
        yield Step(call_kind(step.node), one.op, one.origin, one.place, size)


def call_kind(node: Node) -> str:
    if shown_by(node) is not None and ahead_of(node) is not None:
        return "view"
    return "native" if shim_of(node) is not None else "python"


def held_by(graph: Graph) -> list[int]:
    """The bytes that are alive after each op when a graph runs op by op."""
    nodes = [node for node in graph.nodes if node.op is not CONSTANT]
    return alive([Made([node], node.inputs()) for node in nodes], graph.outputs)


class Made(NamedTuple):
    """What a step makes and reads, and whether it may write a value over one that it reads last."""

    values: Sequence[Node]
    reads: Sequence[Node]
    replaces: bool = False


def alive(steps: Sequence[Made], outputs: Any) -> list[int]:
    """The bytes alive during each of some steps, beside the inputs."""
    owners: dict[Node, Node] = {}

    def owner(node: Node) -> Node:
        while node in owners:
            node = owners[node]
        return node

    last: dict[Node, int] = {}
    for i, (made, read, _) in enumerate(steps):
        for node in made:
            base = shown_by(node)
            if base is not None:
                owners[node] = base
        last.update(dict.fromkeys(map(owner, (*made, *read)), i))
    last.update(dict.fromkeys(map(owner, nodes_in(outputs)), len(steps)))
    ours = {node for step in steps for node in step.values if node not in owners}
    sizes, now = list[int](), 0
    for i, (made, read, replaces) in enumerate(steps):
        new = Counter(nbytes(node) for node in made if node in ours)
        ending = {owner(node) for node in (*made, *read)}
        gone = Counter(nbytes(one) for one in ending if last[one] == i and one in ours)
        now += total(new)
        sizes.append(now - (total(new & gone) if replaces else 0))
        now -= total(gone)
    return sizes


def total(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())


def shown_by(node: Node) -> Node | None:
    """The value in whose memory another lies."""
    known = isinstance(node.op, torch._ops.OpOverload)
    base = base_of(node.op, node.args, node.kwargs, 0) if known else None
    base = node.args[0] if node.op is operator.getitem else base
    return base if type(base) is Node else None


def nbytes(node: Node) -> int:
    """The bytes of a value, by the sizes when traced."""
    return sum(hinted(size_of(spec)) for spec in tensors((node.spec,)))
