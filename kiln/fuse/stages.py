"""Kernels of several nests: side by side where nothing connects them, in stages where one is small."""

from __future__ import annotations

from kiln.fuse.nest import Buffer, Kernel, Nest

#: What is so much smaller than what it depends on, or than what depends on it, needs no kernel of its own.
SMALLER = 8
#: Elements of a kernel that takes no longer than its launch.
SHORT = 1 << 15
#: Elements of a kernel that takes much longer than its launch: before it memory may go that it does not need.
LARGE = 1 << 18
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
            self.written.update(dict.fromkeys(nest.buffers()[1], level))
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
            reads, writes = nest.buffers()
            level = max((written[b] + 1 for b in reads if b in written), default=0)
            written.update(dict.fromkeys(writes, level))
            found.append(level)
        return found

    def kernel(self, name: str) -> Kernel:
        return Kernel(name, tuple(map(tuple, self.stages)))
