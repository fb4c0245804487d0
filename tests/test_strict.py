"""Breaks as errors for a part of a program, frames left to Python, and the stances of a first call."""

from __future__ import annotations

import pytest
import torch

import kiln
from kiln.base import strict
from tests.support import Counting, t


def test_breaks_are_errors_where_the_program_says_so():
    @kiln.compile(backend="eager")
    def f(x, error):
        x = x + 1
        with kiln.error_on_graph_break(error):
            kiln.graph_break()
        return x + 2

    assert f(t(3), False).equal(t(3) + 3)
    with pytest.raises(kiln.Break, match="graph_break"):
        f(t(3), True)
    assert strict.now() is None


def test_a_decorator_around_the_compiled_function_decides_and_the_block_inside_is_nearer():
    backend = Counting()

    @kiln.error_on_graph_break(True)
    @kiln.compile(backend=backend)
    def f(x):
        with kiln.error_on_graph_break(False):
            x = x + 1
            kiln.graph_break()
            x = x + 2
        return x + 4 if x.dim() else inner(x)

    def inner(x):
        kiln.graph_break()
        return x

    assert f(t(3)).equal(t(3) + 1 + 2 + 4) and len(backend.modules) == 2
    with pytest.raises(kiln.Break):
        f(t(3)[0])
    assert strict.now() is None


def test_an_inlined_function_decides_for_itself():
    @kiln.error_on_graph_break(False)
    @kiln.compile(backend="eager")
    def inner(x):
        x = x + 1
        kiln.graph_break()
        return x + 2

    assert kiln.error_on_graph_break(True)(kiln.compile(lambda x: inner(x), backend="eager"))(t(3)).equal(t(3) + 3)
    with pytest.raises(kiln.Break):
        kiln.compile(lambda x: inner(x), backend="eager", fullgraph=True)(t(3))


def test_skip_frame_leaves_the_frame_and_captures_what_it_calls():
    backend = Counting()

    def inner(x):
        return x * 3

    @kiln.compile(backend=backend)
    def f(x):
        x = x + 1
        kiln.skip_frame()
        return inner(x)

    @kiln.compile(backend=backend)
    def g(x):
        x = x + 1
        kiln.graph_break()
        x = x + 1
        kiln.skip_frame()
        return x + 1

    assert f(t(3)).equal((t(3) + 1) * 3) and len(backend.modules) == 1
    assert g(t(3)).equal(t(3) + 3) and len(backend.modules) == 2


def test_step_unsupported_leaves_the_rest_to_python():
    backend = Counting()

    @kiln.compile(backend=backend)
    def f(x):
        x = x + 1
        kiln.step_unsupported()
        return x * 2

    for _ in range(2):
        assert f(t(3)).equal((t(3) + 1) * 2)
    assert len(backend.modules) == 1


@pytest.mark.parametrize("stance", ["eager_then_compile", "aot_eager_then_compile"])
def test_first_call_without_the_backend(stance):
    backend = Counting()
    f = kiln.compile(lambda x: x.sin() + 1, backend=backend)
    with kiln.set_stance(stance):
        for number in range(3):
            assert f(t(3)).equal(t(3).sin() + 1)
            assert len(backend.modules) == (number > 0)
        assert f(t(5)).equal(torch.sin(t(5)) + 1)


def test_nothing_of_it_does_anything_in_python():
    with kiln.error_on_graph_break(True):
        kiln.graph_break()
        kiln.skip_frame()
        kiln.step_unsupported("why")
    assert strict.now() is None


def broken(x):
    x = x + 1
    kiln.graph_break()
    return x * 2


def filled(x):
    return torch.zeros(int(x.sum().item()))


class Broken(torch.nn.Module):
    def forward(self, x):
        return broken(x)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("inner", [broken, Broken(), lambda x: broken(x) + 1])
def test_one_graph_inside_another_program_is_one_graph(inner, whole):
    compiled = kiln.compile(inner, backend="eager", fullgraph=True)
    with pytest.raises(kiln.Break, match="graph_break"):
        kiln.compile(lambda x: compiled(x + 1) + 1, backend="eager", fullgraph=whole)(t(3))


def test_one_graph_inside_another_program_is_captured_alone_where_it_would_be_split():
    outer, own = Counting(), Counting()
    whole = kiln.compile(filled, backend=own, fullgraph=True)
    f = kiln.compile(lambda x: whole(x + 1) + 1, backend=outer)
    assert f(torch.ones(3)).equal(torch.ones(6))
    assert (len(outer.modules), len(own.modules)) == (2, 1)

    outer, own = Counting(), Counting()
    whole = kiln.compile(lambda x: x.sin(), backend=own, fullgraph=True)
    f = kiln.compile(lambda x: whole(x + 1) + 1, backend=outer)
    assert f(t(3)).equal((t(3) + 1).sin() + 1)
    assert (len(outer.modules), len(own.modules)) == (1, 0)
