"""Peak memory of training steps and of inference: eager, Kiln and, where asked, torch.compile.

    python benchmarks/memory.py [--models residual,bert] [--phase train,infer] [--ways eager,kiln,torch]

What torch's allocator gives out and takes back in one step after two others, counted byte by byte by its profiler, and
the memory that Kiln keeps mapped between calls for intermediate values. Weights, and gradients that were there before, are
on no side.
"""

from __future__ import annotations

import argparse
import copy
import gc

import models
import torch

import kiln._launch

if "resnet18" in models.MODELS:
    models.MODELS |= {name: models._vision(name) for name in ("vit_b_16", "densenet121", "efficientnet_b0")}
if "bert" in models.MODELS:
    models.MODELS["albert"] = models._text("AlbertForMaskedLM", "AlbertConfig", hidden_size=768,
                                           num_attention_heads=12, intermediate_size=3072)  # fmt: skip
models.MODELS["lstm"] = lambda: (torch.nn.LSTM(256, 256, 2), {"input": torch.randn(64, 4, 256)})
models.MODELS["gru"] = lambda: (torch.nn.GRU(256, 256, 2), {"input": torch.randn(64, 4, 256)})
models.MODELS["transformer"] = lambda: (
    torch.nn.Transformer(256, 8, 3, 3, 1024, dropout=0.0, batch_first=True),
    {"src": torch.randn(2, 64, 256), "tgt": torch.randn(2, 32, 256)},
)


def peak(name: str, phase: str, way: str) -> float:
    """The most megabytes at once in one step of a model."""
    module, inputs = models.prepared(name, phase == "train")
    module = copy.deepcopy(module)
    run = models.compiled(way, module, inputs)

    def step() -> None:
        if phase == "train":
            models.loss_of(run(**inputs)).backward()  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                run(**inputs)

    for _ in range(2):
        step()
        module.zero_grad()
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    kept = kiln._launch.memory()[0] if way.startswith("kiln") else 0
    return float(most + kept) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(models.MODELS))
    parser.add_argument("--phase", default="train,infer")
    parser.add_argument("--ways", default="eager,kiln")
    asked = parser.parse_args()
    ways = asked.ways.split(",")
    print(f"{'model':16}{'phase':7}" + "".join(f"{way + ' MB':>12}" for way in ways))
    for phase in asked.phase.split(","):
        for name in asked.models.split(","):
            row = []
            for way in ways:
                row.append(peak(name, phase, way))
                kiln.reset()
            print(f"{name:16}{phase:7}" + "".join(f"{found:12.2f}" for found in row), flush=True)


if __name__ == "__main__":
    main()
