"""Pieces of a loop in which conditions are decided: a concatenation reads one of its parts in each."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kiln.fuse.nest import Apply, Axis, Load, Nest, Term, terms
from kiln.fuse.peel import at_most, between, turning

#: Pieces of one loop at most, and of one whose body has few terms: it is written once for each.
MOST, MOST_OF_SHORT, SHORT = 4, 9, 64
#: Turns of a piece that are taken one by one.
FEW = 2
ALL, ANY = ("bitwise_and", False), ("bitwise_or", True)


def borders(nest: Nest, axis: Axis, shortest: int) -> list[Any]:
    """Where conditions on the variable of a loop change, in order; none where pieces were short or many."""
    if axis.low != 0:
        return []
    found = {turn[1] for term in _conditions(nest) if (turn := turning(term, (axis,))) is not None}
    if type(axis.size) is not int:
        edges = [low for low, _ in between(axis, found)[1:]]
        return edges if len(edges) < MOST else []
    inside = sorted(b for b in found if type(b) is int and 0 < b < axis.size)
    edges = [0, *inside, axis.size]
    most = MOST_OF_SHORT if len(nest.terms()) <= SHORT else MOST
    if len(inside) < most and all(b - a >= shortest for a, b in pairwise(edges)):
        return inside
    # Whole vectors around the borders, in which conditions are not decided; most of the loop is outside.
    vectors = {b // shortest * shortest for b in inside}
    around = {place for v in vectors for place in (v, v + shortest) if 0 < place < axis.size}
    if len(around) < MOST and 2 * len(vectors) * shortest <= axis.size:
        return sorted(around)
    long_or_few = all(b - a >= shortest or b - a <= FEW for a, b in pairwise(edges))
    return inside if len(inside) < MOST and long_or_few else []


def decided(nest: Nest, axis: Axis, low: Any, high: Any) -> dict[int, bool]:
    """The conditions, by their ids, that hold or fail in all turns from `low` to `high`."""
    known: dict[int, bool] = {}
    for term in nest.terms():
        if not isinstance(term, Apply):
            continue
        turn = turning(term, (axis,))
        if turn is not None and at_most(high, turn[1]):
            known[id(term)] = turn[2]
        elif turn is not None and at_most(turn[1], low):
            known[id(term)] = not turn[2]
        for name, short in (ALL, ANY):
            if term.op == name:
                given = [known.get(id(arg)) for arg in term.args]
                if short in given:
                    known[id(term)] = short
                elif None not in given:
                    known[id(term)] = not short
    return known


def _conditions(nest: Nest) -> list[Term]:
    """What decides between reads of memory."""
    found: list[Term] = []
    for term in nest.terms():
        if isinstance(term, Load) and term.valid is not None:
            found.append(term.valid)
    return terms(iter(found))
