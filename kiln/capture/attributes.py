"""Attribute lookup, assignment and deletion as CPython does them, with the user's hooks interpreted."""

from __future__ import annotations

import enum
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from kiln.base.errors import Break
from kiln.base.source import Attr, Const, DictAttr, Global, Item
from kiln.capture import symbolic
from kiln.capture.frame import Machine, UserError
from kiln.capture.world import CONSTANTS, DELETED, MISSING
from kiln.capture.wrappers import PLAIN_TYPES
from kiln.check.guards import Absent, Contains, Is, Length
from kiln.check.values import mro_lookup as mro_lookup
from kiln.ops.fake import FakeTensor

NATIVE_DESCRIPTORS = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip


def type_lookup(m: Machine, cls: type, name: str) -> Any:
    """The special method `name` of a class, or None; the lookup is guarded for the user's classes."""
    value = mro_lookup(cls, name)
    m.world.class_attr(cls, name, value)
    return None if value is MISSING else value


def load(m: Machine, value: Any, name: str, mode: str = "opaque") -> Any:
    """`value.name`."""
    kind = type(value)
    loader = LOADERS.get(kind)
    if loader is not None:
        return loader(m, value, name)
    if isinstance(value, type):
        return load_from_class(m, value, name)
    custom = mro_lookup(kind, "__getattribute__")
    if isinstance(custom, types.FunctionType):
        m.world.class_attr(kind, "__getattribute__", custom)
        try:
            return m.inline(custom, (value, name), {})
        except UserError as e:
            hook = mro_lookup(kind, "__getattr__")
            if not isinstance(e.error, AttributeError) or not isinstance(hook, types.FunctionType):
                raise
            m.world.class_attr(kind, "__getattr__", hook)
            return m.inline(hook, (value, name), {}, mode)
    return load_from_object(m, value, name, mode)


def load_from_object(m: Machine, value: Any, name: str, mode: str = "opaque", hooks: bool = True) -> Any:
    """The generic protocol: data descriptor, instance dict, class attribute, `__getattr__`."""
    kind, world = type(value), m.world
    found = mro_lookup(kind, name)
    source = world.source(value) if id(value) not in world.shadows else None
    if isinstance(value, enum.Enum) and not isinstance(found, types.FunctionType):
        return load_from_member(m, value, name)
    if found is not MISSING and is_data_descriptor(found):
        world.class_attr(kind, name, found)
        return bind(m, found, value, kind, name, mode)
    if source is not None:
        pending = world.read_slot(value, name)
        if pending is not MISSING and pending is not DELETED:
            return pending
        space = instance_space(value) if pending is MISSING else None
        if space is not None and name in space:
            path = Attr(source, name) if isinstance(value, threading.local) else DictAttr(source, name)
            return world.outside(space[name], path)
    else:
        space = instance_space(value)
        if space is not None and name in space:
            return m.view(space[name])
    untouched = source is not None and pending is MISSING
    written = world.written(kind, name)
    if found is not MISSING or written is not MISSING:
        if untouched and space is not None:
            world.absent(value, name)
        if written is not MISSING:
            return written
        world.class_attr(kind, name, found)
        return bind(m, found, value, kind, name, mode)
    shadow = world.shadows.get(id(value))
    untouched = untouched or shadow is not None and space is not None and name not in shadow.space
    return load_by_hook(m, value, name, mode, untouched, hooks)


def load_from_member(m: Machine, value: enum.Enum, name: str) -> Any:
    """An attribute of a member of an enumeration, which may have more than a name and a value."""
    pending = m.world.read_slot(value, name)
    if pending is not MISSING and pending is not DELETED:
        return pending
    source = m.source(value)
    if source is not None and name in value.__dict__ and name not in ("_name_", "_value_"):
        return m.world.outside(value.__dict__[name], DictAttr(source, name))
    return m.native(getattr, value, name)


def load_by_hook(m: Machine, value: Any, name: str, mode: str, untouched: bool, hooks: bool) -> Any:
    """An attribute that is nowhere: what `__getattr__` says, or an error."""
    kind, world = type(value), m.world
    source = world.source(value) if id(value) not in world.shadows else None
    hook = mro_lookup(kind, "__getattr__") if hooks else MISSING
    if hook is torch.nn.Module.__getattr__:
        return load_from_module(m, value, name)
    if untouched:
        world.absent(value, name)
    if hooks and (source is not None or isinstance(hook, types.FunctionType)):
        world.class_attr(kind, "__getattr__", hook)
    if isinstance(hook, types.FunctionType):
        world.class_attr(kind, name, MISSING)
        return m.inline(hook, (value, name), {}, mode)
    if source is not None:
        world.class_attr(kind, name, MISSING)
    if callable(hook):
        return m.call(hook, (value, name))
    return m.native(missing, value, name)


def missing(value: Any, name: str) -> Any:
    error = AttributeError(f"'{type(value).__name__}' object has no attribute '{name}'")
    error.name, error.obj = name, value
    raise error


def lacking(kind: type, name: str, what: str) -> UserError:
    return UserError(AttributeError(f"property '{name}' of '{kind.__name__}' object has no {what}"))


def instance_space(value: Any) -> Any:
    """The instance dict of an object, or None."""
    get = getattr if isinstance(value, threading.local) else object.__getattribute__
    try:
        space = get(value, "__dict__")
    except AttributeError:
        return None
    return space if isinstance(space, dict) else None


def is_data_descriptor(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__get__") and (hasattr(kind, "__set__") or hasattr(kind, "__delete__"))


def load_from_module(m: Machine, module: torch.nn.Module, name: str) -> Any:
    """What nn.Module.__getattr__ does: parameters, buffers, submodules."""
    world = m.world
    source = world.source(module)
    for table in TABLES:
        space = None
        if source is None or world.read_slot(module, table) is not MISSING:
            space = load_from_object(m, module, table, hooks=False)
        if space is None:
            real = module.__dict__.get(table)
            if real is None:
                continue
            shadow = world.shadow_of.get(id(real))
            if shadow is None:
                if name in real:
                    assert source is not None
                    return world.outside(real[name], Item(DictAttr(source, table), name))
                continue
            space = shadow.copy
        found = world.item(space, name)
        if found is not MISSING or name in space:
            return m.view(space[name] if found is MISSING else found)
    lacks(m, module, name)
    world.absent(module, name)
    return m.native(missing, module, name)


TABLES = ("_parameters", "_buffers", "_modules")


def lacks(m: Machine, module: torch.nn.Module, name: str) -> None:
    """No parameter, buffer or submodule of the module has this name."""
    source, space = m.source(module), module.__dict__
    for table in TABLES:
        if source is not None and table in space and id(space[table]) not in m.world.shadow_of:
            m.world.guard(Contains(DictAttr(source, table), name, False))


def bind(m: Machine, found: Any, value: Any, kind: type, name: str, mode: str = "opaque") -> Any:
    """What a class attribute gives when it is read from an instance."""
    if isinstance(found, types.FunctionType):
        return types.MethodType(m.world.constant(found), value)
    if isinstance(found, property):
        if found.fget is None:
            raise lacking(kind, name, "getter")
        m.world.constant(found.fget)
        return m.call(found.fget, (value,), {}, mode)
    if isinstance(found, staticmethod):
        return m.world.constant(found.__func__)
    if isinstance(found, classmethod):
        return bind_class_method(m, found, kind)
    if isinstance(found, NATIVE_DESCRIPTORS):
        return bind_native(m, found, value, kind, name)
    if isinstance(found, functools.cached_property):
        result = m.call(m.world.constant(found.func), (value,))
        store_plain(m, value, name, result)
        return result
    getter = type_lookup(m, type(found), "__get__")
    if isinstance(getter, types.FunctionType):
        return m.call(getter, (m.world.constant(found), value, kind), {}, mode)
    if getter is not None:
        return m.native(getter, found, value, kind)
    return class_value(m, found, kind, name)


def class_value(m: Machine, found: Any, cls: Any, name: str) -> Any:
    """A plain attribute of a class or a module; a guard on that covers its identity."""
    if type(found) in (int, float) and (number := m.world.class_number(cls, name, found)) is not None:
        return number
    if type(found) in CONSTANTS or m.world.made_here(cls, name):
        return found
    return m.world.outside(found, Const(found, f"{cls.__name__}.{name}"))


def bind_class_method(m: Machine, found: classmethod[Any, Any, Any], cls: type) -> Any:
    inner = found.__func__
    if isinstance(inner, types.FunctionType):
        return types.MethodType(m.world.constant(inner), cls)
    return m.native(found.__get__, None, cls)


def bind_native(m: Machine, found: Any, value: Any, kind: type, name: str) -> Any:
    """A slot, a getset or a native method of an object."""
    world = m.world
    source = world.source(value) if id(value) not in world.shadows else None
    if name == "__dict__" and isinstance(found, types.GetSetDescriptorType):
        return world.instance_dict(value) if source is not None else value.__dict__
    if name == "__class__":
        return world.constant(kind)
    if isinstance(found, (types.GetSetDescriptorType, types.MemberDescriptorType)):
        if source is None:
            return m.view(m.native(getattr, value, name))
        pending = world.read_slot(value, name)
        if pending is DELETED:
            return m.native(missing, value, name)
        if pending is not MISSING:
            return pending
        real = world.reals.get(id(value), value)  # of a tensor
        if isinstance(found, types.MemberDescriptorType) and not hasattr(real, name):
            world.unset(source, name)
        return world.outside(m.native(found.__get__, real, kind), Attr(source, name))
    return m.native(found.__get__, value, kind)


# ---------------------------------------------------------------------- special kinds of objects


def load_from_class(m: Machine, cls: type, name: str) -> Any:
    """Attribute of a class: metaclass data descriptors, the class's own MRO, then the metaclass."""
    meta, world = type(cls), m.world
    on_meta = mro_lookup(meta, name)
    if on_meta is not MISSING and is_data_descriptor(on_meta):
        if isinstance(on_meta, property):
            return m.call(on_meta.fget, (cls,))
        if name == "__dict__":
            return world.class_space(cls)
        value = m.native(getattr, cls, name)
        return value if type(value) in CONSTANTS else world.outside(value, Attr(Const(cls), name))
    methods = (types.FunctionType, classmethod, staticmethod)
    if isinstance(cls, enum.EnumMeta) and not isinstance(mro_lookup(cls, name), methods):
        return class_value(m, m.native(getattr, cls, name), cls, name)
    written = world.written(cls, name)
    if written is not MISSING:
        return written
    found = mro_lookup(cls, name)
    world.class_attr(cls, name, found)
    if found is not MISSING:
        return from_class(m, found, cls, name)
    if on_meta is not MISSING:
        return bind(m, on_meta, cls, meta, name)
    hook = type_lookup(m, meta, "__getattr__")
    if isinstance(hook, types.FunctionType):
        return m.inline(hook, (cls, name), {})
    return m.native(getattr, cls, name)


def from_class(m: Machine, found: Any, cls: type, name: str) -> Any:
    """A class attribute read from the class itself."""
    if isinstance(found, types.FunctionType):
        return m.world.constant(found)
    if isinstance(found, classmethod):
        return bind_class_method(m, found, cls)
    if isinstance(found, staticmethod):
        return m.world.constant(found.__func__)
    if isinstance(found, (property, functools.cached_property)):
        return m.world.constant(found)
    if isinstance(found, (*NATIVE_DESCRIPTORS, types.BuiltinFunctionType)):
        return m.native(getattr, cls, name)
    getter = type_lookup(m, type(found), "__get__")
    if isinstance(getter, types.FunctionType):
        return m.call(getter, (m.world.constant(found), None, cls))
    return class_value(m, found, cls, name)


def load_from_python_module(m: Machine, module: types.ModuleType, name: str) -> Any:
    space = vars(module)
    if name not in space:
        hook = space.get("__getattr__")
        if isinstance(hook, types.FunctionType) and not (module.__name__ or "").startswith("torch"):
            found = m.call(m.world.constant(hook), (name,))
            for told in LOADED if isinstance(found, types.ModuleType) else ():
                told()
            return found
        m.world.guard(Contains(Const(space, module.__name__), name, False))
        return class_value(m, m.native(getattr, module, name), module, name)
    value = space[name]
    overlay = m.world.spaces.get(id(space))
    if overlay is None and module.__name__.partition(".")[0] == "torch" and isinstance(value, STABLE):
        if isinstance(value, PATCHED):
            m.world.guard(Is(Global(Const(space, "globals"), name), value))
        return m.world.constant(value)
    found = m.world.read_global(space, name)
    if found is DELETED:
        return m.native(missing, module, name)
    return found


#: What is to be done when the program has had a module loaded.
LOADED: list[Callable[[], None]] = []
#: What is the same object wherever it is read in torch, and of that what programs put others in place of.
STABLE = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType, torch.dtype)
PATCHED = STABLE[:2]


def load_from_super(m: Machine, value: Any, name: str) -> Any:
    this, owner, start = value.__thisclass__, value.__self__, value.__self_class__
    mro = start.__mro__
    for base in mro[mro.index(this) + 1 :]:
        if name in base.__dict__:
            found = base.__dict__[name]
            m.world.class_attr(base, name, found)
            if isinstance(owner, type) and owner is start:
                return super_from_class(m, found, start, name)
            return bind(m, found, owner, start, name)
    if name == "__class__":
        return super
    raise UserError(AttributeError(f"'super' object has no attribute '{name}'"))


class Above:
    """`super()` of a tensor of a subclass."""

    def __init__(self, this: type, owner: FakeTensor) -> None:
        self.__thisclass__, self.__self__, self.__self_class__ = this, owner, tensor_type(owner)


def super_from_class(m: Machine, found: Any, start: type, name: str) -> Any:
    if isinstance(found, types.BuiltinFunctionType):
        return found
    if isinstance(found, types.ClassMethodDescriptorType):
        return m.native(found.__get__, None, start)
    if isinstance(found, NATIVE_DESCRIPTORS):
        return found
    return from_class(m, found, start, name)


def load_from_cell(m: Machine, value: types.CellType, name: str) -> Any:
    if name != "cell_contents":
        return m.native(getattr, value, name)
    found = m.world.read_cell(value)
    if found is MISSING:
        raise UserError(ValueError("Cell is empty"))
    return found


def load_from_method(m: Machine, value: types.MethodType, name: str) -> Any:
    if name in ("__func__", "__self__"):
        return getattr(value, name)
    if name in ("__call__", "__get__", "__eq__", "__hash__", "__reduce__", "__class__"):
        return m.native(getattr, value, name)
    return load(m, value.__func__, name)


def load_from_tensor(m: Machine, value: FakeTensor, name: str) -> Any:
    """Attributes of tensors: properties without tensors are constants, methods bound, the rest recorded."""
    world, name = m.world, ALIASES.get(name, name)
    pending = world.read_slot(value, name) if world.instance else MISSING
    if pending is not MISSING and pending is not DELETED:
        return pending
    if m.modes or value.real_type not in PLAIN_TYPES:
        special: Any = SUBCLASSES["load"](m, value, name)
        if special is not MISSING:
            return special
    if name == "__class__":
        return world.constant(tensor_type(value))
    if name == "__dict__":
        why = "the __dict__ of a tensor is read"
        raise Break("tensor-attribute", why, "keep such values beside the tensor")
    found = mro_lookup(value.real_type if value.real_type in PLAIN_TYPES else torch.Tensor, name)
    source = world.source(value)
    if name == "grad":
        if source is None or id(value) not in world.reals:
            return None
        real = world.reals[id(value)]
        return world.outside(real.grad, Attr(source, name))
    if found is MISSING:
        return load_own(m, value, name)
    if isinstance(found, types.FunctionType):
        return types.MethodType(world.constant(found), value)
    if isinstance(found, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return m.native(getattr, value, name)
    if name in RECORDED:
        # What is written through `data` leaves no trace in the tensor's version.
        value.value, value.value_version = None, -1
        return m.torch_call(getattr, (value, name), {})
    if isinstance(found, property):
        return m.call(found.fget, (value,))
    if name == "_base":
        return load_base(m, value)
    if source is not None and name in UNCOVERED and id(value) in world.reals:
        found = world.outside(getattr(world.reals[id(value)], name), Attr(source, name))
        # The graph has counted on by the time that residual code runs.
        return symbolic.concrete(found) + value._version if name == "_version" else found
    m.look_at(name in UNCOVERED)
    return m.native(getattr, value, name)


def load_base(m: Machine, value: FakeTensor) -> Any:
    """What a tensor is a view of; one from outside may be a view itself."""
    base = value._base
    root = value if base is None else base
    source, real = m.source(root), m.world.reals.get(id(root))
    outer = None if source is None or real is None else m.world.outside(real._base, Attr(source, "_base"))
    return base if outer is None else outer


def load_own(m: Machine, value: FakeTensor, name: str) -> Any:
    """An attribute that the program has given to a tensor."""
    source, real = m.source(value), m.world.reals.get(id(value))
    if real is not None and source is not None and name in getattr(real, "__dict__", {}):
        return m.world.outside(real.__dict__[name], DictAttr(source, name))
    if name in value.__dict__ and name not in FAKE_SLOTS:
        return value.__dict__[name]
    if real is not None and source is not None:
        m.world.guard(Absent(source, name))
    raise UserError(AttributeError(f"'{tensor_type(value).__name__}' object has no attribute '{name}'"))


#: Attributes of tensors of subclasses, filled by `subclasses`.
SUBCLASSES: dict[str, Any] = {}
#: What modes make of torch calls; filled by `function_modes`.
MODES: dict[str, Any] = {}
ALIASES = {"_grad": "grad"}
#: Facts that no guard on a tensor has.
UNCOVERED = frozenset({"is_leaf", "grad_fn", "retains_grad", "_version", "output_nr", "name"})
RECORDED = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
FAKE_SLOTS = frozenset({"real_type", "_is_param", "wrapped"})


def tensor_type(value: FakeTensor) -> type:
    kind: type = getattr(value, "real_type", None) or torch.Tensor
    return kind


def load_from_number(m: Machine, value: Any, name: str) -> Any:
    """Attributes and methods of numbers need the number itself, but for the ones that every int has."""
    if name == "__class__":
        return m.world.constant(symbolic.SEEN_AS[type(value)])
    if type(value) is torch.SymInt and name in ("real", "numerator"):
        return value
    return load(m, symbolic.concrete(value), name)


LOADERS: dict[type, Any] = {
    **dict.fromkeys(symbolic.SYMBOLIC, load_from_number),
    FakeTensor: load_from_tensor,
    types.ModuleType: load_from_python_module,
    super: load_from_super,
    Above: load_from_super,
    types.CellType: load_from_cell,
    types.MethodType: load_from_method,
}

# ---------------------------------------------------------------------- writing


def store(m: Machine, value: Any, name: str, item: Any, mode: str = "opaque") -> None:
    """`value.name = item`."""
    kind = type(value)
    storer = STORERS.get(kind)
    if storer is not None:
        storer(m, value, name, item)
        return
    if isinstance(value, types.ModuleType):
        m.world.write_global(vars(value), name, item)
        return
    custom = type_lookup(m, kind, "__setattr__")
    if custom is torch.nn.Module.__setattr__ and store_on_module(m, value, name, item):
        return
    if isinstance(custom, types.FunctionType):
        m.inline(custom, (value, name, item), {}, mode)
        return
    if getattr(custom, "__name__", "") != "__setattr__":
        m.call(custom, (value, name, item))
        return
    store_by_protocol(m, value, name, item, mode)


def store_by_protocol(m: Machine, value: Any, name: str, item: Any, mode: str = "opaque") -> None:
    """What object.__setattr__ does."""
    kind = type(value)
    found = mro_lookup(kind, name)
    if found is not MISSING:
        m.world.class_attr(kind, name, found)
        if isinstance(found, property):
            if found.fset is None:
                raise lacking(kind, name, "setter")
            m.call(m.world.constant(found.fset), (value, item), {}, mode)
            return
        setter = type_lookup(m, type(found), "__set__")
        if isinstance(setter, types.FunctionType):
            m.call(setter, (m.world.constant(found), value, item), {}, mode)
            return
        if name in ("__dict__", "__class__"):
            why = f"{name} of a {kind.__name__} is replaced"
            raise Break("attribute-write", why, "change the attributes one by one")
    store_plain(m, value, name, item)


def store_plain(m: Machine, value: Any, name: str, item: Any) -> None:
    if type(value) is types.CellType:
        m.world.write_cell(value, item)
    elif m.source(value) is not None and id(value) not in m.world.shadows:
        if isinstance(value, type):
            refuse_behaviour(value, name, item)
        found = mro_lookup(type(value), name)
        slot = is_data_descriptor(found)
        if name in LINKS and found is LINKS[name]:
            m.native(setattr, BaseException(), name, item)  # raises where it is no exception
            if name == "__cause__":
                m.world.write_slot(value, "__suppress_context__", True)
        elif slot and isinstance(found, NATIVE_DESCRIPTORS) and not found.__objclass__.__flags__ & 1 << 9:
            why = f"{name} of a {type(value).__name__}, which native code looks at, is written"
            raise Break("attribute-write", why, "set it outside the compiled function")
        if instance_space(value) is None and not slot and not isinstance(value, type):
            m.native(setattr, value, name, item)  # raises
        m.world.write_slot(value, name, item)
    else:
        m.native(type.__setattr__ if isinstance(value, type) else object.__setattr__, value, name, item)


#: What leads from an exception to others: native code that looks at exceptions looks at no links.
LINKS = {name: vars(BaseException)[name] for name in ("__cause__", "__context__")}


def refuse_behaviour(cls: type, name: str, item: Any = None) -> None:
    """Break where an attribute of a class from outside is written by which its objects behave otherwise."""
    found, dunder = mro_lookup(cls, name), name.startswith("__") and name.endswith("__")
    if dunder or any(hasattr(type(value), "__get__") for value in (found, item)):
        why = f"{name} of the class {cls.__name__} is replaced"
        raise Break("class-write", why, "change the class outside the compiled function")


def store_on_module(m: Machine, module: Any, name: str, item: Any) -> bool:
    """What nn.Module.__setattr__ does with plain values and buffers; False where its own code must say."""
    tensor = isinstance(item, FakeTensor)
    kept = tensor and (tensor_type(item) is not torch.Tensor or m.call(isinstance, (item, torch.nn.Buffer)))
    if isinstance(item, torch.nn.Module) or kept or mro_lookup(type(module), name) is not MISSING:
        return False
    space, source = instance_space(module), m.source(module)
    if any(name in space.get(table, ()) for table in ("_parameters", "_modules")):
        return False
    if name in space.get("_buffers", ()):
        if BUFFER_HOOKS or not isinstance(item, (torch.Tensor, types.NoneType)) or source is None:
            return False
        m.world.guard(Contains(DictAttr(source, "_buffers"), name, True))
        m.world.guard(Length(Const(BUFFER_HOOKS, "_global_buffer_registration_hooks"), 0))
        return m.world.write_item(load_from_object(m, module, "_buffers", hooks=False), name, item)
    lacks(m, module, name)
    store_plain(m, module, name, item)
    return True


BUFFER_HOOKS = torch.nn.modules.module._global_buffer_registration_hooks


def store_on_tensor(m: Machine, value: FakeTensor, name: str, item: Any) -> None:
    name = ALIASES.get(name, name)
    if value.real_type not in PLAIN_TYPES and SUBCLASSES["store"](m, value, name, item):
        return
    if name == "requires_grad" and type(item) is bool:
        m.torch_call(torch.Tensor.requires_grad_, (value, item), {})
        return
    if name == "data" and exchange_data(m, value, item):
        return
    if name in ("data", "requires_grad", "names", "real", "imag"):
        raise Break("metadata-mutation", f"{name} of a tensor is assigned", "make a new tensor instead")
    found = mro_lookup(torch.Tensor, name)
    if found is not MISSING and (name != "grad" or not may_be_grad(value, item)):
        raise Break("tensor-attribute", f"{name} of a tensor is assigned", "make a new tensor instead")
    m.world.write_tensor_slot(value, name, item)


def may_be_grad(value: FakeTensor, item: Any) -> bool:
    """Whether torch takes this as the gradient of a tensor."""
    facts = ("shape", "dtype", "device", "layout")
    alike = type(item) is FakeTensor and all(getattr(item, name) == getattr(value, name) for name in facts)
    return item is None or alike


STORERS: dict[type, Any] = {FakeTensor: store_on_tensor}


def exchange_data(m: Machine, value: FakeTensor, item: Any) -> bool:
    """Give a tensor from outside the data that another has now; the real one gets it after the graph."""
    plain = type(item) is FakeTensor and value.real_type in PLAIN_TYPES and item.real_type in PLAIN_TYPES
    if not plain or m.source(value) is None or any(type(n) is not int for n in (*value.shape, *item.shape)):
        return False
    other = m.torch_call(getattr, (item, "data"), {})
    if m.native(m.recorder.exchange, value, other):
        m.exchanged.append((m.safe_step(), value))
    m.look_at(history=False)
    m.world.write_tensor_slot(value, "data", other)
    return True


def delete(m: Machine, value: Any, name: str, mode: str = "opaque") -> None:
    """`del value.name`."""
    kind = type(value)
    custom = type_lookup(m, kind, "__delattr__")
    if isinstance(custom, types.FunctionType):
        m.inline(custom, (value, name), {}, mode)
        return
    if getattr(custom, "__name__", "") != "__delattr__":
        m.call(custom, (value, name))
        return
    delete_by_protocol(m, value, name, mode)


def delete_by_protocol(m: Machine, value: Any, name: str, mode: str = "opaque") -> None:
    """What object.__delattr__ does."""
    kind = type(value)
    found = mro_lookup(kind, name)
    if isinstance(found, property):
        if found.fdel is None:
            raise lacking(kind, name, "deleter")
        m.call(found.fdel, (value,), {}, mode)
        return
    deleter = type_lookup(m, type(found), "__delete__") if found is not MISSING else None
    if isinstance(deleter, types.FunctionType):
        m.call(deleter, (found, value), {}, mode)
        return
    if kind is types.CellType:
        m.world.write_cell(value, MISSING)
    elif isinstance(value, types.ModuleType):
        m.world.write_global(vars(value), name, MISSING)
    elif isinstance(value, type) and m.source(value) is not None:
        why = f"{name} of the class {value.__name__} is deleted"
        raise Break("class-write", why, "change the class outside the compiled function")
    elif m.source(value) is not None and id(value) not in m.world.shadows:
        pending = m.world.read_slot(value, name)
        nowhere = name not in (instance_space(value) or ()) and found is MISSING
        if pending is DELETED or pending is MISSING and nowhere:
            raise UserError(AttributeError(f"'{kind.__name__}' object has no attribute '{name}'"))
        m.world.write_slot(value, name, MISSING)
    else:
        m.native(object.__delattr__, value, name)
