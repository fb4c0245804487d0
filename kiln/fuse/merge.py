"""Merges neighbouring loops of a nest that always run on as one, so that the innermost one is long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kiln.base.arithmetic import maximum, minimum, without_quotients
from kiln.base.expressions import FLOORDIV, OPERATORS, SUM, from_poly
from kiln.base.symbols import Expr, Scope, Symbol
from kiln.fuse.axes import axis
from kiln.fuse.nest import Axis, Buffer, Load, Nest, Place, Store, Term, rebuilt, terms


def merged(nest: Nest, scope: Scope) -> Nest:
    """The nest with as few loops as its indices allow."""
    if any(whole(index) is not index for index in indices(nest)):
        nest = replace(nest, stores=rewritten(nest.stores, whole))
    place = len(nest.axes) - 2
    while place >= 0:
        outer, inner = nest.axes[place : place + 2]
        if outer.reduced == inner.reduced and all(runs_on(i, outer, inner) for i in indices(nest)):
            nest = with_one(nest, place, scope)
            place = min(place, len(nest.axes) - 2)
        else:
            place -= 1
    return nest


def whole(index: Any) -> Any:
    """An index without quotients and remainders that make up what they are of."""
    if not isinstance(index, Expr) or not any(part.op is FLOORDIV for m in index.poly for part in m):
        return index
    shorter = without_quotients(index.poly)
    return index if shorter == index.poly else from_poly(index.scope, shorter)


def indices(nest: Nest) -> Iterator[Any]:
    """All index expressions of a nest."""
    for term in nest.terms():
        if isinstance(term, (Load, Place)):
            yield term.index
    for store in nest.stores:
        yield store.index


def runs_on(index: Any, outer: Axis, inner: Axis) -> bool:
    """Whether an index moves from the end of the inner loop to its next start as within it."""
    if not isinstance(index, Expr):
        return True
    a, b = outer.variable, inner.variable
    by_outer: dict[Any, int] = {}
    by_inner: dict[Any, int] = {}
    for monomial, factor in index.poly.items():
        hits = [part for part in monomial if part is a or part is b]
        if len(hits) > 1:
            return False
        if hits:
            rest = tuple([part for part in monomial if part is not hits[0]])
            (by_outer if hits[0] is a else by_inner)[rest] = factor
        elif any(v in part.symbols() for part in monomial if not isinstance(part, Symbol) for v in (a, b)):
            return False
    if not by_outer and not by_inner:
        return True
    scope = index.scope
    return bool(from_poly(scope, by_outer) == from_poly(scope, by_inner) * inner.size)


def with_one(nest: Nest, place: int, scope: Scope) -> Nest:
    """The nest with two neighbouring loops as one."""
    outer, inner = nest.axes[place : place + 2]
    joined = replace(axis(scope, outer.size * inner.size, inner.variable.name), reduced=inner.reduced)
    moves: dict[Any, Any] = {outer.variable: 0, inner.variable: joined.variable}
    stores = rewritten(nest.stores, lambda index: substituted(index, moves))
    return replace(nest, axes=(*nest.axes[:place], joined, *nest.axes[place + 2 :]), stores=stores)


def substituted(index: Any, moves: dict[Any, Any]) -> Any:
    """An index with other expressions in the place of loop variables."""
    if not isinstance(index, Expr) or not index.symbols() & moves.keys():
        return index
    if isinstance(index, Symbol):
        return moves[index]
    if index.op is not SUM:
        return FUNCTIONS[index.op](*[substituted(arg, moves) for arg in index.args])
    total: Any = 0
    for monomial, factor in index.poly.items():
        part: Any = factor
        for atom in monomial:
            part = part * (moves.get(atom, atom) if type(atom) is Symbol else substituted(atom, moves))
        total = total + part
    return total


#: What an index may be made of.
FUNCTIONS: dict[str, Callable[..., Any]] = {**OPERATORS, "min": minimum, "max": maximum}


def rewritten(
    stores: list[Store], moved: Callable[[Any], Any], others: Mapping[Buffer, Buffer] = MappingProxyType({})
) -> list[Store]:
    """The stores with every index changed, and with other buffers."""
    made: dict[int, Term] = {}
    for term in terms(store.value for store in stores):
        new = rebuilt(term, made)
        if isinstance(new, Place):
            new = replace(new, index=moved(new.index))
        elif isinstance(new, Load):
            buffer = others.get(new.buffer, new.buffer)
            new = Load(buffer, moved(new.index), new.dtype, new.valid, new.places)
        made[id(term)] = new
    return [
        replace(s, buffer=others.get(s.buffer, s.buffer), index=moved(s.index), value=made[id(s.value)])
        for s in stores
    ]
