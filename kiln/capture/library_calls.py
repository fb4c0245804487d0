"""How callables of the standard library that hide calls, or look at the calling frame, are captured."""

from __future__ import annotations

import collections
import contextvars
import functools
import io
import logging
import operator
import os
import random
import traceback
import types
from typing import Any

import torch

from kiln.base.errors import Break
from kiln.base.source import Const, Derived
from kiln.capture import attributes, operators
from kiln.capture.calls import CALLERS, METHODS, Args, Kwargs, call, declare, handles, native
from kiln.capture.frame import Machine, UserError
from kiln.capture.world import MISSING
from kiln.check.guards import Custom, Is


def only(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def of_one(action: Any, m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """What callables of a class that take one argument do with it."""
    if len(args) != 1 or kwargs:
        return m.native(function, *args, **kwargs)
    m.world.identify(function)
    return action(m, function, args[0], mode)


def get_items(m: Machine, function: Any, value: Any, mode: str) -> Any:
    return only([operators.getitem(m, value, key) for key in function.__reduce__()[1]])


def get_attributes(m: Machine, function: Any, value: Any, mode: str) -> Any:
    paths = function.__reduce__()[1]
    return only([functools.reduce(m.getattr, path.split("."), value) for path in paths])


def call_method(m: Machine, function: Any, value: Any, mode: str) -> Any:
    maker, rest = function.__reduce__()[:2]
    parts: tuple[Any, ...] = tuple(getattr(maker, "args", ())) + tuple(rest)
    return call(m, m.getattr(value, parts[0]), parts[1:], getattr(maker, "keywords", {}), mode)


def make_of_alias(m: Machine, function: types.GenericAlias, args: Args, kwargs: Kwargs, mode: str) -> Any:
    """`list[int](...)`: an instance of the class, which notes of what where it can."""
    made = call(m, function.__origin__, args, kwargs)
    if attributes.instance_space(made) is not None:
        m.setattr(made, "__orig_class__", function)
    return made


declare({
    # The frames that an exception passed through are the interpreter's: there is nothing to clear.
    traceback.clear_frames: lambda m, args, kwargs: None,
    logging.getLogger: lambda m, args, kwargs: m.world.constant(m.native(logging.getLogger, *args, **kwargs)),
})  # fmt: skip


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


CALLERS.update({
    types.GenericAlias: make_of_alias,
    operator.itemgetter: functools.partial(of_one, get_items),
    operator.attrgetter: functools.partial(of_one, get_attributes),
    operator.methodcaller: functools.partial(of_one, call_method),
    type(functools.cmp_to_key(lambda a, b: 0)): lambda m, function, args, kwargs, mode: native(
        m, function, args, kwargs),
})  # fmt: skip


@handles(random.Random)
def random_generator(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A generator that is made here from a seed gives the same numbers in every call."""
    given = (*args, *kwargs.values())
    if not given or not all(type(value) in (int, float, str, bytes) for value in given):
        why = "a random generator is seeded by the clock"
        raise Break("random-state", why, "seed it with a constant, or pass it in")
    return m.native(random.Random, *args, **kwargs)


@handles(io.StringIO, io.BytesIO, told=True)
def memory_file(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """A file in memory; one that lasts is made where the graph breaks for it."""
    made = native(m, function, args, kwargs)
    m.steps[id(made)] = m.safe_step()
    m.world.keep.append(made)
    return made


@handles(os.getcwd, torch.autograd._is_checkpoint_valid, told=True)
def asked_again(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """What holds in the process: asked again in every call."""
    found = m.native(function, *args, **kwargs)
    m.world.guard(Custom(Const(function), lambda ask: ask() == found, f"gave {found}"))
    return found


def value_in_context(variable: contextvars.ContextVar[Any]) -> Any:
    return variable.get(MISSING)


def context_value(m: Machine, owner: contextvars.ContextVar[Any], args: Args, kwargs: Kwargs) -> Any:
    """The value of a context variable, read from the variable itself in every call."""
    source, found = m.source(owner), value_in_context(owner)
    if source is None or kwargs or len(args) > 1:
        return m.native(contextvars.ContextVar.get, owner, *args, **kwargs)
    path = Derived(source, value_in_context, "value")
    if found is not MISSING:
        return m.world.outside(found, path)
    m.world.guard(Is(path, MISSING))
    if args:
        return args[0]
    try:
        return m.world.outside(owner.get(), Derived(source, contextvars.ContextVar.get, "default"))
    except LookupError as error:
        raise UserError(error) from None


METHODS[contextvars.ContextVar, "get"] = context_value
