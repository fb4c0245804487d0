"""Places that a number given at run time chooses: one kernel serves the numbers of one sign."""

from __future__ import annotations

import pytest
import torch

import kiln
from kiln.base import records


def filled(x, n):
    x = x.clone()
    x[n] = -1
    return x


def filled_from(x, n):
    x = x.clone()
    x[n:] = -1
    return x


@pytest.mark.parametrize(
    "f",
    [lambda x, n: x[n] + 1, lambda x, n: x[n:] + 1, lambda x, n: x[:n] + 1, lambda x, n: x[n : n + 2] + 1, filled, filled_from],
    ids=["place", "start", "end", "both", "write a place", "write from a start"],
)
def test_places_that_vary(f):
    x = torch.arange(20.0).reshape(10, 2)
    compiled = kiln.compile(f, fullgraph=True)
    with records.collect() as seen:
        for n in (2, 3, 4, 9, -2, -3, -10, 0, 1):
            assert torch.equal(compiled(x, n), f(x, n)), n
    assert not seen.fallbacks


def test_a_norm_of_one_element_takes_no_power():
    x = torch.tensor([[1e-3, 1e25, 2.0]])
    for order in (-41.0, 3.0, 2.0, 0.0, 1.0):
        f = lambda x: (torch.norm(x, order, dim=0), torch.norm(x, order, dim=0, keepdim=True))  # noqa: E731, B023
        kiln.reset()
        torch.testing.assert_close(kiln.compile(f)(x), f(x))
