"""Where rounding decides: gradients that cancel and large activations are eager's, seen in the first call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kiln
from kiln.base import closeness, records
from kiln.differentiate.again import Replay

#: A softmax of ours differs from eager's in last bits, and the gradients behind the norm are those bits.
CANCELS = nn.Sequential(nn.Conv2d(4, 16, 3), nn.Softmax(1), nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))
SETTLED = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Softmax(-1))


@pytest.fixture
def replays(monkeypatch):
    """How often eager's gradients were computed beside ours."""
    seen = []
    gradients = Replay.gradients
    monkeypatch.setattr(Replay, "gradients", lambda *args: seen.append(len(args)) or gradients(*args))
    kiln.reset()
    return seen


def gradients(model, run, x, send):
    model.zero_grad()
    send(run(x))
    return [p.grad for p in model.parameters()]


def test_gradients_that_cancel_are_eagers(replays):
    torch.manual_seed(0)
    model, x = CANCELS.train(), torch.rand(8, 4, 64, 64)
    model[2].bias.data += 100  # what the norm takes away: rounding is large beside what is left
    other = copy.deepcopy(model)
    run = kiln.compile(model, fullgraph=True)
    with records.collect() as log:
        for turn in range(3):
            expected = gradients(other, other, x, lambda out: out.sum().backward())
            found = gradients(model, run, x, lambda out: out.sum().backward())
            assert all(map(torch.equal, expected, found)), turn
    assert [record.region for record in log.fallbacks] == ["differentiate"] and len(replays) == 1


def test_other_gradients_are_compared_once(replays):
    model, x = SETTLED.train(), torch.randn(5, 8)
    run = kiln.compile(model, fullgraph=True)
    with records.collect() as log:
        for _ in range(2):
            gradients(model, run, x, lambda out: out.sum().backward())
    assert not log.fallbacks and len(replays) == 1


@pytest.mark.parametrize(
    "send", [lambda out: out.square().sum().backward(), lambda out: out.mean().backward()], ids=["squares", "mean"]
)
def test_gradients_that_vary_are_not_compared(replays, send):
    model, x = SETTLED.train(), torch.randn(5, 8)
    gradients(model, kiln.compile(model, fullgraph=True), x, send)
    assert not replays


class Turned(nn.Module):
    """A mask that lies otherwise than in the order of its dimensions."""

    def forward(self, x):
        return nn.functional.dropout(x.t()).t()


@pytest.mark.parametrize("drops", [nn.Dropout(), Turned()], ids=["rows", "turned"])
def test_random_numbers_are_drawn_once(replays, drops):
    model, x = nn.Sequential(nn.Linear(8, 16), drops, nn.Linear(16, 4)).train(), torch.randn(5, 8)
    other, found = copy.deepcopy(model), []
    for net, run in ((other, other), (model, kiln.compile(model, fullgraph=True))):
        torch.manual_seed(3)
        found.append([*gradients(net, run, x, lambda out: out.sum().backward()), torch.rand(2)])
    torch.testing.assert_close(*found)
    assert len(replays) == 1


def test_graphs_that_are_too_large_are_not_computed_twice(replays, monkeypatch):
    monkeypatch.setattr(closeness, "WORTH", 100)
    model = SETTLED.train()
    gradients(model, kiln.compile(model, fullgraph=True), torch.randn(5, 8), lambda out: out.sum().backward())
    assert not replays


def deep(scale):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)) for _ in range(3)]
    for layer in layers:
        layer[0].weight.data *= scale
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize(("scale", "packed"), [(1, True), (60, False)], ids=["small", "large"])
def test_layers_stay_as_they_are_where_packing_shows(scale, packed):
    """Activations of 10,000: what folded norms and channels-last sums round otherwise is larger than small results."""
    model, x = deep(scale), torch.randn(2, 16, 32, 32)
    kiln.reset()
    with torch.no_grad():
        expected, run = model(x), kiln.compile(model, fullgraph=True)
        found = [run(x) for _ in range(3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    assert torch.equal(found[0], expected) is not packed
    torch.testing.assert_close(found[0], expected, rtol=closeness.TOLERANCE, atol=closeness.TOLERANCE)


class Codebook(nn.Module):
    """What a vector is nearest to, and moving averages of what was near, written without a version."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 20).reshape(5, 4).sin())

    def forward(self, z):
        nearest = torch.cdist(z, self.codes).argmin(1)
        found = nn.functional.embedding(nearest, self.codes)
        counts = nn.functional.one_hot(nearest, 5).type_as(z)
        self.codes.data.mul_(0.5).add_(counts.T @ z.detach(), alpha=0.5)
        return z + (found - z).detach() + nn.functional.mse_loss(z, found.detach())


def test_old_values_of_what_is_written_through_data_are_not_to_be_had_again(replays):
    model = Codebook()
    other, run = copy.deepcopy(model), kiln.compile(model, fullgraph=True)
    with records.collect() as log:
        for _ in range(2):
            grads = []
            for f in (other, run):
                z = torch.linspace(-1, 1, 24).reshape(6, 4).requires_grad_()
                f(z).sum().backward()
                grads.append(z.grad)
            torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(model.codes, other.codes)
    assert not log.fallbacks and not replays
    z = torch.rand(6, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"writes to its inputs \(\w*codes\w*\)"):
        torch.autograd.grad(run(z).sum(), z, create_graph=True)


def test_running_statistics_are_no_old_values():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    other, run, found = copy.deepcopy(model), kiln.compile(model, backend="aot_eager"), []
    for f in (other, run):
        z = torch.linspace(-1, 1, 24).reshape(6, 4).sin().requires_grad_()
        (grad,) = torch.autograd.grad(f(z).square().sum(), z, create_graph=True)
        grad.square().sum().backward()
        found.append(z.grad)
    torch.testing.assert_close(found[1], found[0])
