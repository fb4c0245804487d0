"""Whole models: eager, torch.compile, Kiln (and OpenVINO where it is installed) in turns, inference and training.

    python benchmarks/models.py [--models residual,bert] [--phase infer,train] [--ways eager,torch,kiln] [--seconds 4]

A fresh process for each model and phase. Printed: the first call in seconds, import included, with empty compiler caches
and in a second process that finds them full; and how many times eager's speed a later call has, by the median over rounds
in which every way is timed once. The models here need nothing but torch; those of torchvision and transformers are added
where they are installed. Weights are random; models of text learn with labels.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, torch.Tensor]]


def convolved(cin: int, cout: int, k: int = 3, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    """A convolution, its normalisation, and a function."""
    parts = [nn.Conv2d(cin, cout, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(cout)]
    return nn.Sequential(*parts, *([nn.ReLU6()] if act else []))


class Residual(nn.Module):
    """What two or three layers add to their input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.layers(x))


def headed(*body: nn.Module, width: int) -> nn.Module:
    """A classifier over what the layers give."""
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def residual() -> Built:
    """A network of residual blocks, as deep networks for images are."""
    body = [convolved(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for width in (64, 128, 256):
        body += [Residual(convolved(width, width), convolved(width, width, act=False)) for _ in range(2)]
        body += [convolved(width, 2 * width, stride=2)]
    return headed(*body, width=512), {"input": torch.randn(1, 3, 224, 224)}


def inverted() -> Built:
    """A network of inverted residual blocks, as those for phones are."""
    body: list[nn.Module] = [convolved(3, 32, 3, 2)]
    for width, after in ((32, 64), (64, 96), (96, 160)):
        wide = 6 * width
        body += [Residual(convolved(width, wide, 1), convolved(wide, wide, groups=wide),
                          convolved(wide, width, 1, act=False)) for _ in range(3)]  # fmt: skip
        body += [convolved(width, after, stride=2)]
    return headed(*body, width=160), {"input": torch.randn(1, 3, 224, 224)}


def encoder() -> Built:
    """A transformer that sees all places."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), {"src": torch.randn(2, 128, 512)}


def layers() -> Built:
    """Linear layers alone."""
    parts = [part for _ in range(8) for part in (nn.Linear(768, 768), nn.SiLU(), nn.LayerNorm(768))]
    return nn.Sequential(*parts), {"input": torch.randn(64, 768)}


def _vision(name: str) -> Callable[[], Built]:
    def build() -> Built:
        models = importlib.import_module("torchvision.models")
        return getattr(models, name)(weights=None), {"x": torch.randn(1, 3, 224, 224)}

    return build


def _text(model: str, config: str, **sizes: Any) -> Callable[[], Built]:
    def build() -> Built:
        transformers = importlib.import_module("transformers")
        made = getattr(transformers, config)(**sizes)
        ids = torch.randint(0, made.vocab_size, (1, 128))
        return getattr(transformers, model)(made), {"input_ids": ids, "labels": ids.clone()}

    return build


def vit() -> Built:
    """A transformer over the squares of an image."""
    transformers = importlib.import_module("transformers")
    made = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
    return made, {"pixel_values": torch.randn(1, 3, 224, 224)}


MODELS: dict[str, Callable[[], Built]] = {f.__name__: f for f in (residual, inverted, encoder, layers)}
if importlib.util.find_spec("torchvision"):
    MODELS |= {name: _vision(name) for name in ("resnet18", "mobilenet_v2", "squeezenet1_1", "convnext_tiny")}
if importlib.util.find_spec("transformers"):
    small = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8,
             "num_key_value_heads": 4, "vocab_size": 8000, "use_cache": False}  # fmt: skip
    MODELS["bert"] = _text("BertForMaskedLM", "BertConfig")
    MODELS["gpt2"] = _text("GPT2LMHeadModel", "GPT2Config", use_cache=False)
    MODELS["vit"] = vit
    MODELS["llama"] = _text("LlamaForCausalLM", "LlamaConfig", **small)


def tensor_of(out: Any) -> torch.Tensor:
    """The tensor that a model is asked for."""
    if isinstance(out, torch.Tensor):
        return out
    return tensor_of(out.logits if hasattr(out, "logits") else out[0])


def prepared(name: str, train: bool) -> Built:
    """A model in its mode, and its inputs."""
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    if not train:
        inputs.pop("labels", None)
    return module.train(train), inputs


def loss_of(out: Any) -> torch.Tensor:
    """What a model that learns makes small."""
    found = out.get("loss") if isinstance(out, dict) else None
    return tensor_of(out).float().square().mean() if found is None else found


def openvino(module: nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The model as OpenVINO runs it for latency, in float32."""
    ov = importlib.import_module("openvino")
    wanted = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32",
              "INFERENCE_NUM_THREADS": torch.get_num_threads()}  # fmt: skip
    made = ov.Core().compile_model(ov.convert_model(module, example_input=inputs), "CPU", wanted)
    values = [value.numpy() for value in inputs.values()]

    def run(**given: Any) -> torch.Tensor:
        return torch.from_numpy(next(iter(made(values).values())))

    return run


def compiled(way: str, module: nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """The model in one of the ways: eager, torch[:mode], kiln[:mode] or openvino."""
    if way == "eager":
        plain: Callable[..., Any] = module
        return plain
    if way == "openvino":
        return openvino(module, inputs)
    package, _, mode = way.partition(":")
    return importlib.import_module(package).compile(module, **({"mode": mode} if mode else {}))  # type: ignore[no-any-return]


def one(name: str, phase: str, ways: list[str], seconds: float) -> list[dict[str, Any]]:
    """The figures of one model: a row for each way, with the first call alone where there are no seconds."""
    train = phase == "train"
    module, inputs = prepared(name, train)
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    expected: torch.Tensor | None = None
    for way in ways:
        mine = copy.deepcopy(module)
        start = time.perf_counter()
        run = compiled(way, mine, inputs)

        def step(run: Any = run, mine: nn.Module = mine) -> torch.Tensor:
            if not train:
                with torch.no_grad():
                    return tensor_of(run(**inputs))
            mine.zero_grad()
            loss = loss_of(run(**inputs))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        out = step()
        rows.append({"way": way, "first": time.perf_counter() - start})
        expected = out if expected is None else expected
        rows[-1]["error"] = float((out - expected).norm() / expected.norm())
        calls[way] = step
        step()
    if not seconds:
        return rows
    times: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + seconds * len(ways)
    while time.perf_counter() < end or len(times[ways[0]]) < 5:
        for way, call in calls.items():
            start = time.perf_counter()
            call()
            times[way].append(time.perf_counter() - start)
    base = statistics.median(times[ways[0]])
    for row in rows:
        row |= {"model": name, "phase": phase, "ratio": base / statistics.median(times[row["way"]])}
    return rows


def fresh(name: str, phase: str, ways: str, seconds: float) -> list[dict[str, Any]]:
    """`one` in a process of its own with empty caches, and its first calls in another that finds them full."""
    found: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as cache:
        env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache, XDG_CACHE_HOME=cache)
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode
        command = [sys.executable, __file__, "--one", "--models", name, "--phase", phase, "--ways", ways]
        for length in (seconds, 0.0):
            done = subprocess.run([*command, "--seconds", str(length)], env=env, capture_output=True, text=True)
            if done.returncode:
                print(f"{name} {phase}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                return []
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return [row | {"warm": again["first"]} for row, again in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--phase", default="infer,train")
    parser.add_argument("--ways", default="eager,torch,kiln")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--one", action="store_true", help="in this process, as JSON")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(asked.models, asked.phase, asked.ways.split(","), asked.seconds)))
        return
    ratios: dict[tuple[str, str], list[float]] = {}
    print(f"{'model':16}{'phase':7}{'way':16}{'x eager':>9}{'first s':>9}{'warm s':>9}{'error':>10}")
    for phase in asked.phase.split(","):
        for name in asked.models.split(","):
            for row in fresh(name, phase, asked.ways, asked.seconds):
                times = f"{row['ratio']:9.2f}{row['first']:9.2f}{row['warm']:9.2f}"
                print(f"{name:16}{phase:7}{row['way']:16}{times}{row['error']:10.1e}", flush=True)
                ratios.setdefault((phase, row["way"]), []).append(row["ratio"])
    for (phase, way), found in ratios.items():
        print(f"geomean {phase} {way}: {math.exp(sum(map(math.log, found)) / len(found)):.3f} over {len(found)} models")


if __name__ == "__main__":
    main()
