"""Graphs that switch whether an input requires grad, before or after all that they compute of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kiln
from kiln.base import records


def slope(model, x):
    x.requires_grad_()
    energy = model(x).sin().sum()
    return energy.detach(), torch.autograd.grad(energy, x)[0]


def assigned(model, x):
    x.requires_grad = True
    return model(x).sin()


def step(model, x):
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    grad.square().sum().backward()
    return grad.detach()


def frozen(model, x):
    model.requires_grad_(False)
    return model(x).sin() * x


def freezes(model, x):
    y = model(x).sin().sum()
    y.backward()
    for p in model.parameters():
        p.data.mul_(0.5)
        p.requires_grad_(False)
    return y.detach()


def fails(model, x):
    x.requires_grad_()
    y = model(x)
    if y.isnan().any():
        raise ValueError("no number")
    return y.sin()


def rows(*values):
    return torch.tensor(values).repeat(2, 2)


def run(f, x):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    try:
        out = f(model, x)
    except ValueError as error:
        out = (torch.tensor(0.0), str(error))
    roots = [y for y in (out if type(out) is tuple else (out,)) if isinstance(y, torch.Tensor) and y.requires_grad]
    for root in roots:
        root.sum().backward()
    tensors = (x, model.weight, model.bias)
    said = [v for v in (out if type(out) is tuple else ()) if isinstance(v, str)]
    values = [v for v in (out if type(out) is tuple else (out,)) if isinstance(v, torch.Tensor)]
    return [*values, *tensors, *(t.grad for t in tensors)], [t.requires_grad for t in tensors], said


@pytest.mark.parametrize("f", [slope, assigned, step, frozen, freezes, fails])
def test_switches_are_made_around_the_graph(f):
    compiled = kiln.compile(f, fullgraph=True)
    for values in ((0.5, -1.0), (2.0, 0.25), (1.0, float("nan")), (1.0, 3.0)):
        with records.collect() as log:
            mine, eager = run(compiled, rows(*values)), run(f, rows(*values))
        assert not log.fallbacks, log.fallbacks
        assert mine[1:] == eager[1:]
        torch.testing.assert_close(mine[0], eager[0], equal_nan=True)


def test_a_switch_between_uses_leaves_the_graph_as_it_is():
    def f(model, x):
        y = model(x)
        x.requires_grad_()
        return y * x

    with records.collect() as log:
        mine = run(kiln.compile(f), rows(0.5, -1.0))
    assert [record.error.partition(":")[0] for record in log.fallbacks] == ["requires-grad"]
    torch.testing.assert_close(mine[0], run(f, rows(0.5, -1.0))[0])
