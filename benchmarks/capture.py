"""How long capture takes on real models, in fresh processes, beside torch.compile(backend="eager").

    python benchmarks/capture.py [--models bert,gpt2,llama,resnet50] [--rounds 3] [--preload MODULE]

Timed: the import of the compiler, `compile`, and the first call less a later one. The models have random weights.
`--preload` names a module imported before the model, where one is needed to make torchvision importable.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import fresh, verdict

PROVIDERS = {"kiln": "kiln.api", "torch": "torch._dynamo"}
"""Each provider, and what its first use imports."""


def bert() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()), {"input_ids": torch.arange(16).view(1, 16)}


def gpt2() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config()), {"input_ids": torch.arange(16).view(1, 16), "use_cache": False}


def llama() -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaModel(config), {"input_ids": torch.arange(16).view(1, 16), "use_cache": False}


def resnet50() -> tuple[Any, dict[str, Any]]:
    import torch
    from torchvision.models import resnet50 as make

    return make(), {"x": torch.randn(1, 3, 64, 64)}


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "bert": bert, "gpt2": gpt2, "llama": llama, "resnet50": resnet50,
}  # fmt: skip


def measure(model_name: str, provider: str, preload: str) -> None:
    """Capture one model in this process and print the seconds it took."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    # The libraries of the models may import a compiler on the way; so that its share is seen, it comes before them.
    start = time.perf_counter()
    importlib.import_module(PROVIDERS[provider])
    imported = time.perf_counter() - start
    if preload:
        importlib.import_module(preload)
    model, inputs = MODELS[model_name]()
    model.eval()
    with torch.no_grad():
        model(**inputs)
        start = time.perf_counter()
        compiled = importlib.import_module(provider).compile(model, backend="eager", fullgraph=True)
        compiled(**inputs)
        first = time.perf_counter()
        compiled(**inputs)
        second = time.perf_counter()
    print(json.dumps(imported + first - start - (second - first)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Capture time on real models, beside torch.compile.")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--preload", default="")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "PROVIDER"), help="measure in this process")
    asked = parser.parse_args()
    if asked.one:
        measure(*asked.one, asked.preload)
        return
    ratios = []
    for model in asked.models.split(","):
        times: dict[str, list[float]] = {provider: [] for provider in PROVIDERS}
        for _ in range(asked.rounds):
            for provider in PROVIDERS:
                times[provider].append(fresh(__file__, "--one", model, provider, "--preload", asked.preload))
        ours, theirs = (statistics.median(times[provider]) for provider in PROVIDERS)
        ratios.append(ours / theirs)
        print(
            f"{model:10} kiln {ours:7.3f} s   torch.compile {theirs:7.3f} s   {verdict('ratio', ours / theirs, 0.2)}",
            flush=True,
        )
    print(f"geometric mean of the ratios: {math.exp(statistics.fmean(map(math.log, ratios))):.3f}")


if __name__ == "__main__":
    main()
