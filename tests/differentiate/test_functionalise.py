"""Programs that write to memory become programs of values, with eager's results, layouts and aliases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kiln.base.errors import Break
from kiln.base.graph import CONSTANT, Node, label
from kiln.differentiate.joint import Fresh, Given, Joint, Mutation, Placeholder, Storage, View
from kiln.differentiate.trace import trace
from tests.differentiate.joined import check, check_graph
from tests.graphs import run_graph

CASES: list[Any] = []


def n(*shape: int, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


def program(*args: Any) -> Any:
    """Declare a program that is compared with eager on these arguments."""

    def declare(function: Any) -> Any:
        CASES.append(pytest.param(function, args, id=function.__name__))
        return function

    return declare


def ops(joint: Joint) -> list[str]:
    """The names of what the forward half calls."""
    skipped = ("getitem", CONSTANT)
    return [label(node.op) for node in joint.graph.nodes if not node.backward and label(node.op) not in skipped]


@program(n(3, 4, grad=True))
def write_to_a_view_of_a_view(x):
    y = x.clone()
    v = y.view(2, 6).t()[1:3]
    v.add_(1)
    w = y[1]
    w.zero_()
    v.mul_(2)
    return y, v.sum()


@program(n(6, 4, grad=True))
def read_parts_beside_writes(x):
    y = x * 2
    y[1] = x[0]
    y[-1] += y[1]
    y[2:4] = y[0:2]
    first, rest, even = y[0], y[4:], y[::2]
    y[:, 1] = 3.0
    return y[0] * first, y[1:3] + rest, y[3] - y[-1], even, y[:, 1:3], y.t()[1]


@program(n(3, 4, grad=True))
def write_to_a_base_with_live_views(x):
    y = x * 1
    v = y[:, 1:3]
    y.mul_(v.sum())
    return v


@program(n(4, 4), n(4))
def assignments_by_index(x, v):
    x[torch.tensor([0, 2])] = v
    x[1, :] = 0
    x.t()[0].fill_(5)
    return x.sum()


@program(n(4, 4))
def assignments_by_slice(x):
    y = torch.zeros(4, 4)
    y[1:3, ::2] = x[1:3, ::2]
    y[..., 0] += 1
    y[0] = y[1]
    return y


@program(n(4, 4))
def assignment_by_mask(x):
    y = x.clone()
    y[y > 0] = 0
    return y


@program(n(3, 4))
def rows_swapped(x):
    a = x[0].clone()
    x[0] = x[1]
    x[1] = a
    return x.sum()


@program(n(3), n(3))
def inputs_swapped(a, b):
    t = a.clone()
    a.copy_(b)
    b.copy_(t)


@program(n(3, 4))
def copies_are_apart(x):
    y, z = torch.empty(3, 4), torch.empty(3, 4)
    y.copy_(x)
    z.copy_(x)
    return y, z


@program(n(3, 4))
def copies_seen_through_views(x):
    y, z = x.clone(), x + 1
    w = x + 1
    return y[:, ::2], z[::2], w[::2], x.clone().split(2, 1)[1]


@program(n(3, 4))
def literal_written(x):
    t = torch.tensor([1.0, 2.0, 3.0, 4.0])
    t.add_(1)
    return t, torch.ones(3), x + t


@program(n(3, 4))
def changes_its_own_shape(x):
    y = (x * 2).unsqueeze(0)
    y.squeeze_(0)
    y.unsqueeze_(-1)
    y.transpose_(0, 1)
    y.add_(1)
    z = x * 3
    z.t_()
    return y, z


@program(n(3, 4))
def lists_in_place(x):
    parts = [x * 2, x * 3]
    torch._foreach_add_(parts, 1.0)
    torch._foreach_mul_(parts, parts[::-1])
    return parts


@program(n(3, 4))
def lists_of_one_tensor(x):
    y = x * 2
    torch._foreach_add_([y, y], 1.0)
    torch._foreach_mul_([y[0], y[1]], 3.0)
    torch._foreach_add_([y[0], y[1]], [y[1], y[0]], alpha=2)
    return y


@program(n(3, 4), n(3, 4))
def lists_of_inputs(a, b):
    torch._foreach_copy_([a, b], [b.clone(), a.clone()])
    torch._foreach_mul_([a, b], 2.0)
    return a + b


@program(n(3, 4).half(), n(3, 4))
def dtype_of_the_target(h, f):
    h.add_(f)
    return h.eq_(0)


@program(n(4, 3).t())
def strides_of_the_target(x):
    y = x * 2
    y.add_(torch.ones(3, 4))
    return y


@program(n(6))
def strided(x):
    y = x * 2
    y.as_strided((2, 3), (1, 2)).add_(1)
    return y


@program(torch.arange(10.0)[3:9])
def strided_from_an_offset(x):
    x.add_(1)
    z = x.as_strided((2, 2), (1, 2), 4)
    z.mul_(3)
    return z.sum(), x[0]


@program(n(3, 4))
def unbound(x):
    y = x * 2
    for row in y.unbind(0):
        row.add_(1)
    a, b = y.split([1, 3], 1)
    a.mul_(2)
    for part in b.chunk(2, 1):
        part.sub_(1)
    return y


@program(n(3, 4))
def diagonals(x):
    y = x[:, :3] * 2
    y.diagonal().fill_(1)
    y.fill_diagonal_(3)
    return y


@program(n(10))
def windows(x):
    y = x.clone()
    y.unfold(0, 2, 2).mul_(3)
    return y


@program(n(3))
def other_dtype(x):
    y = x.clone()
    y.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    return y


@program(n(2, 3).to(torch.complex64))
def parts_of_complex(x):
    y = x * 2
    y.real.mul_(2)
    y.imag.add_(1)
    y.conj().add_(1j)
    return y, y.conj()


@program(n(3, 4), n(3, 4))
def out_arguments(x, y):
    o, v, i = torch.empty(3, 4), torch.empty(3), torch.empty(3, dtype=torch.long)
    torch.mul(x, y, out=o)
    torch.max(x, 1, out=(v, i))
    torch.cat([x, y], out=torch.empty(6, 4))
    return o, v, i


@program(n(5, 3), torch.tensor([0, 2, 4]))
def writes_by_index(x, i):
    y = x.clone()
    rows = i[:, None].expand(3, 3)
    y.index_add_(0, i, torch.ones(3, 3))
    y.index_copy_(0, i, torch.zeros(3, 3))
    y.index_fill_(0, i, 2.0)
    y.scatter_add_(0, rows, torch.ones(3, 3))
    y.scatter_reduce_(0, rows, torch.ones(3, 3), "amax")
    y.masked_scatter_(y > 0, torch.ones(15))
    y.masked_fill_(y > 3, -1.0)
    y.scatter_(1, torch.zeros(5, 1, dtype=torch.long), 9.0)
    return y


@program(n(3, 4))
def arithmetic_in_place(x):
    y = x.clone()
    y += 1
    y -= 2
    y *= 3
    y /= 4
    y //= 1
    y %= 3
    y **= 2
    return y.sqrt_().exp_().log_().sigmoid_().tanh_().abs_().neg_().clamp_(-1, 1).round_()


@program(torch.tensor([1, 2, 3]))
def bits_in_place(x):
    y = x.clone()
    y |= 4
    y &= 7
    y ^= 1
    y <<= 2
    y >>= 1
    return y, y.bitwise_not_()


@program(n(3, 4))
def random_in_place(x):
    y = x.clone()
    y.t().uniform_()
    y[0].normal_()
    y.exponential_().geometric_(0.3).cauchy_().log_normal_()
    return y, y.clone().random_(0, 5), F.rrelu(x, training=True), F.dropout(x, 0.5), F.dropout(x.t(), 0.5)


@program(n(3, 4))
def views_of_a_written_input(x):
    x.t().mul_(2)
    return x.t(), x[0], x


@program(n(3, 4, grad=True))
def written_under_no_grad_through_detach(x):
    y = x * 2
    z = y.detach()
    with torch.no_grad():
        z.mul_(2)
    y2 = x * 3
    y2.detach_()
    return y.sum(), y2.add_(1)


@program(n(4, 3), n(3))
def written_by_a_custom_op(x, y):
    w = x * 1
    torch.ops.kiln_test.increase(w[0], y)
    return torch.ops.kiln_test.increase(x, y) + x, w


LIBRARY = torch.library.Library("kiln_test", "FRAGMENT")
LIBRARY.define("increase(Tensor(a!) x, Tensor y) -> Tensor")


@torch.library.impl(LIBRARY, "increase", "CompositeExplicitAutograd")
def increase(x, y):
    x.add_(y)
    return y * 2


@torch.library.register_fake("kiln_test::increase", lib=LIBRARY)
def increase_fake(x, y):
    return torch.empty_like(y)


@pytest.mark.parametrize(("function", "args"), CASES)
def test_as_eager(function, args):
    check(function, *args)


def test_a_write_to_a_view_scatters_into_its_base():
    def f(x):
        y = x.sin()
        y[0].mul_(3)
        return y

    assert ops(check(f, n(3, 4))) == ["sin", "select", "mul", "select_scatter"]


def test_a_copy_is_its_source():
    def f(x):
        y = torch.empty(3, 4)
        y.copy_(x.sin())
        return y * 2

    assert ops(check(f, n(3, 4))) == ["sin", "mul"]


def test_fills_do_not_read_what_they_fill():
    def f(x):
        y = x.exp()
        y.zero_()
        return y

    assert ops(check(f, n(3, 4))) == ["full"]


def test_an_op_without_a_twin_runs_on_copies():
    joint = check(written_by_a_custom_op, n(4, 3), n(3))
    assert ops(joint).count("increase_on_copies") == 2
    assert [m.primal for m in joint.mutated] == [0]


def test_written_inputs_are_listed():
    def f(a, b, c):
        a.add_(1)
        with torch.no_grad():
            b[0] = 1.0
        return c * 2

    joint = check(f, n(3), n(3), n(3, grad=True))
    assert joint.mutated == (Mutation(0, 1, False), Mutation(1, 2, False))


def test_an_output_that_is_a_written_input_is_the_input():
    def f(a, b):
        a.add_(b)
        return a, a.view(-1), b

    joint = check_graph(torch.fx.symbolic_trace(f), [n(3), n(3, grad=True)])
    assert joint.mutated == (Mutation(0, 0, True),)
    assert [type(out) for out in joint.outputs] == [Given, View, Given]


def test_statistics_of_a_batch_norm_are_hidden_writes():
    joint = check(torch.nn.BatchNorm2d(3), n(2, 3, 4, 4))
    assert [(m.with_grad, m.counted) for m in joint.mutated] == [(False, 1), (False, 0), (False, 0)]
    assert ops(joint) == ["add", "_native_batch_norm_legit_functional"]


def test_what_is_computed_twice_is_computed_once_but_for_random_numbers():
    def f(x):
        return x.sin() + x.sin(), torch.rand(3) + torch.rand(3), (x + 1) * (x + 1.0)

    assert ops(check(f, n(3))) == ["sin", "add", "rand", "rand", "add", "add", "add", "mul"]


def test_random_numbers_are_drawn_though_nobody_reads_them():
    def f(x):
        torch.rand(3)
        x.exp()
        return torch.rand(3)

    assert ops(check(f, n(3))) == ["rand", "rand"]


def test_views_of_what_outputs_share_are_taken_of_the_result():
    def f(x):
        y = x.sin()
        return y[0], y.view(-1)

    joint = check(f, n(3, 4, grad=True))
    assert ops(joint) == ["sin"]
    assert [(type(o), o.base) for o in joint.outputs] == [(View, 0), (View, 0)]


def overlapping_inputs(x, y):
    x.add_(1)
    y.mul_(x[2:].sum())
    return y * 2, x, y[1:]


def test_inputs_that_overlap_where_one_is_written_are_one_memory():
    joint = trace(torch.fx.symbolic_trace(overlapping_inputs), [n(8)[:4], n(8)[2:]])
    assert [type(p.origin) for p in joint.primals] == [Placeholder, Placeholder] and joint.apart == (0, 1)
    base, other = n(8), n(8)
    joint = trace(torch.fx.symbolic_trace(overlapping_inputs), [base[:4], base[2:6]])
    (primal,) = joint.primals
    assert primal.origin == Storage(0, (0, 1), (((4,), (1,), 0), ((4,), (1,), 2)))
    assert [type(out) for out in joint.outputs] == [Fresh, Given, View]
    assert joint.outputs[1].origin == Placeholder(0)
    first, memory = run_graph(joint.graph, base)
    expected, _, _ = overlapping_inputs(other[:4], other[2:6])
    assert torch.equal(first, expected) and torch.equal(memory, other)


def test_overlapping_inputs_with_gradients_are_refused():
    def f(x, y):
        x.add_(1)
        return y * 2

    base = n(6)
    module = torch.fx.symbolic_trace(f)
    with pytest.raises(Break, match="x and y overlap in memory, and one of them is written"):
        trace(module, [base[:4], base[2:].requires_grad_()])


def test_a_graph_is_checked_and_its_halves_are_marked():
    def f(x):
        y = x * 2
        y[0].mul_(3)
        return y.sum()

    joint = check(f, n(3, 4, grad=True))
    assert all(isinstance(node, Node) and not node.backward for node in joint.forward_outputs())
    assert [label(node.op) for node in joint.graph.nodes if node.backward][-1] == "mul"
