"""copy.copy and copy.deepcopy of containers, objects and tensors, as the copy module does them."""

from __future__ import annotations

import collections
import copy as copying
import copyreg
import enum
import types
from collections.abc import Callable
from typing import Any

import torch

from kiln.base.errors import Break
from kiln.capture import attributes, operators, purity, runtime
from kiln.capture.builtin_calls import items_of
from kiln.capture.calls import Args, Kwargs, call, handles
from kiln.capture.frame import Machine, UserError
from kiln.capture.iterators import Generator
from kiln.capture.world import CONSTANTS
from kiln.ops.fake import FakeTensor

ATOMS = (type, enum.Enum, types.ModuleType)
ATOMIC = frozenset(
    {*CONSTANTS, types.FunctionType, types.BuiltinFunctionType, property, range, types.CodeType} - {slice})
CONTAINERS = (
    list, dict, set, frozenset, tuple, collections.deque, collections.OrderedDict, collections.defaultdict,
    collections.Counter,
)  # fmt: skip
#: Methods by which a class takes part in its own copying.
HOOKS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


@handles(copying.copy)
def shallow(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    (value,) = args
    if type(value) is FakeTensor:
        return m.torch_call(torch.Tensor.detach, (value,), {}) if not value.requires_grad else refused(value)
    if is_atom(value) or type(value) is slice:
        return value
    if type(value) in CONTAINERS:
        return m.native(copying.copy, m.world.touch(value))
    hook = attributes.type_lookup(m, type(value), "__copy__")
    if isinstance(hook, types.FunctionType):
        return m.inline(hook, (value,), {})
    return instance(m, value, lambda item: item, {})


@handles(copying.deepcopy)
def deep(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    memo = args[1] if len(args) > 1 else kwargs.get("memo")
    if memo is None:
        memo = {}
        m.memos.append(memo)
    if not any(memo is made for made in m.memos):
        return refused(args[0])  # whoever brings one may look into it
    return deep_copy(m, args[0], memo)


def is_atom(value: Any) -> bool:
    """Whether a value is its own copy."""
    return type(value) in ATOMIC or isinstance(value, ATOMS)


def deep_copy(m: Machine, value: Any, memo: dict[int, Any]) -> Any:
    """The deep copy of a value; `memo` holds the copies made so far by id."""
    if is_atom(value):
        return value
    if id(value) in memo:
        return memo[id(value)]
    m.world.keep.append(value)
    if type(value) is FakeTensor:
        made = tensor(m, value)
    elif type(value) is slice:
        made = slice(*[deep_copy(m, part, memo) for part in (value.start, value.stop, value.step)])
    elif type(value) in CONTAINERS:
        made = container(m, value, memo)
    else:
        hook = attributes.type_lookup(m, type(value), "__deepcopy__")
        if isinstance(hook, types.FunctionType):
            made = call(m, hook, (value, memo), {})
        else:
            made = instance(m, value, lambda item: deep_copy(m, item, memo), memo)
    memo[id(value)] = made
    return made


def container(m: Machine, value: Any, memo: dict[int, Any]) -> Any:
    m.world.touch(value)
    if isinstance(value, (tuple, frozenset)):
        items = [deep_copy(m, item, memo) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return memo.get(id(value), value if same else type(value)(items))
    made = memo[id(value)] = m.native(copying.copy, value)
    made.clear()
    if isinstance(value, dict):
        for key, item in list(value.items()):
            made[deep_copy(m, key, memo)] = deep_copy(m, item, memo)
    else:
        add = made.add if isinstance(made, set) else made.append
        for item in list(value):
            add(deep_copy(m, item, memo))
    return made


def instance(m: Machine, value: Any, part: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """A copy of an object: its class is not asked, its attributes and items are copied one by one."""
    cls = type(value)
    natives = [base for base in cls.__mro__ if not base.__flags__ & 1 << 9]
    lookup = attributes.mro_lookup
    if cls is Generator:
        raise UserError(TypeError("cannot pickle 'generator' object"))
    base = natives[0]
    hooked = any(lookup(cls, name) is not lookup(base, name) for name in HOOKS)
    known = hooked or cls in copyreg.dispatch_table or cls.__module__ in purity.OWN_MODULES
    if known or base not in FILLED or not {base, dict, object}.issuperset(natives):
        return refused(value)
    made = memo[id(value)] = FILLED[base](m, value, part)
    for name in slots(cls):
        if m.call(hasattr, (value, name)):
            object.__setattr__(made, name, part(m.getattr(value, name)))
    if attributes.instance_space(value) is not None:
        for name, item in dict(m.getattr(value, "__dict__")).items():
            made.__dict__[name] = part(item)
    if isinstance(value, list):
        for item in list(items_of(m, value)):
            m.call(m.getattr(made, "append"), (part(item),))
    elif isinstance(value, dict):
        for key, item in list(items_of(m, m.call(m.getattr(value, "items")))):
            operators.setitem(m, made, part(key), part(item))
    return made


#: How an empty copy is made of an instance of a class; one of a set is made of the items.
FILLED: dict[type, Callable[[Machine, Any, Callable[[Any], Any]], Any]] = {
    **dict.fromkeys((object, list, dict), lambda m, value, part: m.native(runtime.make_object, type(value))),
    collections.OrderedDict: lambda m, value, part: m.call(type(value)),
    set: lambda m, value, part: m.call(type(value), ([part(item) for item in list(items_of(m, value))],)),
}


def slots(cls: type) -> list[str]:
    return [name for base in cls.__mro__ for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)]  # fmt: skip


def tensor(m: Machine, value: FakeTensor) -> Any:
    """A copy with storage of its own."""
    if value.requires_grad or not value.is_contiguous():
        return refused(value)
    return m.torch_call(torch.Tensor.clone, (value,), {})


def refused(value: Any) -> Any:
    raise Break("deepcopy", f"a {type(value).__name__} is copied", "copy it outside the compiled function")
