"""Peak memory of training steps and of inference: eager, Kiln and, where asked, torch.compile.

    python benchmarks/memory.py [--models residual,bert | large | small] [--phase train,infer] [--ways eager,kiln,torch]

What torch's allocator gives out and takes back in one step after three others, counted byte by byte by its profiler, and
the memory that Kiln keeps mapped between calls for intermediate values. Weights, and gradients that were there before, are
on no side. In brackets the first step, with all that compiling takes. Models that need more than eager are marked, with the
bytes by which they do.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
from collections.abc import Callable
from typing import Any

import models
import torch
from torch import nn
from torch.nn import functional

import kiln._launch

LARGE: dict[str, Callable[[], models.Built]] = dict(models.MODELS)
if "resnet18" in LARGE:
    LARGE |= {name: models._vision(name) for name in ("vit_b_16", "densenet121", "efficientnet_b0")}
if "bert" in LARGE:
    LARGE["albert"] = models._text("AlbertForMaskedLM", "AlbertConfig", hidden_size=768,
                                   num_attention_heads=12, intermediate_size=3072)  # fmt: skip
LARGE["lstm"] = lambda: (nn.LSTM(256, 256, 2), {"input": torch.randn(64, 4, 256)})
LARGE["gru"] = lambda: (nn.GRU(256, 256, 2), {"input": torch.randn(64, 4, 256)})
LARGE["transformer"] = lambda: (
    nn.Transformer(256, 8, 3, 3, 1024, dropout=0.0, batch_first=True),
    {"src": torch.randn(2, 64, 256), "tgt": torch.randn(2, 32, 256)},
)


class Of(nn.Module):
    """A function of an input and of weights, or of modules."""

    def __init__(self, function: Callable[..., Any], *given: Any) -> None:
        super().__init__()
        self.function = function
        self.given = nn.ModuleList(given) if given and isinstance(given[0], nn.Module) else nn.ParameterList(
            [nn.Parameter(torch.randn(shape) / 8) for shape in given])  # fmt: skip

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *self.given)


def of(function: Callable[..., Any], shape: tuple[int, ...], *given: Any) -> Callable[[], models.Built]:
    return lambda: (Of(function, *copy.deepcopy(given)), {"x": torch.randn(shape)})


def cells(x: torch.Tensor, cell: Any, out: Any) -> Any:
    """A loop over a recurrent cell."""
    state = hidden = x.new_zeros(x.shape[1], 64)
    seen = []
    for step in x:
        hidden, state = cell(step, (hidden, state)) if isinstance(cell, nn.LSTMCell) else (cell(step, hidden), state)
        seen.append(hidden)
    return out(torch.stack(seen))


def repeated(x: torch.Tensor, w: torch.Tensor) -> Any:
    for i in range(8):
        x = x + torch.softmax(x @ w, -1) * torch.sigmoid(x.roll(i, 0))
    return x


def upsampled(x: torch.Tensor, first: Any, second: Any) -> Any:
    return functional.interpolate(second(functional.relu(first(x))), scale_factor=4, mode="bilinear")


SMALL: dict[str, Callable[[], models.Built]] = {
    "RNN": lambda: (nn.RNN(64, 64, 2), {"input": torch.randn(24, 4, 64)}),
    "LSTM": lambda: (nn.LSTM(64, 64, 2, bidirectional=True), {"input": torch.randn(24, 4, 64)}),
    "GRU": lambda: (nn.GRU(64, 64, 2), {"input": torch.randn(24, 4, 64)}),
    "LSTMCell": of(cells, (12, 4, 64), nn.LSTMCell(64, 64), nn.Linear(64, 8)),
    "GRUCell": of(cells, (12, 4, 64), nn.GRUCell(64, 64), nn.Linear(64, 8)),
    "Transformer": lambda: (nn.Transformer(64, 4, 2, 2, 128, dropout=0.0, batch_first=True),
                            {"src": torch.randn(2, 32, 64), "tgt": torch.randn(2, 16, 64)}),
    "EmbeddingBag": lambda: (nn.EmbeddingBag(300, 64), {"input": torch.randint(0, 300, (16, 8))}),
    "upsampled": of(upsampled, (1, 3, 128, 128), nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 21, 1)),
    "repeated": of(repeated, (128, 128), (128, 128)),
    "distances": of(lambda x, w: torch.softmax(-(x[:, None] - w).square().sum(-1), -1) @ w, (128, 32), (128, 32)),
    "sorted": of(lambda x, w: (x @ w).sort(-1).values.cumsum(0)[:, :16], (128, 128), (128, 128)),
    "einsum": of(lambda x, v, w: torch.einsum("bij,jk,kl->bil", x, v, w), (8, 64, 64), (64, 64), (64, 64)),
}  # fmt: skip
if "resnet18" in LARGE:
    SMALL |= {
        name: lambda name=name: (importlib.import_module("torchvision.models").get_model(name), {"x": torch.randn(1, 3, 64, 64)})
        for name in ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x1_0", "regnet_y_400mf", "mnasnet1_0", "vgg11_bn", "swin_t")
    }  # fmt: skip


def text(model: str, config: str, ids: bool = True, **sizes: Any) -> Callable[[], models.Built]:
    """A small model of transformers."""

    def build() -> models.Built:
        transformers = importlib.import_module("transformers")
        made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        words = torch.randint(0, 100, (2, 32))
        return made, {"input_ids": words, "labels": words.clone()} if ids else {"pixel_values": torch.randn(2, 3, 64, 64)}

    return build


if "bert" in LARGE:
    LAYERS: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    WORDS = {"vocab_size": 300, **LAYERS}
    SMALL |= {
        "mamba": text("MambaForCausalLM", "MambaConfig", vocab_size=300, hidden_size=64, num_hidden_layers=3, use_cache=False),
        "gpt2-small": text("GPT2LMHeadModel", "GPT2Config", vocab_size=300, n_embd=64, n_layer=3, n_head=4, use_cache=False),
        "vit": text("ViTForImageClassification", "ViTConfig", ids=False, image_size=64, patch_size=8, **LAYERS),
    } | {
        name.lower(): text(f"{name}For{head}", f"{name}Config", **WORDS, **more)
        for name, head, more in (
            ("Bert", "MaskedLM", {}), ("Albert", "MaskedLM", {"embedding_size": 64}), ("Electra", "MaskedLM", {"embedding_size": 64}),
            ("Qwen2", "CausalLM", {"num_key_value_heads": 2, "use_cache": False}),
            ("Gemma", "CausalLM", {"num_key_value_heads": 2, "use_cache": False}),
            ("GPTNeoX", "CausalLM", {"use_cache": False}), ("Mixtral", "CausalLM", {"num_key_value_heads": 2, "use_cache": False}),
        )
    }  # fmt: skip


def counted(step: Callable[[], None]) -> int:
    """The most bytes that torch's allocator has given out at once in a step."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def peak(built: models.Built, phase: str, way: str) -> tuple[int, int]:
    """The most bytes at once in the first step of a model, and in the third."""
    module, inputs = built[0].train(phase == "train"), dict(built[1])
    if phase == "infer":
        inputs.pop("labels", None)
    run = models.compiled(way, module, inputs)

    def step() -> None:
        if phase == "train":
            models.loss_of(run(**inputs)).backward()  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                run(**inputs)

    found = []
    for _ in range(4):
        found.append(counted(step) + (kiln._launch.memory()[0] if way.startswith("kiln") else 0))
        module.zero_grad()
    return found[0], found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="large")
    parser.add_argument("--phase", default="train,infer")
    parser.add_argument("--ways", default="eager,kiln")
    asked = parser.parse_args()
    lists = {"large": LARGE, "small": SMALL}
    known = {**SMALL, **LARGE}
    chosen = lists.get(asked.models) or {name: known[name] for name in asked.models.split(",")}
    ways = asked.ways.split(",")
    print(f"{'model':20}{'phase':7}" + "".join(f"{way + ' MB (first)':>24}" for way in ways))
    above = 0
    for phase in asked.phase.split(","):
        for name, build in chosen.items():
            row = []
            for way in ways:
                torch.manual_seed(0)
                row.append(peak(build(), phase, way))
                kiln.reset()
            cells = "".join(f"{f'{later / 1e6:.3f} ({first / 1e6:.3f})':>24}" for first, later in row)
            more = row[-1][1] - row[0][1]
            above += more > 0
            print(f"{name:20}{phase:7}{cells}" + (f"  {more:+d}" if more > 0 else ""), flush=True)
    print(f"above {ways[0]}: {above}")


if __name__ == "__main__":
    main()
