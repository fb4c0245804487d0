"""Plans for a GPU on a machine without one: what is started, with which buffers, sizes and memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kiln
from kiln._launch import Plan, addresses, aliases
from kiln.launch import device
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded

from .driver import CONTEXT, REFUSED, STREAM, pretended
from .programs import FOLDS, POINTWISE


def planned(f, *inputs):
    plan = compile_graph(recorded(f, *inputs))
    assert isinstance(plan, Plan)
    return plan


def words(plan):
    return [step[0] for step in plan.owner.steps]


@pytest.mark.parametrize(
    "name", ["add", "broadcast", "joined", "layer norm", "softmax of 1000", "columns", "sum of all"]
)
def test_values(name):
    f, *makers = {**POINTWISE, **FOLDS}[name]
    inputs = [make("cpu", torch.float32) for make in makers]
    with pretended() as driver:
        plan = planned(f, *inputs)
        for _ in range(3):
            torch.testing.assert_close(plan(list(inputs))[0], f(*inputs), rtol=1e-5, atol=1e-4)
    assert driver.starts and all(start.stream == STREAM for start in driver.starts)


def test_intermediate_values_lie_in_one_arena_in_steps_of_256_bytes():
    def block(x, w, b):
        return torch.softmax(F.gelu(torch.addmm(b, x, w)) @ w + x, -1)

    inputs = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
    with pretended():
        plan = planned(block, *inputs)
        torch.testing.assert_close(plan(list(inputs))[0], block(*inputs))
    assert words(plan) == ["call", "grid", "call", "make", "grid"] and plan.bytes(list(inputs)) == 512
    assert "k1(arena+0, arena+0): 1 x 256 threads" in str(plan)


def test_training():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    kiln.reset()
    with pretended() as driver:
        compiled = kiln.compile(model, fullgraph=True)
        got = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    assert driver.starts
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("apart", [False, True])
def test_large_values_of_a_backward_pass_have_memory_of_their_own(apart, monkeypatch):
    """What was saved goes while gradients are made: one arena for all of them would be taken before."""
    monkeypatch.setattr(device, "APART", 512)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 4))
    x = torch.randn(5, 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    kiln.reset()
    plans = []
    with pretended() as driver:
        driver.apart, make = apart, driver.plan
        monkeypatch.setattr(driver, "plan", lambda *given: plans.append(make(*given)) or plans[-1])
        compiled = kiln.compile(model, fullgraph=True)
        got = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    _, backward = plans
    assert any(one.size >= 512 for one in backward.owner.lodgings) != apart


@pytest.mark.parametrize(("apart", "much"), [(True, 1), (True, 1 << 20), (False, 1)])
def test_large_values_beside_a_large_result_have_memory_of_their_own(apart, much, monkeypatch):
    """An arena would stay there when they have gone."""
    monkeypatch.setattr(device, "APART", 512)
    monkeypatch.setattr(device, "MUCH", much)
    x, w = torch.randn(16, 64), torch.randn(64, 64) / 64
    with pretended() as driver:
        driver.apart = apart
        plan = planned(lambda x, w: (x * 2).tanh() @ w @ w, x, w)
        torch.testing.assert_close(plan([x, w])[0], (x * 2).tanh() @ w @ w)
    assert any(one.size >= 512 for one in plan.owner.lodgings) != (apart and much == 1)


def test_what_is_not_aligned_has_functions_of_its_own():
    whole = torch.randn(65)
    with pretended() as driver:
        plan = planned(lambda x: x * 2 + 1, whole[:64])
        plan([whole[:64]])
        torch.testing.assert_close(plan([whole[1:]])[0], whole[1:] * 2 + 1)
        torch.testing.assert_close(plan([whole[:64]])[0], whole[:64] * 2 + 1)
    first, second, third = [start.function for start in driver.starts]
    assert first is third and first.text != second.text


def test_sizes_that_vary_are_given():
    kiln.reset()
    with pretended() as driver:
        f = kiln.compile(lambda x: x * 2, fullgraph=True, dynamic=True)
        for n in (33, 1000):
            f(torch.randn(n, 3))
    small, large = driver.starts
    assert (small.blocks, large.blocks) == (1, 3) and 33 in small.words and 1000 in large.words


def test_a_context_that_is_not_in_force_is_put_there():
    x = torch.randn(64)
    with pretended() as driver:
        plan = planned(lambda x: x + 1, x)
        driver.contexts = [CONTEXT + 1]
        torch.testing.assert_close(plan([x])[0], x + 1)
        assert driver.contexts == [CONTEXT + 1]


def test_what_the_driver_refuses_is_raised():
    x = torch.randn(64)
    with pretended() as driver:
        plan = planned(lambda x: x + 1, x)
        driver.error = REFUSED
        with pytest.raises(RuntimeError, match="CUDA error: an illegal memory access"):
            plan([x])
        driver.error = 0
        torch.testing.assert_close(plan([x])[0], x + 1)


def test_nothing_is_started_for_no_elements():
    x = torch.randn(0, 4)
    with pretended() as driver:
        kiln.reset()
        assert kiln.compile(lambda x: x * 2 + 1, fullgraph=True)(x).shape == (0, 4)
    assert not driver.starts


def test_addresses_and_aliases():
    x, y = torch.randn(4), torch.randn(3)
    kiln.compile(lambda x: x + 1, fullgraph=True)(x)  # a first plan says what a tensor is
    found = addresses([x, 7, y], b"\0\0\1")
    assert found == x.data_ptr().to_bytes(8, "little") + bytes(16)
    other, number = aliases((x.t(), 7))
    assert number == 7 and other.data_ptr() == x.data_ptr() and other is not x
    other.add_(1)
    assert torch.equal(other, x)
