"""From values seen during capture to bytecode that makes them again in every call."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import random
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any
from weakref import WeakSet

import torch

from kiln import _hook
from kiln.base.dataclass import dataclass
from kiln.base.expressions import Condition, Expr, Symbol
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
    Step,
)
from kiln.bytecode.assemble import Emitter
from kiln.bytecode.flow import live
from kiln.bytecode.resume import HANDLED, LASTI, VALUE, Slot, suspended_code
from kiln.bytecode.resume import NULL as NULL_SLOT
from kiln.capture import nested, runtime, symbolic
from kiln.capture.attributes import instance_space
from kiln.capture.frame import LAST_INSTRUCTION, NULL, Frame, Handled, Unread
from kiln.capture.identity import Address
from kiln.capture.iterators import Callback, Generator, Mapped
from kiln.capture.purity import DICT_VIEWS, OWN_MODULES
from kiln.capture.varying import Draw, quiet
from kiln.capture.world import BUILTIN_METHOD, CONSTANTS, World
from kiln.capture.wrappers import PLAIN_TYPES, of_class
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


def is_constant(value: Any) -> bool:
    """Whether code may hold the value itself: nothing stands in it that is another in the next call."""
    if type(value) is slice:
        return all(map(is_constant, (value.start, value.stop, value.step)))
    return type(value) in CONSTANTS and not (type(value) is torch.Size and symbolic.holds_symbols(value))


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
        self.filled: set[int] = set()  # cells whose contents are written
        self.alive: list[Any] = []

    # ------------------------------------------------------------------ entry points

    def push(self, value: Any) -> None:
        """Emit code that leaves the value on the stack."""
        if is_constant(value):
            self.e.const(value)
            return
        self.uses[id(value)] += 1
        known = self.names.get(id(value))
        if known is not None:
            self.e.load(known)
            return
        self.build(value)
        if id(value) not in self.names and self.shared(value):
            self.named(value)

    def named(self, value: Any) -> None:
        """Give the value on the stack, which is to be filled or needed again, a name."""
        self.e.copy(1)
        self.name(value)

    def then(self, function: Any, *args: Any) -> None:
        """Emit `function(*args)` for what it does."""
        self.call(function, *args)
        self.e.pop()

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
        if is_constant(value) or id(value) in self.names:
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
        e.callee(function)
        for arg in args:
            self.push(arg)
        e.end_call(len(args))

    def number(self, value: Any) -> None:
        """A symbolic number: computed from the sizes and numbers that it depends on."""
        expr = symbolic.simple(value)
        if not isinstance(expr, (Expr, Condition)):
            self.e.const(expr)
            return
        varying, symbols = self.world.varying, sorted(expr.symbols(), key=lambda s: s.order)
        if not isinstance(expr, Symbol):
            self.e.callee(quiet(symbols, str(expr)))
        for symbol in symbols:
            if symbol in varying.items:
                self.call(*varying.items[symbol].call)
            elif symbol in varying.draws:
                self.e.load(varying.draws[symbol].name)
            else:
                self.read(varying.reads[symbol])
        if not isinstance(expr, Symbol):
            self.e.end_call(len(symbols))

    def read(self, read: Read) -> None:
        """Emit a load of a size, a stride or a number."""
        if read.what == "value":
            self.source(read.source)
            return
        self.e.callee(torch.Tensor.size if read.what == "size" else torch.Tensor.stride)
        self.source(read.source)
        self.e.const(read.dim)
        self.e.end_call(2)

    def draw(self, draw: Draw) -> None:
        """Emit a call that gives a number, which a local variable then holds."""
        self.e.callee(draw.function)
        if draw.owner is not None:
            self.source(draw.owner)
        for arg in draw.args:
            self.push(arg)
        self.e.end_call((draw.owner is not None) + len(draw.args))
        self.e.store(draw.name)

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
            kind = value.real_type
            plain = kind in PLAIN_TYPES or value.wrapped is not None
            ending = self.world.recorder.ending(value, self.dry.outputs) if self.dry is not None else None
            if ending is not None:
                self.e.callee(ending)
            if not plain:
                self.e.callee(of_class)
            self.e.load("__out")
            self.e.const(len(self.outputs))
            self.e.item()
            self.outputs.append(value)
            if not plain:
                self.e.const(kind)
                self.e.end_call(2)
            if ending is not None:
                self.e.end_call(1)
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
        self.call(type(value), *empty(value))
        self.named(value)
        self.then(fill, value, list(value) if not isinstance(value, dict) else dict(value))
        self.attributes(value)

    def attributes(self, value: Any, slots: dict[str, Any] = {}) -> None:  # noqa: B006
        """Give the value on the stack the attributes that it has."""
        space = instance_space(value) or {}
        if space or slots:
            if id(value) not in self.names:
                self.named(value)
            self.then(runtime.fill_object, value, dict(space), slots)

    def ordered(self, value: Any) -> None:
        self.call(type(value), dict(value))
        self.attributes(value)

    def source(self, source: Source) -> None:
        """Emit a load along a path."""
        e = self.e
        if isinstance(source, Step) and not isinstance(source, Derived):
            self.source(source.base)
        match source:
            case Arg():
                e.load(source.name)
            case Const(value):
                if type(value) is types.FunctionType and self.closes_over_tensor(value):
                    raise Unbuildable(value)
                e.const(value)
            case Attr():
                e.attr(source.name)
            case DictAttr():
                e.attr("__dict__")
                self.item(source.name)
            case Item():
                self.item(source.key)
            case CellContents():
                e.attr("cell_contents")
            case ClosureCell():
                e.attr("__closure__")
                self.item(source.index)
            case Global():
                e.const(source.namespace.value)
                self.item(source.name)
            case Derived():
                e.callee(source.function)
                self.source(source.base)
                e.end_call(1)
            case _:
                raise Unbuildable(source)

    def item(self, key: Any) -> None:
        self.e.const(key)
        self.e.item()

    def closes_over_tensor(self, function: types.FunctionType) -> bool:
        """Whether a function that was made during capture, with its class, holds tensors of the graph."""
        return any(type(self.world.read_cell(cell)) is FakeTensor for cell in function.__closure__ or ()
                   if id(cell) in self.world.made_cells)  # fmt: skip

    def constant(self, value: Any) -> None:
        if id(value) in self.steps:
            raise Unbuildable(value, self.steps[id(value)])
        self.e.const(value)

    def enumerated(self, value: enum.Enum) -> None:
        """A member of an enumeration; one that is being made is not one yet."""
        base = next((base for base in PLAIN_VALUES if isinstance(value, base)), None)
        if "_name_" in value.__dict__:
            self.constant(value)
        elif base is None:
            self.object(value)
        else:
            self.immutable(value, base)

    def sequence(self, value: Any) -> None:
        for item in value:
            self.push(item)
        self.e.build("list" if type(value) is list else "tuple", len(value))

    def named_tuple(self, value: Any) -> None:
        if type(value).__module__ == "torch.return_types":
            self.call(type(value), tuple(value))
        else:
            self.immutable(value, tuple)

    def immutable(self, value: Any, base: Any) -> None:
        """An instance of a subclass of an immutable type, with the attributes that it has."""
        attributes = instance_space(value)
        if attributes is None and base in PLAIN_VALUES:
            self.constant(value)
            return
        plain = PLAIN_VALUES[base](value) if base in PLAIN_VALUES else tuple(base.__iter__(value))
        self.call(functools.partial(base.__new__, type(value)), plain)
        if attributes:
            self.named(value)
            self.then(runtime.fill_object, value, dict(attributes), {})

    def mapping(self, value: dict[Any, Any]) -> None:
        for key, item in value.items():
            self.push(key)
            self.push(item)
        self.e.build("map", len(value))

    def slice(self, value: Any) -> None:
        for part in (value.start, value.stop, value.step):
            self.push(part)
        self.e.build("slice", 3)

    def native_method(self, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            self.e.const(value)
            return
        spaces = (vars(base) for base in type(owner).__mro__)
        found = [space[value.__name__] for space in spaces if value.__name__ in space]
        native = (one for one in found if isinstance(one, NATIVE_METHODS) and one.__get__(owner) == value)
        hidden = next(native, None)
        if hidden is not None and hidden is not found[0]:  # what super() gives
            self.call(hidden.__get__, owner)
            return
        self.push(owner)
        self.e.attr(value.__name__)

    def method(self, value: types.MethodType) -> None:
        if isinstance(value.__self__, Generator):  # the real one has methods of its own
            self.native_method(value)
        else:
            self.call(types.MethodType, value.__func__, value.__self__)

    def function(self, value: types.FunctionType) -> None:
        attributes = dict(value.__dict__)
        cells = value.__closure__
        for cell in cells or ():
            self.cell_shell(cell)
        told = value.__name__, value.__qualname__, value.__module__, value.__doc__
        self.call(runtime.make_function, Raw(value.__code__), Raw(value.__globals__), told,
                  value.__defaults__, cells, value.__kwdefaults__, {} if cells else attributes)  # fmt: skip
        if cells:
            self.named(value)
            for cell in cells:
                self.cell_contents(cell)
            if attributes:
                self.then(runtime.fill_object, value, attributes, {})

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

    def partial(self, value: Any) -> None:
        e = self.e
        e.callee(functools.partial)
        for part in (value.func, *value.args, *value.keywords.values()):
            self.push(part)
        e.end_call(1 + len(value.args) + len(value.keywords), tuple(value.keywords))
        self.attributes(value)

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

    def generator(self, value: Generator) -> None:
        """A generator in the middle of its work: one that a first `next` brings to the same place."""
        frame = value.frame
        if value.done:
            self.call(runtime.finished_generator)
            return
        index = frame.index - 1 if value.started else None
        kept, names = list(frame.stack), bound(frame, frame.index)
        original = frame.code.code
        code = suspended(original, original.co_filename, index, slots(kept), names)
        function = types.FunctionType(code, frame.globals, frame.function.__name__)
        e = self.e
        e.callee(functools.partial(runtime.advanced, function) if value.started else function)
        e.end_call(push_frame(self, frame, kept, names))

    def error(self, value: BaseException) -> None:
        self.call(runtime.make_error, Raw(type(value)), value.args, runtime.error_state(value))
        chain = value.__cause__, value.__context__, value.__suppress_context__, value.__traceback__
        if any(part is not None and part is not False for part in chain):
            self.named(value)
            self.then(runtime.chain_error, value, *chain)

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
        self.named(value)
        kind, fill = next((one for one in runtime.FILLS if isinstance(value, one[0])), (None, None))
        if kind is not None and kind.__len__(value):
            held = runtime.contents(value) if isinstance(value, dict) else list(kind.__iter__(value))
            self.then(fill, value, held)
        slots = {
            name: item
            for base in cls.__mro__ for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__"
            and (item := runtime.read_member(member, value)) is not runtime.UNSET
        }  # fmt: skip
        self.attributes(value, slots)


@functools.lru_cache(maxsize=256)
def suspended(
    code: types.CodeType, file: str, index: int | None, stack: tuple[Slot, ...], names: tuple[str, ...]
) -> types.CodeType:
    """One code object for each place of a generator, so that what goes on after breaks knows it again."""
    made = suspended_code(code, index, stack, names)
    _hook.skip(made)
    REBUILT.add(made)
    return made


REBUILT: WeakSet[types.CodeType] = WeakSet()  # the code of generators that were suspended at breaks


def slots(values: list[Any]) -> tuple[Slot, ...]:
    kinds = {id(NULL): NULL_SLOT, id(LAST_INSTRUCTION): LASTI}
    return tuple(HANDLED if type(v) is Handled and v.active else kinds.get(id(v), VALUE) for v in values)


INTROSPECTIVE = frozenset({"eval", "exec", "locals", "vars", "dir"})  # they look at the frame's variables


def bound(frame: Frame, index: int, given: Collection[Any] = ()) -> tuple[str, ...]:
    """The variables that have a value and may still be read at an instruction, or whose end is noticed.

    What `given` tells of are objects that code which is not seen may watch from now on.
    """
    wanted = live(frame.code.code, index)
    have = {**frame.locals, **{name: value for name, (value, _) in frame.lazy.items()}, **frame.cells}
    if not INTROSPECTIVE.isdisjoint(frame.code.code.co_names):
        wanted = frozenset(have)
    return tuple(name for name in sorted(have)
                 if name in wanted or id(have[name]) in given or nested.watched(have[name]))  # fmt: skip


def objects(values: Iterable[Any]) -> frozenset[int]:
    """The identities of values that are instances of classes written in Python, tensors and modules apart."""
    seen = [value.value if type(value) is Unread else value for value in values]
    return frozenset(id(value) for value in seen if type(value).__flags__ & 1 << 9
                     and not issubclass(type(value), (torch.Tensor, *nested.SHARED)))  # fmt: skip


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


@dataclass(slots=True, eq=False)
class Raw:
    """A constant that is pushed as it is."""

    value: Any


@dataclass(slots=True, eq=False)
class Call:
    """A call whose result is an argument of another."""

    function: Any
    args: tuple[Any, ...]


#: How to make an empty one, how to fill it.
SHELLS: dict[type, tuple[Callable[[Any], tuple[Any, ...]], Any]] = {
    list: (lambda v: (), list.extend), dict: (lambda v: (), runtime.fill_dict),
    collections.OrderedDict: (lambda v: (), runtime.fill_dict),
    collections.defaultdict: (lambda v: (v.default_factory,), runtime.fill_dict),
    collections.deque: (lambda v: ((), v.maxlen), collections.deque.extend),
}  # fmt: skip
FILLED = (object, dict, list, set, collections.OrderedDict)
NATIVE_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)
OPAQUE_OK: frozenset[type] = frozenset({types.SimpleNamespace})
Maker = Callable[[Rebuilder, Any], None]
MAKERS: dict[type, Maker] = {
    list: Rebuilder.sequence, tuple: Rebuilder.sequence, dict: Rebuilder.mapping, slice: Rebuilder.slice,
    types.FunctionType: Rebuilder.function, types.CellType: Rebuilder.cell,
    weakref.ref: lambda r, value: r.call(weakref.ref, value()),
    functools.partial: Rebuilder.partial, Generator: Rebuilder.generator,
    **dict.fromkeys(symbolic.SYMBOLIC, Rebuilder.number),
    **dict.fromkeys((*REDUCIBLE, *COMBINED), Rebuilder.reduced),
    **dict.fromkeys((types.BuiltinFunctionType, BUILTIN_METHOD, types.MethodWrapperType),
                    Rebuilder.native_method),
    **dict.fromkeys((types.MethodDescriptorType, types.WrapperDescriptorType, torch._ops.OpOverload,
                     torch._ops.OpOverloadPacket, types.TracebackType, types.FrameType), Rebuilder.constant),
    **dict.fromkeys((set, frozenset), lambda r, value: r.call(type(value), tuple(value))),
    **dict.fromkeys((collections.OrderedDict, collections.Counter), Rebuilder.ordered),
    **dict.fromkeys(DICT_VIEWS, lambda r, value: r.call(
        runtime.dict_view, runtime.viewed(value), type(value).__name__)),
    collections.defaultdict: lambda r, value: r.call(type(value), value.default_factory, dict(value)),
    collections.deque: lambda r, value: r.call(type(value), list(value), value.maxlen),
    bytearray: lambda r, value: r.call(bytearray, bytes(value)),
    object: lambda r, value: r.call(object),
    super: lambda r, value: r.call(super, value.__thisclass__, value.__self__),
    torch.Size: lambda r, value: r.call(torch.Size, tuple(value)),
    types.MethodType: Rebuilder.method,
    types.MappingProxyType: lambda r, value: r.call(types.MappingProxyType, runtime.proxied(value)),
    random.Random: lambda r, value: r.call(runtime.make_random, Raw(value.getstate())),
    Address: lambda r, value: r.call(value.ask, value.owner),
    Call: lambda r, value: r.call(value.function, *value.args),
    Callback: lambda r, value: r.push(value.value),
    Handled: lambda r, value: r.push(value.previous),
    Mapped: lambda r, value: r.call(value.kind, value.function, *value.iterators),
    Raw: lambda r, value: r.e.const(value.value),
    runtime.Within: Rebuilder.constant,
    Unread: lambda r, value: r.source(value.source),
}  # fmt: skip
#: What instances of subclasses of these types are without their class.
PLAIN_VALUES: dict[type, Callable[[Any], Any]] = {
    str: str.__str__, int: int.__int__, float: float.__float__, bytes: bytes.__bytes__,
    complex: complex.__complex__,
}  # fmt: skip
MAKER_BASES: tuple[tuple[Any, Maker], ...] = (
    (BaseException, Rebuilder.error),
    ((type, types.ModuleType, types.GenericAlias, types.UnionType, types.CodeType), Rebuilder.constant),
    (enum.Enum, Rebuilder.enumerated),
    (tuple, Rebuilder.named_tuple),
    (frozenset, lambda r, value: r.immutable(value, frozenset)),
    *((base, lambda r, value, base=base: r.immutable(value, base)) for base in PLAIN_VALUES),
)  # fmt: skip
