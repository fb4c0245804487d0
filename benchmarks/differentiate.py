"""How long it takes to differentiate a BERT-base training step ahead of time, beside torch.compile(backend="aot_eager").

    python benchmarks/differentiate.py [--rounds 3] [--layers 12] [--preload MODULE]

Timed, in CPU seconds, in fresh processes in turn, after a step of a small layer: what the backend adds to capture,
which is the first step with the backend less the first step with "eager", later steps taken off. Ours is also timed
inside: from the captured graph to the two halves.
`--preload` names a module imported before the model, where one is needed to make the model's library importable.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import fresh, verdict

PROVIDERS = ("kiln", "torch")
LIMIT = 0.1


def training_step(layers: int) -> Callable[[Any], float]:
    """A function that gives the seconds of one training step through a compiled model, made by its argument."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(num_hidden_layers=layers))
    ids = torch.arange(16).view(1, 16)

    def first_less_second(compiler: Any) -> float:
        compiled = compiler(model)
        times = []
        for _ in range(3):
            model.zero_grad()
            start = time.process_time()
            compiled(input_ids=ids, labels=ids).loss.backward()
            times.append(time.process_time() - start)
        return times[0] - min(times[1:])

    return first_less_second


def measure(provider: str, layers: int, preload: str) -> None:
    """Print the seconds that differentiating adds to capture, and those between captured graph and halves."""
    import torch

    torch.set_num_threads(1)
    compiler = importlib.import_module(provider)
    if preload:
        importlib.import_module(preload)
    step = training_step(layers)
    inside: list[float] = []
    if provider == "kiln":
        from kiln import ahead

        original = ahead.trace, ahead.partition

        def timed(function: Any) -> Any:
            def run(*args: Any) -> Any:
                start = time.process_time()
                result = function(*args)
                inside.append(time.process_time() - start)
                return result

            return run

        ahead.trace, ahead.partition = map(timed, original)
    reset = compiler.reset if provider == "kiln" else torch._dynamo.reset
    for backend in ("eager", "aot_eager"):  # imports are not what is measured
        compiler.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(1, 2)).sum().backward()
    inside.clear()
    seconds = {}
    for backend in ("eager", "aot_eager"):
        reset()
        seconds[backend] = step(functools.partial(compiler.compile, backend=backend))
    plain, ahead_of_time = seconds.values()
    print(json.dumps({"beyond": ahead_of_time - plain, "capture": plain, "inside": sum(inside)}))


def main() -> None:
    parser = argparse.ArgumentParser(description="Ahead-of-time autograd on BERT-base, beside torch.compile.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--preload", default="")
    parser.add_argument("--one", choices=PROVIDERS, help="measure in this process")
    asked = parser.parse_args()
    if asked.one:
        measure(asked.one, asked.layers, asked.preload)
        return
    found: dict[str, list[dict[str, float]]] = {provider: [] for provider in PROVIDERS}
    for _ in range(asked.rounds):
        for provider in PROVIDERS:
            arguments = ("--one", provider, "--layers", str(asked.layers), "--preload", asked.preload)
            found[provider].append(fresh(__file__, *arguments))
    ours, theirs = (statistics.median(r["beyond"] for r in found[provider]) for provider in PROVIDERS)
    inside = statistics.median(r["inside"] for r in found["kiln"])
    print(f"captured graph to halves   kiln {inside:7.3f} s")
    print(f"beyond capture             kiln {ours:7.3f} s   torch.compile {theirs:7.3f} s")
    print(verdict("captured graph to halves / torch.compile beyond capture", inside / theirs, LIMIT))
    print(verdict("all that aot_eager adds  / torch.compile beyond capture", ours / theirs, LIMIT))


if __name__ == "__main__":
    main()
