"""Groups nodes into kernels: a node joins the loops of what it reads, or of a sibling, where it fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kiln.base.graph import CONSTANT, INPUT, Node
from kiln.fuse.axes import Misfit, axes_for, coordinates, refined
from kiln.fuse.folds import folded_dims, marked
from kiln.fuse.lower import Terms, is_pointwise
from kiln.fuse.reading import Group, Groups
from kiln.fuse.views import Coords, is_map, shape_of

#: Siblings are looked for among this many last kernels.
LOOK_BACK = 8


class Fuser(Groups):
    """Walks a graph once, in order."""

    def run(self) -> Fuser:
        """Put every node somewhere."""
        for node in self.graph.inputs:
            self.place[node] = -1
        for node in self.graph.nodes:
            self.put(node)
        return self

    def put(self, node: Node) -> None:
        if node.op is CONSTANT or node.op is INPUT:
            self.place[node] = -1
        elif is_map(node):
            self.place[node] = self.place[self.root(node)]
            if self.root(node) in self.free:
                self.free.add(node)
        elif is_pointwise(node):
            if not any(True for _ in node.inputs()):
                self.free.add(node)
                self.place[node] = -1
            else:
                self.join(node, shape_of(node), None)
        elif (dims := folded_dims(node)) is not None:
            self.join(node, shape_of(node.args[0]), dims)
        else:
            self.items.append(node)
            self.place[node] = len(self.items) - 1
            for read in node.inputs():
                self.read_whole.add(read)

    def join(self, node: Node, shape: Coords, dims: frozenset[int] | None) -> None:
        """Put a node into the first group that it fits, else into a new one."""
        last = max((self.place[r] for r in node.inputs()), default=-1)
        for position in self.candidates(last):
            group = self.items[position]
            if isinstance(group, Group) and self.fits(group, node, shape, dims):
                self.add(group, node)
                return
        group = Group(len(self.items), axes_for(self.scope, shape), Terms(self.scope))
        if dims:
            group.axes = marked(group.axes, shape, dims)
        self.items.append(group)
        self.add(group, node)
        self.natural(group, node)

    def add(self, group: Group, node: Node) -> None:
        group.members.append(node)
        group.reads.update(map(self.root, node.inputs()))
        self.place[node] = group.position

    def candidates(self, last: int) -> Iterable[int]:
        """Where a node whose inputs are ready after item `last` may go: the group of its last input first."""
        if last >= 0:
            yield last
        yield from range(len(self.items) - 1, max(last, len(self.items) - 1 - LOOK_BACK), -1)

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
        group.terms = Terms(self.scope)
        group.costs.clear()
        for member in group.members:
            self.natural(group, member)
