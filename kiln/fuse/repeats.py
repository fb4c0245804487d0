"""Repeats: of many equal blocks in a row a few are fused, and their steps stand for the others.

A block is a stretch of nodes; the next one has the same ops with the same arguments and types, where each
node that is read lies in the same place of a block, is the same for all blocks, or belongs to one block alone
(a weight). What was fused for one block is therefore right for another, its nodes put in the place of the
first one's. Whether the steps of the blocks that were fused do repeat is looked up; where they do not, the
whole graph is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.graph import CONSTANT, INPUT, Graph, Node, mapped, nodes_in
from kiln.fuse.coalesce import partial_sums
from kiln.fuse.costs import elements
from kiln.fuse.steps import Call, Launch, Step
from kiln.fuse.views import is_map

#: Blocks that are fused, the last of which something else follows: three, or four where those differ. With
#: each the share of a graph that must be spared: where steps do not repeat, all of it is fused once more.
FUSED = {3: 0.1, 4: 0.3}
#: Fewer blocks are not worth the search; but those of a graph that was made with few of them are.
FEWEST, OF_FEW = 6, 4
#: First blocks that may be unlike the others.
SKIPPED = 3
#: Nodes that tell a place in a block.
WINDOW = 8


def fuse_repeats(
    graph: Graph, fuse: Callable[[Graph], list[Step]], fewest: int = OF_FEW, marks: Sequence[int] = ()
) -> list[Step]:
    """The steps for a graph, by a function that gives them for a shorter one, but for views as outputs.

    `marks` are those of the nodes, where they are known.
    """
    found = blocks_of(graph, fewest, marks)
    if found is not None and found.adds_up(partial_sums(graph, graph.users())):
        found = None
    for fused, share in FUSED.items() if found is not None else ():
        assert found is not None
        found.spared = found.run.count - fused
        if found.spared * found.run.period < share * len(graph.nodes):
            break
        kept = found.end - found.spared * found.run.period
        left = [*found.marks[:kept], *found.marks[found.end :]]
        steps = unrolled(found, fuse_repeats(found.shortened(), fuse, FEWEST, left))
        if steps is not None:
            return steps
    return fuse(graph)


# Finding blocks


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks in a row: the place of the first node, the nodes of a block, the number of blocks."""

    start: int
    period: int
    count: int


def runs(marks: Sequence[int], fewest: int = FEWEST) -> list[Run]:
    """The runs of blocks in a sequence, those with most nodes first."""
    last: dict[tuple[int, ...], int] = {}
    found: list[Run] = []
    done: dict[int, int] = {}  # up to where blocks of a length are known
    for place in range(len(marks) - WINDOW + 1):
        window = tuple(marks[place : place + WINDOW])
        before = last.get(window)
        last[window] = place
        if before is None or done.get(place - before, -1) > place:
            continue
        period, end = place - before, place
        while end < len(marks) and marks[end] == marks[end - period]:
            end += 1
        done[period] = end
        # What comes before the first block differs from a block: the next one is the first that counts.
        run = Run(place, period, (end - place) // period)
        if run.count >= fewest:
            found.append(run)
    return sorted(found, key=lambda run: run.period * run.count, reverse=True)


def marks_of(graph: Graph) -> list[int]:
    """A number for each node, equal only for nodes that do the same to values of the same types."""
    outputs = set(nodes_in(graph.outputs))
    known: dict[Any, int] = {}
    types: dict[int, tuple[Any, Any]] = {}

    def form(value: Any) -> Any:
        """A stand-in for arguments: equal where they mean the same, but for which nodes are read."""
        kind = type(value)
        if kind is Node:
            return type_of(value.spec)
        if kind is tuple or kind is list:
            return (kind, *[type_of(one.spec) if type(one) is Node else form(one) for one in value])
        if kind is dict:
            return tuple([(key, form(item)) for key, item in value.items()])
        if kind is float:
            return kind, repr(value)
        return (kind, value) if kind is int or kind is bool else value

    def type_of(spec: Any) -> Any:
        """A number for a type: nodes that were copied share theirs, and a hash of one takes long."""
        found = types.get(id(spec))
        if found is None:
            made = form(spec)
            found = types[id(spec)] = known.setdefault((None, made), len(known)), spec
        return found[0]

    marks = []
    for node in graph.nodes:
        try:
            args = type(node.args[0]) if node.op is CONSTANT else form(node.args)
            kwargs = form(node.kwargs) if node.kwargs else ()
            key = node.op, args, kwargs, type_of(node.spec), node in outputs
            marks.append(known.setdefault(key, len(known)))
        except TypeError:  # an argument without a hash is like no other
            marks.append(known.setdefault(object(), len(known)))
    return marks


def blocks_of(graph: Graph, fewest: int = FEWEST, marks: Sequence[int] = ()) -> Blocks | None:
    """The longest run of equal blocks in a graph, so many at least; `marks` are its nodes', where known."""
    if len(graph.nodes) < fewest * 2:
        return None
    marks = marks or marks_of(graph)
    for found in runs(marks, fewest):
        run = aligned(graph, marks, found)
        for skipped in range(SKIPPED):
            rest = Run(run.start + skipped * run.period, run.period, run.count - skipped)
            blocks = Blocks(graph, rest, marks)
            if blocks.run.count >= fewest and blocks.agree():
                return blocks
    return None


def aligned(graph: Graph, marks: Sequence[int], run: Run) -> Run:
    """A run begun where no block ends between two reads of a value that one block owns."""
    index = {node: i for i, node in enumerate(graph.nodes)}
    end = run.start + run.period * run.count
    while end < len(marks) and marks[end] == marks[end - run.period]:
        end += 1
    first: dict[Node, int] = {}
    last: dict[Node, int] = {}
    for place in range(run.start, end):
        for read in graph.nodes[place].inputs():
            if not run.start - run.period <= index.get(read, -1) < end:
                first.setdefault(read, place)
                last[read] = place
    apart = set(range(run.period))
    for read, low in first.items():
        if last[read] - low < run.period:  # others are read by all blocks
            apart.difference_update([(i - run.start) % run.period for i in range(low + 1, last[read] + 1)])
    start = run.start + min(apart, default=0)
    return Run(start, run.period, (end - start) // run.period)


class Blocks:
    """A run of blocks: which nodes of the graph stand in the same place of another block."""

    def __init__(self, graph: Graph, run: Run, marks: Sequence[int]) -> None:
        self.graph, self.run, self.marks = graph, run, marks
        self.index = {node: i for i, node in enumerate(graph.nodes)}
        self.end = run.start + run.period * run.count
        self.fixed: set[Node] = set()
        self.families: dict[Node, tuple[list[Node], int]] = {}
        self.copies: dict[Node, Node] = {}  # of what follows the blocks in the short graph
        self.spared = run.count - min(FUSED)
        """The blocks that are not fused."""

    def block(self, node: Node) -> int | None:
        """The number of the block that a node is of; -1 for one just before the first, None for others."""
        place = self.index.get(node)
        if place is None or not self.run.start - self.run.period <= place < self.end:
            return None
        return (place - self.run.start) // self.run.period

    def agree(self) -> bool:
        """Whether what nodes read allows to put one block in the place of another."""
        run, nodes = self.run, self.graph.nodes
        for t in range(run.start, run.start + run.period):
            rows = [list(nodes[t + r * run.period].inputs()) for r in range(run.count)]
            if not all(map(self.column_agrees, zip(*rows, strict=True))):
                return False
        return self.is_left_alone()

    def column_agrees(self, column: tuple[Node, ...]) -> bool:
        """Whether what equal nodes of all blocks read is in order."""
        first = column[0]
        if all(node is first for node in column):
            self.fixed.add(first)
            return self.block(first) is None and first not in self.families
        if self.block(column[-1]) is not None:
            place = self.index.get(first, -1)
            return self.block(first) is not None and all(
                self.index.get(node) == place + r * self.run.period for r, node in enumerate(column)
            )
        known = self.families.get(first)
        if known is not None:
            return known[0] == list(column)
        members = list(column)
        if len(set(members)) < len(members) or any(
            node in self.families or self.block(node) is not None for node in members
        ):
            return False
        self.families.update({node: (members, r) for r, node in enumerate(members)})
        return True

    def is_left_alone(self) -> bool:
        """Whether what follows the blocks reads the last of them only, and nothing that one block owns."""
        if any(node in self.families for node in self.fixed):
            return False
        for node in self.graph.nodes[self.end :]:
            for read in node.inputs():
                block = self.block(read)
                if read in self.families or block is not None and block < self.spared:
                    return False
        return True

    def adds_up(self, apart: set[Node] | None = None) -> bool:
        """Whether a value is read for its like in the next block alone: such sums are made for many blocks.

        Where `apart` is given, sums in it are made one by one, and so are single numbers: they do not count.
        """
        start, period, nodes = self.run.start, self.run.period, self.graph.nodes
        readers: dict[Node, set[int]] = {}
        for i in range(start, start + 2 * period):
            for read in nodes[i].inputs():
                readers.setdefault(read, set()).add(i)
        for first in range(start, start + period):
            at, like = first, first + period
            while at < like and len(found := readers.get(nodes[at], set())) == 1:
                at = min(found)
            if at == like and (apart is None or elements(nodes[at]) > 1 and nodes[at] not in apart):
                return True
        return False

    def shortened(self) -> Graph:
        """The graph with fewer blocks; nodes up to their end are those of the graph itself."""
        run, nodes = self.run, self.graph.nodes
        kept = self.end - self.spared * run.period

        def value(leaf: Any) -> Any:
            if type(leaf) is not Node:
                return leaf
            if self.block(leaf) is None:
                return self.copies.get(leaf, leaf)
            return nodes[self.index[leaf] - self.spared * run.period]

        self.copies = {}
        short = Graph()
        short.inputs, short.nodes = self.graph.inputs, nodes[:kept]
        for node in nodes[self.end :]:
            args = node.args if node.op is CONSTANT else mapped(node.args, value)
            copy = Node(node.op, args, mapped(node.kwargs, value), node.spec, node.name)
            self.copies[node] = copy
            short.add(copy)
        outputs = []
        for out in self.graph.outputs:
            if type(out) is Node and self.index.get(out, -1) >= self.end:
                out = self.copies[out]
            if type(out) is not Node or self.index.get(out, -1) < kept:
                outputs.append(out)
        short.outputs = tuple(outputs)
        self.copies = {copy: node for node, copy in self.copies.items()}
        return short

    def moved(self, node: Node, by: int) -> Node:
        """The node in the place of `node` that many blocks later; what is of no block stays."""
        if self.block(node) is not None:
            return self.graph.nodes[self.index[node] + by * self.run.period]
        if node in self.families:
            members, number = self.families[node]
            return members[number + by]
        return self.copies.get(node, node)


# Repeating steps


def unrolled(blocks: Blocks, steps: list[Step]) -> list[Step] | None:
    """The steps of the whole graph, by those of the short one; None where they do not repeat."""
    for begin, end in periods(blocks, steps):
        fixed = [fixed_reads(blocks, step) for step in steps[begin:end]]
        if None in fixed:
            continue
        after = [fixed_reads(blocks, step) for step in steps[end:]]
        if None in after:
            return None
        made = list(steps[:end])
        for by in range(1, blocks.spared + 1):
            made += [moved(blocks, *one, by) for one in zip(steps[begin:end], fixed, strict=True)]
        made += [moved(blocks, *one, blocks.spared) for one in zip(steps[end:], after, strict=True)]
        return made if complete(blocks.graph, made) else None
    return None


def nodes_of(step: Step) -> tuple[list[Node], list[Node]]:
    """What a step makes and reads."""
    if isinstance(step, Call):
        return [step.node], list(step.node.inputs())
    return list(step.writes.values()), list(step.reads.values())


def moved(blocks: Blocks, step: Step, fixed: set[Node] | None, by: int) -> Step:
    """A step for a later block; `fixed` is what it reads for all blocks alike."""
    if isinstance(step, Call):
        return Call(blocks.moved(step.node, by))
    stays = fixed or ()
    reads = {b: n if n in stays else blocks.moved(n, by) for b, n in step.reads.items()}
    return Launch(step.kernel, reads, {b: blocks.moved(n, by) for b, n in step.writes.items()}, step.scratch)


def periods(blocks: Blocks, steps: list[Step]) -> Iterator[tuple[int, int]]:
    """The steps from a place of a block to the same of the next, where those after them are alike."""
    places = {nodes_of(step)[0][0]: i for i, step in enumerate(steps)}
    for node, first in places.items():
        if blocks.block(node) != blocks.run.count - blocks.spared - 3:
            continue
        second = places.get(blocks.moved(node, 1), -1)
        third = places.get(blocks.moved(node, 2), -1)
        length = second - first
        if length > 0 and third - second == length:
            pairs = zip(steps[first:second], steps[second:third], strict=True)
            if all(follows(blocks, a, b) for a, b in pairs):
                yield first, second


def follows(blocks: Blocks, step: Step, later: Step) -> bool:
    """Whether a step is what another one is a block before."""
    if type(step) is not type(later):
        return False
    made, reads = nodes_of(step)
    next_made, next_reads = nodes_of(later)
    if any(blocks.block(node) is None for node in made):
        return False
    if [blocks.moved(node, 1) for node in made] != next_made or len(reads) != len(next_reads):
        return False
    return all(n in (r, blocks.moved(r, 1)) for r, n in zip(reads, next_reads, strict=True))


def fixed_reads(blocks: Blocks, step: Step) -> set[Node] | None:
    """What a step reads for all blocks alike; None where its parts do not all move with the block.

    A kernel may compute anew what lies between what it writes and what it reads: all of that is visited.
    """
    if isinstance(step, Call):
        return None if blocks.block(step.node) == -1 else set()
    reads = set(step.reads.values())
    moving, fixed = set[Node](), set[Node]()
    todo = [(node, False) for node in step.writes.values()]
    seen = set(todo)
    while todo:
        node, stays = todo.pop()
        if node in reads:
            (fixed if stays else moving).add(node)
            continue
        follows_blocks, block = node in blocks.copies, blocks.block(node)
        if not stays and not follows_blocks and (block is None or block < 0):
            return None
        for read in node.inputs():
            outside = follows_blocks and blocks.block(read) is None and read not in blocks.copies
            state = (read, stays or outside or read in blocks.fixed)
            if state not in seen:
                seen.add(state)
                todo.append(state)
    if moving & fixed or moving | fixed != reads:
        return None
    goes = [blocks.block(n) is not None or n in blocks.families or n in blocks.copies for n in moving]
    return fixed if all(goes) else None


def complete(graph: Graph, steps: Iterable[Step]) -> bool:
    """Whether steps read what earlier ones made, nothing is made twice, and outputs show what is made."""
    made = {*graph.inputs, *(node for node in graph.nodes if node.op is CONSTANT)}
    for step in steps:
        results, reads = nodes_of(step)
        if not made.issuperset(reads) or not made.isdisjoint(results):
            return False
        made.update(results)
    roots = [chain_of(out)[-1] for out in nodes_in(graph.outputs) if out not in made]
    return not any(root not in made and any(True for _ in root.inputs()) for root in roots)


def chain_of(node: Node) -> list[Node]:
    """A view, what it shows, and so on, down to what is no view."""
    chain = [node]
    while chain[-1].op is not INPUT and chain[-1].op is not CONSTANT and is_map(chain[-1]):
        chain.append(chain[-1].args[0])
    return chain
