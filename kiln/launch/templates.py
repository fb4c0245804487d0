"""`mode="max-autotune"` on a GPU: products with what is around them in one kernel, where that is faster.

Each product whose result one nest alone reads, element by element, or of which a nest makes a matrix that
nothing else reads, is timed as a call of the library and kernels, and as one kernel by Triton with several
tiles: with what follows, with what comes before, and with both. Winners are kept on disk as those of the CPU
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kiln.base import log, records
from kiln.base.dataclass import dataclass
from kiln.base.graph import Graph, Node, TensorSpec, nodes_in, retarget
from kiln.base.progress import watched
from kiln.expand.products import PRODUCTS
from kiln.fuse.lower import HALVES
from kiln.fuse.nest import Buffer
from kiln.fuse.program import Program
from kiln.fuse.repeats import nodes_of
from kiln.fuse.steps import Call, Launch, Step
from kiln.fuse.views import is_view
from kiln.generate.nvptx import Unsupported
from kiln.generate.product import TILES, Product, Tile, copying, source
from kiln.launch.cuda import Store
from kiln.launch.device import capability, plan_on
from kiln.launch.products import ENTRY, Template, triton
from kiln.launch.tune import GAIN, Run, example, fixed, key, settled

FORMAT, USUAL = "product 2", "usual"
ROUNDS, TURNS = 3, 20
LEAST = 1 << 24  # multiplications from which on a product is timed


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """A product as one kernel: what it reads and writes, and the steps that it takes the place of."""

    product: Product
    reads: dict[Buffer, Node]
    writes: dict[Buffer, Node]
    covers: tuple[Step, ...]

    def step(self, tile: Tile, architecture: tuple[int, int]) -> Launch:
        template = Template("k_product", (), self.product, tile, architecture)
        return Launch(template, self.reads, self.writes, {})


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """A product with what is around it: the steps in order, and the forms that they may take, by name."""

    call: Call
    steps: tuple[Step, ...]
    forms: dict[str, Form]

    def named(self) -> dict[str, tuple[Form, Tile]]:
        return {f"{name} {tile}": (form, tile) for name, form in self.forms.items() for tile in TILES}


def with_templates(program: Program, device: torch.device, store: Store | None, title: str) -> Program:
    """The program with products and what follows of them as one kernel, where that is faster."""
    sites = found(program)
    if not sites:
        return program
    if triton() is None:
        log.say("plan", "Triton is not installed: products stay calls of the library")
        return program
    architecture = capability(device)
    chosen: dict[str, str] = {}
    places = {site: key(FORMAT, str(architecture), torch.__version__, described(site)) for site in sites}
    missing: dict[str, Site] = {}
    for site, place in places.items():
        known = (store.get(place) or b"").decode(errors="replace") if store is not None else ""
        if known in (USUAL, *site.named()):
            chosen[place] = known
        else:
            missing[place] = site
    for place in watched(list(missing), f"timing products of {title}"):
        chosen[place] = fastest(missing[place], device)
        if store is not None:
            store.put(place, chosen[place].encode())
    steps: dict[Step, Step | None] = {}
    for site, place in places.items():
        form, tile = site.named().get(chosen[place], (None, None))
        if form is not None and tile is not None and steps.keys().isdisjoint(form.covers):
            steps.update(dict.fromkeys(form.covers))
            steps[form.covers[-1]] = form.step(tile, architecture)
    made = [steps.get(step, step) for step in program.steps]
    return Program(program.graph, [step for step in made if step is not None], program.overwrites)


def found(program: Program) -> list[Site]:
    """The products that one launch alone reads, element by element, or whose matrices one makes for them."""
    readers: dict[Node, list[Step]] = {}
    makers: dict[Node, Step] = {}
    for step in program.steps:
        made, reads = nodes_of(step)
        for node in reads:
            readers.setdefault(node, []).append(step)
        makers.update(dict.fromkeys(made, step))
    shown = set(nodes_in(program.graph.outputs))

    def only_reader(node: Node) -> Step | None:
        steps = readers.get(node, [])
        return steps[0] if len(steps) == 1 and node not in shown else None

    def made_by(node: Node) -> tuple[Step, ...]:
        """The launch that makes a matrix, and the views on the way to it; nothing where others read them."""
        views: list[Step] = []
        while (step := makers.get(node)) is not None and only_reader(node) is not None:
            if isinstance(step, Launch):
                return (step, *reversed(views))
            if not is_view(step.node):
                break
            views.append(step)
            node = step.node.args[0]
        return ()

    sites = [
        site_of(step, only_reader(step.node), made_by)
        for step in program.steps
        if isinstance(step, Call) and step.node.op in PRODUCTS
    ]
    return [site for site in sites if site.forms]


def site_of(call: Call, after: Step | None, made_by: Callable[[Node], tuple[Step, ...]]) -> Site:
    """A product with the forms that it may take."""
    node = call.node
    first = PRODUCTS[node.op]
    site = Site(call, (call,), {})
    a, b = node.args[first : first + 2]
    bias = node.args[:first]
    specs = [n.spec for n in (a, b, *bias, node)]
    if node.kwargs or node.args[first + 2 :]:
        return site
    if not all(settled(spec) and spec.dtype is node.spec.dtype in HALVES for spec in specs):
        return site
    (m, k), n = a.spec.shape, b.spec.shape[1]
    if m * n * k < LEAST or max(m * n, m * k, k * n) >= 1 << 31 or k % max(tile.summed for tile in TILES):
        return site
    if any(1 not in x.spec.stride for x in (a, b)) or any(x.spec.shape != (n,) for x in bias):
        return site
    operands = {Buffer(f"operand{i}", x.spec.dtype): x for i, x in enumerate((a, b, *bias))}
    makers: dict[Buffer, tuple[Step, ...]] = {}
    for buffer, x in list(operands.items())[:2]:
        steps = made_by(x) if a is not b and lies_whole(x.spec) else ()
        if steps and is_elementwise(steps[0], m * k if x is a else k * n):
            makers[buffer] = steps
    follows = isinstance(after, Launch) and is_elementwise(after, m * n)
    before = tuple(dict.fromkeys(step for steps in makers.values() for step in steps))
    site = Site(call, (*before, call, *([after] if after is not None and follows else [])), {})
    for name, made, reader in (("after", {}, after), ("before", makers, None), ("both", makers, after)):
        if (name == "after" or made) and (name == "before" or follows):
            form = form_of(call, (m, n, k), operands, made, reader)
            site.forms.update({} if form is None else {name: form})
    return site


def is_elementwise(step: Step, volume: int) -> bool:
    """Whether a step is a kernel of one nest without folds, of known sizes, over so many elements."""
    if not isinstance(step, Launch) or step.scratch or len(step.kernel.nests) != 1 or not fixed(step):
        return False
    (nest,) = step.kernel.nests
    return not nest.reduced and not nest.ordered and nest.part is None and nest.volume() == volume


def lies_whole(spec: TensorSpec) -> bool:
    """Whether a matrix lies row after row, or column after column, without gaps, where memory starts."""
    rows, columns = spec.shape
    return spec.offset == 0 and spec.stride in ((columns, 1), (1, rows))


def form_of(
    call: Call,
    sizes: tuple[int, int, int],
    operands: dict[Buffer, Node],
    makers: dict[Buffer, tuple[Step, ...]],
    after: Any,
) -> Form | None:
    """A product with nests that make its matrices, and the one that reads it, as one kernel."""
    node = call.node
    first = {buffer: steps[0] for buffer, steps in makers.items() if isinstance(steps[0], Launch)}
    nests = {buffer: launch.kernel.nests[0] for buffer, launch in first.items()}
    if any(len(nest.stores) != 1 for nest in nests.values()):
        return None
    if after is None:
        result, written = Buffer("sums", torch.float32), Buffer("product", node.spec.dtype)
        nest, reads, writes = copying(*sizes[:2], result, written), {}, {written: node}
    else:
        (result,) = [buffer for buffer, read in after.reads.items() if read is node]
        nest, writes = after.kernel.nests[0], after.writes
        reads = {buffer: read for buffer, read in after.reads.items() if buffer is not result}
    strides = tuple([operand.spec.stride for operand in list(operands.values())[:2]])
    product = Product(sizes, strides, tuple(operands), result, nest, nests)
    try:
        source(product, TILES[0], ENTRY)
    except Unsupported:
        return None
    given = {buffer: read for buffer, read in operands.items() if buffer not in makers}
    parts = [given, *[launch.reads for launch in first.values()], reads, writes]
    if len({buffer for part in parts for buffer in part}) < sum(map(len, parts)):
        return None  # launches of one kernel share its buffers
    steps = dict.fromkeys(step for made in makers.values() for step in made)
    covers = (*steps, call, *([] if after is None else [after]))
    every = {buffer: read for part in parts[:-1] for buffer, read in part.items()}
    return Form(product, every, writes, covers)


def described(site: Site) -> str:
    """What the choice depends on."""
    forms = [f"{name}\n{source(form.product, TILES[0], ENTRY)}" for name, form in site.forms.items()]
    nodes = dict.fromkeys(n for form in site.forms.values() for n in form.reads.values())
    specs = [str((n.spec.dtype, n.spec.shape, n.spec.stride)) for n in nodes]
    return "\n".join([str(site.call.node.op), *forms, *specs])


def fastest(site: Site, device: torch.device) -> str:
    """The name of the form and tile with which one kernel takes least time, or of the usual way."""
    architecture = capability(device)
    usual = alone(site, site.steps)
    values = [example(node.spec) for node in usual.graph.inputs]
    for value in values:
        value.normal_()
    runs: dict[str, Run] = {USUAL: plan_on(usual, device)()}
    for name, (form, tile) in site.named().items():
        try:
            rest = [step for step in site.steps if step not in form.covers]
            at = 0 if form.covers[0] is site.steps[0] else len(rest)
            rest.insert(at, form.step(tile, architecture))
            runs[name] = plan_on(alone(site, rest), device)()
            runs[name](list(values))
        except Exception as error:  # a tile that does not fit
            runs.pop(name, None)
            log.say("plan", f"no product by tiles of {name}: {type(error).__name__}: {error}"[:200])
    times = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name] = min(times[name], seconds(lambda run=run: run(list(values))))  # type: ignore[misc]
    best = min(times, key=times.__getitem__)
    records.emit(records.TunedRecord(site.call.node.name, len(times), times[USUAL], times[best], best))
    return best if times[best] <= GAIN * times[USUAL] else USUAL


def alone(site: Site, steps: Sequence[Step]) -> Program:
    """A program that does nothing but one product and what is around it, by these steps.

    Its inputs are those of the steps that the site has, whatever is done.
    """
    graph = Graph()
    made = {node for step in site.steps for node in nodes_of(step)[0]}
    given = [node for step in site.steps for node in nodes_of(step)[1] if node not in made]
    nodes = {node: graph.input(node.name, node.spec) for node in dict.fromkeys(given)}
    copies: list[Step] = []
    for step in steps:
        if isinstance(step, Call):
            node = step.node
            args, kwargs = retarget(node.args, nodes), retarget(node.kwargs, nodes)
            nodes[node] = graph.call(node.op, args, kwargs, node.spec)
            copies.append(Call(nodes[node]))
        else:
            nodes.update({n: graph.call(n.op, (), spec=n.spec) for n in step.writes.values()})
            reads, writes = ({b: nodes[n] for b, n in part.items()} for part in (step.reads, step.writes))
            copies.append(Launch(step.kernel, reads, writes, {}))
    graph.outputs = tuple([nodes[n] for n in nodes_of(site.steps[-1])[0]])
    return Program(graph, copies)


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
