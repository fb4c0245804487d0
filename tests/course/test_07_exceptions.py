"""Exceptions: raise, try/except/else/finally, chaining, custom classes, reraise, errors of torch ops with eager's text.

PYTEST_DONT_REWRITE: the programs hold assert statements of their own.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support import one_graph, pin, program, same_as_eager, t

X = t(3, 4)
G = t(3, 4, grad=True)


class AppError(Exception):
    pass


class CodedError(AppError):
    def __init__(self, code, detail=None):
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail

    def __str__(self):
        return f"<{self.code}>"


class ShapeError(AppError, ValueError):
    hint = "reshape it"


def fail(kind=ValueError, *args):
    raise kind(*args)


@program(G)
def test_try_except(x):
    try:
        x = x + 1
        raise ValueError("a", 2)
    except ValueError as e:
        x = x * len(e.args)
    return x


@program(X, 0)
@program(X, 1)
@program(X, 2)
@program(X, 3)
@program(X, 4)
def test_handler_is_chosen_by_class(x, n):
    try:
        if n == 0:
            raise KeyError("k")
        if n == 1:
            raise ShapeError("s")
        if n == 2:
            raise CodedError(7)
        if n == 3:
            fail(ZeroDivisionError, "z")
    except (KeyError, IndexError) as e:
        return x + 1, repr(e)
    except ValueError as e:
        return x + 2, str(e), e.hint
    except AppError as e:
        return x + 3, str(e), e.code
    except Exception as e:
        return x + 4, type(e).__name__
    else:
        return x + 5, "else"


@program(X, True)
@program(X, False)
def test_else_and_finally(x, bad):
    log = []
    try:
        log.append("try")
        if bad:
            raise ValueError
    except ValueError:
        log.append("except")
    else:
        log.append("else")
    finally:
        log.append("finally")
    return x * len(log), log


@program(X)
def test_finally_runs_on_return_break_and_continue(x):
    log = []

    def inner():
        for i in range(4):
            try:
                if i == 0:
                    continue
                if i == 2:
                    break
                log.append(i)
            finally:
                log.append(f"f{i}")
        try:
            return x + 1
        finally:
            log.append("ret")

    return inner(), log


@program(X)
def test_return_in_finally_wins(x):
    def inner():
        try:
            raise ValueError("lost")
        finally:
            return x + 1  # noqa: B012

    return inner()


@program(X)
def test_nested_handlers(x):
    log = []
    try:
        try:
            try:
                raise KeyError("inner")
            except ValueError:
                log.append("never")
            finally:
                log.append("f1")
        except KeyError as e:
            log.append(e.args[0])
            raise ValueError("outer") from e
    except ValueError as e:
        log.append(type(e.__cause__).__name__)
    return x + len(log), log


@program(X)
def test_exception_in_a_handler_and_in_finally(x):
    out = []
    try:
        try:
            raise KeyError("a")
        except KeyError:
            {}["b"]
    except KeyError as e:
        out.append((e.args, e.__context__.args, e.__cause__))
    try:
        try:
            raise KeyError("a")
        finally:
            fail(ValueError, "from finally")
    except ValueError as e:
        out.append((str(e), repr(e.__context__)))
    return x + 1, out


@program(X)
def test_bare_raise(x):
    log = []
    try:
        try:
            raise AppError("x")
        except AppError:
            log.append("seen")
            raise
    except AppError as e:
        return x + 1, log, e.args, e.__context__


@program(X)
def test_reraise_from_an_inlined_call(x):
    def again():
        raise

    try:
        try:
            fail(AppError, "deep")
        except AppError:
            again()
    except AppError as e:
        return x + 1, str(e)


@program(X)
def test_bare_raise_without_an_exception(x):
    try:
        raise
    except RuntimeError as e:
        return x + 1, str(e)


@program(X)
def test_raise_from(x):
    out = []
    for cause in (KeyError("c"), None):
        try:
            try:
                raise IndexError("i")
            except IndexError:
                raise AppError("a") from cause
        except AppError as e:
            out.append((repr(e.__cause__), e.__suppress_context__, repr(e.__context__)))
    return x + 1, out


@program(X)
def test_exceptions_as_values(x):
    e = CodedError(3, detail=x + 1)
    try:
        raise e
    except AppError as caught:
        return caught is e, caught.detail, caught.code, isinstance(caught, Exception), str(e)


@program(X)
def test_exception_classes_made_inside(x):
    class Local(AppError):
        n = 4

    try:
        raise Local
    except AppError as e:
        return x * e.n, type(e).__name__


@program(X)
def test_name_of_the_exception_is_unbound_after(x):
    e = 1
    try:
        raise ValueError
    except ValueError as e:
        pass
    try:
        e
    except UnboundLocalError as err:
        return x + 1, str(err)


@program(X)
def test_exceptions_through_several_frames(x):
    log = []

    def a(y):
        try:
            return b(y + 1)
        finally:
            log.append("a")

    def b(y):
        try:
            return c(y * 2)
        except KeyError:
            log.append("b")
            raise
        finally:
            log.append("b finally")

    def c(y):
        fail(KeyError, "deep")

    try:
        a(x)
    except LookupError as e:
        return x + len(log), log, e.args


@program(X)
def test_exceptions_in_loops(x):
    bad = []
    for i, v in enumerate([1, "a", None, 4]):
        try:
            x = x + (v + 1)
        except TypeError as e:
            bad.append((i, str(e)))
    return x, bad


@program(X)
def test_retry_loop(x):
    tries = 0
    while True:
        try:
            tries += 1
            if tries < 3:
                raise ConnectionError(tries)
            return x * tries
        except ConnectionError as e:
            x = x + e.args[0]


@program(X)
def test_exception_group(x):
    try:
        raise ExceptionGroup("g", [ValueError(1), KeyError("k")])
    except* ValueError as eg:
        x = x + len(eg.exceptions)
    except* KeyError:
        x = x * 2
    return x


@program(X)
def test_notes_and_attributes(x):
    try:
        e = ValueError("v")
        e.add_note("look here")
        e.extra = 5
        raise e
    except ValueError as caught:
        return x * caught.extra, caught.__notes__


@program(X)
def test_stop_iteration_and_generator_exit(x):
    try:
        next(iter(()))
    except StopIteration as e:
        return x + 1, e.value


EXPRESSIONS = """
1 / 0
[][0]
{}["k"]
int("x")
None + 1
"a" + 1
None.real
x.no_such_attribute
len(3)
(1, 2) < 3
object() < object()
"abc".index("z")
next(iter([]))
[1, 2].remove(3)
float("nope")
undefined_name
"{}".format()
"%d" % "s"
max([])
[].pop()
range("a")
getattr(x, "nothing")
isinstance(1, 2)
abs("a")
fail(CodedError, 4)
fail(KeyboardInterrupt) if False else fail(OSError, 2, "No such file")
"""


@pytest.mark.parametrize("text", EXPRESSIONS.strip().splitlines())
def test_errors_of_python(text):
    scope = {"fail": fail, "CodedError": CodedError}
    caught = f"def f(x):\n  y = x + 1\n  try:\n    {text}\n  except Exception as e:\n    return y, type(e), str(e), e.args"
    exec(caught, scope)
    one_graph(scope["f"], X)
    exec(f"def g(x):\n  y = x + 1\n  {text}\n  return y", scope)
    r = same_as_eager(scope["g"], X)
    assert r.raised is not None
    pin(r)


TORCH_ERRORS = """
x @ x
x + torch.ones(5)
x.view(5, 5)
x.reshape(7)
torch.cat([x, torch.ones(2, 2)])
torch.stack([x, x[0]])
x[5]
x[:, 9]
x[0, 0, 0]
x.sum(5)
x.transpose(0, 7)
x.permute(0)
x.squeeze(3)
x.expand(2, 2)
torch.zeros(-1)
F.linear(x, torch.ones(2, 3))
F.conv2d(x, torch.ones(1, 1, 3, 3))
torch.bmm(x, x)
x.split(0)
x.split([1, 5])
x.chunk(0)
x.long() @ x
torch.einsum("ij,kj->q", x, x)
torch.nn.Linear(3, 2)(x)
x.to("nonsense")
x.gather(1, torch.zeros(3, 4))
torch.where(x, x, x, x)
torch.add(x)
x.add()
torch.softmax(x, 4)
torch.tensor([[1], [1, 2]])
x.requires_grad_("yes")
F.cross_entropy(x, torch.zeros(2, dtype=torch.long))
F.layer_norm(x, (5,))
F.embedding(x, x)
x.unsqueeze(5)
x.narrow(0, 2, 5)
x.bool().sub_(True)
torch.arange(0, 1, -1)
x.view(torch.int64).view(3, 3, 3)
torch.addmm(x, x, x)
x.flip(3)
x.unflatten(1, (3, 3))
x.unfold(0, 9, 1)
torch.ones(2).add_(torch.ones(3))
x.long().add_(0.5)
"""


@pytest.mark.parametrize("text", TORCH_ERRORS.strip().splitlines())
def test_errors_of_torch(text):
    scope = {"torch": torch, "F": F}
    exec(f"def f(x):\n  y = x * 2\n  try:\n    {text}\n  except Exception as e:\n    return y, type(e), str(e)", scope)
    one_graph(scope["f"], X)
    exec(f"def g(x):\n  y = x * 2\n  return y, {text}", scope)
    r = same_as_eager(scope["g"], X)
    assert r.raised is not None
    pin(r)


@program(G, raises=AppError)
def test_raise_leaves_the_function(x):
    y = x + 1
    raise AppError("out", y.shape)


@program(X, raises=CodedError)
def test_custom_exception_leaves_with_its_state(x):
    raise CodedError(5, detail={"x": x + 1})


@program(X, raises=AppError)
def test_chained_exception_leaves(x):
    try:
        fail(KeyError, "k")
    except KeyError as e:
        raise AppError("outer") from e


@program(X, raises=ValueError)
def test_context_is_kept_when_leaving_from_a_handler(x):
    try:
        {}["k"]
    except KeyError:
        raise ValueError("v")  # noqa: B904


@program(X, raises=AppError)
def test_in_place_work_before_the_raise_is_done(x):
    x.add_(1)
    x[0] = 7
    raise AppError


@program(X, [], raises=AppError)
def test_writes_before_the_raise_are_done(x, log):
    log.append("before")
    log.append(x * 2)
    try:
        fail(AppError, "a")
    finally:
        log.append("finally")


@program(X, raises=AssertionError)
def test_assertion_error(x):
    assert x.shape[0] == 4, ("shape", x.shape)


@program(X, raises=StopIteration)
def test_stop_iteration_leaves(x):
    return x + next(iter([]))


@program(X, raises=NotImplementedError)
def test_abstract_forward(x):
    return torch.nn.Module()(x)


@program(X, raises=RecursionError)
def test_endless_recursion(x):
    def down(n):
        return down(n + 1)

    try:
        down(0)
    except RecursionError:
        raise RecursionError("too deep") from None


@program(X)
def test_exception_raised_by_special_methods(x):
    class Bad:
        def __getattr__(self, name):
            raise AppError(name)

        def __len__(self):
            return -1

        def __bool__(self):
            return "no"

        def __iter__(self):
            return 3

        def __eq__(self, other):
            fail(AppError, "eq")

    out = []
    for call in (lambda b: b.attr, len, bool, list, lambda b: b == 1, lambda b: b[0], lambda b: b(), lambda b: b + 1,
                 lambda b: getattr(b, "q", 1), lambda b: 1 in b):  # fmt: skip
        try:
            call(Bad())
        except Exception as e:
            out.append((type(e).__name__, str(e)))
    return x + 1, out


@program(X)
def test_sys_exc_info(x):
    import sys

    before = sys.exc_info()
    try:
        fail(ValueError, "v")
    except ValueError:
        kind, error, _ = sys.exc_info()
    return x + 1, before, kind, error.args, sys.exc_info()


@program(X)
def test_traceback_is_cut_from_results(x):
    try:
        fail(ValueError, "kept")
    except ValueError as e:
        kept = e
    return x + 1, kept.args, kept.with_traceback(None).__traceback__
