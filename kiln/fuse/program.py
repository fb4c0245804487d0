"""Programs: what a graph became, kernels and calls of eager kernels in order."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import field, replace
from itertools import chain
from typing import TypeAlias

import torch

from kiln.base.dataclass import dataclass
from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec, nodes_in, reached
from kiln.fuse.aligned import Aligning, apart
from kiln.fuse.coalesce import LARGEST
from kiln.fuse.costs import bytes_of
from kiln.fuse.group import Fuser
from kiln.fuse.merge import merged, rewritten
from kiln.fuse.moments import in_one_pass
from kiln.fuse.neighbours import sums_at_once
from kiln.fuse.nest import Buffer, Kernel, Load, Nest, Store, terms
from kiln.fuse.ordered import Update, nests_of
from kiln.fuse.pairs import copies, in_pairs, with_fold
from kiln.fuse.parts import fuse_parts
from kiln.fuse.peel import peeled
from kiln.fuse.reading import Group, Groups
from kiln.fuse.repeats import chain_of, fuse_repeats, nodes_of
from kiln.fuse.split import CORES, Cuts, Split, split
from kiln.fuse.stages import SHORT, Batch
from kiln.fuse.steps import Call, Launch, Step
from kiln.fuse.strips import with_sums
from kiln.fuse.sums import sums_first
from kiln.fuse.turns import in_turns
from kiln.fuse.updates import updated
from kiln.fuse.views import is_map, place_of

#: Steps back that loops over the same rows are looked for.
FAR = 8
#: Single numbers that are worth a kernel of their own before all others.
FEWEST = 4
#: Bytes of memory that are worth another order of steps.
MUCH = 4 << 10


Uses: TypeAlias = tuple[list[Node], list[Node]]
"""What a step reads and what it makes."""


@dataclass(slots=True)
class Program:
    """What a graph became: steps in order, over the graph's inputs and outputs.

    `overwrites` gives for outputs the inputs in whose memory they may be written, once that is not read.
    `left` are the bytes of more outputs, those of blocks for which its steps are repeated. `by_onednn` says
    whether large products may be its own.
    """

    graph: Graph
    steps: list[Step]
    overwrites: dict[Node, Node] = field(default_factory=dict)
    left: int = 0
    by_onednn: bool = False

    @property
    def kernels(self) -> list[Kernel]:
        return [step.kernel for step in self.steps if isinstance(step, Launch)]


@dataclass(frozen=True, slots=True)
class Fusing:
    """How a target fuses: how it cuts folds, and how many nodes groups may have that become one."""

    cuts: Cuts = CORES
    largest: int = LARGEST


#: Other ways for the CPU than the usual one, which is the first.
WAYS = {
    "usual": Fusing(),
    "apart": Fusing(largest=0),
    "finer": Fusing(replace(CORES, part=CORES.part >> 2)),
    "coarser": Fusing(replace(CORES, part=CORES.part << 2)),
}


def fuse(graph: Graph, exact: bool = False, fusing: Fusing = WAYS["usual"]) -> Program:
    """Kernels and calls of eager kernels that compute a graph of primitives.

    Where results must be `exact`, every function rounds its result to its dtype.
    """
    cuts = fusing.cuts
    graph = updated(graph, exact, cuts.runs)

    def steps_of(part: Graph) -> list[Step]:
        return Finishing(Fuser(part, exact, fusing.largest, cuts.runs, cuts.anew).run(), cuts).steps()

    steps = fuse_parts(graph, steps_of)
    if steps is None:
        steps = fuse_repeats(graph, steps_of)
    if cuts.at_once:
        steps = small_first(steps, set(nodes_in(graph.outputs)))
    else:
        steps = in_turns(steps, graph.outputs)
    return Program(graph, with_views(graph, steps))


def small_first(steps: list[Step], outputs: set[Node]) -> list[Step]:
    """The steps with what little follows from inputs alone, as counters of calls, in a first kernel."""
    reads, writes, known = dict[Buffer, Node](), dict[Buffer, Node](), dict[Node, Buffer]()
    nests, others = list[Nest](), list[Step]()
    for step in steps:
        rest: Step | None = step
        if isinstance(step, Launch) and step.kernel.nests:
            early = [nest for nest in step.kernel.stages[0] if is_early(nest, step, outputs)]
            for nest in early:  # launches of repeated blocks share buffers: each node gets one of its own
                read, written = nest.buffers()
                owners = {**{b: step.reads[b] for b in read}, **{b: step.writes[b] for b in written}}
                own = {b: known.setdefault(n, Buffer(b.name, b.dtype)) for b, n in owners.items()}
                reads.update((own[b], owners[b]) for b in read)
                writes.update((own[b], owners[b]) for b in written)
                stores = rewritten(nest.stores, lambda index: index, own)
                nests.append(replace(nest, stores=stores, like=None))
            rest = without(step, early) if early else step
        others += [rest] if rest is not None else []
    if len(nests) < FEWEST:
        return steps
    return [Launch(Kernel("k_first", (tuple(nests),)), reads, writes, {}), *others]


def is_early(nest: Nest, step: Launch, outputs: set[Node]) -> bool:
    """Whether a nest makes single numbers, or a few that are no outputs, of inputs."""
    read, written = nest.buffers()
    if nest.axes and (nest.volume() > SHORT or any(step.writes.get(b) in outputs for b in written)):
        return False
    given = all(b in step.reads and step.reads[b].op is INPUT for b in read)
    return given and all(b in step.writes for b in written)


def without(step: Launch, nests: list[Nest]) -> Launch | None:
    """A step without some nests of its first stage."""
    first, *later = step.kernel.stages
    stages = [tuple([nest for nest in first if nest not in nests]), *later]
    kernel = Kernel(step.kernel.name, tuple([stage for stage in stages if stage]))
    read, written = kernel.buffers()
    if not kernel.stages:
        return None
    kept = {b: step.writes[b] for b in written if b in step.writes}
    owners = {**step.writes, **step.reads}
    return Launch(kernel, {b: owners[b] for b in read}, kept, step.scratch)


def with_views(graph: Graph, steps: list[Step]) -> list[Step]:
    """The steps and what outputs alone need: views, after what they show, and values without inputs."""
    made = [nodes_of(step)[0] for step in steps]
    stored = {node for nodes in made for node in nodes}
    shown: dict[Node, Node] = {}
    for out in nodes_in(graph.outputs):
        root: Node | None = None
        for node in reversed(chain_of(out)):
            if node in stored:
                root = node
            elif node.op is not CONSTANT:
                shown[node] = root = root or node
    left: dict[Node, list[Step]] = {}
    for node in graph.nodes if shown else ():
        if node in shown:
            left.setdefault(shown[node], []).append(Call(node))
    listed: list[Step] = []
    for step, nodes in zip(steps, made, strict=True):
        listed.append(step)
        for node in nodes:
            listed += left.pop(node, ())
    return [*listed, *[call for calls in left.values() for call in calls]]


def much(left: Counter[int], new: Counter[int]) -> bool:
    """Whether much could go before as much is made, of other sizes: what has the same takes its place."""
    return min(sum((a - b).elements()) for a, b in ((left, new), (new, left))) >= MUCH


def viewed(node: Node) -> tuple[Node, ...]:
    """What a view shows; nothing for other values."""
    return node.args[:1] if is_map(node) else ()


def is_plain(node: Node) -> bool:
    """Whether a call does nothing but to give its result."""
    op = node.op
    if isinstance(op, torch._ops.OpOverload):
        return op.namespace == "aten" and not op._schema.is_mutable
    return op is operator.getitem


class Finishing:
    """From groups to steps; a member is stored when an output, an eager kernel or another group reads it."""

    def __init__(self, groups: Groups, cuts: Cuts) -> None:
        self.groups, self.cuts = groups, cuts
        self.last: tuple[Split | Call, Nest] | None = None  # the last step that a nest became
        self.needed = self.stored()
        # Views, and values without inputs, are made by their own ops where something reads them as a whole.
        pending = self.needed_views() | (groups.free & self.needed)
        self.pending = {n: i for i, n in enumerate(groups.graph.nodes) if n in pending}

    def steps(self) -> list[Step]:
        groups = self.groups
        steps: list[Split | Call] = [Call(n) for n in groups.early]
        for item in groups.items:
            if isinstance(item, Node):
                steps += self.ready_views(item.inputs())
                steps.append(Call(item))
                continue
            if isinstance(item, Update):
                nests = [merged(nest, groups.scope) for nest in nests_of(groups, item)]
                steps += self.ready_views(self.owner(b) for nest in nests for b in nest.buffers()[0])
                steps.append(Split(nests))
                continue
            nest = merged(self.cuts.ordered(self.nest(item)), groups.scope)
            if nest.stores:
                steps += self.ready_views(map(self.owner, nest.buffers()[0]))
                for part in [nest] if self.cuts.at_once else sums_first(nest, groups, item.position):
                    self.finish(steps, part, f"k{item.position}")
        return self.launched(steps)

    def finish(self, steps: list[Split | Call], nest: Nest, name: str) -> None:
        """Add the steps for a nest: the nest itself, parts of it, or more in a step before it."""
        scope = self.groups.scope
        if self.joined(steps, nest, name):
            return
        parts = peeled(nest, scope) if self.cuts.borders else [nest]
        if len(parts) > 1:
            steps.append(Split(parts))
            return
        if self.cuts.at_once:
            aligning = Aligning(scope, lambda buffer: self.owner(buffer).spec)
            nests = [one for part in apart(nest, scope) for one in aligning.run(in_one_pass(part, self.cuts))]
            nests = [sums_at_once(one, scope) for one in nests]
        else:
            nests = [in_one_pass(nest, self.cuts)]
        for number, one in enumerate(nests):
            part = f"{name}_{number}" if number else name
            found = in_pairs(one, scope, part, self.cuts) if copies(one) else None
            steps.append(found or split(one, scope, part, self.cuts))
        self.last = (steps[-1], nests[-1])

    def joined(self, steps: list[Split | Call], nest: Nest, name: str) -> bool:
        """Whether a sum of columns went to the loops over the same rows, or such loops to one before them."""
        if self.last is not None and steps[-1] is self.last[0]:
            found = with_sums(Split([nest]), self.last[1], self.groups.scope, name, self.cuts)
            if found is not None:
                steps[-1] = found
                return True
        reads, made = set(map(self.owner, nest.buffers()[0])), set[Node]()
        for place in range(len(steps) - 1, max(len(steps) - 1 - FAR, -1), -1):
            step = steps[place]
            if isinstance(step, Call):
                made.add(step.node)
                continue
            if any(n in made or made.intersection(n.inputs()) for n in reads):
                return False
            found = with_sums(step, nest, self.groups.scope, name, self.cuts)
            found = found or with_fold(step, nest, self.groups.scope, name, self.cuts)
            if found is not None:
                steps[place] = found
                return True
            written = {b for n in step.nests for b in n.buffers()[1] if b not in step.scratch}
            made.update(map(self.owner, written))
        return False

    def launched(self, steps: list[Split | Call]) -> list[Step]:
        """The steps with nests that follow each other as few kernels."""
        made: list[Step] = []
        batch, scratch, left = Batch(), dict[Buffer, TensorSpec](), Counter[int]()
        uses = [] if self.cuts.at_once else list(map(self.touched, steps))
        if uses:
            order = self.early(steps, uses)
            steps, uses = [steps[i] for i in order], [uses[i] for i in order]
        ends: list[list[int]] = [[] for _ in steps]
        for node, i in self.last_uses(uses).items():
            ends[i].append(bytes_of([node]))

        def close() -> None:
            nonlocal batch, scratch
            if batch.stages:
                kernel = batch.kernel(f"k{len(made)}")
                reads, writes = kernel.buffers()
                owned = {b: self.owner(b) for b in writes if b not in scratch}
                made.append(Launch(kernel, {b: self.owner(b) for b in reads}, owned, scratch))
            batch, scratch = Batch(), {}
            left.clear()

        for i, step in enumerate(steps):
            if isinstance(step, Call):
                close()
                made.append(step)
                continue
            new = Counter([bytes_of([n]) for n in uses[i][1]]) if left else left
            if much(left, new) or not batch.takes(step.nests):
                close()
                batch.takes(step.nests)
            scratch.update(step.scratch)
            left.update(ends[i])
        close()
        return made

    def early(self, steps: list[Split | Call], uses: list[Uses]) -> list[int]:
        """The places of the steps, loops after which much memory can go as soon as what they read is made.

        They come after the others that read what goes. What other code may do is done when it was to be.
        """
        root, last = self.groups.root, self.last_uses(uses)
        made: dict[Node, int] = {}
        used: dict[Node, int] = {}
        places: list[int] = []
        fixed = -1
        for i, (step, (reads, writes)) in enumerate(zip(steps, uses, strict=True)):
            place = i
            if isinstance(step, Call):
                fixed = fixed if is_plain(step.node) else i
            else:
                going = [n for n in dict.fromkeys(map(root, reads)) if last.get(n) == i]
                if going and bytes_of(going) - bytes_of(writes) >= MUCH:
                    place = max(fixed, *[made.get(n, -1) for read in reads for n in (read, root(read))])
                    place = max(place, *[used.get(n, -1) for n in going])
            places.append(place)
            made.update(dict.fromkeys(writes, place))
            for n in map(root, reads):
                used[n] = max(used.get(n, -1), place)
        return sorted(range(len(steps)), key=lambda i: (places[i], i))

    def last_uses(self, uses: list[Uses]) -> dict[Node, int]:
        """The last step that reads or makes a value which goes then: neither an input nor an output."""
        used = {self.groups.root(n): i for i, nodes in enumerate(uses) for n in chain(*nodes)}
        for node in self.groups.outputs:
            used.pop(node, None)
        made = ((n, i) for n, i in used.items() if n.op is not INPUT and n.op is not CONSTANT)
        return {n: i for n, i in made if isinstance(n.spec, TensorSpec)}

    def touched(self, step: Split | Call) -> Uses:
        """What a step reads and what it makes."""
        if isinstance(step, Call):
            return [*step.node.inputs()], [step.node]
        used = [nest.buffers() for nest in step.nests]
        writes = {b: None for _, written in used for b in written if b not in step.scratch}
        reads = {b: None for read, _ in used for b in read if b not in writes and b not in step.scratch}
        return list(map(self.owner, reads)), list(map(self.owner, writes))

    def owner(self, buffer: Buffer) -> Node:
        return self.groups.owners[buffer]

    def ready_views(self, nodes: Iterable[Node]) -> list[Call]:
        """The views and values without inputs that a step needs and that have not been made yet."""
        wanted = reached(nodes, viewed)
        found = sorted((n for n in wanted if n in self.pending), key=self.pending.__getitem__)
        for n in found:
            del self.pending[n]
        return [Call(n) for n in found]

    def needed_views(self) -> set[Node]:
        """Views that an output or an eager kernel reads, with the views below them."""
        roots = [*nodes_in(self.groups.graph.outputs), *self.groups.read_whole]
        return set(filter(is_map, reached(roots, viewed)))

    def stored(self) -> set[Node]:
        """The members of groups that need memory."""
        groups = self.groups
        needed = {groups.root(n) for n in (*nodes_in(groups.graph.outputs), *groups.read_whole)}
        for item in reversed(groups.items):
            if isinstance(item, Group):
                roots = [groups.natural(item, m)[1] for m in item.members if m in needed]
                needed.update(self.owner(t.buffer) for t in terms(roots) if isinstance(t, Load))
            elif isinstance(item, Update):
                used = {b for nest in nests_of(groups, item) for b in nest.buffers()[0]}
                needed.update(map(self.owner, used))
        return needed

    def nest(self, group: Group) -> Nest:
        """The loops of a group with what they store."""
        made = Nest(tuple(group.axes))
        for node in group.members:
            if node not in self.needed:
                continue
            coords, value, once = self.groups.natural(group, node)
            buffer, index = self.groups.buffer(node), place_of(coords, node.spec)
            made.stores.append(Store(buffer, index, value, group.terms.phase(value), once))
        return made
