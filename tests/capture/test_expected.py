"""Branches on tensors that guard an error: the graph checks the condition, and the error is the program's own."""

from __future__ import annotations

import pytest
import torch

import kiln
from tests.support import How, one_graph, pin, program, same_as_eager, t

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
