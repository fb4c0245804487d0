"""How callables of the standard library that hide calls, or look at the calling frame, are captured."""

from __future__ import annotations

import collections
import functools
import logging
import operator
import os
import random
import traceback
from typing import TYPE_CHECKING, Any

from kiln.base.errors import Break
from kiln.base.source import Const
from kiln.capture import operators
from kiln.capture.calls import CALLERS, Args, Kwargs, call, handles, native
from kiln.check.guards import Custom

if TYPE_CHECKING:
    from kiln.capture.machine import Machine


def only(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def call_itemgetter(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    if len(args) != 1 or kwargs:
        return m.native(function, *args, **kwargs)
    m.world.identify(function)
    return only([operators.getitem(m, args[0], key) for key in function.__reduce__()[1]])


def call_attrgetter(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    if len(args) != 1 or kwargs:
        return m.native(function, *args, **kwargs)
    m.world.identify(function)
    found = []
    for path in function.__reduce__()[1]:
        value = args[0]
        for name in path.split("."):
            value = m.getattr(value, name)
        found.append(value)
    return only(found)


def call_methodcaller(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    if len(args) != 1 or kwargs:
        return m.native(function, *args, **kwargs)
    m.world.identify(function)
    maker, rest = function.__reduce__()[:2]
    parts: tuple[Any, ...] = tuple(getattr(maker, "args", ())) + tuple(rest)
    return call(m, m.getattr(args[0], parts[0]), parts[1:], getattr(maker, "keywords", {}), mode)


CALLERS[operator.itemgetter] = call_itemgetter
CALLERS[operator.attrgetter] = call_attrgetter
CALLERS[operator.methodcaller] = call_methodcaller


@handles(traceback.clear_frames)
def clear_frames(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """The frames that an exception passed through are the interpreter's: there is nothing to clear."""
    return None


@handles(collections.namedtuple)
def make_named_tuple(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A named tuple class is made once, while capturing; it belongs to the module of the calling frame."""
    kwargs.setdefault("module", m.frames[-1].globals.get("__name__", "__main__"))
    return m.world.made_class(native(m, collections.namedtuple, args, kwargs))


@handles(functools.cmp_to_key)
def key_of_comparison(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """The comparison is interpreted whenever native code compares two keys."""
    compare = args[0] if args else kwargs["mycmp"]
    return m.native(functools.cmp_to_key, lambda a, b: m.call(compare, (a, b)))


def call_key(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    return native(m, function, args, kwargs)


CALLERS[type(functools.cmp_to_key(lambda a, b: 0))] = call_key


@handles(random.Random)
def random_generator(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A generator that is made here from a seed gives the same numbers in every call."""
    if not all(type(value) in (int, float, str, bytes) for value in (*args, *kwargs.values())) or not (
        args or kwargs
    ):
        raise Break(
            "random-state",
            "a random generator is seeded by the clock",
            "seed it with a constant, or pass it in",
        )
    return m.native(random.Random, *args, **kwargs)


@handles(os.getcwd)
def working_folder(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    found = m.native(os.getcwd)
    m.world.guard(Custom(Const(os.getcwd), lambda ask: ask() == found, f"gave {found}"))
    return found


@handles(logging.getLogger)
def logger(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return m.world.constant(m.native(logging.getLogger, *args, **kwargs))
