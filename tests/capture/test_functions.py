"""Autograd functions whose forward changes what is not theirs: each call does so once, as in eager."""

from typing import Any

import pytest
import torch

import kiln
from kiln.base import records

LOG: list[Any] = []
TABLE: dict[str, Any] = {}
COUNT = 0


class Counted:
    calls = 0


def made(cell: list[int], thing: Any) -> Any:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            global COUNT
            COUNT += 1
            LOG.append(COUNT)
            cell.append(COUNT)
            TABLE["calls"] = COUNT
            Counted.calls += 1
            thing.last = COUNT
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    return Doubled


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "kiln"])
def test_changes_are_made_once_a_call(backend: str) -> None:
    global COUNT
    COUNT, Counted.calls = 0, 0
    LOG.clear()
    TABLE.clear()
    cell: list[int] = []
    thing = type("Thing", (), {})()
    function = made(cell, thing)
    kiln.reset()
    compiled = kiln.compile(lambda x: function.apply(x.sin()) + 1, backend=backend)
    with records.collect() as log:
        for n in range(1, 4):
            x = torch.ones(3, requires_grad=True)
            compiled(x).sum().backward()
            assert torch.allclose(x.grad, 2 * x.cos())
            assert (COUNT, Counted.calls, thing.last, TABLE) == (n, n, n, {"calls": n})
            assert LOG == cell == list(range(1, n + 1))
    assert {b.kind for b in log.breaks} == {"side-effect"}


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.calls = len(LOG)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x > 0)


def test_what_only_reads_is_one_graph() -> None:
    kiln.reset()
    with records.collect() as log:
        compiled = kiln.compile(lambda x: Kept.apply(x.sin()) + 1, fullgraph=True)
        x = torch.ones(3, requires_grad=True)
        compiled(x).sum().backward()
    assert len(log.graphs) == 1 and not log.breaks and torch.allclose(x.grad, x.cos())


class Layer(torch.nn.Linear):
    """A layer that keeps what it saw."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach()
        return super().forward(x)


class Again(torch.autograd.Function):
    """A layer whose forward is computed once more in the backward pass, and differentiated there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: Any) -> torch.Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        return layers[0](x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layers[0](x).backward(grad)
        return x.grad, None


class Remembered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, store: dict[str, Any]) -> torch.Tensor:
        store["thing"].last = x * 2
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 3, None


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "kiln"])
def test_modules_and_things_that_it_is_given_hold_no_fakes(backend: str) -> None:
    layers = torch.nn.ModuleList([Layer(3, 3)])
    store = {"thing": type("Thing", (), {})()}
    kiln.reset()
    compiled = kiln.compile(lambda x: Remembered.apply(Again.apply(x.sin(), layers), store) + 1, backend=backend)
    with records.collect() as log:
        for n in range(2, 5):
            x, y = (torch.ones(n, 3, requires_grad=True) for _ in range(2))
            layers.zero_grad()
            compiled(x).sum().backward()
            grads = [p.grad.clone() for p in layers.parameters()]
            assert torch.equal(layers[0].seen, x.sin()) and torch.equal(store["thing"].last, layers[0](x.sin()) * 2)
            layers.zero_grad()
            (layers[0](y.sin()) * 3 + 1).sum().backward()
            for got, wanted in zip([x.grad, *grads], [y.grad, *(p.grad for p in layers.parameters())], strict=True):
                torch.testing.assert_close(got, wanted)
    assert "side-effect" in {b.kind for b in log.breaks}
