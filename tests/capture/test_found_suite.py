"""Programs that other compilers' tests led to: each was wrong, or broke without need."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import io
import operator
import subprocess
import sys
import threading
import traceback
import types
import weakref

import numpy
import pytest
import torch

from kiln.base import records
from kiln.base.errors import Bug
from tests.same import Same
from tests.support import EAGER, How, Watch, kiln, one_graph, pin, program, same_as_eager, t

X = t(3)
LOCAL = threading.local()
TABLE = {"a": 2.0}
VIEW = types.MappingProxyType(TABLE)
needs_kiln = pytest.mark.skipif(EAGER, reason="asks Kiln itself")


class Bag(set):
    def __init__(self, *items):
        super().__init__(*items)
        self.tag = 1


class Frozen(frozenset):
    pass


class Row(list):
    pass


# ---------------------------------------------------------------------- breaks in loops, paths that join


@needs_kiln
def test_a_loop_that_breaks_in_each_turn_does_not_nest():
    def count(x):
        while x.sum() < 2000:
            x = x + 1
        return x

    assert kiln.compile(count, backend="eager")(torch.zeros(1)) == 2000


@needs_kiln
def test_paths_join_after_a_branch():
    def paths(x, a, b, c):
        x = x + 1
        if a:
            x = x + 2
        x = x + 3
        if b:
            x = x + 4
        x = x + 5
        if c:
            x = x + 6
        return x + 7

    w = Watch(paths)
    yes, no = torch.ones(1), torch.zeros(1)
    for a in (yes, no):
        for b in (yes, no):
            for c in (yes, no):
                w(X, a, b, c)
    assert w.graphs == 7


# ---------------------------------------------------------------------- marks


@needs_kiln
def test_disable_without_recursive_keeps_the_function_and_captures_what_it_calls():
    def inner(x):
        return x + 1

    def outer(x):
        assert not torch.compiler.is_compiling()
        return inner(x.sigmoid().cos())

    apart = kiln.disable(outer, recursive=False)
    w = Watch(lambda x: apart(x.tan()))
    w(X)
    assert w.graphs == 2
    assert kiln.compile(inner, backend="eager")(X).equal(X + 1)


@needs_kiln
def test_a_disabled_function_made_in_each_call_does_not_recompile():
    def f(x):
        @kiln.disable
        def inner(x):
            return x + 10

        return inner(x) + 1

    w = Watch(f)
    for _ in range(3):
        w(X)
    assert w.recompiles == 0, w.reasons


AUDITED = """
import sys, torch, kiln
from kiln.base import records
forks = []
def hook(event, args):
    if event in ("os.fork", "os.forkpty"):
        forks.append(args)
def f(x):
    @kiln.disable
    def inner(x):
        return x + 10
    return inner(x) + 1
sys.addaudithook(hook)
with records.collect() as seen:
    compiled = kiln.compile(f, backend="eager")
    for _ in range(3):
        compiled(torch.ones(3))
assert not seen.recompiles, seen.recompiles
"""


@needs_kiln
def test_audit_hooks_are_no_part_of_the_program():
    subprocess.run([sys.executable, "-c", AUDITED], check=True)


@needs_kiln
def test_an_allowed_function_without_a_result_stays_in_the_graph():
    seen = []

    @kiln.allow_in_graph
    def note():
        seen.append(torch.is_grad_enabled())

    def f(x):
        with torch.no_grad():
            note()
        return x + 1

    compiled = kiln.compile(f, backend="eager")
    compiled(X)
    seen.clear()
    compiled(X)
    assert seen == [False]


@needs_kiln
def test_an_error_of_the_backend_is_raised():
    def backend(graph, inputs):
        raise LookupError("not this graph")

    with pytest.raises(LookupError, match="not this graph"):
        kiln.compile(lambda x: x + 1, backend=backend)(X)


@needs_kiln
def test_a_fault_of_ours_in_a_backend_is_left_to_eager():
    def backend(graph, inputs):
        raise Bug("no such size")

    with records.collect() as log:
        assert kiln.compile(lambda x: x + 1, backend=backend)(X).equal(X + 1)
    assert [record.error for record in log.fallbacks] == ["Bug: no such size"]
    with pytest.raises(Bug, match="no such size"):
        kiln.compile(lambda x: x + 1, backend=backend, fullgraph=True)(X)


# ---------------------------------------------------------------------- grad mode


def grad_switches(x):
    torch.set_grad_enabled(False)
    torch.set_grad_enabled(True)
    with torch.no_grad():
        pass
    with torch.no_grad():
        y = x * 2
    with torch.no_grad():
        z = x * 3
    return y, z, x * 4


def test_switches_that_nothing_sees_are_not_recorded():
    r = one_graph(grad_switches, t(3, grad=True))
    assert EAGER or r.ops == 5


# ---------------------------------------------------------------------- generators


def numbers(log, x):
    try:
        yield x + 1
        yield x + 2
    finally:
        log.append("closed")


@program(X, [])
def test_dropped_by_del(x, log):
    g = numbers(log, x)
    a = next(g)
    del g
    log.append("after")
    return a + 1


@program(X, [])
def test_dropped_by_break(x, log):
    for a in numbers(log, x):
        break
    log.append("after")
    return a * 2


@program(X, [])
def test_dropped_at_the_end(x, log):
    g = numbers(log, x)
    a = next(g)
    log.append("end")
    return a * 2


def first(x, log):
    g = numbers(log, x)
    return next(g)


@program(X, [])
def test_dropped_by_a_call(x, log):
    a = first(x, log)
    log.append("after")
    return a * 2


@program(X)
def test_zip_over_a_generator_is_returned(x):
    return list(zip(range(2), (x + i for i in range(2)), strict=False)), x.sin()


# ---------------------------------------------------------------------- containers of the user's classes


@program(X, Bag([1, 3]), Frozen([7, 8]), Row([1]))
def test_attributes_and_contents_of_container_subclasses(x, bag, frozen, row):
    bag.add(5)
    bag.tag += 1
    row.append(2)
    row.note = x * 2
    n = len(bag) + (3 in bag) + (7 in frozen)
    made = Bag([1]) | {9}
    return x + n, bag.copy(), made, frozen | {4}


@program(X, Row([1, 2]))
def test_a_list_subclass_extended_by_itself(x, row):
    row.extend(row)
    return x * len(row)


def through_the_view(x, view):
    TABLE["k"] = 4.0
    total = sum(view.values())
    del TABLE["k"]
    return x * VIEW["a"] + total, "k" in VIEW


def test_mapping_views_follow_their_mapping():
    compiled = kiln.compile(through_the_view, backend="eager", fullgraph=True)
    for value in (2.0, 3.0):
        TABLE["a"] = value
        expected, got = through_the_view(X, VIEW), compiled(X, VIEW)
        assert got[0].equal(expected[0]) and got[1] == expected[1]


def reads_views(x, keys, items, d):
    if "c" in keys:
        x = x * 2
    for key, value in items:
        x = x + len(key) + value
    return x, len(keys), keys & {"a"}, d.keys()


def test_views_of_dicts():
    compiled = kiln.compile(reads_views, backend="eager", fullgraph=True)
    d = {"a": 1.5}
    for change in ({}, {"c": 2.0}, {"a": 3.0}):
        d.update(change)
        expected, got = reads_views(X, d.keys(), d.items(), d), compiled(X, d.keys(), d.items(), d)
        assert got[0].equal(expected[0]) and got[1:3] == expected[1:3]
        d["late"] = 1.0
        assert "late" in got[3] and d.pop("late")


def attends(x):
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        kiln.graph_break()
    return y, len(torch.nn.attention._cur_sdpa_kernel_backends())


def test_the_choice_of_attention_kernels_is_put_back():
    before = torch.nn.attention._cur_sdpa_kernel_backends()
    x = t(2, 2, 2, 2)
    compiled = kiln.compile(attends, backend="eager")
    for _ in range(2):
        assert compiled(x)[1] == len(before)
        assert torch.nn.attention._cur_sdpa_kernel_backends() == before


def largest(x, info):
    return x + info.max


def test_attributes_of_numpy_objects_are_guarded():
    compiled = kiln.compile(largest, backend="eager", fullgraph=True)
    for kind in (numpy.int64, numpy.int16):
        assert compiled(t(2, dtype=torch.int64), numpy.iinfo(kind)).equal(largest(t(2, dtype=torch.int64), numpy.iinfo(kind)))


class Thing:
    z = 3


THING = Thing()


def asks_a_proxy(x, p):
    return x * 2 if hasattr(p, "z") else x * 5


def test_a_weak_proxy_is_what_it_stands_for():
    thing = Thing()
    compiled = kiln.compile(asks_a_proxy, backend="eager", fullgraph=True)
    assert compiled(X, weakref.proxy(thing)).equal(X * 2)


def test_what_is_written_through_a_weak_proxy_is_written():
    def writes(x, p):
        p.size = len(x)
        return x * p.size

    thing = Thing()
    assert kiln.compile(writes, backend="eager", fullgraph=True)(X, weakref.proxy(thing)).equal(X * 3)
    assert thing.size == 3


@program(X)
def weak_references_to_what_is_made(x):
    row = Row([x + 1])
    y = x * 2
    seen, to = weakref.ref(row), weakref.ref(y)
    return seen()[0], to() is y, row


@needs_kiln
def test_weak_references_to_tensors_are_given_back():
    def gives(x):
        y = x * 2
        return weakref.ref(y), y

    seen, y = kiln.compile(gives, backend="eager", fullgraph=True)(X)
    assert seen() is y and y.equal(X * 2)


@program(X)
def the_address_of_what_stays_is_in_its_text(x):
    return x + 1, str(asks_a_proxy) == repr(asks_a_proxy), f"{THING}"


@program(X)
def descriptors_made_by_hand(x):
    class Half:
        kind = classmethod(lambda cls, y: y + 2)
        plain = staticmethod(lambda y: y + 1)

    Half.value = property(lambda self: x / 2)
    return Half().value, Half.plain(x), Half.kind(x), property(lambda self: 5).fget(None)


@program(X)
def files_in_memory(x):
    text = io.StringIO("one\ntwo\n")
    words = [line.strip() for line in text]
    with io.BytesIO() as raw:
        raw.write(b"abc")
        return x + len(raw.getvalue()), words, text.read()


@needs_kiln
def test_a_file_in_memory_that_lasts_is_made_in_each_call():
    def gives(x):
        y, text = x + 1, io.StringIO()
        text.write(str(len(x)))
        return y, text

    compiled = kiln.compile(gives, backend="eager")
    first, second = compiled(X)[1], compiled(X)[1]
    assert first is not second and first.getvalue() == second.getvalue() == "3"


@needs_kiln
def test_ops_that_give_nothing_need_no_rule():
    with torch.library._scoped_library("kiln_suite", "FRAGMENT") as library:
        library.define("bump(Tensor(a!) x, Tensor by) -> ()")
        library.impl("bump", lambda x, by: x.add_(by) is None or None, "CPU")

        def bumped(x):
            y = x + 1
            torch.ops.kiln_suite.bump(y, x)
            return y * 2

        assert kiln.compile(bumped, fullgraph=True)(X).equal((X + 1 + X) * 2)


@program(X)
def gradients_of_new_tensors_are_set(x):
    y = x + 10
    y.grad = x * 2
    return y, y.grad + 1


def reads_thread_state(x, k):
    LOCAL.n = LOCAL.n + k
    return x * LOCAL.n


def test_attributes_of_thread_local_objects():
    w = kiln.compile(reads_thread_state, backend="eager", fullgraph=True)
    for start in (3, 3, 5):
        LOCAL.n = start
        assert w(X, 1).equal(X * (start + 1))
        assert LOCAL.n == start + 1


# ---------------------------------------------------------------------- exceptions


def chain(error):
    names = []
    while error is not None:
        names.append(type(error).__name__)
        error = error.__context__
    return names


@program(X)
def test_context_of_an_exception_raised_again(x):
    known = ValueError("a")
    try:
        try:
            raise known
        except ValueError:
            try:
                raise KeyError(1)
            except KeyError:
                raise known
    except ValueError as e:
        return x + 1, chain(e)


@program(X)
def test_frames_of_a_caught_exception_are_cleared(x):
    try:
        [][1]
    except IndexError as e:
        traceback.clear_frames(e.__traceback__)
    return x + 1


@program(X, raises=TypeError, breaks=0)
def test_builtins_refuse_wrong_arguments(x):
    return isinstance(x, torch.Tensor, invalid=True)


@program(X, operator.add, [1])
def test_what_cannot_be_walked_or_hashed_says_so(x, function, items):
    said = []
    for attempt in (lambda: {1}.union(function), lambda: hash({1}), lambda: hash(items)):
        try:
            attempt()
        except TypeError as e:
            said.append(str(e))
    return x + len(said), said


# ---------------------------------------------------------------------- library


class Point:
    def __init__(self):
        self.v = types.SimpleNamespace(w=2)


@program(X, {"k": X, "l": X + 1}, Point())
def test_getters_of_operator(x, d, point):
    a, b = operator.itemgetter("k", "l")(d)
    c = operator.attrgetter("v.w")(point)
    return a + b + c + operator.methodcaller("get", "zz", 3)(d) + operator.methodcaller("sum", dim=0)(x)


@program(X)
def test_a_named_tuple_class_made_inside(x):
    made = collections.namedtuple("Pair", "a b", defaults=(1,))
    pair = made(x)
    return pair.a + pair.b, pair._fields


@program(X, [X, X + 1, X + 2])
def test_a_constant_tensor_as_an_index(x, xs):
    return xs[torch.as_tensor(2)] + x


@program(X, X + 1, torch.tensor(2.5))
def test_tensors_as_factors(x, y, a):
    return torch.add(x, y, alpha=a), x.addcmul(y, y, value=a)


@program(X)
def test_record_function(x):
    with torch.profiler.record_function("block"):
        return x * 2


@program(t(3, grad=True), X)
def test_grad_has_two_names(x, y):
    x._grad = y + 1
    return x.grad * 2


def test_a_hook_that_the_function_removes():
    def f(x, y):
        handle = x.register_hook(lambda g: g * 2)
        y = y * y
        handle.remove()
        x.register_hook(lambda g: g * 3)
        return x, y

    x = torch.zeros(3, requires_grad=True)
    out, _ = kiln.compile(f, backend="eager")(x, X)
    out.backward(torch.ones(3))
    assert x.grad.tolist() == [3.0, 3.0, 3.0]


# ---------------------------------------------------------------------- memory


@needs_kiln
def test_arguments_are_released_without_a_collection():
    def f(x):
        y = x + 1
        kiln.graph_break()
        return y * x

    compiled = kiln.compile(f, backend="eager")
    gc.disable()
    try:
        x = torch.rand(4)
        seen = weakref.ref(x)
        compiled(x)
        del x
        assert seen() is None
    finally:
        gc.enable()


def test_hooks_on_saved_tensors_run_for_real_tensors_only():
    packed = []

    def pack(x):
        packed.append(x.shape)
        return x

    f = kiln.compile(lambda x, y: x * y, backend="eager")
    x, y = torch.ones(4, requires_grad=True), torch.ones(4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        f(x, y).sum().backward()
    assert len(packed) == 1


# ---------------------------------------------------------------------- generators from outside


LEFT: list[object] = []


@contextlib.contextmanager
def noted(x, scale):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    with torch.autocast("cpu", enabled=False):
        try:
            yield x * scale
        except KeyError:
            LEFT.append("handled")
        finally:
            scale += 1
            torch.set_grad_enabled(before)
            LEFT.append(scale)


def left_after_a_break(x):
    with noted(x, 3) as y:
        kiln.graph_break()
        z = y + 1
    return z * 2, torch.is_grad_enabled(), LEFT.pop()


def raised_after_a_break(x):
    with noted(x, 3) as y:
        kiln.graph_break()
        y = y * 2
        raise KeyError("k")
    return y, LEFT.pop(), LEFT.pop()


@pytest.mark.parametrize("f", [left_after_a_break, raised_after_a_break], ids=lambda f: f.__name__)
def test_a_block_of_a_generator_is_left_in_the_graph_after_the_break(f):
    pin(same_as_eager(f, X), graphs=2, breaks=1)
    compiled = kiln.compile(f, backend="eager")
    for n in (3, 4, 5, 5):
        x = torch.rand(n)
        (y, *others), (z, *expected) = compiled(x), f(x)
        assert torch.equal(y, z)
        assert others == expected


def squares(n):
    for i in range(n):
        yield i * i + 1


def used_up_after_a_break(x):
    numbers = squares(4)
    y = x * next(numbers)
    kiln.graph_break()
    for n in numbers:
        y = y * n
    return y, next(numbers, None)


def test_a_generator_is_used_up_after_a_break():
    pin(same_as_eager(used_up_after_a_break, X), graphs=2, breaks=1)


def test_a_generator_that_goes_on_after_a_break_is_left_to_python():
    def f(x):
        numbers = squares(4)
        y = x * next(numbers)
        kiln.graph_break()
        return y * next(numbers) + x, numbers

    numbers = kiln.compile(f, backend="eager")(X)[1]
    assert list(numbers) == [5, 10]


@needs_kiln
def test_a_generator_from_outside_is_left_to_python():
    def f(x, numbers):
        return x * next(numbers) + next(numbers)

    numbers, others = squares(9), squares(9)
    compiled = kiln.compile(f, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(X, numbers), f(X, others))
    assert next(numbers) == next(others)


def test_a_generator_in_a_handler_across_a_break():
    def handling():
        try:
            raise KeyError("k")
        except KeyError:
            yield 1
            yield str(sys.exception())

    def f(x):
        parts = handling()
        y = x * next(parts)
        kiln.graph_break()
        return y * 2, list(parts)

    same_as_eager(f, X)


# ---------------------------------------------------------------------- data


def exchanged(x, y):
    x.data = y
    y.data = y.data[:2] * 2
    return x.data.sum(), x.shape, y.shape


def exchanged_and_written(x, y):
    x.data = y
    x.add_(1)
    return x


def exchanged_without_gradients(x, y):
    with torch.no_grad():
        x.data = x.data - y * 0.1
        return (x * 2).sum()


def exchanged_dtype(x, y):
    x.data = y.to(torch.bfloat16)
    return x.dtype


@needs_kiln
@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize(
    "f", [exchanged, exchanged_and_written, exchanged_without_gradients, exchanged_dtype],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_the_data_of_an_argument_is_assigned(f, backend):
    compiled = kiln.compile(f, backend=backend, fullgraph=True)
    for grad in (False, True):
        for seed in range(2):
            torch.manual_seed(seed)
            grads = grad and f is not exchanged_and_written
            eager = [torch.rand(3, requires_grad=grads) for _ in range(2)]
            ours = [a.detach().clone().requires_grad_(grads) for a in eager]
            want, got = f(*eager), compiled(*ours)
            assert got == want if type(want) is torch.dtype else torch.testing.assert_close(got, want) is None
            for a, b in zip(eager, ours, strict=True):
                torch.testing.assert_close(b, a)
                assert (a.is_leaf, a.requires_grad) == (b.is_leaf, b.requires_grad)
            assert eager[0]._version == ours[0]._version
            assert (eager[0].data_ptr() == eager[1].data_ptr()) == (ours[0].data_ptr() == ours[1].data_ptr())


@needs_kiln
def test_gradients_reach_a_tensor_whose_data_was_assigned():
    def f(x, y):
        x.data = y * 3
        return (x * x).sum()

    x, y = torch.rand(3, requires_grad=True), torch.rand(3)
    with pytest.raises(kiln.Break, match="whose data was assigned"):
        kiln.compile(f, backend="eager", fullgraph=True)(x, y)
    kiln.compile(f, backend="eager")(x, y).backward()
    assert torch.equal(x.grad, y * 3 * 2)


def follow(slow, fast):
    """What a momentum encoder does after each step."""
    for p, q in zip(fast.parameters(), slow.parameters(), strict=True):
        q.data = q.data * 0.9 + p.data * 0.1


def momentum_step(slow, fast, optimizer, x):
    optimizer.zero_grad()
    with torch.no_grad():
        wanted = slow(x)
    loss = (fast(x) - wanted).pow(2).mean()
    loss.backward()
    optimizer.step()
    follow(slow, fast)
    return loss


def momentum_first(slow, fast, optimizer, x):
    with torch.no_grad():
        follow(slow, fast)
        wanted = slow(x)
    optimizer.zero_grad()
    return (fast(x) * wanted).sum()


@needs_kiln
@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("f", [momentum_step, momentum_first], ids=lambda f: f.__name__)
def test_a_momentum_encoder_assigns_data_in_one_graph(f, backend):
    def program(how):
        torch.manual_seed(0)
        fast = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        slow = copy.deepcopy(fast)
        optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
        run, found = how(f), []
        for i in range(3):
            loss = run(slow, fast, optimizer, t(2, 4) + i)
            if f is momentum_first:
                loss.backward()
                optimizer.step()
            else:
                with pytest.raises(RuntimeError, match="second time"):
                    loss.backward()
            found += [loss.detach(), *(p.detach().clone() for p in (*slow.parameters(), *fast.parameters()))]
        return found

    wanted = program(lambda f: f)
    torch.testing.assert_close(program(lambda f: kiln.compile(f, backend=backend, fullgraph=True)), wanted)


@needs_kiln
@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_gradients_of_a_tensor_itself_whose_data_is_assigned_break(backend):
    def f(x, y):
        out = (x * y).sum()
        x.data = x.data * 2
        return out

    x, y = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    a, b = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
    kiln.compile(f, backend=backend)(x, y).backward()
    f(a, b).backward()
    torch.testing.assert_close((x, y, x.grad, y.grad), (a, b, a.grad, b.grad))
    with pytest.raises(kiln.Break, match="gradients may follow"):
        kiln.compile(f, backend=backend, fullgraph=True)(x, y)


class Power(torch.nn.Module):
    """A power iteration that replaces its vectors, as spectral norms do."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(4, 3))
        self.u = torch.nn.Parameter(torch.rand(4), requires_grad=False)
        self.v = torch.nn.Parameter(torch.rand(3), requires_grad=False)

    def forward(self, x):
        v = self.weight.t().data @ self.u.data
        self.v.data = v / v.norm()
        u = self.weight.data @ self.v.data
        self.u.data = u / u.norm()
        return torch.nn.functional.linear(x, self.weight / self.u.dot(self.weight.mv(self.v))).tanh()


@needs_kiln
@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_gradients_of_a_module_that_replaces_data(backend):
    torch.manual_seed(0)
    eager = Power()
    ours = copy.deepcopy(eager)
    compiled, x = kiln.compile(ours, backend=backend), torch.rand(5, 3)
    for _ in range(3):
        for module in (eager, compiled):
            module.zero_grad()
            module(x).square().sum().backward()
        for a, b in zip(eager.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(b, a)
            torch.testing.assert_close(b.grad, a.grad)
    with torch.no_grad():
        torch.testing.assert_close(kiln.compile(ours, backend=backend, fullgraph=True)(x), eager(x))


def added_to(values, n):
    values.append(n)
    return len(values)


@needs_kiln
def test_the_body_of_a_class_runs_in_every_call():
    def f(x, values):
        class Local:
            count = added_to(values, 5)
            total = sum(values)
            values.append(total)
            noted: int = values[0]
            items = []  # noqa: RUF012

            @property
            def both(self):
                return x * self.total + self.count

        Local.items.append(Local.noted)
        return Local().both, Local.total, Local.items

    compiled = kiln.compile(f, fullgraph=True)
    for n in (3, 4, 5, 6):
        mine, eager = [n], [n]
        Same()(f(X, eager), compiled(X, mine))
        assert mine == eager == [n, 5, n + 5]


@needs_kiln
def test_a_class_that_leaves_is_another_one_in_each_call():
    def f(x, n):
        class Local:
            value = n
            tensor = x + 1

            def run(self):
                return self.tensor * self.value

        return Local(), x * 2

    compiled = kiln.compile(f)
    made = [compiled(X, n)[0] for n in (3, 4, 5)]
    assert len({type(one) for one in made}) == 3
    for one, n in zip(made, (3, 4, 5), strict=True):
        assert type(one.value) is int and one.value == n and torch.equal(one.run(), (X + 1) * n)


@needs_kiln
@pytest.mark.parametrize("dim", [0, -1])
def test_a_dimension_of_a_size_that_varies_is_squeezed_in_place(dim):
    def f(x):
        y = x.t()
        y.squeeze_(dim)
        return y * 2

    with kiln.config.patch(strict=True):
        compiled = kiln.compile(f, dynamic=True, fullgraph=True)
        for shape in ((2, 3), (4, 5), (1, 3)):
            assert torch.equal(compiled(torch.ones(shape)), f(torch.ones(shape)))


@needs_kiln
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_mask_that_does_not_fit_raises_where_nothing_reads_what_it_writes(dynamic):
    def f(x, mask, log):
        log.append(1)
        y = x * 2
        y[mask] = 0
        return x + 1

    with kiln.config.patch(strict=True):
        compiled = kiln.compile(f, dynamic=dynamic)
        for shape in ((4,), (4, 3), (3,), (4, 2), (2, 4)):
            mine, eager = [], []
            for called, log in ((compiled, mine), (f, eager)):
                try:
                    called(torch.ones(4, 3), torch.ones(shape) > 0, log)
                except IndexError as error:
                    log.append(str(error))
            assert mine == eager


@needs_kiln
def test_a_decorated_function_that_leaves_tells_of_what_it_wraps():
    def wrapping(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args)

        return inner

    def f(x):
        @wrapping
        def told(y):
            """Doubles."""
            return y * 2

        return x + 1, told

    for function in (f(X)[1], kiln.compile(f)(X)[1]):
        assert (function.__qualname__, function.__doc__) == (f"{f.__qualname__}.<locals>.told", "Doubles.")


@needs_kiln
@pytest.mark.parametrize("hook", [
    lambda k, log: lambda g: g * k, lambda k, log: lambda g: log.append(g * k), lambda k, log: lambda g: g * len(log), lambda k, log: functools.partial(torch.mul, k),
])  # fmt: skip
def test_a_hook_sees_what_it_closes_over_in_this_call(hook):
    def f(x, k, log):
        y = x * 2
        y.register_hook(hook(k, log))
        return y.sin()

    compiled = kiln.compile(f)
    for k in (1, 2, 5):
        mine, eager = [], []
        for called, log in ((compiled, mine), (f, eager)):
            x = torch.ones(3, requires_grad=True)
            called(x, k, log).sum().backward()
            log.append(x.grad)
        torch.testing.assert_close(mine, eager)


def test_result_tensor_that_an_elementwise_op_resizes_has_its_new_size():
    def f(x):
        out = torch.empty(0)
        torch.sigmoid(x, out=out)
        return out * 2, tuple(out.size()), out.numel()

    pin(same_as_eager(f, torch.zeros(3, 5)), graphs=2, breaks=1)


@pytest.mark.parametrize("early", [True, False], ids=["before the write", "after it"])
def test_the_dict_of_a_class_shows_what_was_written_to_it(early):
    def f(x):
        class Local:
            scale = 4

        space = Local.__dict__ if early else None
        y = x.sin() * dict(Local.__dict__)["scale"]
        Local.bias = 3
        return Local, y + (Local.__dict__ if space is None else space)["bias"]

    kiln.reset()
    x = torch.randn(4)
    made, found = kiln.compile(f)(x)
    torch.testing.assert_close(found, f(x)[1])
    assert made.bias == 3


def test_a_generator_dies_with_its_variable_after_an_exception_was_thrown_into_it():
    def steps(x, log):
        try:
            yield x.sin()
        except RuntimeError:
            yield x.tan()
        finally:
            log.append("closed")

    def f(x, log):
        generator = steps(x, log)
        return next(generator) + generator.throw(RuntimeError)

    one_graph(f, X, [])


def test_limits_of_numpy_types_are_read():
    def f(x, kind):
        return x + numpy.iinfo(kind).max, x * float(numpy.finfo(numpy.float32).eps)

    one_graph(f, torch.zeros(3, dtype=torch.int64), numpy.dtype("int16"))


class Pair:
    def __init__(self, x):
        self.first, self.others = x, [{"a": x * 2}]


class Bundle(dict):
    pass


@kiln.allow_in_graph
def taken_apart(pair, table):
    return pair.first + pair.others[0]["a"] + table[1, "b"]


@kiln.allow_in_graph
def looked_up(bundle):
    return bundle["a"] + 1


@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_objects_made_here_with_tensors_in_them_are_given_to_nodes(backend):
    how = How(backend=backend)
    one_graph(lambda x: taken_apart(Pair(x), {(1, "b"): x.sin()}), t(3, grad=True), how=how)
    pin(same_as_eager(lambda x: looked_up(Bundle(a=x * 2)), X, how=how), graphs=1, breaks=1)


def test_an_address_that_meets_a_number_from_elsewhere_is_that_of_the_object_itself():
    def f(x, thing, numbers, number):
        if id(thing) in numbers:
            x = x + 1
        return x * 2 if number == id(thing) else x * 3

    kiln.reset()
    compiled, x, first, second, row = kiln.compile(f), t(3), Row(), Row(), [1, 2]
    for thing in (first, second, x, row):
        for numbers in ({id(first): 1, id(x): 2}, {id(second)}, [id(row)], {}):
            for number in (id(first), id(thing)):
                args = x, thing, numbers, number
                torch.testing.assert_close(compiled(*args), f(*args), rtol=0, atol=0)


@program(X)
def test_dict_of_an_object_whose_keys_are_an_attribute(x):
    class Mapping:
        def __init__(self):
            self.keys = lambda: ["a", "b"]

        def __getitem__(self, key):
            return x + len(key)

    return dict(Mapping(), c=x)


@program(X)
def test_ordered_dict_emptied_as_a_dict(x):
    d = collections.OrderedDict(a=x, b=1)
    dict.clear(d)
    return x.sin(), d == {}, len(d), {1: d} == {1: {}}, f"{d == {}}"


class Hooked:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class HookedTensor(torch.Tensor):
    __torch_function__ = Hooked.__torch_function__  # asks for itself again and again


def test_hooks_of_torch_functions_are_told_of_as_they_are():
    def f(x):
        has = torch.overrides.has_torch_function_unary(x)
        with torch._C.DisableTorchFunctionSubclass():
            with torch._C.DisableTorchFunctionSubclass():
                has = has, torch.overrides.has_torch_function_variadic(x)
            return has, torch._C._is_torch_function_enabled()

    kiln.reset()
    compiled = kiln.compile(f)
    with torch._C.DisableTorchFunctionSubclass():
        hooked = HookedTensor()
    for x in (Hooked(), hooked, 4, X):  # each but the first is told why the entries before it do not fit
        assert compiled(x) == f(x)


def scaled(grad, k):
    return grad * k


class Scaling:
    def __init__(self, k):
        self.k = k

    def __call__(self, grad):
        return grad * self.k

    def method(self, grad):
        return grad * self.k


HOOKS = {
    "partial": lambda k: functools.partial(scaled, k=k),
    "closure": lambda k: lambda grad: grad * k,
    "object": Scaling,
    "method": lambda k: Scaling(k).method,
}
HELD = types.SimpleNamespace()


@needs_kiln
@pytest.mark.parametrize("make", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("given", [False, True], ids=["held", "given"])
def test_another_hook_is_seen_where_the_last_one_was(make, given):
    def f(x, hook):
        y = x * 2
        y.register_hook(hook if given else HELD.hook)
        return y * 3

    kiln.reset()
    graphs = []
    compiled = kiln.compile(f, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    for k in (1, 1, 2, 3):
        hook = HELD.hook = make(k) if k != 1 or not graphs else hook
        x = torch.ones(2, requires_grad=True)
        compiled(x, hook).sum().backward()
        assert x.grad.tolist() == [6 * k] * 2
    assert given or len(graphs) == 3  # the same one needs no other graph


@pytest.mark.parametrize("call", [torch._foreach_add, torch._foreach_maximum_], ids=["gives", "writes"])
def test_lists_of_no_tensors_are_refused_as_eager_does(call):
    def f(x, some, others):
        try:
            call(some, others)
        except RuntimeError as error:
            return x * 2, str(error)

    one_graph(f, X, [], [])
    one_graph(f, X, [t(1)], [])


def test_nests_of_fx_are_walked():
    def f(x, nest):
        made = torch.fx.immutable_collections.immutable_list(nest)
        try:
            made.append(x)
        except TypeError:
            x = x + 1
        return torch.fx.node.map_aggregate((made, {"a": x}), lambda v: v * 2), torch.fx.node.map_arg(nest, list), x

    one_graph(f, X, [X, [t(2), (t(1),)]])


class Noting:
    __class_getitem__ = classmethod(types.GenericAlias)

    def __init__(self, value):
        self.value = value


def test_classes_of_something_are_called():
    def f(x):
        made = Noting[int](x + 1)
        return made, made.__orig_class__ == Noting[int], dict[str, int](a=x * 2), list[int]((1, 2)), tuple[int, ...]([x])

    one_graph(f, X)


def test_whether_checkpoints_are_valid_is_asked():
    one_graph(lambda x: x + 1 if torch.autograd._is_checkpoint_valid() else x - 1, X)


def test_links_of_an_exception_that_is_given_are_written():
    def f(x, error):
        error.__cause__ = ValueError(1)
        error.__context__ = KeyError(2)
        return x + 1, error, error.__suppress_context__, type(error.__cause__)

    def links(f):
        error = TypeError(3)
        f(X, error)
        return repr(error.__cause__), repr(error.__context__), error.__suppress_context__

    one_graph(f, X, TypeError(3))
    assert EAGER or links(f) == links(kiln.compile(f, backend="eager", fullgraph=True))


def test_no_exception_is_caused_by_a_number():
    def f(x, error):
        try:
            error.__cause__ = 2
        except TypeError as wrong:
            return x + 1, str(wrong)

    one_graph(f, X, TypeError(3))


class Paired(list):
    def append(self, item):
        super().append((item, 1))


class Doubled(dict):
    def __setitem__(self, key, item):
        super().__setitem__(key, (item, 2))


class Tagged(collections.OrderedDict):
    def __init__(self, *items):
        super().__init__(*items)
        self.tag = "made"


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize(("kind", "items"), [(Bag, [1, 2]), (Paired, [1, [2]]), (Doubled, {1: [2]}), (Tagged, {1: X})])
def test_containers_of_a_class_of_its_own_are_copied(kind, items, how):
    def f(x, given):
        made = kind(items)
        made.inner = [made]
        again, other = how(made), how(given)
        kept = again.inner is made.inner, again.inner[0] is again, other.note is given.note
        return x + len(again), other, other.note, list(other), kept, again.inner[0] is made

    def one():
        one = kind(items)
        one.note = [3]
        return one

    one_graph(f, X, one())


class Doubling(list):
    def __init__(self, items):
        kiln.graph_break()
        super().__init__(items)

    def append(self, item):
        hidden = super().append
        kiln.graph_break()
        hidden(item * 2)


class Counting(collections.OrderedDict):
    def length(self):
        hidden = super(collections.OrderedDict, self).__len__
        kiln.graph_break()
        return hidden()


def methods_that_others_hide_across_breaks(x):
    items = Doubling([x + 1])
    items.append(x)
    named = items.extend
    kiln.graph_break()
    named([x])
    return list(items), Counting(a=x).length()


def test_methods_that_others_hide_across_breaks():
    same_as_eager(methods_that_others_hide_across_breaks, X)


# ------------------------------------------------------------------------------- the larger of two tensors

WHOLE = How(options={"fullgraph": True})


def larger_returned(x):
    return max(x.sum(), (x * 2).sum()), min([x.mean(), x.sum(), x.sum() - 1]), x + 1


def larger_written(x):
    a, b = x.sum(), (x * 2).sum()
    max(a, b).add_(1)
    return a + b


def larger_of_written(x):
    a, b = x.sum(), (x * 2).sum()
    most = min(a, b)
    a.add_(100)
    return most * 2


def larger_written_without_history(x):
    with torch.inference_mode():
        a, b = x.sum(), (x * 2).sum()
        max(a, b).add_(1)
        return a + b


def larger_identified(x):
    a, b = x.sum(), (x * 2).sum()
    most = max(a, b)
    return most is a, most is b, most + 1


def larger_of_inputs(x):
    return max(x[0], x[2])


def larger_and_one_of_both(x):
    a = x.sum()
    return max(a, (x * 2).sum()), a


def test_the_larger_of_two_tensors_is_what_a_whole_graph_gives():
    one_graph(larger_returned, X, how=WHOLE)


TOLD_APART = [
    larger_written, larger_of_written, larger_written_without_history, larger_identified, larger_of_inputs,
    larger_and_one_of_both,
]  # fmt: skip


@pytest.mark.parametrize("f", TOLD_APART)
def test_the_larger_of_two_tensors_is_one_of_them(f):
    r = same_as_eager(f, X)
    assert EAGER or r.found[0].kind == "branch-on-tensor"
    if not EAGER:
        with pytest.raises(kiln.Break, match="branch-on-tensor"):
            kiln.compile(f, backend="eager", fullgraph=True)(X)


# ------------------------------------------------------------------------------------- settings of torch's

SETTINGS = {
    "threads": (torch.get_num_threads, torch.set_num_threads, (1, 2)),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, ("highest", "high")),
    "warnings": (torch.is_warn_always_enabled, torch.set_warn_always, (False, True)),
    "anomaly": (torch.is_anomaly_enabled, torch._C.set_anomaly_enabled, (False, True)),
    "fill": (
        torch._C._get_deterministic_fill_uninitialized_memory,
        torch._C._set_deterministic_fill_uninitialized_memory, (True, False),
    ),
    "kernels": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, (True, False)),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_read_are_guarded(name):
    read, write, values = SETTINGS[name]

    def f(x):
        return x + 1, read()

    before, w = read(), Watch(f)
    try:
        for value in (*values, *values):
            write(value)
            assert w(X)[1] == value
    finally:
        write(before)
    assert EAGER or len(w.backend.modules) == 2 and not w.breaks


def test_whether_a_profiler_runs_is_guarded():
    def f(x):
        return x + 1 if torch.autograd._profiler_enabled() else x - 1

    w = Watch(f)
    w(X)
    with torch.autograd.profiler.profile():
        w(X)
    w(X)
    assert EAGER or len(w.backend.modules) == 2 and not w.breaks


@needs_kiln
def test_functions_of_other_extensions_break(monkeypatch):
    native = torch._C._autograd._saved_tensors_hooks_is_enabled  # made by bindings of C++, as others' are
    monkeypatch.setattr(native, "__module__", "extension")

    def f(x):
        return x + torch._C._autograd._saved_tensors_hooks_is_enabled()

    r = same_as_eager(f, X)
    assert [b.kind for b in r.found] == ["native-call"]


# ------------------------------------------------------------------------------------------- lazy modules


class Lazy(torch.nn.modules.lazy.LazyModuleMixin, torch.nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner

    def initialize_parameters(self, x):
        with torch.no_grad():
            if self.inner is None:
                self.inner = Lazy(torch.nn.Identity())
            else:
                self.w = torch.nn.Parameter(torch.full(x.shape, 0.5))

    def forward(self, x):
        return self.inner(x) + (self.w if hasattr(self, "w") else 1)


def test_a_lazy_module_makes_a_lazy_module():
    module = Lazy()
    out = kiln.compile(module, backend="eager", fullgraph=not EAGER)(X)
    assert torch.equal(out, X + 1.5) and torch.equal(out, module(X))
    assert isinstance(module.inner.w, torch.nn.Parameter)


@needs_kiln
def test_functions_of_torchs_own_extensions_break():
    def f(x):
        return x + torch._C._dynamo.eval_frame.unsupported(x, x * 2)

    r = same_as_eager(f, X)
    assert [b.kind for b in r.found] == ["native-call"]
