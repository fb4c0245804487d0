"""The joint graph of forward and backward gives eager's results, gradients and autograd state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kiln
from kiln.base.errors import Break
from kiln.base.graph import label
from kiln.differentiate import clean
from kiln.differentiate.joint import Attribute, Constant, Fresh, Joint, Placeholder, View
from kiln.differentiate.trace import trace
from tests.differentiate.joined import check, check_graph, compare

pytestmark = pytest.mark.filterwarnings("ignore:.*mkldnn.*", "ignore:.*enable_nested_tensor.*")
CASES: list[Any] = []


@pytest.fixture(autouse=True)
def grad_mode() -> Any:
    """Programs may leave grad mode switched."""
    yield
    torch.set_grad_enabled(True)


def n(*shape: int, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


def x(*shape: int) -> torch.Tensor:
    return n(*shape, grad=True)


def program(*args: Any) -> Any:
    """Declare a program that is compared with eager on these arguments."""

    def declare(function: Any) -> Any:
        CASES.append(pytest.param(function, args, id=function.__name__))
        return function

    return declare


def ops(joint: Joint, backward: bool = False) -> list[str]:
    """The names of what one half calls."""
    names = [label(node.op) for node in joint.graph.nodes if node.backward == backward]
    return [name for name in names if name not in ("getitem", "constant")]


# ------------------------------------------------------------------------------------------- autograd


@program(x(3, 4), x(4, 4))
def arithmetic(x, w):
    return ((x @ w) * 2 + torch.tensor([1.0, 2.0, 3.0, 4.0])).relu().sum()


@program(x(3, 4), torch.tensor(0.5, requires_grad=True))
def complex_factors(x, y):
    turned = torch.exp(1j * x) * (2 - 1j)
    return turned.real, (turned / (x + 1j)).abs(), (y * 2j).imag


@program(n(3, 4), x(3, 4))
def written_with_grad(b, x):
    b.add_(x)
    return b * 2


@program(n(3, 4), x(3, 4))
def written_without_grad(b, x):
    with torch.no_grad():
        b.add_(x)
    return b * x


@program(x(3, 4) * 2)
def written_input_that_was_computed(x):
    x.mul_(2)
    return x.sum()


@program(x(3, 4) * 2)
def view_of_an_input_that_was_computed(x):
    x[0].mul_(2)
    return x, x[1] * x[0]


@program(x(3, 4))
def one_object_twice(x):
    y = x + 1
    return y, y, y.detach(), x


@program(x(3, 4))
def views_of_one_tensor(x):
    y = x * 2
    y[0].mul_(3)
    a, b = (x * 2).split(2, 1)
    z = x.sin()
    return y, y[1], x.view(-1), a, b, z.view(-1), z.view(-1), z.view(2, 6)


@program(x(3, 4))
def views_without_grad(x):
    y, z = x * 1, x * 2
    with torch.no_grad():
        v, w = y[0], z[0]
    return y, v, w


@program(x(3, 4))
def modes_inside(x):
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * 3
    return y, z, z * y


@program(x(3, 4))
def mode_left_switched(x):
    y = x * 2
    torch._C._set_grad_enabled(False)
    return y


@program(n(3, 4))
def inference_inside(x):
    with torch.inference_mode():
        y = x * 2
    return y + 1


@program(x(3, 4), x(3, 4))
def unused_and_integer(x, y):
    return x.sum(), y.detach() * 2, x.argmax(1), x.max(1), x > 0, x.topk(2)


@program(x(3, 4))
def casts(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
    return y, x.double().sum()


@program(n(3, 4))
def generators(x):
    g = torch.Generator()
    g.manual_seed(3)
    return torch.randn(3, generator=g) + torch.rand(3), x.bernoulli(p=0.5), torch.randperm(5)


@program(n(3, 4))
def literals(x):
    return torch.tensor([x[0, 0], 2.0, x.sum()]), torch.as_tensor(2.0) * x, torch.arange(4) + x, x.new_zeros(4)


@program(x(3, 4))
def an_update(p):
    with torch.no_grad():
        m = torch.zeros_like(p)
        m.lerp_(p, 0.1)
        m.addcmul_(p, p, value=2.0)
        p.addcdiv_(m, m.abs().sqrt().add_(1e-3), value=-m.sum())
        p.data.mul_(0.9)
    return m


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 5


class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        positive = x > 0
        ctx.k = k
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(positive)
        ctx.save_for_backward(positive)
        return x * k, positive, x.view_as(x)

    @staticmethod
    def backward(ctx, scaled, positive, viewed):
        (positive,) = ctx.saved_tensors
        total = 0
        if scaled is not None:
            total = scaled * ctx.k * positive
        return total + viewed if viewed is not None else total, None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@program(x(3, 4))
def custom_functions(x):
    a, positive, view = Several.apply(x, 3.0)
    b, _, _ = Several.apply(x, 2.0)
    return Exponential.apply(x) * 2, a.sum(), positive, view * 2, b.sum(), Doubled.apply(x * 1)


@torch.library.custom_op("kiln_test::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


square.register_fake(torch.empty_like)
square.register_autograd(
    lambda ctx, grad: grad * 2 * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@program(x(3, 4))
def custom_ops(x):
    return square(x).sin()


@program(x(3, 4), x(4, 4))
def checkpointed(x, w):
    return checkpoint(lambda a: (a @ w).relu().sin(), x, use_reentrant=False).sum()


@program(x(4, 8), torch.tensor([1, 0, 3, 2]))
def losses(x, t):
    zeros = torch.zeros_like(x)
    return F.cross_entropy(x, t), F.nll_loss(F.log_softmax(x, 1), t), F.smooth_l1_loss(x, zeros), F.mse_loss(x, zeros)


@program(x(1, 2, 5, 8), x(1, 2, 5, 8), x(1, 2, 5, 8))
def attention(q, k, v):
    mask = torch.ones(5, 5).tril() > 0
    return F.scaled_dot_product_attention(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, mask)


@program(x(3, 3), x(8))
def libraries(x, y):
    return torch.linalg.inv(x), torch.linalg.det(x), torch.fft.rfft(y).abs()


@program(n(4, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_(), x(5, 3, 3, 3))
def channels_last(x, w):
    return F.max_pool2d(F.relu(F.conv2d(x, w), inplace=True), 2)


@pytest.mark.parametrize(("function", "args"), CASES)
def test_as_eager(function, args):
    check(function, *args)


# -------------------------------------------------------------------------------------------- modules

MODULES = {
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), (x(2, 3, 6, 6),)),
    "LSTM": (lambda: nn.LSTM(4, 5, 2), (x(3, 2, 4),)),
    "GRU": (lambda: nn.GRU(4, 5, 2, bidirectional=True), (x(3, 2, 4),)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (x(3, 5, 8),)),
    "attention": (lambda: nn.MultiheadAttention(8, 2), (x(3, 5, 8), x(3, 5, 8), x(3, 5, 8))),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    make, args = MODULES[name]
    torch.manual_seed(0)
    check(make(), *args)


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"momentum": 0.9}), ("Adam", {"foreach": True}), ("Adam", {"foreach": False}), ("AdamW", {"fused": True}),
     ("AdamW", {"capturable": True}), ("RMSprop", {}), ("NAdam", {})],
)  # fmt: skip
def test_optimizers(name, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    joints: list[Joint] = []

    def backend(module: Any, examples: Any) -> Any:
        joints.append(check_graph(module, examples))
        return module.forward

    step = kiln.compile(optimizer.step, backend=backend)
    for _ in range(2):
        model(n(5, 3)).sum().backward()
        step()
    assert len(joints) == 2 and all(len(j.mutated) >= 4 and not j.differentiates for j in joints)


# ------------------------------------------------------------------------------------------ structure


def test_halves_are_those_of_eager():
    joint = check(lambda x, w: (x @ w).relu().sum(), x(3, 4), x(4, 4))
    assert ops(joint) == ["mm", "relu", "sum"]
    assert ops(joint, backward=True) == ["expand", "threshold_backward", "t", "mm", "t", "mm"]
    assert joint.differentiates and joint.results == 1 and len(joint.gradients()) == 2


def test_without_a_gradient_there_is_one_half():
    joint = check(lambda x: x * 2, n(3))
    with torch.no_grad():
        other = check(lambda x: x * 2, x(3))
    assert not joint.differentiates and not other.differentiates
    assert joint.gradients() == other.gradients() == ()


def test_gradients_that_do_not_exist_are_none():
    joint = check_graph(
        torch.fx.symbolic_trace(lambda a, b, c: a * b.detach() + c.long()), [x(3), x(3), x(3)]
    )
    assert [g is not None for g in joint.gradients()] == [True, False, False]


def test_primals_say_where_they_come_from():
    linear = nn.Linear(4, 4)
    joint = check(linear, n(3, 4))
    assert joint.primals[0].origin == Placeholder(0) and not joint.primals[0].requires_grad
    names = [p.origin.name for p in joint.primals[1:] if isinstance(p.origin, Attribute)]
    assert names == ["self_weight", "self_bias"]
    assert all(p.requires_grad and p.leaf for p in joint.primals[1:])


def test_called_modules_lend_their_tensors():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    joint = check_graph(torch.fx.symbolic_trace(model), [x(3, 4)])
    assert [p.origin.name for p in joint.primals[1:3]] == ["0.weight", "0.bias"]
    assert len(joint.mutated) == 3
    assert type(model[0].weight) is nn.Parameter


def test_outputs_keep_their_nest():
    def f(x):
        return {"a": [x * 2, 3], "b": (None, x.view(-1))}

    joint = check_graph(torch.fx.symbolic_trace(lambda x: tuple(f(x)["a"]) + f(x)["b"]), [x(3)])
    assert joint.nest == (0, 1, 2, 3)
    assert [type(out) for out in joint.outputs] == [Fresh, Constant, Constant, View]


def test_a_custom_op_is_one_node():
    assert ops(check(custom_ops, x(3, 4))) == ["square", "sin"]


def test_nodes_know_their_line_and_region():
    joint = check(checkpointed, x(3, 4), x(4, 4))
    nodes = {label(node.op): node for node in joint.graph.nodes if not node.backward}
    assert "test_trace.py" in nodes["relu"].where and "checkpointed" in nodes["relu"].where
    assert nodes["relu"].region is not None and nodes["sum"].region is None


def test_state_left_switched_is_an_effect():
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    doubled = graph.call_function(torch.add, (given, given))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output((doubled,))
    joint = check_graph(torch.fx.GraphModule({}, graph), [x(3)])
    assert joint.effects == ((torch._C._set_grad_enabled, (False,)),)
    assert joint.differentiates and torch.is_grad_enabled()


def test_sizes_may_be_symbols():
    def f(x, w, k):
        y = (x @ w).view(-1, 2, x.size(1) // 2).transpose(0, 1).clone()
        y[0].mul_(2)
        y[:, :1].add_(k)
        z = y.transpose(0, 1).reshape(x.size(0), -1)
        return F.dropout(F.gelu(z), 0.1).sum(), z[1:]

    joints: list[Joint] = []

    def backend(module: Any, examples: Any) -> Any:
        joints.append(check_graph(module, examples))

        def call(*args: Any) -> Any:
            compare(joints[0], module, list(args))
            return module.forward(*args)

        return call

    backend.reads_graph = True  # it traces for sizes that vary
    compiled = kiln.compile(f, backend=backend, fullgraph=True, dynamic=True)
    compiled(x(5, 6), n(6, 6), 3)
    compiled(x(7, 10), n(10, 10), 4)
    assert len(joints) == 1


def test_a_second_derivative_that_autograd_refuses_is_a_break():
    def f(x):
        y = x.sin()
        z = y.exp()
        y.zero_()
        z.mul_(2)
        return z

    with pytest.raises(Break, match="modified by an inplace operation"):
        trace(torch.fx.symbolic_trace(f), [x(3)])


def test_a_leaf_made_inside_is_a_break():
    def f(x):
        return x.detach().requires_grad_()

    with pytest.raises(Break, match="requires grad without computing it"):
        trace(torch.fx.symbolic_trace(f), [x(3) * 2])


class Sine:
    """A hook."""

    def __call__(self, grad):
        return grad.sin()


def refused_graph(kind):
    """A graph that does what is refused as `kind`."""
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    doubled = graph.call_function(torch.mul, (given, 2))
    if kind == "requires-grad":
        graph.call_method("requires_grad_", (given, False))
    elif kind == "retain-grad":
        graph.call_method("retain_grad", (doubled,))
    elif kind == "tensor-hook":
        graph.call_method("register_hook", (given, graph.get_attr("hook")))
    else:
        leaf = graph.call_method("requires_grad_", (graph.call_method("detach", (given,)),))
        doubled = graph.call_function(torch.mul, (leaf, 2))
    graph.output((doubled,))
    return torch.fx.GraphModule({"hook": Sine()}, graph)


@pytest.mark.parametrize("kind", ["requires-grad", "retain-grad", "tensor-hook", "inner-leaf"])
def test_changes_of_autograd_state_are_breaks(kind):
    with pytest.raises(Break) as caught:
        trace(refused_graph(kind), [n(3, grad=kind != "inner-leaf")])
    assert caught.value.kind == kind


def test_a_hook_on_an_intermediate_is_part_of_the_backward():
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    doubled = graph.call_function(torch.mul, (given, 2))
    graph.call_method("register_hook", (doubled, graph.get_attr("hook")))
    graph.output((graph.call_function(torch.exp, (doubled,)), doubled))
    joint = check_graph(torch.fx.GraphModule({"hook": Sine()}, graph), [x(3)])
    assert ops(joint, backward=True) == ["mul", "add", "sin", "mul"]


def test_switches_are_put_back_when_a_trace_fails():
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output((graph.call_function(torch.nonzero, (given,)),))
    module = torch.fx.GraphModule({}, graph)
    with pytest.raises(Break, match="needs the values"):
        trace(module, [x(3)])
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("grad", [False, True])
def test_what_unrolled_loops_write_is_read_of_the_last_write_to_it(grad, monkeypatch):
    asked = []
    monkeypatch.setattr(clean, "_meet", lambda its, mine, meet=clean._meet: asked.append(1) or meet(its, mine))

    def f(v):
        out = v * 1
        for i in range(1, 60):
            out[i] = out[i - 1] * 0.5 + v[i]
        out[10:40] *= 2
        for i in range(58):
            out[i : i + 2] += out[i + 2]
        out.view(6, 10)[:, 3] = out[5]
        return out[12], out[50:], out

    v = n(60, grad=grad)
    wanted, found = f(v), kiln.compile(f, backend="aot_eager", fullgraph=True)(v)
    torch.testing.assert_close(found, wanted)
    if grad:
        gradients = [torch.autograd.grad(sum(each.sum() for each in given), v) for given in (wanted, found)]
        torch.testing.assert_close(gradients[1], gradients[0])
    assert len(asked) < 1000
