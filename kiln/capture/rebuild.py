"""From values seen during capture to bytecode that makes them again in every call."""

from __future__ import annotations

import builtins
import collections
import enum
import functools
import gc
import itertools
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from kiln import _hook
from kiln.base.expressions import Expr, Symbol
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
from kiln.bytecode.assemble import Emitter
from kiln.bytecode.live import live
from kiln.bytecode.resume import HANDLED, LASTI, VALUE, Slot, suspended_code
from kiln.bytecode.resume import NULL as NULL_SLOT
from kiln.capture import runtime, symbolic
from kiln.capture.attributes import instance_space
from kiln.capture.frame import LAST_INSTRUCTION, NULL, Frame, Handled, Unread
from kiln.capture.identity import Address
from kiln.capture.iterators import Callback, Generator, Mapped
from kiln.capture.purity import DICT_VIEWS, OWN_MODULES
from kiln.capture.varying import quiet
from kiln.capture.world import BUILTIN_METHOD, CONSTANTS, World
from kiln.check.shapes import Read
from kiln.ops.fake import FakeTensor

REDUCIBLE: tuple[type, ...] = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter({})), type(iter({}.items())),
    type(iter({}.values())), type(iter(set())), type(iter("")), zip, enumerate, reversed, type(reversed([])),
    type(iter(b"")), type(iter(collections.deque())), type(iter(collections.OrderedDict())),
)  # fmt: skip
#: Iterators made during capture that are made again the same way; those from outside stay where they are.
COMBINED: tuple[type, ...] = (
    itertools.accumulate, itertools.chain, itertools.combinations, itertools.combinations_with_replacement,
    itertools.compress, itertools.count, itertools.cycle, itertools.dropwhile, itertools.filterfalse,
    itertools.islice, itertools.pairwise, itertools.permutations, itertools.product, itertools.repeat,
    itertools.starmap, itertools.takewhile, itertools.zip_longest,
)  # fmt: skip


class Unbuildable(Exception):
    """A live value that residual code cannot make; capture goes back to `step`, where it came to be."""

    def __init__(self, value: Any, step: int = -1) -> None:
        self.step = step
        self.text = f"a {type(value).__name__} that is still in use cannot be rebuilt"
        super().__init__(self.text)


class Rebuilder:
    """Emits code that pushes values; each object is made once, so identities between them are kept."""

    def __init__(
        self, world: World, emitter: Emitter, steps: dict[int, int], dry: Rebuilder | None = None
    ) -> None:
        self.world, self.e, self.steps = world, emitter, steps
        self.uses: collections.Counter[int] = collections.Counter()
        self.counted = None if dry is None else dry.uses
        self.dry = dry  # keeps alive what was counted
        self.cyclic: set[int] = set() if dry is None else dry.cyclic  # containers that hold themselves
        self.outputs: list[FakeTensor] = []
        self.names: dict[int, str] = {}  # id of a value -> local variable that holds it
        self.open: set[int] = set()
        self.alive: list[Any] = []

    # ------------------------------------------------------------------ entry points

    def push(self, value: Any) -> None:
        """Emit code that leaves the value on the stack."""
        if type(value) in CONSTANTS and not (type(value) in HOLDERS and symbolic.holds_symbols(value)):
            self.e.const(value)
            return
        self.uses[id(value)] += 1
        known = self.names.get(id(value))
        if known is not None:
            self.e.load(known)
            return
        self.build(value)
        if id(value) not in self.names and self.shared(value):
            self.e.copy(1)
            self.name(value)

    def build(self, value: Any) -> None:
        if id(value) in self.open:
            if self.dry is not None or type(value) not in SHELLS:
                raise Unbuildable(value)
            self.cyclic.add(id(value))
            self.e.const(None)
            return
        self.open.add(id(value))
        self.alive.append(value)
        if id(value) in self.cyclic and self.dry is not None:
            self.shell(value)
        else:
            self.make(value)
        self.open.discard(id(value))

    def shared(self, value: Any) -> bool:
        """Whether the value is needed again; the dry run has counted."""
        return self.counted is None or self.counted[id(value)] > 1

    def name(self, value: Any) -> str:
        """Store the top of the stack as the variable that holds the value from now on."""
        name = f"__v{len(self.names)}"
        self.e.store(name)
        self.names[id(value)] = name
        return name

    def prepare(self, value: Any) -> None:
        """Make the value now, for a later push."""
        if type(value) in CONSTANTS and type(value) not in HOLDERS or id(value) in self.names:
            return
        self.uses[id(value)] += 1
        self.build(value)
        if id(value) in self.names:
            self.e.pop()
        else:
            self.name(value)

    def call(self, function: Any, *args: Any) -> None:
        """Emit `function(*args)`."""
        e = self.e
        e.begin_call()
        e.const(function)
        e.mid_call()
        for arg in args:
            self.push(arg)
        e.end_call(len(args))

    def number(self, value: Any) -> None:
        """A symbolic number: computed from the sizes and numbers that it depends on."""
        expr = symbolic.simple(value)
        if not isinstance(expr, Expr):
            self.e.const(expr)
            return
        varying, symbols = self.world.varying, sorted(expr.symbols(), key=lambda s: s.order)
        if isinstance(expr, Symbol):
            self.read(varying.reads[expr])
            return
        self.e.begin_call()
        self.e.const(quiet(symbols, str(expr)))
        self.e.mid_call()
        for symbol in symbols:
            self.read(varying.reads[symbol])
        self.e.end_call(len(symbols))

    def read(self, read: Read) -> None:
        """Emit a load of a size, a stride or a number."""
        if read.what == "value":
            self.source(read.source)
            return
        self.e.begin_call()
        self.e.const(torch.Tensor.size if read.what == "size" else torch.Tensor.stride)
        self.e.mid_call()
        self.source(read.source)
        self.e.const(read.dim)
        self.e.end_call(2)

    def shape(self, value: Any) -> None:
        self.call(torch.Size, tuple(value))

    # ------------------------------------------------------------------ making

    def make(self, value: Any) -> None:
        source = self.world.sources.get(id(value))
        if source is not None:
            self.source(source)
            return
        if id(value) in self.world.entered:
            self.call(*self.world.entered[id(value)])
            return
        if isinstance(value, FakeTensor):
            self.e.load("__out")
            self.e.const(len(self.outputs))
            self.e.item()
            self.outputs.append(value)
            return
        maker = MAKERS.get(type(value))
        if maker is not None:
            maker(self, value)
            return
        for kind, maker in MAKER_BASES:
            if isinstance(value, kind):
                maker(self, value)
                return
        self.object(value)

    def shell(self, value: Any) -> None:
        """A container that holds itself: an empty one, known by name, then filled."""
        empty, fill = SHELLS[type(value)]
        self.call(runtime.make_empty, Raw(type(value)), *empty(value))
        self.e.copy(1)
        self.name(value)
        self.call(fill, value, list(value) if not isinstance(value, dict) else dict(value))
        self.e.pop()

    def source(self, source: Source) -> None:
        """Emit a load along a path."""
        e = self.e
        match source:
            case Arg():
                e.load(source.name)
            case Const():
                if (
                    type(source.value) is types.FunctionType
                    and self.world.made_cells
                    and self.closes_over_tensor(source.value)
                ):
                    raise Unbuildable(source.value)
                e.const(source.value)
            case Attr():
                self.source(source.base)
                e.attr(source.name)
            case DictAttr():
                self.source(source.base)
                e.attr("__dict__")
                e.const(source.name)
                e.item()
            case Item():
                self.source(source.base)
                e.const(source.key)
                e.item()
            case CellContents():
                self.source(source.base)
                e.attr("cell_contents")
            case ClosureCell():
                self.source(source.base)
                e.attr("__closure__")
                e.const(source.index)
                e.item()
            case Global():
                e.const(source.namespace.value)
                e.const(source.name)
                e.item()
            case Derived():
                e.begin_call()
                e.const(source.function)
                e.mid_call()
                self.source(source.base)
                e.end_call(1)
            case _:
                raise Unbuildable(source)

    def closes_over_tensor(self, function: types.FunctionType) -> bool:
        """Whether a function that was made during capture, with its class, holds tensors of the graph."""
        return any(type(self.world.read_cell(cell)) is FakeTensor for cell in function.__closure__ or ()
                   if id(cell) in self.world.made_cells)  # fmt: skip

    def constant(self, value: Any) -> None:
        if id(value) in self.steps:
            raise Unbuildable(value, self.steps[id(value)])
        self.e.const(value)

    def dict_view(self, value: Any) -> None:
        self.call(runtime.dict_view, runtime.viewed(value), type(value).__name__)

    def proxy(self, value: Any) -> None:
        self.call(types.MappingProxyType, runtime.proxied(value))

    def sequence(self, value: Any) -> None:
        for item in value:
            self.push(item)
        self.e.build("list" if type(value) is list else "tuple", len(value))

    def named_tuple(self, value: Any) -> None:
        if type(value).__module__ == "torch.return_types":
            self.call(type(value), tuple(value))
        else:
            self.immutable(value, tuple)

    def frozen_set(self, value: Any) -> None:
        self.immutable(value, frozenset)

    def immutable(self, value: Any, base: Any) -> None:
        """An instance of a subclass of tuple or frozenset, with the attributes that it has."""
        self.call(functools.partial(base.__new__, type(value)), tuple(base.__iter__(value)))
        attributes = instance_space(value)
        if attributes:
            self.e.copy(1)
            self.name(value)
            self.call(runtime.fill_object, value, dict(attributes), {})
            self.e.pop()

    def mapping(self, value: dict[Any, Any]) -> None:
        for key, item in value.items():
            self.push(key)
            self.push(item)
        self.e.build("map", len(value))

    def ordered(self, value: Any) -> None:
        self.call(type(value), dict(value))

    def default_dict(self, value: Any) -> None:
        self.call(collections.defaultdict, value.default_factory, dict(value))

    def deque(self, value: Any) -> None:
        self.call(collections.deque, list(value), value.maxlen)

    def bytes(self, value: bytearray) -> None:
        self.call(bytearray, bytes(value))

    def view(self, value: Any) -> None:
        """The keys, values or items of a dict."""
        (owner,) = gc.get_referents(value)
        self.e.begin_call()
        self.push(owner)
        self.e.attr(VIEWS[type(value)])
        self.e.mid_call()
        self.e.end_call(0)

    def set(self, value: Any) -> None:
        self.call(type(value), tuple(value))

    def slice(self, value: Any) -> None:
        for part in (value.start, value.stop, value.step):
            self.push(part)
        self.e.build("slice", 3)

    def method(self, value: types.MethodType) -> None:
        self.call(types.MethodType, value.__func__, value.__self__)

    def native_method(self, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            self.e.const(value)
            return
        self.push(owner)
        self.e.attr(value.__name__)

    def function(self, value: types.FunctionType) -> None:
        attributes = dict(value.__dict__)
        cells = value.__closure__
        for cell in cells or ():
            self.cell_shell(cell)
        self.call(runtime.make_function, Raw(value.__code__), Raw(value.__globals__), value.__name__,
                  value.__defaults__, cells, value.__kwdefaults__, {} if cells else attributes)  # fmt: skip
        if cells:
            self.e.copy(1)
            self.name(value)
            for cell in cells:
                self.cell_contents(cell)
            if attributes:
                self.call(runtime.fill_object, value, attributes, {})
                self.e.pop()

    def cell(self, value: types.CellType) -> None:
        self.cell_shell(value)
        self.cell_contents(value)
        self.e.load(self.names[id(value)])

    def cell_shell(self, cell: types.CellType) -> None:
        if id(cell) in self.names or self.world.sources.get(id(cell)) is not None:
            return
        self.call(types.CellType)
        self.name(cell)

    def cell_contents(self, cell: types.CellType) -> None:
        if id(cell) in self.filled or self.world.sources.get(id(cell)) is not None:
            return
        self.filled.add(id(cell))
        try:
            contents = cell.cell_contents
        except ValueError:
            return
        self.push(contents)
        self.e.load(self.names[id(cell)])
        self.e.set_attr("cell_contents")

    @functools.cached_property
    def filled(self) -> builtins.set[int]:
        return set()

    def partial(self, value: Any) -> None:
        e = self.e
        e.begin_call()
        e.const(functools.partial)
        e.mid_call()
        for part in (value.func, *value.args, *value.keywords.values()):
            self.push(part)
        e.end_call(1 + len(value.args) + len(value.keywords), tuple(value.keywords))

    def reduced(self, value: Any) -> None:
        """A native iterator, through its pickle protocol."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the protocol goes away for some of them
            try:
                parts = value.__reduce__()
            except TypeError:
                raise Unbuildable(value) from None
        if len(parts) > 2 and parts[2] is not None:
            self.call(runtime.set_state, Call(parts[0], parts[1]), parts[2])
        else:
            self.call(parts[0], *parts[1])

    def pending_call(self, value: Call) -> None:
        self.call(value.function, *value.args)

    def raw(self, value: Raw) -> None:
        self.e.const(value.value)

    def mapped(self, value: Mapped) -> None:
        self.call(value.kind, value.function, *value.iterators)

    def address(self, value: Address) -> None:
        self.call(value.ask, value.owner)

    def generator(self, value: Generator) -> None:
        """A generator in the middle of its work: one that a first `next` brings to the same place."""
        frame = value.frame
        if value.done:
            self.call(runtime.finished_generator)
            return
        index = frame.index - 1 if value.started else None
        kept, names = list(frame.stack), bound(frame, frame.index)
        code = suspended_code(frame.code.code, index, slots(kept), names)
        _hook.skip(code)
        function = types.FunctionType(code, frame.globals, frame.function.__name__)
        e = self.e
        e.begin_call()
        e.const(runtime.advanced(function) if value.started else function)
        e.mid_call()
        e.end_call(push_frame(self, frame, kept, names))

    def super(self, value: Any) -> None:
        self.call(super, value.__thisclass__, value.__self__)

    def error(self, value: BaseException) -> None:
        self.call(runtime.make_error, Raw(type(value)), value.args, runtime.error_state(value))
        if value.__cause__ is not None or value.__context__ is not None or value.__suppress_context__:
            self.e.copy(1)
            self.name(value)
            self.call(
                runtime.chain_error, value, value.__cause__, value.__context__, value.__suppress_context__
            )
            self.e.pop()

    def handled(self, value: Handled) -> None:
        self.push(value.previous)

    def object(self, value: Any) -> None:
        """An instance of a user's class: an empty one, known by name, then filled."""
        cls = type(value)
        natives = [base for base in cls.__mro__ if not base.__flags__ & 1 << 9]
        if hasattr(cls, "__entries"):  # an enumeration of native code
            self.e.const(value)
            return
        if cls.__module__ in OWN_MODULES:
            raise Unbuildable(value)
        if id(cls) in self.steps:
            raise Unbuildable(value, self.steps[id(cls)])
        if cls not in OPAQUE_OK and (not cls.__flags__ & 1 << 9 or id(value) in self.steps
                                     or any(base not in FILLED for base in natives)
                                     or not runtime.can_make(cls)):  # fmt: skip
            raise Unbuildable(value, self.steps.get(id(value), -1))
        self.call(runtime.make_object, Raw(cls))
        self.e.copy(1)
        self.name(value)
        if isinstance(value, dict) and dict.__len__(value):
            self.call(runtime.fill_dict, value, dict(runtime.mapping_type(value).items(value)))
            self.e.pop()
        if isinstance(value, list) and list.__len__(value):
            self.call(runtime.fill_list, value, list(list.__iter__(value)))
            self.e.pop()
        if isinstance(value, set) and set.__len__(value):
            self.call(set.update, value, list(set.__iter__(value)))
            self.e.pop()
        slots = {
            name: item
            for base in cls.__mro__ for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__"
            and (item := runtime.read_member(member, value)) is not runtime.UNSET
        }  # fmt: skip
        attributes = instance_space(value) or {}
        if attributes or slots:
            self.call(runtime.fill_object, value, dict(attributes), slots)
            self.e.pop()


def slots(values: list[Any]) -> tuple[Slot, ...]:
    kinds = {id(NULL): NULL_SLOT, id(LAST_INSTRUCTION): LASTI}
    return tuple(HANDLED if isinstance(v, Handled) and v.active else kinds.get(id(v), VALUE) for v in values)


INTROSPECTIVE = frozenset(
    {"eval", "exec", "locals", "vars", "dir"}
)  # functions that look at the frame's variables


def bound(frame: Frame, index: int) -> tuple[str, ...]:
    """The variables that have a value and may still be read at an instruction."""
    wanted = live(frame.code.code, index)
    if not INTROSPECTIVE.isdisjoint(frame.code.code.co_names):
        wanted = frozenset({*frame.locals, *frame.lazy, *frame.cells})
    have = {**frame.locals, **frame.lazy, **frame.cells}
    return tuple(name for name in sorted(have) if name in wanted)


def push_frame(r: Rebuilder, frame: Frame, kept: list[Any], names: tuple[str, ...]) -> int:
    """Push the state of a frame: what its stack holds and its variables; gives their number."""
    count = len(names)
    for value in kept:
        if value is not NULL and value is not LAST_INSTRUCTION:
            r.push(value.error if isinstance(value, Handled) and value.active else value)
            count += 1
    for name in names:
        if name in frame.lazy:
            r.source(frame.lazy[name][1])
        else:
            r.push(frame.locals[name] if name in frame.locals else frame.cells[name])
    return count


class Raw:
    """A constant that is pushed as it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Call:
    """A call whose result is an argument of another."""

    __slots__ = ("args", "function")

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args


VIEWS: dict[type, str] = {
    type(getattr(kind(), name)()): name
    for kind in (dict, collections.OrderedDict)
    for name in ("keys", "values", "items")
}
#: How to make an empty one, how to fill it.
SHELLS: dict[type, tuple[Callable[[Any], tuple[Any, ...]], Any]] = {
    list: (lambda v: (), runtime.fill_list), dict: (lambda v: (), runtime.fill_dict),
    collections.OrderedDict: (lambda v: (), runtime.fill_dict),
    collections.defaultdict: (lambda v: (v.default_factory,), runtime.fill_dict),
    collections.deque: (lambda v: ((), v.maxlen), runtime.write_deque),
}  # fmt: skip
FILLED = (object, dict, list, set, collections.OrderedDict)
OPAQUE_OK: frozenset[type] = frozenset({types.SimpleNamespace})
HOLDERS = frozenset({torch.Size, slice})  # constants that symbolic numbers may stand in
Maker = Callable[[Rebuilder, Any], None]
MAKERS: dict[type, Maker] = {
    Unread: lambda r, value: r.source(value.source),
    list: Rebuilder.sequence, tuple: Rebuilder.sequence, dict: Rebuilder.mapping,
    set: Rebuilder.set, frozenset: Rebuilder.set,
    collections.OrderedDict: Rebuilder.ordered, collections.Counter: Rebuilder.ordered,
    collections.defaultdict: Rebuilder.default_dict, collections.deque: Rebuilder.deque,
    slice: Rebuilder.slice, types.MethodType: Rebuilder.method,
    types.BuiltinFunctionType: Rebuilder.native_method, BUILTIN_METHOD: Rebuilder.native_method,
    types.MethodWrapperType: Rebuilder.native_method,
    types.FunctionType: Rebuilder.function, types.CellType: Rebuilder.cell,
    functools.partial: Rebuilder.partial, types.MappingProxyType: Rebuilder.proxy,
    **dict.fromkeys(DICT_VIEWS, Rebuilder.dict_view), Call: Rebuilder.pending_call, Raw: Rebuilder.raw,
    **dict.fromkeys(symbolic.SYMBOLIC, Rebuilder.number), torch.Size: Rebuilder.shape,
    Mapped: Rebuilder.mapped, Callback: lambda r, value: r.push(value.value),
    Generator: Rebuilder.generator, super: Rebuilder.super,
    random.Random: lambda r, value: r.call(runtime.make_random, Raw(value.getstate())),
    object: lambda r, value: r.call(object), bytearray: Rebuilder.bytes, Handled: Rebuilder.handled,
    **dict.fromkeys(VIEWS, Rebuilder.view), Address: Rebuilder.address,
    **dict.fromkeys((*REDUCIBLE, *COMBINED), Rebuilder.reduced),
    types.MethodDescriptorType: Rebuilder.constant, types.WrapperDescriptorType: Rebuilder.constant,
    torch._ops.OpOverload: Rebuilder.constant, torch._ops.OpOverloadPacket: Rebuilder.constant,
}  # fmt: skip
MAKER_BASES: tuple[tuple[Any, Maker], ...] = (
    (BaseException, Rebuilder.error),
    (
        (type, types.ModuleType, enum.Enum, types.GenericAlias, types.UnionType, types.CodeType),
        Rebuilder.constant,
    ),
    (tuple, Rebuilder.named_tuple),
    (frozenset, Rebuilder.frozen_set),
    ((str, int, float, bytes, complex), Rebuilder.constant),
)
