"""Whole models on a GPU in bf16: eager, Kiln and torch.compile, training steps and inference.

    python benchmarks/gpu_models.py [--models bert,resnet50] [--ways eager,kiln,torch] [--phases inference] [--at-once 10]
    python benchmarks/gpu_models.py --first [--models mnasnet,convnext] [--ways kiln,torch] [--set kiln.a.b.NAME=1]

A process with empty caches for each model and way. Some compile side by side and are then timed one after the other: the
first calls in seconds (the training step's comes first), the least of four times eight steps in ms, and the most memory
that training steps had allocated, and that torch's allocator held, in GB. A way is eager, kiln[:mode] or torch[:mode].
Layers that drop values keep them all, so that the losses and the sizes of all gradients, which are printed too, are those of
eager's. The last lines are geometric means over the models: of each way to eager, and of the better of Kiln's modes to the
better of torch.compile's.

With --first, first calls alone: a process with empty caches for each model, phase and way, nothing beside it. The time is
from the first call of the compiled model, which lies on the GPU with its inputs, until the result, and in training all
gradients, are there; imports, and what builds the model, come before. A line for each model and phase, with the seconds
that Kiln's main thread spent in its stages, and what is left of them: the run itself, with the first calls of libraries;
and for LLVM and the driver how many functions they compiled, in how many seconds of all threads, the longest in how many.
Models are named by what their names begin with; --set puts a value in the place of a constant of Kiln's.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import functools
import gc
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from models import compiled, loss_of, tensor_of
from torch import nn

# transformers looks for a package `kernels`, and would find the benchmark of that name beside this file.
sys.path = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]

WAYS = "eager,kiln,kiln:reduce-overhead,torch,torch:reduce-overhead"
PHASES = ("training", "inference")
Built = tuple[nn.Module, dict[str, torch.Tensor]]


def text(model: str, config: str, batch: int, length: int = 512, **sizes: Any) -> Callable[[], Built]:
    """A model of transformers that reads words."""

    def build() -> Built:
        transformers = importlib.import_module("transformers")
        made = getattr(transformers, config)(**sizes)
        ids = torch.randint(0, made.vocab_size, (batch, length))
        return getattr(transformers, model)(made), {"input_ids": ids, "labels": ids.clone()}

    return build


def pictures(model: str, config: str) -> Callable[[], Built]:
    """A model of transformers that sees images."""

    def build() -> Built:
        transformers = importlib.import_module("transformers")
        made = getattr(transformers, model)(getattr(transformers, config)())
        return made, {"pixel_values": torch.randn(64, 3, 224, 224), "labels": torch.arange(64) % 2}

    return build


def whisper() -> Built:
    """A small model that hears."""
    transformers = importlib.import_module("transformers")
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder")
             for key, value in (("layers", 4), ("attention_heads", 6), ("ffn_dim", 1536))}  # fmt: skip
    made = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(d_model=384, use_cache=False, **sides)
    )
    ids = torch.randint(0, made.config.vocab_size, (16, 64))
    return made, {"input_features": torch.randn(16, 80, 3000), "labels": ids}


class Classified(nn.Module):
    """A network for images that gives a loss where there are labels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        out = self.network(x)
        return out if labels is None else {"loss": nn.functional.cross_entropy(out.float(), labels)}


def images(name: str) -> Callable[[], Built]:
    """A network of torchvision over 64 images."""

    def build() -> Built:
        network = getattr(importlib.import_module("torchvision.models"), name)(weights=None)
        return Classified(network), {"x": torch.randn(64, 3, 224, 224), "labels": torch.arange(64)}

    return build


WIDE = {"num_hidden_layers": 16, "num_key_value_heads": 4, "vocab_size": 32000, "use_cache": False}
LLAMA = WIDE | {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN = WIDE | {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12}
ALBERT = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
MODELS: dict[str, Callable[[], Built]] = {
    "bert": text("BertForMaskedLM", "BertConfig", 32),
    "distilbert": text("DistilBertForMaskedLM", "DistilBertConfig", 32),
    "albert": text("AlbertForMaskedLM", "AlbertConfig", 32, **ALBERT),
    "electra": text("ElectraForMaskedLM", "ElectraConfig", 32),
    "gpt2": text("GPT2LMHeadModel", "GPT2Config", 16, use_cache=False),
    "opt": text("OPTForCausalLM", "OPTConfig", 16, use_cache=False),
    "llama": text("LlamaForCausalLM", "LlamaConfig", 8, 1024, **LLAMA),
    "qwen2": text("Qwen2ForCausalLM", "Qwen2Config", 8, 1024, **QWEN),
    "t5": text("T5ForConditionalGeneration", "T5Config", 16, use_cache=False, decoder_start_token_id=0),
    "whisper": whisper,
    "vit": pictures("ViTForImageClassification", "ViTConfig"),
    "swin": pictures("SwinForImageClassification", "SwinConfig"),
} | {
    name: images(name)
    for name in ("resnet18", "resnet50", "mobilenet_v2", "densenet121", "efficientnet_b0", "squeezenet1_1",
                 "shufflenet_v2_x1_0", "regnet_y_400mf", "convnext_tiny", "mnasnet1_0")
}  # fmt: skip
#: Models whose decoder is given its words by the labels, in inference too.
TOLD = ("t5", "whisper")


def on_the_gpu(name: str) -> Built:
    """A model and its inputs in bf16, on the GPU."""
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    kinds = {True: torch.bfloat16, False: torch.int64}
    given = {key: value.to("cuda", kinds[value.is_floating_point()]) for key, value in inputs.items()}
    return module.to("cuda", torch.bfloat16), given


def one(name: str, way: str, phases: list[str], folder: Path) -> dict[str, Any]:
    """The figures of one model in one way; timed when the file `go` is there, one process at a time."""
    module, inputs = on_the_gpu(name)
    given = {key: value for key, value in inputs.items() if key != "labels" or name in TOLD}
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
    both = dict(zip(PHASES, (training, inference), strict=True))
    steps = {phase: both[phase] for phase in phases}
    for phase, step in steps.items():
        module.train(phase == "training").zero_grad(set_to_none=True)
        start = time.perf_counter()
        value = step().float().mean().item()
        found[phase] = {"first": time.perf_counter() - start, "value": value}
        norms = [p.grad.float().norm() for p in module.parameters() if p.grad is not None]
        found[phase]["grads"] = torch.stack(norms).norm().item() if norms else 0.0
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


#: The stages of a first call by what does them; a stage's time is without that of those inside of it.
STAGES = {
    "capture": "kiln.pipeline:capture", "trace": "kiln.ahead:trace", "partition": "kiln.ahead:partition",
    "arrange": "kiln.compiler:arranged", "fuse": "kiln.launch.program:fused",
    "write": "kiln.launch.gpu:plan_on", "machine code": "kiln.launch.cuda:Loading.finish",
    "plan": "kiln.launch.device:DevicePlanner.plan",
}  # fmt: skip

#: What threads do for each function.
MAKERS = {"llvm": "kiln.generate.device:Function.ptx", "driver": "kiln.launch.cuda:machine_code"}


class Stages:
    """The seconds that the main thread spends in stages of Kiln's, and threads for each function."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.each: dict[str, list[float]] = {name: [] for name in MAKERS}
        self.inside = [0.0]  # of stages in the one that is under way
        for wrap, places in ((self.timed, STAGES), (self.noted, MAKERS)):
            for name, place in places.items():
                home, _, path = place.partition(":")
                owner: Any = importlib.import_module(home)
                *parts, last = path.split(".")
                for part in parts:
                    owner = getattr(owner, part)
                setattr(owner, last, wrap(name, getattr(owner, last)))

    def noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            made = function(*args, **kwargs)
            self.each[name].append(time.perf_counter() - start)
            return made

        return run

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        main = threading.get_ident()

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != main:
                return function(*args, **kwargs)
            self.inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[name] += spent - self.inside.pop()
                self.inside[-1] += spent

        return run


def changed(changes: list[str]) -> None:
    """Put values in the place of constants of Kiln's."""
    for change in changes:
        place, _, value = change.partition("=")
        home, _, constant = place.rpartition(".")
        setattr(importlib.import_module(home), constant, ast.literal_eval(value))


def first(name: str, way: str, phase: str) -> dict[str, Any]:
    """The seconds of the first call, and of Kiln's stages."""
    module, inputs = on_the_gpu(name)
    module.train(phase == "training")
    if phase == "inference" and name not in TOLD:
        inputs.pop("labels")
    stages = Stages() if way.startswith("kiln") else None
    run = compiled(way, module, inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    if phase == "training":
        loss_of(run(**inputs)).backward()  # type: ignore[no-untyped-call]
    else:
        with torch.no_grad():
            run(**inputs)
    called = time.perf_counter() - start
    torch.cuda.synchronize()
    seconds = {} if stages is None else stages.seconds
    made = {} if stages is None else {name: (len(s), sum(s), max(s)) for name, s in stages.each.items() if s}
    rest = called - sum(seconds.values())
    return {"first": time.perf_counter() - start, "run": rest, "stages": seconds, "made": made}


def first_calls(names: list[str], ways: list[str], phases: list[str], more: list[str]) -> None:
    """A line for each model and phase, as soon as its processes have ended."""
    for name, phase in itertools.product(names, phases):
        parts, base = [], None
        for way in ways:
            with tempfile.TemporaryDirectory() as made:
                process = started(name, way, phase, Path(made), ["--first", *more])
                said = process.communicate()[0].splitlines()
                log = (Path(made) / f"{name}.{way}" / "log").read_text().strip().splitlines()[-1:]
            if not said:
                parts.append(f"{way}: no figures: {' '.join(log)[:200]}")
                continue
            found = json.loads(said[-1])
            shown = ", ".join([f"{stage} {s:.2f}" for stage, s in found["stages"].items() if s >= 0.005])
            shown += f", run {found['run']:.2f}" if shown else ""
            shown += "".join([f", {k} {n} x, {s:.2f} in all, one {m:.2f}" for k, (n, s, m) in found["made"].items()])
            parts.append(f"{way} {found['first']:.2f} s" + (f" ({shown})" if shown else ""))
            base = base or found["first"]
            parts[-1] += f", 1/{found['first'] / base:.1f}" if found["first"] > base else ""
        print(f"{name:18} {phase:9} {'; '.join(parts)}", flush=True)


def started(
    name: str, way: str, phases: str, folder: Path, more: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """The process for a model in one way, with caches of its own."""
    own = folder / f"{name}.{way}"
    caches = {
        key: str(own / key) for key in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    command = [sys.executable, __file__, "--one", str(folder)]
    command += ["--models", name, "--ways", way, "--phases", phases, *more]
    env = {**os.environ, **caches, "KILN_CACHE_DIR": str(own / "kiln")}
    own.mkdir()
    log = (own / "log").open("w")
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)


def show(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """A line for each model, phase and way; eager's times may be among those from before."""
    plain = [row for row in before + rows if row["way"] == "eager"]
    eager = {(row["model"], phase): row[phase]["ms"] for row in plain for phase in PHASES if phase in row}
    for row in rows:
        for phase in filter(row.__contains__, PHASES):
            it, base = row[phase], eager.get((row["model"], phase))
            ratio = f"{base / it['ms']:.2f} times eager" if base else ""
            print(f"{row['model']:18} {phase:9} {row['way']:21} {it['ms']:8.3f} ms {ratio:17} host {it['host']:7.3f}, "
                  f"first {it['first']:5.1f} s, peak {it['peak']:6.3f} GB, held {it['held']:6.3f}, "
                  f"value {it['value']:.4f}, gradients {it['grads']:.4g}", flush=True)  # fmt: skip


def mean(ratios: list[float]) -> str:
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f} over {len(ratios)} models"


def summary(rows: list[dict[str, Any]]) -> None:
    """Geometric means over the models that have the figures."""
    for phase in PHASES:
        times: dict[str, dict[str, float]] = {}
        best: dict[str, dict[str, float]] = {}
        for row in (row for row in rows if phase in row):
            ms, maker = row[phase]["ms"], row["way"].partition(":")[0]
            times.setdefault(row["way"], {})[row["model"]] = ms
            least = best.setdefault(maker, {})
            least[row["model"]] = min(ms, least.get(row["model"], ms))
        base = times.pop("eager", {})
        for way, found in times.items():
            both = [base[name] / ms for name, ms in found.items() if name in base]
            if both:
                print(f"{phase} {way}: times eager {mean(both)}")
        torchs = best.get("torch", {})
        both = [torchs[name] / ms for name, ms in best.get("kiln", {}).items() if name in torchs]
        if both:
            print(f"{phase}: the better of kiln's modes to the better of torch.compile's {mean(both)}")


def together(
    pairs: list[tuple[str, str]], phases: str, limit: float, more: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The figures of some models and ways, which compile side by side and are timed one after the other."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        running = {pair: started(*pair, phases, folder, more) for pair in pairs}
        end = time.monotonic() + limit
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
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that they may compile")
    parser.add_argument("--at-once", type=int, default=10, help="processes that compile side by side")
    parser.add_argument("--first", action="store_true", help="first calls, each alone in a process")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a constant of Kiln's")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    more = [part for change in given.set for part in ("--set", change)]
    if given.one and given.ways.startswith("kiln"):
        changed(given.set)
    if given.one and given.first:
        print(json.dumps(first(given.models, given.ways, given.phases)))
        return
    if given.first:
        wanted = [name for part in given.models.split(",") for name in MODELS if name.startswith(part)]
        ways = "kiln,torch" if given.ways == WAYS else given.ways
        first_calls(list(dict.fromkeys(wanted)), ways.split(","), given.phases.split(","), more)
        return
    if given.one:
        print(json.dumps(one(given.models, given.ways, given.phases.split(","), given.one)))
        return
    pairs = [(name, way) for name in given.models.split(",") for way in given.ways.split(",")]
    rows: list[dict[str, Any]] = []
    for start in range(0, len(pairs), given.at_once):
        found = together(pairs[start : start + given.at_once], given.phases, given.limit, more)
        show(found, rows)
        rows += found
    summary(rows)


if __name__ == "__main__":
    main()
