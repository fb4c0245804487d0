"""Steps of optimizers over the parameters of a small GPT-2 (148 tensors): eager, torch.compile and Kiln in turns.

    python benchmarks/optimizers.py [--only adamw] [--threads 1] [--width 256] [--rounds 40] [--no-torch] [--device cuda]

Printed: the first step in seconds, and the fastest of later ones in ms beside eager's, every way timed once in each
round. Gradients stay the same; parameters and states are each way's own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from common import verdict

import kiln

Parameters = Iterable[torch.nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=1e-3),
    "momentum": lambda given: torch.optim.SGD(given, lr=1e-3, momentum=0.9),
    "adamw": lambda given: torch.optim.AdamW(given, lr=1e-3),
    "nadam": lambda given: torch.optim.NAdam(given, lr=1e-3),
}
LAYERS = 12


def parameters(width: int, device: str) -> list[torch.nn.Parameter]:
    """Weights and biases as GPT-2 has them, with gradients."""
    layer = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
             (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]  # fmt: skip
    shapes = [(8000, width), (1024, width), *layer * LAYERS, (width,), (width,)]
    made = [torch.nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
    for one in made:
        one.grad = torch.randn_like(one)
    return made


def measured(name: str, given: argparse.Namespace) -> str:
    """Two lines: the steps of one optimizer, and whether Kiln's is slower than eager's."""
    makers: dict[str, Callable[..., Any]] = {"eager": lambda step: step, "kiln": kiln.compile}
    if given.torch:
        makers["torch.compile"] = torch.compile
    finish = torch.cuda.synchronize if given.device == "cuda" else lambda: None
    steps: dict[str, Callable[[], object]] = {}
    first: dict[str, float] = {}
    for way, make in makers.items():
        optimizer = OPTIMIZERS[name](parameters(given.width, given.device))
        steps[way] = make(lambda optimizer=optimizer: optimizer.step())
        start = time.perf_counter()
        steps[way]()
        finish()
        first[way] = time.perf_counter() - start
        for _ in range(3):  # states are made in the first step, and counts change in the second
            steps[way]()
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(given.rounds):
        for way, step in steps.items():
            start = time.perf_counter()
            step()
            finish()
            best[way] = min(best[way], time.perf_counter() - start)
    ways = [
        f"{way} {best[way] * 1e3:.2f} ms ({best['eager'] / best[way]:.2f}x eager, first {first[way]:.2f} s)"
        for way in steps
    ]
    return f"{name:9} {', '.join(ways)}\n{verdict(f'{name} / eager', best['kiln'] / best['eager'], 1.0)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="sgd,momentum,adamw")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--torch", action=argparse.BooleanOptionalAction, default=True, help="torch.compile too"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name in given.only.split(","):
        torch.manual_seed(0)
        print(measured(name, given), flush=True)


if __name__ == "__main__":
    main()
