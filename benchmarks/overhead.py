"""What a call of a compiled three-op function on 64 elements costs, beside eager and torch.compile.

With backend="eager" on both sides the difference to eager is what guards and the call cost; with the default
backends it is what a user gets, in inference and, forward and backward, in training.

python benchmarks/overhead.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import interleaved, verdict

import kiln


def three_ops(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(a + b) * 2.0


def show(seconds: dict[str, float], eager: float) -> None:
    for name, value in seconds.items():
        print(f"{name:24}{value * 1e6:8.2f} µs{(value - eager) * 1e6:+8.2f} µs{value / eager:8.2f} times")


def main() -> None:
    torch.set_num_threads(1)
    a, b = torch.randn(64), torch.randn(64)
    weight, ones = torch.randn(64, requires_grad=True), torch.ones(64)

    def trained(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        function(a, weight).backward(ones)
        weight.grad = None

    ours, theirs = (
        {backend: make(three_ops, fullgraph=True, **({"backend": backend} if backend else {}))
         for backend in ("eager", "")}
        for make in (kiln.compile, torch.compile)
    )  # fmt: skip
    calls = interleaved({
        "eager": lambda: three_ops(a, b),
        "kiln, guards": lambda: ours["eager"](a, b),
        "torch.compile, guards": lambda: theirs["eager"](a, b),
        "kiln": lambda: ours[""](a, b),
        "torch.compile": lambda: theirs[""](a, b),
    })  # fmt: skip
    eager = calls["eager"]
    show(calls, eager)
    steps = interleaved({
        "training: eager": lambda: trained(three_ops),
        "training: kiln": lambda: trained(ours[""]),
        "training: torch.compile": lambda: trained(theirs[""]),
    }, calls=200)  # fmt: skip
    show(steps, steps["training: eager"])
    guards = (calls["kiln, guards"] - eager) / (calls["torch.compile, guards"] - eager)
    print(verdict("guards / torch.compile's", guards, 1 / 3))
    print(verdict("three ops / eager", calls["kiln"] / eager, 1.2))
    print(verdict("training three ops / eager", steps["training: kiln"] / steps["training: eager"], 1.2))


if __name__ == "__main__":
    main()
