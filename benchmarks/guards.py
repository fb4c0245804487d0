"""How the cost of a call grows with the depth of the model when the graph itself costs nothing: binding and guards.

python benchmarks/guards.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import interleaved, verdict
from torch import nn

import kiln

DEPTHS = (2, 96)


def mlp(depth: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.ReLU()))).eval()


def nothing(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend whose graphs take no time: they give the same tensor each call."""
    result = (torch.zeros(1, 8),)
    return lambda *_: result


# Like `eager`, it builds on no fact of the example inputs.
nothing.specialises = False  # type: ignore[attr-defined]


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(1, 8)
    ways: dict[str, Callable[[], object]] = {}
    for depth in DEPTHS:
        ours = kiln.compile(mlp(depth), backend=nothing, fullgraph=True)
        theirs = torch.compile(mlp(depth), backend=nothing, fullgraph=True)
        ways[f"kiln {depth}"] = lambda f=ours: f(x)  # type: ignore[misc]
        # A dict made elsewhere moves the counter from which 3.11 draws the versions of all dicts.
        ways[f"kiln {depth}, dicts made"] = lambda f=ours: ({}, f(x))  # type: ignore[misc]
        ways[f"torch.compile {depth}"] = lambda f=theirs: f(x)  # type: ignore[misc]
    with torch.no_grad():
        seconds = interleaved(ways, calls=200)
    for name, value in seconds.items():
        print(f"{name:24}{value * 1e6:8.2f} µs")
    few, many = DEPTHS
    print(
        f"torch.compile, {many} layers / {few}: {seconds[f'torch.compile {many}'] / seconds[f'torch.compile {few}']:.2f}"
    )
    print(verdict(f"kiln, {many} layers / {few}", seconds[f"kiln {many}"] / seconds[f"kiln {few}"], 1.3))


if __name__ == "__main__":
    main()
