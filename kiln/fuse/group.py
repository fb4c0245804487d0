"""Groups nodes into kernels: a node joins the loops of what it reads, or of a sibling, where it fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec, nodes_in
from kiln.base.symbols import Expr, Scope
from kiln.fuse.axes import Misfit, axes_for, coordinates, hinted, refined
from kiln.fuse.lower import (
    LOWER,
    VIEWS,
    Coords,
    Terms,
    is_pointwise,
    is_view,
    shape_of,
    supported,
)
from kiln.fuse.merge import merged
from kiln.fuse.nest import Axis, Buffer, Fold, Kernel, Load, Store, Term, terms
from kiln.ops.levels import name_of

#: Reductions over some dimensions: the op's name, and what is folded.
FOLDS = {"sum": "sum", "prod": "prod", "amax": "amax", "amin": "amin", "any": "any", "all": "all"}

#: A small value is computed anew in the loops that read it when it costs no more functions than this.
CHEAP = 24
#: Siblings are looked for among this many last kernels.
LOOK_BACK = 8
#: Nodes of one kernel at most.
LARGEST = 200


@dataclass(frozen=True, eq=False, slots=True)
class Launch:
    """A step that runs a kernel: the nodes whose memory it reads and writes, by buffer."""

    kernel: Kernel
    reads: dict[Buffer, Node]
    writes: dict[Buffer, Node]


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A step that calls a node's op: an eager kernel, or a view of memory."""

    node: Node


@dataclass(slots=True)
class Program:
    """What a graph became: steps in order, over the graph's inputs and outputs."""

    graph: Graph
    steps: list[Launch | Call]

    @property
    def kernels(self) -> list[Kernel]:
        return [step.kernel for step in self.steps if isinstance(step, Launch)]


def fuse(graph: Graph) -> Program:
    """Kernels and calls of eager kernels that compute a graph of primitives."""
    return Fuser(graph).run()


@dataclass(eq=False, slots=True)
class Group:
    """Nodes that share loops."""

    position: int
    axes: list[Axis]
    terms: Terms
    members: list[Node] = field(default_factory=list)
    memo: dict[Any, Term] = field(default_factory=dict)
    inlined: set[Node] = field(default_factory=set)

    @property
    def kept(self) -> list[Axis]:
        return [a for a in self.axes if not a.reduced]

    @property
    def folds(self) -> bool:
        return any(a.reduced for a in self.axes)


class Fuser:
    """Walks a graph once, in order; `items` are groups and eager calls as they will run."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.scope = _scope_of(graph)
        self.items: list[Group | Node] = []
        self.place: dict[Node, int] = {}
        self.buffers: dict[Node, Buffer] = {}
        self.free: set[Node] = set()  # values without inputs: each reader makes them itself
        self.read_whole: set[Node] = set()

    # Grouping

    def run(self) -> Program:
        for node in self.graph.inputs:
            self.place[node] = -1
        for node in self.graph.nodes:
            self.put(node)
        self.coalesce()
        return self.finish()

    def put(self, node: Node) -> None:
        if node.op is CONSTANT or node.op is INPUT:
            self.place[node] = -1
        elif is_view(node) and supported(node.spec):
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

    def root(self, node: Node) -> Node:
        """The node whose elements a chain of views shows."""
        while node.op is not INPUT and node.op is not CONSTANT and is_view(node) and supported(node.spec):
            node = node.args[0]
        return node

    def join(self, node: Node, shape: Coords, dims: frozenset[int] | None) -> None:
        """Put a node into the first group that it fits, else into a new one."""
        last = max((self.place[r] for r in node.inputs()), default=-1)
        for position in self.candidates(last):
            group = self.items[position]
            if isinstance(group, Group) and self.fits(group, node, shape, dims):
                group.members.append(node)
                self.place[node] = position
                return
        group = Group(len(self.items), axes_for(self.scope, shape), Terms(self.scope))
        if dims:
            group.axes = _marked(group.axes, shape, dims)
        self.items.append(group)
        group.members.append(node)
        self.place[node] = group.position
        self.natural(group, node)

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
            n in group.members or self.shares(group, n) for n in map(self.root, node.inputs())
        ):
            return False
        try:
            if dims is None and group.folds and self.coords(group.kept, shape) is not None:
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

    # Merging groups

    def coalesce(self) -> None:
        """Merge groups that depend on each other or read the same values, where nothing lies between them."""
        users = self.graph.users()
        for position in range(len(self.items)):
            later = self.items[position]
            if isinstance(later, Group):
                for earlier in self.related(later):
                    if self.merge(earlier, later, users):
                        break

    def related(self, group: Group) -> list[Group]:
        """The earlier groups that a group reads, and those that read what it reads, nearest first."""
        reads = {self.root(r) for member in group.members for r in member.inputs()}
        found: list[Group] = []
        for position in range(group.position - 1, -1, -1):
            other = self.items[position]
            if (
                isinstance(other, Group)
                and other.members
                and (
                    any(self.place[r] == position for r in reads) or any(self.shares(other, r) for r in reads)
                )
            ):
                found.append(other)
                if len(found) == LOOK_BACK:
                    break
        return found

    def merge(self, earlier: Group, later: Group, users: dict[Node, list[Node]]) -> bool:
        """Make two groups one, at the place of either; False where that is not possible."""
        if len(earlier.members) + len(later.members) > LARGEST:
            return False
        upward = all(self.place[r] <= earlier.position for r in self.outside(later))
        below = {n for m in earlier.members for n in self.readers(m, users)} - set(earlier.members)
        downward = all(self.place[n] >= later.position for n in below)
        if not upward and not downward:
            return False
        home, other = (earlier, later) if upward else (later, earlier)
        trial = Group(home.position, list(earlier.axes), Terms(self.scope), list(earlier.members))
        before = {m: self.place[m] for m in (*earlier.members, *later.members)}
        self.place.update(dict.fromkeys(before, home.position))
        try:
            self.rebuild(trial)
            merged = all(self.adopts(trial, member) for member in later.members)
        except Misfit:
            merged = False
        if not merged:
            self.place.update(before)
            return False
        self.items[home.position] = trial
        self.items[other.position] = Group(other.position, [], Terms(self.scope))
        self.move_views(users, trial)
        return True

    def adopts(self, group: Group, node: Node) -> bool:
        dims = folded_dims(node)
        shape = shape_of(node.args[0]) if dims is not None else shape_of(node)
        if not self.fits(group, node, shape, dims, related=True):
            return False
        group.members.append(node)
        return True

    def outside(self, group: Group) -> set[Node]:
        """What the members read that is not of their own group."""
        return {r for m in group.members for r in m.inputs() if self.place[r] != group.position}

    def readers(self, node: Node, users: dict[Node, list[Node]]) -> list[Node]:
        """The nodes that read a node, through views too; the views themselves do not count."""
        found: list[Node] = []
        for user in users[node]:
            if is_view(user) and supported(user.spec):
                found += self.readers(user, users)
            else:
                found.append(user)
        return found

    def move_views(self, users: dict[Node, list[Node]], group: Group) -> None:
        """Let the views of a group's members follow them."""
        todo = list(group.members)
        while todo:
            for user in users[todo.pop()]:
                if is_view(user) and supported(user.spec):
                    self.place[user] = group.position
                    todo.append(user)

    def shares(self, group: Group, root: Node) -> bool:
        """Whether a group reads this value already."""
        return any(root is self.root(r) for member in group.members for r in member.inputs())

    def mark(self, group: Group, shape: Coords, dims: frozenset[int]) -> None:
        """Let the axes of these dimensions be folded over; Misfit where the group folds over others."""
        wanted = _marked([replace(a, reduced=False) for a in group.axes], shape, dims)
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
        group.inlined.clear()
        for member in group.members:
            self.natural(group, member)

    # Terms

    def coords(self, axes: list[Axis], shape: Coords) -> Coords | None:
        return coordinates(shape, axes)

    def natural(self, group: Group, node: Node) -> tuple[Coords, Term, bool]:
        """A member's element in its group's loops: its coordinates, the term, whether once a row."""
        if folded_dims(node) is not None:
            shape = kept_shape(node)
            coords = self.coords(group.kept, shape)
            if coords is None:
                raise Misfit
            return self.own_coords(node, coords), self.fold(group, node), True
        shape = shape_of(node)
        coords = self.coords(group.axes, shape)
        if coords is not None:
            return coords, self.element(group, node, coords, None), False
        coords = self.coords(group.kept, shape) if group.folds else None
        if coords is None:
            raise Misfit
        return coords, self.element(group, node, coords, None), True

    def own_coords(self, node: Node, kept: Coords) -> Coords:
        """Coordinates in a reduction's result, whose reduced dimensions are gone or of extent 1."""
        if len(shape_of(node)) == len(kept):
            return kept
        dims = folded_dims(node) or frozenset()
        return tuple([c for d, c in enumerate(kept) if d not in dims])

    def read(self, group: Group, node: Node, coords: Coords, valid: Term | None) -> Term:
        """The element of any node at coordinates, as the loops of `group` see it."""
        if node.op is not INPUT and node.op is not CONSTANT:
            if is_view(node) and supported(node.spec):
                return self.read(group, node.args[0], VIEWS[name_of(node.op)](node, coords), valid)
            if self.place[node] == group.position or node in self.free:
                if folded_dims(node) is None:
                    return self.element(group, node, coords, valid)
                return self.result_of_fold(group, node, coords)
            if self.small(group, node):
                group.inlined.add(node)
                return self.element(group, node, coords, valid)
        spec: TensorSpec = node.spec
        index: Any = 0
        for c, s in zip(coords, spec.stride, strict=True):
            index = index + c * s
        index = self.scope.simplify(index)
        return group.terms.load(self.buffer(node), index, spec.dtype, valid)

    def element(self, group: Group, node: Node, coords: Coords, valid: Term | None) -> Term:
        """The element of a pointwise node at coordinates."""
        key = (node, coords, valid)
        known = group.memo.get(key)
        if known is None:
            lower = LOWER[name_of(node.op)]
            known = group.memo[key] = lower(
                group.terms, node, coords, valid, lambda n, c, v: self.read(group, n, c, v)
            )
        return known

    def fold(self, group: Group, node: Node) -> Term:
        key = (node, None, None)
        known = group.memo.get(key)
        if known is None:
            source = node.args[0]
            coords = self.coords(group.axes, shape_of(source))
            if coords is None:
                raise Misfit
            value = self.read(group, source, coords, None)
            kind = FOLDS[name_of(node.op)]
            dtype = node.spec.dtype
            if value.dtype != dtype:
                value = group.terms.apply("convert", dtype, value)
            if not group.folds:  # over extents of 1 alone
                known = group.memo[key] = value
            else:
                known = group.memo[key] = group.terms.make(Fold, kind, value, dtype, phase_of(value))
        return known

    def result_of_fold(self, group: Group, node: Node, coords: Coords) -> Term:
        kept = self.coords(group.kept, kept_shape(node))
        if kept is None or self.own_coords(node, kept) != tuple(
            0 if n == 1 else c for c, n in zip(coords, shape_of(node), strict=True)
        ):
            raise Misfit
        return self.fold(group, node)

    def small(self, group: Group, node: Node) -> bool:
        """Whether a value of another group is so small and cheap that these loops make it themselves."""
        if node in self.read_whole or not is_pointwise(node):
            return False
        home = self.items[self.place[node]]
        if not isinstance(home, Group) or home.folds:
            return False
        volume = 1
        for a in group.axes:
            volume *= hinted(a.size)
        own = 1
        for n in shape_of(node):
            own *= hinted(n)
        return own * 8 <= volume and len(terms([self.natural(home, node)[1]])) <= CHEAP

    def buffer(self, node: Node) -> Buffer:
        known = self.buffers.get(node)
        if known is None:
            known = self.buffers[node] = Buffer(node.name, node.spec.dtype)
        return known

    # The end

    def finish(self) -> Program:
        """Steps in order; a member is stored when an output, an eager kernel or another group reads it."""
        needed = self.stored()
        # Values without inputs that are read as a whole are made by their own ops.
        steps: list[Launch | Call] = [Call(n) for n in self.graph.nodes if n in self.free and n in needed]
        views = set(self.needed_views())
        owner = {buffer: node for node, buffer in self.buffers.items()}
        pending = [n for n in self.graph.nodes if n in views]
        for item in self.items:
            if isinstance(item, Node):
                steps += self.ready_views(item, pending)
                steps.append(Call(item))
                continue
            kernel = merged(self.kernel(item, needed), self.scope)
            if kernel.stores:
                owner = {buffer: node for node, buffer in self.buffers.items()}
                reads, writes = kernel.buffers()
                for buffer in reads:
                    steps += self.ready_views(owner[buffer], pending, itself=True)
                steps.append(Launch(kernel, {b: owner[b] for b in reads}, {b: owner[b] for b in writes}))
        steps += [Call(n) for n in pending]
        return Program(self.graph, steps)

    def ready_views(self, node: Node, pending: list[Node], itself: bool = False) -> list[Call]:
        """The views that a step needs and that have not been taken yet."""
        wanted: set[Node] = {node} if itself else set(node.inputs())
        todo = list(wanted)
        while todo:
            n = todo.pop()
            if n.op is not INPUT and n.op is not CONSTANT and is_view(n) and n.args[0] not in wanted:
                wanted.add(n.args[0])
                todo.append(n.args[0])
        found = [n for n in pending if n in wanted]
        for n in found:
            pending.remove(n)
        return [Call(n) for n in found]

    def needed_views(self) -> Iterable[Node]:
        """Views that an output or an eager kernel reads, with the views below them."""
        todo = [*nodes_in(self.graph.outputs), *self.read_whole]
        seen: set[Node] = set()
        while todo:
            node = todo.pop()
            if node in seen or node.op is INPUT or node.op is CONSTANT or not is_view(node):
                continue
            if not supported(node.spec):
                continue
            seen.add(node)
            todo.append(node.args[0])
        return seen

    def stored(self) -> set[Node]:
        """The members of groups that need memory."""
        needed = {self.root(n) for n in (*nodes_in(self.graph.outputs), *self.read_whole)}
        for item in self.items:
            if isinstance(item, Group):
                needed.update(node for node in self.loaded(item))
        return needed

    def loaded(self, group: Group) -> set[Node]:
        owner = {buffer: node for node, buffer in self.buffers.items()}
        roots = [self.natural(group, m)[1] for m in group.members]
        return {owner[t.buffer] for t in terms(roots) if isinstance(t, Load)}

    def kernel(self, group: Group, needed: set[Node]) -> Kernel:
        made = Kernel(f"k{group.position}", tuple(group.axes))
        for node in group.members:
            if node not in needed:
                continue
            coords, value, once = self.natural(group, node)
            index: Any = 0
            for c, s in zip(coords, node.spec.stride, strict=True):
                index = index + c * s
            made.stores.append(Store(self.buffer(node), index, value, phase_of(value), once))
        return made


def _scope_of(graph: Graph) -> Scope:
    for node in (*graph.inputs, *graph.nodes):
        if isinstance(node.spec, TensorSpec):
            for n in node.spec.shape:
                if isinstance(n, Expr):
                    return n.scope  # type: ignore[no-any-return]
    return Scope()


def folded_dims(node: Node) -> frozenset[int] | None:
    """The dimensions that a reduction folds; None for other ops."""
    name = name_of(node.op)
    if name not in FOLDS or not isinstance(node.spec, TensorSpec) or not supported(node.spec):
        return None
    source = node.args[0]
    if not isinstance(source.spec, TensorSpec) or not supported(source.spec):
        return None
    rank = len(shape_of(source))
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dims is None or dims == []:
        dims = range(rank)
    elif isinstance(dims, int):
        dims = [dims]
    return frozenset(d % rank for d in dims) if rank else frozenset()


def kept_shape(node: Node) -> Coords:
    """The shape of what is folded, with the folded dimensions as 1."""
    dims = folded_dims(node) or frozenset()
    return tuple([1 if d in dims else n for d, n in enumerate(shape_of(node.args[0]))])


def _marked(axes: list[Axis], shape: Coords, dims: frozenset[int]) -> list[Axis]:
    """The axes with those of these dimensions folded over; each dimension must be a run of axes."""
    marked = list(axes)
    place = 0
    for d, n in enumerate(shape):
        if n == 1:
            continue
        extent: Any = 1
        while extent != n:
            if place == len(axes):
                raise Misfit
            extent = extent * axes[place].size
            if d in dims:
                marked[place] = replace(axes[place], reduced=True)
            place += 1
    return marked


def phase_of(term: Term) -> int:
    """The first phase in which a term can be computed: after the folds that it reads."""
    return max((t.phase + 1 for t in terms([term]) if isinstance(t, Fold)), default=0)
