"""Protocols to the letter: which special method is asked first, who is asked again, what errors say, what is done once.

PYTEST_DONT_REWRITE: the programs hold assert statements of their own.
"""

from __future__ import annotations

import sys
import traceback

import pytest

from tests.support import How, one_graph, program, same_as_eager, t

X = t(3, 4)
LOG: list = []
LOGGED = How(setup=LOG.clear, state=lambda: list(LOG))


def attempt(f):
    """What a call gives, or the kind and text of what it raises."""
    try:
        return f()
    except Exception as e:
        return type(e).__name__, str(e)


def noted(function):
    """A special method that notes its class, its name and whose it is."""

    def method(self, *args):
        LOG.append((type(self).__name__, function.__name__, self.name))
        return function(self, *args)

    return method


class Left:
    def __init__(self, name=""):
        self.name = name

    @noted
    def __add__(self, other):
        return NotImplemented

    @noted
    def __radd__(self, other):
        return "radd"

    @noted
    def __eq__(self, other):
        return NotImplemented

    @noted
    def __lt__(self, other):
        return NotImplemented

    @noted
    def __pow__(self, other):
        return NotImplemented

    @noted
    def __repr__(self):
        return f"<{self.name}>"

    @noted
    def __hash__(self):
        return hash(self.name)


class Same(Left):
    """Inherits all: it is not asked first."""


class Own(Left):
    @noted
    def __radd__(self, other):
        return "own radd"


class Blocked(Left):
    __eq__ = None
    __bool__ = None
    __add__ = None
    __contains__ = None
    __iter__ = None
    __hash__ = None


class Handed:
    """Special methods that are no functions of the class."""

    class Call:
        def __call__(self, *args):
            LOG.append(("Call", len(args)))
            return 7

    __add__ = __len__ = __index__ = __getitem__ = Call()
    __radd__ = __eq__ = __lt__ = staticmethod(lambda *args: LOG.append(("static", len(args))) or True)


OPERATIONS = """
a + a
a + Same("b")
a + Own("b")
5 + a
[1] + a
"x" + a
a ** 2
a == Same("b")
a != Same("b")
a != 5
Same("b") < a
a < Same("b")
[a] == [Same("b")]
(a, 1) != (Left("a"), 1)
{"k": a} == {"k": Left("c")}
a in [1, a, 2], a in (Left("q"),)
[Left("p"), a].index(a), [Left("p"), a].count(a)
sorted([Left("p"), a], key=lambda one: one.name)
sorted([Left("p"), a])
max(a, Left("p"))
repr([a, a]), str((a,)), f"{[a]}"
Blocked() == 1
1 == Blocked()
Blocked() + 1
bool(Blocked())
1 in Blocked()
list(Blocked())
hash(Blocked())
{Blocked(): 1}
Handed() + 1, 1 + Handed(), Handed() == 2, Handed() < 2, len(Handed()), [*range(9)][Handed()], Handed()[1]
"""


@pytest.mark.parametrize("text", OPERATIONS.strip().splitlines())
def test_special_methods_are_asked_in_order_and_once(text):
    scope = {**globals(), "attempt": attempt}
    one_graph(eval(f"lambda x, a: (x * 2, attempt(lambda: ({text})))", scope), X, Left("a"), how=LOGGED)


def test_what_holds_itself():
    def f(x):
        items = [1]
        items.append(items)
        table = {"k": items}
        table["self"] = table
        return x * 2, repr(items), str(table), items in [table, items]

    one_graph(f, X)


def fail(kind=ValueError, *args):
    raise kind(*args)


def entries(trace):
    return [(line.name, line.lineno, line.line, line.colno) for line in traceback.extract_tb(trace)]


class Watched:
    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.seen = kind, error.args, trace is error.__traceback__, trace.tb_lineno, trace.tb_next.tb_lineno
        return True


@program(X)
def test_caught_exceptions_have_their_traceback(x):
    with Watched() as watched:
        fail(KeyError, "k")
    try:
        fail(ValueError, "v")
    except ValueError as e:
        trace = e.__traceback__
        seen = trace.tb_lineno, trace.tb_next.tb_frame.f_code.co_name, sys.exc_info()[2] is trace
    return x + 1, seen, watched.seen, ValueError().__traceback__


def test_tracebacks_after_a_break():
    def f(x):
        never = KeyError("never raised")
        try:
            try:
                fail(ValueError, "v")
            finally:
                y = x + 1
        except ValueError as e:
            text, kept = traceback.format_exc(), e
            try:
                {}["k"]
            except KeyError as inner:
                seen = inner.__context__ is e, entries(inner.__traceback__)
        return y * 2, text, seen, entries(kept.__traceback__), never.__traceback__

    assert same_as_eager(f, X).graphs == 2


@program(X)
def test_contexts_are_set_where_something_is_raised(x):
    seen = []
    try:
        try:
            fail(KeyError, 1)
        except KeyError:
            try:
                fail(ValueError, 2)
            except ValueError as e:
                e.__context__ = None
                raise
    except ValueError as e:
        seen.append(e.__context__)
    first, second = ValueError(1), ValueError(2)
    first.__context__, second.__context__ = second, first
    try:
        try:
            raise first
        except ValueError:
            raise KeyError(3)
    except KeyError as e:
        seen.append(e.__context__ is first)
    for cause in (5, ValueError):
        try:
            raise KeyError(4) from cause
        except (KeyError, TypeError) as e:
            seen.append((repr(e), repr(e.__cause__)))
    return x + 1, seen
