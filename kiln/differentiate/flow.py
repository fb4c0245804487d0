"""Minimum cuts: which vertices of a network must be paid for to part its sources from its sinks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

ENDLESS = 1 << 62
"""The capacity of what cannot be cut."""


class Network:
    """A network of edges with capacities, solved by shortest augmenting paths in layers (Dinic)."""

    __slots__ = ("_levels", "ends", "room", "starts")

    def __init__(self, vertices: int) -> None:
        self.starts: list[list[int]] = [[] for _ in range(vertices)]
        self.ends: list[int] = []
        self.room: list[int] = []
        self._levels: list[int] = []

    def edge(self, start: int, end: int, capacity: int) -> None:
        """Add an edge; its reverse stands next to it, so that edge `i ^ 1` is the reverse of edge `i`."""
        self.starts[start].append(len(self.ends))
        self.starts[end].append(len(self.ends) + 1)
        self.ends += (end, start)
        self.room += (capacity, 0)

    def fill(self, source: int, sink: int) -> int:
        """Push the largest flow from source to sink and give it."""
        total = 0
        while self._layer(source, sink):
            total += self._block(source, sink)
        return total

    def _layer(self, source: int, sink: int) -> bool:
        """Number the vertices by their distance from the source; whether the sink is in reach."""
        levels = self._levels = [-1] * len(self.starts)
        levels[source] = 0
        queue = deque((source,))
        ends, room = self.ends, self.room
        while queue:
            vertex = queue.popleft()
            for edge in self.starts[vertex]:
                end = ends[edge]
                if levels[end] < 0 and room[edge]:
                    levels[end] = levels[vertex] + 1
                    queue.append(end)
        return levels[sink] >= 0

    def _block(self, source: int, sink: int) -> int:
        """Push flow along shortest paths until none is left."""
        ends, room, levels = self.ends, self.room, self._levels
        nexts = [iter(edges) for edges in self.starts]
        path: list[int] = []
        total = 0
        vertex = source
        while True:
            if vertex == sink:
                pushed = min(room[edge] for edge in path)
                total += pushed
                short = len(path)
                for place in range(len(path) - 1, -1, -1):
                    edge = path[place]
                    room[edge] -= pushed
                    room[edge ^ 1] += pushed
                    if not room[edge]:
                        short = place
                vertex = ends[path[short] ^ 1]
                nexts[vertex] = iter(self.starts[vertex])
                del path[short:]
                continue
            for edge in nexts[vertex]:
                if room[edge] and levels[ends[edge]] == levels[vertex] + 1:
                    path.append(edge)
                    vertex = ends[edge]
                    break
            else:
                levels[vertex] = -1
                if not path:
                    return total
                vertex = ends[path.pop() ^ 1]

    def reaches(self, sink: int) -> list[bool]:
        """For each vertex, whether the sink can still be reached from it after `fill`."""
        seen = [False] * len(self.starts)
        seen[sink] = True
        stack = [sink]
        while stack:
            for edge in self.starts[stack.pop()]:
                start = self.ends[edge]
                if not seen[start] and self.room[edge ^ 1]:
                    seen[start] = True
                    stack.append(start)
        return seen


def cheapest(
    prices: Sequence[int], reads: Sequence[Sequence[int]], given: Iterable[int], wanted: Iterable[int]
) -> list[bool]:
    """For each value, whether to keep it, so that all wanted values can be had at the lowest total price.

    Value i can be made again from the values `reads[i]`, unless it is given (then it is kept or not had at
    all). Among equal prices, values nearest to the wanted ones are kept, so that least is made again.
    """
    count = len(prices)
    given, wanted = set(given), set(wanted)
    keep = [False] * count
    for members in _components(count, reads, given):
        if len(members) == 1:
            value = members[0]
            keep[value] = value in given and value in wanted
            continue
        place = {value: 2 * i for i, value in enumerate(members)}
        source, sink = 2 * len(members), 2 * len(members) + 1
        network = Network(2 * len(members) + 2)
        for value, entry in place.items():
            network.edge(entry, entry + 1, min(prices[value], ENDLESS))
            if value in given:
                network.edge(source, entry, ENDLESS)
            else:
                for read in dict.fromkeys(reads[value]):
                    network.edge(place[read] + 1, entry, ENDLESS)
            if value in wanted:
                network.edge(entry + 1, sink, ENDLESS)
        network.fill(source, sink)
        below = network.reaches(sink)
        for value, entry in place.items():
            keep[value] = below[entry + 1] and not below[entry]
    return keep


def _components(count: int, reads: Sequence[Sequence[int]], given: set[int]) -> Iterable[list[int]]:
    """The values in groups between which nothing is read."""
    root = list(range(count))

    def find(value: int) -> int:
        while root[value] != value:
            root[value] = root[root[value]]
            value = root[value]
        return value

    for value in range(count):
        if value not in given:
            for read in reads[value]:
                root[find(value)] = find(read)
    groups: dict[int, list[int]] = {}
    for value in range(count):
        groups.setdefault(find(value), []).append(value)
    return groups.values()
