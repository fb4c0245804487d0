"""Functions of one code that close over different objects, each compiled: entries are good for all of them."""

from __future__ import annotations

import functools
import gc
import traceback
import weakref

import pytest
import torch
from torch import nn

import kiln
from tests.support import Counting

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def run(make, calls, times=6, **how):
    """Compile `times` functions that `make` makes, and compare two calls of each with a twin's."""
    backend = Counting("")
    for i in range(times):
        mine, plain = kiln.compile(make(i), backend=backend, **how), make(i)
        for args, kwargs in calls:
            outcomes = []
            for f in (mine, plain):
                leaf = args[0].clone().requires_grad_()
                out = f(leaf, *args[1:], **kwargs)
                first = out[0] if isinstance(out, tuple) else out
                first.sum().backward()
                outcomes.append((out, leaf.grad))
            torch.testing.assert_close(*outcomes)
    return len(backend.modules)


ONCE = [((X,), {}), ((X + 1,), {})]


def test_tensors():
    def make(i):
        w = torch.full((4,), float(i)).requires_grad_()
        return lambda x: (x * w).relu() + 1

    assert run(make, ONCE) == 2


def test_gradients_of_what_is_closed_over():
    def make(i):
        w = torch.full((4,), 1.0 + i, requires_grad=True)
        return w, kiln.compile(lambda x: (x * w).sin(), backend="aot_eager")

    for i in range(4):
        w, f = make(i)
        f(X).sum().backward()
        torch.testing.assert_close(w.grad, (X * (X * w.detach()).cos()).sum(0))


def test_numbers():
    assert run(lambda i: lambda x: x * (i + 2), ONCE) == 3


def test_functions_that_close_over_others():
    def make(i):
        w = torch.full((4,), float(i))

        def inner(x):
            return x * w

        return lambda x: inner(x) + 1

    assert run(make, ONCE) == 2


def test_different_functions_within_have_entries_of_their_own():
    def logged(f):
        @functools.wraps(f)
        def call(*args, **kwargs):
            return f(*args, **kwargs)

        return call

    scaled = [logged(eval(f"lambda x: x * {n}")) for n in range(2, 14)]
    assert run(lambda i: scaled[i], ONCE, times=len(scaled)) == 12


def test_texts_that_are_looked_at_have_functions_of_their_own():
    names = "relu sin cos tanh exp sigmoid abs neg sqrt square log1p expm1".split()
    assert run(lambda i: (lambda name: lambda x: getattr(torch, name)(x + 2))(names[i]), ONCE, times=12) == 12


def test_every_kind_of_argument():
    def make(i):
        w = torch.full((4,), float(i))

        def f(x, /, y, *rest, k=2, **more):
            return x * w + y + sum(rest) * k + sum(more.values())

        return f

    calls = [((X, 1), {}), ((X, 1, 2, 3), {"k": 4, "a": 5}), ((X,), {"y": 2, "b": X})]
    assert run(make, calls, times=4) <= 12  # defaults of keywords are a dict of each function


def test_cells_that_are_written():
    def make(i):
        count, total = 0, torch.zeros(4)

        def f(x):
            nonlocal count, total
            count += 1
            total = total + x.detach().sum(0) + i
            return x * 2, total, count

        return f

    run(make, [*ONCE, *ONCE])


def test_cells_that_get_other_contents():
    def make(i):
        w = torch.full((4,), float(i))

        def f(x):
            return x * w

        def change(to):
            nonlocal w
            w = to

        return f, change

    for i in range(4):
        f, change = make(i)
        g = kiln.compile(f, backend="eager")
        for to in (torch.ones(4), torch.full((3, 1), 2.0), 3, torch.ones(4, dtype=torch.float64)):
            assert g(X).equal(f(X))
            change(to)
            assert g(X).equal(X * to)


def test_breaks():
    def make(i):
        w = torch.full((4,), float(i))

        def f(x):
            y = x * w
            kiln.graph_break()
            return y + w

        return f

    assert run(make, ONCE) == 4


def test_functions_that_call_themselves():
    def make(i):
        w = torch.full((4,), float(i))

        def f(x, n=3):
            return x if n == 0 else f(x * w, n - 1) + 1

        return f

    assert run(make, ONCE) == 2


def test_full_graphs():
    def make(i):
        w = torch.full((4,), float(i))
        return lambda x: x * w

    assert run(make, ONCE, fullgraph=True) == 2


def test_what_is_raised():
    def make(i):
        w = torch.ones(4 + i)

        def f(x):
            return x * w

        return f

    for i in range(3):
        f = kiln.compile(make(i), backend="eager")
        if not i:
            f(X)
            continue
        with pytest.raises(RuntimeError, match="must match") as raised:
            f(X)
        lines = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert lines.count("f") == 1


def test_modules_are_known_by_themselves():
    assert run(lambda i: (lambda m: lambda x: m(x))(nn.Linear(4, 4, bias=False).requires_grad_(False)), [], 2) == 0
    linears = [nn.Linear(4, 4) for _ in range(4)]
    assert run(lambda i: (lambda m: lambda x: m(x))(linears[i]), ONCE, times=4) == 4


def test_what_is_closed_over_goes():
    def make(i):
        w = torch.full((4,), float(i))
        return w, lambda x: x * w

    gone = []
    for i in range(4):
        w, f = make(i)
        g = kiln.compile(f, backend="eager")
        g(X), g(X + 1)
        gone += weakref.ref(w), weakref.ref(f)
    del w, f, g
    gc.collect()
    assert [ref() for ref in gone] == [None] * 8


def test_after_a_reset():
    def make(i):
        w = torch.full((4,), float(i))
        return lambda x: x * w

    made = [(kiln.compile(f, backend="eager"), f) for f in map(make, range(3))]
    for _ in range(2):
        for g, f in made:
            assert g(X).equal(f(X))
        kiln.reset()


def test_methods_of_objects_that_are_made_again_and_again():
    class Scale:
        def __init__(self, by):
            self.by = torch.full((4,), float(by))

        def apply(self, x):
            return x * self.by

    assert run(lambda i: Scale(i).apply, ONCE) == 1


def test_methods_of_objects_that_differ_have_graphs_of_their_own():
    class Scale:
        def __init__(self, by):
            self.by = f"{by}"

        def apply(self, x):
            return x * int(self.by)

    assert run(lambda i: Scale(i).apply, ONCE, times=12) == 12
    kinds = [type(f"Scale{i}", (Scale,), {}) for i in range(12)]
    assert run(lambda i: kinds[i](i).apply, ONCE, times=12) == 12
