"""Fits nodes into the loops of groups, and merges groups that nothing separates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from kiln.base.graph import CONSTANT, INPUT, Graph, Node, nodes_in, reached
from kiln.fuse.axes import Misfit, refined
from kiln.fuse.costs import bytes_of, elements, lies_as
from kiln.fuse.folds import folded_dims, marked
from kiln.fuse.lower import is_pointwise
from kiln.fuse.nest import Axis
from kiln.fuse.reading import REARRANGED, Group, Groups, is_of_neighbours, is_widened
from kiln.fuse.views import Coords, is_map, shape_of
from kiln.ops.levels import name_of

#: Siblings are looked for among this many last kernels.
LOOK_BACK = 8
#: Nodes of groups that become one, at most.
LARGEST = 200
#: Nodes of one group, at most: the time that LLVM takes for a loop grows with the square of its length.
LONGEST = 800
#: Bytes of a gradient from which on those that are added to it do not wait for one another.
SUMMED = 16 << 10
#: Elements of a copy in another order from which on it is made for itself.
TURNED = 1 << 16
#: How often each factor of a product of matrices is used, at least.
MANY = 7

Users: TypeAlias = dict[Node, list[Node]]
"""For each node of a graph, in order, those that read it."""


class Coalescing(Groups):
    """Groups that grow: with the groups that read each value."""

    def __init__(
        self, graph: Graph, exact: bool = False, largest: int = LARGEST, runs: bool = True, anew: int = 0
    ) -> None:
        super().__init__(graph, exact, anew)
        self.largest, self.runs = largest, runs
        self.reading: defaultdict[Node, set[int]] = defaultdict(set)
        self.summing = partial_sums(graph, self.users)
        self.read_whole |= self.summing | {self.root(node) for node in factors(self.users)}
        self.turned = set(turned(self.users)) if anew else set[Node]()
        self.read_whole |= self.turned
        self.read_whole |= {self.root(node) for node in seen_in_windows(self.users)} if anew else set()

    # Nodes into groups

    def add(self, group: Group, node: Node) -> None:
        group.members.append(node)
        self.place[node] = group.position
        for root in map(self.root, node.inputs()):
            group.reads.add(root)
            self.reading[root].add(group.position)

    def fits(
        self, group: Group, node: Node, shape: Coords, dims: frozenset[int] | None, related: bool = False
    ) -> bool:
        """Whether a node runs in the loops of a group, after changing them where that is harmless."""
        before = group.axes
        if len(group.members) >= LONGEST or is_of_neighbours(node):
            return False
        if any(first.backward is not node.backward for first in group.members[:1]):
            return False  # what is computed again for a backward pass would be kept until then
        if not related and not any(
            self.place[n] == group.position or n in group.reads for n in map(self.root, node.inputs())
        ):
            return False
        turned = self.turned
        if turned and (dims and not turned.isdisjoint(group.members) or node in turned and group.folds):
            return False
        for first in group.members[:1]:  # others do not join a group
            if is_of_neighbours(first) and (dims or not lies_as(node, first) or not self.narrows(node)):
                return False
        axes = self.axes_with(group.axes, shape, dims)
        if axes is None:
            return False
        try:
            if axes != group.axes:
                group.axes = axes
                self.rebuild(group)
            self.natural(group, node)
            made = (node, *group.members) if dims else (node,)
            if group.folds and any(self.gathers(group, member) for member in made):
                raise Misfit
        except Misfit:
            if group.axes is not before:
                group.axes = before
                self.rebuild(group)
            return False
        return True

    def narrows(self, node: Node) -> bool:
        """Whether a value is of few bytes, or one of such is all that is made of it, element by element."""
        if node.spec.dtype.itemsize <= 2:
            return True
        found = self.readers(node)
        return node not in self.outputs and all(is_pointwise(user) and self.narrows(user) for user in found)

    def axes_with(self, axes: list[Axis], shape: Coords, dims: frozenset[int] | None) -> list[Axis] | None:
        """The axes with those of a shape among them, folded over where it has `dims`; None for a misfit."""
        folds = any(a.reduced for a in axes)
        if dims is None and folds and self.coordinates(shape, [a for a in axes if not a.reduced]) is not None:
            return axes
        finer = refined(self.scope, axes, shape)
        if finer is None or dims is None:
            return finer
        try:
            wanted = marked([replace(a, reduced=False) if a.reduced else a for a in finer], shape, dims)
        except Misfit:
            return None
        if [a.reduced for a in wanted] == [a.reduced for a in finer]:
            return finer
        return None if folds else wanted

    def rebuild(self, group: Group) -> None:
        """Make the terms of a group anew after its axes changed."""
        group.memo.clear()
        group.makes_others = False
        group.terms = self.new_terms()
        group.costs.clear()
        group.spots.clear()
        for member in group.members:
            self.natural(group, member)

    # Groups into groups

    def coalesce(self) -> None:
        """Let each group join an earlier one that it reads, or that reads what it reads."""
        for position in range(len(self.items)):
            later = self.items[position]
            while isinstance(later, Group) and later.members:
                found = next((earlier for earlier in self.related(later) if self.merge(earlier, later)), None)
                if found is None:
                    break
                later = self.items[found.position]  # which may join another one now

    def related(self, group: Group) -> list[Group]:
        """The earlier groups that a group reads, and those that read what it reads, nearest first."""
        reads = group.reads
        places = {self.place[root] for root in reads}.union(*[self.reading[root] for root in reads])
        earlier = sorted((p for p in places if 0 <= p < group.position), reverse=True)
        found = [item for p in earlier if isinstance(item := self.items[p], Group) and item.members]
        return found[:LOOK_BACK]

    def merge(self, earlier: Group, later: Group) -> bool:
        """Make two groups one, at the place of either; False where that is not possible."""
        if len(earlier.members) + len(later.members) > self.largest:
            return False
        place = self.place
        upward = all(place[r] <= earlier.position for r in self.outside(later))
        below = {n for m in earlier.members for n in self.readers(m)} - set(earlier.members)
        downward = all(place.get(n, later.position) >= later.position for n in below)
        if not upward and not self.summing.isdisjoint(earlier.members):
            return False
        if not (upward or downward) or not self.have_room(earlier, later):
            return False
        if not upward:
            leaving = [m for m in earlier.members if not below.isdisjoint(self.readers(m))]
            if self.holds(earlier.reads, earlier, later.position, leaving):
                return False
        home, other = (earlier, later) if upward else (later, earlier)
        trial = earlier.copy()
        trial.position = home.position
        for root in trial.reads:
            self.reading[root].add(trial.position)
        before = {m: place[m] for m in (*earlier.members, *later.members)}
        place.update(dict.fromkeys(before, home.position))
        try:
            if not upward or earlier.makes_others:  # what is made anew here may not be any more
                self.rebuild(trial)
            merged = all(self.adopts(trial, member) for member in later.members)
        except Misfit:
            merged = False
        if not merged:
            place.update(before)
            return False
        self.items[home.position] = trial
        self.items[other.position] = Group(other.position, [], self.new_terms())
        self.move_views(trial)
        return True

    def adopts(self, group: Group, node: Node) -> bool:
        shape, dims = loops_of(node)
        if not self.fits(group, node, shape, dims, related=True):
            return False
        self.add(group, node)
        return True

    def have_room(self, earlier: Group, later: Group) -> bool:
        """Whether the loops of one group are those of another, before anything is made in them."""
        axes = earlier.axes
        for member in later.members:
            found = self.axes_with(axes, *loops_of(member))
            if found is None:
                return False
            axes = found
        return True

    def outside(self, group: Group) -> set[Node]:
        """What the members read that is not of their own group."""
        return {r for m in group.members for r in m.inputs() if self.place[r] != group.position}

    def move_views(self, group: Group) -> None:
        """Let the views of a group's members follow them."""
        found = reached(group.members, lambda node: filter(is_map, self.users[node]))
        self.place.update(dict.fromkeys(found, group.position))


def factors(users: Users) -> Iterator[Node]:
    """What is multiplied to be summed up, each of it many times: loops that do that make nothing else."""
    for node in users:
        if name_of(node.op) == "mul" and [name_of(user.op) for user in users[node]] == ["sum"]:
            given = [arg for arg in node.args if type(arg) is Node]
            if len(given) == 2 and all(elements(one) * MANY <= elements(node) for one in given):
                yield from given


def turned(users: Users) -> Iterator[Node]:
    """Copies that lie along rows of what lies across them, and are read again and again.

    On a GPU blocks turn squares; loops that fold rows would read each of them here and there.
    """
    for node in users:
        if name_of(node.op) == "clone" and len(users[node]) > 1 and elements(node) >= TURNED:
            stride, before = node.spec.stride, node.args[0].spec.stride
            if stride and stride[-1] == 1 and type(before[-1]) is int and before[-1] > 1:
                yield node


def seen_in_windows(users: Users) -> Iterator[Node]:
    """What is summed up times windows of something, and that: each element of it is read many times."""
    for node in users:
        if name_of(node.op) == "mul" and [name_of(user.op) for user in users[node]] == ["sum"]:
            found = [before(arg) for arg in node.args if type(arg) is Node]
            if len(found) == 2 and any(windows for _, windows in found):
                yield from [source for source, _ in found]


def before(node: Node) -> tuple[Node, bool]:
    """What a value is a view or a copy of, widened or with a border, and whether windows are among these."""
    windows = False
    while is_map(node) or is_widened(node) or name_of(node.op) in REARRANGED - {"cat"}:
        windows |= name_of(node.op) == "unfold"
        node = node.args[0]
    return node, windows


def partial_sums(graph: Graph, users: Users) -> set[Node]:
    """The sums of what calls give that a backward pass adds to until they leave it: gradients of a weight.

    Each is made as soon as it can be: all that is added would be in memory at once otherwise.
    """
    leaving = set(nodes_in(graph.outputs))
    sums: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.backward and (node in leaving or node in sums) and name_of(node.op) == "add":
            parts = [arg for arg in node.args if type(arg) is Node and arg.op is node.op]
            sums.update(arg for arg in parts if users[arg] == [node] and bytes_of([arg]) >= SUMMED)
    return {node for node in sums if all(arg in sums or is_called(arg) for arg in node.inputs())}


def is_called(node: Node) -> bool:
    """Whether a value is a call's, or a view of such a one."""
    while is_map(node):
        node = node.args[0]
    return node.op not in (INPUT, CONSTANT) and not is_pointwise(node) and folded_dims(node) is None


def loops_of(node: Node) -> tuple[Coords, frozenset[int] | None]:
    """The extents that a node loops over, and the dimensions that it folds."""
    dims = folded_dims(node)
    return shape_of(node) if dims is None else shape_of(node.args[0]), dims
