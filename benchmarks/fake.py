"""What one op costs on fake tensors, forward and backward, beside `make_fx` with PyTorch's fake tensors.

    python benchmarks/fake.py [--models bert,resnet50] [--rounds 5] [--preload MODULE] [--without]

Timed in one process, in turns: the processor time of a forward and a backward pass of the model on fakes, the modules'
own Python and the autograd engine included, by the aten calls that it makes.
Kiln's pass runs the program on its fakes; `make_fx` also records it, as the other compilers do. `--without` lists the
calls that have no shape rule and go to torch's meta kernels. The models have random weights.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from capture import MODELS
from common import verdict

LIMIT = 20.0
"""Microseconds an op, averaged over the default models."""


def loss_of(out: Any) -> Any:
    import torch

    return (out if isinstance(out, torch.Tensor) else out[0]).sum()


def replaced(model: Any, convert: Callable[[Any], Any]) -> None:
    """Put fakes in the place of parameters and buffers; shared ones stay shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for group in (module._parameters, module._buffers):
            for name, real in group.items():
                if real is not None:
                    group[name] = memo.setdefault(id(real), convert(real))


def ours(name: str) -> tuple[Callable[[], int], Callable[[], Counter[str]]]:
    """A step of a model on Kiln's fakes, which gives its number of aten calls, and the calls without a rule."""
    import torch

    from kiln.ops import fake, rules

    model, inputs = MODELS[name]()
    model.train()
    replaced(model, fake.fake_like)
    inputs = {k: fake.fake_like(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}

    class Counting(fake.FakeMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return fake.dispatch(func, args, kwargs or {})

    def step() -> int:
        with Counting() as mode:
            loss_of(model(**inputs)).backward()
        return mode.calls

    def without() -> Counter[str]:
        missing: Counter[str] = Counter()
        general = fake.general

        def noted(func: Any, args: Any, kwargs: Any) -> Any:
            missing[str(func) + (" (rule passed)" if func in rules.RULES else "")] += 1
            return general(func, args, kwargs)

        fake.general = noted
        try:
            step()
        finally:
            fake.general = general
        return missing

    return step, without


def theirs(name: str) -> Callable[[], int]:
    """The same step under `make_fx` with PyTorch's fake tensors; gives the number of nodes."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    model, inputs = MODELS[name]()
    model.train()
    mode = FakeTensorMode()
    inputs = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    state = {k: mode.from_tensor(v) for k, v in [*model.named_parameters(), *model.named_buffers()]}

    def program(state: dict[str, Any], inputs: dict[str, Any]) -> Any:
        loss = loss_of(torch.func.functional_call(model, state, (), inputs))
        return torch.autograd.grad(loss, [v for v in state.values() if v.requires_grad], allow_unused=True)

    def step() -> int:
        return len(make_fx(program)(state, inputs).graph.nodes)

    return step


def timed(step: Callable[[], int]) -> float:
    """Microseconds of processor time an op of one step: what else runs on the machine does not count."""
    start = time.process_time()
    calls = step()
    return (time.process_time() - start) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of an op on fake tensors.")
    parser.add_argument("--models", default="bert,resnet50")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preload", default="")
    parser.add_argument("--without", action="store_true", help="list the calls without a shape rule")
    parser.add_argument("--alone", action="store_true", help="do not run PyTorch's fakes")
    asked = parser.parse_args()
    if asked.preload:
        importlib.import_module(asked.preload)
    import torch

    torch.set_num_threads(1)
    means = []
    for name in asked.models.split(","):
        step, without = ours(name)
        first = timed(step)
        if asked.without:
            print(f"{name}: {dict(without().most_common())}")
        other = None if asked.alone else theirs(name)
        times: list[float] = []
        other_times: list[float] = []
        for _ in range(asked.rounds):
            times.append(timed(step))
            if other is not None:
                other_times.append(timed(other))
        mean = statistics.median(times)
        means.append(mean)
        beside = f"   make_fx {statistics.median(other_times):7.1f} µs a node" if other_times else ""
        print(f"{name:10} {step():5} calls  kiln {mean:6.1f} µs an op (first pass {first:6.1f}){beside}", flush=True)
    print(verdict("microseconds an op", statistics.fmean(means), LIMIT))


if __name__ == "__main__":
    main()
