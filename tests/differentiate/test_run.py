"""The callable of a differentiated graph against eager: gradients, modes, mutation, aliasing, random numbers."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kiln
from kiln.base import records
from tests.same import Same
from tests.support import How, one_graph, t

AHEAD = How(backend="aot_eager", options={"fullgraph": True})


def same(f, *args, **kw):
    """Same as eager in one graph that was differentiated ahead of time."""
    return one_graph(f, *args, how=AHEAD, **kw)


def ahead(f, **options):
    return kiln.compile(f, backend="aot_eager", fullgraph=True, **options)


@pytest.fixture(autouse=True)
def no_fallbacks():
    with records.collect() as log:
        yield
    assert not log.fallbacks


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


# Modes


def test_each_grad_mode_compiles_to_what_it_needs():
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    f = kiln.compile(lambda x, w: (x @ w).relu(), backend=kiln.aot(keep), fullgraph=True)
    x, w = t(2, 3), leaf(3, 4)
    for _ in range(2):
        assert f(x, w).requires_grad
        with torch.no_grad():
            out = f(x, w)
            assert not out.requires_grad and not out.is_inference()
        with torch.inference_mode():
            assert f(x, w).is_inference()
    f(x, w).sum().backward()
    returned = [len(gm.graph.output_node().args[0]) for gm in graphs]
    assert returned == [3, 1, 1, 2]  # forward with two saved, twice without gradients, backward


def test_flipping_requires_grad_recompiles():
    f = ahead(lambda x: (x * 2).sin())
    assert not f(t(3)).requires_grad
    x = t(3, grad=True)
    f(x).sum().backward()
    torch.testing.assert_close(x.grad, (x * 2).cos().detach() * 2)
    assert not f(t(3)).requires_grad


def test_no_grad_inside():
    def f(x, w):
        y = x * w
        with torch.no_grad():
            scale = y.abs().max()
        return y / scale, scale

    same(f, t(3, 4, grad=True), t(4, grad=True))


def test_grad_inside_of_no_grad():
    def f(x, w):
        with torch.enable_grad():
            y = (x * w).sin()
            part = y[1:]
        return y, part, y * 2, x.detach() * w

    x, w = t(3, 4, grad=True), t(4, grad=True)
    f_compiled = kiln.compile(f, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with torch.no_grad():
            got, expected = f_compiled(x, w), f(x, w)
        assert [out.requires_grad for out in got] == [True, True, False, False]
        assert got[1]._base is got[0]
        grads = [torch.autograd.grad(out[0].sum() + out[1].sum(), (x, w)) for out in (got, expected)]
        torch.testing.assert_close(*grads)
        torch.testing.assert_close(got, expected)


def test_parameters_that_require_no_grad():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    same(model, t(2, 3))


# Outputs


def test_non_differentiable_and_unused_outputs():
    same(lambda x: (x.sin(), x.argmax(), x > 0, x.detach() * 2, x.shape[0], None), t(3, 4, grad=True))
    x = t(3, grad=True)
    a, b = ahead(lambda x: (x.sin(), x.cos()))(x)
    b.sum().backward()
    torch.testing.assert_close(x.grad, -x.sin().detach())


def test_one_tensor_returned_twice():
    same(lambda x: (y := x * 2, y, [y]), t(3, grad=True))


def test_outputs_that_alias_inputs_and_each_other():
    def f(x, w):
        y = x * w
        return x, x.view(-1), y, y[0], y.t(), x.detach(), w.expand(2, 4)

    same(f, t(3, 4, grad=True), t(1, 4, grad=True))
    y, row = ahead(lambda x: (y := x * 2, y[0]))(t(3, 4, grad=True))
    row.mul_(3)
    assert y.grad_fn is not None and torch.equal(y[0], row)
    y.sum().backward()


def test_an_output_that_is_a_view_of_an_intermediate_can_be_written():
    x = t(3, 4, grad=True)
    out = ahead(lambda x: (x * 2).t())(x)
    out.mul_(3)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3, 4), 6.0))


def test_none_gradients():
    x, w, v = t(3, grad=True), t(3, grad=True), t(3, grad=True)
    out = ahead(lambda x, w, v: x * w.detach() + v.round() * 0)(x, w, v)
    out.sum().backward()
    assert w.grad is None and torch.equal(x.grad, w.detach()) and torch.equal(v.grad, torch.zeros(3))


# The backward pass


def test_hooks_retain_grad_and_non_leaf_inputs():
    seen = []

    def step(f):
        x = t(3, grad=True)
        h = x * 2
        h.retain_grad()
        h.register_hook(lambda g: seen.append(g.clone()))
        out = f(h)
        out.register_hook(lambda g: g * 2)
        out.retain_grad()
        out.sum().backward()
        return x.grad, h.grad, out.grad

    Same()(step(lambda h: h.exp()), step(ahead(lambda h: h.exp())))
    assert torch.equal(seen[0], seen[1])


def test_retain_graph_and_the_second_time():
    x = t(3, grad=True)
    out = ahead(lambda x: x.exp() * x)(x).sum()
    out.backward(retain_graph=True)
    first = x.grad.clone()
    out.backward()
    torch.testing.assert_close(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()
    out = ahead(lambda x: x * 2)(x).sum()  # saves nothing, as eager
    out.backward()
    out.backward()


@pytest.mark.parametrize("which", ["input", "output", "parameter"])
def test_writing_to_what_is_saved_raises_as_eager(which):
    def step(f):
        x, w = t(3, grad=True) * 1, t(3, grad=True)
        out = f(x, w)
        with torch.no_grad():
            {"input": x, "output": out, "parameter": w}[which].add_(1)
        out.sum().backward()

    for f in ((lambda x, w: (x * w).exp()), ahead(lambda x, w: (x * w).exp())):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(f)


def test_writing_to_what_eager_does_not_save_is_no_error():
    """Only what eager keeps for its backward may be kept: the program may write to everything else."""
    x, b = t(3, grad=True), t(3, grad=True)
    out = ahead(lambda x, b: (x + b).sin() + b)(x, b)
    with torch.no_grad():
        b.add_(1)
        out.add_(1)
    out.sum().backward()
    torch.testing.assert_close(x.grad, (x + b - 1).cos().detach())


def test_writing_to_a_result_that_the_backward_computes_once_more_is_no_error():
    """A quotient's derivative computes it again, of what eager keeps; the result itself is not kept."""
    x = t(3, grad=True)
    for f in (lambda x: x / x.sum(), ahead(lambda x: x / x.sum())):
        out = f(x)
        with torch.no_grad():
            out.add_(1)
        out.pow(2).sum().backward()
    first = x.grad.clone()
    out = x / x.sum()
    with torch.no_grad():
        out.add_(1)
    x.grad = None
    out.pow(2).sum().backward()
    torch.testing.assert_close(first, 2 * x.grad)


def test_saved_tensors_are_freed_and_the_step_leaves_nothing():
    x = t(64, grad=True)
    out = ahead(lambda x: x.exp().sin().exp())(x)
    node = out.grad_fn
    assert len(node.saved_tensors) > 0
    out.sum().backward()
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        node.saved_tensors
    y = t(3, grad=True) * 1
    gone = weakref.ref(y)
    out = ahead(lambda y: y.exp())(y)
    del y, out
    gc.collect()
    assert gone() is None


def test_saved_tensor_hooks_see_what_is_saved():
    packed = []
    x = t(3, grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda s: packed.append(s.shape) or s * 1, lambda s: s):
        out = ahead(lambda x: x.exp())(x)
    assert packed == [torch.Size([3])]
    out.sum().backward()
    torch.testing.assert_close(x.grad, x.exp().detach())


def test_gradient_accumulation():
    def steps(model, f):
        for i in range(3):
            f(t(2, 3) + i).pow(2).sum().backward()
        return [p.grad for p in model.parameters()]

    a = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    b = copy.deepcopy(a)
    Same()(steps(a, a), steps(b, ahead(b)))


def test_gradients_come_with_any_strides():
    x = t(3, 4, grad=True)
    f = ahead(lambda x: x.exp().view(-1))
    (g,) = torch.autograd.grad(f(x), x, torch.ones(1).expand(12))
    torch.testing.assert_close(g, x.exp().detach())
    (g,) = torch.autograd.grad(f(x), x, torch.ones(24)[::2])
    torch.testing.assert_close(g, x.exp().detach())


# Gradients of some results


def test_results_are_differentiated_one_by_one():
    """A backward pass from one result leaves alone what only the others need, and gives others no gradient."""

    def step(f):
        w, v, x = leaf(4, 4), leaf(4, 4, seed=1), leaf(3, 4, seed=2)
        fake, loss = f(x, w, v)
        loss.backward()
        assert w.grad is None and x.grad is None
        first = v.grad.clone()
        (fake * 2).sum().backward()
        return first, v.grad, w.grad, x.grad

    def f(x, w, v):
        fake = torch.tanh(x @ w)
        return fake, torch.sigmoid(fake.detach() @ v).sum()

    Same()(step(f), step(ahead(f)))
    fake, loss = ahead(f)(leaf(3, 4), leaf(4, 4), leaf(4, 4))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    fake.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        fake.sum().backward()


def test_what_results_share_is_freed_with_the_first():
    def f(x, w):
        hidden = torch.tanh(x @ w)
        return hidden.exp().sum(), hidden

    loss, hidden = ahead(f)(leaf(3, 4), leaf(4, 4))
    loss.backward(retain_graph=True)
    hidden.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_an_unused_result_costs_no_zeros():
    backward = []

    def keep(gm, inputs):
        backward.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        return gm.forward

    def f(x, w):
        hidden = x @ w
        return hidden.sin().sum(), hidden

    x, w = leaf(3, 4), leaf(4, 4)
    compiled = kiln.compile(f, backend=kiln.aot(lambda gm, inputs: gm.forward, keep), fullgraph=True)
    expected = torch.autograd.grad(f(x, w)[0], (x, w))
    Same()(expected, torch.autograd.grad(compiled(x, w)[0], (x, w)))
    loss, hidden = compiled(x, w)
    both = torch.autograd.grad((loss, hidden.sum()), (x, w))
    loss, hidden = f(x, w)
    Same()(torch.autograd.grad((loss, hidden.sum()), (x, w)), both)
    assert "aten.add.Tensor" not in backward[0] and "aten.zero.default" not in backward[0]
    assert "aten.add.Tensor" in backward[1]


def test_zeros_stand_in_where_results_are_joined():
    def f(x):
        a, b = x.exp().unbind(0)
        return a.sin(), b.cos()

    x = leaf(2, 3)
    Same()(torch.autograd.grad(f(x)[0].sum(), x), torch.autograd.grad(ahead(f)(x)[0].sum(), x))


# Second derivatives


def second(f, *args):
    out = f(*args)
    first = torch.autograd.grad(out.sum(), args, create_graph=True)
    return torch.autograd.grad(sum(g.pow(2).sum() for g in first), args)


def test_double_backward():
    def f(x, w):
        return torch.tanh(x @ w).pow(3)

    Same()(second(f, leaf(2, 3), leaf(3, 4)), second(ahead(f), leaf(2, 3), leaf(3, 4)))


def turned(x):
    y = x.sin().transpose_(0, 1)
    return y[0], y[1]


@pytest.mark.parametrize("f", [
    turned, lambda x: (turned(x)[0], x.cos().detach()), lambda x: ((y := x.sin()).detach(), y),
    lambda x: ((y := x.cos()).detach().view(-1), y[0], y[1]), lambda x: ((y := x.sin().unsqueeze_(0)), y.detach()),
])  # fmt: skip
def test_double_backward_of_results_that_share_memory(f):
    def second(g):
        x = torch.arange(12.0, dtype=torch.float64).view(2, 3, 2).requires_grad_()
        loss = sum(y.pow(2).sum() * (i + 1) for i, y in enumerate(g(x)) if y.requires_grad)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        first.pow(2).sum().backward()
        return first, x.grad

    for dynamic in (None, True):
        for mine, eager in zip(second(kiln.compile(f, dynamic=dynamic)), second(f), strict=True):
            torch.testing.assert_close(mine, eager)


def test_double_backward_with_inputs_that_depend_on_each_other():
    def penalty(f):
        x = leaf(3)
        y = x * x
        out = f(x, y)
        gx, gy = torch.autograd.grad(out.sum(), (x, y), create_graph=True)
        return torch.autograd.grad((gx * gy).sum(), x)

    Same()(penalty(lambda x, y: x.sin() * y.exp()), penalty(ahead(lambda x, y: x.sin() * y.exp())))

@pytest.mark.parametrize(("second", "runs"), [((1, 1, 1, 1), 2), ((0, 0, 0, 1, 0, 1), 6)])
def test_graphs_whose_gradients_are_differentiated_in_most_calls_run_as_captured(second, runs):
    ran = []

    def counted(module, examples):
        def run(*args):
            ran.append(True)
            return module(*args)

        return run

    compiled = kiln.compile(lambda x: x.sin() * x, backend=kiln.aot(counted))
    for i, twice in enumerate(second):
        x, y = (torch.linspace(0, i + 1, 3, requires_grad=True) for _ in range(2))
        for out, given in ((compiled(x), x), (y.sin() * y, y)):
            (grad,) = torch.autograd.grad(out.sum(), given, create_graph=bool(twice))
            (grad.square().sum() if twice else (given * grad).sum()).backward()
        torch.testing.assert_close(x.grad, y.grad)
    assert len(ran) == runs + second.count(0)  # forwards, and backwards that are not differentiated



def test_double_backward_with_dropout_and_batch_norm():
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))

    def penalty(model, f):
        torch.manual_seed(3)
        x = leaf(5, 3)
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        g.pow(2).sum().backward()
        return x.grad, [p.grad for p in model.parameters()], list(model.buffers()), torch.rand(1)

    other = copy.deepcopy(model)
    Same()(penalty(model, model), penalty(other, ahead(other)))


def test_double_backward_through_a_written_input_is_refused():
    def f(x):
        x.mul_(2)
        return x.sin()

    x = t(3, grad=True)
    out = ahead(f)(x * 1)
    with pytest.raises(RuntimeError, match=r"writes to its inputs \(x\)"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_hooks_on_results_without_gradients_are_not_called():
    f = ahead(lambda x: (x.sin(), x.cos()))
    for both in (False, True):
        x, seen = t(3, grad=True), []
        a, b = f(x)
        b.register_hook(seen.append)
        handle = b.register_hook(lambda grad, seen=seen: seen.append("removed"))
        b.register_hook(lambda grad: grad * 2)
        handle.remove()
        (a.sum() + b.sum() if both else a.sum()).backward()
        torch.testing.assert_close(x.grad, x.cos() - 2 * both * x.sin())
        assert len(seen) == both and all(torch.equal(grad, torch.ones(3)) for grad in seen)


# Mutation


def test_mutated_inputs():
    def f(x, y):
        x.add_(1)
        x[0].mul_(2)
        return x * y, x.sum()

    same(f, t(3, 4), t(3, 4, grad=True))


def test_mutated_input_with_a_history():
    def step(f):
        w, base = t(3, grad=True), t(3, grad=True)
        x = base * 1
        version = x._version
        out = f(x, w)
        (out.sum() + x.sum()).backward()
        return x, w.grad, base.grad, x._version - version

    def f(x, w):
        x.mul_(w)
        return x.sin()

    Same()(step(f), step(ahead(f)))


@pytest.mark.parametrize("grad", (False, True))
def test_versions_count_every_write(grad):
    def step(f):
        base = t(3, 4, grad=grad)
        x, y = base * 1, t(4)
        before = x._version, y._version
        f(x, y)
        return x, y, x._version - before[0], y._version - before[1]

    def f(x, y):
        x.mul_(2)
        x[0].add_(y)
        y.data.zero_()

    Same()(step(f), step(ahead(f)))


def test_a_rank_is_written_where_it_is_wanted():
    def f(x, out):
        return torch.linalg.matrix_rank(x, out=out) + out

    def step(f):
        out = torch.full((), 7)
        return f(torch.eye(3), out), out

    Same()(step(f), step(ahead(f)))


@pytest.mark.parametrize("read", (lambda y: y > 0, lambda y: y.detach() * 2))
def test_no_backward_pass_goes_behind_what_no_gradient_flows_to(read):
    def step(f):
        x, w = t(3, 4, grad=True), t(3, 4, grad=True)
        y = x.exp()
        y.sum().backward()  # what was computed behind y is freed
        out, seen = f(y, w)
        (first,) = torch.autograd.grad(out.sum(), w, create_graph=True)
        first.sum().backward()
        return out, seen, first, w.grad, x.grad

    def f(y, w):
        return w * w * 2, read(y)

    Same()(step(f), step(ahead(f)))


@pytest.mark.parametrize("make", (lambda x: x, lambda x: x * 2))
def test_what_is_taken_through_data_counts_for_itself(make):
    def step(f):
        x = t(3, 4, grad=True)
        base, *others = f(x)
        loss = base.sin().sum()
        counts = []
        for other in others:
            other.add_(1)
            counts.append((base._version, other._version))
        loss.backward()
        return base, x.grad, others, counts

    def f(x):
        base = make(x)
        return base, base.data, base.data.t(), base.data[0]

    Same()(step(f), step(ahead(f)))


@pytest.mark.parametrize("take", (lambda x: x.unbind()[0], lambda x: x.chunk(2)[1][0], lambda x: x[0]))
def test_one_of_several_views_refuses_writes(take):
    def step(f):
        x = t(3, 4, grad=True)
        out = f(x)
        out.sum().backward()
        try:
            out.add_(1)
        except RuntimeError as error:
            return out, x.grad, str(error)
        return out, x.grad

    Same()(step(lambda x: take(x * 2)), step(ahead(lambda x: take(x * 2))))


def test_a_mutated_input_gets_a_history():
    def step(f):
        x, w = t(3), t(3, grad=True)
        f(x, w)
        x.sum().backward()
        return x, w.grad

    Same()(step(lambda x, w: x.mul_(w)), step(ahead(lambda x, w: x.mul_(w))))


def test_batch_norm_statistics():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    same(model, t(2, 3, 6, 6, grad=True))
    model.eval()
    same(model, t(2, 3, 6, 6, grad=True))


def test_mutation_under_no_grad_of_a_parameter():
    w = nn.Parameter(torch.ones(3))
    before = w._version

    @ahead
    def f(x):
        with torch.no_grad():
            w.mul_(2)
        return x * 2

    f(t(3))
    f(t(3))
    assert torch.equal(w, torch.full((3,), 4.0)) and w._version == before + 2 and w.is_leaf


def test_arguments_that_overlap_in_one_call_only():
    def f(a, b):
        a.add_(1)
        return b * 2

    c = kiln.compile(f, backend="aot_eager")
    base = torch.arange(8.0)
    assert torch.equal(c(base[:4], base[4:]), torch.arange(4.0, 8) * 2)
    assert torch.equal(c(base[:4], base[2:6]), torch.tensor([4.0, 5, 4, 5]) * 2)


# Random numbers, autocast, regions


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_dropout_is_eagers_and_consistent(budget):
    def f(x, w):
        return torch.nn.functional.dropout(torch.nn.functional.dropout(x @ w, 0.5).relu(), 0.3).sin()

    def step(f):
        x, w = leaf(16, 8), leaf(8, 8, seed=1)
        torch.manual_seed(5)
        out = f(x, w)
        after = torch.rand(1)
        out.sum().backward()
        return out, after, x.grad, w.grad

    compiled = ahead(f, options={"memory_budget": budget})
    for _ in range(2):
        Same()(step(f), step(compiled))


@pytest.mark.parametrize("backend", ["aot_eager", "kiln"])
def test_what_nobody_reads_is_drawn(backend):
    def f(x, w):
        y = torch.nn.functional.dropout(x, 0.1) @ w
        torch.nn.functional.dropout(y.relu(), 0.3)  # its mask does not follow from `y`, and `y`'s is drawn
        torch.empty_like(torch.rand_like(x).log()).exponential_()
        return torch.nn.functional.dropout(x, 0.5)

    def step(f):
        x, w = leaf(16, 8), leaf(8, 8, seed=1)
        torch.manual_seed(5)
        return f(x, w), torch.rand(1)

    compiled = kiln.compile(f, backend=backend, fullgraph=True)
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            Same()(step(f), step(compiled))


def test_a_mask_chooses_what_is_written():
    def f(x, mask, values):
        out = x.sin()
        out[1][mask[1]] = values[:5]
        return out, x.index_put((mask,), values)

    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[:, 1:6] = True
    same(f, t(3, 8), mask, t(15))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    def f(x, w, v):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            h = x @ w
        return (h.float() @ v).sin()

    def step(f):
        args = leaf(4, 8), leaf(8, 8, seed=1), leaf(8, 2, seed=2)
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            out = f(*args)
        out.float().sum().backward()
        return out, [a.grad for a in args]

    Same()(step(f), step(ahead(f)))


def test_checkpoint_saves_only_the_regions_inputs():
    def block(x, w):
        return x + torch.tanh(x @ w) @ w

    def f(x, w):
        for _ in range(3):
            x = checkpoint(block, x, w, use_reentrant=False)
        return x.sum()

    def step(f):
        x, w = leaf(16, 16), leaf(16, 16, seed=1)
        out = f(x, w)
        count = sum(s.numel() == 256 for s in getattr(out.grad_fn, "saved_tensors", ()))
        out.backward()
        return (out, x.grad, w.grad), count

    expected, _ = step(f)
    got, saved = step(ahead(f))
    Same()(expected, got)
    assert saved == 4  # x, w and what each of the first two blocks gives
    plain, kept = step(ahead(lambda x, w: block(block(block(x, w), w), w).sum()))
    assert kept > saved


def test_checkpoint_with_dropout():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    same(nn.Sequential(Block(), Block()), t(4, 8, grad=True))


def test_threads():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    compiled = ahead(model)
    expected = {}
    for i in range(4):
        x = leaf(4, 8, seed=i)
        expected[i] = torch.autograd.grad(model(x).sum(), x)[0]
    wrong = []

    def work(i):
        for _ in range(10):
            x = leaf(4, 8, seed=i)
            (g,) = torch.autograd.grad(compiled(x).sum(), x)
            if not torch.equal(g, expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Shapes and numbers that vary


def test_sizes_that_vary():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4))
    compiled = ahead(model)

    def step(f, n):
        model.zero_grad()
        x = leaf(n, 3, 8)
        torch.manual_seed(n)
        out = f(x)
        out.pow(2).mean().backward()
        return out, x.grad, [p.grad.clone() for p in model.parameters()]

    with records.collect() as log:
        for n in (2, 3, 5, 8, 13):
            Same()(step(model, n), step(compiled, n))
    assert len(log.graphs) == 2


def test_outputs_and_second_derivatives_of_varying_sizes():
    def f(x, scale):
        return (x.view(x.shape[0] * 2, -1) * scale).sin(), x.shape[0] * 3, x[: x.shape[0] // 2]

    def step(f, n):
        x = leaf(n, 4)
        y, count, part = f(x, n * 0.5)
        (first,) = torch.autograd.grad(y.sum() + part.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        return y, count, part, first, second

    compiled = ahead(f)
    with records.collect() as log:
        for n in (4, 6, 8, 10):
            Same()(step(f, n), step(compiled, n))
    assert len(log.graphs) <= 3


def taken(x):
    return x.t()


def taken_without_gradients(x):
    with torch.no_grad():
        return x.t()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("take", [taken, taken_without_gradients], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "make", [lambda x: x * 1, torch.ones_like, lambda x: torch.rand(2, 2), lambda x: (x * 2).detach(), lambda x: x]
)
def test_a_view_that_comes_out_is_one_of_its_base_to_autograd(make, take, mode):
    def f(x):
        base = make(x)
        return base, take(base)

    def seen(f):
        given, weight = torch.ones(2, 2), torch.full((2, 2), 2.0, requires_grad=True)
        torch.manual_seed(0)
        with mode():
            base, view = f(given)
        facts = [base._is_view(), view._base is base, view.data_ptr() == base.data_ptr()]
        try:
            view.add_(weight)  # a view that was taken without grad mode refuses it
            (base * 2).sum().backward()
        except RuntimeError as error:
            return [*facts, str(error)[:30]]
        return [*facts, weight.grad.tolist(), view.requires_grad]

    assert seen(ahead(f)) == seen(f)


@pytest.mark.parametrize("f", [
    lambda x: x.unbind(),
    lambda x: (x * 2).chunk(2),
    lambda x: (*(y := x + 1).split(3), y),
    lambda x: (x.view(-1).split(5)[1], x.t().unbind()[0], *x.unbind()[2:4]),
], ids=["rows", "halves of a result", "parts and the whole", "several"])  # fmt: skip
@pytest.mark.parametrize("grad", [False, True])
def test_views_that_come_together_are_taken_once(f, grad):
    x = torch.randn(8, 8, requires_grad=grad)
    y = x.detach().clone().requires_grad_(grad)
    expected, got = f(x), kiln.compile(f, fullgraph=True)(y)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a._is_view() == b._is_view()
    if grad:
        nodes = [[id(t.grad_fn) for t in views[-2:]] for views in (expected, got)]
        assert len(set(nodes[0])) == len(set(nodes[1]))
        gradients = [torch.autograd.grad(sum((t * (i + 1)).sum() for i, t in enumerate(views)), leaf)[0]
                     for views, leaf in ((expected, x), (got, y))]  # fmt: skip
        torch.testing.assert_close(*gradients)
