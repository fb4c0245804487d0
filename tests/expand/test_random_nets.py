"""Random networks of layers with weights, in use and in training: folded, packed, moved to other layouts, and eager's.

KILN_FUZZ says how many; a failure prints the network.
"""

from __future__ import annotations

import copy
import os
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln.base import records

pytestmark = pytest.mark.filterwarnings("ignore")
MANY = int(os.environ.get("KILN_FUZZ", "0")) // 20


class Net(nn.Module):
    """Steps over a list of values; each takes earlier ones by number and adds its result."""

    def __init__(self, steps: list[tuple[Any, tuple[int, ...]]], outputs: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([step for step, _ in steps if isinstance(step, nn.Module)])
        self.steps, self.outputs = steps, outputs

    def forward(self, x):
        values, layers = [x], iter(self.layers)
        for step, places in self.steps:
            function = next(layers) if isinstance(step, nn.Module) else step
            values.append(function(*[values[i] for i in places]))
        return [values[i] for i in self.outputs]

    def __deepcopy__(self, memo):
        return Net([(copy.deepcopy(step, memo), places) for step, places in self.steps], self.outputs)


def convolution(r: Random, x: torch.Tensor) -> nn.Module:
    channels = x.shape[1]
    groups = r.choice([g for g in (1, 1, 1, 2, channels) if channels % g == 0])
    out = groups * r.choice((1, 2, 3, 8, 16)) if groups < channels else channels * r.choice((1, 2))
    kernel = r.choice((1, 1, 2, 3, 3, 5, (1, 3), (3, 1)))
    padding = r.choice((0, 1, 2, "same")) if kernel != 1 else r.choice((0, 0, 1))
    stride = 1 if padding == "same" else r.choice((1, 1, 2, 3))
    mode = r.choice(("zeros",) * 4 + ("circular",))
    return nn.Conv2d(channels, out, kernel, stride, padding, r.choice((1, 1, 2)), groups, r.random() < 0.6, mode)


def norm(r: Random, x: torch.Tensor) -> nn.Module:
    made: Any = (nn.BatchNorm2d if x.dim() == 4 else nn.BatchNorm1d)(x.shape[1], affine=r.random() < 0.8)
    made.running_mean.copy_(torch.randn(x.shape[1]) * 0.1)
    made.running_var.copy_(torch.rand(x.shape[1]) + 0.5)
    return made


FUNCTIONS = (
    F.relu, F.silu, F.gelu, torch.sigmoid, torch.tanh, F.hardswish, F.leaky_relu, F.relu6, F.hardsigmoid, F.elu, F.mish,
    lambda x: F.gelu(x, approximate="tanh"), lambda x: F.hardtanh(x, -0.5, 0.5), lambda x: x * 0.5, lambda x: x + 1, lambda x: x.clone(),
    lambda x: F.softmax(x, 1), lambda x: x * x.sigmoid(), lambda x: F.leaky_relu(x, 0.3), lambda x: x - x.mean(1, keepdim=True),
)  # fmt: skip
OF_IMAGES = (
    lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 2), lambda x: F.adaptive_avg_pool2d(x, 1),
    lambda x: F.adaptive_avg_pool2d(x, (2, 3)), lambda x: F.interpolate(x, scale_factor=2.0), lambda x: F.pad(x, (1, 0, 1, 2)),
    lambda x: F.interpolate(x, size=(5, 4), mode="bilinear"), lambda x: x.flatten(1), lambda x: x.mean((2, 3)), lambda x: x[:, :, 1:],
    lambda x: x.permute(0, 2, 3, 1), lambda x: F.pixel_shuffle(x, 2), lambda x: torch.cat([x, x.relu()], 1), lambda x: x.flip(3),
    lambda x: x.chunk(2, 1)[0], lambda x: x * x.mean((2, 3), keepdim=True), lambda x: x.contiguous(memory_format=torch.channels_last),
)  # fmt: skip


def step(r: Random, values: list[torch.Tensor]) -> tuple[Any, tuple[int, ...]]:
    """A layer or a function and the values that it takes; it may not fit."""
    place = max(r.randrange(len(values)) for _ in range(3))
    x = values[place]
    same = [i for i, other in enumerate(values) if other.shape == x.shape and i != place]
    if same and r.random() < 0.5:
        return r.choice((torch.add, torch.mul, lambda a, b: torch.cat([a, b], 1), lambda a, b: F.relu(a + b))), (place, r.choice(same))
    if x.dim() == 4:
        kind = r.choice(("convolution",) * 5 + ("norm",) * 3 + ("function",) * 3 + ("image",) * 3 + ("group",))
        if kind == "image":
            return r.choice(OF_IMAGES), (place,)
        if kind == "group":
            return nn.GroupNorm(1, x.shape[1]), (place,)
        if kind == "convolution":
            return convolution(r, x), (place,)
    else:
        kind = r.choice(("linear", "linear", "function", "norm", "layer"))
        if kind == "linear":
            return nn.Linear(x.shape[-1], r.choice((1, 8, 33, 300, 512)), r.random() < 0.7), (place,)
        if kind == "layer":
            return nn.LayerNorm(x.shape[-1]), (place,)
    return (norm(r, x), (place,)) if kind == "norm" and x.dim() in (2, 4) else (r.choice(FUNCTIONS), (place,))


def drawn(seed: int) -> tuple[Net, torch.Tensor]:
    """A network and an input that eager takes."""
    r = Random(seed)
    torch.manual_seed(seed)
    batch = r.choice((1, 2, 3, 5))
    if r.random() < 0.8:
        x = torch.randn(batch, r.choice((1, 3, 4, 8, 16, 17)), r.choice((1, 5, 8, 16)), r.choice((1, 6, 8, 16)))
        x = x.contiguous(memory_format=torch.channels_last) if r.random() < 0.3 else x
    else:
        x = torch.randn(batch, r.choice((8, 64, 300)))
    steps: list[tuple[Any, tuple[int, ...]]] = []
    values = [x]
    while len(steps) < r.randint(2, 12):
        for _ in range(8):
            made = step(r, values)
            try:
                with torch.no_grad():
                    out = (made[0].eval() if isinstance(made[0], nn.Module) else made[0])(*[values[i] for i in made[1]])
            except (RuntimeError, ValueError, AssertionError):
                continue
            if out.numel() and out.numel() < 100_000 and bool(out.isfinite().all()):
                steps.append(made)
                values.append(out)
                break
    outputs = sorted({len(values) - 1, *r.sample(range(1, len(values)), r.choice((0, 0, 1, 2)) % len(values))})
    return Net(steps, outputs), x


def near(mine: Any, eager: Any, exact: Any) -> None:
    """As far from float64 as eager is, in some units."""
    for i, (a, b, c) in enumerate(zip(mine, eager, exact, strict=True)):
        assert (a is None) == (b is None), i
        if a is None:
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), i
        strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (a, b)]
        assert strides[0] == strides[1], (i, a.shape, a.stride(), b.stride())
        scale = max(float(c.abs().max()), 1e-3)
        allowed = 16 * max(float((b.double() - c).abs().max()), 1e-6 * scale)
        assert float((a.double() - c).abs().max()) <= allowed, (i, a.flatten()[:6], b.flatten()[:6])


def check(seed: int) -> None:
    net, x = drawn(seed)
    double = copy.deepcopy(net).double()
    kiln.reset()
    with records.collect() as log, kiln.config.patch(strict=True), torch.no_grad():
        net.eval(), double.eval()
        run = kiln.compile(net, fullgraph=True)
        near(run(x), net(x), double(x.double()))
        for p in (*net.parameters(), *double.parameters()):
            p.mul_(0.5)
        near(run(x), net(x), double(x.double()))
    assert not log.breaks and not log.fallbacks


def trained(net: Net, run: Any, x: torch.Tensor) -> list[Any]:
    """Results, gradients and buffers after a step."""
    x = x.detach().requires_grad_()  # eager's group norm crashes channels-last where nobody wants this gradient
    generator = torch.Generator().manual_seed(1)
    outputs = run(x)
    sum((out * torch.randn(out.shape, generator=generator).to(out)).sum() for out in outputs).backward()
    return [*(out.detach() for out in outputs), x.grad, *(p.grad for p in net.parameters()), *net.buffers()]


def check_training(seed: int) -> None:
    net, x = drawn(seed)
    eager, double = copy.deepcopy(net).train(), copy.deepcopy(net).double().train()
    try:
        expected = trained(eager, eager, x)
    except (ValueError, RuntimeError):  # one value for each channel, or nothing to train
        return
    kiln.reset()
    with records.collect() as log, kiln.config.patch(strict=True):
        found = trained(net, kiln.compile(net.train(), fullgraph=True), x)
    near(found, expected, trained(double, double, x.double()))
    assert not log.breaks and not log.fallbacks


SEED = int(os.environ.get("KILN_FUZZ_SEED", "0"))


@pytest.mark.parametrize("seed", range(MANY or 40))
def test_random_net(seed: int) -> None:
    check(SEED + seed)


@pytest.mark.parametrize("seed", range(MANY or 20))
def test_training_of_a_random_net(seed: int) -> None:
    check_training(SEED + seed)
