"""torch.func and torch.cond inside compiled functions: one node each, with the function as a graph of its own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.autograd import forward_ad

import kiln
from kiln.base import records
from tests.support import EAGER, How, one_graph, pin, program, same_as_eager, t

X, V = t(3, 5), t(5)
OVER_ROWS = torch.vmap(lambda row: row.sum() * 2)
LAYER = torch.nn.Linear(5, 2)


@program(X, V)
def test_vmap(x, v):
    return (
        torch.vmap(lambda row: (row * v).sum())(x),
        torch.vmap(lambda a, b: {"product": a * b, "sum": (a.sum(), 3)}, in_dims=(0, None), out_dims={"product": 1, "sum": (0, None)})(x, v + 1)["product"],
        torch.vmap(torch.Tensor.neg)(x),
        torch.vmap(lambda row: row + torch.ones(5), in_dims=1, out_dims=1)(x.t()),
        OVER_ROWS(x),
    )


@pytest.mark.skipif(EAGER, reason="compares with eager itself")
@pytest.mark.parametrize("maker", [torch.vmap, torch.func.grad, torch.func.jacrev, torch.func.hessian, torch.func.grad_and_value])
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_a_transform_makes_is_compiled_itself(maker, dynamic):
    made = maker(lambda row: (row * V).sin().sum())
    compiled = kiln.compile(made, backend="eager", fullgraph=True, dynamic=dynamic)
    for x in (X, V, X[:2]):
        torch.testing.assert_close(compiled(x), made(x))


@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_numbers_that_transforms_are_made_with_are_constants(backend):
    def f(x, n):
        torch.manual_seed(0)
        return torch.vmap(lambda row: row + torch.rand(4), chunk_size=n, randomness="same")(x)

    compiled = kiln.compile(f, backend=backend, fullgraph=True)
    x = t(5, 4)
    with records.collect() as log:
        for n in (1, 2, 3, 4, 2):
            torch.testing.assert_close(compiled(x, n), f(x, n))
    assert len(log.graphs) == 4


@program(X, V)
def test_derivatives(x, v):
    return (
        torch.func.grad(lambda a: (a * v).sin().sum())(x),
        torch.func.grad_and_value(lambda a: (a.sin().sum(), a + 1), has_aux=True)(v),
        torch.func.grad(lambda a, b: (a * b).sum(), argnums=(0, 1))(v, v.cos()),
        torch.func.jacrev(torch.sin)(v),
        torch.func.jacfwd(lambda a: a * v)(v),
        torch.func.hessian(lambda a: a.sin().sum())(v),
        torch.func.jvp(torch.sin, (x,), (x.cos(),)),
    )


@program(X, V)
def test_pullbacks(x, v):
    y, back = torch.func.vjp(lambda a: a.sin() * v, x)
    pair, twice, kept = torch.func.vjp(lambda a, b: ((a * b, a), b + 1), v, v.cos(), has_aux=True)
    layer = dict(LAYER.named_parameters())
    out, through = torch.func.vjp(lambda p: torch.func.functional_call(LAYER, p, (x,)), layer)
    inner = torch.vmap(lambda row: torch.func.vjp(torch.sin, row)[1](row)[0])(x)
    return y, back(y.cos()), back(y), pair, twice((v, v)), kept, through(torch.ones_like(out)), inner


@pytest.mark.parametrize("use", [lambda y, back: back, lambda y, back: torch.vmap(back)(torch.stack([y, y]))])
def test_a_pullback_stays_in_its_graph(use):
    outside = kiln.compile(lambda x: use(*torch.func.vjp(torch.sin, x)), backend="eager")(V)
    expected = use(*torch.func.vjp(torch.sin, V))
    if callable(expected):
        outside, expected = outside(V), expected(V)
    torch.testing.assert_close(outside, expected)


@program(X, V)
def test_transforms_nest(x, v):
    return torch.vmap(torch.func.grad(lambda row: (row * v).sin().sum()))(x * 2), torch.vmap(torch.vmap(torch.sin))(x)


@pytest.mark.parametrize("rows", [0, 3])
def test_there_may_be_nothing_to_map_over(rows):
    one_graph(lambda x, y: torch.vmap(lambda a, b: a * b + 1, in_dims=(1, -2))(x, y), t(2, rows), t(rows, 2))


def test_gradients_flow_into_tensors_around_the_function():
    r = one_graph(lambda x, v: torch.vmap(lambda row: (row * v).sin().sum())(x), t(3, 5, grad=True), t(5, grad=True))
    assert r.ops == 1


def test_a_module_is_the_function():
    one_graph(lambda x: torch.vmap(LAYER)(x), X)


@pytest.mark.parametrize("sign", [1, -1])
def test_cond_holds_both_arms(sign):
    def f(x, v):
        y = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos() + v, (x,)) if kiln.is_compiling() else (x.sin() if x.sum() > 0 else x.cos() + v)
        return y * 2

    compiled = kiln.compile(f, backend="eager", fullgraph=True)
    for k in (sign, -sign):
        assert compiled(X * k, V).equal(f(X * k, V))


def test_cond_on_a_python_bool_is_the_arm():
    assert kiln.compile(lambda x, c: torch.cond(c, torch.sin, torch.cos, (x,)), backend="eager", fullgraph=True)(X, True).equal(X.sin())


@pytest.mark.parametrize("arm", [lambda x: x.double(), lambda x: (x, x), lambda x: x[:1]])
def test_cond_with_arms_that_differ_is_refused(arm):
    with pytest.raises(kiln.Break, match="different kinds of results"):
        kiln.compile(lambda x: torch.cond(x.sum() > 0, torch.sin, arm, (x,)), backend="eager", fullgraph=True)(X)


def test_effects_inside_break():
    seen = []

    def noting(x):
        seen.append(1)
        return x.sin()

    r = same_as_eager(lambda x: torch.vmap(noting)(x) + 1, X, how=How(setup=seen.clear, state=lambda: len(seen)))
    pin(r, graphs=r.graphs, breaks=1)
    with pytest.raises(kiln.Break, match="effects"):
        kiln.compile(lambda x: torch.vmap(noting)(x), backend="eager", fullgraph=True)(X)


@program(X, graphs=2, breaks=1)
def test_a_break_inside_runs_the_transform_in_python(x):
    def broken(row):
        kiln.graph_break()
        return row * 2

    y = x + 1
    z = torch.vmap(broken)(y)
    return z * 3


def test_cond_under_the_name_of_its_operator():
    f = kiln.compile(lambda x: torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), backend="eager", fullgraph=True)
    assert f(X).equal(X.sin()) and f(-X).equal((-X).cos())


NET = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def residual(x):
    """A physical equation over what a network gives, as its derivatives say."""
    u = NET(x)
    du = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
    ux = du[:, :1]
    uxx = torch.autograd.grad(ux, x, grad_outputs=torch.ones_like(ux), create_graph=True)[0][:, :1]
    return ((du[:, 1:] + u * ux - 0.01 * uxx) ** 2).mean()


def penalty(real, fake):
    """A penalty on the slope of a network between two points."""
    x = (0.3 * real + 0.7 * fake).requires_grad_(True)
    slope = torch.autograd.grad(outputs=NET(x).sum(), inputs=x, create_graph=True, retain_graph=True)[0]
    return ((slope.norm(2, dim=1) - 1) ** 2).mean()


def forces(positions):
    """Forces as the slope of an energy, in evaluation."""
    with torch.enable_grad():
        at = positions.detach().requires_grad_(True)
        energy = NET(at).pow(2).sum()
        return energy.detach(), -torch.autograd.grad([energy], [at])[0]


def unused(x, y):
    slopes = torch.autograd.grad((x * x).sum(), (x, y), allow_unused=True)
    return slopes[0], slopes[1] is None


@pytest.mark.parametrize(("f", "grads"), [(residual, (True,)), (penalty, (False, False)), (forces, (False,)), (unused, (True, True))])
def test_gradients_are_computed_in_the_graph(f, grads):
    one_graph(f, *(t(4, 2, grad=grad) for grad in grads))


def test_layers_that_are_copies_have_gradients_in_the_graph():
    layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(8)))
    one_graph(lambda x: torch.autograd.grad(layers(x).sum(), x)[0] * 2, t(2, 3, grad=True))


@pytest.mark.skipif(EAGER, reason="counts breaks")
def test_gradients_that_flow_outside_of_the_graph_break_it():
    def slope(a, b):
        return torch.autograd.grad((a * b).sum(), a)[0]

    a = t(3, grad=True)
    b = a * 2  # which depends on a
    explained = kiln.explain(slope, backend="eager")(a, b)
    assert explained.result.equal(a * 4)
    assert [found.kind for found in explained.breaks] == ["backward"]
    heard = []
    a.register_hook(heard.append)
    assert kiln.compile(slope, backend="eager")(a, t(3)).equal(t(3)) and len(heard) == 1


# ---------------------------------------------------------------------- loops of torch


def mapped(x, y):
    return torch._higher_order_ops.map(lambda row, by: {"sum": row.sum() * by, "row": row.sin() + SHIFT}, x, y)


def test_rows_are_mapped():
    x, y = t(4, 3), t(3)
    got = kiln.compile(mapped, fullgraph=True)(x, y)
    torch.testing.assert_close(got["sum"], x.sum(1)[:, None] * y)
    torch.testing.assert_close(got["row"], x.sin() + SHIFT)


def sums(first, x, reverse=False):
    return torch._higher_order_ops.scan(lambda c, row: (c + row, c * row), first, x, reverse=reverse)


SHIFT = t(3)


@pytest.mark.skipif(EAGER, reason="torch compiles it itself")
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_are_scanned(reverse):
    x = t(4, 3, grad=True)
    last, products = kiln.compile(sums, fullgraph=True)(torch.zeros(3), x, reverse)
    rows = x.flip(0) if reverse else x
    expected = (rows.cumsum(0) - rows) * rows
    torch.testing.assert_close(last, x.sum(0))
    torch.testing.assert_close(products, expected.flip(0) if reverse else expected)
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), x)[0] for v in (products, expected)))


@pytest.mark.skipif(EAGER, reason="torch compiles it itself")
def test_loops_run_as_long_as_values_say():
    def doubled(x, limit):
        return torch._higher_order_ops.while_loop(
            lambda n, y: y.sum() < limit, lambda n, y: (n + 1, y * 2), (torch.tensor(0), x)
        )

    compiled = kiln.compile(doubled, backend="eager", fullgraph=True)
    for limit, rounds in ((10.0, 2), (100.0, 6), (1.0, 0)):
        n, y = compiled(torch.ones(3), torch.tensor(limit))
        assert n == rounds and y.equal(torch.full((3,), 2.0**rounds))


@pytest.mark.skipif(EAGER, reason="compares with eager itself")
@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_tensors_with_tangents(backend):
    """Graphs compute no tangents: calls with such tensors run in Python, others through the graph."""
    f = kiln.compile(lambda x: x.exp() * 2, backend=backend)
    x = torch.linspace(-1, 1, 3)
    with records.collect() as log:
        plain = f(x)
        with forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones(3))))
        torch.testing.assert_close((plain, value, tangent, f(x)), (x.exp() * 2,) * 4)
    assert (len(log.graphs), len(log.breaks), len(log.recompiles)) == (1, 0, 0)


def test_scripts_are_traced_op_by_op():
    def f(x):
        return torch.jit.trace(lambda u: u * 2 + 1, x + 1, check_trace=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = kiln.compile(f)(torch.ones(2))
    assert "aten::mul" in str(traced.graph) and torch.equal(traced(torch.ones(3)), torch.full((3,), 3.0))


def given_is_written(z):
    x = z * 1
    y = torch.vmap(torch.Tensor.neg_)(x)
    return y is x, x, y


def both_given_are_written(z):
    def f(a, b):
        a.add_(b)
        return a * 2, b.mul_(3)

    x = z * 1
    return torch.vmap(f)(x, x), x


def one_for_all_is_read(z):
    x, y = z * 1, torch.ones(2)
    return torch.vmap(lambda a, b: a.add_(b.sum()), in_dims=(0, None))(x, y), x, y


def input_is_written(z):
    return torch.vmap(lambda row: row.mul_(2).sum())(z), z + 1


@pytest.mark.parametrize("backend", ["", "aot_eager", "kiln"])
@pytest.mark.parametrize("f", [given_is_written, both_given_are_written, one_for_all_is_read, input_is_written])
def test_what_vmap_gives_its_function_may_be_written(f, backend):
    one_graph(f, t(3, 2), how=How(backend=backend))
    if f is not input_is_written:
        one_graph(f, t(3, 2, grad=True), how=How(backend=backend))
