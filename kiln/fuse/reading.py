"""What members of groups compute, as terms: elements of nodes read in the loops of a group."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import field
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.expressions import FLOORDIV, MOD
from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec, nodes_in
from kiln.base.symbols import Expr, Scope
from kiln.fuse.axes import Misfit, coordinates, hinted
from kiln.fuse.costs import (
    CHEAP,
    MUCH_SMALLER,
    SEVERAL,
    SLIGHT,
    SLOW,
    along,
    bytes_of,
    elements,
    lies_as,
    of_data,
    reads_no_more,
    weight,
)
from kiln.fuse.folds import PLACED, folded_dims, folded_place, is_running, kept_shape
from kiln.fuse.lower import CONDITIONS, LOWER, Terms, is_pointwise
from kiln.fuse.nest import AFFINE, RECURRENCE, Apply, Axis, Buffer, Fold, Load, Term, terms
from kiln.fuse.views import VIEWS, Coords, is_map, place_of, shape_of
from kiln.ops.levels import name_of

#: Terms that reads out of order count as, of a value that no loops with folds make.
GATHERED = 40
#: Turns of loops that take far longer than a launch, and of such that take no longer.
LARGE, SHORT = 1 << 20, 1 << 15
#: Bytes of memory that are worth another kernel before much larger loops.
MUCH = 4 << 10
#: Bytes of what a value is made of that are worth a kernel that makes it while they are there.
HELD = 1 << 16
#: Ops whose elements are those of other places of what they read.
ELSEWHERE = frozenset({"index", "gather", "cat", "constant_pad_nd", "slice_scatter", "convolution"})
#: Ops whose elements are copies from places that are to be found out.
REARRANGED = frozenset({"cat", "clone", "constant_pad_nd"})
#: Views that show elements in the order in which they lie.
RESHAPED = frozenset({"view", "expand"})


@dataclass(eq=False, slots=True)
class Group:
    """Nodes that share loops."""

    position: int
    axes: list[Axis]
    terms: Terms
    members: list[Node] = field(default_factory=list)
    memo: dict[Any, Term] = field(default_factory=dict)
    costs: dict[Node, int] = field(default_factory=dict)
    reads: set[Node] = field(default_factory=set)
    spots: dict[Node, set[Coords]] = field(default_factory=dict)
    """The coordinates at which members are read."""
    makes_others: bool = False
    """Whether values of other groups are made here, too."""

    def copy(self) -> Group:
        """Another group of the same nodes, which may grow where this one stays as it is."""
        spots = {node: set(places) for node, places in self.spots.items()}
        return Group(
            self.position, list(self.axes), self.terms.copy(), list(self.members), dict(self.memo),
            dict(self.costs), set(self.reads), spots, self.makes_others,
        )  # fmt: skip

    @property
    def kept(self) -> list[Axis]:
        return [a for a in self.axes if not a.reduced]

    @property
    def folds(self) -> bool:
        return any(a.reduced for a in self.axes)

    def volume(self) -> int:
        """The turns of all loops, by the sizes when traced."""
        return math.prod([hinted(a.size) for a in self.axes])


class Groups:
    """A graph on its way to kernels: `items` are groups, updates and eager calls as they will run."""

    def __init__(self, graph: Graph, exact: bool = False, anew: int = 0) -> None:
        self.graph, self.exact, self.anew = graph, exact, anew
        self.scope = _scope_of(graph)
        self.items: list[Any] = []
        self.place: dict[Node, int] = {}
        self.chains: dict[tuple[Node, int], int] = {}  # what values read costs where it is made with them
        self.buffers: dict[Node, Buffer] = {}
        self.owners: dict[Buffer, Node] = {}
        self.free: set[Node] = set()  # values without inputs: each reader makes them itself
        self.early: dict[Node, None] = {}  # what runs before all else
        self.read_whole: set[Node] = set()
        self.made_of: dict[Node, set[Node] | None] = {}  # what is read where values are made anew
        self.roots: dict[Node, Node] = {}
        self.matched: dict[Any, Coords | None] = {}  # the coordinates of shapes in loops
        self.users = graph.users()
        self._readers: dict[Node, list[Node]] = {}
        self.outputs = {self.root(node) for node in nodes_in(graph.outputs)}

    def new_terms(self) -> Terms:
        """Where the terms of a new group are made."""
        return Terms(self.scope, self.exact)

    def coordinates(self, shape: Coords, axes: list[Axis]) -> Coords | None:
        """For each dimension of a shape its coordinate in some loops; None without a match."""
        key = shape, *axes
        if key not in self.matched:
            self.matched[key] = coordinates(shape, axes)
        return self.matched[key]

    def root(self, node: Node) -> Node:
        """The node whose elements a chain of views shows."""
        known = self.roots.get(node)
        if known is None:
            known = node
            while is_map(known):
                known = known.args[0]
            self.roots[node] = known
        return known

    def natural(self, group: Group, node: Node) -> tuple[Coords, Term, bool]:
        """A member's element in its group's loops: its coordinates, the term, whether once a row."""
        if is_running(node):
            coords = self.coordinates(shape_of(node.args[0]), group.axes)  # as the loops were made of
            if coords is None:
                raise Misfit
            return coords, self.fold(group, node), False
        if folded_dims(node) is not None:
            shape = kept_shape(node)
            coords = self.coordinates(shape, group.kept)
            if coords is None:
                raise Misfit
            return self.own_coords(node, coords), self.fold(group, node), True
        shape = shape_of(node)
        coords = self.coordinates(shape, group.axes)
        if coords is not None:
            term = self.element(group, node, coords, None)
            group.terms.phase(term)
            return coords, term, False
        coords = self.coordinates(shape, group.kept) if group.folds else None
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
            if is_map(node):
                return self.read(group, node.args[0], VIEWS[name_of(node.op)](node, coords), valid)
            if self.place[node] == group.position or node in self.free:
                if folded_dims(node) is not None:
                    return self.result_of_fold(group, node, coords)
                if node not in self.free:
                    self.read_at(group, node, coords)
                return self.element(group, node, coords, valid)
            if self.small(group, node) and not self.split_up(group, node, coords):
                group.makes_others = True
                return self.element(group, node, coords, valid)
        spec: TensorSpec = node.spec
        index = self.scope.shorter(place_of(coords, spec))
        return group.terms.load(self.buffer(node), index, spec.dtype, valid)

    def split_up(self, group: Group, node: Node, coords: Coords) -> bool:
        """Whether a rearranged value is read again and again at quotients of places: then it is made once."""
        if self.anew or name_of(node.op) not in REARRANGED or group.volume() < SHORT:
            return False
        often = elements(node) * 3 <= group.volume() * 2
        return often and any(
            atom.op in (FLOORDIV, MOD) for c in coords if isinstance(c, Expr) for m in c.poly for atom in m
        )

    def read_at(self, group: Group, node: Node, coords: Coords) -> None:
        """Note where a member is read; Misfit where that makes it too often."""
        spots = group.spots.setdefault(node, set())
        spots.add(coords)
        if len(spots) >= SEVERAL and len(spots) * self.cost(group, node) > CHEAP:
            raise Misfit

    def scattered(self, group: Group, node: Node) -> int:
        """How many reads at places that are data a member's element is made of."""
        found = terms([self.natural(group, node)[1]])
        return sum(isinstance(t, Load) and bool(t.places) for t in found)

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
            coords = self.coordinates(shape_of(source), group.axes)
            if coords is None:
                raise Misfit
            value = self.read(group, source, coords, None)
            kind, dtype, place = name_of(node.op), node.spec.dtype, None
            if kind in PLACED:
                place = group.terms.place(folded_place(node, coords))
                (value,) = group.terms.rounded((value,))
                if node.spec.device.type == "cpu":
                    place = group.terms.narrowed(place)
            elif value.dtype != dtype:
                value = group.terms.apply("convert", dtype, value)
            single = is_running(node) and kept_shape(node) == shape_of(node)
            if kind == RECURRENCE and not single:
                value = self.affine(group, node, coords, value)
            if single or not group.folds:  # over extents of 1 alone
                known = value if place is None else place
                if kind == "sum" and dtype.is_floating_point:  # a sum of nothing but -0.0 is 0.0
                    known = group.terms.apply("add", dtype, value, group.terms.const(0.0, dtype))
            else:
                held = dtype if place is None else place.dtype
                known = group.terms.make(Fold, kind, value, held, group.terms.phase(value), place)
            if known.dtype != dtype:
                known = group.terms.apply("convert", dtype, known)
            group.memo[key] = known
        return known

    def affine(self, group: Group, node: Node, coords: Coords, value: Term) -> Term:
        """What a turn of a recurrence does to the result before: nothing is before the first one."""
        terms, dtype = group.terms, node.spec.dtype
        factor = self.read(group, node.args[2], coords, None)
        place = terms.place(folded_place(node, coords))
        first = terms.apply("eq", torch.bool, place, terms.const(0, torch.int64))
        factor = terms.apply("where", dtype, first, terms.const(0.0, dtype), factor)
        return terms.apply(AFFINE, dtype, factor, value)

    def result_of_fold(self, group: Group, node: Node, coords: Coords) -> Term:
        if is_running(node):
            if coords != self.coordinates(shape_of(node), group.axes):
                raise Misfit
            return self.fold(group, node)
        kept = self.coordinates(kept_shape(node), group.kept)
        if kept is None or self.own_coords(node, kept) != tuple(
            0 if n == 1 else c for c, n in zip(coords, shape_of(node), strict=True)
        ):
            raise Misfit
        return self.fold(group, node)

    def small(self, group: Group, node: Node, depth: int = 0) -> bool:
        """Whether a value of another group is so small and cheap that these loops make it themselves."""
        if node in self.read_whole or not is_pointwise(node):
            return False
        home = self.items[self.place[node]]
        if not isinstance(home, Group):
            return False
        if node not in self.outputs and is_widened(node):
            return True
        apart = self.anew or elements(node) == 1
        if apart and group.volume() > 1 and self.is_slow(home, node, group.volume()):
            return False
        if not home.folds:
            much_smaller = elements(node) * MUCH_SMALLER <= group.volume() and self.scattered(home, node) < 2
            limit = CHEAP if much_smaller else SLIGHT if self.has_one_reader(node) else 0
            cost = self.cost(home, node) if limit else 1
            if cost <= limit and cost + self.made_for(group, home, node, depth) <= limit:
                reads = self.read_by(home, node)
                if much_smaller:
                    return not self.crowds(reads, home, node, group)
                return not self.holds(reads, home, group.position, [node])
        return node not in self.outputs and (self.costs_no_traffic(home, node) or self.made_anew(home, node))

    def crowds(self, reads: Iterable[Node], home: Group, node: Node, group: Group) -> bool:
        """Whether much that a value is made of would be in memory beside what much larger loops make."""
        if self.anew:
            return False
        made = group.volume() * int(node.spec.dtype.itemsize)
        return min(bytes_of(self.going(reads, home.position)), made) - bytes_of([node]) >= MUCH

    def going(self, reads: Iterable[Node], home: int) -> list[Node]:
        """What of some values the group at a place alone reads: it goes where that is made."""
        passing = [n for n in reads if n.op is not INPUT and n.op is not CONSTANT and n not in self.outputs]
        return [n for n in passing if all(self.place.get(r) == home for r in self.readers(n))]

    def holds(self, reads: Iterable[Node], home: Group, until: int, made: Collection[Node]) -> bool:
        """Whether making values of a group later, after eager's kernels, holds much more memory till then."""
        between = self.items[home.position + 1 : until]
        if self.anew or not any(isinstance(item, Node) for item in between):
            return False
        held = self.going(reads, home.position)
        held += [n for n in home.members if self.waits_for(n, made, until)]
        return bytes_of(held) > max(2 * bytes_of(made), HELD)

    def waits_for(self, node: Node, made: Collection[Node], until: int) -> bool:
        """Whether a value that is kept would be read last where others are made of it."""
        if node not in self.read_whole or node in self.outputs:
            return False
        others = [r for r in self.readers(node) if r not in made]
        return len(others) < len(self.readers(node)) and all(self.place.get(r, until) < until for r in others)

    def read_by(self, home: Group, node: Node) -> dict[Node, None]:
        """What is read from memory for a member's element."""
        made_of = terms([self.natural(home, node)[1]])
        return dict.fromkeys(self.owners[t.buffer] for t in made_of if isinstance(t, Load))

    def made_for(self, group: Group, home: Group, node: Node, depth: int) -> int:
        """What it costs these loops to make what a value of another group reads, where that is small, too."""
        key = node, group.volume()
        if key not in self.chains and depth < CHEAP:
            read = self.read_by(home, node)
            found = [(one, self.items[self.place[one]]) for one in read if self.place.get(one, -1) >= 0]
            self.chains[key] = sum([
                self.cost(there, one) + self.made_for(group, there, one, depth + 1) for one, there in found
                if isinstance(there, Group) and self.small(group, one, depth + 1)
            ])  # fmt: skip
        return self.chains.get(key, 0)

    def is_slow(self, home: Group, node: Node, volume: int) -> bool:
        """Whether a value takes more than sums and products: what is small is kept then, and made once.

        A number is kept where it takes them in float64, else made in each thread.
        """
        number = elements(node) == 1
        if home.volume() > SHORT or not number and (volume < LARGE or not node.spec.dtype.is_floating_point):
            return False
        found = [t for t in terms([self.natural(home, node)[1]]) if isinstance(t, Apply) and t.op in SLOW]
        return any(not number or term.dtype is torch.float64 for term in found)

    def gathers(self, group: Group, node: Node) -> bool:
        """Whether an element is made of many reads here and there: then it is made once, by many threads."""
        if not self.anew or not any(name_of(m.op) == "index" for m in (*group.members, node)):
            return False
        found = terms([self.natural(group, node)[1]])
        return sum(weight(t) for t in found if isinstance(t, Load) and weight(t) > 1) > GATHERED

    def made_anew(self, home: Group, node: Node) -> bool:
        """Whether a value, functions too, follows from no more bytes than it has: where those are cheap."""
        if not self.anew or self.cost(home, node) > self.anew:
            return False
        return self.sources(node) is not None

    def keep(self, nodes: Iterable[Node]) -> None:
        """Note that something reads values as a whole."""
        for node in nodes:
            self.read_whole.add(node)
            if self.made_of.get(node) is not None:
                self.made_of.clear()

    def sources(self, node: Node) -> set[Node] | None:
        """What is read to make a value anew; None where it is read itself, which takes fewer bytes."""
        known = self.made_of
        if node not in known:
            known[node] = None
            kept = node in self.outputs or node in self.read_whole or self.place.get(node, -1) < 0
            if not kept and is_pointwise(node) and name_of(node.op) not in ELSEWHERE:
                read: set[Node] = set()
                for root in map(self.root, node.inputs()):
                    if root not in self.free:
                        read |= self.sources(root) or {root}
                there = all(self.in_order(one) for one in node.inputs())
                if there and bytes_of(read) <= bytes_of({node}) and all(lies_as(one, node) for one in read):
                    known[node] = read
        return known[node]

    def in_order(self, node: Node) -> bool:
        """Whether views on the way to a node's memory leave the order of its elements as it is."""
        while is_map(node):
            if name_of(node.op) not in RESHAPED:
                return False
            node = node.args[0]
        return True

    def costs_no_traffic(self, home: Group, node: Node) -> bool:
        """Whether loops that make a value of another group anew read no more than the value itself."""
        if self.cost(home, node) > SLIGHT:
            return False
        made_of = terms([self.natural(home, node)[1]])
        read = dict.fromkeys(self.owners[t.buffer] for t in made_of if isinstance(t, Load))
        # What reads a mask of few elements would wait for a launch of its own.
        mask = self.anew and node.spec.dtype is torch.bool and elements(node) <= SHORT
        return reads_no_more(node, made_of, [] if mask else list(read))

    def has_one_reader(self, node: Node) -> bool:
        """Whether nobody but one node reads a value: then it needs no memory where that one makes it."""
        return node not in self.outputs and len(self.readers(node)) == 1

    def readers(self, node: Node) -> list[Node]:
        """The nodes that read a node, through views too; the views themselves do not count."""
        found = self._readers.get(node)
        if found is None:
            found = self._readers[node] = []
            for user in self.users[node]:
                found += self.readers(user) if is_map(user) else [user]
        return found

    def cost(self, group: Group, node: Node) -> int:
        """How many terms of data a member's element is made of; those of places alone cost little.

        Neither do those that are the same along the innermost loop.
        """
        known = group.costs.get(node)
        if known is None:
            coords, term, _ = self.natural(group, node)
            made_of = along(of_data(terms([term])), coords)
            single = not any(isinstance(c, Expr) for c in coords)  # made once, outside of the loops
            known = group.costs[node] = len(made_of) if single else sum(map(weight, made_of))
        return known

    def buffer(self, node: Node) -> Buffer:
        known = self.buffers.get(node)
        if known is None:
            known = self.buffers[node] = Buffer(node.name, node.spec.dtype)
            self.owners[known] = node
        return known


def is_of_neighbours(node: Node) -> bool:
    """Whether elements are made of many neighbours, which are read from memory."""
    return name_of(node.op) in CONDITIONS


def is_widened(node: Node) -> bool:
    """Whether a value is another one in more bytes: that one is kept in its place."""
    if name_of(node.op) != "_to_copy" or not isinstance(node.args[0], Node):
        return False
    narrow, wide = node.args[0].spec.dtype, node.spec.dtype
    return bool(narrow.is_floating_point and wide.is_floating_point and narrow.itemsize < wide.itemsize)


def _scope_of(graph: Graph) -> Scope:
    """The owner of the graph's symbols: they are sizes, or numbers that are inputs themselves."""
    for node in (*graph.inputs, *graph.nodes):
        if isinstance(node.spec, Expr):
            return node.spec.scope  # type: ignore[no-any-return]
        if isinstance(node.spec, TensorSpec):
            for n in (*node.spec.shape, *node.spec.stride):
                if isinstance(n, Expr):
                    return n.scope  # type: ignore[no-any-return]
    return Scope()
