"""Tensor subclasses with Python in them: attributes of their own, and `__torch_function__`.

The graph computes with plain tensors over the same memory. What the classes add is Python, which is
interpreted: methods, properties and attributes, and the hook that torch calls in the place of its functions.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import get_default_nowrap_functions

from kiln.base.errors import Break
from kiln.base.source import DictAttr
from kiln.capture import attributes, runtime
from kiln.capture.attributes import mro_lookup
from kiln.capture.calls import PLAIN_ARGUMENTS, SUBCLASSED, Args, Kwargs, handles
from kiln.capture.frame import Machine, UserError
from kiln.capture.torch_calls import entered_before
from kiln.capture.world import MISSING, nested
from kiln.capture.wrappers import HINT, PLAIN_TYPES, is_wrapper, own_of, refuse
from kiln.check.guards import Absent
from kiln.ops.fake import FakeTensor

NAME = "__torch_function__"
BASE = torch.Tensor.__dict__[NAME].__func__
DISABLED = torch._C._disabled_torch_function_impl  # type: ignore[attr-defined]
Disable = torch._C.DisableTorchFunctionSubclass


def hook_of(kind: type) -> Any:
    """What torch calls where a value of this class is an argument; None where it calls nothing of note."""
    found = mro_lookup(kind, NAME)
    inner = getattr(found, "__func__", found)
    return None if inner is DISABLED or inner is MISSING or inner is BASE and is_wrapper(kind) else inner


def overriding(values: Any) -> list[type]:
    """The classes with such a hook among those of the values, in the order in which torch asks them."""
    kinds: list[type] = []
    for value in nested(values):
        kind = value.real_type if type(value) is FakeTensor else type(value)
        if kind in PLAIN_TYPES or kind in PLAIN_ARGUMENTS or kind in kinds or hook_of(kind) is None:
            continue
        place = next((i for i, known in enumerate(kinds) if issubclass(kind, known)), len(kinds))
        kinds.insert(place, kind)
    return kinds


def intercept(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """What the classes of the arguments make of a torch call; MISSING where they have no say."""
    if m.aside:
        return MISSING
    found = own_operator(m, function, args)
    if found is not MISSING:
        return found
    kinds = overriding((*args, *kwargs.values()))
    return dispatch(m, function, args, kwargs, kinds) if kinds else MISSING


def own_operator(m: Machine, function: Any, args: Args) -> Any:
    """What an operator gives that a class implements in Python."""
    if getattr(function, "__module__", None) not in ("_operator", "operator"):
        return MISSING
    stem = function.__name__.strip("_")
    swapped = args[::-1] if len(args) == 2 else args[:1]
    for name, operands in ((f"__{stem}__", args), (f"__r{stem}__", swapped)):
        owner = operands[0]
        if type(owner) is FakeTensor and type(own(m, owner.real_type, name)) is types.FunctionType:
            result = m.call(attributes.load(m, owner, name), operands[1:])
            if result is not NotImplemented:
                return result
    return MISSING


def dispatch(m: Machine, function: Any, args: Args, kwargs: Kwargs, kinds: list[type]) -> Any:
    """Call the hooks of the classes until one answers."""
    function, args = as_told(function, args)
    for kind in kinds:
        m.world.constant(kind)
        if isinstance(mro_lookup(kind, NAME), types.FunctionType):
            why = f"{NAME} of {kind.__name__} is no class method"
            raise Break("tensor-subclass", why, "make it one")
        if hook_of(kind) is BASE:
            result = by_default(m, (kind, function, tuple(kinds), args, kwargs), {})
        else:
            result = m.call(attributes.load(m, kind, NAME), (function, tuple(kinds), args, kwargs))
        if result is not NotImplemented:
            return result
    names = ", ".join(kind.__name__ for kind in kinds)
    text = f"Multiple dispatch failed for {function}; all {NAME} handlers returned NotImplemented: {names}"
    raise UserError(TypeError(text))


class Probe(torch.Tensor):
    """Stands for a tensor with a hook in a call that shall tell what torch says to the hook."""

    told: Any = None
    value: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Probe.told = func, args
        return None


class Stand:
    """The same for an object of another class with a hook."""

    def __init__(self, value: Any) -> None:
        self.value = value

    __torch_function__ = Probe.__torch_function__


def as_told(function: Any, args: Args) -> tuple[Any, Args]:
    """The function and the arguments that a hook sees: those of the method behind an operator."""
    if getattr(function, "__module__", None) not in ("_operator", "operator") and function is not getattr:
        return function, args
    probes = []
    for value in args:
        probe = value
        if type(value) is FakeTensor and hook_of(value.real_type) is not None:
            with Disable():
                probe = torch.empty(()).as_subclass(Probe)
            probe.__dict__["value"] = value
        elif type(value) is not FakeTensor and type(value) not in PLAIN_ARGUMENTS and hook_of(type(value)):
            probe = Stand(value)
        probes.append(probe)
    function(*probes)
    (told, given), Probe.told = Probe.told, None
    return told, tuple([v.__dict__["value"] if type(v) in (Probe, Stand) else v for v in given])


@contextmanager
def without_hooks(m: Machine) -> Iterator[None]:
    m.aside += 1
    try:
        yield
    finally:
        m.aside -= 1


@handles(BASE)
def by_default(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """What the hook of torch.Tensor does: the call without hooks, its results of the class."""
    names = ("cls", "func", "types", "args", "kwargs")
    given = {"args": (), "kwargs": None, **dict(zip(names, args, strict=False)), **kwargs}
    kind, function = given["cls"], given["func"]
    if not all(issubclass(kind, other) for other in given["types"]):
        return NotImplemented
    inner = tuple(given["args"])
    with without_hooks(m):
        if getattr(function, "__name__", "") == "__get__":
            result = attributes.load(m, inner[0], function.__self__.__name__)
        else:
            result = m.call(function, inner, dict(given["kwargs"] or {}))
    return result if function in get_default_nowrap_functions() else converted(m, result, kind, inner)


@handles(DISABLED)
def plainly(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """What the hook of parameters does: the call without hooks."""
    function, _, inner, given = (*args, *kwargs.values(), {}, {})[:4]
    with without_hooks(m):
        return m.call(function, tuple(inner), dict(given or {}))


def converted(m: Machine, value: Any, kind: type, given: Any = ()) -> Any:
    """The results of a call as tensors of a class."""
    if type(value) in (tuple, list):
        return type(value)([converted(m, item, kind, given) for item in value])
    if isinstance(value, tuple) and hasattr(value, "n_fields"):
        return type(value)([converted(m, item, kind, given) for item in value])
    if type(value) is not FakeTensor or issubclass(value.real_type, kind):
        return value
    fresh = m.source(value) is None and not any(value is other for other in nested(given))
    return seen_as(m, value, kind, fresh)


def seen_as(m: Machine, value: FakeTensor, kind: type, fresh: bool = False) -> FakeTensor:
    """A tensor of a class over the memory of another one, or that one itself if nobody has seen it."""
    refuse(kind, f"a {kind.__name__} is made")
    with without_hooks(m):
        made = value if fresh else m.torch_call(torch.Tensor.view_as, (value, value), {})
    made.real_type = kind
    m.recorder.subclassed = True
    return made


def own(m: Machine, kind: type, name: str) -> Any:
    if kind in PLAIN_TYPES:
        return MISSING
    m.world.class_attr(kind, name, mro_lookup(kind, name))
    return own_of(kind, name)


def load(m: Machine, value: FakeTensor, name: str) -> Any:
    """An attribute of a tensor, of a subclass or within a mode; MISSING where it is as of any tensor."""
    kind = value.real_type
    if name in ("__class__", "__dict__"):
        return MISSING
    if m.modes and isinstance(mro_lookup(torch.Tensor, name), types.GetSetDescriptorType):
        seen = attributes.MODES["intercept"](m, getattr, (value, name), {}, asked=True)
        if seen is not MISSING or kind in PLAIN_TYPES:
            return seen
    if kind in PLAIN_TYPES:
        return MISSING
    found = own(m, kind, name)
    plain = mro_lookup(torch.Tensor, name)
    if found is not MISSING:
        real, source = m.world.reals.get(id(value)), m.source(value)
        if not attributes.is_data_descriptor(found) and real is not None and source is not None:
            if name in vars(real):
                return m.world.outside(vars(real)[name], DictAttr(source, name))
            m.world.guard(Absent(source, name))
        return attributes.bind(m, found, value, kind, name)
    if plain is MISSING:
        if value.wrapped is not None and m.source(value) is None and hasattr(value.wrapped, name):
            return inner_part(m, value, name)
        try:
            return attributes.load_own(m, value, name)
        except UserError as e:
            hook = own(m, kind, "__getattr__")
            if not isinstance(e.error, AttributeError) or not isinstance(hook, types.FunctionType):
                raise
            return m.inline(hook, (value, name), {})
    method = isinstance(plain, (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType))
    if m.aside or method or hook_of(kind) is None:
        return MISSING
    return dispatch(m, getattr, (value, name), {}, [kind])


def inner_part(m: Machine, value: FakeTensor, name: str) -> Any:
    """What a tensor made of others, which a graph gives, has inside."""
    part = getattr(value.wrapped, name)
    return m.torch_call(getattr, (value, name), {}) if isinstance(part, torch.Tensor) else part


def store(m: Machine, value: FakeTensor, name: str, item: Any) -> bool:
    """Assign to what a subclass has by this name: a property, or a value for all; False where it has none."""
    found = own(m, value.real_type, name)
    if found is MISSING:
        return False
    if isinstance(found, property):
        if found.fset is None:
            raise attributes.lacking(value.real_type, name, "setter")
        m.call(m.world.constant(found.fset), (value, item))
    elif attributes.is_data_descriptor(found):
        raise Break("tensor-attribute", f"{name} of a tensor is assigned", "make a new tensor instead")
    else:
        m.world.write_tensor_slot(value, name, item)
    return True


attributes.SUBCLASSES.update(load=load, store=store, intercept=intercept)


@handles(torch.Tensor.as_subclass)
def as_subclass(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    value, kind = (*args, *kwargs.values())
    return seen_as(m, value, kind)


@handles(torch.Tensor._make_subclass)  # type: ignore[attr-defined]
def make_subclass(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    kind, data, *rest = args
    if rest[1:] or kwargs.keys() - {"require_grad"} or type(data) is not FakeTensor:
        raise Break("tensor-subclass", f"a {kind.__name__} is made", "make it outside the compiled function")
    if rest and rest[0] or kwargs.get("require_grad"):
        raise Break("tensor-subclass", f"a {kind.__name__} that requires grad is made", HINT)
    with without_hooks(m):
        made = m.torch_call(torch.Tensor.detach, (data,), {})
    return seen_as(m, made, kind, fresh=True)


def constructed(m: Machine, kind: type, args: Args, kwargs: Kwargs) -> Any:
    """`kind(...)`: `__new__`, then `__init__`."""
    what = f"a {kind.__name__} is made"
    maker = attributes.type_lookup(m, kind, "__new__")
    maker = getattr(maker, "__func__", maker)
    if isinstance(maker, types.FunctionType):
        made = m.call(m.world.constant(maker), (kind, *args), kwargs)
    elif args and type(args[0]) is FakeTensor:
        made = seen_as(m, args[0], kind)
    else:
        raise Break("tensor-subclass", what, "make it outside the compiled function")
    if type(made) is FakeTensor and issubclass(made.real_type, kind):
        init = attributes.type_lookup(m, made.real_type, "__init__")
        if isinstance(init, types.FunctionType):
            m.inline(init, (made, *args), kwargs)
    return made


SUBCLASSED.update(made=constructed, intercept=intercept)


for _name in ("_C._has_torch_function", "_C._has_torch_function_unary", "_C._has_torch_function_variadic",
              "overrides.has_torch_function", "overrides.has_torch_function_unary",
              "overrides.has_torch_function_variadic"):  # fmt: skip
    handles(operator.attrgetter(_name)(torch))(
        lambda m, args, kwargs: bool(m.modes or not m.aside and overriding(args))
    )
handles(torch._C._is_torch_function_enabled)(lambda m, args, kwargs: not m.aside)


@handles(torch.overrides.handle_torch_function)
def handle(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    function, relevant, *rest = args
    if m.modes:
        return attributes.MODES["by_mode"](m, function, overriding(relevant), tuple(rest), kwargs)
    return dispatch(m, function, tuple(rest), kwargs, overriding(relevant))


class Without:
    """A block of the program in which it switches hooks off: what stands for torch's own such context."""

    def __enter__(self) -> None:
        self.context = Disable()
        self.context.__enter__()  # type: ignore[attr-defined]

    def __exit__(self, *error: object) -> None:
        self.context.__exit__(*error)  # type: ignore[attr-defined]


handles(Disable)(lambda m, args, kwargs: Without())


@handles(Without.__enter__)
def enter(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    m.aside += 1
    m.world.entered[id(args[0])] = (runtime.entered, Without)


@handles(Without.__exit__)
def leave(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if id(args[0]) not in m.world.entered:
        raise entered_before("a block without hooks of tensors")
    m.aside -= 1
    del m.world.entered[id(args[0])]
