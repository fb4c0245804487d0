"""`mode="max-autotune"` on a GPU: products with what follows of them in one kernel, where that is faster.

Each product whose result one nest alone reads, element by element, is timed as a call of the library and a
kernel, and as one kernel by Triton with several tiles. Winners are kept on disk as those of the CPU are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kiln.base import log, records
from kiln.base.dataclass import dataclass
from kiln.base.graph import Graph, Node, nodes_in, retarget
from kiln.base.progress import watched
from kiln.fuse.nest import Buffer
from kiln.fuse.program import Program
from kiln.fuse.steps import Call, Launch, Step
from kiln.generate.nvptx import Unsupported
from kiln.generate.product import HALVES, TILES, Product, Tile, source
from kiln.launch.cuda import Store
from kiln.launch.device import capability, plan_on
from kiln.launch.products import ENTRY, Template, triton
from kiln.launch.tune import GAIN, Run, example, fixed, key, settled

aten = torch.ops.aten
FORMAT, USUAL = "product 1", "usual"
ROUNDS, TURNS = 3, 20
#: Where the matrices stand among the arguments.
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}
LEAST = 1 << 24  # multiplications from which on a product is timed


@dataclass(frozen=True, eq=False, slots=True)
class Pair:
    """A product and the launch that alone reads it."""

    call: Call
    launch: Launch
    product: Product
    reads: dict[Buffer, Node]

    def step(self, tile: Tile, architecture: tuple[int, int]) -> Launch:
        template = Template(f"{self.launch.kernel.name}_product", (), self.product, tile, architecture)
        return Launch(template, self.reads, self.launch.writes, {})


def with_templates(program: Program, device: torch.device, store: Store | None, title: str) -> Program:
    """The program with products and what follows of them as one kernel, where that is faster."""
    pairs = found(program)
    if not pairs:
        return program
    if triton() is None:
        log.say("plan", "Triton is not installed: products stay calls of the library")
        return program
    architecture = capability(device)
    chosen: dict[str, str] = {}
    places = {pair: key(FORMAT, str(architecture), torch.__version__, described(pair)) for pair in pairs}
    missing: dict[str, Pair] = {}
    for pair, place in places.items():
        known = (store.get(place) or b"").decode(errors="replace") if store is not None else ""
        if known in (USUAL, *map(str, TILES)):
            chosen[place] = known
        else:
            missing[place] = pair
    for place in watched(list(missing), f"timing products of {title}"):
        chosen[place] = fastest(missing[place], device)
        if store is not None:
            store.put(place, chosen[place].encode())
    tiles = {str(tile): tile for tile in TILES}
    steps: dict[Step, Step | None] = {}
    for pair, place in places.items():
        if chosen[place] != USUAL:
            steps[pair.call] = None
            steps[pair.launch] = pair.step(tiles[chosen[place]], architecture)
    made = [steps.get(step, step) for step in program.steps]
    return Program(program.graph, [step for step in made if step is not None], program.overwrites)


def found(program: Program) -> list[Pair]:
    """The products that one launch alone reads, element by element."""
    readers: dict[Node, list[Step]] = {}
    for step in program.steps:
        for node in step.node.inputs() if isinstance(step, Call) else step.reads.values():
            readers.setdefault(node, []).append(step)
    shown = set(nodes_in(program.graph.outputs))
    pairs = []
    for step in program.steps:
        if isinstance(step, Call) and step.node.op in PRODUCTS and step.node not in shown:
            (launch, *more) = readers.get(step.node, [step])
            pair = None if more or not isinstance(launch, Launch) else paired(step, launch)
            pairs += [pair] if pair is not None else []
    return pairs


def paired(call: Call, launch: Launch) -> Pair | None:
    """A product with the launch that reads it, where both fit a template."""
    node, nests = call.node, launch.kernel.nests
    first = PRODUCTS[node.op]
    a, b = node.args[first : first + 2]
    bias = node.args[:first]
    specs = [n.spec for n in (a, b, *bias, node)]
    if len(nests) != 1 or nests[0].reduced or launch.scratch or node.kwargs or node.args[first + 2 :]:
        return None
    alike = all(settled(spec) and spec.dtype is node.spec.dtype in HALVES for spec in specs)
    if not alike or not fixed(launch):
        return None
    (m, k), n = a.spec.shape, b.spec.shape[1]
    if m * n * k < LEAST or max(m * n, m * k, k * n) >= 1 << 31:
        return None
    if k % max(tile.summed for tile in TILES) or nests[0].volume() != m * n:
        return None
    if any(1 not in x.spec.stride for x in (a, b)) or any(x.spec.shape != (n,) for x in bias):
        return None
    (result,) = [buffer for buffer, read in launch.reads.items() if read is node]
    operands = {Buffer(f"operand{i}", x.spec.dtype): x for i, x in enumerate((a, b, *bias))}
    product = Product((m, n, k), (a.spec.stride, b.spec.stride), tuple(operands), result, nests[0])
    try:
        source(product, TILES[0], ENTRY)
    except Unsupported:
        return None
    others = {buffer: read for buffer, read in launch.reads.items() if buffer is not result}
    return Pair(call, launch, product, {**operands, **others})


def described(pair: Pair) -> str:
    """What the choice depends on."""
    specs = [str((n.spec.dtype, n.spec.shape, n.spec.stride)) for n in pair.reads.values()]
    return "\n".join([str(pair.call.node.op), source(pair.product, TILES[0], ENTRY), *specs])


def fastest(pair: Pair, device: torch.device) -> str:
    """The name of the tile with which one kernel takes least time, or of the usual way."""
    architecture = capability(device)
    usual = alone(pair, None)
    values = [example(node.spec) for node in usual.graph.inputs]
    for value in values:
        value.normal_()
    runs: dict[str, Run] = {USUAL: plan_on(usual, device)}
    for tile in TILES:
        try:
            runs[str(tile)] = plan_on(alone(pair, pair.step(tile, architecture)), device)
            runs[str(tile)](list(values))
        except Exception as error:  # a tile that does not fit
            runs.pop(str(tile), None)
            log.say("plan", f"no product by tiles of {tile}: {type(error).__name__}: {error}"[:200])
    times = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name] = min(times[name], seconds(lambda run=run: run(list(values))))  # type: ignore[misc]
    best = min(times, key=times.__getitem__)
    records.emit(records.TunedRecord(pair.launch.kernel.name, len(times), times[USUAL], times[best], best))
    return best if times[best] <= GAIN * times[USUAL] else USUAL


def alone(pair: Pair, step: Launch | None) -> Program:
    """A program that does nothing but one product and what follows of it."""
    graph = Graph()
    nodes = {n: graph.input(n.name, n.spec) for n in dict.fromkeys(pair.reads.values())}
    steps: list[Step] = []
    if step is None:
        node = pair.call.node
        nodes[node] = graph.call(node.op, retarget(node.args, nodes), spec=node.spec)
        steps.append(Call(nodes[node]))
    launch = step or pair.launch
    writes = {b: graph.call(n.op, (), spec=n.spec) for b, n in launch.writes.items()}
    steps.append(Launch(launch.kernel, {b: nodes[n] for b, n in launch.reads.items()}, writes, {}))
    graph.outputs = tuple(writes.values())
    return Program(graph, steps)


def seconds(run: Callable[[], Sequence[Any]]) -> float:
    """The time of a call on the GPU, of several one after the other."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(TURNS):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / TURNS / 1e3
