"""Training with backend="aot_eager": models over several steps, and programs with more than one model or optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln.base import records
from tests.differentiate.test_traced_models import MODELS

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]


def first(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out["loss"] if "loss" in out else out[0]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything a model holds, gradients too."""
    grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {**{n: t.detach().clone() for n, t in model.state_dict().items()}, **grads}


def same(mine: nn.Module, theirs: nn.Module, tolerance: float) -> None:
    left, right = state(mine), state(theirs)
    assert left.keys() == right.keys()
    for name in right:
        torch.testing.assert_close(left[name], right[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.double().train(training and name != "Whisper")
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    eager = copy.deepcopy(model)
    with records.collect() as seen:
        compiled = kiln.compile(model, backend="aot_eager", fullgraph=True)
        for step in range(2):
            losses = []
            for run in (compiled, eager):
                torch.manual_seed(step)
                loss = first(run(**inputs)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    # The first call of ViT writes into its config what kind of problem the labels are, and the second reads it.
    assert len(seen.graphs) == 1 + (name == "ViT") and not seen.fallbacks
    same(model, eager, 1e-7)


def agree(program: Callable[[Callable[[Any], Any]], list[nn.Module]]) -> None:
    """The program with its parts compiled trains the same models as in eager, without falling back."""
    torch.manual_seed(0)
    theirs = program(lambda f: f)
    with records.collect() as seen:
        torch.manual_seed(0)
        mine = program(lambda f: kiln.compile(f, backend="aot_eager"))
    assert seen.graphs and not seen.fallbacks
    for left, right in zip(mine, theirs, strict=True):
        same(left, right, 1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_language_model(kind: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cells, self.out = nn.Embedding(40, 8), kind(8, 12, 2, batch_first=True), nn.Linear(12, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.cells(self.words(x))[0])

    def program(compiled: Callable[[Any], Any]) -> list[nn.Module]:
        model = Model()
        run, optimizer = compiled(model), torch.optim.Adam(model.parameters())
        text = torch.randint(0, 40, (4, 11))
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(run(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return [model]

    agree(program)


@pytest.mark.smoke
def test_adversarial_step_with_two_optimizers() -> None:
    def program(compiled: Callable[[Any], Any]) -> list[nn.Module]:
        maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
        judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Dropout(0.0), nn.Linear(16, 1))
        make, decide = compiled(maker), compiled(judge)
        makers, judges = torch.optim.Adam(maker.parameters(), 1e-2), torch.optim.SGD(judge.parameters(), 1e-2, momentum=0.9)
        for _ in range(4):
            real, noise = torch.randn(8, 6), torch.randn(8, 4)
            fake = make(noise)
            judges.zero_grad()
            loss = F.softplus(-decide(real)).mean() + F.softplus(decide(fake.detach())).mean()
            loss.backward()
            judges.step()
            makers.zero_grad()
            F.softplus(-decide(fake)).mean().backward()
            makers.step()
        return [maker, judge]

    agree(program)


def test_value_learning_with_a_target_network() -> None:
    def program(compiled: Callable[[Any], Any]) -> list[nn.Module]:
        online = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        target = copy.deepcopy(online)
        value, future = compiled(online), compiled(target)
        optimizer = torch.optim.RMSprop(online.parameters(), 1e-3)
        for step in range(4):
            states, following, rewards = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8)
            actions, over = torch.randint(0, 3, (8, 1)), torch.randint(0, 2, (8,)).float()
            with torch.no_grad():
                wanted = rewards + 0.9 * (1 - over) * future(following).max(1).values
            optimizer.zero_grad()
            F.smooth_l1_loss(value(states).gather(1, actions).squeeze(1), wanted).backward()
            optimizer.step()
            if step % 2:
                target.load_state_dict(online.state_dict())
        return [online, target]

    agree(program)


@pytest.mark.parametrize("backend", ["aot_eager", "kiln"])
def test_gradients_in_batches_and_within_transforms(backend):
    layer = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4))
    x, cotangents = torch.randn(2, 3, requires_grad=True), torch.randn(5, 2, 4)
    found = []
    for run in (layer, kiln.compile(layer, backend=backend)):
        out = run(x)
        wanted = [x, *layer.parameters()]

        def pull(v, out=out, wanted=wanted):
            return torch.autograd.grad(out, wanted, v, retain_graph=True)

        batch = torch.autograd.grad(out, wanted, cotangents, retain_graph=True, is_grads_batched=True)
        found.append((batch, torch.vmap(pull)(cotangents), pull(cotangents[0])))
    torch.testing.assert_close(found[1], found[0])
