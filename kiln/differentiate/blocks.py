"""Blocks of inference mode in a captured graph: what is in one is compiled, and runs, in that mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

from kiln.differentiate.parts import Make, Part, joined, symbols_in


class Block(Part):
    """A part that is compiled and run with inference mode on or off."""

    mode: bool

    def __call__(self, values: list[Any]) -> Any:
        with torch._C._InferenceMode(self.mode):
            return super().__call__(values)


def in_blocks(module: fx.GraphModule, examples: Sequence[Any], make: Make) -> Callable[..., Any] | None:
    """The graph with its outermost blocks, and what is between them, each compiled; None where it has none.

    A block within a block is left to `make`.
    """
    place: dict[fx.Node, int] = {}
    modes: list[bool] = []
    edges: list[fx.Node] = []
    inside: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.target is _enter_inference_mode:
            inside.append(node)
            modes += [] if inside[1:] else [node.args[0]]
            edges += [] if inside[1:] else [node]
        elif node.target is _exit_inference_mode:
            if not inside or node.args[0] is not inside.pop():
                return None
            edges += [] if inside else [node]
        if node.op.startswith("call") and node not in edges:
            place[node] = 2 * len(modes) - (1 if inside else 0)
    if not modes or inside:
        return None
    if {*place.values()} == {1}:
        return _as_block(module, examples, make, edges, modes[0])
    parts, numbers = list[Part](), symbols_in(module.graph)
    for number, group in groupby(place, place.__getitem__):
        part = (Block if number % 2 else Part)(module, list(group), make, numbers)
        if isinstance(part, Block):
            part.mode = modes[number // 2]
        parts.append(part)
    # The parts before one that raises have written: a frame that sees the exception runs in Python.
    module.meta["as captured"] = True
    return joined(module, parts)


def _as_block(
    module: fx.GraphModule, examples: Sequence[Any], make: Make, edges: list[fx.Node], mode: bool
) -> Callable[..., Any]:
    """A graph that is one block."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    for node in reversed(edges):
        graph.erase_node(copies[node])
    made = fx.GraphModule(module, graph)
    made.meta = module.meta
    with torch._C._InferenceMode(mode):
        run = make(made, list(examples))

    def in_mode(*args: Any) -> Any:
        with torch._C._InferenceMode(mode):
            return run(*args)

    return in_mode
