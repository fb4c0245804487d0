"""Writes at places that are data go in order along the indices, so that results are eager's bit by bit."""

import re

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.base import records
from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.program import Fusing, fuse
from kiln.fuse.split import GRIDS
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded
from tests.fuse.test_kernels import calls_of, check, rand

aten = torch.ops.aten


def numbers(high, *shape, low=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high))


def zeros(like, *shape):
    return like.new_zeros(shape)


UPDATES = {
    "put": lambda i, s: zeros(s, 9, 20).index_put((i,), s),
    "put that adds": lambda i, s: zeros(s, 9, 20).index_put((i,), s, True),
    "one row": lambda i, s: zeros(s, 9, 20).index_put((i,), s[0], True),
    "places of two dimensions": lambda i, s: zeros(s, 9, 4, 20).index_put((i, i % 4), s, True),
    "places apart": lambda i, s: aten.index_put(zeros(s, 9, 4, 3, 20), [i, None, i % 3], s[:, None], True),
    "not the first dimension": lambda i, s: aten.index_put(zeros(s, 2, 9, 20), [None, i], s),
    "many dimensions": lambda i, s: zeros(s, 9, 20).index_put((i.view(5, 6),), s.view(5, 6, 20), True),
    "ones": lambda i, s: torch.ones(9, 20, dtype=s.dtype).index_put((i,), s, True),
    "added rows": lambda i, s: zeros(s, 9, 20).index_add(0, i % 9, s),
    "scattered": lambda i, s: zeros(s, 9, 20).scatter(0, (i[:, None] + torch.arange(20)) % 9, s),
    "scattered number": lambda i, s: zeros(s, 9, 20).scatter(0, (i[:, None] + torch.arange(20)) % 9, 3),
    "scattered sums": lambda i, s: zeros(s, 9, 20).scatter_add(0, (i[:, None] + torch.arange(20)) % 9, s),
    "a part": lambda i, s: zeros(s, 9, 25).scatter_add(0, (i[:, None] % 9).expand(30, 20)[:, 2:], s),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("name", UPDATES)
def test_updates_of_a_number_are_loops(name, dtype):
    places, source = numbers(9, 30, low=-9), (rand(30, 20) * 4).to(dtype)
    check(UPDATES[name], places, source, kernels=1, nests=[1, 1], rtol=0, atol=0)
    check(lambda i, s: UPDATES[name](i, s * 2 + 1) * 2, places, source, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("f", [
    lambda i: torch.zeros(9, dtype=torch.int64).scatter_add(0, i % 9, torch.ones_like(i)),
    lambda i: torch.zeros(9).index_put((i,), torch.tensor(2.0), True),
    lambda i: torch.zeros(30, 5).scatter(1, i[:, None] % 5, 1.0),
    lambda i: torch.ones(9).index_add(0, i % 9, torch.ones(30)),
    lambda i: torch.zeros(9).index_put((i,), torch.tensor(2.0)),
], ids=["counts", "sums", "one of many", "degrees", "marks"])  # fmt: skip
def test_a_number_is_written_to_single_elements(f):
    places = numbers(9, 30, low=-9)
    check(f, places, kernels=1, nests=[1, 1], rtol=0, atol=0)
    assert torch.equal(kiln.compile(f, fullgraph=True)(places), f(places))


def test_many_single_elements_are_left_to_eager():
    """Its kernel writes them on several threads."""
    def f(i):
        return torch.zeros(9).index_put((i,), torch.tensor(2.0))

    many = torch.zeros(70_000, dtype=torch.int64)
    check(f, many, kernels=0, calls=["full", "index_put_"])


def test_zeros_are_not_kept_to_be_copied():
    """Without gradients what follows from nothing is computed once; what is written to is made where it is written."""
    def f(i, s):
        return torch.zeros(9, 20).index_add(0, i % 9, s) + torch.arange(20).sin()

    places, source = numbers(9, 30), rand(30, 20)
    with records.collect() as log:
        got = kiln.compile(f, fullgraph=True)(places, source)
    assert torch.equal(got, f(places, source))
    (plan,) = log.plans
    assert {step.kind for step in plan.steps} == {"kernel"}, plan


def test_sums_of_half_types():
    places, source = numbers(9, 30, low=-9), rand(30, 20).bfloat16()
    check(UPDATES["put that adds"], places, source, kernels=1, nests=[1, 1], rtol=0, atol=0)
    program = fuse(expand(recorded(UPDATES["scattered sums"], places, source), "prims", FOR_LOOPS))
    assert calls_of(program)[-1] == "scatter_add_"


def test_what_is_updated_in_memory_of_its_own_stays_a_call():
    check(lambda x, i, y: (x * 2).index_put((i,), y, True), rand(9, 20), numbers(9, 5), rand(5, 20),
          kernels=1, calls=["index_put_"])  # fmt: skip
    check(lambda i, y: zeros(y, 9).index_put((i,), y, True), numbers(9, 5), rand(5), calls=["full", "index_put_"], kernels=0)
    graph = expand(recorded(UPDATES["put"], numbers(9, 30), rand(30, 20)), "prims", FOR_LOOPS)
    assert calls_of(fuse(graph, False, Fusing(GRIDS)))[-1] == "index_put_"


def test_sizes_that_vary_and_gradients():
    def f(x, i):
        return x.sin()[i] * 2

    compiled = kiln.compile(f, fullgraph=True, dynamic=True)
    for n, m in ((9, 30), (12, 50)):
        x, i, g = rand(n, 20).requires_grad_(), numbers(n, m), rand(m, 20)
        got, expected = compiled(x, i), f(x, i)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, g)[0] for y in (got, expected)))


@pytest.mark.parametrize("wrong", [9, -10, 1000])
@pytest.mark.parametrize("name", ["put", "put that adds", "added rows", "scattered sums"])
def test_places_outside_raise_what_eager_raises(name, wrong):
    updates = {
        **UPDATES,
        "added rows": lambda i, s: zeros(s, 9, 20).index_add(0, i, s),
        "scattered sums": lambda i, s: zeros(s, 9, 20).scatter_add(0, i[:, None] + torch.arange(20) * 0, s),
    }
    f, places, source = updates[name], torch.tensor([3, wrong, 0]), rand(3, 20)
    with pytest.raises(Exception) as eager:
        f(places, source)
    with pytest.raises(type(eager.value), match=re.escape(str(eager.value).split("\nException raised")[0])):
        compile_graph(recorded(f, places, source))([places, source])


def test_gradients_of_a_table_add_rows():
    table, places = rand(50, 24).requires_grad_(), torch.randint(0, 50, (6, 40))
    gradient = rand(6, 40, 24)
    got, expected = (
        torch.autograd.grad(f(table, places), table, gradient)[0]
        for f in (kiln.compile(lambda t, i: F.embedding(i, t) * 2, fullgraph=True), lambda t, i: F.embedding(i, t) * 2)
    )
    assert torch.equal(got, expected)
    check(lambda x, i, y: x.index_add(0, i, y, alpha=2), rand(9, 5), torch.tensor([3, 3, 0]), rand(3, 5),
          kernels=0, calls=["index_add"])  # fmt: skip


@pytest.mark.parametrize("wrong", [-1, 9])
def test_rows_that_do_not_exist_raise_what_eager_raises(wrong):
    def add(x, i, y):
        return x.index_add(0, i, y)

    args = rand(9, 5), torch.tensor([3, wrong, 0]), rand(3, 5)
    with pytest.raises(Exception) as eager:
        add(*args)
    with pytest.raises(type(eager.value), match=re.escape(str(eager.value))):
        kiln.compile(add, fullgraph=True)(*args)
