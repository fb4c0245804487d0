"""An op that raises only when it runs: the frame runs again in Python, so its own handlers see the exception."""

import types

import pytest
import torch
import torch.nn.functional as F

from kiln.base import records
from kiln.capture import runtime
from tests.same import Same
from tests.support import kiln, pin, same_as_eager, t

X, FAR = t(4), torch.tensor([9])


def test_a_handler_sees_an_error_of_the_data():
    def f(x, i):
        try:
            return torch.gather(x, 0, i)
        except RuntimeError:
            return x * 0

    pin(same_as_eager(f, X, FAR))


def test_modes_are_left_when_the_error_leaves():
    def f(x, i):
        y = x + 1
        with torch.no_grad():
            return y.gather(0, i)

    r = same_as_eager(f, t(4, grad=True), FAR)
    assert isinstance(r.raised, RuntimeError) and torch.is_grad_enabled()


def test_writes_before_the_error_happen_once():
    log = []

    def f(x, i):
        log.append(1)
        return x.gather(0, i)

    compiled = kiln.compile(f, backend="eager")
    for _ in range(2):
        try:
            compiled(X, FAR)
        except RuntimeError:
            pass
    assert log == [1, 1]


def test_a_graph_that_writes_is_not_run_twice():
    def f(x, i):
        x.add_(1)
        return x.gather(0, i)

    x = torch.zeros(4)
    try:
        kiln.compile(f, backend="eager")(x, FAR)
    except RuntimeError:
        pass
    assert x.tolist() == [1.0] * 4


def test_one_line_tells_that_a_graph_raised_and_the_frame_did_not(caplog):
    def f(x, i):
        try:
            return torch.gather(x, 0, i)
        except RuntimeError:
            return x * 0

    compiled = kiln.compile(f, backend="eager")
    for _ in range(2):
        compiled(X, FAR)
    told = [r.getMessage() for r in caplog.records if "ran in Python since its graph raised" in r.getMessage()]
    assert len(told) == 1 and "f ran" in told[0] and "RuntimeError: index 9 is out of bounds" in told[0]


def both(f, make):
    """What a call in eager and one compiled give or raise, and what became of their arguments."""
    seen = []
    for called in (f, kiln.compile(f)):
        args = make()
        try:
            result = called(*args)
        except (RuntimeError, IndexError) as error:
            result = [type(error), str(error), error.__context__]
        seen.append(str((getattr(result, "data", result), args)))
    assert seen[0] == seen[1]


def test_what_came_before_the_error_has_happened_where_the_graph_writes():
    def f(x, i, log):
        log.append(1)
        x.add_(1)
        try:
            y = x[i]
        except IndexError:
            y = x * 100
        log.append(2)
        x.mul_(3)
        return y.gather(0, i)

    for place in (1, 7, 2):
        both(f, lambda place=place: (torch.arange(4.0), torch.tensor([place]), []))


def test_the_numbers_of_a_frame_that_runs_again_are_the_first(monkeypatch):
    states = {"cuda:1": 7}
    there = types.SimpleNamespace(get_rng_state=lambda d: states[str(d)], set_rng_state=lambda s, d: states.update({str(d): s}))
    monkeypatch.setattr(torch, "get_device_module", lambda device: there)
    before = runtime.generator_states((torch.device("cpu"), torch.device("cuda:1")))
    first, states["cuda:1"] = torch.rand(3), 9
    runtime.set_generators(before)
    assert states["cuda:1"] == 7 and torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("f", [
    lambda x: x[0, 1:].add_(x[0, :-1]), lambda x: x.add_(x.t()), lambda x: x[1:].copy_(x[:-1]), lambda x: torch.mul(x[1:], 2, out=x[:-1]),
    lambda x: (x * 2)[0].detach().view(-1)[1:].sub_(x[0, :-1]), lambda x: x[:1].add_(x[1:2]),
])  # fmt: skip
@pytest.mark.parametrize("dynamic", [None, True])
def test_writes_that_eager_refuses_for_what_they_read(f, dynamic):
    def program(x, log):
        log.append(1)
        try:
            return f(x)
        except RuntimeError as error:
            log.append(str(error))
            return x * 2

    mine, eager = ((g(x := torch.arange(9.0).reshape(3, 3), log := []), x, log) for g in (kiln.compile(program, dynamic=dynamic), program))
    assert str(mine) == str(eager)


def test_what_came_before_a_write_that_autograd_refuses_has_happened():
    def f(x, log):
        log.append(torch.arange(3))
        x *= 2
        return x

    both(f, lambda: (torch.ones(4, requires_grad=True).view(2, 2), []))


@pytest.mark.parametrize("f", [
    lambda x, i: x[i], lambda x, i: x.gather(0, i), lambda x, i: torch.nn.functional.embedding(i, x[:, None]), lambda x, i: x.scatter(0, i, 1.0),
    lambda x, i: x.index_add(0, i, x[:1]), lambda x, i: 5 // (i - 7), lambda x, i: torch.nn.functional.nll_loss(x[None], i),
])  # fmt: skip
@pytest.mark.parametrize("grad", [False, True])
def test_what_nobody_reads_raises_too(f, grad):
    def program(x, i):
        f(x, i)
        return x + 1

    for place in (1, 7):
        both(program, lambda place=place: (torch.arange(4.0, requires_grad=grad), torch.tensor([place])))


@pytest.mark.parametrize("f", [
    lambda x, y: x.index_add_(0, torch.tensor([0]), y), lambda x, y: x.index_copy_(0, torch.tensor([0]), y.double()),
    lambda x, y: x.__setitem__(torch.tensor([0]), y.double()), lambda x, y: x.__setitem__(torch.tensor([0]), torch.ones(2, 3)),
    lambda x, y: x.index_put_((torch.tensor([0, 1]),), torch.ones(3, 3)), lambda x, y: x.put_(torch.tensor([0]), torch.ones(2)),
    lambda x, y: torch.nn.functional.gelu(x.long()), lambda x, y: x.long().softmax(0), lambda x, y: x & x, lambda x, y: x.long().addcmul_(x, x),
    lambda x, y: torch.select_scatter(x, torch.ones(2), 0, 0), lambda x, y: x.expand(5, 5), lambda x, y: x[:0].max(), lambda x, y: x.add(x, alpha=True),
])  # fmt: skip
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_handler_sees_what_meta_kernels_let_pass(f, dynamic):
    def program(x, y, log):
        log.append(1)
        try:
            return f(x, y)
        except (RuntimeError, IndexError) as error:
            log.append((type(error), str(error), error.__context__, error.__suppress_context__))
            return x * 2

    mine, eager = ((g(x := torch.zeros(2, 3), torch.ones(1), log := []), x, log) for g in (kiln.compile(program, dynamic=dynamic), program))
    assert str(mine) == str(eager)


def into_a_copy(x):
    return x.add_(x.to(torch.int64))


def beside_a_view_and_a_copy(x, y):
    x[:, ...] += x.bool().long()
    y[:1].add_(y.double().reshape(-1, 1)[1:2])
    return x, y, torch.broadcast_tensors(x, y)[1].mul_(x.reshape(1, 1))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_conversions_that_copy_have_memory_of_their_own(mode, dynamic):
    """In inference mode such ops arrive whole, and what they declare is that they may give a view."""
    def seen(compiled):
        def program(x, y):
            return into_a_copy(x), beside_a_view_and_a_copy(x, y)

        with mode(), records.collect() as log:
            x, y = torch.ones(1, 1, dtype=torch.int8), torch.arange(3.0).reshape(3, 1)
            return str(compiled(program)(x, y)), str((x, y)), log

    mine, eager = seen(lambda f: kiln.compile(f, dynamic=dynamic)), seen(lambda f: f)
    assert mine[:2] == eager[:2] and not mine[2].breaks and len(mine[2].graphs) == 1


def picked(x, i):
    return x[i] * 2


def test_a_frame_that_the_hook_found_is_replayed_as_it_is():
    """Generators run in Python, and what they call is captured as their frames start."""
    def program(x, places):
        return tuple(picked(x, i) for i in places if print(end="") is None)

    places = [torch.tensor([1]), torch.tensor([5])]
    assert torch.equal(kiln.compile(program)(torch.arange(3.0), places[:1])[0], torch.tensor([2.0]))
    with pytest.raises(IndexError, match="index 5 is out of bounds"):
        kiln.compile(program)(torch.arange(3.0), places)


def test_a_frame_that_others_call_runs_in_python_once():
    """The hook would make a region of it again, which would run it in Python, and so on."""

    def step(x, zero, log):
        log.append(1)
        zero.data.add_(1)
        return x * 2 + zero.requires_grad_()

    def f(x, zero, log):
        def each():
            for _ in range(2):
                print(end="")
                yield step(x, zero, log)

        return sum(each())

    log, zero = [], torch.zeros(())
    out = kiln.compile(f)(torch.ones(3), zero, log)
    assert (out.tolist(), log, zero.item(), zero.requires_grad) == ([7.0] * 3, [1, 1], 2.0, True)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("backend", ["aot_eager", "kiln"])
def test_a_handler_beside_a_custom_function_sees_an_error_after_a_write(backend):
    def f(x, i, count):
        count.add_(1)
        y = Square.apply(x)
        try:
            y = y[i] * torch.rand(())
        except IndexError:
            y = y.sum()
        count.mul_(2)
        return y

    compiled = kiln.compile(f, backend=backend, fullgraph=True)
    with records.collect() as found:
        for i in (FAR, torch.tensor([2])):
            told = []
            for run in (f, compiled):
                torch.manual_seed(0)
                x, count = t(4, grad=True), torch.zeros(2)
                run(x, i, count).sum().backward()
                told.append((x, count, torch.rand(())))
            Same()(*told)
    assert len(found.graphs) == 1


class Heard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        print("forward")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class HeardBackward(Square):
    @staticmethod
    def backward(ctx, grad):
        print("backward")
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("cls, kinds", [(Heard, ["io"]), (HeardBackward, [])])
def test_what_custom_functions_print_is_printed_in_every_call(cls, kinds, capsys):
    def f(x):
        return (cls.apply(x + 1) * 3).sum()

    compiled = kiln.compile(f)
    with records.collect() as found:
        for _ in range(3):
            said = []
            for run in (f, compiled):
                run(t(4, grad=True)).backward()
                said.append(capsys.readouterr().out)
            assert said[0] == said[1] != ""
    assert [b.kind for b in found.breaks] == kinds


@pytest.mark.parametrize("f, copied", [
    (lambda x, i: x + torch.rand(4), 0), (lambda x, i: F.dropout(x, 0.5).softmax(0), 0), (lambda x, i: torch.randn(4, 4) @ x, 0),
    (lambda x, i: x[i] + torch.rand(()), 1), (lambda x, i: torch.bernoulli(x.sigmoid()), 1), (lambda x, i: torch.linalg.inv(torch.rand(4, 4)), 1),
])  # fmt: skip
def test_the_state_of_a_generator_is_copied_where_the_graph_may_raise(f, copied, monkeypatch):
    calls = []
    states = runtime.generator_states
    monkeypatch.setattr(runtime, "generator_states", lambda devices: calls.append(devices) or states(devices))
    x, i, drawn = t(4), torch.tensor([2]), []
    compiled = kiln.compile(f, fullgraph=True)
    compiled(x, i)
    for run in (f, compiled):
        torch.manual_seed(0)
        drawn.append((run(x, i), torch.rand(())))
    Same()(*drawn) if copied else torch.testing.assert_close(*drawn)
    assert len(calls) == 2 * copied


def test_a_handler_sees_what_a_function_within_the_graph_raises():
    def f(x, i):
        first = torch.rand(())
        try:
            picked = torch.cond(x.sum() > 0, lambda x: x.gather(0, i), lambda x: x.gather(0, i) + 1, (x,))
            return torch.func.vmap(lambda row: row * first)(picked)
        except RuntimeError:
            return x.sum() * torch.rand(())

    compiled = kiln.compile(f, fullgraph=True)
    for i in (torch.tensor([1]), FAR):
        drawn = []
        for run in (f, compiled):
            torch.manual_seed(0)
            drawn.append((run(X, i), torch.rand(())))
        Same()(*drawn)
