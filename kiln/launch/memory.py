"""The memory plan: where in the arena each intermediate value lies, so that few bytes serve them all."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.expressions import hinted
from kiln.base.graph import TensorSpec

LINE = 64
"""Values start at multiples of it: the longest vectors are aligned."""


@dataclass(eq=False, slots=True)
class Lodging:
    """Memory for a value from the step that writes it to the last that reads it."""

    name: str
    size: Any
    first: int
    last: int
    heir: Lodging | None = None
    """What is written in its place by the step that reads it last."""
    offset: int = -1
    inherited: bool = field(default=False)


def size_of(spec: TensorSpec) -> Any:
    """The bytes from the first element of a tensor to the end of its last."""
    elements: Any = 1
    for n, s in zip(spec.shape, spec.stride, strict=True):
        elements = elements + (n - 1) * s
    empty = any(type(n) is int and n == 0 for n in spec.shape)
    return 0 if empty else elements * spec.dtype.itemsize


def rounded(size: int) -> int:
    """The bytes that a value occupies; an empty one has a place too."""
    return max(-(-size // LINE), 1) * LINE


def arrange(lodgings: Iterable[Lodging]) -> int:
    """Give each an offset, so that what is alive at once lies apart; the bytes of all.

    The largest come first, each as low as what is alive with it admits.
    """
    placed: list[tuple[int, int, int, int]] = []
    for one in sorted((one for one in lodgings if not one.inherited), key=lambda one: -one.size):
        line, size = _line(one), rounded(one.size)
        first, last, offset = one.first, line[-1].last, 0
        for start, end, begin, over in placed:
            if begin <= last and first <= over:
                if start - offset >= size:
                    break
                offset = max(offset, end)
        for part in line:
            part.offset = offset
        insort(placed, (offset, offset + size, first, last))
    return max([end for _, end, _, _ in placed], default=0)


def _line(lodging: Lodging) -> list[Lodging]:
    """A lodging and those that are written in its place, one after the other."""
    line = [lodging]
    while line[-1].heir is not None:
        line.append(line[-1].heir)
    return line


def least(lodgings: Sequence[Lodging]) -> int:
    """The most bytes that are alive at once."""
    changes: dict[int, int] = {}
    for one in lodgings:
        if not one.inherited:
            last = _line(one)[-1].last + 1
            changes[one.first] = changes.get(one.first, 0) + rounded(one.size)
            changes[last] = changes.get(last, 0) - rounded(one.size)
    now = most = 0
    for step in sorted(changes):
        now += changes[step]
        most = max(most, now)
    return most


def shelved(lodgings: Sequence[Lodging]) -> list[list[Lodging]]:
    """Lodgings whose sizes vary, in lists of those that use the same memory one after the other."""
    shelves: list[list[Lodging]] = []
    free: list[int] = []
    alive: list[tuple[int, int, int]] = []
    for number, lodging in enumerate(sorted(lodgings, key=lambda one: one.first)):
        while alive and alive[0][0] < lodging.first:
            free.append(heapq.heappop(alive)[2])
        wanted = hinted(lodging.size)
        if free:
            shelf = min(free, key=lambda i: abs(max(hinted(one.size) for one in shelves[i]) - wanted))
            free.remove(shelf)
        else:
            shelf = len(shelves)
            shelves.append([])
        shelves[shelf].append(lodging)
        heapq.heappush(alive, (lodging.last, number, shelf))
    return shelves
