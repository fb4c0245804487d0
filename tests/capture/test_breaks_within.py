"""Breaks inside every construct: whatever is on the stack and in the frames around it, the results are those of eager."""

from __future__ import annotations

import contextlib
import functools
import sys

import pytest
import torch

from kiln.base import records
from kiln.generate.nvptx import ptx
from tests.support import EAGER, How, kiln, same_as_eager, t

X = t(3, 4)
G = t(3, 4, grad=True)
COUNT = [0]


def cut(value=None):
    """The value, after a break."""
    kiln.graph_break()
    return value


class Counted:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        cut()
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n


class Cutting:
    """Breaks in every special method."""

    def __init__(self, v):
        self.v = v

    def __add__(self, o):
        return cut(Cutting(self.v + o))

    def __getitem__(self, i):
        return cut(self.v[i])

    def __contains__(self, i):
        return cut(True)

    def __len__(self):
        return cut(3)

    def __bool__(self):
        return cut(False)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cut(5)

    def __eq__(self, o):
        return cut(True)

    def __call__(self, *a):
        return cut(self.v * len(a))

    def __enter__(self):
        return cut(self)

    def __exit__(self, *e):
        return cut(True)

    def __setattr__(self, name, v):
        object.__setattr__(self, name, cut(v))


class Descriptor:
    def __get__(self, o, kind=None):
        return cut(4)

    def __set__(self, o, v):
        o.__dict__["_d"] = cut(v)


class Described:
    d = Descriptor()


def comprehensions(x):
    return [cut(x * i) for i in range(3)], {k: cut(x * i) for i, k in enumerate("ab")}, {cut(i) for i in range(2)}


def generator_expression(x):
    return sum(cut(x * i) for i in range(3))


def callbacks(x):
    best = sorted([3, 1, 2], key=lambda v: cut(-v))
    return best, list(map(lambda v: cut(x * v), [1, 2])), functools.reduce(lambda a, b: cut(a + b), [x, x, x])


def iterator_protocol(x):
    return [x * v for v in Counted(3)]


def special_methods(x):
    o = Cutting(x)
    o = o + 1
    r = [o[0], 3 in o, len(o), bool(o), o.anything, o == 3, o(1, 2)]
    o.q = 7
    with o as p:
        r.append(p.v * 2)
        raise KeyError
    if o:
        r.append("yes")
    return r, o.q


def descriptors(x):
    h = Described()
    a = h.d
    h.d = x + a
    return h._d + h.d


def decorators(x):
    def deco(f):
        cut()

        @functools.wraps(f)
        def w(*a):
            return cut(f(*a)) + 1

        return w

    @deco
    def g(y):
        return cut(y) * 2

    return g(x)


def loop_with_try_and_finally(x):
    i = 0
    while True:
        i += 1
        try:
            if i == 2:
                continue
            if i == 4:
                break
            x = cut(x + i)
        finally:
            x = cut(x * 2)
    else:
        x = x * 100
    return x, i


def nested_loops_with_handlers(x):
    for i in range(2):
        for j in range(2):
            with torch.no_grad():
                try:
                    cut()
                    if i == j:
                        raise ValueError(i)
                    x = x + j
                except ValueError as e:
                    x = cut(x) * (e.args[0] + 2)
    return x


def nonlocal_names(x):
    a = 1

    def f():
        nonlocal a
        a += 1
        cut()
        a += 10
        return a

    return x * f() + a, f(), a


def cells_rebound(x):
    def f():
        return a

    a = 1
    cut()
    a = 2
    r = f()
    cut()
    a = 3
    return x * r, f(), a


def deleted_and_unbound_names(x):
    kept = x
    del x
    cut()
    try:
        x  # noqa: B018
    except UnboundLocalError as e:
        message = str(e)
    if kept.sum() > -1000:
        y = kept + 1
    else:
        z = 1
    try:
        z  # noqa: B018
    except UnboundLocalError:
        return y * 2, message


def packed_arguments(x, *args, k=1, **kw):
    cut()
    args = args + (1,)
    kw["q"] = 2
    return cut(x * k), args, kw


def expressions(x):
    a, b = (x, cut(x * 2))
    (c, *d), e = [a, b, b], cut(1)
    return c + d[0] + e, f"{cut(3)}-{e}", x[cut(0)], {"k": cut(x)}, (lambda *p, **q: (cut(), p, q))(x, *[1, 2], **{"z": x + 1})


def conditions(x):
    assert cut(True), "no"
    match cut(x.shape):
        case (3, n) if cut(n > 3):
            x = x * n
    return x + 1 if cut(x.dim() == 2) and not cut(False) else x


def slices(x):
    s = slice(cut(0), 2)
    x = x.clone()
    x[s] = cut(5)
    x[1:] += cut(1)
    return x[s, ::2]


def recursion(x):
    def down(n, y):
        if n == 0:
            return y
        cut()
        return cut(down(n - 1, y + n)) * 2

    return down(3, x)


def iterators(x):
    it, out, d = iter([1, 2, 3]), [], {"a": 1, "b": 2}
    for _ in it:
        cut()
        out.append(next(it, None))
    for k in d:
        d[k] = cut(x) * d[k]
    rest = zip([1, 2], "ab"), enumerate("xy"), reversed([1, 2]), map(lambda v: v * 2, [1, 2])
    cut()
    return out, d, [list(r) for r in rest]


def generators(x):
    def g():
        v = yield 1
        w = yield cut(v + 1)
        try:
            yield w
        finally:
            cut()

    h = g()
    out = next(h), h.send(x), h.send(5)
    h.close()
    return out


def unwinding(x):
    y = x + 1
    try:
        try:
            cut()
            raise KeyError("k")
        finally:
            y = cut(y * 2)
    except KeyError as e:
        y = cut(y + 1)
        message = str(e)
    try:
        e  # noqa: B018, F821
    except UnboundLocalError:
        message += "!"
    return y, message


def handled_exceptions(x):
    try:
        raise KeyError("k")
    except KeyError:
        a = cut(sys.exc_info()[0])
        try:
            raise ValueError("v")
        except ValueError as v:
            b, c = cut(sys.exc_info()[0]), type(v.__context__)
        d = sys.exc_info()[0]
    return x + 1, a, b, c, d, sys.exc_info()[0]


def chained_exceptions(x):
    try:
        try:
            raise KeyError("a")
        except KeyError as e:
            x = cut(x) + 1
            raise ValueError("b") from e
        finally:
            x = x * 2
    except ValueError as v:
        return x, repr(v.__cause__), repr(v.__context__)


def managers(x):
    log = []

    @contextlib.contextmanager
    def noted(n):
        log.append(cut(n))
        try:
            yield x + n
        finally:
            log.append(-n)

    with contextlib.ExitStack() as stack:
        for i in range(2):
            stack.enter_context(contextlib.nullcontext(cut(i)))
        stack.callback(cut)
        x = x + 1
    with contextlib.suppress(KeyError):
        cut()
        {}["a"]
    with noted(1) as a, noted(2) as b:
        return a * b, log


def outside_state(x):
    COUNT[0] += 1
    cut()
    COUNT[0] += 10
    return cut(x * COUNT[0]), COUNT[0]


def views(x):
    y = x.clone()
    v = y.view(-1)
    cut()
    v[0] = 100
    cut()
    y[1] = 5
    return y, v


def gradients_inside(x):
    y = x * 2
    y.retain_grad()
    cut()
    (y * 3).sum().backward()
    return y.grad, x.grad


@torch.no_grad()
def quiet(x):
    return cut(x * 2) * 3, torch.is_grad_enabled()


def modes(x):
    torch.set_grad_enabled(False)
    y = cut(x * 2)
    torch.set_grad_enabled(True)
    cut()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = cut(x @ x.T) @ x
    return y, x * 2, quiet(x), torch.is_grad_enabled(), z, x @ x.T


async def later(x):
    return cut(x + 1)


def coroutines(x):
    try:
        later(x).send(None)
    except StopIteration as stop:
        return stop.value * 2


def closures_of_a_loop(x):
    out = []
    for n in range(3):
        out.append(lambda v: v * n)
        cut()
    return [g(x) for g in out], n


class Twice:
    """Cuts more than once while it is made, and where it is written to."""

    def __init__(self, v):
        cut()
        self.v = v
        cut()
        self.w = [self.v * 2]
        cut()

    @property
    def both(self):
        cut()
        return cut(self.v)

    @both.setter
    def both(self, v):
        cut()
        self.v = v
        cut()
        self.w.append(v)

    def __setitem__(self, key, v):
        cut()
        self.w[key] = v
        cut()


def cut_more_than_once(x):
    made, out = Twice(2), []
    for n in range(2):
        out.append(Twice(x * n))
    made.both = 3
    made[0] = made.both + Twice(4).v
    return made.v, made.w, [(each.v, each.w) for each in out]


PROGRAMS = [
    cut_more_than_once, comprehensions, generator_expression, callbacks, iterator_protocol, special_methods, descriptors, decorators,
    loop_with_try_and_finally, nested_loops_with_handlers, nonlocal_names, cells_rebound, deleted_and_unbound_names, expressions,
    conditions, slices, recursion, iterators, generators, unwinding, handled_exceptions, chained_exceptions, managers, outside_state,
    views, coroutines, closures_of_a_loop,
]  # fmt: skip


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_program(f):
    r = same_as_eager(f, X, how=How(setup=lambda: COUNT.__setitem__(0, 0), state=lambda: COUNT))
    assert r.raised is None
    assert EAGER or "graph-break-called" in {b.kind for b in r.found} or f in (generators, coroutines)


@pytest.mark.parametrize("f", [quiet, modes, gradients_inside], ids=lambda f: f.__name__)
def test_program_with_gradients(f):
    assert same_as_eager(f, G).raised is None


def test_packed_arguments():
    assert same_as_eager(packed_arguments, X, 1, 2, k=3, z=4).raised is None


class Renamed:
    """An object whose attributes go by other names too."""

    names = {"old": "new"}

    def __init__(self, new):
        self.new, self.layers = new, 2

    def __getattribute__(self, key):
        if key != "names" and key in super().__getattribute__("names"):
            key = super().__getattribute__("names")[key]
        return super().__getattribute__(key)


@pytest.mark.skipif(EAGER, reason="compares with eager itself")
def test_the_lookup_of_attributes_in_code_outside_a_graph_is_no_region():
    @kiln.disable(recursive=False)
    def outside(settings, x):
        return x * settings.old + settings.layers

    def f(x, settings):
        return outside(settings, x + 1) + settings.old

    compiled = kiln.compile(f, backend="eager")
    for new in (3, 4, 5, 3):
        settings = Renamed(new)
        assert torch.equal(compiled(torch.ones(3), settings), f(torch.ones(3), settings))


@pytest.mark.skipif(EAGER, reason="looks at regions")
def test_code_that_compiles_while_the_program_runs_is_no_region():
    made = []

    @kiln.disable(recursive=False)
    def outside(x):
        made.append(ptx("define ptx_kernel void @k(ptr %p) {\n  store i32 1, ptr %p\n  ret void\n}", {"k": 32}))
        return doubled(x)

    def doubled(x):
        return x * 2

    def f(x):
        return outside(x + 1) + 1

    compiled = kiln.compile(f, backend="eager")
    with records.collect() as seen:
        for _ in range(3):
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 5.0))
    assert len(set(made)) == 1 and "st.global" in made[0]
    captured = {one.region.rpartition(".")[2] for one in [*seen.graphs, *seen.breaks]}
    assert captured == {"f", "doubled"} and len(seen.breaks) == 1


@pytest.mark.skipif(EAGER, reason="compares with eager itself")
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_an_object_with_a_finalizer_is_made_and_goes_once(breaks, closes):
    events = []

    class File:
        def __init__(self, n):
            self.n, self.open = n, True
            events.append("open")

        def close(self):
            if self.open:
                self.open = False
                events.append(("close", self.n))

        def __del__(self):
            self.close()

    def f(x):
        file = File(3)
        y = x + file.n
        if breaks:
            kiln.graph_break()
        y = y * 2
        if closes:
            file.close()
        return y

    compiled = kiln.compile(f, backend="eager")
    for _ in range(3):
        events.clear()
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 8.0))
        assert events == ["open", ("close", 3)]


LIBRARY = """
def tick(n, table=()):
    print(end="")
    return n + 1

def scaled(x, holder):
    print(end="")
    return x * 2

def made(n):
    print(end="")
    return torch.ones(n)
"""


@pytest.mark.skipif(EAGER, reason="looks at regions")
def test_code_of_libraries_without_tensors_is_no_region():
    """Locks, progress bars and parsers break at every turn, and there is nothing in them to capture."""
    library = {"torch": torch}
    exec(compile(LIBRARY, "/usr/lib/site-packages/library.py", "exec"), library)

    def f(x):
        def each():
            for n in range(3):
                print(end="")
                holder = type("Holder", (), {})()
                holder.parts = [{"x": x}]
                yield library["scaled"](x, None) * library["tick"](n) + library["made"](n + 1).sum()
                library["tick"](1, holder)

        return sum(each())

    with records.collect() as log:
        got = kiln.compile(f, backend="eager")(X)
    assert torch.equal(got, f(X))
    broken = [b.place.function for b in log.breaks]
    assert {"scaled", "made", "tick"} == {*broken} - {f.__qualname__, f"{f.__qualname__}.<locals>.each"}
    assert broken.count("tick") == 1  # that with an object which holds a tensor


class Slowly:
    """What it does breaks again and again."""

    def __init__(self, n, times):
        self.n = n
        for _ in range(times):
            self.step()
        kiln.graph_break()
        self.step()
        kiln.graph_break()
        self.step()

    def step(self):
        self.n = self.n + 1
        kiln.graph_break()

    def __setitem__(self, key, value):
        kiln.graph_break()
        self.n = self.n * key
        kiln.graph_break()
        self.last = value

    def __setattr__(self, name, value):
        kiln.graph_break()
        super().__setattr__(name, value)
        kiln.graph_break()


def test_calls_that_break_more_than_once_give_what_they_are_for():
    class Twice:
        def __init__(self, n):
            kiln.graph_break()
            self.n = n
            kiln.graph_break()
            self.m = n + 1

        def __setitem__(self, key, value):
            kiln.graph_break()
            self.n = self.n * key
            kiln.graph_break()
            self.last = value

    def f(x):
        one = Twice(3)
        one[2] = x + one.m
        pair = [Twice(1), Slowly(1, 2)]
        pair[1][3] = x * 2
        return x + pair[1].n + one.n, one.last, pair[0].m, pair[1].last

    same_as_eager(f, X)


def test_a_generator_that_has_not_started_has_its_cells():
    @contextlib.contextmanager
    def counting(step):
        n = 0

        def seen():
            return n, step

        kiln.graph_break()
        yield seen
        n = n + step
        kiln.graph_break()

    def f(x):
        y = x + 1
        with counting(2) as seen:
            before = seen()
            y = y * seen()[1]
        return y, before, seen()

    same_as_eager(f, X)
