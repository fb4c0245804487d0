"""The recorder: one node a call, the right node, and a graph module that computes what eager computes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiln.base.errors import Break, Bug
from kiln.base.source import Arg, Attr, DictAttr, Item
from kiln.capture.module import CapturedGraph
from kiln.capture.nodes import identifier
from kiln.capture.recorder import Recorder
from kiln.ops.fake import FakeTensor


def recording(*inputs: Tensor) -> tuple[Recorder, list[FakeTensor]]:
    recorder = Recorder()
    return recorder, [recorder.input(t, Arg(i, f"x{i}"), False) for i, t in enumerate(inputs)]


def targets(recorder: Recorder) -> list[Any]:
    return [n.target for n in recorder.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def check(program: Callable[..., Any], *inputs: Tensor) -> Recorder:
    """Record `program` through the mode; the graph gives eager's values and mutates what eager mutates."""
    recorder, fakes = recording(*inputs)
    with recorder.mode():
        out = program(*fakes)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    module, infos = recorder.finish(outputs)
    module.graph.lint()
    mine, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    torch.manual_seed(0)
    expected = program(*theirs)
    torch.manual_seed(0)
    order = {id(t): copy for t, copy in zip(inputs, mine, strict=True)}
    found = module(*[order[id(i.real)] for i in infos])
    assert isinstance(found, tuple)
    for f, r, e in zip(outputs, found, [expected] if isinstance(expected, Tensor) else expected, strict=True):
        torch.testing.assert_close(r, e, equal_nan=True)
        assert (f.shape, f.stride(), f.dtype, f.requires_grad) == (
            e.shape,
            e.stride(),
            e.dtype,
            e.requires_grad,
        )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    return recorder


def test_kinds_of_calls() -> None:
    r, (a,) = recording(torch.randn(3, 4))
    r.call(torch.relu, (a,))
    r.call(torch.Tensor.add, (a, a), {"alpha": 2})
    r.call(a.mul, (2,))
    r.call(torch.Tensor.__add__, (a, 1))
    r.call(torch.Tensor.__rsub__, (a, 1))
    r.call(operator.matmul, (a, r.call(torch.Tensor.t, (a,))))
    r.call(torch.Tensor.__getitem__, (a, (slice(1, None), None)))
    r.call(F.dropout, (a,), {"p": 0.5})
    r.call(torch.Tensor.T.__get__, (a,))
    assert targets(r) == [
        torch.relu, "add", "mul", operator.add, operator.sub, "t", operator.matmul, operator.getitem, F.dropout, getattr,
    ]  # fmt: skip
    nodes = [n for n in r.graph.nodes if n.op != "placeholder"]
    x = next(n for n in r.graph.nodes if n.op == "placeholder")
    assert nodes[1].args == (x, x) and nodes[1].kwargs == {"alpha": 2}
    assert nodes[4].args == (1, x)
    assert nodes[7].args == (x, (slice(1, None, None), None))
    assert nodes[9].args == (x, "T")


def test_values_leave_no_node() -> None:
    r, (a,) = recording(torch.randn(3, 4))
    assert r.call(torch.Tensor.shape.__get__, (a,)) == (3, 4)
    assert r.call(torch.Tensor.size, (a, 1)) == 4
    assert r.call(torch.is_floating_point, (a,)) is True
    assert r.call(torch.Tensor.dtype.__get__, (a,)) is torch.float32
    assert r.call(torch.broadcast_shapes, ((3, 1), (1, 4))) == (3, 4)
    assert list(r.graph.nodes) == []


def test_errors_leave_no_node() -> None:
    r, (a, b) = recording(torch.randn(3), torch.randn(4))
    with pytest.raises(
        RuntimeError, match=r"The size of tensor a \(3\) must match the size of tensor b \(4\)"
    ):
        r.call(torch.add, (a, b))
    with pytest.raises(Break):
        r.call(torch.Tensor.item, (r.call(torch.sum, (a,)),))
    assert targets(r) == [torch.sum]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tolist", "data-dependent"),
        ("numpy", "data-dependent"),
        ("data_ptr", "data-pointer"),
        ("backward", "backward"),
    ],
)
def test_leaving_methods_break(name: str, kind: str) -> None:
    r, (a,) = recording(torch.randn(3))
    with pytest.raises(Break) as caught:
        r.call(getattr(torch.Tensor, name), (a,))
    assert caught.value.kind == kind


def test_assigning_data_and_reading_memory_break() -> None:
    r, (a, i) = recording(torch.randn(3), torch.tensor([1, 2]))
    with pytest.raises(Break):
        r.call(torch.Tensor.data.__set__, (a, a))
    with pytest.raises(Break) as caught:
        r.call(torch.tensor_split, (a, i))
    assert caught.value.kind == "data-dependent"
    with pytest.raises(Break):
        r.call(torch.Tensor.t_, (a,))
    assert list(r.graph.nodes) == []


def test_inputs() -> None:
    real, unused = torch.randn(3), torch.randn(3)
    r, (a, b) = recording(real, unused)
    assert r.input(real, Arg(0, "x0"), False) is a and r.fakes[id(real)] is a
    assert list(r.graph.nodes) == []
    out = r.call(torch.neg, (real,))
    module, infos = r.finish([out])
    assert [i.real is real for i in infos] == [True] and infos[0].source == Arg(0, "x0")
    assert r.knows(a) and r.knows(b)
    torch.testing.assert_close(module(real), (-real,))


def test_outputs_that_are_inputs() -> None:
    real = torch.randn(3)
    r, (a,) = recording(real)
    module, infos = r.finish([a, a])
    assert len(infos) == 1 and module(real) == (real, real)


def test_fakes_of_another_recorder_are_a_bug() -> None:
    _, (a,) = recording(torch.randn(3))
    other = Recorder()
    with pytest.raises(Bug):
        other.call(torch.relu, (a,))


def test_module_attributes() -> None:
    weight, buffer, constant = nn.Parameter(torch.randn(2, 2)), torch.zeros(2), torch.ones(2)
    r = Recorder()
    me = Arg(0, "self")
    w = r.input(weight, Item(DictAttr(Attr(me, "layer"), "_parameters"), "weight"), True)
    b = r.input(buffer, Attr(me, "running_mean"), True)
    assert isinstance(w, nn.Parameter)
    out = r.call(torch.add, (r.call(F.linear, (constant, w)), b))
    module, infos = r.finish([out])
    module.graph.lint()
    assert infos == []
    assert [n for n, _ in module.named_parameters()] == ["self_layer_weight"]
    assert [n for n, _ in module.named_buffers()] == ["_tensor_constant", "self_running_mean"]
    assert module.self_layer_weight is weight and module.self_running_mean is buffer
    torch.testing.assert_close(module()[0], F.linear(constant, weight) + buffer)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("self.layers[0].weight", "self_layers_0_weight"),
        ("x['a b']", "x_a_b"),
        ("self._modules['fc']", "self_fc"),
        ("0", "_0"),
    ],
)
def test_identifier(text: str, name: str) -> None:
    assert identifier(text) == name


def test_parts_of_results_are_taken_when_used() -> None:
    r, (a,) = recording(torch.randn(3, 4))
    best = r.call(torch.max, (a, 1))
    assert type(best) is torch.return_types.max and targets(r) == [torch.max]
    r.call(torch.relu, (best.values,))
    r.call(torch.neg, (best.values,))
    assert targets(r) == [torch.max, operator.getitem, torch.relu, torch.neg]
    nested = r.call(leaf, (a,))
    r.call(torch.neg, (nested["pair"].second,))
    assert targets(r)[4:] == [leaf, operator.getitem, operator.getitem, torch.neg]


class Pair(NamedTuple):
    first: Any
    second: Any


def leaf(a: Tensor) -> dict[str, Any]:
    return {"pair": Pair(a + 1, a * 2), "n": 3}


def test_in_place_rebinds() -> None:
    r, (a,) = recording(torch.randn(3))
    b = r.call(torch.neg, (a,))
    assert r.call(torch.Tensor.add_, (b, 1)) is b
    assert r.node(b).target == "add_"
    r.call(torch.Tensor.__setitem__, (b, 0, 5.0))
    assert targets(r)[-1] is operator.setitem


def test_rollback() -> None:
    real = torch.randn(3)
    r, (a,) = recording(real)
    b = r.call(torch.neg, (a,))
    before, mark = list(r.graph.nodes), r.checkpoint()
    r.call(torch.Tensor.add_, (b, r.input(torch.randn(3), Arg(1, "y"), False)))
    c = r.call(torch.exp, (b,))
    r.effect(torch._C._set_grad_enabled, (torch.is_grad_enabled(),))
    r.rollback(mark)
    assert list(r.graph.nodes) == before and r.node(b).target is torch.neg and not r.knows(c)
    assert list(r.fakes.values()) == [a]
    module, infos = r.finish([r.call(torch.exp, (b,))])
    module.graph.lint()
    torch.testing.assert_close(module(real), ((-real).exp(),))


def test_effects() -> None:
    r, (a,) = recording(torch.randn(3, requires_grad=True))
    grad = torch.is_grad_enabled()
    r.effect(torch._C._set_grad_enabled, (False,))
    try:
        out = r.call(torch.neg, (a,))
    finally:
        r.effect(torch._C._set_grad_enabled, (grad,))
    assert not out.requires_grad
    assert targets(r) == [torch._C._set_grad_enabled, torch.neg, torch._C._set_grad_enabled]
    module, _ = r.finish([out])
    assert not module(torch.randn(3, requires_grad=True))[0].requires_grad and torch.is_grad_enabled() is grad


def test_objects_become_attributes() -> None:
    r, (a,) = recording(torch.randn(3))
    generator = torch.Generator()
    out = r.call(torch.rand, (3,), {"generator": generator})
    module, _ = r.finish([out])
    module.graph.lint()
    expected = torch.rand(3, generator=torch.Generator().manual_seed(generator.initial_seed()))
    torch.testing.assert_close(module()[0], expected)


def test_places() -> None:
    r, (a,) = recording(torch.randn(3))
    r.where = lambda: "model.py:3"
    out = r.call(torch.neg, (a,))
    meta = r.node(out).meta
    assert meta["stack_trace"] == "model.py:3" and meta["example_value"] is out


def test_local_functions_can_be_leaves() -> None:
    def inner(a: Tensor) -> Tensor:
        return a * 2

    real = torch.randn(3)
    r, (a,) = recording(real)
    module, _ = r.finish([r.call(inner, (a,)), r.call(lambda v: v + 1, (a,))])
    module.graph.lint()
    torch.testing.assert_close(module(real), (real * 2, real + 1))


PROGRAMS: dict[str, Callable[..., Any]] = {
    "operators": lambda a, b: [a + b, a - 1, 1 - a, a * b, a / 2, 2 / (a.abs() + 1), a // 2, a**2, 2**a, a % 2, -a, abs(a), a @ b.mT],
    "comparisons": lambda a, b: [a > b, a == b, 1 < a, (a > 0) & (b > 0), ~(a > 0), (a > 0) | (b > 0), (a > 0) ^ (b > 0)],
    "in place": lambda a, b: [a.add_(b), a.mul_(2)[0], b.copy_(a).exp()],
    "views and writes": lambda a, b: [a[0].add_(1).sum(), a.view(-1)[1:3].mul_(b[0, 0]).clone(), a.t()],
    "index assignment": lambda a, b: [_assign(a, b)],
    "parts": lambda a, b: [*a.split(1), *torch.max(a, 1), a.topk(1).values, *torch.linalg.qr(a), a.sort().indices],
    "attributes": lambda a, b: [a.T, a.mT, a.data, a.T.mT, torch.view_as_complex(torch.stack([a, b], -1)).imag],
    "random": lambda a, b: [torch.rand(3), a.clone().normal_(), F.dropout(a, 0.5, True), torch.bernoulli(a.sigmoid())],
    "literals": lambda a, b: [torch.tensor([1.0, 2.0, 3.0]) + a[0, :3], torch.as_tensor([1, 2]), a[torch.tensor([1, 0])], a[[0, 1]]],
    "factories": lambda a, b: [torch.zeros(2, 3), torch.arange(3), a.new_full((2,), 3), torch.ones_like(a), torch.full((2,), torch.inf)],
    "functional": lambda a, b: [F.softmax(a, dim=-1), F.layer_norm(a, (4,)), F.gelu(a, approximate="tanh"), torch.einsum("ij,kj->ik", a, b)],
    "shapes in arguments": lambda a, b: [a.reshape(a.shape[::-1]), b.view(a.size()), torch.zeros(a.shape), a.expand(2, *a.shape)],
    "joining": lambda a, b: [torch.cat([a, b]), torch.stack((a, b), dim=1), torch.where(a > 0, a, b)],
    "out": lambda a, b: [torch.add(a, b, out=torch.empty(3, 4)), torch.mul(a, 2, out=b)],
    "numpy": lambda a, b: [a[numpy.array([0, 2])], a * numpy.float32(2), torch.from_numpy(numpy.ones(4, dtype=numpy.float32)) + a],
    "leaves": lambda a, b: [F.multi_head_attention_forward(
        a[:, None], a[:, None], a[:, None], 4, 2, torch.ones(12, 4), torch.ones(12), None, None, False, 0.0,
        torch.ones(4, 4), torch.ones(4))[0]],
}  # fmt: skip


def _assign(a: Tensor, b: Tensor) -> Tensor:
    a[0] = 1
    a[:, 1] = b[:, 0]
    a[a > 1] = 0
    a[[1, 2], 0] = 7
    return a


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    torch.manual_seed(1)
    check(PROGRAMS[name], torch.randn(3, 4), torch.randn(3, 4))


def test_module_under_the_mode() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )
    state = [t.clone() for t in model.buffers()]
    x = torch.randn(2, 3, 8, 8)
    r, (a,) = recording(x)
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        r.input(t, Attr(Arg(1, "self"), name), True)
    with r.mode():
        out = model(a)
    module, _ = r.finish([out])
    module.graph.lint()
    assert all(torch.equal(t, s) for t, s in zip(model.buffers(), state, strict=True)), (
        "capturing changed a buffer"
    )
    assert len(list(module.parameters())) == 6
    found = module(x)[0]
    found.sum().backward()
    assert model[0].weight.grad is not None
    assert not torch.equal(model[1].running_mean, state[0])
    for t, s in zip(model.buffers(), state, strict=True):
        t.copy_(s)
    torch.testing.assert_close(found, model(x))


def test_requires_grad_is_recorded() -> None:
    r, (a,) = recording(torch.randn(3))
    b = r.call(torch.Tensor.requires_grad_, (r.call(torch.Tensor.detach, (a,)),))
    assert targets(r) == ["detach", "requires_grad_"] and b.requires_grad and b.is_leaf


def test_nodes_are_named_as_fx_names_them() -> None:
    """Names are counted by the graph itself, which a node that fx adds later must fit."""

    def log_2(x: torch.Tensor) -> torch.Tensor:
        return x

    mine, theirs = CapturedGraph(), torch.fx.Graph()
    calls: list[tuple[str, object]] = [
        ("call_function", torch.add), ("call_method", "add"), ("call_function", torch.add), ("get_attr", "add"),
        ("call_method", "float"), ("call_method", "float"), ("call_method", "__add__"), ("call_method", "newOnes"),
        ("call_function", log_2), ("call_function", torch.log), ("call_function", log_2),
        ("call_function", torch.log), ("call_method", "log"), ("get_attr", "self_a_weight"), ("get_attr", "w_1"),
        ("get_attr", "w"), ("get_attr", "w"), ("get_attr", "Wide_Name"), ("get_attr", "class"), ("get_attr", "__own__"),
        ("call_function", F.conv2d), ("call_function", F.conv2d), ("call_method", "add"),
    ]  # fmt: skip
    for graph in (mine, theirs):
        graph.placeholder("add_1")
        for op, target in calls * 2:
            graph.create_node(op, target, ())
    assert [node.name for node in mine.nodes] == [node.name for node in theirs.nodes]
    for op, target in calls:
        torch.fx.Graph.create_node(mine, op, target, ())
    assert len({node.name for node in mine.nodes}) == len(mine.nodes)
