"""How calls of the standard library's callables that hide Python calls, or look at the calling frame, are captured."""

from __future__ import annotations

import collections
import operator
from typing import TYPE_CHECKING, Any

from kiln.capture import operators
from kiln.capture.calls import CALLERS, Args, Kwargs, call, handles, native

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
    maker, parts = function.__reduce__()[:2]
    named = getattr(maker, "keywords", {})
    name, *rest = (*getattr(maker, "args", ()), *parts)
    return call(m, m.getattr(args[0], name), tuple(rest), named, mode)


CALLERS[operator.itemgetter] = call_itemgetter
CALLERS[operator.attrgetter] = call_attrgetter
CALLERS[operator.methodcaller] = call_methodcaller


@handles(collections.namedtuple)
def make_named_tuple(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A named tuple class is made once, while capturing; it belongs to the module of the calling frame."""
    kwargs.setdefault("module", m.frames[-1].globals.get("__name__", "__main__"))
    return native(m, collections.namedtuple, args, kwargs)
