"""Graphs that look at numbers, or whose backward does: differentiated in parts, those calls in eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.library import custom_op, register_autograd

import kiln
from kiln.base import records


@custom_op("kiln_parts::grouped", mutates_args=())
def grouped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out, start = torch.zeros_like(x), 0
    for i, end in enumerate(ends.tolist()):
        out[start:end] = x[start:end] @ w[i]
        start = end
    return out


grouped.register_fake(lambda x, w, ends: torch.empty_like(x))


def setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.ends = inputs[2]


def backward(ctx, grad):
    (x, w), start = ctx.saved_tensors, 0
    grad_x, grad_w = torch.zeros_like(x), torch.zeros_like(w)
    for i, end in enumerate(ctx.ends.tolist()):
        grad_x[start:end] = grad[start:end] @ w[i].T
        grad_w[i] = x[start:end].T @ grad[start:end]
        start = end
    return grad_x, grad_w, None


register_autograd("kiln_parts::grouped", backward, setup_context=setup)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x + 1

    @staticmethod
    def backward(ctx, g, h):
        return g * 2 + (h if h.abs().max().item() < 3 else h / 3)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x, ends):
        scale = torch.zeros_like(x)
        for _ in range(2):
            x = self.norm(x + grouped(x.relu(), self.w, ends).tanh())
            scale[0] = 1
        return x * scale.cumsum(0), x.sum()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, ends):
        a, b = Clipped.apply(self.first(x))
        return self.last(a).sin() * b, b.sum()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, ends):
        y = self.first(x).relu()
        return self.last(y / y.abs().max().item()).sin() * ends[0].item(), (y * y.sum().item()).sum()


@pytest.mark.parametrize(("kind", "parts"), [(Experts, 3), (Twice, 2), (Scaled, 4)])
@pytest.mark.parametrize("sizes", [(7, 7, 7), (7, 9, 11, 8)])
def test_a_backward_that_looks_at_numbers_is_left_to_eager(kind, parts, sizes):
    torch.manual_seed(0)
    mine = kind()
    other = copy.deepcopy(mine)
    graphs = []

    def kept(module, examples):
        graphs.append(module)
        return module.forward

    compiled = kiln.compile(other, backend=kiln.aot(kept, kiln.lookup_backend("eager")), fullgraph=True)
    with records.collect() as log:
        for i, n in enumerate(sizes):
            x, ends = torch.randn(n, 4), torch.tensor([2, 3 + i % 2, n])
            for module, call in ((mine, mine), (other, compiled)):
                module.zero_grad()
                module.out = call(x, ends)
                (module.out[0].square().sum() + module.out[1]).backward()
            torch.testing.assert_close(other.out, mine.out)
            for a, b in zip(other.parameters(), mine.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)
    compiles = 1 + (len(set(sizes)) > 1)
    assert not log.fallbacks
    assert (len(log.graphs), len(log.breaks), len(graphs)) == (compiles, 0, compiles * parts)


@pytest.mark.parametrize("backend", ["aot_eager", "kiln"])
def test_contexts_are_entered_between_the_parts(backend):
    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a, b = Clipped.apply(x @ x)
            y = a @ b
        with torch.no_grad():
            z = Clipped.apply(x.sin())[0]
        return y, z @ x

    x = torch.randn(4, 4, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected = f(x)
    (expected[0].sum() + expected[1].sum()).backward()
    compiled = kiln.compile(f, backend=backend, fullgraph=True)
    with records.collect() as log:
        for _ in range(2):
            y.grad = None
            got = compiled(y)
            (got[0].sum() + got[1].sum()).backward()
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(y.grad, x.grad)
    assert (len(log.graphs), len(log.breaks), len(log.fallbacks)) == (1, 0, 0)
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


@pytest.mark.parametrize("backend", ["aot_eager", "kiln"])
def test_hooks_that_do_more_than_compute_see_real_gradients(backend):
    seen, factor = [], [1.0]
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    net[1].register_full_backward_hook(lambda module, given, got: seen.append(got[0].clone()))

    def f(x):
        y = net[0](x).sin()
        y.register_hook(lambda g: seen.append(g.clone()))
        z = y * 2
        z.register_hook(lambda g: g * 3)
        z.register_hook(lambda g: g * factor[0])
        return z.cos().exp()

    for call, made in ((f, kiln.compile(f, backend=backend)), (net, kiln.compile(net, backend=backend))):
        for factor[0] in (1.0, 2.0):
            grads = []
            for run in (call, made):
                net.zero_grad()
                run(torch.ones(2, 3, requires_grad=True)).sum().backward()
                grads.append((net[0].weight.grad.clone(), seen.pop(), len(seen)))
            torch.testing.assert_close(*grads)
            assert type(grads[1][1]) is torch.Tensor


def test_what_follows_from_numbers_is_computed_where_it_is_used():
    """A part knows the number itself: of what follows from it alone it could not tell the sizes."""

    def program(x, i):
        return x * (i.item() // 2) + x.repeat(i.item() % 3 + 2, 1).sum()

    compiled = kiln.compile(program, fullgraph=True)
    with records.collect() as seen:
        for number in (5, 4, 9):
            x, i = torch.randn(24, 3), torch.tensor(number)
            torch.testing.assert_close(compiled(x, i), program(x, i))
    assert (len(seen.graphs), len(seen.fallbacks), len(seen.plans)) == (1, 0, 2)
