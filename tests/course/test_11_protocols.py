"""Protocols to the letter: which special method is asked first, who is asked again, what errors say, what is done once.

PYTEST_DONT_REWRITE: the programs hold assert statements of their own.
"""

from __future__ import annotations

import contextlib
import copy  # noqa: F401  (in texts that are evaluated)
import enum
import operator  # noqa: F401
import sys
import traceback

import pytest

from tests.support import How, kiln, one_graph, program, same_as_eager, t

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


class Tagged(int):
    def __new__(cls, tag):
        made = int.__new__(cls, len(tag))
        made.tag = tag
        return made

    def __getnewargs__(self):
        return (self.tag,)


def test_an_int_with_attributes_is_new_in_every_call():
    def f(x):
        tagged = Tagged([1])
        print("", end="")
        tagged.tag.append(2)
        return x + 1, tagged.tag, tagged + 1, type(tagged).__name__

    assert same_as_eager(f, X).breaks == 1


class Answer:
    def __init__(self, value):
        self.value = value

    def asked(self, *args):
        return self.value

    __int__ = __float__ = __complex__ = __index__ = __round__ = __bytes__ = __len__ = __abs__ = asked


class Unlisted:
    __match_args__ = ["value"]


class Twice:
    __match_args__ = ("value", "value")


class Numbered:
    __match_args__ = (1,)


class Number(int):
    pass


def matched(value):
    match value:
        case Answer(value=1, other=2) | Answer(1):
            return "answer"
        case Unlisted(one) | Numbered(one):
            return one
        case Twice(one, two):
            return one, two
        case Number(one):
            return "number", one
        case {"a": one, **rest}:
            return one, rest
        case [one, *rest]:
            return one, rest


def keywords(**kw):
    return list(kw)


def generator(*items):
    for item in items:
        if isinstance(item, Exception):
            raise item
        got = yield item
        if got is not None:
            yield got


ANSWERS = """
[attempt(lambda: function(Answer(value))) for value in (1, 1.5, "s", 2j) for function in (int, float, complex, round)]
[attempt(lambda: function(Answer(value))) for value in (1, -1, "s", b"b") for function in (bytes, len, bool, abs)]
[attempt(lambda: matched(value)) for value in (Answer(1), Unlisted(), Twice(), Numbered())]
matched(Number(3)), matched({"a": 1, "b": 2}), matched("text"), matched(range(3)), matched(bytearray(b"12"))
attempt(lambda: keywords(**{1: 2}))
attempt(lambda: keywords(**5))
attempt(lambda: keywords(*5))
attempt(lambda: keywords(a=1, **{"a": 2}))
attempt(lambda: [*5]), attempt(lambda: {**5})
keywords(b=1, **{"a": 2, "c": 3})
attempt(lambda: {}.__contains__()), attempt(lambda: object.__setattr__(1, 2)), attempt(lambda: object.__delattr__())
attempt(lambda: generator(1).send(2))
attempt(lambda: generator(1).throw(5)), attempt(lambda: generator(1).throw(KeyError(1), 2))
attempt(lambda: generator(1).throw(KeyError, (1, 2)))
attempt(lambda: copy.copy(generator(1)))
copy.deepcopy(slice([1], [2])), copy.copy((1, [2])), copy.deepcopy(3)
attempt(lambda: sum()), attempt(lambda: sum([1], 2, 3)), attempt(lambda: sum(["a"], "")), sum([1.5], start=2)
attempt(lambda: sorted()), attempt(lambda: sorted([1], len)), attempt(lambda: max()), attempt(lambda: list(1, 2))
attempt(lambda: len(Answer(1 << 70))), attempt(lambda: not Answer(1 << 70)), attempt(lambda: vars(5))
attempt(lambda: object.__init__(Answer(1), 2)), attempt(lambda: object.__new__()), attempt(lambda: object.__new__(int))
attempt(lambda: 1 in Unasked()), attempt(lambda: iter(Unasked())), attempt(lambda: bool(Unasked()))
attempt(lambda: str(Unasked())), attempt(lambda: f"{Unasked():5}"), attempt(lambda: repr(Unasked()))
[*range(9)][Seventh(3)], operator.index(Seventh(4)), int(Seventh(5))
"""


class Unasked:
    """Says no to what its other methods would do."""

    __contains__ = __iter__ = __bool__ = None

    def __getitem__(self, at):
        return 1

    def __len__(self):
        return 1

    def __str__(self):
        return 5

    def __format__(self, spec):
        return 6

    def __repr__(self):
        return 7


class Seventh(int):
    def __index__(self):
        return 7


@pytest.mark.parametrize("text", ANSWERS.strip().splitlines())
def test_errors_say_what_python_says(text):
    one_graph(eval(f"lambda x: (x * 2, {text})", globals()), X)


@program(X)
def test_a_stop_iteration_that_is_raised_in_a_generator(x):
    try:
        list(generator(1, StopIteration(4)))
    except RuntimeError as e:
        seen = str(e), repr(e.__cause__), e.__context__ is e.__cause__, e.__suppress_context__
    return x + 1, seen


@program(X)
def test_a_generator_that_runs_itself(x):
    def own():
        yield attempt(lambda: next(made))

    made = own()
    return x + 1, list(made)


class Upper(dict):
    def __missing__(self, key):
        if key.startswith("__") or key == "len":
            raise KeyError(key)
        return key.upper()


class Prepared(type):
    @classmethod
    def __prepare__(cls, name, bases):
        return Upper()

    def __new__(cls, name, bases, space):
        return super().__new__(cls, name, bases, dict(space))


@program(X)
def test_class_bodies_have_the_namespace_that_they_are_given(x):
    y = 1

    class Body(metaclass=Prepared):
        a = unheard_of  # noqa: F821
        b = len("ab")

    class Plain:
        locals()["y"] = 44
        z = y
        names = sorted(locals())
        try:
            del absent  # noqa: F821
        except NameError as e:
            text = str(e), e.name

    return x + 1, Body.a, Body.b, Plain.z, Plain.names, Plain.text


@program(X)
def test_names_that_are_not_there(x):
    seen = []
    try:
        unheard_of  # noqa: B018, F821
    except NameError as e:
        seen.append((str(e), e.name))
    try:
        from functools import unheard_of  # noqa: F401
    except ImportError as e:
        seen.append((str(e), e.name, e.path))
    for kind in (5, "s", BaseExceptionGroup):
        try:
            try:
                raise ExceptionGroup("g", [ValueError(1)])
            except* kind:
                seen.append(1)
        except TypeError as e:
            seen.append(str(e))
    return x + 1, seen


def test_text_that_names_shared_variables():
    def f(x):
        n = 3

        def inner():
            return n + eval("n + 1")

        return x + 1, inner()

    same_as_eager(f, X)


def test_native_attributes_are_checked_when_they_are_written():
    def f(x):
        return x + 1, attempt(lambda: setattr(fail, "__name__", 5)), attempt(lambda: setattr(fail, "__code__", 5))

    same_as_eager(f, X)


def test_addresses_that_are_no_keys():
    def f(x):
        return x + 1, {}[id(x)]

    with pytest.raises(KeyError):
        kiln.compile(f, backend="eager")(X)


class Shared:
    """A class whose attributes are counted up, read through its objects and those of a class below."""

    count = 1


class Below(Shared):
    pass


def restore():
    Shared.count = 1
    HELD.n = 0


HELD = Shared()
RESTORED = How(setup=restore, state=lambda: (Shared.count, HELD.n))


def test_attributes_of_classes_are_read_as_written():
    def f(x):
        one, other = Shared(), Below()
        Shared.count += 1
        seen = one.count, other.count, Below.count
        Below.count = 7
        seen += one.count, other.count, Below.count
        Below.count = Shared.count
        return x + 1, seen

    one_graph(f, X, how=RESTORED)


def test_methods_of_classes_are_exchanged():
    def f(x):
        def new(self):
            return "new"

        before = hasattr(Below, "method")
        Shared.method = new
        seen = Below().method(), Shared.method(5)
        del Shared.method
        return x + 1, before, seen, hasattr(Below, "method")

    assert same_as_eager(f, X, how=RESTORED).breaks


def made(held):
    """A class whose methods hold objects, in their closure and as defaults."""

    class Made:
        def __init__(self, given=held):
            held.n = held.n + 1
            given.n = given.n + 1

        def __len__(self):
            held.n = held.n + 1
            return 2

        def __getattr__(self, name):
            held.n = held.n + 1
            return name

        def __add__(self, other, given=held):
            given.n = given.n + 1
            return other

    return Made


MADE = made(HELD)


def test_what_methods_hold_is_changed_once():
    def f(x):
        one = MADE()
        return x + 1, len(one), one.absent, one + 5, HELD.n

    one_graph(f, X, how=RESTORED)


class Member(enum.IntFlag):
    ONE = 1
    TWO = 2

    def __init__(self, value):
        self.count = 0


def clear_members():
    for member in Member:
        member.count = 0
        member._inverted_ = None


def test_members_of_enumerations_have_attributes():
    def f(x):
        Member.ONE.count += 2
        return x + Member.ONE.count, Member.ONE.count, (~Member.ONE).value, ~~Member.TWO, Member.TWO.count

    how = How(setup=clear_members, state=lambda: [member.count for member in Member])
    one_graph(f, X, how=how)
    compiled = kiln.compile(f, backend="eager")
    assert [compiled(X)[1] for _ in range(3)] == [4, 6, 8]


@contextlib.contextmanager
def raising(error):
    try:
        yield
    finally:
        raise error


class Falsy(ExceptionGroup):
    def __bool__(self):
        return False

    def derive(self, errors):
        return Falsy(self.message, errors)


@program(X)
def test_contexts_of_what_is_thrown_into_generators(x):
    errors = [ValueError(n) for n in range(3)]
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(raising(errors[2]))
            stack.enter_context(raising(errors[1]))
            raise errors[0]
    except ValueError as e:
        chain = []
        while e is not None:
            chain.append(e.args)
            e = e.__context__
    try:
        try:
            raise Falsy("group", [TypeError(1), ValueError(2)])
        except* TypeError:
            raise
    except Falsy as group:
        text = repr(group)
    return x + 1, chain, text
