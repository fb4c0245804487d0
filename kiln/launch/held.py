"""Graphs over tensors that a module holds: what follows from them alone is computed once, and when they change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from kiln.base.fx import runner
from kiln.base.graph import Graph
from kiln.base.options import Settings
from kiln.expand.freeze import Frozen, freeze
from kiln.launch.program import compile_graph

_versions = attrgetter("_version")
_addresses = torch.Tensor.data_ptr
#: Only these are what their memory says.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def compile_held(
    graph: Graph, settings: Settings, held: Mapping[int, torch.Tensor]
) -> Callable[[list[Any]], Sequence[Any]]:
    """A graph that needs no gradients, as native code; `held` are the inputs that are the same in every call."""
    frozen = None
    if settings.freeze and not settings.exact:
        frozen = freeze(graph, {i for i, tensor in held.items() if can_watch(tensor)})
    if frozen is None:
        return compile_graph(graph, settings)
    return Held(frozen, compile_graph(frozen.rest, settings), [held[i] for i in frozen.held]).run


def can_watch(tensor: torch.Tensor) -> bool:
    """Whether a change of a tensor shows: inference tensors count no versions."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_inference()


class Held:
    """Runs a frozen graph; what follows from held tensors is computed anew when one of them has changed."""

    def __init__(
        self, frozen: Frozen, rest: Callable[[list[Any]], Sequence[Any]], tensors: list[torch.Tensor]
    ) -> None:
        self.rest, self.tensors, self.given = rest, tensors, frozen.given
        self.once = runner(frozen.once)
        self.lock = threading.Lock()
        self.state: tuple[list[int], tuple[Any, ...]] | None = None

    def run(self, values: list[Any]) -> Sequence[Any]:
        """The outputs on these values of the inputs; empties the list."""
        state = self.state
        tensors = self.tensors
        now = [*map(_versions, tensors), *map(_addresses, tensors)]
        if state is None or state[0] != now:
            state = self.computed(now)
        given = [values[i] for i in self.given]
        values.clear()
        given += state[1]
        return self.rest(given)

    def computed(self, now: list[int]) -> tuple[list[int], tuple[Any, ...]]:
        """The values that follow from the held tensors as they are now."""
        with self.lock:
            if self.state is None or self.state[0] != now:
                self.state = None  # what was computed before goes before new memory is taken
                with torch.no_grad():
                    self.state = now, tuple(self.once(list(self.tensors)))
            return self.state
