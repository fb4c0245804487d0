"""Large products of f32 in oneDNN's own function, in the place of torch's: which, and what they give."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

import kiln
from kiln import _launch
from kiln.launch import native, program
from tests.launch.test_layers import noting

TENSOR, REAL = ctypes.c_void_p, ctypes.c_double
MM = ctypes.CFUNCTYPE(ctypes.c_int32, TENSOR, TENSOR, TENSOR)
ADDMM = ctypes.CFUNCTYPE(ctypes.c_int32, TENSOR, TENSOR, TENSOR, TENSOR, REAL, REAL)
MULTIPLY = ctypes.CFUNCTYPE(None, TENSOR, TENSOR, TENSOR, ctypes.c_float, ctypes.c_float)

pytestmark = pytest.mark.skipif(not all(native.products()), reason="this build of torch has no such function")


@pytest.fixture
def chosen():
    """What is called for products: the functions that stand for torch's, with others in torch's place."""
    seen: list[object] = []
    mm = MM(lambda *_: seen.append("mm") or 0)
    addmm = ADDMM(lambda *_: seen.append("addmm") or 0)
    multiply = MULTIPLY(lambda a, b, out, beta, alpha: seen.append((beta, alpha)))
    addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in (mm, addmm, multiply)]
    own = _launch.set_products(*addresses)
    functions = MM(own[0]), ADDMM(own[1])

    def call(*tensors, beta=1.0, alpha=1.0):
        handles = [ctypes.c_void_p(t._cdata) for t in tensors]
        given = [ctypes.addressof(one) for one in handles]
        status = functions[0](*given) if len(given) == 3 else functions[1](*given, beta, alpha)
        assert status == 0
        return seen.pop()

    yield call
    native.products.cache_clear()
    assert all(native.products())


def test_large_matrices_without_gaps_are_its_own(chosen):
    a, b, out = torch.randn(128, 256), torch.randn(256, 128), torch.empty(128, 128)
    turned_a, turned_b = torch.randn(256, 128).t(), torch.randn(128, 256).t()
    for left in (a, turned_a):
        for right in (b, turned_b):
            assert chosen(out, left, right) == (0.0, 1.0)
            assert chosen(out, out, left, right) == (1.0, 1.0)
    assert chosen(out, a[:, :64], b[:64]) == "mm", "few multiplications, and gaps"
    assert chosen(torch.empty(256, 128), torch.randn(256, 512)[:, :256], b) == "mm", "gaps"
    assert chosen(torch.empty(128, 128).t(), a, b) == "mm", "the result lies by columns"
    assert chosen(out.double(), a.double(), b.double()) == "mm"
    assert chosen(out.bfloat16(), a.bfloat16(), b.bfloat16()) == "mm"
    assert chosen(torch.empty(8, 4096), torch.randn(8, 1024), torch.randn(1024, 4096)) == "mm", "few rows"
    assert chosen(torch.empty(4096, 8), torch.randn(4096, 1024), torch.randn(1024, 8)) == "mm", "few columns"
    assert chosen(torch.empty(1024, 2048), torch.randn(1024, 8), torch.randn(8, 2048)) == "mm", "few summands"
    assert chosen(out, torch.randn(128), a, b) == "addmm", "a row for all rows"
    assert chosen(out, out, a, b, alpha=2.0) == chosen(out, out, a, b, beta=0.5) == "addmm"


def test_what_is_added_to_is_copied_where_it_lies_elsewhere(chosen):
    a, b, out, before = torch.randn(128, 256), torch.randn(256, 128), torch.zeros(128, 128), torch.randn(128, 128)
    assert chosen(out, before, a, b) == (1.0, 1.0)
    assert out.equal(before)
    assert chosen(out, before.t(), a, b) == (1.0, 1.0)
    assert out.equal(before.t())


@pytest.fixture
def made(monkeypatch):
    """The plans that are made as on processors whose vectors are wider than the library's."""
    monkeypatch.setattr(native, "is_multiplied_narrowly", lambda: True)
    monkeypatch.setattr(program, "keeping", lambda *_: None)
    kiln.reset()
    return noting(monkeypatch, program, "linked", lambda plan: plan.owner)


def natives(plans) -> list[str]:
    return [step[6] for plan in plans for step in plan.steps if step[0] == "call"]


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", [(128, 256, 144), (17, 1033, 301), (2048, 64, 48), (16, 16, 20000), (1, 4096, 1100)])
def test_products_either_way(turned, sizes, made):
    rows, summed, columns = sizes
    a = torch.randn(summed, rows).t() if turned[0] else torch.randn(rows, summed)
    b = torch.randn(columns, summed).t() if turned[1] else torch.randn(summed, columns)
    c = torch.randn(rows, columns)

    def products(a, b, c):
        return a @ b, torch.addmm(c, a, b), (a @ b).relu() + c

    with torch.no_grad():
        expected, found = products(a, b, c), kiln.compile(products, fullgraph=True)(a, b, c)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-4)
    assert {"kiln_mm_out", "kiln_addmm_out"} == set(natives(made))


def test_gradients_and_their_sums(made):
    layer, x = nn.Linear(256, 256), torch.randn(128, 256, requires_grad=True)

    def again(x):
        for _ in range(3):
            x = layer(x).tanh()
        return x

    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(again(x).square().sum(), leaves)
    compiled = kiln.compile(again, fullgraph=True)
    for _ in range(2):
        found = torch.autograd.grad(compiled(x).square().sum(), leaves)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert natives(made).count("kiln_addmm_out") == 2, "gradients of the weight are added as they are made"


def test_numbers_of_eager_are_its_products(made):
    a, b = torch.randn(128, 256), torch.randn(256, 128)
    found = kiln.compile(torch.mm, options={"numerics": "eager"})(a, b)
    assert found.equal(a @ b) and not {"kiln_mm_out"} & set(natives(made))
