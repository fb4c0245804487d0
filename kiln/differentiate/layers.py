"""Layers: of many equal layers in a row four are traced, and what those became is repeated for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from kiln.base.dataclass import dataclass
from kiln.base.graph import CONSTANT, INPUT, Node, Own, TensorSpec, mapped, nodes_in, retarget
from kiln.differentiate.interpret import fetch
from kiln.differentiate.joint import Attribute, Joint

#: Fewer copies of a layer are traced as they are.
FEWEST = 5
#: What is traced: the first layer with all before it, two of the middle, the last with all that follows.
FIRST, SECOND, THIRD, LAST = range(4)


@dataclass(frozen=True, slots=True)
class Layers:
    """Calls of modules that capture copied from one call, in a row, each over what the one before it gave.

    The call that they were copied from, the next and the last two are traced. The others, `count` of them, do
    the same to values of the same types.
    """

    count: int
    starts: tuple[fx.Node, fx.Node, fx.Node]
    """Where the second layer, the last but one and the last begin."""
    instead: Mapping[fx.Node, fx.Node]
    """For each node of a layer that is not traced that of the second one, which stands for it."""
    names: tuple[tuple[str, ...], ...]
    """For each tensor that layers have of their own its names, from the second layer to the last."""
    firsts: tuple[str, ...]
    """The names of these in the first layer; none for a value that is no tensor of its own there."""


def layers_of(module: fx.GraphModule) -> Layers | None:
    """The layers of a captured graph; None where it has none, or they are not all alike."""
    copies: dict[Any, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if "copied" in node.meta:
            copies.setdefault(node.meta["copied"][0], []).append(node)
    alike: dict[tuple[fx.Node, ...], list[list[fx.Node]]] = {}
    for nodes in copies.values():
        alike.setdefault(tuple([node.meta["copied"][1] for node in nodes]), []).append(nodes)
    calls = max(alike.values(), key=lambda calls: len(calls) * len(calls[0]), default=[])
    if len(calls) < FEWEST or len({call[0].meta.get("stack_trace") for call in calls}) > 1:
        return None
    before = [node.meta["copied"][1] for node in calls[0]]
    if len(calls) % 2 == 0:  # an even number is left out: what layers hand on may lie at two places in turn
        before, *calls = calls
    place = {node: (number, i) for number, call in enumerate(calls) for i, node in enumerate(call)}
    if not _in_a_row(module.graph, calls, place):
        return None
    families: dict[tuple[fx.Node, ...], fx.Node] = {}
    for equals in zip(before, *calls, strict=True):
        first, *rows = [node.all_input_nodes for node in equals]
        if len({len(row) for row in (first, *rows)}) > 1:
            return None
        for original, column in zip(first, zip(*rows, strict=True), strict=True):
            if not _is_alike(column, place):
                if not all(node.op == "get_attr" for node in column):
                    return None
                families[column] = original
    if not _are_apart(module, families, place):
        return None
    models = [*zip(*calls, strict=True), *families]
    instead = {node: equals[0] for equals in models for node in equals[1:-2]}
    names = tuple([tuple([str(node.target) for node in family]) for family in families])
    firsts = tuple([str(node.target) if node.op == "get_attr" else "" for node in families.values()])
    return Layers(len(calls) - 3, (calls[0][0], calls[-2][0], calls[-1][0]), instead, names, firsts)


Places = Mapping[fx.Node, tuple[int, int]]


def _in_a_row(graph: fx.Graph, calls: list[list[fx.Node]], place: Places) -> bool:
    """Whether nothing is computed between layers, and what follows reads none but the last."""
    nodes = [node for node in graph.nodes if node.op != "get_attr"]
    begin = nodes.index(calls[0][0])
    end = begin + len(place)
    if nodes[begin:end] != [node for call in calls for node in call]:
        return False
    reads = [read for node in nodes[end:] for read in node.all_input_nodes]
    return all(place[read][0] == len(calls) - 1 for read in reads if read in place)


def _is_alike(column: Sequence[fx.Node], place: Places) -> bool:
    """Whether equal nodes read one value, or the same place of their own layers, or of those before them."""
    last = place.get(column[-1])
    if last is None:
        return all(node is column[0] for node in column)
    back = len(column) - 1 - last[0]
    return back < 2 and all(
        place.get(node) == (k - back, last[1]) for k, node in enumerate(column) if k >= back
    )


def _are_apart(module: fx.GraphModule, families: Iterable[tuple[fx.Node, ...]], place: Places) -> bool:
    """Whether a tensor that a layer has of its own is read by that layer alone, and under one name."""
    held = [node for node in module.graph.nodes if node.op == "get_attr"]
    count = Counter(id(fetch(module, str(node.target))) for node in held)
    for family in families:
        for number, node in enumerate(family):
            readers = {place.get(user, (-1, 0))[0] for user in node.users}
            if readers != {number} or count[id(fetch(module, str(node.target)))] > 1:
                return False
    return len({node for family in families for node in family}) == sum(map(len, families))


def unrolled(joint: Joint, number: Mapping[Node, int], layers: Layers, short: bool = False) -> Joint | None:
    """The joint graph of all layers, by that of four; None where those of the middle are not alike.

    `number` says of the nodes which of the four they belong to. A `short` graph stays one of four layers
    where that is allowed, and the joint says what it stands for.
    """
    unrolling = _Unrolling(joint, number, layers)
    if joint.mutated or not unrolling.repeats():
        return None
    return unrolling.short() if short and unrolling.may_stay() else unrolling.run()


class _Unrolling:
    """Layers between the second and the third: nodes like the third's, over what stands so many layers on.

    What that is shows in pairs, of what a node of the second and its like of the third read: one value for
    both, or the same place of their own layers, of those before them, or of those after them.
    """

    def __init__(self, joint: Joint, number: Mapping[Node, int], layers: Layers) -> None:
        self.joint, self.graph, self.layers = joint, joint.graph, layers
        self.parts: dict[tuple[bool, int], list[Node]] = {(b, n): [] for b in (False, True) for n in range(4)}
        self.place: dict[Node, tuple[bool, int, int]] = {}
        for node in self.graph.nodes:
            if node in number:
                part = self.parts[node.backward, number[node]]
                self.place[node] = node.backward, number[node], len(part)
                part.append(node)
        origins = {
            primal.origin: node for node, primal in zip(self.graph.inputs, joint.primals, strict=False)
        }
        self.own = [
            (origins[Attribute(names[0])], origins[Attribute(names[-2])], names) for names in layers.names
        ]
        self.gradients = dict(zip(self.graph.inputs, joint.gradients(), strict=False))
        self.moves: dict[Node, tuple[int, bool, int] | None] = {}
        """For what the third layer reads elsewhere: how many layers on it is, its half, its place there."""

    def repeats(self) -> bool:
        """Whether the layers of the middle are alike, and none but their neighbours read them."""
        pairs = [
            pair for half in (False, True)
            for pair in zip(self.parts[half, SECOND], self.parts[half, THIRD], strict=False)
        ]  # fmt: skip
        middle = {node for half in (False, True) for n in (SECOND, THIRD) for node in self.parts[half, n]}
        own = {second: third for second, third, _ in self.own}
        if not pairs or len(middle) != 2 * len(pairs):
            return False
        for a, b in pairs:
            if a.op is not b.op or a.spec != b.spec or a.op is CONSTANT:
                return False
            if mapped((a.args, a.kwargs), _blank) != mapped((b.args, b.kwargs), _blank):
                return False
            if not all(self.moves_on(b, x, y, own) for x, y in zip(a.inputs(), b.inputs(), strict=True)):
                return False
        for node in self.graph.nodes:
            near = {FIRST: SECOND, LAST: THIRD}.get(self.place[node][1]) if node in self.place else None
            if node not in middle and any(n in middle and self.place[n][1] != near for n in node.inputs()):
                return False
        alone = {node for second, third, _ in self.own for node in (second, third)}
        seen = [gradient for node, gradient in self.gradients.items() if node not in alone]
        if not middle.isdisjoint(nodes_in((*self.joint.forward_outputs(), *seen))):
            return False
        return all(self.alike(self.gradients[a], self.gradients[b]) for a, b, _ in self.own if self.gradients)

    def alike(self, a: Node | None, b: Node | None) -> bool:
        """Whether two values, or none, are at the same place of the second and the third layer."""
        if a is None or b is None:
            return a is b
        half, _, i = self.place.get(b, (False, 0, 0))
        return self.place.get(b) == (half, THIRD, i) and self.place.get(a) == (half, SECOND, i)

    def moves_on(self, reader: Node, a: Node, b: Node, own: Mapping[Node, Node]) -> bool:
        """Whether what the second and the third layer read at the same place is known for those between."""
        move = None
        if a is not b:
            if own.get(a) is b or self.alike(a, b):
                return True
            first, second = self.place.get(a), self.place.get(b)
            if second is not None and second[:2] == (False, SECOND):
                move = -1, False, second[2]
            elif reader.backward and first is not None and first[1] == THIRD:
                move = 1, first[0], first[2]
            else:
                return False
        elif b in self.place and self.place[b][1] in (SECOND, THIRD):
            return False
        return self.moves.setdefault(b, move) == move

    def may_stay(self) -> bool:
        """Whether it is a forward on the CPU, its sizes numbers, and layers have tensors of their own."""
        specs = [primal.spec for primal in self.joint.primals]
        plain = all(isinstance(spec, TensorSpec) and spec.device.type == "cpu" for spec in specs)
        sizes = {type(n) for spec in specs for n in (*spec.shape, *spec.stride)} if plain else {None}
        return bool(self.own) and sizes <= {int} and not self.joint.differentiates

    def short(self) -> Joint:
        """The graph of four layers, and what the first three have of their own."""
        place = {node: i for i, node in enumerate(self.graph.inputs)}
        origins = {primal.origin: i for i, primal in enumerate(self.joint.primals)}
        firsts = [origins.get(Attribute(name), -1) for name in self.layers.firsts]
        owns = [Own((first, place[second], place[third]), names[1:-2])
                for first, (second, third, names) in zip(firsts, self.own, strict=True)]  # fmt: skip
        return replace(self.joint, layers=tuple(owns))

    def run(self) -> Joint:
        """The whole graph."""
        graph, count = self.graph, self.layers.count
        rows: dict[bool, dict[int, list[Node]]] = {
            half: {0: self.parts[half, SECOND], count + 1: self.parts[half, THIRD]} for half in (False, True)
        }
        images: dict[int, dict[Node, Node]] = {}

        def moved(by: int, layer: int) -> dict[Node, Node]:
            """What stands for what the third layer reads of another one."""
            found = [(node, move) for node, move in self.moves.items() if move is not None and move[0] == by]
            return {node: rows[half][layer + by][place] for node, (_, half, place) in found}

        primals = dict(zip(graph.inputs, self.joint.primals, strict=False))
        for layer in range(1, count + 1):
            image = images[layer] = moved(-1, layer)
            for _, third, names in self.own:
                image[third] = Node(INPUT, spec=third.spec, name=graph.name(names[layer]))
            rows[False][layer] = self.copied(self.parts[False, THIRD], image)
        for layer in range(count, 0, -1):
            images[layer].update(moved(1, layer))
            rows[True][layer] = self.copied(self.parts[True, THIRD], images[layer])
        self.retarget(self.parts[True, SECOND], {
            node: rows[half][1][i] for half in rows for i, node in enumerate(self.parts[half, THIRD])
        })  # fmt: skip
        for half in rows:
            self.retarget(self.parts[half, THIRD], moved(-1, count + 1))
        # A forward goes from the second layer to the third, a backward the other way.
        forward = [node for layer in range(1, count + 1) for node in rows[False][layer]]
        backward = [node for layer in range(count, 0, -1) for node in rows[True][layer]]
        after = {self.parts[False, SECOND][-1]: forward}
        if backward:
            after[self.parts[True, THIRD][-1]] = backward
        graph.nodes = [n for node in graph.nodes for n in (node, *after.get(node, ()))]
        made = [(images[layer], third, names[layer])
                for layer in range(1, count + 1) for _, third, names in self.own]  # fmt: skip
        known = len(primals)
        graph.inputs[known:known] = [image[third] for image, third, _ in made]
        if self.gradients:
            found = [(image, self.gradients[third]) for image, third, _ in made]
            graph.outputs = (*graph.outputs, *[image[g] if g is not None else None for image, g in found])
        added = [replace(primals[third], origin=Attribute(name)) for _, third, name in made]
        return replace(self.joint, graph=graph, primals=(*self.joint.primals, *added))

    def retarget(self, nodes: list[Node], image: dict[Node, Node]) -> None:
        """Let nodes read what stands for what they read."""
        for node in nodes:
            node.args, node.kwargs = retarget(node.args, image), retarget(node.kwargs, image)

    def copied(self, nodes: list[Node], image: dict[Node, Node]) -> list[Node]:
        """The nodes over what stands for what they read; what comes of them stands for them from now on."""
        name = self.graph.name
        made = []
        for node in nodes:
            kwargs = retarget(node.kwargs, image) if node.kwargs else {}
            copy = image[node] = node.over(retarget(node.args, image), kwargs, name(node.name))
            made.append(copy)
        return made


def _blank(leaf: Any) -> Any:
    return None if type(leaf) is Node else leaf
