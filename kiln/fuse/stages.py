"""Kernels of several nests: side by side where nothing connects them, in stages where one is small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kiln.fuse.merge import rewritten, substituted
from kiln.fuse.nest import Buffer, Kernel, Nest

#: What is so much smaller than what it depends on, or than what depends on it, needs no kernel of its own.
SMALLER = 8
#: Elements of a kernel that takes no longer than its launch.
SHORT = 1 << 15
#: Elements of a kernel that takes much longer than its launch: before it memory may go that it does not need.
LARGE = 1 << 18
#: Results of short nests that are made at once.
STORES = 8
#: Nests of one kernel at most.
MOST = 2000


class Batch:
    """A kernel under construction."""

    def __init__(self) -> None:
        self.stages: list[list[Nest]] = []
        self.volumes: list[int] = []
        self.written: dict[Buffer, int] = {}

    def takes(self, nests: list[Nest]) -> bool:
        """Whether these nests, in their order, gain by being of this kernel; then they are."""
        added = sum(n.volume() for n in nests)
        levels = self.levels(nests)
        if self.stages:
            if max(levels) >= len(self.stages) and not self.small(added):
                return False
            if sum(map(len, self.stages)) + len(nests) > MOST:
                return False
        for nest, level in zip(nests, levels, strict=True):
            if level == len(self.stages):
                self.stages.append([])
                self.volumes.append(0)
            self.stages[level].append(nest)
            self.volumes[level] += nest.volume()
            note(self.written, nest, level)
        return True

    def small(self, added: int) -> bool:
        """Whether more stages cost less than another kernel: what is before them or what comes is small."""
        so_far = sum(self.volumes)
        return added + so_far <= SHORT or added * SMALLER <= so_far or so_far * SMALLER <= added < LARGE

    def levels(self, nests: list[Nest]) -> list[int]:
        """The stage of each nest: the first one after all that it reads."""
        written = dict(self.written)
        found: list[int] = []
        for nest in nests:
            level = max((written[b] + 1 for b in nest.buffers()[0] if b in written), default=0)
            note(written, nest, level)
            found.append(level)
        return found

    def kernel(self, name: str) -> Kernel:
        return Kernel(name, tuple(map(tuple, self.stages)))


def note(written: dict[Buffer, int], nest: Nest, level: int) -> None:
    """What a nest of this stage writes is there after it; what several write, after the last of them."""
    for buffer in nest.buffers()[1]:
        written[buffer] = max(level, written.get(buffer, 0))


def together(nests: Sequence[Nest]) -> list[Nest]:
    """Nests of a stage, with those as one that take no longer than a launch and go through the same loops."""
    made: list[Nest] = []
    places: dict[tuple[int, ...], int] = {}
    for nest in nests:
        lengths = tuple([axis.size for axis in nest.axes])
        known = all(type(axis.size) is int and axis.low == 0 for axis in nest.axes)
        if nest.reduced or nest.ordered or not known or nest.volume() > SHORT:
            made.append(nest)
            continue
        place = places.setdefault(lengths, len(made))
        both = joined(made[place], nest) if place < len(made) else None
        if both is not None:
            made[place] = both
        else:
            places[lengths] = len(made)
            made.append(nest)
    return made


def joined(first: Nest, second: Nest) -> Nest | None:
    """Two nests over the same loops as one, where neither touches what the other writes."""
    (reads, writes), (others, results) = first.buffers(), second.buffers()
    if {*reads, *writes} & {*results} or {*others} & {*writes} or len(writes) + len(results) > STORES:
        return None
    moves = {a.variable: b.variable for a, b in zip(second.axes, first.axes, strict=True)}
    stores = rewritten(second.stores, lambda index: substituted(index, moves))
    return replace(first, stores=[*first.stores, *stores], like=None)
