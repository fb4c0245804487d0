"""Layers: of many equal layers in a row four are traced, and what those became is repeated for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from kiln.base.dataclass import dataclass
from kiln.base.graph import CONSTANT, INPUT, Node, mapped, nodes_in
from kiln.differentiate.joint import Attribute, Joint, Primal

#: Fewer layers are traced as they are.
FEWEST = 6
#: What is traced, in order: the first layer with all before it, two in the middle, the last with what follows.
FIRST, SECOND, THIRD, LAST = range(4)


@dataclass(frozen=True, slots=True)
class Layers:
    """The calls of modules that capture copied from one, in a row, each over what the one before it gave.

    Four are traced, the first two and the last two; the others differ from them in nothing but what they read.
    """

    starts: tuple[fx.Node, fx.Node, fx.Node]
    """Where the second layer, the last but one, and the last begin."""
    instead: Mapping[fx.Node, fx.Node]
    """For each node of a layer that is not traced, that of the second, which stands for it."""
    names: tuple[tuple[str, ...], ...]
    """For each tensor that a layer has of its own, its names: in the second layer, the next, …"""

    @property
    def spared(self) -> frozenset[str]:
        """The names of what only layers read that are not traced."""
        return frozenset(name for names in self.names for name in names[1:-2])


def layers_of(graph: fx.Graph) -> Layers | None:
    """The layers of a captured graph; None where it has none, or they are not all alike."""
    copies: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if "copied" in node.meta:
            copies.setdefault(node.meta["copied"][0], []).append(node)
    alike: dict[tuple[fx.Node, ...], list[list[fx.Node]]] = {}
    for nodes in copies.values():
        alike.setdefault(tuple([node.meta["copied"][1] for node in nodes]), []).append(nodes)
    if not alike:
        return None
    originals, calls = max(alike.items(), key=lambda item: len(item[0]) * len(item[1]))
    if len(calls) < FEWEST - 1 or len({call[0].meta.get("stack_trace") for call in calls}) > 1:
        return None
    place = {node: (number, i) for number, call in enumerate(calls) for i, node in enumerate(call)}
    if not _in_a_row(graph, calls, place):
        return None
    names: dict[tuple[str, ...], None] = {}
    for i in range(len(originals)):
        for column in zip(*[call[i].all_input_nodes for call in calls], strict=False):
            found = _column(column, place)
            if found is None:
                return None
            names.update(dict.fromkeys(found))
    flat = [name for family in names for name in family]
    if len(flat) != len(set(flat)):
        return None
    instead = {node: model for call in calls[1:-2] for node, model in zip(call, calls[0], strict=True)}
    return Layers((calls[0][0], calls[-2][0], calls[-1][0]), instead, tuple(names))


def _in_a_row(graph: fx.Graph, calls: list[list[fx.Node]], place: Mapping[fx.Node, tuple[int, int]]) -> bool:
    """Whether nothing is computed between layers, and what follows reads none but the last."""
    row = iter([node for call in calls for node in call])
    expected = first = next(row)
    begun = False
    for node in graph.nodes:
        begun = begun or node is first
        if node in place:
            if node is not expected:
                return False
            expected = next(row, None)
        elif begun and node.op not in ("get_attr", "placeholder"):
            reads = [place[read][0] for read in node.all_input_nodes if read in place]
            if expected is not None or any(number < len(calls) - 1 for number in reads):
                return False
    return expected is None


def _column(
    column: Sequence[fx.Node], place: Mapping[fx.Node, tuple[int, int]]
) -> tuple[tuple[str, ...], ...] | None:
    """What equal nodes of all layers read, as the names of what each has of its own; None where they differ."""
    first, last = column[0], column[-1]
    if last not in place:
        if all(node is last for node in column[1:]):
            return () if first is last or first.op != "get_attr" else None
        alike = all(node.op == "get_attr" for node in column)
        return (tuple([str(node.target) for node in column]),) if alike else None
    number, i = place[last]
    back = len(column) - 1 - number
    alike = all(place.get(node) == (k - back, i) for k, node in enumerate(column) if k >= back)
    return () if back < 2 and alike and (back or first in place) else None


def unrolled(joint: Joint, number: Mapping[Node, int], layers: Layers) -> Joint | None:
    """The joint graph of all layers, made of that of four; None where the middle ones are not alike.

    `number` says which of the four a node belongs to.
    """
    if joint.mutated:
        return None
    return _Unrolling(joint, number, layers).run()


class _Unrolling:
    """A node of a layer in the middle reads what the same node of the third does, as much further on.

    What that is shows in pairs, of what a node of the second and its like of the third read: one value for
    both, the same place of their own layers, of those before them, or of those after them.
    """

    def __init__(self, joint: Joint, number: Mapping[Node, int], layers: Layers) -> None:
        self.joint, self.graph, self.layers = joint, joint.graph, layers
        self.parts: dict[tuple[bool, int], list[Node]] = {(b, n): [] for b in (False, True) for n in range(4)}
        self.place: dict[Node, tuple[int, int]] = {}
        for node in self.graph.nodes:
            if node in number:
                part = self.parts[node.backward, number[node]]
                self.place[node] = number[node], len(part)
                part.append(node)
        #: What a node of the third layer reads elsewhere: how many layers further on, which half, which place.
        self.moves: dict[Node, tuple[int, bool, int] | None] = {}
        self.inputs = dict(zip(self.graph.inputs, joint.primals, strict=False))
        origins = {p.origin.name: n for n, p in self.inputs.items() if isinstance(p.origin, Attribute)}
        self.families = [(origins.get(names[0]), origins.get(names[-2]), names) for names in layers.names]

    def run(self) -> Joint | None:
        if not self.parts[False, SECOND] or not self.repeats():
            return None
        gradients = dict(zip(self.graph.inputs, self.joint.gradients(), strict=False))
        count = len(self.layers.names[0][1:-2]) if self.layers.names else 0
        count = count or len(self.layers.instead) // max(1, len(self.layers.instead))
        return self.made(gradients, count)

    def repeats(self) -> bool:
        """Whether the layers in the middle are alike, and nothing else reads them but their neighbours."""
        own = {second: third for second, third, _ in self.families if second is not None}
        for half in (False, True):
            pairs = self.parts[half, SECOND], self.parts[half, THIRD]
            if len(pairs[0]) != len(pairs[1]):
                return False
            for a, b in zip(*pairs, strict=True):
                first, later = a.inputs(), b.inputs()
                if a.op is not b.op or a.spec != b.spec or len(first) != len(later) or a.op is CONSTANT:
                    return False
                if mapped((a.args, a.kwargs), _blank) != mapped((b.args, b.kwargs), _blank):
                    return False
                if not all([self.pair(half, x, y, own) for x, y in zip(first, later, strict=True)]):
                    return False
        middle = {node for half in (False, True) for n in (SECOND, THIRD) for node in self.parts[half, n]}
        allowed = {FIRST: SECOND, LAST: THIRD}
        for node in self.graph.nodes:
            if node not in middle:
                near = allowed.get(self.place[node][0]) if node in self.place else None
                if any(read in middle and self.place[read][0] != near for read in node.inputs()):
                    return False
        owned = {n for second, third, _ in self.families for n in (second, third)}
        outside = [g for node, g in zip(self.graph.inputs, self.joint.gradients(), strict=False) if node not in owned]
        return not middle.intersection(nodes_in((*self.joint.forward_outputs(), *outside)))

    def pair(self, half: bool, a: Node, b: Node, own: Mapping[Node, Node | None]) -> bool:
        """Whether what the second and the third layer read at the same place can be moved on."""
        move: tuple[int, bool, int] | None = None
        x, y = self.place.get(a, (None, 0)), self.place.get(b, (None, 0))
        if a is b:
            if x[0] in (SECOND, THIRD):
                return False
        elif b.op is INPUT:
            return own.get(a) is b
        elif y[0] == THIRD:
            return x == (SECOND, y[1]) and a.backward == b.backward
        elif y[0] == SECOND and not b.backward:
            move = -1, b.backward, y[1]
        elif half and y[0] == LAST and x[0] == THIRD:
            move = 1, a.backward, x[1]
        else:
            return False
        return self.moves.setdefault(b, move) == move
