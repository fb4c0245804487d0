"""Graphs over tensors that a module holds: what follows from those alone is computed when they change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kiln._held import Watch
from kiln.base.dump import NOWHERE, Dump
from kiln.base.fx import runner
from kiln.base.graph import CONSTANT, Graph
from kiln.base.options import Settings
from kiln.expand.freeze import Frozen, can_watch, freeze
from kiln.launch.cache import disk
from kiln.launch.native import set_up
from kiln.launch.program import compile_graph
from kiln.launch.tune import Way, choice


def compile_held(
    graph: Graph, settings: Settings, held: Mapping[int, torch.Tensor], dump: Dump = NOWHERE
) -> Callable[[list[Any]], Sequence[Any]]:
    """A graph that needs no gradients, as native code; `held` inputs are the same tensors in every call."""
    frozen = None
    if settings.freeze and not settings.exact:
        frozen = freeze(graph, {i for i, tensor in held.items() if can_watch(tensor)})
    if frozen is None:
        return compile_graph(graph, settings, dump)
    if settings.tunes and not gains(graph, settings, held, frozen):
        return compile_graph(graph, settings, dump)
    return Held(frozen, compile_graph(frozen.rest, settings, dump), [held[i] for i in frozen.held]).run


def gains(graph: Graph, settings: Settings, held: Mapping[int, torch.Tensor], frozen: Frozen) -> bool:
    """Whether the frozen form of a graph is the faster one, by the clock."""
    untuned = replace(settings, mode="default")
    tensors = [held[i] for i in frozen.held]
    ways: dict[str, Way] = {
        "frozen": lambda: ("frozen", lambda: Held(frozen, compile_graph(frozen.rest, untuned), tensors).run),
        "plain": lambda: ("plain", lambda: compile_graph(graph, untuned)),
    }
    store, specs = disk(settings.cache_bytes), [node.spec for node in graph.inputs]
    return choice(str(graph), ways, specs, store, held) == "frozen"


class Held:
    """Runs a frozen graph; what follows from held tensors is computed anew when one of them has changed."""

    def __init__(
        self, frozen: Frozen, rest: Callable[[list[Any]], Sequence[Any]], tensors: list[torch.Tensor]
    ) -> None:
        self.rest, self.tensors, self.given = rest, tensors, frozen.given
        self.once = runner(frozen.once)
        self.lock = threading.Lock()
        set_up()
        constants = [node.args[0] for node in frozen.once.nodes if node.op is CONSTANT]
        watched = (*tensors, *constants)
        self.stamp = Watch(watched, tuple(map(extent, watched))).stamp
        self.state: tuple[int, tuple[Any, ...]] = -1, ()

    def run(self, values: list[Any]) -> Sequence[Any]:
        """The outputs on these values of the inputs; empties the list."""
        now = self.stamp()
        state = self.state if self.state[0] == now else self.computed(now)
        given = [values[i] for i in self.given]
        values.clear()
        given += state[1]
        return self.rest(given)

    def computed(self, now: int) -> tuple[int, tuple[Any, ...]]:
        """The values that follow from the held tensors as they are now."""
        with self.lock:
            if self.state[0] != now:
                self.state = -1, ()  # what was computed before goes before new memory is taken
                with torch.inference_mode(False), torch.no_grad():
                    self.state = now, tuple(self.once(list(self.tensors)))
            return self.state


def extent(tensor: torch.Tensor) -> int:
    """The bytes of memory from a tensor's first element to its last."""
    if not tensor.numel() or tensor.device.type != "cpu":  # other memory cannot be looked at
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())
