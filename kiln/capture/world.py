"""What capture knows of the outside: where values came from, what was read (guards), what is to be written.

Containers from outside are seen by the program as *shadows*: copies that native code may read and change
freely. What a shadow differs by from its first state at the end is written back after the graph has run.
Instance dicts, globals and cells that are written get the same treatment through overlays.
"""

from __future__ import annotations

import builtins
import collections
import copy as copying
import datetime
import decimal
import enum
import fractions
import functools
import operator
import pathlib
import re
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from typing import Any

import torch

from kiln.base import marks
from kiln.base.dataclass import dataclass
from kiln.base.errors import Break
from kiln.base.source import (
    Arg,
    Attr,
    CellContents,
    ClosureCell,
    Const,
    Derived,
    DictAttr,
    Global,
    Item,
    Source,
)
from kiln.capture import runtime, wrappers
from kiln.capture.fake_arrays import OpenText
from kiln.capture.frame import Replaced
from kiln.capture.purity import DICT_VIEWS
from kiln.capture.recorder import Recorder
from kiln.capture.varying import STATIC, Shape, Varying, marks_of
from kiln.check.guards import MISSING as MISSING
from kiln.check.guards import (
    Absent,
    ClassAttr,
    Contains,
    Custom,
    Distinct,
    Equals,
    FunctionState,
    Guard,
    Is,
    Keys,
    Length,
    SameObject,
    SetEquals,
    TypeIs,
)
from kiln.check.shapes import AnyNumber, Read, ShapedMatch
from kiln.check.torch_guards import TensorMatch
from kiln.check.tree import GuardSet, Moved
from kiln.ops.fake import fake_like

BUILTINS = vars(builtins)
CONSTANTS = frozenset({
    int, float, complex, str, bytes, bool, type(None), type(Ellipsis), type(NotImplemented), range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo,
})  # fmt: skip
OF_NUMBERS = (slice, torch.Size)  # constants whose numbers may vary
BY_IDENTITY = (
    type, types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType, property, staticmethod, classmethod, types.CodeType,
    functools._lru_cache_wrapper, enum.Enum, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
    types.GenericAlias,
)  # fmt: skip
TEXTS = (str, bytes)
DICTS = (dict, collections.OrderedDict)  # those whose items may be read one by one
BUILTIN_METHOD: type = type(re.compile("").match)  # native methods that know the class which defines them
IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: nobody can rebind the attributes of such a class


@dataclass(slots=True, eq=False)
class Shadow:
    """A container from outside, and the copy that stands for it during capture."""

    real: Any
    copy: Any
    source: Source
    before: Any = None  # the copy's contents when it was last known to equal the real container's
    full: bool = False  # every item has been wrapped and guarded
    items: dict[Any, Any] = field(default_factory=dict)  # items read or written one by one
    #: Keys of a dict written before anybody asked what it holds; what a list or deque got at its end then.
    written: set[Any] = field(default_factory=set)
    appended: list[Any] = field(default_factory=list)
    space: dict[str, Any] = field(default_factory=dict)  # the copy's instance attributes when capture began

    def now(self) -> Any:
        """What the copy holds, whatever its subclass says."""
        if isinstance(self.copy, dict):
            return self.copy if type(self.copy) is dict else runtime.contents(self.copy)
        if isinstance(self.copy, set):
            return set(set.__iter__(self.copy))
        return list((list if isinstance(self.copy, list) else collections.deque).__iter__(self.copy))

    def changed(self) -> bool:
        """Whether the copy differs from the real container."""
        if not self.full:
            return bool(self.written or self.appended)
        now, before = self.now(), self.before
        if isinstance(now, set):
            return bool(now != before)
        if len(now) != len(before):
            return True
        if isinstance(now, dict):
            if not all(map(operator.is_, now, before)) and list(now) != list(before):
                return True
            now, before = now.values(), before.values()
        return not all(map(operator.is_, now, before))


@dataclass(slots=True, eq=False)
class Overlay:
    """Pending writes to the named slots of an object, a globals dict or a cell."""

    owner: Any
    source: Source
    writes: dict[str, Any] = field(default_factory=dict)


class World:
    """Sources, guards, shadows and pending writes of one capture."""

    def __init__(
        self, recorder: Recorder, unstable: frozenset[str] = frozenset(), varying: Varying | None = None
    ) -> None:
        self.recorder = recorder
        self.varying = varying or Varying(STATIC)
        self.guards = GuardSet()
        #: Guards as they came, and paths to what was known by them.
        self.events: list[Guard | Moved | Source] = []
        self.writes = 0  # how often something was written, or something read that had been
        self.unstable = unstable
        self.looked_at: frozenset[str] = frozenset()  # paths of texts that the program is known to look at
        self.texts: dict[Source, OpenText] = {}  # those that are left open
        self.sources: dict[int, Source] = {}
        self.shadows: dict[int, Shadow] = {}  # by id of the copy
        self.shadow_of: dict[int, Shadow] = {}  # by id of the real container
        self.instance: dict[int, Overlay] = {}  # attribute writes, by id of the owner
        self.cleared: dict[int, Any] = {}  # tensors from outside whose gradient the program lets go at once
        self.spaces: dict[int, Overlay] = {}  # global writes, by id of the namespace
        self.cells: dict[int, Overlay] = {}  # writes to cells from outside, by id of the cell
        self.tensors: dict[int, tuple[Any, Source]] = {}  # by id of the real tensor
        self.reals: dict[int, torch.Tensor] = {}  # by id of the fake
        self.things: dict[int, tuple[type, Source]] = {}  # objects and containers from outside, by id
        self.pinned: set[int] = set()
        self.sole: set[torch.Generator] = set()  # generators that the graph may draw from itself
        self.class_spaces: dict[int, type] = {}  # by id of the mapping proxy
        self.streams: dict[int, Any] = {}  # copies of iterators from outside, by id
        self.owned_streams: set[int] = set()  # those that another one advances
        self.generators: list[Any] = []  # the interpreter's own that stand for generators from outside
        self.specialises = True  # whether the backend may build on the facts of example inputs
        self.writes_last = False  # whether its graphs write to what lasts after all that may raise
        self.looked = False  # whether the program may have looked at a fact of a tensor: its shape, dtype, …
        self.owned_matches: list[TensorMatch] = []  # what parameters and buffers of pinned modules are
        self.counted = False  # whether a number that varies is a key of a dict or set
        self.switched = False  # whether the program has changed a setting of torch's
        self.class_writes = False  # whether writes to attributes of classes are held back
        self.made_cells: set[int] = set()  # ids of the cells made during capture
        self.made_classes: set[int] = set()  # and of the classes: nobody else changes them
        self.keep: list[Any] = []
        #: Native contexts by id, and the call that enters one like it.
        self.entered: dict[int, tuple[Any, ...]] = {}
        self.wrappers: dict[int, Any] = {}
        self.machine: Any = None  # the interpreter of this capture, while it runs
        self.arrays: list[tuple[Any, Source]] = []  # those whose contents are taken to stay
        self.memories: dict[int, Any] = {}  # what is known of the memory of arrays, by id of its owner
        self.frozen: set[int] = set()  # ids of copies that stand for objects whose contents are guarded

    # ------------------------------------------------------------------ reading

    def guard(self, guard: Guard | Moved) -> None:
        self.events.append(guard)
        frames = self.machine.frames if self.machine is not None else ()
        self.guards.add(guard, (frames[-1].code, frames[-1].index) if frames else None)

    def source(self, value: Any) -> Source | None:
        """The path of an object from outside; None for what was made during capture."""
        return self.sources.get(id(value))

    def remember(self, value: Any, source: Source) -> None:
        if id(value) not in self.sources:
            self.sources[id(value)] = source
            self.keep.append(value)

    def unguarded(self, value: Any) -> bool:
        """Whether native code would read a state of this value from outside that no guard covers."""
        key = id(value)
        return key in self.sources and key not in self.shadows and key not in self.frozen

    def outside(self, value: Any, source: Source) -> Any:
        """The program's view of a value read from outside, with the guards that the read calls for."""
        kind = type(value)
        if kind in CONSTANTS and kind not in OF_NUMBERS:
            if (kind is int or kind is float) and self.varying.numbers:
                number = self.varying.number(value, source, not rooted(source))
                if number is not None:
                    return self.number(number, value, source)
            if kind in TEXTS and self.unstable and (text := self.text(value, source)) is not None:
                return text
            self.guard(Equals(source, value))
            return value
        known = self.sources.get(id(value))
        if known is not None:
            return self.again(value, known, source)
        reader = READERS.get(kind)
        if reader is not None:
            return reader(self, value, source)
        for base, reader in READER_BASES:
            if isinstance(value, base):
                return reader(self, value, source)
        return self.thing(value, source)

    def text(self, value: Any, source: Source) -> OpenText | None:
        """A text that is left open, as it has changed and nobody is known to look at it."""
        if str(source) not in self.unstable or str(source) in self.looked_at:
            return None
        self.guard(TypeIs(source, type(value)))
        return self.texts.setdefault(source, OpenText(type(value), source))

    def number(self, number: Any, value: int | float, source: Source) -> Any:
        """A number that varies: symbolic, and an input of the graph where the graph needs it."""
        symbol = number.node.expr
        self.guard(AnyNumber(source, type(value), value, symbol.high))
        self.recorder.symbol(symbol, "value", source)
        return number

    def again(self, value: Any, known: Source, source: Source) -> Any:
        """A second path to an object that is known already."""
        if known != source:
            if id(value) in self.pinned:
                self.guard(Is(source, value))
            else:
                self.guard(SameObject(known, source))
        else:
            self.events.append(source)
        shadow = self.shadow_of.get(id(value))
        if shadow is not None:
            return shadow.copy
        if id(value) in self.tensors:
            return self.tensors[id(value)][0]
        return self.wrappers.get(id(value), value)

    def stands_for(self, copy: Any, value: Any, source: Source) -> Any:
        """From now on the program meets `copy` where the value is."""
        self.remember(value, source)
        self.wrappers[id(value)] = copy
        self.remember(copy, source)
        return copy

    def bounds(self, value: Any, source: Source) -> Any:
        """A slice: what stands in it is read."""
        self.guard(TypeIs(source, slice))
        parts = [self.outside(getattr(value, name), Attr(source, name)) for name in ("start", "stop", "step")]
        return self.stands_for(slice(*parts), value, source)

    def thing(self, value: Any, source: Source) -> Any:
        """Any other object: known by its exact type and its path."""
        self.guard(TypeIs(source, type(value)))
        self.remember(value, source)
        self.things[id(value)] = type(value), source
        return value

    def pin(self, value: Any, source: Source) -> Any:
        """An object that must stay the same one; its parts are reached from the object itself."""
        if not (isinstance(source, Const) and source.value is value):
            self.guard(Is(source, value))
        self.pinned.add(id(value))
        self.remember(value, Const(value, str(source)))
        return value

    def module(self, value: torch.nn.Module, source: Source) -> Any:
        """A module is pinned, unless other modules have come along the same path, or one on the way to it."""
        if self.unstable and not rooted(source) and any(str(at) in self.unstable for at in way(source)):
            return self.thing(value, source)
        self.pin(value, source)
        self.guard(TypeIs(Const(value, str(source)), type(value)))
        return value

    def generator(self, value: torch.Generator, source: Source) -> Any:
        """A random generator is pinned, unless others have come along the same path: then it is lent."""
        default = default_generator(value.device)
        varies = Read(source) in self.varying.dynamic.reads or str(source) in self.unstable
        self.sole.add(default if varies else value)
        if value is default or not varies:
            return self.pin(value, source)
        self.outside(value.device, Attr(source, "device"))
        self.recorder.lend(value, source)
        return self.thing(value, source)

    def function(self, value: types.FunctionType, source: Source) -> Any:
        """A Python function: by identity where it lives in a namespace, by its code where it is passed in."""
        if rooted(source):
            return self.pin(value, source)
        self.guard(TypeIs(source, types.FunctionType))
        self.guard(FunctionState.of(source, value))
        self.remember(value, source)
        return value

    def method(self, value: types.MethodType, source: Source) -> Any:
        self.guard(TypeIs(source, types.MethodType))
        func = self.outside(value.__func__, Attr(source, "__func__"))
        owner = self.outside(value.__self__, Attr(source, "__self__"))
        return self.stands_for(types.MethodType(func, owner), value, source)

    def native_method(self, value: Any, source: Source) -> Any:
        """A builtin function, or a native method bound to an object from outside."""
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            return self.pin(value, source)
        self.guard(TypeIs(source, type(value)))
        inner = self.outside(owner, Attr(source, "__self__"))
        name: str = value.__name__
        bound = getattr(inner, name, None)
        if type(bound) is not type(value) or getattr(owner, name, None) != value:
            raise Break("native-method", f"{source} is a bound native method", "call the method by its name")
        self.guard(Equals(Attr(source, "__name__"), name))
        self.remember(value, source)
        self.wrappers[id(value)] = bound
        return bound

    def tensor(self, value: torch.Tensor, source: Source) -> Any:
        """A tensor from outside: an input of the graph, or an attribute of it when its owner is pinned."""
        kind = type(value)
        if kind in wrappers.PLAIN_TYPES:
            return self.read_tensor(value, source, False)
        wrapper = wrappers.is_wrapper(kind)
        if not wrapper:
            wrappers.refuse(kind, f"{source} is a {kind.__name__}")
        with torch._C.DisableTorchFunctionSubclass():  # looks at it are nothing to its class
            return self.read_tensor(value, source, wrapper)

    def read_tensor(self, value: torch.Tensor, source: Source, wrapper: bool) -> Any:
        what = wrappers.exotic(value)
        if what:
            raise Break("tensor-layout", f"{source} is {what}", "only strided tensors are captured")
        as_attr = self.owned(source) and str(source) not in self.unstable
        if as_attr:
            self.guard(Is(source, value))
        shape = None if as_attr or wrapper else self.varying.tensor(value, source, not rooted(source))
        if wrapper:
            made = self.recorder.wrap(value, source, part=self.part, guard=self.guard)
            fake = self.recorder.input(value, source, as_attr, (made.shape, made.stride()))
            fake.wrapped = made
        elif shape is not None:
            fake = self.shaped(value, source, shape)
        else:
            match = TensorMatch.of(source, value)
            if as_attr:
                self.owned_matches.append(match)
            else:
                self.guard(match)
            fake = self.recorder.input(value, source, as_attr)
        return self.known_tensor(fake, value, source)

    def part(self, value: torch.Tensor, source: Source, whole: torch.Tensor) -> Any:
        """A tensor that another one from outside is made of: what the user said of that holds for it too."""
        marks = marks_of(whole) if value.shape == whole.shape else marks_of(value)
        shape = self.varying.tensor(value, source, not rooted(source), marks)
        if shape is None:
            self.guard(TensorMatch.of(source, value))
            return fake_like(value)
        return self.known_tensor(self.shaped(value, source, shape), value, source)

    def shaped(self, value: torch.Tensor, source: Source, shape: Shape) -> Any:
        """A tensor some of whose sizes are symbols."""
        self.guard(ShapedMatch.of(source, value, shape.extents, shape.strides))
        fake = self.recorder.input(value, source, False, (shape.size, shape.stride))
        for symbol in shape.symbols:
            read = self.varying.reads[symbol]
            self.recorder.symbol(symbol, read.what, fake, read.dim)
        return fake

    def parameter(self, value: torch.Tensor, source: Source, facts: Sequence[Any]) -> Any:
        """A tensor of these facts that a pinned module owns; that it is this one is guarded elsewhere."""
        self.owned_matches.append(TensorMatch(source, *facts))
        return self.known_tensor(self.recorder.input(value, source, True), value, source)

    def known_tensor(self, fake: Any, value: torch.Tensor, source: Source) -> Any:
        self.tensors[id(value)] = (fake, source)
        self.reals[id(fake)] = value
        self.sources[id(fake)] = source
        self.sources[id(value)] = source
        self.keep += (fake, value)
        return fake

    def owned(self, source: Source) -> bool:
        """Whether the path leads to a parameter or buffer of a pinned module."""
        return (isinstance(source, Item) and isinstance(source.base, DictAttr)
                and source.base.name in ("_parameters", "_buffers")
                and isinstance(source.base.base, Const)
                and isinstance(source.base.base.value, torch.nn.Module))  # fmt: skip

    def refuse_replaced(self) -> None:
        """Raise Replaced where the program has changed what was taken to stay: tensors of modules, arrays."""
        found = {str(source) for array, source in self.arrays if self.written_elsewhere(array)}
        for fake, source in self.tensors.values():
            if self.owned(source):
                at: Any = source
                shadow = self.shadow_of.get(id(vars(at.base.base.value).get(at.base.name)))
                now = {} if shadow is None else shadow.now() if shadow.full else shadow.items
                if now.get(at.key, fake) is not fake:
                    found.add(str(source))
        if found - self.unstable:
            raise Replaced(frozenset(found))

    def wrote_outside(self) -> bool:
        """Whether a tensor from outside that is no module's was written: arrays may share its memory."""
        uncounted = self.recorder.dispatch.writes > 0
        return any(
            (uncounted if fake.is_inference() else fake._version > 0) and not self.owned(source)
            for fake, source in self.tensors.values()
        )

    def written_elsewhere(self, array: Any) -> bool:
        """Whether a tensor from outside that may have been written shares the memory of an array."""
        start: int = array.__array_interface__["data"][0]
        for fake, _ in self.tensors.values():
            real = self.reals[id(fake)]
            written = fake.is_inference() or fake._version
            if written and real.device.type == "cpu" and real.layout is torch.strided:
                at, size = real.untyped_storage().data_ptr(), real.untyped_storage().nbytes()
                if at < start + array.nbytes and start < at + size:
                    return True
        return False

    # ------------------------------------------------------------------ containers

    def container(self, value: Any, source: Source) -> Any:
        """A mutable container: its shadow, empty-handed until somebody looks inside."""
        self.guard(TypeIs(source, type(value)))
        return self.adopt(Shadow(value, copying.copy(value), source))

    def adopt(self, shadow: Shadow) -> Any:
        self.shadows[id(shadow.copy)] = shadow
        self.shadow_of[id(shadow.real)] = shadow
        self.things[id(shadow.real)] = type(shadow.real), shadow.source
        self.remember(shadow.real, shadow.source)
        self.remember(shadow.copy, shadow.source)
        for name, item in getattr(shadow.real, "__dict__", {}).items():
            shadow.space[name] = self.outside(item, DictAttr(shadow.source, name))
            shadow.copy.__dict__[name] = shadow.space[name]
        return shadow.copy

    def subclassed(self, value: Any, source: Source) -> Any:
        """An instance of a subclass of list, dict or set: contents and instance dict are both shadowed."""
        self.guard(TypeIs(source, type(value)))
        copy = runtime.make_object(type(value))
        runtime.rewrite(copy, value)
        return self.touch(self.adopt(Shadow(value, copy, source)))

    def dict_view(self, value: Any, source: Source) -> Any:
        """The keys, values or items of a dict: those of what stands for the dict."""
        self.guard(TypeIs(source, type(value)))
        inner = self.touch(self.outside(runtime.viewed(value), Derived(source, runtime.viewed, "mapping")))
        return self.stands_for(runtime.dict_view(inner, type(value).__name__), value, source)

    def proxy(self, value: Any, source: Source) -> Any:
        """A read-only view of a mapping: the view of what stands for the mapping."""
        self.guard(TypeIs(source, types.MappingProxyType))
        inner = self.touch(self.outside(runtime.proxied(value), Derived(source, runtime.proxied, "mapping")))
        return self.stands_for(types.MappingProxyType(inner), value, source)

    def immutable(self, value: Any, source: Source) -> Any:
        """A tuple (or named tuple): rebuilt from the program's view of its items."""
        self.guard(TypeIs(source, type(value)))
        self.guard(Length(source, len(value)))
        items = [self.outside(item, Item(source, i)) for i, item in enumerate(value)]
        same = all(a is b for a, b in zip(items, value, strict=True))
        # Sizes and the results of torch ops are sequences in C, which only their own constructor builds.
        native = type(value) is torch.Size or hasattr(type(value), "n_sequence_fields")
        copy = value if same else type(value)(items) if native else tuple.__new__(type(value), items)
        if copy is not value and hasattr(value, "__dict__"):
            copy.__dict__.update(value.__dict__)  # read as those of any object from outside
        return self.stands_for(copy, value, source)

    def frozen_set(self, value: Any, source: Source) -> Any:
        self.guard(TypeIs(source, type(value)))
        self.elements(value, source)
        self.remember(value, source)
        return value

    def elements(self, value: Any, source: Source) -> None:
        """The program depends on what a set holds."""
        self.guard(SetEquals(source, frozenset(value)))
        if any(isinstance(item, torch.Tensor) for item in value):
            raise Break("set-of-tensors", f"{source} is a set of tensors", "use a list")

    def touch(self, value: Any) -> Any:
        """Make a value safe for native reading: what it holds from outside is wrapped and guarded."""
        shadow = self.shadows.get(id(value))
        if shadow is not None:
            if not shadow.full:
                try:
                    self.fill(shadow)
                except Break:
                    shadow.full = False  # it stands as it was
                    raise
        elif type(value) in (list, tuple, dict) and id(value) not in self.sources:
            for item in value.values() if type(value) is dict else value:
                if id(item) in self.shadows:
                    self.touch(item)
        return value

    def touch_deep(self, value: Any, seen: set[int] | None = None) -> Any:
        """Make a value safe for native code that reads what its containers hold, to any depth."""
        seen = set() if seen is None else seen
        if type(value) in CONSTANTS or id(value) in seen or not isinstance(value, NESTING):
            return value
        seen.add(id(value))
        self.touch(value)
        for item in list(dict.values(value)) if isinstance(value, dict) else list(value):
            self.touch_deep(item, seen)
        return value

    def value_like(self, value: Any, source: Source) -> Any:
        """An immutable object that is nothing but its value: known by its exact type and that value."""
        kind, state = type(value), value_of(value)
        self.guard(Custom(source, lambda v: type(v) is kind and value_of(v) == state, f"was {value!r}"))
        self.remember(value, source)
        return value

    def fill(self, shadow: Shadow) -> None:
        shadow.full = True
        real, copy, source = shadow.real, shadow.copy, shadow.source
        if isinstance(real, (set, frozenset)):
            self.elements(real, source)
            shadow.before = set(copy)
            return
        if isinstance(real, dict):
            items, mapping = runtime.contents(real), runtime.mapping_type(copy)
            self.guard(Keys(source, tuple(items)))
            if any(isinstance(key, (torch.Tensor, tuple)) for key in items):
                mapping.clear(copy)
            for key, item in items.items():
                wrapped = shadow.items[key] if key in shadow.items else self.outside(item, Item(source, key))
                mapping.__setitem__(copy, self.key(key, source), wrapped)
            shadow.before = runtime.contents(copy)
            shadow.before.update({key: MISSING for key in shadow.written if key in items})
            runtime.fill_dict(copy, {key: item for key, item in shadow.items.items() if key not in items})
            if isinstance(real, collections.defaultdict):
                self.outside(real.default_factory, Attr(source, "default_factory"))
            return
        self.guard(Length(source, len(real)))
        for i, item in enumerate(list(real)):
            copy[i] = shadow.items[i] if i in shadow.items else self.outside(item, Item(source, i))
        shadow.before = list(copy)
        copy.extend(shadow.appended)

    def key(self, key: Any, source: Source) -> Any:
        """The program's view of a key of a dict, whose keys are guarded by identity."""
        if isinstance(key, torch.Tensor):
            return self.outside(key, Const(key, f"a key of {source}"))
        if isinstance(key, tuple) and any(isinstance(part, torch.Tensor) for part in nested(key)):
            why = f"tuples of tensors are keys of {source}"
            raise Break("dict-of-tensors", why, "use the tensors themselves")
        return key

    def unfilled(self, container: Any) -> Shadow | None:
        """The shadow behind a container that nobody has looked into as a whole."""
        shadow = self.shadows.get(id(container))
        return None if shadow is None or shadow.full else shadow

    def item(self, container: Any, key: Any) -> Any:
        """One item of a shadow that has not been filled, or MISSING where a plain native read is right."""
        shadow = self.unfilled(container)
        if shadow is None:
            return MISSING
        real = shadow.real
        if type(real) in DICTS:
            if type(key) not in (str, int, bool, type(None)) and not isinstance(key, (type, enum.Enum)):
                return MISSING
            if key in shadow.written:
                return shadow.items[key]
            if key not in real:
                self.guard(Contains(shadow.source, key, False))
                return MISSING
        elif type(real) is list and type(key) is int:
            added = len(shadow.appended)
            if -added <= key < 0:
                return shadow.appended[key]
            if not -len(real) <= key + (key < 0) * added < len(real):
                return MISSING
            if key < 0:
                self.guard(Length(shadow.source, len(real)))
                key += len(real) + added
        else:
            return MISSING
        if key not in shadow.items:
            shadow.items[key] = self.outside(real[key], Item(shadow.source, key))
        return shadow.items[key]

    def write_item(self, container: Any, key: Any, value: Any) -> bool:
        """Hold back `container[key] = value` for a dict that nobody has looked into; False for another."""
        shadow = self.unfilled(container)
        if shadow is None or type(shadow.real) is not dict or type(key) not in (str, int):
            return False
        shadow.items[key] = value
        shadow.written.add(key)
        return True

    def append(self, container: Any, items: Iterable[Any]) -> bool:
        """Hold back what a list or deque gets at its end that nobody has looked into; False for another."""
        shadow = self.unfilled(container)
        if shadow is None or type(shadow.real) not in (list, collections.deque):
            return False
        shadow.appended.extend(items)
        return True

    def length(self, container: Any) -> Any:
        """The length of an unfilled shadow, guarded alone; a number like others once it has varied."""
        shadow = self.unfilled(container)
        if shadow is None or shadow.written or type(shadow.real) not in (list, *DICTS):
            return None
        if str(shadow.source) in self.unstable:
            count = self.outside(len(shadow.real), Derived(shadow.source, len, "length"))
            return count + len(shadow.appended)
        self.guard(Length(shadow.source, len(shadow.real)))
        return len(shadow.real) + len(shadow.appended)

    def occupied(self, container: Any) -> bool | None:
        """Whether an unfilled shadow holds anything: it does once the program has put something there."""
        shadow = self.unfilled(container)
        if shadow is not None and shadow.changed():
            return True
        n = self.length(container)
        return None if n is None else bool(n > 0)

    def contains(self, container: Any, key: Any) -> bool | None:
        """Membership in an unfilled dict shadow, guarded alone."""
        shadow = self.unfilled(container)
        if shadow is None or type(shadow.real) not in DICTS or type(key) not in (str, int):
            return None
        if key in shadow.written:
            return True
        self.guard(Contains(shadow.source, key, key in shadow.real))
        return key in shadow.real

    # ------------------------------------------------------------------ named slots

    def instance_dict(self, owner: Any) -> Any:
        """The shadow of an outside object's __dict__, made when somebody asks for the dict itself."""
        source = self.sources[id(owner)]
        known = self.shadow_of.get(id(owner.__dict__))
        if known is not None:
            return known.copy
        real = owner.__dict__
        shadow = Shadow(real, {}, Attr(source, "__dict__"))
        shadow.full = True
        self.guard(Keys(shadow.source, tuple(real)))
        self.adopt(shadow)
        writes = self.instance.pop(id(owner), None)
        for name, item in real.items():
            shadow.copy[name] = self.outside(item, DictAttr(source, name))
        shadow.before = dict(shadow.copy)
        for name, item in writes.writes.items() if writes else ():
            if item is MISSING:
                shadow.copy.pop(name, None)
            else:
                shadow.copy[name] = item
        return shadow.copy

    def read_slot(self, owner: Any, name: str) -> Any:
        """A pending write of `owner.name`, or MISSING; a pending deletion comes out as DELETED."""
        pending = self.pending(self.instance.get(id(owner)), name)
        if pending is not MISSING:
            return pending
        if self.shadow_of:
            shadow = self.shadow_of.get(id(getattr(owner, "__dict__", None)))
            if shadow is not None:
                return shadow.copy.get(name, DELETED)
        return MISSING

    def pending(self, overlay: Overlay | None, name: str) -> Any:
        """What was written to a slot and is read again: DELETED for a deletion, MISSING where nothing was."""
        if overlay is None or name not in overlay.writes:
            return MISSING
        value = overlay.writes[name]
        if type(value) not in CONSTANTS:
            self.writes += 1  # a container may be changed through it
        return DELETED if value is MISSING else value

    def written(self, cls: type, name: str) -> Any:
        """What was written to the attribute of a class, or of a base, that a lookup finds first."""
        if self.class_writes:
            for base in cls.__mro__:
                pending = self.pending(self.instance.get(id(base)), name)
                if pending is not MISSING or name in base.__dict__:
                    return pending
        return MISSING

    def write_slot(self, owner: Any, name: str, value: Any) -> None:
        """Hold back `owner.name = value` (or its deletion, with MISSING) for an object from outside."""
        self.writes += 1
        shadow = self.shadow_of.get(id(getattr(owner, "__dict__", None)))
        if shadow is not None:
            if value is MISSING:
                del shadow.copy[name]
            else:
                shadow.copy[name] = value
            return
        self.class_writes = self.class_writes or isinstance(owner, type)
        overlay = self.instance.setdefault(id(owner), Overlay(owner, self.sources[id(owner)]))
        if overlay.writes.get(name) is MISSING:
            del overlay.writes[name]
        overlay.writes[name] = value
        self.keep.append(value)

    def read_global(self, namespace: dict[str, Any], name: str) -> Any:
        pending = self.pending(self.spaces.get(id(namespace)), name)
        if pending is not MISSING:
            return pending
        if name in namespace:
            return self.outside(namespace[name], Global(Const(namespace, "globals"), name))
        self.guard(Contains(Const(namespace, "globals"), name, False))
        return MISSING

    def write_global(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        self.writes += 1
        overlay = self.spaces.setdefault(id(namespace), Overlay(namespace, Const(namespace, "globals")))
        overlay.writes[name] = value

    def read_cell(self, cell: types.CellType) -> Any:
        """The contents of a cell; MISSING when it is empty."""
        pending = self.pending(self.cells.get(id(cell)), "cell_contents")
        if pending is not MISSING:
            return MISSING if pending is DELETED else pending
        source = self.sources.get(id(cell))
        try:
            value = cell.cell_contents
        except ValueError:
            return MISSING
        return value if source is None else self.outside(value, CellContents(source))

    def write_cell(self, cell: types.CellType, value: Any) -> None:
        source = self.sources.get(id(cell))
        if source is not None:
            self.writes += 1
            self.cells.setdefault(id(cell), Overlay(cell, source)).writes["cell_contents"] = value
        elif value is MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    def closure(self, function: types.FunctionType) -> tuple[types.CellType, ...]:
        """The cells of a function, each known by its path when the function is from outside."""
        cells = function.__closure__ or ()
        source = self.sources.get(id(function))
        if source is not None:
            for i, (cell, name) in enumerate(zip(cells, function.__code__.co_freevars, strict=True)):
                if id(cell) not in self.sources and id(cell) not in self.made_cells:
                    self.remember(cell, ClosureCell(source, i, name))
        return cells

    def made_class(self, cls: Any) -> Any:
        """A class that the program made; should it be seen outside, the program makes one in every call."""
        self.made_classes.add(id(cls))
        self.machine.steps[id(cls)] = self.machine.safe_step()
        self.keep.append(cls)
        return cls

    def made_here(self, cls: Any, name: str) -> bool:
        """Whether an attribute of a class was put there by the program, in the body of a class."""
        owners = [base for base in getattr(cls, "__mro__", ()) if name in base.__dict__]
        return bool(owners) and id(owners[0]) in self.made_classes

    def setting(self, function: Any, value: Any) -> None:
        """What a function of torch's says of a setting was read."""
        if not self.switched:
            said = Derived(Const(function, function.__name__), operator.call, "answer")
            self.guard(Equals(said, value))

    def builtin(self, name: str, value: Any) -> None:
        """A builtin was read."""
        self.guard(Is(Global(Const(BUILTINS, "builtins"), name), value))

    def constant(self, value: Any) -> Any:
        """An object that is the same in every call: reached from itself, without a guard."""
        self.pinned.add(id(value))
        self.remember(value, Const(value))
        return value

    def class_space(self, cls: type) -> Any:
        """The __dict__ of a class; items read from it are attributes of the class."""
        if (overlay := self.instance.get(id(cls))) is not None and overlay.writes:
            why = f"the __dict__ of the class {cls.__name__}, whose attributes were written before, is read"
            raise Break("class-write", why, "read the attribute itself")
        proxy = cls.__dict__
        self.keep.append(proxy)
        self.class_spaces[id(proxy)] = cls
        return proxy

    def class_item(self, proxy: Any, name: Any) -> Any:
        """An item of such a dict, or MISSING."""
        cls = self.class_spaces.get(id(proxy))
        if cls is None or type(name) is not str:
            return MISSING
        if name not in proxy:
            pending = self.read_slot(cls, name)
            return MISSING if pending is DELETED else pending
        self.class_attr(cls, name, proxy[name])
        if self.made_here(cls, name):
            return proxy[name]
        return self.outside(proxy[name], Const(proxy[name], f"{cls.__name__}.{name}"))

    def identify_marks(self, function: Any, marked: frozenset[str]) -> None:
        """The program depends on the user's word on a function; on which it is, where it joins the graph."""
        source = self.sources.get(id(function))
        if marked & {marks.ALLOW, marks.CONSTANT}:
            self.identify(function)
        elif source is not None and not isinstance(source, Const):
            self.guard(SetEquals(Derived(source, marks.of, "marks"), marked))

    def identify(self, value: Any) -> None:
        """The program depends on which object this is."""
        source = self.sources.get(id(value))
        if source is not None and not isinstance(source, Const):
            self.guard(Is(source, value))

    def class_attr(self, cls: type, name: str, value: Any) -> None:
        """A lookup of `name` along the MRO of `cls` was made."""
        if isinstance(value, types.FunctionType) and not self.made_here(cls, name):
            if value.__closure__ or value.__defaults__ or value.__kwdefaults__:
                self.constant(value)  # what it holds is from outside, too
        if not cls.__flags__ & IMMUTABLE_TYPE and id(cls) not in self.made_classes:
            if self.class_number(cls, name, value) is None:
                self.guard(ClassAttr(cls, name, value))

    def class_number(self, cls: Any, name: str, value: Any) -> Any:
        """What stands for a number that is an attribute of a class and has varied, else None."""
        if not self.varying.numbers or type(value) not in (int, float) or not isinstance(cls, type):
            return None
        source = Attr(Const(cls), name)
        number = self.varying.number(value, source, False)
        return None if number is None else self.number(number, value, source)

    def absent(self, owner: Any, name: str) -> None:
        source = self.sources.get(id(owner))
        if source is None:
            return
        if isinstance(owner, threading.local):
            self.guard(Custom(source, lambda state: name not in vars(state), f"had no {name}"))
        else:
            self.guard(Absent(source, name))

    def unset(self, source: Source, name: str) -> None:
        """A slot of the object at this path has no value."""
        text = f"had no value in its slot {name!r}"
        self.guard(Custom(source, lambda value: not hasattr(value, name), text))

    def write_tensor_slot(self, tensor: Any, name: str, value: Any) -> None:
        """Hold back an attribute write on a tensor, from outside or made here."""
        self.writes += 1
        source = self.sources.get(id(tensor), Const(tensor, "tensor"))
        self.instance.setdefault(id(tensor), Overlay(tensor, source)).writes[name] = value
        self.keep.append(tensor)
        if name == "grad" and value is None and id(tensor) in self.reals and not self.machine.expected:
            self.cleared[id(tensor)] = tensor

    def finish_guards(self) -> None:
        """Guards over several inputs, and on the facts of parameters where anything may depend on them."""
        conditions = self.varying.conditions()
        if conditions is not None:
            self.guard(conditions)
        if self.looked or self.specialises:
            for match in self.owned_matches:
                self.guard(match)
        groups: dict[type, list[Source]] = {
            torch.Tensor: [source for _, source in self.tensors.values() if not rooted(source)]
        }
        changed = {type(shadow.real) for shadow in self.shadows.values() if shadow.changed()}
        changed.update(type(overlay.owner) for overlay in self.instance.values())
        lent = [source for kind, source in self.things.values() if kind is torch.Generator]
        if lent:
            self.guard(Distinct((*lent, *[Const(one, "a random generator") for one in self.sole])))
        for kind, source in self.things.values():
            if not rooted(source) or kind in changed and not private(source):
                groups.setdefault(kind, []).append(source)
        for free in groups.values():
            if len(free) > 1:
                self.guard(Distinct(tuple(free)))
        inputs = [(self.reals[id(fake)], source) for fake, source in self.tensors.values()]
        fixed = [(real, source) for real, source in inputs if rooted(source)]
        for real, source in inputs:
            for other, path in fixed if not rooted(source) else ():
                if type(other) is type(real) and self.alike((real, source), (other, path)):
                    self.guard(Distinct((source, path)))

    def alike(self, *tensors: tuple[torch.Tensor, Source]) -> bool:
        """Whether two tensors may have one dtype and equal sizes in a call that the guards admit."""
        (a, _), (b, _) = tensors
        if a.dim() != b.dim() or a.dtype != b.dtype:
            return False
        varies = self.varying.reads.values()
        return all(
            m == n or any(Read(source, "size", i) in varies for _, source in tensors)
            for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True))
        )


DELETED: Any = type("Deleted", (), {"__repr__": lambda self: "<deleted>"})()


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch draws from on a device where no other is given."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]


def way(source: Source) -> Iterator[Source]:
    """A path, and all paths that lead on to it."""
    yield source
    while not isinstance(source, (Arg, Const, Global)):
        source = source.base  # type: ignore[attr-defined]
        yield source


def rooted(source: Source) -> bool:
    """Whether a path starts at a pinned object or a namespace, and not at an argument."""
    while not isinstance(source, (Arg, Const, Global)):
        source = source.base  # type: ignore[attr-defined]
    return not isinstance(source, Arg)


def private(source: Source) -> bool:
    """Whether a path leads to what an object keeps for itself: its `__dict__`, or the tables of a module."""
    if not isinstance(source, (Attr, DictAttr)):
        return False
    of_module = isinstance(source.base, Const) and isinstance(source.base.value, torch.nn.Module)
    return source.name == "__dict__" or of_module and source.name.startswith("_")


NESTING = (list, tuple, dict, set, frozenset, collections.deque)
VALUE_LIKE = (
    int, float, complex, str, bytes, decimal.Decimal, fractions.Fraction, datetime.date, datetime.time,
    datetime.timedelta, pathlib.PurePath, uuid.UUID,
)  # fmt: skip


def value_of(value: Any) -> Any:
    """What tells two value-like objects of one class apart."""
    for base in (int, float, complex, str, bytes):
        if isinstance(value, base):
            return base.__repr__(value)
    return str(value) if isinstance(value, pathlib.PurePath) else repr(value)


Reader = Callable[[World, Any, Source], Any]

SHADOWED = (
    list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter,
)  # fmt: skip

READERS: dict[type, Reader] = {
    slice: World.bounds, torch.Size: World.immutable,
    torch.Tensor: World.tensor, torch.nn.Parameter: World.tensor, types.FunctionType: World.function,
    types.MethodType: World.method, types.BuiltinFunctionType: World.native_method,
    BUILTIN_METHOD: World.native_method, tuple: World.immutable,
    frozenset: World.frozen_set, types.MappingProxyType: World.proxy, weakref.ProxyType: World.thing,
    weakref.CallableProxyType: World.thing, types.MethodWrapperType: World.native_method,
    weakref.ref: World.pin, torch.Generator: World.generator,
    **dict.fromkeys(SHADOWED, World.container), **dict.fromkeys(DICT_VIEWS, World.dict_view),
}  # fmt: skip

READER_BASES: tuple[tuple[Any, Reader], ...] = (
    (torch.Tensor, World.tensor),
    (torch.nn.Module, World.module),
    (BY_IDENTITY, World.pin),
    (tuple, World.immutable),
    ((dict, list, set), World.subclassed),
    (frozenset, World.frozen_set),
    (VALUE_LIKE, World.value_like),
)


def nested(values: Iterable[Any], hashed: bool = False) -> Iterable[Any]:
    """The values and what stands inside their lists, tuples and dicts, of each of these but once.

    With `hashed` keys of dicts and what stands inside sets and deques come, too.
    """
    left, seen = list(values)[::-1], set[int]()
    while left:
        value = left.pop()
        yield value
        kind = type(value)
        if kind not in NESTS and not (hashed and kind in HASHED) or not value or id(value) in seen:
            continue
        seen.add(id(value))
        if hashed and kind is dict:
            left.extend(value)
        left.extend(reversed(value.values()) if kind is dict else [*value][::-1])


NESTS = frozenset({list, tuple, dict})
HASHED = frozenset({set, frozenset, collections.deque})
