"""Data classes whose methods are written when they are first called: most are not in a program.

`dataclass` takes those keywords of `dataclasses.dataclass` that Kiln uses, and the functions of `dataclasses`
take what it makes for their own. Writing all methods of all classes would take a third of Kiln's import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from reprlib import recursive_repr
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

MISSING = dataclasses.MISSING
FIELDS = "__dataclass_fields__"  # where the functions of `dataclasses` look
PLAIN_FIELD = dataclasses._FIELD  # type: ignore[attr-defined]

Fields = dict[str, dataclasses.Field[Any]]

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, slots=False):
        """The class with a method that takes its fields, and methods that show and compare them."""
        make = partial(_made, frozen=frozen, eq=eq, slots=slots)
        return make if cls is None else make(cls)


def _made(cls: type, frozen: bool, eq: bool, slots: bool) -> type:
    own = _own_fields(cls)
    inherited: Fields = {}
    for base in cls.__mro__[-1:0:-1]:
        inherited |= base.__dict__.get(FIELDS, {})
    fields = inherited | own
    lazy = {"__init__": _init}
    if eq:
        lazy |= {"__eq__": _eq, "__hash__": _hash} if frozen else {"__eq__": _eq}
    methods: dict[str, Any] = {FIELDS: fields, "__repr__": _repr}
    methods["__match_args__"] = tuple([name for name, f in fields.items() if f.init])
    methods |= {name: _written_later(name, write, lambda: made) for name, write in lazy.items()}
    if frozen:
        methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
        if slots:
            methods |= {"__getstate__": _state, "__setstate__": _restore}
    space = dict(cls.__dict__)
    if space.get("__hash__", True) is None and "__eq__" in space:
        del space["__hash__"]  # Python's own answer to an __eq__, not the author's
    space = methods | space
    if eq and not frozen:
        space.setdefault("__hash__", None)
    for name, field in own.items():
        space.pop(name, None)
        if not slots and field.default is not MISSING:
            space[name] = field.default
    for name in ("__dict__", "__weakref__"):
        space.pop(name, None)
    if slots:
        space["__slots__"] = tuple([name for name in own if name not in inherited])
    made = type(cls)(cls.__name__, cls.__bases__, space)
    made.__qualname__ = cls.__qualname__
    return made


def _own_fields(cls: type) -> Fields:
    found = {}
    for name, kind in cls.__annotations__.items():
        if not kind.startswith("ClassVar"):
            given: Any = cls.__dict__.get(name, MISSING)
            field: Any = given if type(given) is dataclasses.Field else dataclasses.field(default=given)
            field.name, field.type, field._field_type = name, kind, PLAIN_FIELD
            found[name] = field
    return found


def _written_later(name: str, write: Callable[[type], Any], owner: Callable[[], type]) -> Any:
    """A method that writes the one of this name at its first call."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        cls = owner()
        made = write(cls)
        made.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, made)
        return made(self, *args, **kwargs)

    return method


def _function(head: str, body: list[str], names: dict[str, Any]) -> Any:
    exec(f"def {head}:\n " + "\n ".join(body or ["pass"]), names)
    return names[head.partition("(")[0]]


def _init(cls: Any) -> Any:
    names: dict[str, Any] = {"_put": object.__setattr__, "_missing": MISSING}
    frozen = cls.__setattr__ is _refuse
    given, body = ["self"], []
    for name, field in getattr(cls, FIELDS).items():
        value = name
        if field.default_factory is not MISSING:
            names[f"_make_{name}"] = field.default_factory
            value = f"_make_{name}()" + (f" if {name} is _missing else {name}" if field.init else "")
        names[f"_default_{name}"] = field.default
        optional = field.default is not MISSING or value != name
        if field.init:
            given.append(f"{name}=_default_{name}" if optional else name)
        elif not optional:
            continue
        elif value == name:
            value = f"_default_{name}"
        slot: Any = cls.__dict__.get(name)
        if frozen and type(slot) is MemberDescriptorType:  # faster than by name
            names[f"_put_{name}"] = slot.__set__
            body.append(f"_put_{name}(self, {value})")
        else:
            body.append(f"_put(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    return _function(f"__init__({', '.join(given)})", body, names)


def _compared(cls: type, of: str) -> str:
    fields = getattr(cls, FIELDS).items()
    return "(" + "".join([f"{of}.{name}," for name, field in fields if field.compare]) + ")"


def _eq(cls: type) -> Any:
    same = f"{_compared(cls, 'self')} == {_compared(cls, 'other')}"
    body = [f"return {same} if other.__class__ is self.__class__ else NotImplemented"]
    return _function("__eq__(self, other)", body, {})


def _hash(cls: type) -> Any:
    return _function("__hash__(self)", [f"return hash({_compared(cls, 'self')})"], {})


@recursive_repr()
def _repr(self: Any) -> str:
    shown = [f"{name}={getattr(self, name)!r}" for name, f in getattr(self, FIELDS).items() if f.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse(self: Any, name: str, *value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, name) for name in getattr(self, FIELDS)]


def _restore(self: Any, state: list[Any]) -> None:
    for name, value in zip(getattr(self, FIELDS), state, strict=True):
        object.__setattr__(self, name, value)
