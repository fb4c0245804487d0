"""Fits nodes into the loops of groups, and merges groups that nothing separates."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from kiln.base.graph import Graph, Node
from kiln.fuse.axes import Misfit, coordinates, refined
from kiln.fuse.folds import folded_dims, marked
from kiln.fuse.reading import Group, Groups
from kiln.fuse.views import Coords, is_map, shape_of

#: Siblings are looked for among this many last kernels.
LOOK_BACK = 8
#: Nodes of groups that become one, at most.
LARGEST = 200


class Coalescing(Groups):
    """Groups that grow: with the groups that read each value."""

    def __init__(
        self, graph: Graph, exact: bool = False, largest: int = LARGEST, runs: bool = True, anew: int = 0
    ) -> None:
        super().__init__(graph, exact, anew)
        self.largest, self.runs = largest, runs
        self.reading: defaultdict[Node, set[int]] = defaultdict(set)

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
        if not related and not any(
            self.place[n] == group.position or n in group.reads for n in map(self.root, node.inputs())
        ):
            return False
        try:
            if dims is None and group.folds and coordinates(shape, group.kept) is not None:
                pass
            else:
                finer = refined(self.scope, group.axes, shape)
                if finer is None:
                    return False
                if finer != group.axes:
                    group.axes = finer
                    self.rebuild(group)
                if dims is not None:
                    self.mark(group, shape, dims)
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

    def mark(self, group: Group, shape: Coords, dims: frozenset[int]) -> None:
        """Let the axes of these dimensions be folded over; Misfit where the group folds over others."""
        wanted = marked([replace(a, reduced=False) for a in group.axes], shape, dims)
        if [a.reduced for a in wanted] == [a.reduced for a in group.axes]:
            return
        if group.folds:
            raise Misfit
        group.axes = wanted
        self.rebuild(group)

    def rebuild(self, group: Group) -> None:
        """Make the terms of a group anew after its axes changed."""
        group.memo.clear()
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
        if not upward and not downward:
            return False
        home, other = (earlier, later) if upward else (later, earlier)
        trial = Group(home.position, list(earlier.axes), self.new_terms(), list(earlier.members))
        trial.reads.update(earlier.reads)
        for root in trial.reads:
            self.reading[root].add(trial.position)
        before = {m: place[m] for m in (*earlier.members, *later.members)}
        place.update(dict.fromkeys(before, home.position))
        try:
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
        dims = folded_dims(node)
        shape = shape_of(node.args[0]) if dims is not None else shape_of(node)
        if not self.fits(group, node, shape, dims, related=True):
            return False
        self.add(group, node)
        return True

    def outside(self, group: Group) -> set[Node]:
        """What the members read that is not of their own group."""
        return {r for m in group.members for r in m.inputs() if self.place[r] != group.position}

    def move_views(self, group: Group) -> None:
        """Let the views of a group's members follow them."""
        todo = list(group.members)
        while todo:
            for user in self.users[todo.pop()]:
                if is_map(user):
                    self.place[user] = group.position
                    todo.append(user)
