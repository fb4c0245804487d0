"""Groups nodes into kernels: a node joins the loops of what it reads, or of a sibling, where it fits."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from kiln.base.graph import CONSTANT, INPUT, Node
from kiln.fuse.axes import axes_for
from kiln.fuse.coalesce import LOOK_BACK, Coalescing
from kiln.fuse.costs import MUCH_SMALLER
from kiln.fuse.folds import folded_dims, is_running, marked
from kiln.fuse.lower import is_drawn, is_pointwise
from kiln.fuse.nest import RECURRENCE
from kiln.fuse.ordered import Update, writes_of
from kiln.fuse.reading import Group, is_of_neighbours
from kiln.fuse.views import Coords, is_map, shape_of
from kiln.ops.levels import name_of


class Fuser(Coalescing):
    """Walks a graph once, in order."""

    def run(self) -> Fuser:
        """Put every node somewhere."""
        for node in self.graph.inputs:
            self.place[node] = -1
        for node in self.graph.nodes:
            self.put(node)
        self.coalesce()
        return self

    def put(self, node: Node) -> None:
        if node.op is CONSTANT or node.op is INPUT:
            self.place[node] = -1
        elif is_map(node):
            self.place[node] = self.place[self.root(node)]
            if self.root(node) in self.free:
                self.free.add(node)
        elif self.starts(node):
            self.early[node] = None
            self.place[node] = -1
        elif is_pointwise(node):
            if not any(True for _ in node.inputs()) or self.drawn_where_read(node):
                self.free.add(node)
                self.place[node] = -1
            else:
                if is_of_neighbours(node):
                    self.keep(map(self.root, node.inputs()))
                self.join(node, shape_of(node), None)
        elif (dims := self.folded(node)) is not None:
            self.join(node, shape_of(node.args[0]), dims)
        elif self.runs and writes_of(node) is not None:
            self.place[node] = len(self.items)
            self.items.append(Update(len(self.items), node))
        else:
            self.items.append(node)
            self.place[node] = len(self.items) - 1
            self.keep(node.inputs())

    def folded(self, node: Node) -> frozenset[int] | None:
        """The dimensions over which loops fold; None for what is no fold or is left to eager's kernel."""
        if is_running(node) and (self.exact if name_of(node.op) == RECURRENCE else not self.runs):
            return None
        return folded_dims(node)

    def starts(self, node: Node) -> bool:
        """Whether a node is the draw of seeds, or one of them: that runs before all else."""
        if node.op is operator.getitem:
            return node.args[0] in self.early
        return name_of(node.op) == "kiln::seeds"

    def drawn_where_read(self, node: Node) -> bool:
        """Whether random numbers need no memory: loops that read them draw them."""
        if not is_drawn(node) or node in self.outputs or self.place[node.args[0]] >= 0:
            return False
        return all(is_pointwise(user) or self.folded(user) is not None for user in self.readers(node))

    def join(self, node: Node, shape: Coords, dims: frozenset[int] | None) -> None:
        """Put a node into the first group that it fits, else into a new one."""
        last = max((self.place[r] for r in node.inputs()), default=-1)
        if dims is not None and self.settled(last):
            last = max(self.place[r] for r in node.inputs())
        for position in self.candidates(last):
            group = self.items[position]
            if isinstance(group, Group) and self.fits(group, node, shape, dims):
                self.add(group, node)
                return
        group = Group(len(self.items), axes_for(self.scope, shape), self.new_terms())
        if dims:
            group.axes = marked(group.axes, shape, dims)
        self.items.append(group)
        self.add(group, node)
        self.natural(group, node)

    def candidates(self, last: int) -> Iterable[int]:
        """Where a node whose inputs are ready after item `last` may go: the group of its last input first."""
        if last >= 0:
            yield last
        yield from range(len(self.items) - 1, max(last, len(self.items) - 1 - LOOK_BACK), -1)

    def settled(self, position: int) -> bool:
        """Whether a group that is about to be folded went to the loops whose rows it has the results of."""
        group = self.items[position] if position >= 0 else None
        if not isinstance(group, Group) or group.folds:
            return False
        volume = group.volume() * MUCH_SMALLER
        return any(
            earlier.folds and volume <= earlier.volume() and self.merge(earlier, group)
            for earlier in self.related(group)
        )
