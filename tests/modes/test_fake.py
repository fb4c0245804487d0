"""`kiln.fake()`: models are built, moved, run and trained without data, as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import kiln
from kiln.base.errors import Break
from kiln.modes.fake import lacks
from kiln.ops.fake import FakeTensor

HUGE = 1 << 20


def facts(t: torch.Tensor) -> Any:
    return tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad, t.is_leaf, isinstance(t, nn.Parameter)


def test_a_model_that_does_not_fit_is_built_run_and_trained():
    with kiln.fake():
        model = nn.Sequential(nn.Linear(HUGE, HUGE), nn.ReLU(), nn.Linear(HUGE, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss = nn.functional.cross_entropy(model(torch.randn(8, HUGE)), torch.randint(4, (8,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sum(p.numel() for p in model.parameters()) > 1 << 40
    assert model[0].weight.device.type == "cpu" and loss.shape == () and loss.requires_grad
    assert "FakeTensor((8, 4)" in repr(model(torch.randn(8, HUGE)))


INITIALISERS = [f for name, f in vars(nn.init).items() if name.endswith("_") and not name.startswith("_") and callable(f)]


@pytest.mark.parametrize("init", INITIALISERS, ids=lambda f: f.__name__)
def test_initialiser(init):
    given = {"constant_": (1.0,), "dirac_": (), "sparse_": (0.1,)}.get(init.__name__, ())
    shape = (4, 4, 3) if init.__name__ == "dirac_" else (4, 4)
    with kiln.fake():
        weight = nn.Parameter(torch.empty(shape))
        before = facts(weight)
        assert init(weight, *given) is weight and facts(weight) == before


def test_trunc_normal_of_real_tensors_is_unchanged():
    torch.manual_seed(0)
    expected = nn.init.trunc_normal_(torch.empty(20))
    with kiln.fake():
        pass
    torch.manual_seed(0)
    assert torch.equal(nn.init.trunc_normal_(torch.empty(20)), expected)


def conversions(model: nn.Module) -> Any:
    yield model.half()
    yield model.to(torch.float64)
    yield model.to("cpu", torch.float32)
    yield model.bfloat16()
    yield copy.deepcopy(model)
    yield model.requires_grad_(False)


def test_conversions_are_those_of_real_modules():
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))

    real = build()
    with kiln.fake():
        made = build()
    for a, b in zip(conversions(real), conversions(made), strict=True):
        with kiln.fake():
            state, fakes = a.state_dict(), b.state_dict()
            assert [(k, facts(v)) for k, v in fakes.items()] == [(k, facts(v)) for k, v in state.items()]
            assert [(n, facts(p)) for n, p in b.named_parameters()] == [(n, facts(p)) for n, p in a.named_parameters()]


def test_real_tensors_stay_as_they_are():
    real = torch.arange(3.0)
    with kiln.fake():
        real.add_(1)
        assert isinstance(real + 1, FakeTensor)
    assert real.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_optimizer_steps(kind):
    with kiln.fake():
        model = nn.Linear(3, 4)
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
    real = nn.Linear(3, 4)
    other = kind(real.parameters(), lr=0.1)
    real(torch.randn(2, 3)).sum().backward()
    other.step()
    assert optimizer.state[model.weight].keys() == other.state[real.weight].keys()


def test_values_are_refused_with_a_remedy():
    with kiln.fake(), pytest.raises(Break, match="have no values") as caught:
        torch.randn(3).sum().item()
    assert caught.value.kind == "data-dependent"


def test_libraries_may_be_told_that_they_are_compiled():
    with kiln.fake():
        assert not torch.compiler.is_compiling()
    with kiln.fake(compiling=True), kiln.fake():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_contexts_nest_and_end():
    with kiln.fake():
        with kiln.fake():
            inner = torch.ones(2)
        outer = torch.ones(2)
    assert isinstance(inner, FakeTensor) and isinstance(outer, FakeTensor)
    assert type(torch.ones(2)) is torch.Tensor
    with pytest.raises(ZeroDivisionError), kiln.fake():
        1 / 0
    assert type(torch.ones(2)) is torch.Tensor


@pytest.mark.skipif(not lacks("cuda"), reason="this machine has the device")
def test_devices_that_are_lacking():
    with kiln.fake():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda()
        x = torch.randn(2, 3, device="cuda")
        out = model(x)
        out.sum().backward()
        with torch.device("cuda:1"):
            other = nn.Linear(3, 4)
        moved = [torch.tensor([1, 2], device="cuda"), torch.zeros(2).to("cuda:1"), torch.zeros(2).cuda(1), x.cpu()]
        with pytest.raises(RuntimeError, match="same device"):
            model(torch.randn(2, 3))
        back = model.cpu()[0].weight.device
    assert (str(x.device), x.is_cuda, str(out.device), str(other.weight.device)) == ("cuda:0", True, "cuda:0", "cuda:1")
    assert [str(t.device) for t in moved] == ["cuda:0", "cuda:1", "cuda:1", "cpu"] and back.type == "cpu"
    assert "device='cuda:0'" in repr(out)
    with pytest.raises(AssertionError):
        torch.zeros(2, device="cuda")
