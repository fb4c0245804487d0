"""Pools: largest values of windows over channels-last images, without the places that only gradients need."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.graph import Graph, Node, TensorSpec
from kiln.expand.relayout import Maker, Relayout
from kiln.ops.layout import is_channels_last, is_contiguous
from kiln.ops.table import aten

#: Elements of a window up to which each result reads them all.
WINDOW = 25


def pools(graph: Graph, users: Mapping[Node, list[Node]], outputs: set[Node]) -> Iterator[tuple[Node, Node]]:
    """The poolings of a graph whose places nobody reads, each with the node of its values."""
    for node in graph.nodes:
        if node.op is aten.max_pool2d_with_indices.default and node not in outputs:
            read = users[node]
            if len(read) == 1 and read[0].op is operator.getitem and read[0].args[1] == 0:
                yield node, read[0]


def pooling(node: Node, item: Node) -> Maker:
    """Makes the values of a pooling: in loops where its input lies channels-last, else by eager's kernel."""

    def make(new: Relayout) -> Node:
        x = new.values[node.args[0]]
        spec: TensorSpec = x.spec
        window = Window.of(node.args)
        fits = all(type(n) is int for n in spec.shape) and math.prod(window.kernel) <= WINDOW
        last = is_channels_last(spec.shape, spec.stride) and not is_contiguous(spec.shape, spec.stride)
        if not fits or not last or spec.dtype is not torch.float32:
            new.values[node] = new.follow(node)
            made: Node = new.follow(item)
            return made
        with new.recording:
            out = window.largest(new.fake(x), item.spec.shape[2:])
        return new.recording.node(out)

    return make


@dataclass(frozen=True, slots=True)
class Window:
    """How a pooling walks over its input, two numbers each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @staticmethod
    def of(args: Sequence[Any]) -> Window:
        """The window that the arguments of the op say."""
        kernel, stride, padding, dilation = (*args, *(None, [], 0, 1)[len(args) - 1 :])[1:5]
        return Window(pair(kernel), pair(stride or kernel), pair(padding), pair(dilation))

    def largest(self, x: torch.Tensor, out: Sequence[int]) -> torch.Tensor:
        """The largest elements of windows, of which there are `out`; those in the padding do not count."""
        found, *others = self.shifted(x, out)
        for part in others:
            found = aten.maximum.default(found, part)
        return found

    def largest_at(self, x: torch.Tensor, out: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest elements of windows, and where in its window each is, in a byte; of NaN the last."""
        found, *others = self.shifted(x, out)
        place = torch.zeros_like(found, dtype=torch.int8)
        for number, part in enumerate(others, 1):
            better = (part > found) | (part != part)
            place = torch.where(better, number, place)
            found = torch.where(better, part, found)
        return found, place

    def around(self, dim: int) -> range:
        """The windows that places may be of, counted from the quotient of the place and the stride."""
        stride, padding = self.stride[dim], self.padding[dim]
        return range(-((self.kernel[dim] - 1 - padding) // stride), (stride - 1 + padding) // stride + 1)

    def spread(self, grad: torch.Tensor, place: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        """For each place of an image the sum of what the windows got whose largest it is."""
        borders: list[int] = []
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for d in (0, 1):
            places, around = torch.arange(size[d], device=grad.device), self.around(d)
            quotients = torch.div(places, self.stride[d], rounding_mode="floor")
            last = (size[d] - 1) // self.stride[d] + around[-1]
            borders = [max(-around[0], 0), max(last + 1 - grad.shape[d + 2], 0), *borders]
            rows.append((places + self.padding[d] - quotients * self.stride[d], quotients + borders[0]))
        grad, place = (
            aten.constant_pad_nd.default(x, borders, fill) if any(borders) else x
            for x, fill in ((grad, 0), (place, -1))
        )
        found: torch.Tensor | None = None
        for down, along in itertools.product(self.around(0), self.around(1)):
            row, column = rows[0][0] - down * self.stride[0], rows[1][0] - along * self.stride[1]
            inside = ((row >= 0) & (row < self.kernel[0])).view(-1, 1)
            inside = inside & (column >= 0) & (column < self.kernel[1])
            wanted = torch.where(inside, row.view(-1, 1) * self.kernel[1] + column, -2).to(torch.int8)
            at = [None, None, (rows[0][1] + down).view(-1, 1), rows[1][1] + along]
            given = aten.index.Tensor(grad, at)
            part = torch.where(aten.index.Tensor(place, at) == wanted, given, torch.zeros_like(given))
            found = part if found is None else found + part
        assert found is not None
        return found

    def shifted(
        self, x: torch.Tensor, out: Sequence[int], fill: float = -math.inf
    ) -> list[torch.Tensor]:
        """For each place in a window the elements of all windows there; `fill` in the padding."""
        steps = list(zip(self.stride, self.dilation, self.kernel, out, strict=True))
        reach = [(n - 1) * stride + dilation * (kernel - 1) + 1 for stride, dilation, kernel, n in steps]
        after = [max(reach[d] - x.shape[d + 2] - self.padding[d], 0) for d in range(2)]
        border = [self.padding[1], after[1], self.padding[0], after[0]]
        if any(border):
            x = aten.constant_pad_nd.default(x, border, fill)
        parts: list[torch.Tensor] = []
        for place in itertools.product(*map(range, self.kernel)):
            part = x
            for d, (stride, dilation, _, n) in enumerate(steps):
                start = place[d] * dilation
                part = aten.slice.Tensor(part, d + 2, start, start + (n - 1) * stride + 1, stride)
            parts.append(part)
        return parts


def pair(value: Any) -> tuple[int, int]:
    """Two numbers of one or two."""
    given = [value] if isinstance(value, int) else list(value)
    return given[0], given[-1]
