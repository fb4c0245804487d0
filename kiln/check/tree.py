"""GuardSet: collects guards and merges them into the tree of fetches and checks that C evaluates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from kiln import _hook
from kiln.base.dataclass import dataclass
from kiln.base.source import Arg, Attr, CellContents, ClosureCell, Const, DictAttr, Global, Item, Source, Step
from kiln.check.guards import Guard, Is

Node = tuple[int, int, Any]
Check = tuple[int, tuple[int, ...], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Guards over paths, each a step from an earlier one or a root, with what C is told of each guard."""

    steps: Sequence[tuple[Step | None, int]]
    checks: Sequence[tuple[Guard, int, tuple[int, Any]]]
    trees: dict[Any, _Tree] = field(default_factory=dict)
    """For roots and chosen guards their tree, of which the roots are the first nodes."""

    def tree(self, roots: Iterable[int], chosen: Sequence[int]) -> _Tree:
        key = tuple(roots), tuple(chosen)
        known = self.trees.get(key)
        if known is None:
            known = self.trees[key] = _Tree()
            numbers = {place: known.step(-1, -1, place) for place in roots}
            spot = _Spot(known)

            def number(place: int) -> int:
                if place not in numbers:
                    step, base = self.steps[place]
                    numbers[place] = STEPS[type(step)](known, step, number(base))
                return numbers[place]

            for i in chosen:
                guard, place, (kind, operand) = self.checks[i]
                spot.number = number(place)
                known.checks.append((kind, guard.nodes(spot), operand))
        return known


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """The guards of a pattern over other roots, written one by one where somebody asks for them.

    `roots` are paths by their places, `chosen` the numbers of the guards. Those of `values` are `Is` guards,
    of another object.
    """

    pattern: Pattern
    roots: Mapping[int, Source]
    chosen: Sequence[int]
    values: Mapping[int, Any]

    def key(self) -> object:
        return self

    def guards(self) -> list[Guard]:
        sources: dict[int, Source] = dict(self.roots)

        def source(place: int) -> Source:
            if place not in sources:
                step, base = self.pattern.steps[place]
                assert step is not None
                sources[place] = step.after(source(base))
            return sources[place]

        found = []
        for number in self.chosen:
            guard, place, _ = self.pattern.checks[number]
            there = source(place)
            found.append(Is(there, self.values[number]) if number in self.values else guard.at(there))
        return found

    def build(self, tree: _Tree) -> None:
        """Put the checks into a tree, in the order of the guards."""
        pattern = self.pattern.tree(self.roots, self.chosen)
        numbers = [tree.node(source) for source in self.roots.values()]
        for parent, kind, operand in pattern.nodes[len(numbers) :]:
            numbers.append(tree.step(kind, numbers[parent], operand))
        for i, (kind, reads, operand) in zip(self.chosen, pattern.checks, strict=True):
            (read,) = reads
            tree.checks.append((kind, (numbers[read],), self.values.get(i, operand)))


class GuardSet:
    """An ordered set of guards."""

    def __init__(self) -> None:
        self._guards: dict[object, Guard | Moved] = {}
        self._places: dict[Any, Any] = {}
        self._written: tuple[Guard, ...] | None = None

    def add(self, guard: Guard | Moved, at: Any = None) -> None:
        """Add a guard, with the place in the program of the read that asks for it."""
        if self._guards.setdefault(guard.key(), guard) is guard and at is not None:
            self._places[guard] = at
        self._written = None

    @property
    def guards(self) -> tuple[Guard, ...]:
        """All, in order."""
        if self._written is None:
            found: list[Guard] = []
            for guard in self._guards.values():
                if isinstance(guard, Moved):
                    each, at = guard.guards(), self._places.get(guard)
                    self._places.update(dict.fromkeys(each, at))
                    found += each
                else:
                    found.append(guard)
            self._written = tuple(found)
        return self._written

    def direct(self) -> list[Guard]:
        """Those that stand for themselves, without the many that are like those of another module."""
        return [guard for guard in self._guards.values() if not isinstance(guard, Moved)]

    def place(self, guard: Guard) -> Any:
        """Where in the program the read stood that asked for one of `guards`."""
        return self._places.get(guard)

    def build(self, settled: bool = False) -> _hook.Guards:
        """The guards in C; settled ones trust tensors in dicts as long as no dict has changed."""
        tree = _Tree()
        for guard in self._guards.values():
            if isinstance(guard, Moved):
                guard.build(tree)
            else:
                tree.check(guard)
        return _hook.Guards(tree.nodes, tree.checks, settled)


class _Tree:
    """Nodes by path, parents first, and one check a guard."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.checks: list[Check] = []
        self._known: dict[object, int] = {}

    def node(self, source: Source) -> int:
        known = self._known.get(source)
        if known is None:
            step = STEPS.get(type(source))
            if step is not None:
                known = step(self, source, self.node(source.base))  # type: ignore[attr-defined]
            else:
                make = _ROOTS.get(type(source))
                known = make(self, source) if make else self._put(-1, _hook.FETCH_CALL, source.fetch, source)
            self._known[source] = known
        return known

    def _put(self, parent: int, kind: int, operand: Any, key: object) -> int:
        known = self._known.get(key)
        if known is None:
            self.nodes.append((parent, kind, operand))
            known = self._known[key] = len(self.nodes) - 1
        return known

    def instance_dict(self, base: Source) -> int:
        return self.dict_of(self.node(base))

    def dict_of(self, parent: int) -> int:
        return self.step(_hook.FETCH_DICT, parent, None)

    def step(self, kind: int, parent: int, operand: Any) -> int:
        return self._put(parent, kind, operand, (kind, parent, type(operand), operand))

    def check(self, guard: Guard) -> None:
        kind, operand = guard.emit()
        self.checks.append((kind, guard.nodes(self), operand))


class _Spot:
    """The tree to a guard whose one path is a node already."""

    def __init__(self, tree: _Tree) -> None:
        self.tree, self.number = tree, -1

    def node(self, source: Source) -> int:
        return self.number

    def instance_dict(self, base: Source) -> int:
        return self.tree.dict_of(self.number)


#: How the node of a step from a node is made.
STEPS: dict[type, Callable[[_Tree, Any, int], int]] = {
    Attr: lambda t, s, n: t.step(_hook.FETCH_ATTR, n, s.name),
    DictAttr: lambda t, s, n: t.step(_hook.FETCH_KEY, t.dict_of(n), s.name),
    Item: lambda t, s, n: t.step(_hook.FETCH_ITEM, n, s.key),
    CellContents: lambda t, s, n: t.step(_hook.FETCH_CELL, n, None),
    ClosureCell: lambda t, s, n: t.step(_hook.FETCH_CLOSURE, n, s.index),
}
#: How the node of a path's beginning is made; others are fetched by a call.
_ROOTS: dict[type, Callable[[_Tree, Any], int]] = {
    Arg: lambda t, s: t._put(-1, _hook.FETCH_ARG, s.index, s),
    Const: lambda t, s: t._put(-1, _hook.FETCH_CONST, s.value, s),
    Global: lambda t, s: t.node(Item(s.namespace, s.name)),
}
