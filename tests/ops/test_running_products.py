"""Gradients of running products: those of eager, wherever zeros are, in graphs that do not grow with the rows."""

import pytest
import torch

import kiln
from kiln.ops import running_products

ROWS = {
    "none": [2.0, -1.5, 0.5, 3.0, -0.25], "first": [0.0, 2.0, -1.5, 0.5, 3.0], "last": [2.0, -1.5, 0.5, 3.0, 0.0],
    "between": [2.0, -1.5, 0.0, 0.5, 3.0], "two": [2.0, 0.0, -1.5, 0.0, 3.0], "neighbours": [2.0, 0.0, 0.0, 0.5, 3.0],
    "all": [0.0] * 5, "nan": [2.0, float("nan"), 0.5, 0.0, 3.0], "inf": [2.0, float("inf"), 0.5, 3.0, 1.0],
}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_are_eagers(kind, dim):
    x = torch.tensor(list(ROWS.values())[:7]).to(kind)
    x = (x.mT if dim == 0 else x).contiguous().requires_grad_()
    y = x.cumprod(dim)
    grad = torch.linspace(-2, 2, x.numel()).view(x.shape).to(kind)
    (expected,) = torch.autograd.grad(y, x, grad)
    with torch.no_grad():
        got = running_products.gradient(grad, x, dim, y)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ROWS)
def test_compiled_gradients(name):
    x = torch.tensor(ROWS[name], requires_grad=True)
    g = kiln.compile(lambda x: x.cumprod(0), fullgraph=True)
    grad = torch.linspace(-2, 2, 5)
    (expected,), (got,) = (torch.autograd.grad(f(x), x, grad) for f in (lambda x: x.cumprod(0), g))
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 1), (2, 0)], ids=str)
def test_few_elements(shape):
    x = torch.zeros(shape, requires_grad=True)
    y = x.cumprod(-1)
    (expected,) = torch.autograd.grad(y, x, torch.ones(shape))
    with torch.no_grad():
        torch.testing.assert_close(running_products.gradient(torch.ones(shape), x, -1, y), expected)


def test_graphs_do_not_grow():
    counts = []

    def counted(module, given):
        counts.append(len(module.graph.nodes))
        return module.forward

    for many in (4, 64):
        x = torch.ones(many, requires_grad=True)
        kiln.compile(lambda x: x.cumprod(0), backend=kiln.aot(counted, counted))(x).sum().backward()
    assert counts[:2] == counts[2:]
