"""`kiln.aot`: backends made of functions that take fx graphs, and what happens where a graph cannot be differentiated."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import kiln
from kiln.base import records
from kiln.base.options import UnknownOption
from kiln.differentiate.partition import split_at
from tests.same import Same
from tests.support import t


class Keeping:
    """A compiler that keeps the graphs it gets."""

    def __init__(self):
        self.graphs, self.examples = [], []

    def __call__(self, gm, examples):
        gm.graph.lint()
        self.graphs.append(gm)
        self.examples.append(examples)
        return gm.forward


def targets(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def gradients(f, model, x):
    model.zero_grad()
    out = f(x)
    out.sum().backward()
    return out, [p.grad for p in model.parameters()]


def test_the_documented_example_runs():
    text = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(program, "backends.md", "exec"), {})


def test_forward_backward_and_inference_go_to_their_compilers():
    forward, backward, inference = Keeping(), Keeping(), Keeping()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    f = kiln.compile(model, backend=kiln.aot(forward, backward, inference_compiler=inference), fullgraph=True)
    expected = gradients(model, model, t(2, 3))
    f(t(2, 3))
    assert (len(forward.graphs), len(backward.graphs)) == (1, 0)  # the backward waits for its first run
    Same()(expected, gradients(f, model, t(2, 3)))
    with torch.no_grad():
        f(t(2, 3))
    assert [len(k.graphs) for k in (forward, backward, inference)] == [1, 1, 1]
    assert "aten.tanh_backward.default" in targets(backward.graphs[0])
    assert len(inference.graphs[0].graph.output_node().args[0]) == 1


def test_graphs_are_typed_and_examples_are_fake():
    forward = Keeping()
    kiln.compile(lambda x, w: (x @ w).relu(), backend=kiln.aot(forward))(t(2, 3), t(3, 4, grad=True))
    (gm,), (examples,) = forward.graphs, forward.examples
    assert [tuple(e.shape) for e in examples] == [(2, 3), (3, 4)]
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta["val"], torch.Tensor) and "test_aot" in node.meta["stack_trace"]


def test_a_boxed_callable_gets_a_list():
    lengths = []

    def compiler(gm, examples):
        def run(values):
            lengths.append(len(values))
            args = list(values)
            values.clear()
            return gm.forward(*args)

        run._boxed_call = True
        return run

    x = t(3, grad=True)
    kiln.compile(lambda x: x.exp(), backend=kiln.aot(compiler))(x).sum().backward()
    assert lengths == [1, 2] and torch.equal(x.grad, x.exp().detach())


@pytest.mark.parametrize("level", ["aten", "core", "prims"])
def test_levels(level):
    forward, backward = Keeping(), Keeping()
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Mish(), nn.Linear(8, 3), nn.LogSoftmax(-1))
    f = kiln.compile(model, backend=kiln.aot(forward, backward, level=level), fullgraph=True)
    (a, expected), (b, got) = (gradients(g, model, t(2, 4)) for g in (model, f))
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(expected, got)
    used = {*targets(forward.graphs[0]), *targets(backward.graphs[0])}
    assert ("aten.mish.default" in used) == (level == "aten")
    assert ("aten._log_softmax.default" in used) == (level != "prims")


def test_a_partition_of_ones_own():
    forward = Keeping()

    def everything_again(joint):
        return split_at(joint, joint.graph.inputs[: len(joint.primals)])

    x, w = t(2, 3, grad=True), t(3, 3, grad=True)
    f = kiln.compile(lambda x, w: (x @ w).exp().sin(), backend=kiln.aot(forward, partition=everything_again))
    Same()(torch.autograd.grad((x @ w).exp().sin().sum(), (x, w)), torch.autograd.grad(f(x, w).sum(), (x, w)))
    assert len(forward.graphs[0].graph.output_node().args[0]) == 3


def test_the_memory_budget_is_an_option():
    def f(x, w):
        return torch.tanh(torch.tanh(x @ w) @ w)

    def saved(**options):
        out = kiln.compile(f, backend="aot_eager", **options)(t(4, 4, grad=True), t(4, 4, grad=True))
        return len(out.grad_fn.saved_tensors)

    assert saved() == 4 and saved(options={"memory_budget": 0.0}) == 3  # the result is kept by whoever asked for it
    with kiln.config.patch(memory_budget=0.0):
        assert saved() == 3


def test_wrong_arguments():
    with pytest.raises(UnknownOption, match="unknown level 'atn': did you mean 'aten'"):
        kiln.aot(Keeping(), level="atn")
    with pytest.raises(TypeError, match="a compiler is a callable"):
        kiln.aot(3)


def test_errors_of_a_compiler_are_the_users_to_see():
    def refuses(gm, examples):
        raise ArithmeticError("not today")

    with pytest.raises(ArithmeticError, match="not today"):
        kiln.compile(lambda x: x + 1, backend=kiln.aot(refuses))(t(3))
    out = kiln.compile(lambda x: x.exp(), backend=kiln.aot(Keeping(), refuses))(t(3, grad=True))
    with pytest.raises(ArithmeticError, match="not today"):
        out.sum().backward()


def test_a_graph_that_cannot_be_differentiated_runs_as_captured():
    def f(a, b):
        a.add_(1)
        return b * 2

    base = torch.arange(6.0)
    with records.collect() as log:
        out = kiln.compile(f, backend="aot_eager")(base[:4], base[2:].requires_grad_())
    assert torch.equal(out, torch.tensor([3.0, 4, 4, 5]) * 2)
    assert len(log.fallbacks) == 1 and "overlap" in str(log.fallbacks[0])


def block(x, w):
    with torch.inference_mode():
        return (x @ w).relu(), x[1:]


def block_of_no_mode(x, w):
    with torch.inference_mode(False):
        return x @ w * 2


def blocks_within(x, w):
    y = x @ w
    with torch.no_grad():
        before = y * 2
        with torch.inference_mode():
            a, view = y + 1, y[0]
            with torch.inference_mode(False), torch.enable_grad():
                b = x * 4
            a.mul_(torch.rand(3))
        after = y * 3
    return a, b, view, before, after, y * 5, torch.is_grad_enabled()


def block_whose_results_are_needed(x, w):
    y = x @ w
    with torch.inference_mode():
        factor = x.exp()
    return y * factor


def outcome(run, grad, inside):
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 9).reshape(3, 3)
    x, w = x.clone().requires_grad_(grad), (x * 2).requires_grad_(grad)
    with torch.inference_mode(inside):
        try:
            made = run(x, w)
        except RuntimeError as error:
            return (str(error),)
    tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
    facts = [(t.is_inference(), t.requires_grad, t.stride(), t._is_view()) for t in tensors]
    needing = [t.sum() for t in tensors if t.requires_grad]
    if needing:
        sum(needing).backward()
    return facts, [t.detach() for t in tensors], x.detach(), x.grad, w.grad


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("f", [block, block_of_no_mode, blocks_within, block_whose_results_are_needed])
def test_blocks_of_inference_mode_are_compiled(f, grad, inside):
    expected = outcome(f, grad, inside)
    for backend in ("aot_eager", "kiln"):
        compiled = kiln.compile(f, fullgraph=True, backend=backend)
        with records.collect() as log:
            for _ in range(2):
                found = outcome(compiled, grad, inside)
                assert found[0] == expected[0]
                torch.testing.assert_close(found[1:], expected[1:])
        assert (len(log.graphs), log.fallbacks) == (1, [])


def test_a_frame_sees_what_was_written_before_a_block_raised():
    def f(x, i, log):
        try:
            x.add_(1)
            with torch.inference_mode():
                return (x * 2)[i]
        except IndexError:
            log.append("seen")
            return x * 3

    compiled = kiln.compile(f, fullgraph=True)
    x, y, seen = torch.ones(3), torch.ones(3), []
    for i in (1, 5):
        i = torch.tensor([i])
        assert torch.equal(compiled(x, i, seen), f(y, i, [])) and torch.equal(x, y)
    assert seen == ["seen"]


def test_handlers_and_effects_of_a_frame_whose_graph_runs_as_captured():
    def f(x, y, log):
        log.append("written")
        x.add_(1)
        made = torch.zeros(2, requires_grad=True)
        try:
            root = torch.linalg.cholesky(y)
        except RuntimeError:
            root = y
            log.append("handled")
        return root, made, made * 2

    compiled = kiln.compile(f, fullgraph=True)
    with records.collect() as found:
        for y in (torch.eye(2), -torch.eye(2)):
            told = []
            for run in (f, compiled):
                x, log = torch.zeros(2), []
                told.append((run(x, y, log), x, log))
            Same()(*told)
    assert len(found.graphs) == 1 and [r.error.split(":")[0] for r in found.fallbacks] == ["inner-leaf"]


def test_an_argument_that_is_written_and_partly_read_is_refused_as_in_eager():
    def f(a, b):
        a.add_(b)

    base = torch.arange(6.0)
    raised = []
    with records.collect() as log:
        for run in (f, kiln.compile(f)):
            with pytest.raises(RuntimeError) as error:
                run(base[:4], base[2:])
            raised.append(str(error.value))
    assert raised[0] == raised[1] and torch.equal(base, torch.arange(6.0))
    assert len(log.graphs) == 1 and [r.error.split(":")[0] for r in log.fallbacks] == ["overlapping-inputs"]


@pytest.mark.parametrize("scatter", [
    lambda x: torch.slice_scatter(x, x[:1], 0, 0, 1), lambda x: torch.select_scatter(x, x[0], 0, 0),
    lambda x: torch.diagonal_scatter(x, x[0]),
])  # fmt: skip
def test_a_write_by_strides_to_what_starts_late_in_its_memory(scatter):
    """The gradient has no such start: its zeros were elsewhere than the diagonal."""

    def f(x):
        y = scatter(x)
        y.fill_diagonal_(1)
        return y

    told = []
    for run in (f, kiln.compile(f)):
        x = torch.arange(23.0)[3:].view(5, 4).detach().requires_grad_()
        out = run(x)
        told.append((out.detach(), torch.autograd.grad(out, x, torch.ones_like(out))))
    torch.testing.assert_close(*told)


class Given(torch.autograd.Function):
    """Gives its first argument back, with derivatives of its own."""

    @staticmethod
    def forward(ctx, a, b):
        return a

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, grad * 3


@pytest.mark.parametrize("of_an_input", [True, False])
def test_a_custom_function_that_gives_its_argument_back_has_its_own_derivative(of_an_input):
    def f(a, b):
        a = a if of_an_input else a.sin()
        return Given.apply(a, b).view(-1), a

    found = []
    for run in (f, kiln.compile(f, backend="aot_eager")):
        a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        with records.collect() as seen:
            out, _ = run(a * 1, b)
        out.sum().backward()
        found.append((out, a.grad, b.grad))
    torch.testing.assert_close(*found)
    assert [r.error.partition(":")[0] for r in seen.fallbacks] == ["output-view"]
