"""Branches on tensors that guard an error: the graph checks the condition, and the error is the program's own."""

from __future__ import annotations

import pytest
import torch

import kiln
from kiln.base import records
from tests.support import EAGER, Counting, How, Watch, one_graph, pin, program, same_as_eager, t

X = t(3, 4)
NAN = torch.tensor([1.0, float("nan")])


def finite(x):
    y = x * 2
    if torch.isnan(y).any():
        raise ValueError(f"{tuple(y.shape)} holds {y[1]}")
    return y + 1


# An assert of a test module is rewritten by pytest, so this one stands in a text.
SPACE: dict = {}
exec("def positive(x):\n  assert x.sum() > 0, 'needs a positive sum'\n  return x + 1", SPACE)
positive = SPACE["positive"]


def read(x):
    y = x.sin()
    if not torch.all(x > 0).item():
        raise ValueError("a number below zero")
    return y + 1, bool(x.long().max())


def counted(x):
    if not int(x.long().sum()):
        raise ValueError("nothing")
    return x + 1



def caught(x):
    try:
        if not (x > 0).all():
            raise KeyError("low")
        return x * 2
    except KeyError as e:
        return x * 3, e.args


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("f", "good", "bad"), [(finite, X, NAN), (positive, X, -X), (caught, X.abs() + 1, X),
                                                 (counted, X, X * 0)])  # fmt: skip
def test_the_error_is_the_programs(f, good, bad, backend):
    compiled = kiln.compile(f, backend=backend, fullgraph=True)
    for x in (good, bad, good, bad):
        outcomes = []
        for call in (f, compiled):
            try:
                outcomes.append(str(call(x)))
            except Exception as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1]


def test_one_graph():
    for f in (finite, positive):
        one_graph(f, X)


def drawn(x):
    y = torch.nn.functional.dropout(x + torch.rand(4), 0.5)
    if x.sum() < 0:
        raise ValueError("a negative sum")
    return y + torch.empty(4).normal_()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "kiln"])
def test_numbers_are_drawn_once(backend):
    compiled, found = kiln.compile(drawn, backend=backend, fullgraph=True), []
    for f in (drawn, compiled):
        torch.manual_seed(3)
        found.append([f(X), f(X)])
        with pytest.raises(ValueError, match="negative"):
            f(-X)
        found[-1].append(torch.rand(3))
    torch.testing.assert_close(*found)


@program(X)
def test_distributions_that_are_sampled_check_their_arguments(x):
    normal = torch.distributions.Normal(x, x.abs() + 1)
    z = normal.rsample()
    return z, normal.log_prob(z)


@program(X, graphs=2, breaks=1)
def test_what_is_filled_and_another_written_breaks(x):
    torch.add(torch.empty(4).normal_(), 1, out=x[0])
    if x.sum() < -9:
        raise ValueError("a negative sum")
    return x + 1


@program(X.abs() + 1, breaks=1)
def test_a_number_that_is_checked_and_kept(x):
    return read(x)


@program(X)
def test_distributions_check_their_arguments(x):
    return torch.distributions.Normal(x, x.exp()).log_prob(x)


@program(X, graphs=2, breaks=1)
def test_a_graph_that_writes_breaks_instead(x):
    x.add_(1)
    if x.sum() < 0:
        raise ValueError("negative")
    return x * 2


def test_effects_before_the_check_happen_once():
    seen = []

    def f(x):
        seen.append(len(seen))
        if x.sum() < 0:
            raise ValueError("negative")
        seen.append("after")
        return x * 2

    how = How(setup=seen.clear, state=lambda: list(seen))
    pin(same_as_eager(f, X, how=how))
    assert type(same_as_eager(f, -X, how=how).raised) is ValueError


def test_checks_hold_for_any_size():
    watch = Watch(lambda x: torch.distributions.Normal(x[0], x.exp()).log_prob(x))
    for rows in (3, 4, 5, 6):
        watch(t(rows, 4))
    watch.pin(graphs=2, breaks=0)


class Steps:
    """Training steps that check what they compute, before or after gradients of the last one are let go."""

    def __init__(self, first):
        torch.manual_seed(0)
        self.first, self.calls, self.model = first, [], torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def step(self, x):
        self.calls.append("begun")
        if self.first:
            self.optimizer.zero_grad()
        y = self.model(x) + torch.rand(2)
        if not torch.isfinite(y).all():
            raise ValueError(f"no number of {y.numel()}")
        if not self.first:
            self.optimizer.zero_grad()
        y.square().mean().backward()
        self.optimizer.step()
        self.calls.append("done")
        return y


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_checks_before_writes_are_part_of_the_graph(backend, first):
    found, counting = [], Counting(backend)
    for compiled in (False, True):
        steps, results = Steps(first), []
        step = kiln.compile(steps.step, backend=counting) if compiled else steps.step
        for x in (X, X, X * NAN[1], X, X):
            try:
                results.append(step(x).detach())
            except ValueError as error:
                steps.calls.append(str(error))
            grad = steps.model.weight.grad
            results.append((None if grad is None else grad.clone(), torch.rand(1)))
        found.append((steps.calls, results, steps.model.state_dict()))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=1e-5, atol=1e-6)
    assert counting.runs == 5  # each step is one graph, of which one raises


@pytest.mark.parametrize("size", [4, 100_000])
def test_checks_after_writes_where_a_graph_writes_at_its_end(size):
    def checked_late(total, x):
        total.add_(1)
        if x.sum() < 0:
            raise ValueError("a negative sum")
        total.mul_(2)
        if not torch.isfinite(x).all():
            return total * 0
        total.add_(x.sum())
        return total + x

    kiln.reset()  # functions alike share what was found out
    compiled, totals = kiln.compile(checked_late), [torch.zeros(size), torch.zeros(size)]
    with records.collect() as log:
        for number in (1.0, 2.0, -1.0, 3.0, float("inf"), -2.0, 1.0):
            found = []
            for f, total in zip((checked_late, compiled), totals, strict=True):
                try:
                    found.append((f(total, torch.full((size,), number)), total))
                except ValueError as error:
                    found.append((str(error), total))
            torch.testing.assert_close(found[0][1], found[1][1])
            assert str(found[0][0]) == str(found[1][0])
    assert EAGER or (len(log.graphs), len(log.breaks)) == (2, 0)


def test_steps_of_an_optimizer_and_the_checks_of_a_distribution_are_one_graph():
    policy = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(policy.parameters())

    def updates(observed, done, gain):
        for _ in range(2):
            chances = torch.distributions.Normal(policy(observed), 1.0)
            loss = -(chances.log_prob(done).sum(-1) * gain).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    compiled = kiln.compile(updates)
    with records.collect() as log:
        for _ in range(3):
            compiled(t(4, 3), t(4, 2), t(4))
    assert EAGER or (len(log.graphs), len(log.breaks)) == (2, 0)
