"""GuardSet: collects guards and merges them into the tree of fetches and checks that C evaluates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kiln import _hook
from kiln.base.source import Arg, Attr, CellContents, ClosureCell, Const, DictAttr, Global, Item, Source
from kiln.check.guards import Guard

Node = tuple[int, int, Any]
Check = tuple[int, tuple[int, ...], Any]


class GuardSet:
    """An ordered set of guards."""

    def __init__(self) -> None:
        self._guards: dict[object, Guard] = {}
        self.places: dict[Guard, Any] = {}
        """Where in the program the read stood that asked for a guard."""

    def add(self, guard: Guard, at: Any = None) -> None:
        if self._guards.setdefault(guard.key(), guard) is guard and at is not None:
            self.places[guard] = at

    @property
    def guards(self) -> tuple[Guard, ...]:
        return tuple(self._guards.values())

    def __len__(self) -> int:
        return len(self._guards)

    def build(self, settled: bool = False) -> _hook.Guards:
        """The guards in C; settled ones trust tensors in dicts as long as no dict has changed."""
        tree = _Tree()
        for guard in self._guards.values():
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
            make = _FETCH.get(type(source))
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
        parent = self.node(base)
        return self._put(parent, _hook.FETCH_DICT, None, ("dict", parent))

    def _in_dict(self, parent: int, name: Any) -> int:
        return self._put(parent, _hook.FETCH_KEY, name, ("key", parent, type(name), name))

    def _closure(self, parent: int, index: int) -> int:
        return self._put(parent, _hook.FETCH_CLOSURE, index, ("closure", parent, index))

    def check(self, guard: Guard) -> None:
        kind, operand = guard.emit()
        self.checks.append((kind, guard.nodes(self), operand))


#: How the node of a path is made; others are fetched by a call.
_FETCH: dict[type, Callable[[_Tree, Any], int]] = {
    Arg: lambda t, s: t._put(-1, _hook.FETCH_ARG, s.index, s),
    Const: lambda t, s: t._put(-1, _hook.FETCH_CONST, s.value, s),
    Attr: lambda t, s: t._put(t.node(s.base), _hook.FETCH_ATTR, s.name, s),
    DictAttr: lambda t, s: t._in_dict(t.instance_dict(s.base), s.name),
    Item: lambda t, s: t._put(t.node(s.base), _hook.FETCH_ITEM, s.key, s),
    CellContents: lambda t, s: t._put(t.node(s.base), _hook.FETCH_CELL, None, s),
    ClosureCell: lambda t, s: t._closure(t.node(s.base), s.index),
    Global: lambda t, s: t.node(Item(s.namespace, s.name)),
}
