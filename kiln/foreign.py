"""Backends of others: what they make of graphs whose sizes vary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.overrides import TorchFunctionMode

from kiln import _hook
from kiln.base.options import Backend, Settings, config
from kiln.ops.fake import FakeTensor, tensors_in
from kiln.ops.symint import SYMBOLIC


def built(backend: Backend, graph: GraphModule, inputs: list[Any], most: int) -> Callable[..., Any]:
    """What a backend makes of a graph, which serves all sizes that the graph does.

    One that runs ops on the example inputs, to see what the graph does, sees it for their sizes alone: where
    sizes vary it is asked again for others, up to `most` times; the graph then runs as it was captured.
    """
    told = getattr(backend, "reads_graph", False) or not getattr(backend, "specialises", True)
    examples = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
    if told or not any(map(varies, examples)):
        return backend(graph, inputs)
    kept = copy_of(graph)  # what it is given it may change
    with Watch(names_of(graph)) as seen:
        first = backend(graph, inputs)
    return by_sizes(backend, kept, {sizes(inputs): first}, most, config.now) if seen.ran else first


def varies(example: Any) -> bool:
    """Whether an input is a number that varies, or a tensor with a size that does."""
    return type(example) in SYMBOLIC or type(example) is FakeTensor and example._has_symbolic_sizes_strides  # type: ignore[attr-defined, no-any-return]


def copy_of(graph: GraphModule) -> GraphModule:
    """The graph with nodes of its own."""
    nodes = Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    made = GraphModule(graph, nodes)
    made.meta = dict(graph.meta)
    return made


def sizes(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What may differ between inputs of one graph."""
    return tuple([(v.shape, v.stride()) if isinstance(v, torch.Tensor) else v for v in inputs])


def by_sizes(
    backend: Backend, graph: GraphModule, made: dict[Any, Callable[..., Any]], most: int, settings: Settings
) -> Callable[..., Any]:
    """Runs what the backend has made for the sizes of a call."""

    def run(*inputs: Any) -> Any:
        known = made.get(key := sizes(inputs))
        if known is None:
            if len(made) >= most:
                return graph.forward(*inputs)
            _hook.pause()
            try:
                with config.use(settings):
                    known = made[key] = backend(copy_of(graph), list(inputs))
            finally:
                _hook.resume()
        return known(*inputs)

    return run


def names_of(graph: GraphModule) -> set[str]:
    """The names of the functions and methods that a graph calls, without underscores around them."""
    return {getattr(node.target, "__name__", str(node.target)).strip("_") for node in graph.graph.nodes}


class Watch(TorchFunctionMode):
    """Sees whether functions of these names run on tensors; Kiln's own fakes have sizes that vary."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.names, self.ran = names, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.ran and getattr(func, "__name__", "").strip("_") in self.names:
            self.ran = not any(type(t) is FakeTensor for t in tensors_in((args, kwargs or {})))
        return func(*args, **(kwargs or {}))
