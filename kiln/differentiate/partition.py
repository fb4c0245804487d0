"""Decides what a forward pass saves for its backward pass and what is computed again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kiln.base.graph import CONSTANT, INPUT, Graph, Node, nodes_in, retarget
from kiln.differentiate.flow import ENDLESS, cheapest
from kiln.differentiate.halves import Halves, Parts
from kiln.differentiate.joint import Joint
from kiln.differentiate.kinds import is_mask, kind, nbytes, work
from kiln.ops.table import aten

EQUALITIES = frozenset({aten.eq.Tensor, aten.ne.Tensor})

RELUCTANT = 1 << 44
"""Added to the price of what is better not kept: somebody else may write to it, or its region forbids it."""


def partition(joint: Joint, budget: float = 1.0) -> Halves:
    """The forward and the backward graph of a joint graph, with the fewest bytes saved between them.

    Cheap chains are computed again; matmuls, convolutions, attention, reductions are not, random ops never.
    Values inside a checkpoint region are computed again whatever they cost. `budget` below 1 lets costlier
    ops be computed again until what is saved is that share of what it would be: 0 computes all again.
    """
    if not 0.0 <= budget <= 1.0:
        raise ValueError(f"the memory budget is a share between 0 and 1, got {budget!r}")
    plan = Plan(joint)
    return plan.split(plan.kept(budget))


def with_values_again(joint: Joint, budget: float = 1.0) -> Joint:
    """A joint whose program goes back itself, with values computed again for that as a partition has it.

    The halves are one graph, one after the other. What comes after the first backward pass, the optimizer's
    step or another pass, belongs to the second.
    """
    graph = joint.graph
    first = next(i for i, node in enumerate(graph.nodes) if node.backward)
    for node in graph.nodes[first:]:
        node.backward = True
    late = [type(out) is Node and out.backward for out in graph.outputs]
    gradients = [out for out, is_late in zip(graph.outputs, late) if is_late]
    results = [out for out, is_late in zip(graph.outputs, late) if not is_late]
    apart = Graph()
    apart.inputs, apart.nodes, apart.outputs = graph.inputs, graph.nodes, (*results, *gradients)
    halves = partition(replace(joint, graph=apart, results=len(results), mutated=()), budget)
    whole, forward, backward = Graph(), halves.forward, halves.backward
    known = dict(zip(backward.inputs, forward.outputs[len(results) :], strict=True))
    whole.inputs, whole.nodes, whole.overwrites = forward.inputs, forward.nodes, graph.overwrites
    whole.take_names((*whole.inputs, *whole.nodes))
    for node in backward.nodes:
        known[node] = whole.copy(node, known)
    ends = iter(forward.outputs[: len(results)]), iter(retarget(backward.outputs, known))
    whole.outputs = tuple([next(ends[is_late]) for is_late in late])
    return replace(joint, graph=whole.check())


def split_at(joint: Joint, kept: Iterable[Node]) -> Halves:
    """The two graphs when exactly these forward values are saved, for partitions of one's own.

    What the backward graph needs besides is computed again from them.
    """
    return Parts(joint).split(list(kept))


class Plan(Parts):
    """The forward values that the backward half may need, with their prices."""

    def __init__(self, joint: Joint) -> None:
        super().__init__(joint)
        self.wanted = self._wanted()
        self.inner, self.outer, self.anchors = self._regions()
        self.compared = self._compared()

    def _wanted(self) -> dict[Node, None]:
        """The forward values that backward nodes and gradients read."""
        reads = (read for node in self.backward for read in node.inputs())
        backward = {*self.backward, *self.tangents}
        return dict.fromkeys(n for n in (*reads, *nodes_in(self.gradients)) if n not in backward)

    def _regions(self) -> tuple[set[Node], set[Node], set[Node]]:
        """What checkpoint regions keep to themselves, what they read, what is not computed again for them.

        A region is computed again from what it read, for its own backward pass and for no other: what enters
        and what leaves it is kept where it is needed, or all regions before it would be computed again, too.
        """
        outer: set[Node] = set()
        if not any(node.region is not None for node in self.forward):
            return set(), outer, set()
        shown = {self.bases[node] for node in nodes_in(self.results)}
        for node in self.forward:
            for read in node.inputs():
                if read.region != node.region:
                    shown.add(self.bases[read])
                    if node.region is not None:
                        outer.add(self.bases[read])
        inner = {n for n in self.forward if n.region is not None and self.bases[n] not in shown}
        leaving = {node for node in shown if node.region is not None}
        return inner, outer, outer | leaving

    def _compared(self) -> set[Node]:
        """The forward values that the backward half looks up in what was made of them, as the largest.

        Computed again in another kernel a value may differ in its last bit, and would not be found.
        """
        found: set[Node] = set()
        asked = [node for node in self.backward if node.op in EQUALITIES]
        if not asked:
            return found
        places = {node: i for i, node in enumerate((*self.graph.inputs, *self.graph.nodes))}
        for node in asked:
            sides = [self.bases[read] for read in node.inputs()]
            for a, b in (sides, sides[::-1]) if len(sides) == 2 else ():
                if a.op is not INPUT and not a.backward and a is not b and _made_of(b, a, places):
                    found.add(a)
        return found

    # Choosing

    def kept(self, budget: float = 1.0) -> list[Node]:
        """The values to save."""
        default = self._cut(frozenset())
        if budget == 1.0:
            return default
        allowed = budget * sum(map(self._bytes, default))
        kinds = ((node, kind(node.op)) for node in self.forward)
        costly = [node for node, known in kinds if not (known.cheap or known.random or known.acts)]
        costly.sort(key=lambda node: work(node) / max(1, nbytes(node.spec)))
        low, high = 0, len(costly)
        best = self._cut(frozenset(costly), free=True)
        while low < high:
            middle = (low + high) // 2
            found = self._cut(frozenset(costly[:middle]), free=True)
            if sum(map(self._bytes, found)) <= allowed:
                high, best = middle, found
            else:
                low = middle + 1
        return best

    def _cut(self, again: frozenset[Node], free: bool = False) -> list[Node]:
        """The cheapest values to save where, besides cheap ops, those in `again` may be computed again.

        With `free`, inputs and results may be saved also where eager would not keep them.
        """
        order = list(self.wanted)
        index = {node: place for place, node in enumerate(order)}
        reads: list[list[int]] = []
        given: list[int] = []
        for place, node in enumerate(order):  # which grows by what they read
            if not self._again(node, again):
                given.append(place)
                reads.append([])
                continue
            inputs = dict.fromkeys(node.inputs())
            for read in inputs:
                if read not in index:
                    index[read] = len(order)
                    order.append(read)
            reads.append([index[read] for read in inputs])
        keep = cheapest(self._prices(order, free), reads, given, range(len(self.wanted)))
        places = {node: i for i, node in enumerate((*self.primals, *self.forward))}
        return sorted((n for n, kept in zip(order, keep) if kept), key=places.__getitem__)

    def _again(self, node: Node, again: frozenset[Node]) -> bool:
        """Whether a value may be computed again."""
        known = kind(node.op)
        if node.op is INPUT or known.random or known.acts:
            return False
        if node in self.anchors:
            return node in again
        if node in self.compared:
            return node.region is not None
        return known.cheap or node.region is not None or node in again

    def _prices(self, order: Sequence[Node], free: bool) -> list[int]:
        """What saving each value costs.

        What eager keeps alive too, an input or a result, costs nothing: saving it is never worse than eager.
        Other inputs and results are avoided: the program may write to them before the backward pass.
        """
        kept_by_eager = {self.bases[node] for node in self.wanted} | self.outer
        exposed = {self.bases[node] for node in nodes_in(self.results)} | set(self.primals)
        prices = []
        for node in order:
            spec = node.spec
            if isinstance(spec, (tuple, list)) or node.op is CONSTANT or self.bases[node] is not node:
                prices.append(ENDLESS)
            elif node in self.mutated or node in self.inner and self._again(node, frozenset()):
                prices.append(RELUCTANT + nbytes(spec))
            elif node in exposed:
                prices.append(0 if node in kept_by_eager else nbytes(spec) + (0 if free else RELUCTANT))
            else:
                prices.append(nbytes(spec) // (spec.dtype.itemsize if is_mask(node) else 1))
        return prices

    def _bytes(self, node: Node) -> int:
        return 0 if node.op is INPUT else nbytes(node.spec)


def _made_of(value: Node, source: Node, places: dict[Node, int]) -> bool:
    """Whether `source` went into `value`."""
    seen, todo = {value}, [value]
    while todo:
        for read in todo.pop().inputs():
            if read is source:
                return True
            if read not in seen and places[read] > places[source]:
                seen.add(read)
                todo.append(read)
    return False
