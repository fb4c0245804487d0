"""Another class or another instance dict, deep in a tree that guards pin, is noticed however Python code brings it about."""

from __future__ import annotations

import copy
import functools
import importlib.machinery
import importlib.util
import operator
import os
import pickle
import shutil
import subprocess
import sys
import threading
import types
from typing import Any

import pytest

from kiln import _hook
from kiln.base.source import Const, DictAttr, Source
from kiln.check.guards import Equals, TypeIs
from kiln.check.tree import GuardSet

DEPTH = 20


class Thing:
    def __init__(self, child: Any = None) -> None:
        self.child = child
        self.flag = True


class Heir(Thing):
    pass


class Other(Thing):
    pass


class Slim:
    """Has a dict, but cannot be referred to weakly: CPython has a row of its own for its `__dict__`."""

    __slots__ = ("__dict__",)
    __init__ = Thing.__init__


class SlimOther(Slim):
    __slots__ = ()


class Named(tuple):
    """Its C base has no dict: the class statement adds it."""

    def __init__(self, child: Any = None) -> None:
        Thing.__init__(self, child)  # type: ignore[arg-type]

    def __new__(cls, child: Any = None) -> Any:
        return super().__new__(cls)


class NamedOther(Named):
    pass


class Partial(functools.partial):  # type: ignore[type-arg]
    """Its C base has a dict of its own, and replaces it in `__setstate__`."""

    def __new__(cls, child: Any = None) -> Any:
        made = super().__new__(cls, print)
        Thing.__init__(made, child)  # type: ignore[arg-type]
        return made


class PartialOther(Partial):
    pass


class Failure(Exception):
    def __init__(self, child: Any = None) -> None:
        Thing.__init__(self, child)  # type: ignore[arg-type]


class FailureOther(Failure):
    pass


OTHERS = {
    Thing: Other,
    Heir: Other,
    Slim: SlimOther,
    Named: NamedOther,
    Partial: PartialOther,
    Failure: FailureOther,
}
SEEN = (Thing, Heir, Slim, Named)  # whose dicts are the class statement's

CLASS_SETTER = object.__dict__["__class__"]


def set_from_state(thing: Any, cls: type) -> None:
    state = {"__class__": cls}
    for name, value in state.items():
        setattr(thing, name, value)


def in_a_thread(change: Any) -> Any:
    def run(*args: Any) -> None:
        thread = threading.Thread(target=change, args=args)
        thread.start()
        thread.join()

    return run


EXCHANGE_CLASS = {
    "assignment": lambda t, c: exec("t.__class__ = c", {"t": t, "c": c}),
    "setattr": lambda t, c: setattr(t, "__class__", c),
    "object.__setattr__": lambda t, c: object.__setattr__(t, "__class__", c),
    "descriptor": CLASS_SETTER.__set__,
    "methodcaller": lambda t, c: operator.methodcaller("__setattr__", "__class__", c)(t),
    "map": lambda t, c: list(map(setattr, [t], ["__class__"], [c])),
    "state": set_from_state,
    "thread": in_a_thread(lambda t, c: setattr(t, "__class__", c)),
}

EXCHANGE_DICT = {
    "assignment": lambda t, d: exec("t.__dict__ = d", {"t": t, "d": d}),
    "setattr": lambda t, d: setattr(t, "__dict__", d),
    "object.__setattr__": lambda t, d: object.__setattr__(t, "__dict__", d),
    "descriptor": lambda t, d: dict_setter(type(t)).__set__(t, d),
    "map": lambda t, d: list(map(setattr, [t], ["__dict__"], [d])),
    "thread": in_a_thread(lambda t, d: setattr(t, "__dict__", d)),
}


def dict_setter(cls: type) -> Any:
    return next(base.__dict__["__dict__"] for base in cls.__mro__ if "__dict__" in base.__dict__)


def chain(cls: type) -> list[Any]:
    """Things that hang on each other, the outermost first."""
    things: list[Any] = []
    for _ in range(DEPTH):
        things.insert(0, cls(things[0] if things else None))
    return things


MADE: list[tuple[_hook.Guards, GuardSet]] = []


def kept(guards: GuardSet) -> _hook.Guards:
    MADE.append((guards.build(), guards))
    return MADE[-1][0]


def pinned(things: list[Any]) -> _hook.Guards:
    guards = GuardSet()
    source: Source = Const(things[0], "thing")
    for thing in things:
        guards.add(TypeIs(source, type(thing)))
        guards.add(Equals(DictAttr(source, "flag"), True))
        source = DictAttr(source, "child")
    built = kept(guards)
    assert built.check(()) and built.sealed is not None and built.check(())
    return built


def agree(built: _hook.Guards) -> bool:
    """What the seal says, and what the guards say one by one, in Python."""
    holds = built.check(())
    (guards,) = [guards for one, guards in MADE if one is built]
    assert holds == all(guard.holds(()) for guard in guards.guards)
    return holds


@pytest.mark.parametrize("way", EXCHANGE_CLASS)
@pytest.mark.parametrize("cls", OTHERS)
def test_another_class(cls, way):
    things = chain(cls)
    built = pinned(things)
    for place in (0, DEPTH // 2, DEPTH - 1):
        EXCHANGE_CLASS[way](things[place], OTHERS[cls])
        assert type(things[place]) is OTHERS[cls] and not agree(built)
        EXCHANGE_CLASS[way](things[place], cls)
        assert agree(built) and agree(built)


@pytest.mark.parametrize("way", EXCHANGE_DICT)
@pytest.mark.parametrize("cls", OTHERS)
def test_another_dict(cls, way):
    things = chain(cls)
    built = pinned(things)
    for place in (0, DEPTH // 2, DEPTH - 1):
        before = things[place].__dict__
        EXCHANGE_DICT[way](things[place], dict(before, flag=False))
        assert not things[place].flag and not agree(built)
        EXCHANGE_DICT[way](things[place], dict(before))
        assert agree(built) and agree(built)
        things[place].flag = False  # the new dict is the one that counts
        assert not agree(built)
        things[place].flag = True
        assert agree(built)


def test_a_dict_that_is_deleted():
    for cls in SEEN:
        things = chain(cls)
        built = pinned(things)
        before = things[11].__dict__
        del things[11].__dict__
        assert not things[11].__dict__ and not agree(built)
        things[11].__dict__.update(before)
        assert agree(built)


def test_a_dict_replaced_by_the_c_code_of_a_base():
    things = chain(Partial)
    built = pinned(things)
    for thing in things:
        before = thing.__dict__
        thing.__setstate__((print, (), {}, dict(before, flag=False)))
        assert not agree(built)
        thing.__setstate__((print, (), {}, before))
        assert agree(built)


def test_state_of_copies_and_pickles():
    thing = chain(Thing)
    built = pinned(thing)
    for again in (copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))):
        assert again(thing[0]) is not thing[0] and agree(built)
    for setstate in (lambda t, s: t.__dict__.update(s), lambda t, s: setattr(t, "__dict__", s)):
        setstate(thing[9], dict(vars(thing[9]), flag=False))
        assert not agree(built)
        setstate(thing[9], dict(vars(thing[9]), flag=True))
        assert agree(built)


def test_another_class_of_a_module_and_of_a_class():
    class Package(types.ModuleType):
        pass

    class Meta(type):
        pass

    class Made(metaclass=Meta):
        pass

    class OtherMeta(Meta):
        pass

    module = types.ModuleType("module")
    for value, other in ((module, Package), (Made, OtherMeta)):
        holder = Thing(value)
        guards = GuardSet()
        guards.add(TypeIs(DictAttr(Const(holder, "holder"), "child"), type(value)))
        built = kept(guards)
        assert built.check(()) and built.check(())
        before = type(value)
        value.__class__ = other
        assert not agree(built)
        value.__class__ = before
        assert agree(built)


def fresh(function: str, *arguments: str) -> None:
    """Runs a function of this file in a new process, for what cannot be undone."""
    code = f"from {__name__} import {function}; {function}(*{arguments!r})"
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr


def audited() -> None:
    things = chain(Thing)
    built = pinned(things)
    seen: list[bool] = []

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "object.__setattr__" and args[1] == "__class__":
            seen.append(built.check(()))

    sys.addaudithook(audit)
    things[5].__class__ = Other
    assert seen == [True] and not agree(built)


def test_an_audit_hook_checks_before_the_change():
    fresh("audited")


def load(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("kiln._hook", path)
    return importlib.util.module_from_spec(importlib.util.spec_from_loader("kiln._hook", loader))  # type: ignore[arg-type]


def loaded_again(path: str) -> None:
    same, other = load(_hook.__file__), load(path)
    assert other.Guards is not _hook.Guards
    for hook in (_hook, same, other):
        things = chain(Thing)
        nodes = [(-1, hook.FETCH_CONST, things[3]), (0, hook.FETCH_DICT, None)]
        checks = [(hook.CHECK_TYPE, (0,), Thing), (hook.CHECK_HAS, (1,), "flag")]
        built = [pinned(things), hook.Guards(nodes, checks)]
        assert all(b.check(()) and b.check(()) for b in built)
        things[3].__class__ = Other
        assert not any(b.check(()) for b in built)
        things[3].__class__ = Thing
        assert all(b.check(()) for b in built)
        things[3].__dict__ = {}
        assert not any(b.check(()) for b in built)


def test_the_extension_loaded_once_more(tmp_path):
    """The same file again, and a copy of it with counters of its own, which stands before the first."""
    fresh("loaded_again", str(shutil.copy(_hook.__file__, tmp_path / "hook.so")))


@pytest.mark.parametrize("cls", OTHERS)
def test_only_what_may_change_unseen_is_compared_each_time(cls):
    counts = pinned(chain(cls)).sealed
    assert counts is not None
    dicts_seen = cls in SEEN
    assert (counts["links"], counts["words"]) == ((2 * DEPTH, 0) if dicts_seen else (DEPTH, DEPTH))


def test_an_error_of_a_setter_passes_through():
    thing = Thing()
    with pytest.raises(TypeError, match="__class__ assignment"):
        thing.__class__ = int  # type: ignore[assignment]
    with pytest.raises(TypeError, match="__dict__ must be set to a dictionary"):
        thing.__dict__ = 5  # type: ignore[assignment]
    assert type(thing) is Thing and thing.flag
