"""Merges groups that depend on each other or read the same values, where nothing lies between them."""

from __future__ import annotations

from collections import defaultdict

from kiln.base.graph import Node
from kiln.fuse.axes import Misfit
from kiln.fuse.folds import folded_dims
from kiln.fuse.group import LOOK_BACK, Fuser
from kiln.fuse.lower import Terms
from kiln.fuse.reading import Group
from kiln.fuse.views import is_map, shape_of

#: Nodes of one kernel at most.
LARGEST = 200


def coalesce(fuser: Fuser) -> None:
    """Let each group join an earlier one that it reads, or that reads what it reads."""
    Coalescing(fuser).run()


class Coalescing:
    """The pass: who uses each node, and the groups that read each value."""

    def __init__(self, fuser: Fuser) -> None:
        self.fuser = fuser
        self.users = fuser.graph.users()
        self.reading: defaultdict[Node, set[int]] = defaultdict(set)
        for item in fuser.items:
            if isinstance(item, Group):
                self.note(item)

    def note(self, group: Group) -> None:
        for root in group.reads:
            self.reading[root].add(group.position)

    def run(self) -> None:
        for position in range(len(self.fuser.items)):
            later = self.fuser.items[position]
            if isinstance(later, Group):
                for earlier in self.related(later):
                    if self.merge(earlier, later):
                        break

    def related(self, group: Group) -> list[Group]:
        """The earlier groups that a group reads, and those that read what it reads, nearest first."""
        places = {self.fuser.place[root] for root in group.reads}
        places.update(*[self.reading[root] for root in group.reads])
        earlier = sorted((p for p in places if 0 <= p < group.position), reverse=True)
        found = [item for p in earlier if isinstance(item := self.fuser.items[p], Group) and item.members]
        return found[:LOOK_BACK]

    def merge(self, earlier: Group, later: Group) -> bool:
        """Make two groups one, at the place of either; False where that is not possible."""
        if len(earlier.members) + len(later.members) > LARGEST:
            return False
        fuser, place = self.fuser, self.fuser.place
        upward = all(place[r] <= earlier.position for r in self.outside(later))
        below = {n for m in earlier.members for n in self.readers(m)} - set(earlier.members)
        downward = all(place[n] >= later.position for n in below)
        if not upward and not downward:
            return False
        home, other = (earlier, later) if upward else (later, earlier)
        trial = Group(home.position, list(earlier.axes), Terms(fuser.scope), list(earlier.members))
        trial.reads.update(earlier.reads)
        before = {m: place[m] for m in (*earlier.members, *later.members)}
        place.update(dict.fromkeys(before, home.position))
        try:
            fuser.rebuild(trial)
            merged = all(self.adopts(trial, member) for member in later.members)
        except Misfit:
            merged = False
        if not merged:
            place.update(before)
            return False
        fuser.items[home.position] = trial
        fuser.items[other.position] = Group(other.position, [], Terms(fuser.scope))
        self.note(trial)
        self.move_views(trial)
        return True

    def adopts(self, group: Group, node: Node) -> bool:
        dims = folded_dims(node)
        shape = shape_of(node.args[0]) if dims is not None else shape_of(node)
        if not self.fuser.fits(group, node, shape, dims, related=True):
            return False
        self.fuser.add(group, node)
        return True

    def outside(self, group: Group) -> set[Node]:
        """What the members read that is not of their own group."""
        place = self.fuser.place
        return {r for m in group.members for r in m.inputs() if place[r] != group.position}

    def readers(self, node: Node) -> list[Node]:
        """The nodes that read a node, through views too; the views themselves do not count."""
        found: list[Node] = []
        for user in self.users[node]:
            found += self.readers(user) if is_map(user) else [user]
        return found

    def move_views(self, group: Group) -> None:
        """Let the views of a group's members follow them."""
        todo = list(group.members)
        while todo:
            for user in self.users[todo.pop()]:
                if is_map(user):
                    self.fuser.place[user] = group.position
                    todo.append(user)
