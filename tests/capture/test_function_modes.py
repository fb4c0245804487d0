"""Torch function modes that a captured program enters: interpreted, in one graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tests.support import kiln, one_graph, same_as_eager, t

X = t(4, 4)


class Noting(TorchFunctionMode):
    def __init__(self):
        self.log = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.log.append((func.__name__, types, len(args), kwargs))
        return torch.cos(args[0]) if func is torch.sin else func(*args, **(kwargs or {}))


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.sin, torch.cos) else out


def test_a_mode_sees_what_torch_tells_it():
    def f(x):
        with Noting() as seen:
            y = 1 - torch.sin(x).exp() + x[0] + torch.zeros(4, dtype=torch.int)
            y = F.softmax(y.add(1, alpha=2), dim=0)
            y[0] = -len(y)
            y += F.linear(y, y) + F.gelu(y) + torch.tensor(3)
            facts = y.shape, y.dtype, y.dim(), y.mT
        return y.sum(), seen.log, facts

    one_graph(f, X)


def test_modes_within_one_another():
    def f(x):
        with Doubling(), Noting() as seen:
            y = torch.sin(x)
        return y + torch.sin(x), seen.log

    one_graph(f, X)


def test_vmap_within_a_mode():
    def f(x):
        with Doubling():
            return torch.vmap(lambda row: torch.sin(row) + row[0])(x)

    one_graph(f, X)


def test_a_break_within_is_one_at_the_entrance():
    def f(x):
        with Doubling():
            y = torch.sin(x)
            kiln.graph_break()
            y = torch.sin(y)
        return y + torch.sin(x)

    assert same_as_eager(f, X).found[0].kind == "foreign-context"


def test_a_mode_that_stays_entered():
    def f(x):
        mode = Doubling()
        mode.__enter__()
        return torch.sin(x)

    want = torch.sin(X) * 2
    got = kiln.compile(f, backend="eager")(X)
    try:
        assert torch._C._len_torch_function_stack() == 1
    finally:
        torch.overrides._pop_mode()
    torch.testing.assert_close(got, want)


class Scaling(TorchFunctionMode):
    def __init__(self, k):
        self.k = k

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * self.k if func is torch.sin else out


@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_modes_around_a_call_see_its_ops(backend):
    def f(x):
        return torch.sin(x) @ x

    kiln.reset()
    compiled = kiln.compile(f, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), f(X))
        for k in (2, 3):  # of one class, in another state
            with Scaling(k):
                torch.testing.assert_close(compiled(X), f(X))
        with FlopCounterMode(display=False) as counter:
            compiled(X)
        assert counter.get_total_flops() == 2 * 4**3
        with torch.device("meta"):  # which says where factories put tensors, and nothing else
            torch.testing.assert_close(compiled(X), f(X))
