"""Context managers: plain, nested, contextlib, user-defined, exceptions passing through, and torch's global modes.

PYTEST_DONT_REWRITE: the programs hold assert statements of their own.
"""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

from tests.support import How, kiln, one_graph, pin, program, same_as_eager, t

X = t(3, 4)
G = t(3, 4, grad=True)


class Noting:
    """Writes down what happens to it; may swallow an exception."""

    def __init__(self, log, name="c", swallow=False):
        self.log, self.name, self.swallow = log, name, swallow

    def __enter__(self):
        self.log.append(f"enter {self.name}")
        return self

    def __exit__(self, kind, error, trace):
        self.log.append(f"exit {self.name} {kind.__name__ if kind else None} {error}")
        return self.swallow


class Scale:
    current = 1

    def __init__(self, k):
        self.k = k

    def __enter__(self):
        self.before, Scale.current = Scale.current, self.k
        return self.k

    def __exit__(self, *exc):
        Scale.current = self.before


@contextlib.contextmanager
def noting(log, name="g"):
    log.append(f"enter {name}")
    try:
        yield name.upper()
    except ValueError as e:
        log.append(f"saw {e}")
        raise
    finally:
        log.append(f"exit {name}")


@contextlib.contextmanager
def forgiving(log):
    try:
        yield
    except KeyError as e:
        log.append(e.args[0])


@program(G, [])
def test_with(x, log):
    with Noting(log) as c:
        x = x + 1
        assert c.name == "c"
    return x * 2


@program(G, [])
def test_nested_with(x, log):
    with Noting(log, "a") as a, Noting(log, "b"):
        x = x + 1
        with Noting(log, "c"):
            x = x * 2
    return x, a.log is log


@program(X, [])
def test_parenthesised_with(x, log):
    with (
        Noting(log, "a") as a,
        noting(log, "b") as b,
    ):
        return x + len(log), a.name, b


@program(X)
def test_value_set_inside_and_restored(x):
    with Scale(5) as k:
        x = x * Scale.current + k
        with Scale(7):
            x = x * Scale.current
        x = x - Scale.current
    return x, Scale.current


@program(X, [])
def test_return_break_and_continue_from_with(x, log):
    for i in range(5):
        with Noting(log, str(i)):
            if i == 0:
                continue
            if i == 2:
                break
            x = x + i
    with Noting(log, "last"):
        return x, log


@program(X, [])
def test_exception_swallowed(x, log):
    with Noting(log, swallow=True):
        x = x + 1
        raise ValueError("inside")
    return x * 2


@program(X, [])
def test_exception_passes_through_and_is_caught(x, log):
    try:
        with Noting(log, "outer"), noting(log, "inner"):
            x = x + 1
            raise ValueError("inside")
    except ValueError as e:
        log.append(str(e))
    return x * 2


@program(X, [], raises=ValueError)
def test_exception_leaves_the_function(x, log):
    with Noting(log, "a"), noting(log):
        x = x + 1
        raise ValueError("out")


@program(X, [])
def test_contextmanager_functions(x, log):
    with noting(log) as name, forgiving(log):
        x = x + len(name)
        {}["missing"]
    with forgiving(log):
        x = x * 2
    return x


@program(X)
def test_exit_replaces_the_exception(x):
    class Translate:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, tb):
            if kind is KeyError:
                raise RuntimeError("translated") from error

    try:
        with Translate():
            raise KeyError("k")
    except RuntimeError as e:
        return x + 1, str(e), repr(e.__cause__)


@program(X, [])
def test_contextlib_helpers(x, log):
    with contextlib.suppress(ValueError, KeyError):
        x = x + 1
        raise KeyError("gone")
    with contextlib.nullcontext(5) as five:
        x = x * five
    with contextlib.closing(Closable(log)) as c:
        x = x + c.n
    return x


class Closable:
    def __init__(self, log):
        self.log, self.n = log, 3

    def close(self):
        self.log.append("closed")


@program(X, [])
def test_exit_stack(x, log):
    with contextlib.ExitStack() as stack:
        for i in range(3):
            stack.enter_context(Noting(log, str(i)))
        stack.callback(log.append, "callback")
        x = x + len(log)
    return x


@program(X, [])
def test_context_decorator(x, log):
    class Deco(contextlib.ContextDecorator):
        def __enter__(self):
            log.append("in")

        def __exit__(self, *exc):
            log.append("out")

    @Deco()
    def inner(y):
        return y + 1

    return inner(inner(x))


DECORATION: list = []


@noting(DECORATION, "deco")
def decorated_by_contextmanager(x):
    return x * 3


@program(X, how=How(setup=DECORATION.clear, state=lambda: DECORATION))
def test_contextmanager_as_decorator(x):
    return decorated_by_contextmanager(x)


@program(X, [])
def test_manager_object_made_before_and_used_twice(x, log):
    c = Noting(log)
    with c:
        x = x + 1
    with c:
        x = x + 2
    return x


@program(X)
def test_object_without_the_protocol(x):
    try:
        with 3:
            pass
    except TypeError as e:
        return x + 1, str(e)


# The modes of torch.


def state():
    """What a program can see of the modes."""
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.are_deterministic_algorithms_enabled(),
            str(torch.get_default_device()))  # fmt: skip


MODES = {
    "no_grad": lambda: torch.no_grad(),
    "enable_grad": lambda: torch.enable_grad(),
    "set_grad_enabled off": lambda: torch.set_grad_enabled(False),
    "set_grad_enabled on": lambda: torch.set_grad_enabled(True),
    "inference_mode": lambda: torch.inference_mode(),
    "inference_mode off": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "amp.autocast": lambda: torch.amp.autocast("cpu", enabled=True),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "device": lambda: torch.device("cpu"),
    "meta device": lambda: torch.device("meta"),
    "torch.utils deterministic": lambda: deterministic(),
    "default dtype": lambda: default_dtype(torch.float64),
}


@contextlib.contextmanager
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def inside_and_after(mode):
    def run(x):
        y = x * 2
        with mode():
            z = x @ x.T
            made = torch.zeros(2)
            inside = state()
        w = y.sum() * 3
        return z, w, made, inside, state()

    return run


def raising(mode):
    def run(x):
        try:
            with mode():
                y = x * 2
                raise KeyError("k")
        except KeyError:
            pass
        return x * 3, y, state()

    return run


def leaving(mode):
    def run(x):
        with mode():
            x * 2
            raise KeyError("k")

    return run


def returning(mode):
    def run(x):
        with mode():
            return x @ x.T, state()

    return run


def broken(mode):
    def run(x):
        with mode():
            y = x * 2
            kiln.graph_break()
            z = y @ x.T
            inside = state()
        return z.detach() * 2 if z.is_inference() else z * 2, y, inside, state()

    return run


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("shape", [inside_and_after, raising, returning], ids=lambda f: f.__name__)
def test_mode(name, shape):
    one_graph(shape(MODES[name]), G)


@pytest.mark.parametrize("name", MODES)
def test_mode_is_restored_when_the_exception_leaves(name):
    r = same_as_eager(leaving(MODES[name]), G)
    assert type(r.raised) is KeyError
    pin(r)


@pytest.mark.parametrize("name", MODES)
def test_mode_across_a_break(name):
    # What was entered before a break as a native object is left in Python: a second break.
    more = any(k in name for k in ("inference_mode", "device"))
    pin(same_as_eager(broken(MODES[name]), G), graphs=2 + more, breaks=1 + more)


@program(G)
def test_modes_nest(x):
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * 3
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(False):
                c = x @ x.T
        d = x * 4
    return a, b, c, d, torch.is_grad_enabled()


@program(G)
def test_grad_mode_functions_without_with(x):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    a = x * 2
    torch.set_grad_enabled(before)
    return a, x * 3


@program(G)
def test_grad_mode_left_changed(x):
    torch.set_grad_enabled(False)
    return x * 2


@program(X)
def test_default_dtype_left_changed(x):
    torch.set_default_dtype(torch.float64)
    return torch.ones(2) + x[0, 0], torch.tensor(1.5), torch.arange(0.5)


@torch.no_grad()
def quiet(x):
    return x * 2


@torch.inference_mode()
def inferred(x):
    return x * 2


@torch.enable_grad()
def loud(x):
    return x * 2


@program(G)
def test_mode_decorators(x):
    with torch.no_grad():
        b = loud(x)
    return quiet(x), b, inferred(x) * 1 if False else quiet(x) + x


def test_mode_decorators_on_the_entry():
    one_graph(quiet, G)
    one_graph(inferred, X)


@program(G)
def test_mode_decorator_made_inside(x):
    @torch.no_grad()
    def inner(y):
        return y * 2

    return inner(x), x * 2


@program(G)
def test_autocast_decides_dtypes(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = x @ x.T
        b = torch.nn.functional.linear(x, x)
        c = a + 1
        with torch.autocast("cpu", enabled=False):
            d = x @ x.T
        e = torch.softmax(b, -1)
    return a, b, c, d, e, [v.dtype for v in (a, b, c, d, e)]


def test_calls_inside_modes_of_the_caller():
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode():
            one_graph(lambda x: (x @ x.T, state()), X)


@program(X)
def test_device_context_directs_factories(x):
    with torch.device("meta"):
        m = torch.empty(3)
        n = torch.ones(2, device="cpu")
    return x + 1, m.device, n, torch.zeros(1).device, torch.full((2,), 3.0)


@program(X, graphs=2, breaks=3)
def test_rng_fork(x):
    with torch.random.fork_rng():
        a = torch.rand(3)
    return x + 1, a, torch.rand(2)


@program(G)
def test_saved_tensor_hooks_and_profiler_ranges(x):
    with torch.autograd.profiler.record_function("mine"):
        y = x * 2
    with torch.profiler.record_function("yours"):
        return (y * x).sum()


@program(G)
def test_sdpa_kernel_choice(x):
    q = x.reshape(1, 3, 4)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)


def test_mode_after_an_op_that_raises_behind_a_break():
    def f(x):
        v = x.view(-1)
        with torch.no_grad():
            kiln.graph_break()
        v[0] += 1
        return v

    assert type(same_as_eager(f, G).raised) is RuntimeError


def test_function_mode_entered_inside_is_obeyed():
    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.sin else out

    def f(x):
        with Doubling():
            y = torch.sin(x)
        return y + torch.sin(x)

    same_as_eager(f, X)


@program(X, [])
def test_context_in_a_loop(x, log):
    for i in range(3):
        with torch.no_grad(), Noting(log, str(i)):
            x = x + i
    return x


@program(X, [])
def test_try_finally_inside_with(x, log):
    with Noting(log):
        try:
            x = x + 1
            with Noting(log, "in", swallow=True):
                raise RuntimeError("r")
        finally:
            log.append("finally")
    return x


@program(G, how=How(setup=lambda: torch.set_grad_enabled(True)))
def test_generator_context_with_return_inside(x):
    def gen():
        with torch.no_grad():
            yield x * 2
            yield x * 3

    return list(gen()), x * 4, torch.is_grad_enabled()


@program(G, breaks=2, how=How(backend=""))  # backends that differentiate have the hooks on what their graphs save
def test_hooks_on_saved_tensors_that_the_program_sets(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda packed: packed):
        y = x.sin() * x
    return y


def test_filters_of_warnings_hold_behind_a_break():
    def f(x):
        y = x + 1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="no more")
            kiln.graph_break()
            warnings.warn("no more", FutureWarning, stacklevel=2)
            return y * 2

    assert same_as_eager(f, t(3)).graphs == 2


@pytest.mark.filterwarnings("default:no more")
def test_filters_of_warnings_that_are_set_for_good():
    def f(x):
        y = x + 1
        warnings.filterwarnings("ignore", message="no more")
        warnings.warn("no more", FutureWarning, stacklevel=2)
        return y * 2

    compiled = kiln.compile(f, backend="eager")
    for _ in range(2):
        with warnings.catch_warnings(), kiln.records() as told:
            before = len(warnings.filters)
            assert compiled(torch.ones(2)).tolist() == [4, 4]
            assert len(warnings.filters) == before + 1
    assert not told.graphs and not told.recompiles
