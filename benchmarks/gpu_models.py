"""Whole models on a GPU in bf16: eager, Kiln and torch.compile, training steps and inference.

    python benchmarks/gpu_models.py [--models bert,gpt2,resnet50,llama] [--ways eager,kiln,torch] [--limit 300]

A process with empty caches for each model and way. They compile side by side and are timed one after the other: the
first calls in seconds (the training step's comes first), the least of four times eight steps in ms, and the most memory
that training steps had allocated, and that torch's allocator held, in GB. A way is eager, kiln[:mode] or torch[:mode].
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import compiled, loss_of, tensor_of
from torch import nn

WAYS = "eager,kiln,kiln:reduce-overhead,torch,torch:reduce-overhead"
PHASES = ("training", "inference")
Built = tuple[nn.Module, dict[str, torch.Tensor]]


def text(model: str, config: str, batch: int, length: int, **sizes: Any) -> Callable[[], Built]:
    def build() -> Built:
        transformers = importlib.import_module("transformers")
        made = getattr(transformers, config)(**sizes)
        ids = torch.randint(0, made.vocab_size, (batch, length), device="cuda")
        return getattr(transformers, model)(made).cuda().bfloat16(), {"input_ids": ids, "labels": ids}

    return build


class Classified(nn.Module):
    """A network for images that gives a loss where there are labels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        out = self.network(x)
        return out if labels is None else {"loss": nn.functional.cross_entropy(out.float(), labels)}


def resnet50() -> Built:
    network = importlib.import_module("torchvision.models").resnet50(weights=None)
    images = torch.randn(64, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    return Classified(network).cuda().bfloat16(), {"x": images, "labels": torch.arange(64, device="cuda")}


LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 32000, "use_cache": False}  # fmt: skip
MODELS: dict[str, Callable[[], Built]] = {
    "bert": text("BertForMaskedLM", "BertConfig", 32, 512),
    "gpt2": text("GPT2LMHeadModel", "GPT2Config", 16, 512, use_cache=False),
    "resnet50": resnet50,
    "llama": text("LlamaForCausalLM", "LlamaConfig", 8, 1024, **LLAMA),
}


def one(name: str, way: str, folder: Path) -> dict[str, Any]:
    """The figures of one model in one way; timed when the file `go` is there, one process at a time."""
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    given = {key: value for key, value in inputs.items() if key != "labels"}
    run = compiled(way, module, inputs)

    def training() -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        loss = loss_of(run(**inputs))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def inference() -> torch.Tensor:
        with torch.no_grad():
            return tensor_of(run(**given))

    found: dict[str, Any] = {"model": name, "way": way}
    steps = dict(zip(PHASES, (training, inference), strict=True))
    for phase, step in steps.items():
        module.train(phase == "training").zero_grad(set_to_none=True)
        start = time.perf_counter()
        value = step().float().mean().item()
        found[phase] = {"first": time.perf_counter() - start, "value": value}
        for _ in range(4):
            step()
    module.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    (folder / f"{name}.{way}.ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for phase, step in steps.items():
            module.train(phase == "training")
            found[phase] |= timed(step, module)
    return found


def timed(step: Callable[[], object], module: nn.Module) -> dict[str, float]:
    """The least time of a step, on the GPU and on the host, and the memory that steps take."""
    for _ in range(3):
        step()
    module.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    best = host = float("inf")
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        start.record()
        for _ in range(8):
            step()
        end.record()
        host = min(host, (time.perf_counter() - begin) / 8 * 1e3)
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 8)
    peak, held = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9
    return {"ms": best, "host": host, "peak": peak, "held": held}


def started(name: str, way: str, folder: Path) -> subprocess.Popen[str]:
    """The process for a model in one way, with caches of its own."""
    own = folder / f"{name}.{way}"
    caches = {
        key: str(own / key) for key in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    command = [sys.executable, __file__, "--one", str(folder), "--models", name, "--ways", way]
    env = {**os.environ, **caches, "KILN_CACHE_DIR": str(own / "kiln")}
    own.mkdir()
    log = (own / "log").open("w")
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)


def show(rows: list[dict[str, Any]]) -> None:
    """A line for each model, phase and way."""
    eager = {
        (row["model"], phase): row[phase]["ms"] for row in rows if row["way"] == "eager" for phase in PHASES
    }
    for row in rows:
        for phase in PHASES:
            it, base = row[phase], eager.get((row["model"], phase))
            ratio = f"{base / it['ms']:.2f} times eager" if base else ""
            print(f"{row['model']:9} {phase:9} {row['way']:21} {it['ms']:8.3f} ms {ratio:17} host {it['host']:7.3f}, "
                  f"first {it['first']:5.1f} s, peak {it['peak']:6.3f} GB, held {it['held']:6.3f}, "
                  f"value {it['value']:.4f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that all may compile")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.models, given.ways, given.one)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        pairs = [(name, way) for name in given.models.split(",") for way in given.ways.split(",")]
        running = {pair: started(*pair, folder) for pair in pairs}
        end = time.monotonic() + given.limit
        ready = {pair: folder / f"{pair[0]}.{pair[1]}.ready" for pair in pairs}
        while any(p.poll() is None and not ready[pair].exists() for pair, p in running.items()):
            if time.monotonic() > end:
                break
            time.sleep(0.2)
        for pair, process in running.items():
            if not ready[pair].exists():
                process.kill()
        (folder / "go").touch()
        rows = []
        for pair, process in running.items():
            said = process.communicate()[0].splitlines()
            if process.returncode or not said:
                last = (folder / ".".join(pair) / "log").read_text().strip().splitlines()[-1:]
                print(f"{' '.join(pair)}: no figures: {' '.join(last)[:200]}", file=sys.stderr)
            else:
                rows.append(json.loads(said[-1]))
        show(rows)


if __name__ == "__main__":
    main()
