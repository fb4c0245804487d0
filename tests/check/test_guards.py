"""Each guard kind on its own: when it holds, and the sentence that tells why it no longer does."""

from __future__ import annotations

import types

import pytest

from kiln.base.source import Arg, Attr, Const, DictAttr, Item
from kiln.check.guards import (
    Absent,
    ClassAttr,
    Contains,
    Custom,
    Distinct,
    Equals,
    FunctionState,
    Is,
    Keys,
    Length,
    SameObject,
    SetEquals,
    TypeIs,
)
from kiln.check.tree import GuardSet
from kiln.check.values import MISSING, same
from tests.check.world import CONSTANTS, fresh

X, Y = Arg(0, "x"), Arg(1, "y")


class Thing:
    pass


def one(x=1, *, k=2):
    return x


def with_flag(flag):
    thing = Thing()
    thing.flag = flag
    return thing


CASES = [
    (TypeIs(X, int), 1, True, "x was of type builtins.int, now builtins.bool"),
    (Is(X, Thing), Thing, int, "x was tests.check.test_guards.Thing, now builtins.int"),
    (Is(X, [1]), None, [1], "x was [1], now another object that prints alike"),
    (Equals(X, 2), 2, 3, "x was 2, now 3"),
    (Equals(X, 2), 2, 2.0, "x was 2, now 2.0 (float)"),
    (Equals(Item(X, "a"), "s"), {"a": "s"}, {"a": "t"}, "x['a'] was 's', now 't'"),
    (
        Equals(Item(X, 1), "s"),
        ["r", "s"],
        [],
        "x[1] can no longer be read (IndexError: list index out of range)",
    ),
    (Equals(DictAttr(X, "flag"), True), with_flag(True), with_flag(False), "x.flag was True, now False"),
    (Length(X, 2), [1, 2], "abc", "x had length 2, now 3"),
    (Length(X, 2), (1, 2), 7, "x had length 2, now a int"),
    (Keys(X, ("a", "b")), {"a": 1, "b": 2}, {"b": 1, "a": 2}, "x had keys ['a', 'b'], now ['b', 'a']"),
    (Contains(X, "a", True), {"a": 1}, set(), "x had 'a', now it lacks it"),
    (Contains(X, "a", False), frozenset(), {"a"}, "x lacked 'a', now it has it"),
    (Contains(X, "a", True), {"a": 1}, "a", "x was a dict or set, now a str"),
    (Absent(X, "flag"), Thing(), with_flag(3), "x had no attribute 'flag' of its own, now 3"),
    (Absent(X, "flag"), 5, with_flag(3), "x had no attribute 'flag' of its own, now 3"),
    (SetEquals(X, frozenset({1})), {1}, {True}, "x was {1}, now {True}"),
    (
        FunctionState(X, one.__code__, (True,), one.__kwdefaults__),
        None,
        one,
        "x had defaults (True,), now (1,)",
    ),
    (Custom(X, lambda v: v > 0, "was positive"), 1, -1, "x was positive, now -1"),
]


def check(guard, argv):
    guards = GuardSet()
    guards.add(guard)
    built = guards.build()
    assert built.check(argv) is guard.holds(argv)
    return guard.holds(argv)


@pytest.mark.parametrize("guard, good, bad, why", CASES, ids=[c[3] for c in CASES])
def test_kinds_and_reasons(guard, good, bad, why):
    assert good is None or check(guard, (good,))
    assert not check(guard, (bad,))
    assert guard.why((bad,)) == why


def test_relations():
    a, b = object(), object()
    together, apart = SameObject(X, Y), Distinct([X, Y])
    assert check(together, (a, a)) and not check(together, (a, b))
    assert check(apart, (a, b)) and not check(apart, (a, a))
    assert together.why((a, b)) == "x and y were one object, now they are two"
    assert apart.why((a, a)) == "x and y were different objects, now they are one"
    many = Distinct([Arg(i, f"a{i}") for i in range(40)])
    values = tuple(object() for _ in range(40))
    assert check(many, values) and not check(many, (*values[:39], values[7]))


def test_class_attributes():
    class Base:
        name = "base"

    class Derived(Base):
        pass

    guard, missing = ClassAttr(Derived, "name", Base.name), ClassAttr(Derived, "other", MISSING)
    assert check(guard, ()) and check(missing, ())
    Derived.name = "derived"
    Base.other = 1
    assert not check(guard, ()) and not check(missing, ())
    assert guard.why(()).endswith("Derived.name was 'base', now 'derived'")
    assert missing.why(()).endswith("Derived.other was <missing>, now 1")


def test_functions():
    function = types.FunctionType(one.__code__, globals(), "f", (1,))
    guard = FunctionState(X, function.__code__, function.__defaults__, None)
    assert check(guard, (function,)) and not check(guard, (one,)) and not check(guard, (5,))
    function.__kwdefaults__ = {"k": 3}
    assert not check(guard, (function,))
    assert guard.why((function,)) == "x had keyword defaults None, now {'k': 3}"
    listed = [1]
    for was, like, other in (((1, 2.5, ("a",)), (1, 2.5, ("a",)), (1, -0.0, ("a",))), ((listed,), (listed,), ([1],))):
        guard = FunctionState(X, function.__code__, was, {"k": was})
        function.__defaults__, function.__kwdefaults__ = like, {"k": like}
        assert check(guard, (function,))
        function.__kwdefaults__ = {"k": other}
        assert not check(guard, (function,))
        function.__defaults__, function.__kwdefaults__ = other, {"k": like}
        assert not check(guard, (function,))
    function.__code__ = (lambda x: x).__code__
    assert not check(guard, (function,)) and "now another function" in guard.why((function,))


def test_constants_are_told_apart_as_a_program_could():
    for was, other in CONSTANTS:
        assert same(was, fresh(was)) and not same(was, other)
        assert check(Equals(X, was), (fresh(was),)) and not check(Equals(X, was), (other,))


def test_a_guard_is_kept_once():
    guards = GuardSet()
    for value in (1, True, 1.0, 1, 0.0, -0.0, float("nan"), float("nan")):
        guards.add(Equals(X, value))
    assert len(guards.guards) == 6
    guards.add(TypeIs(X, int))
    guards.add(TypeIs(X, int))
    guards.add(TypeIs(Y, int))
    guards.add(Distinct([X, Y]))
    guards.add(Distinct([X, Y]))
    assert len(guards.guards) == 9


def test_values_are_fetched_once():
    fetched = []

    class Watchful:
        @property
        def value(self):
            fetched.append(1)
            return (1, 2)

    thing = Watchful()
    guards = GuardSet()
    source = Attr(Const(thing), "value")
    for guard in (
        TypeIs(source, tuple),
        Length(source, 2),
        Equals(Item(source, 0), 1),
        Equals(Item(source, 1), 2),
    ):
        guards.add(guard)
    built = guards.build()
    assert built.check(()) and built.check(())
    fetched.clear()
    assert built.check(())
    assert len(fetched) == 1


def test_a_dict_subclass_is_not_asked_for_what_it_lacks():
    class Default(dict):
        def __missing__(self, key):
            raise AssertionError("a guard must not run this")

    guards = GuardSet()
    guards.add(Equals(Item(X, "a"), 1))
    built = guards.build()
    assert built.check((Default(a=1),)) and not built.check((Default(b=1),))


def test_the_guards_keep_what_they_name_alive_and_let_go():
    thing = Thing()
    thing.child = Thing()
    guards = GuardSet()
    guards.add(TypeIs(DictAttr(Const(thing), "child"), Thing))
    built = guards.build()
    assert built.check(())
    del thing
    assert built.check(())
