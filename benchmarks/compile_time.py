"""First calls: of few and many equal layers, and of models against torch.compile, in fresh processes.

    python benchmarks/compile_time.py [--torch] [--repeat N] [--cpu] [--models resnet18,mobilenet_v2,llama]

A first call is measured from before the import of the compiler to the end of the call (the backward too where
the model trains); torch and the model are there before. Cold runs find an empty disk cache, warm runs a full
one. The best of the repeats counts. `--torch` measures torch.compile as well, which takes minutes; `--cpu` takes
the time of the processor, its children's too, for machines that do other things at the same time. Of compiling
alone, import and one later call are taken off. The models
are those of `models.py` and three of this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import models


def layers(count):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=256, num_hidden_layers=count, num_attention_heads=4, intermediate_size=512,
                         vocab_size=1000)  # fmt: skip
    ids = torch.randint(0, 1000, (1, 32))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def convolutions():
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
            self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(2)])

        def forward(self, x):
            y = torch.relu(self.norms[0](self.first(x)))
            return torch.relu(x + self.norms[1](self.second(y)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1)
            self.blocks = nn.Sequential(*[Block(32) for _ in range(8)])
            self.head = nn.Linear(32, 10)

        def forward(self, image):
            return {"loss": self.head(self.blocks(self.stem(image)).mean((2, 3))).square().mean()}

    return Net(), {"image": torch.randn(2, 3, 32, 32)}


models.MODELS |= {"llama4": lambda: layers(4), "llama48": lambda: layers(48), "convolutions": convolutions}


def spent():
    """The time of the processor so far."""
    return sum(os.times()[:4])


def measure(compiler, name, training, clock):
    """Seconds of the first call, in this process; without the import and what a later call takes."""
    import torch

    model, inputs = models.prepared(name, training)

    def step(function):
        with torch.set_grad_enabled(training):
            out = function(**inputs)
        if training:
            models.loss_of(out).backward()

    step(model)  # the libraries of eager kernels start once
    started = clock()
    if compiler == "kiln":
        import kiln

        compiled = kiln.compile(model)
    else:
        compiled = torch.compile(model)
    imported = clock()
    step(compiled)
    first, later = clock(), []
    for _ in range(3):
        before = clock()
        step(compiled)
        later.append(clock() - before)
    return first - started, first - imported - min(later)


#: What a new process is told too.
ARGUMENTS = [argument for argument in sys.argv[1:] if argument == "--cpu"]


def fresh(compiler, name, training, cache):
    """Seconds of the first call in a new process with this folder as cache, and of its compiling alone."""
    environment = {**os.environ, "KILN_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    arguments = [sys.executable, __file__, *ARGUMENTS, "--one", compiler, name, "train" if training else "infer"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def both(compiler, name, training, repeat):
    """The best cold and the best warm first call, and the best of compiling alone."""
    cold, warm = [], []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(fresh(compiler, name, training, cache))
            warm.append(fresh(compiler, name, training, cache))
    return *[min(first for first, _ in calls) for calls in (cold, warm)], min(alone for _, alone in cold)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", action="store_true", help="measure torch.compile too")
    parser.add_argument("--cpu", action="store_true", help="processor time")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--models", default="llama4,llama48,bert,convolutions")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        compiler, name, mode = asked.one
        print(json.dumps(measure(compiler, name, mode == "train", spent if asked.cpu else time.perf_counter)))
        return
    print(f"{'':24} {'cold':>8} {'warm':>8}" + (f" {'torch':>8} {'warm':>8} {'ratio':>7} {'warm':>7}" * asked.torch))
    cold = {}
    for training in (False, True):
        for name in asked.models.split(","):
            mine = both("kiln", name, training, asked.repeat)
            cold[name, training] = mine
            line = f"{name:14} {'training' if training else 'inference':9} {mine[0]:8.2f} {mine[1]:8.2f}"
            if asked.torch:
                other = both("torch", name, training, 1)
                line += f" {other[0]:8.2f} {other[1]:8.2f} {other[0] / mine[0]:7.1f} {other[1] / mine[1]:7.1f}"
            print(line, flush=True)
    for training in (False, True):
        few, many = cold.get(("llama4", training)), cold.get(("llama48", training))
        if few and many:
            mode = "training" if training else "inference"
            print(f"48 layers to 4, {mode}: {many[0] / few[0]:.2f} cold, {many[1] / few[1]:.2f} warm; "
                  f"compiling alone {few[2]:.2f} and {many[2]:.2f} s: {many[2] / few[2]:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
