"""Numbers read out of tensors: kept, they end no graph; looked at, the graph ends where they were read."""

from __future__ import annotations

import json
import operator
import re

import pytest
import torch

from tests.support import EAGER, How, kiln, one_graph, pin, same_as_eager, t

needs_kiln = pytest.mark.skipif(EAGER, reason="asks Kiln itself")


class Box:
    """Somewhere to keep a number."""


BOX = Box()


def returned(x):
    return x * 2, (x * 2).sum().item()


def nested(x):
    return {"loss": x.mean().item(), "all": [x[i].item() for i in range(3)]}, x + 1


def before_a_write(x):
    total = x.sum()
    seen = total.item()
    total += 1
    return seen, total


def kept_on_an_object(x):
    BOX.loss = x.mean().item()
    return x + 1


def of_its_type(x):
    loss, count, flag = x.sum().item(), (x > 0).sum().item(), (x > 0).any().item()
    return isinstance(loss, float), type(count), isinstance(flag, bool), isinstance(count, str), loss is None, x * 2


def as_float(x):
    return x + 1, float(x.sum()), int((x > 0).sum())


def with_gradient(x):
    loss = (x * x).sum()
    return loss, loss.item()


KEPT = [returned, nested, before_a_write, kept_on_an_object, of_its_type, as_float]


@pytest.mark.parametrize("program", KEPT, ids=lambda f: f.__name__)
def test_a_number_that_is_kept_ends_no_graph(program):
    x = torch.tensor([1.0, -2.0, 4.0])
    one_graph(program, x)
    compiled = kiln.compile(program, fullgraph=True)
    for turn in range(3):
        assert str(compiled(x + turn)) == str(program(x + turn))


def test_a_number_on_an_object_is_that_of_each_call():
    compiled = kiln.compile(kept_on_an_object, fullgraph=True)
    for value in (1.0, 2.5):
        compiled(torch.full((3,), value))
        assert BOX.loss == value and type(BOX.loss) is float


def test_a_loss_is_returned_beside_its_number():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    loss, number = kiln.compile(with_gradient, fullgraph=True)(x)
    loss.backward()
    assert number == 5.0 and torch.equal(x.grad, torch.tensor([2.0, 4.0]))


def compared(x):
    if x.sum().item() > 0:
        return x + 1
    return x - 1


def formatted(x):
    return f"{x.sum().item():.2f}", x + 1


def as_a_key(x):
    return {(x > 0).sum().item(): x * 2}


def in_native_code(x):
    return json.dumps({"loss": x.sum().item()}), x * 2


def called(x):
    return x.sum().item().is_integer(), x * 2


@needs_kiln
@pytest.mark.parametrize("program", [compared, formatted, as_a_key, in_native_code, called],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_a_number_that_is_looked_at_breaks_where_it_was_read(program):
    x = torch.tensor([1.0, -2.0, 4.0])
    same_as_eager(program, x)
    with pytest.raises(kiln.Break) as refusal:
        kiln.compile(program, fullgraph=True)(x)
    assert refusal.value.kind == "data-dependent" and ".item()" in refusal.value.at.text


def multiplied(x):
    scale = x.max().item()
    return x / scale + 1, scale * 2 + 1, x.fill_(scale)


def listed(x):
    return [n * 2 for n in (x > 0).long().tolist()], x.sum().tolist(), torch.tensor([x[0].item(), 2.0])


def read_before_a_write(x):
    first = x[0].item()
    x.add_(1)
    return x * first, first - x[0].item()


def sized(x):
    count = (x > 0).sum().item()
    torch._check(count >= 0)
    return torch.arange(count), torch.zeros(max(count, 2)).shape


def split(x):
    one, two = (x > 0).long().sum().item(), (~(x > 0)).long().sum().item()
    torch._check(one >= 0)
    torch._check(two >= 0)
    torch._check(one + two == 3)
    return x.split([one, two])


@needs_kiln
@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("program", [multiplied, listed, read_before_a_write, sized, split], ids=lambda f: f.__name__)
def test_where_nothing_may_break_the_graph_computes_with_numbers(program, backend):
    seen = []

    def counting(gm, inputs):
        seen.append(gm)
        return kiln.lookup_backend(backend)(gm, inputs)

    same_as_eager(program, torch.tensor([1.0, -2.0, 4.0]))
    compiled = kiln.compile(program, fullgraph=True, backend=counting)
    for x in ([1.0, -2.0, 4.0], [3.0, 2.0, 4.5], [-1.0, -2.0, float("inf")], [float("nan"), 1.0, 2.0]):
        mine, theirs = torch.tensor(x), torch.tensor(x)
        assert str(compiled(mine)) == str(program(theirs)) and str(mine) == str(theirs)
    assert len(seen) == 1


@needs_kiln
def test_what_is_said_of_a_number_is_checked():
    compiled = kiln.compile(sized_as_told, fullgraph=True)
    assert torch.equal(compiled(torch.tensor(3)), torch.arange(3))
    for program in (sized_as_told, compiled):
        with pytest.raises(ValueError, match="not that many"):
            program(torch.tensor(30))


def sized_as_told(x):
    count = x.item()
    torch._check(count >= 0)
    torch._check_value(count < 9, lambda: "not that many")
    return torch.arange(count)


@needs_kiln
@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("program", [
    lambda x, n, s: torch.arange(n),
    lambda x, n, s: torch.full((2, 3), s) + x.narrow(0, 0, n).sum(),
    lambda x, n, s: torch.roll(x, n) * torch.nn.functional.leaky_relu(-x, s),
    lambda x, n, s: torch._foreach_lerp([x, x + 1], [x * 2, x], s),
    lambda x, n, s: torch.zeros(n, 2) + 1,
])  # fmt: skip
def test_a_tensor_given_as_a_number_is_one_that_the_graph_reads(program, backend):
    compiled = kiln.compile(program, fullgraph=True, backend=backend)
    with kiln.records() as seen:
        for n, s in ((3, 0.5), (4, 0.25)):
            given = torch.arange(5.0), torch.tensor(n), torch.tensor(s)
            torch.testing.assert_close(compiled(*given), program(*given))
    assert (len(seen.graphs), len(seen.breaks), len(seen.fallbacks)) == (1, 0, 0)


def up_to_the_longest(x, lengths):
    longest = lengths.max()
    within = torch.arange(longest) < lengths[:, None]
    return x[:, :longest] * within


def sliced_before(x, lengths):
    longest = lengths.max()
    return x[:, :longest] * torch.arange(longest)


def sliced_by_a_number_before(x, lengths):
    count = lengths[0].item()
    return x[:, :count] + torch.arange(count), x[:, : count - lengths[1].item()]


def written_between(x, lengths):
    count = lengths[0] + 1
    first = count.item()
    count.view(1).mul_(2)
    return x * first + count.item(), torch.arange(count)


@needs_kiln
@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize(
    "program", [up_to_the_longest, sliced_before, sliced_by_a_number_before, written_between]
)
def test_a_number_read_again_is_the_same_one_until_it_is_written(program, backend):
    compiled = kiln.compile(program, fullgraph=True, backend=backend)
    with kiln.records() as seen:
        for lengths in ([2, 4], [3, 5], [5, 2]):
            given = torch.rand(2, 6), torch.tensor(lengths)
            torch.testing.assert_close(compiled(*given), program(*given))
    assert (len(seen.graphs), len(seen.breaks), len(seen.fallbacks)) == (1, 0, 0)


def alone(x, y, n):
    torch._check(n.item() == x.size(0) + y.size(0))
    return x * 2


def between_ops(x, y, n):
    difference = n.item() - x.size(0) - y.size(0)
    z = x.sin() + difference
    torch._check(difference == 0)
    return z * 2


@needs_kiln
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "kiln"])
@pytest.mark.parametrize("program", [alone, between_ops])
def test_what_is_said_of_a_number_and_sizes_is_checked_though_kernels_build_on_it(program, backend):
    compiled = kiln.compile(program, fullgraph=True, backend=backend, dynamic=True)
    for rows in (2, 3):
        given = torch.ones(rows, 3), torch.ones(5, 3), torch.tensor(rows + 5)
        assert torch.allclose(compiled(*given), program(*given))
    for one in (program, compiled):
        with pytest.raises(RuntimeError, match="Expected cond to be True"):
            one(torch.ones(3, 3), torch.ones(5, 3), torch.tensor(9))


@needs_kiln
def test_a_tensor_of_several_elements_has_no_number():
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        kiln.compile(lambda x: x.item())(torch.ones(2))


def through_an_iterator(x, numbers):
    for n in numbers:
        x = x + n
        if x.sum().item() > 100:
            break
    return x


def test_numbers_looked_at_in_a_loop_over_an_iterator():
    for end in (3, 200):
        expected = through_an_iterator(torch.ones(4), iter(range(end)))
        assert torch.equal(kiln.compile(through_an_iterator)(torch.ones(4), iter(range(end))), expected)


# ---------------------------------------------------------------------- sizes


SIZED = {
    "factory": lambda x, n: torch.zeros(n.item(), 4) + 1,
    "range": lambda x, n: torch.arange(n.item()) * 2,
    "broadcast": lambda x, n: torch.ones(n.item(), 4) + x[0],
    "expand": lambda x, n: x[0].expand(n.item(), 4) * 2,
    "repeat": lambda x, n: x.repeat_interleave(n.item(), 0),
    "cat": lambda x, n: torch.cat([torch.ones(n.item(), 4), x]),
}


@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("name", SIZED)
def test_a_number_of_a_tensor_is_a_size(name, backend):
    # One graph serves all sizes from two on; the others run in Python, where the graph finds them out.
    x, f = torch.rand(3, 4), SIZED[name]
    with kiln.records() as seen:
        compiled = kiln.compile(f, backend=backend, fullgraph=True)
        for n in (3, 2, 7, 1, 0, 5):
            assert torch.equal(compiled(x, torch.tensor(n)), f(x, torch.tensor(n)))
    assert (len(seen.graphs), len(seen.breaks)) == (1, 0)


WITHIN = {
    "front": lambda x, n: x[: n.item()] * 2,
    "rest": lambda x, n: x[n.item() :] + 1,
    "both": lambda x, n: torch.cat([x[: n.item()], x[n.item() :]]) * 2,
    "second": lambda x, n: x[None][:, : n.item()] + 1,
    "item": lambda x, n: x[n.item() - 1] * 2,
    "from the end": lambda x, n: x[-n.item()] * 2,
    "narrow": lambda x, n: x.narrow(0, 0, n.item()) + 1,
    "narrow from": lambda x, n: x.narrow(0, n.item(), 2) + 1,
    "split": lambda x, n: x.split([n.item(), 6 - n.item()])[1] * 2,
    "written": lambda x, n: torch.zeros(6).index_fill(0, n, 1.0)[: n.item()].mul(2),
}


@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("name", WITHIN)
def test_a_number_of_a_tensor_is_a_place(name, backend):
    # Within bounds the graph does it; beyond them it runs in Python, which cuts or raises.
    x, f = torch.rand(6), WITHIN[name]
    compiled = kiln.compile(f, backend=backend, fullgraph=True)
    for n in (3, 2, 4, 3):
        with kiln.records() as seen:
            assert torch.equal(compiled(x, torch.tensor(n)), f(x, torch.tensor(n)))
        assert not seen.breaks and not seen.fallbacks
    for n in (1, 0, 6, 7, -1, -9):
        try:
            expected = f(x, torch.tensor(n))
        except (IndexError, RuntimeError) as error:
            with pytest.raises(type(error)):
                compiled(x, torch.tensor(n))
        else:
            assert torch.equal(compiled(x, torch.tensor(n)), expected)


@needs_kiln
@pytest.mark.parametrize("name", WITHIN)
def test_places_within_bounds_do_not_run_in_python(name, caplog):
    x, f = torch.rand(6), WITHIN[name]
    compiled = kiln.compile(f, fullgraph=True)
    for n in (3, 2, 4):
        compiled(x, torch.tensor(n))
    assert not [r for r in caplog.records if "ran in Python" in r.getMessage()]


@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_numbers_of_tensors_are_converted(backend):
    def f(x, n):
        return x + int(x.sum()), x * float(n), bool(n), bool(n.item()), bool((x > 0).all()), int(x[0]), float(n)

    compiled = kiln.compile(f, backend=backend, fullgraph=True)
    for n in (3, 0, -2):
        x = torch.tensor([1.75, n, 0.5])
        for got, expected in zip(compiled(x, torch.tensor(n)), f(x, torch.tensor(n)), strict=True):
            assert type(got) is type(expected)
            assert torch.equal(got, expected) if isinstance(got, torch.Tensor) else got == expected


def test_a_checked_number_is_a_size():
    def f(x, n):
        k = n.item()
        torch._check(k >= 0)
        torch._check(k <= x.size(0))
        return x[:k] * 2

    x = torch.rand(3, 4)
    compiled = kiln.compile(f, backend="eager", fullgraph=True)
    for n in (3, 2, 1, 0):
        assert torch.equal(compiled(x, torch.tensor(n)), f(x, torch.tensor(n)))
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        compiled(x, torch.tensor(4))


@needs_kiln
def test_a_number_that_is_two_sizes_is_taken_for_nothing_impossible(caplog):
    def f(n):
        k = n.item()
        return torch.zeros(k, k) + torch.full((k, 1), 2.0)

    compiled = kiln.compile(f, fullgraph=True)
    for n in (3, 4):
        assert torch.equal(compiled(torch.tensor(n)), f(torch.tensor(n)))
    assert not [r for r in caplog.records if "ran in Python" in r.getMessage()]


def test_a_branch_of_the_program_on_a_number_of_a_tensor_is_refused():
    def f(x, n):
        return x + 1 if n.item() > 1 else x - 1

    with pytest.raises(kiln.Break, match="asks whether"):
        kiln.compile(f, backend="eager", fullgraph=True)(torch.ones(2), torch.tensor(3))


def test_a_size_is_not_guessed_where_the_graph_has_written():
    def f(x, n):
        x.add_(1)
        return torch.zeros(n.item()) + 1

    with pytest.raises(kiln.Break):
        kiln.compile(f, backend="eager", fullgraph=True)(torch.ones(2), torch.tensor(3))


@pytest.mark.parametrize("sign", [1.0, -1.0, float("nan")])
def test_the_larger_of_a_tensor_and_a_number_is_chosen_in_the_graph(sign):
    def f(x, mask):
        hinge = max(x[0] - x[1], 0) + max(0.5, x[2]) * min(x.sum(), 1)
        return x.sum() / max(mask.sum(), 1) + hinge, torch.stack([max([x[0], x[1], x[2]]), min(x[0], x[1])])

    one_graph(f, (t(3) * sign).requires_grad_(), t(3, dtype=torch.int64))
    one_graph(f, (t(3) * sign).requires_grad_(), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: max(x.long().sum(), 1.5) * x,  # an int or a float
        lambda x: max(x[:1], 1) * x,  # a tensor of one dimension or a number
        lambda x: max(x[0], x.double()[1]) * x,
        lambda x: max(x[0], x.detach()[1]) * x,
    ],
)
def test_a_choice_that_decides_on_more_than_a_number_breaks(f):
    assert same_as_eager(f, t(3, grad=True)).breaks == 1


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("f", [lambda x: max(x.sum(), 1), lambda x: (min(x[0], x[1]), x), lambda x: [max(0.5, x.sum())] * 2])
def test_a_choice_that_leaves_the_graph_is_one_of_the_two(f, sign):
    assert same_as_eager(f, t(3) * sign).breaks == 1


@pytest.mark.parametrize("places", [(), (2,)])
def test_tensors_are_not_rounded_by_the_builtin(places):
    compiled = kiln.compile(lambda x: round(x, *places), backend="eager")
    with pytest.raises(TypeError, match="__round__"):
        compiled(torch.ones(()))


class Meter:
    def __init__(self):
        self.sum, self.count, self.mean = 0, 0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n
        self.mean = self.sum / self.count


@pytest.mark.skipif(EAGER, reason="counts graphs")
def test_floats_of_tensors_are_summed_up_without_a_break():
    def step(x, meter):
        loss = x.pow(2).mean()
        meter.update(loss.item(), x.size(0))
        return loss, 1 - x.mean().item() * 2

    compiled, ours, theirs = kiln.compile(step, backend="eager"), Meter(), Meter()
    with kiln.records() as seen:
        for i in range(4):
            assert compiled(t(4, 3) + i, ours) == step(t(4, 3) + i, theirs)
            assert vars(ours) == vars(theirs)
            assert {k: type(v) for k, v in vars(ours).items()} == {k: type(v) for k, v in vars(theirs).items()}
    assert (len(seen.graphs), len(seen.breaks)) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_are_scaled_by_their_own_numbers_in_the_graph(dtype):
    def f(x):
        y = (x - x.mean().item()) / x.std().item()
        return y, x.sum().item() - x, x * (x.abs().max().item() + 1), x.sum(0, keepdim=True).item() * x

    one_graph(f, t(4, 1, dtype=dtype, grad=True))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum() * x.mean().item(),  # a tensor without dimensions would take the type of a double
        lambda x: x.long() * x.mean().item(),
        lambda x: x * (1.0 / x.mean().item()),  # which may raise
        lambda x: x * (x.long().sum().item() + 1),  # ints have no bounds
    ],
)
def test_arithmetic_that_differs_in_tensors_breaks(f):
    assert same_as_eager(f, t(4, 2)).breaks == 1


def test_division_by_zero_is_raised():
    with pytest.raises(ZeroDivisionError):
        kiln.compile(lambda x: x.sum().item() / 0, backend="eager")(torch.ones(2))


def read_in_inference_mode(x):
    with torch.inference_mode():
        y = x * 2
        number = y.sum().item()
    return x + 1, number, float(y.mean())


def test_numbers_of_inference_tensors():
    """Such tensors count no writes."""
    one_graph(read_in_inference_mode, t(3, 4))


@needs_kiln
def test_sizes_of_inference_tensors():
    def f(x):
        with torch.inference_mode():
            y = x.clone()
            y[x > 0] = x[x > 0] * 2
            return torch.zeros((y > 0).sum().item()).clone(), y.clone()

    x = t(3, 4)
    torch.testing.assert_close(kiln.compile(f, backend="eager", fullgraph=True)(x), f(x))


FOUR, REAL = 4, 2.0


def whether_all(x):
    found = (x > -5).all().item()
    match found:
        case True:
            y = x * 2
        case False:
            y = x * 3
        case _:
            y = x * 4
    return y, found is not True, operator.is_(found, True), found is None, x.sum().item() is REAL


@pytest.mark.parametrize("x", [t(4), t(4) - 9], ids=["all", "not all"])
def test_truths_are_asked_for_by_identity(x):
    pin(same_as_eager(whether_all, x), graphs=2, breaks=1)


@needs_kiln
def test_sizes_that_vary_are_asked_for_by_identity():
    def f(x):
        n = x.shape[0]
        return x * 2, n is FOUR, n is x.shape[1], (n > 3) is True, n is None

    compiled = kiln.compile(f, backend="eager", dynamic=True, fullgraph=True)
    for shape in ((4, 4), (6, 5), (400, 400), (3, 3)):
        assert compiled(torch.ones(shape))[1:] == f(torch.ones(shape))[1:]


def pieces(x, a, b, c):
    return x[:a], x[a : a + b], x[a + b :]


def product(x, a, b, c):
    return torch.zeros(a, b) @ torch.ones(c, a)


SIZES = {
    "split": (lambda x, a, b, c: torch.ops.aten.split_with_sizes(x, [a, b, c]), [(7, 16, 9), (8, 8, 16)], (1, 15, 16)),
    "slices": (pieces, [(7, 16, 9), (8, 8, 16)], (30, 2, 0)),
    "sum": (lambda x, a, b, c: torch.zeros(a) + torch.ones(b), [(5, 5, 2), (3, 3, 4)], (5, 1, 2)),
    "view": (lambda x, a, b, c: x.view(a, b), [(4, 8, 2), (16, 2, 3)], (1, 32, 2)),
    "product": (product, [(2, 4, 4), (5, 3, 3)], (1, 2, 3)),
}


@needs_kiln
@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize(("program", "fit", "other"), SIZES.values(), ids=SIZES)
def test_sizes_that_the_graph_reads_are_alike_where_torch_asks(program, fit, other, backend, caplog):
    def f(x, sizes):
        return program(x, *sizes.tolist())

    graphs = []
    made = kiln.lookup_backend(backend)
    compiled = kiln.compile(f, backend=lambda graph, inputs: graphs.append(graph) or made(graph, inputs), fullgraph=True)
    for sizes in fit:
        x, sizes = torch.arange(32.0), torch.tensor(sizes)
        torch.testing.assert_close(compiled(x, sizes), f(x, sizes))
    assert len(graphs) == 1 and not [r for r in caplog.records if "ran in Python" in r.getMessage()]
    for sizes in (other, (9, 40, 41)):
        x, sizes = torch.arange(32.0), torch.tensor(sizes)
        try:
            expected = f(x, sizes)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error).partition("\n")[0])):
                compiled(x, sizes)
        else:
            torch.testing.assert_close(compiled(x, sizes), expected)


@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_truths_of_tensors_are_asked_of_and_checked(backend):
    def f(x):
        flag, other = (x > 0).any().item(), (x[0] > 0).item()
        torch._check(flag)
        return x * 2, flag, bool(flag), not other, isinstance(other, bool)

    compiled = kiln.compile(f, backend=backend, fullgraph=True)
    for x in (torch.ones(3), torch.tensor([-1.0, 1, 1])):
        got, expected = compiled(x), f(x)
        assert torch.equal(got[0], expected[0]) and got[1:] == expected[1:]
        assert [type(v) for v in got] == [type(v) for v in expected]
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        compiled(-torch.ones(3))


def test_numbers_of_a_tensor_of_several_dimensions():
    def f(x, empty):
        rows = (x * 2).long().tolist()
        return [[n * 4 for n in row] for row in rows], x[:, :1].tolist(), empty.tolist(), x + rows[1][0]

    one_graph(f, t(2, 3), torch.ones(2, 0), how=How(options={"fullgraph": True}))
