"""What capture copied is added to a trace without running it, and the trace is what running it gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kiln
from kiln.differentiate import trace as tracing
from kiln.differentiate.copied import Copies
from tests.support import t


class Layer(nn.Module):
    """Views, ops of several results, writes, a constant, a tensor given back, and one shared by all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, mask):
        a, b = self.into(x).chunk(2, dim=-1)
        a = (a * 3).relu_() * torch.tensor(2.0)
        best = (a + b).max(dim=0)
        self.seen.add_(1)
        y = self.out(a.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4).masked_fill(mask, 0.5))
        return y.to(torch.float32) + best.values + x.split([1, 3], dim=-1)[0], best.indices


class Model(nn.Module):
    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(count)])

    def forward(self, x):
        mask, found = x > 1, []
        x = x + 1
        for layer in self.layers:
            x, where = layer(x, mask)
            found.append(where)
        return (x, x.view(-1)[2:], *found)


def traced(model, x, grad):
    """The graph of the program, as copies give it and as running every node does; how many were copied."""
    texts, counts = [], []

    def backend(module, examples):
        for of in (real, lambda *_: None):
            Copies.of = staticmethod(of)
            counts.append(0)
            texts.append(str(tracing.trace(module, examples).graph))
        return module.forward

    def add(self, *args):
        done = plain_add(self, *args)
        counts[-1] += done
        return done

    real, plain_add = Copies.of, Copies.add
    Copies.add = add
    try:
        with torch.set_grad_enabled(grad):
            kiln.compile(model, backend=backend, fullgraph=True)(x)
    finally:
        Copies.of, Copies.add = staticmethod(real), plain_add
    return texts, counts


@pytest.mark.parametrize("train", [False, True])
def test_the_trace_is_the_same(train):
    torch.manual_seed(0)
    (copied, run), counts = traced(Model().train(train), t(3, 4), False)
    assert copied == run
    assert counts[0] >= 4 * 10 and counts[1] == 0


class Twice(nn.Module):
    """Uses one weight twice: autocast keeps what it made of it for the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, mask):
        return self.inner(self.inner(x).relu_()).float(), mask


@pytest.mark.parametrize("repeat", [False, True])
def test_casts_that_autocast_keeps(repeat):
    torch.manual_seed(0)
    model = Model()
    model.layers = nn.ModuleList([Twice()] * 5 if repeat else [Twice() for _ in range(5)])
    x = t(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        (copied, run), counts = traced(model, x, False)
        with torch.no_grad():
            torch.testing.assert_close(kiln.compile(model, fullgraph=True)(x), model(x), atol=2e-2, rtol=2e-2)
    assert counts[0] and (repeat or copied == run)


def test_with_gradients_everything_runs():
    torch.manual_seed(0)
    (copied, run), counts = traced(Model(), t(3, 4), True)
    assert copied == run and counts == [0, 0]


@pytest.mark.parametrize("inference", [False, True])
def test_results(inference):
    torch.manual_seed(0)
    model = Model().eval()
    compiled = kiln.compile(model, fullgraph=True)
    with torch.inference_mode() if inference else torch.no_grad():
        for n in (3, 3):
            before = [layer.seen.clone() for layer in model.layers]
            torch.testing.assert_close(compiled(t(n, 4)), model(t(n, 4)))
            assert [int(layer.seen - b) for layer, b in zip(model.layers, before, strict=True)] == [2] * 5


def test_sizes_that_vary():
    torch.manual_seed(0)
    model = Model().eval()
    compiled = kiln.compile(model, dynamic=True)
    with torch.no_grad():
        for n in (3, 5, 8):
            torch.testing.assert_close(compiled(t(n, 4)), model(t(n, 4)))
