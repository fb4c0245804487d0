"""How calls of builtins and library functions are captured, where running them natively is not enough."""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import enum
import functools
import operator
import sys
import types
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from typing import Any

import torch

from kiln.base.errors import Break, Skip
from kiln.base.source import Const
from kiln.capture import attributes, operators, symbolic
from kiln.capture.calls import METHODS, Args, Kwargs, declare, handles, native, refuses, runs_now
from kiln.capture.expected import Chosen
from kiln.capture.fake_arrays import FakeArray, OpenNumber, OpenText
from kiln.capture.frame import Frame, Machine, Restart, UserError
from kiln.capture.identity import Address, sought
from kiln.capture.iterators import Generator, Iterating, Mapped, stop_iteration
from kiln.capture.rebuild import MAKERS
from kiln.capture.variables import first_read
from kiln.capture.world import MISSING, nested
from kiln.ops.fake import FakeTensor


@handles(len)
def length(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    (value,) = args
    if type(value) is FakeTensor:
        m.world.looked = True
        if m.modes:
            return m.call(torch.Tensor.__len__, (value,))
        return value.shape[0] if value.dim() else m.native(len, value)
    n = m.world.length(value)
    if n is not None:
        return n
    method = operators.python_method(m, value, "__len__")
    if method is not None:
        return m.native(operators.checked_length, m.inline(method, (value,), {}))
    operators.refuse_opaque(m, value, "its length is read")
    return native(m, len, args, kwargs)


@handles(getattr)
def get_attribute(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if type(args[1]) is not str:
        return m.native(getattr, *args)
    try:
        return m.getattr(args[0], args[1])
    except UserError as e:
        if len(args) == 3 and isinstance(e.error, AttributeError):
            return args[2]
        raise


@handles(hasattr)
def has_attribute(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if type(args[1]) is not str:
        return m.native(hasattr, *args)
    return get_attribute(m, (*args, MISSING), kwargs) is not MISSING


@handles(setattr)
def set_attribute(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if type(args[1]) is not str:
        return m.native(setattr, *args)
    m.setattr(*args)


def raw_get_attribute(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], type) or type(args[0]) in attributes.LOADERS:
        return m.getattr(*args)
    return attributes.load_from_object(m, args[0], args[1], hooks=False)


def raw_set_attribute(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    attributes.store_by_protocol(m, *args)


declare({
    delattr: lambda m, args, kwargs: attributes.delete(m, *args),
    object.__delattr__: lambda m, args, kwargs: attributes.delete_by_protocol(m, *args),
    object.__getattribute__: raw_get_attribute,
    type.__getattribute__: raw_get_attribute,
    types.ModuleType.__getattribute__: lambda m, args, kwargs: m.getattr(*args),
    object.__setattr__: raw_set_attribute,
    type.__setattr__: raw_set_attribute,
    BaseException.__setattr__: raw_set_attribute,
})  # fmt: skip
runs_now(issubclass, callable, object.__init__, object.__new__, sys.intern)
runs_now(dataclasses.fields, dataclasses.is_dataclass)


@handles(isinstance)
def is_instance(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    value, kinds = args
    if type(value) is FakeTensor:
        kind = attributes.tensor_type(value)
        return any(tensor_is(m, kind, value, k) for k in flat(kinds))
    if type(value) is Generator:
        return m.native(issubclass, types.GeneratorType, kinds)
    if type(value) in symbolic.SYMBOLIC:
        value = symbolic.SEEN_AS[type(value)]()  # all numbers of a type are alike here
    elif isinstance(value, OpenNumber):
        value = value.kind()
    for k in flat(kinds):
        hook = attributes.mro_lookup(type(k), "__instancecheck__")
        if isinstance(hook, types.FunctionType) and type(k).__module__.partition(".")[0] not in TRUSTED:
            m.world.class_attr(type(k), "__instancecheck__", hook)
            if m.truth(m.inline(hook, (k, value), {})):
                return True
        elif m.native(isinstance, value, k):
            return True
    return False


TRUSTED = frozenset("abc typing torch enum collections _py_abc typing_extensions".split())


def flat(kinds: Any) -> list[Any]:
    if isinstance(kinds, types.UnionType):
        return list(kinds.__args__)
    return [k for part in kinds for k in flat(part)] if isinstance(kinds, tuple) else [kinds]


def tensor_is(m: Machine, kind: type, value: FakeTensor, wanted: Any) -> bool:
    if wanted in LEGACY:
        return value.dtype is wanted.dtype and value.device.type == "cpu"
    flag = FLAGS.get(wanted)  # there are no instances: a tensor is one that says so
    says = flag is not None and kind is not wanted and (kind is not torch.Tensor or flag == "_is_buffer")
    if says and m.truth(m.call(getattr, (value, flag, False))):
        return True
    return isinstance(value, wanted) or isinstance(wanted, type) and issubclass(kind, wanted)


FLAGS = {torch.nn.Buffer: "_is_buffer", torch.nn.Parameter: "_is_param"}
LEGACY = frozenset(
    getattr(torch, f"{name}Tensor")
    for name in "Float Double Half Long Int Short Char Byte Bool BFloat16".split()
)


SEEN_AS: dict[type, type] = {Generator: types.GeneratorType, Address: int, **symbolic.SEEN_AS}


@handles(type)
def type_of(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1 and not kwargs:
        value = args[0]
        if type(value) is FakeArray:
            return m.world.constant(value.__class__)
        if isinstance(value, OpenNumber):
            return m.world.constant(value.kind)
        kind = attributes.tensor_type(value) if type(value) is FakeTensor else type(value)
        return m.world.constant(SEEN_AS.get(kind, kind))
    return m.world.made_class(native(m, type, args, kwargs))


@handles(super)
def super_of(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if args:
        return above(m, *args)
    frame = m.frames[-1]
    if not frame.code.code.co_argcount:
        raise UserError(RuntimeError("super(): no arguments"))
    name = frame.code.code.co_varnames[0]
    if name in frame.lazy:
        first_read(m, frame, name)
    cls, owner = variable(m, frame, "__class__"), variable(m, frame, name)
    if cls is MISSING:
        raise UserError(RuntimeError("super(): __class__ cell not found"))
    if owner is MISSING:
        raise UserError(RuntimeError("super(): arg[0] deleted"))
    return above(m, cls, owner)


def above(m: Machine, *args: Any) -> Any:
    """`super(...)`, of a tensor too that a fake stands for."""
    tensor = len(args) == 2 and type(args[1]) is FakeTensor
    return m.native(*((attributes.Above, args[0], args[1]) if tensor else (super, *args)))


def variable(m: Machine, frame: Frame, name: str) -> Any:
    """The value of a local variable, in a cell or not; MISSING when it has none."""
    value = frame.locals.get(name, frame.cells.get(name, MISSING))
    return m.world.read_cell(value) if type(value) is types.CellType else value


@handles(iter)
def iterator(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1:
        return m.iterate(args[0])
    return native(m, lambda f, end: iter(lambda: m.call(f), end), args, kwargs)


@handles(next)
def advance(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    value = m.next(args[0])
    if value is not MISSING:
        return value
    if len(args) > 1:
        return args[1]
    raise UserError(stop_iteration(getattr(args[0], "result", None)))


@handles(id)
def identity(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """The address stands for the object: it may be compared and used as a key."""
    return address(m, args[0], id)


def address(m: Machine, owner: Any, ask: Callable[[Any], int]) -> Address:
    """What `id` or `hash` gives for an object: the number of the real one, also of a copy or a fake."""
    world, source = m.world, m.source(owner)
    world.keep.append(owner)
    if source is None:
        return Address(owner, ask, ask(owner))
    shadow = world.shadows.get(id(owner))
    real = shadow.real if shadow is not None else world.reals.get(id(owner), owner)
    return Address(owner, ask, ask(real))


@handles(hash)
def hashed(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    args = symbolic.concrete(args)
    method = operators.python_method(m, args[0], "__hash__")
    if method is not None:
        return m.inline(method, args, {})
    hashes = type(args[0]).__hash__
    if isinstance(args[0], (str, bytes, int, float, tuple, frozenset, type(None))) or hashes is None:
        return m.native(hash, args[0])
    if hashes in (object.__hash__, torch.Tensor.__hash__):
        return address(m, args[0], hash)
    raise Break("identity", "hash() of this object is not the same in every call", "use a hash of its value")


@handles(locals)
def local_variables(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    frame = m.frames[-1]
    if not frame.code.code.co_flags & CO_OPTIMIZED:
        return frame.locals
    for name in list(frame.lazy):
        first_read(m, frame, name)
    cells = {name: m.world.read_cell(cell) for name, cell in frame.cells.items()}
    return {**frame.locals, **{name: value for name, value in cells.items() if value is not MISSING}}


@handles(globals)
def global_variables(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    space = m.frames[-1].globals
    return m.world.outside(space, Const(space, "globals"))


@handles(dir)
def directory(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if not args:
        return sorted(local_variables(m, (), {}))
    value = args[0]
    method = operators.python_method(m, value, "__dir__")
    if method is not None:
        return in_order(m, (m.inline(method, (value,), {}),), {})
    outside = m.source(value) is not None and not isinstance(value, (type, types.ModuleType))
    if outside and attributes.instance_space(value) is not None:
        return sorted({*dir(type(value)), *m.world.instance_dict(value)})
    return m.native(dir, value)


@handles(sys.exc_info)
def exception_info(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    for frame in reversed(m.frames):
        if frame.handled:
            error = frame.handled[-1]
            return (type(error), error, error.__traceback__)
    return (None, None, None)


@handles(exec, eval)
def run_text(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Text that is run: in a frame of its own where it may name variables that are cells in this one."""
    code, why = m.frames[-1].code.code, Break("io", *IO)
    if len(args) == 1 and (code.co_cellvars or code.co_freevars):
        if len(m.frames) == 1:
            raise Skip("text is run that may name variables which functions share", why)
        raise Restart(m.safe_step(m.frames[:-1]), why)
    raise why


IO = "input or output happens here", "move it out of the compiled function"
refuses("io", *IO, print, input, open, compile, breakpoint, sys.exit)
refuses("frame", "the running frame is inspected", "pass what is needed as an argument", sys._getframe)
refuses("interpreter-state", "the state of the interpreter is read", "read it outside the compiled function",
        sys.getrecursionlimit, sys.getsizeof, sys.is_finalizing)  # fmt: skip


def formatted(m: Machine, value: Any, convert: Callable[[Any], str] | None, spec: str) -> str:
    """`format(convert(value), spec)`."""
    value = symbolic.concrete(value)
    if convert is ascii:
        value = m.operate(ascii, value)
    elif convert is not None:
        value = text_of(m, value, "__str__" if convert is str else "__repr__")
    method = operators.python_method(m, value, "__format__")
    if method is not None:
        made = m.inline(method, (value, spec), {})
        if not isinstance(made, (str, OpenText)):
            raise UserError(TypeError(f"__format__ must return a str, not {type(made).__name__}"))
        return str(made)
    if type(value) not in operators.PLAIN and not spec:
        value = text_of(m, value, "__str__")
    if type(value) is FakeTensor and not value.dim():
        raise tensor_text()
    return str(m.operate(format, value, spec))


def tensor_text() -> Break:
    why = "the value of a tensor is formatted"
    return Break("data-dependent", why, "format its shape or dtype, or print outside")


def text_of(m: Machine, value: Any, name: str) -> str:
    if any(type(part) is FakeTensor for part in nested([value])):
        raise tensor_text()
    method = operators.python_method(m, value, name)
    if method is None and name == "__str__":
        if attributes.mro_lookup(type(value), "__str__") is object.__str__:
            method = operators.python_method(m, value, "__repr__")
    if method is not None:
        made = m.inline(method, (value,), {})
        if not isinstance(made, (str, OpenText)):
            raise UserError(TypeError(f"{method.__name__} returned non-string (type {type(made).__name__})"))
        return str(made)
    value = symbolic.concrete(m.world.touch_deep(value))
    bare = attributes.mro_lookup(type(value), "__repr__") is object.__repr__
    if bare and not isinstance(value, (type, BaseException)) or isinstance(value, types.FunctionType):
        if m.source(value) is None:
            why = f"the text of a {type(value).__name__} holds its address"
            raise Break("identity", why, "define __repr__, or use the __name__ of a function")
        m.world.identify(value)
    if isinstance(value, types.MethodType):
        raise Break("identity", "the text of a method holds an address", "use its __name__")
    return str(m.operate(str if name == "__str__" else repr, value))


@handles(str)
def to_text(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1 and not kwargs and type(args[0]) not in operators.PLAIN:
        return text_of(m, args[0], "__str__")
    return native(m, str, args, kwargs)


declare({
    repr: lambda m, args, kwargs: (
        repr(args[0]) if type(args[0]) in operators.PLAIN else text_of(m, args[0], "__repr__")),
    format: lambda m, args, kwargs: formatted(m, args[0], None, args[1] if len(args) > 1 else ""),
})  # fmt: skip


@handles(abs, round, int, float, complex, reversed, operator.index, bytes, told=True)
def by_dunder(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """A builtin that asks its argument's class for a special method of its name."""
    if args:
        if type(args[0]) is FakeTensor and function is abs:
            return m.torch_call(torch.abs, args, kwargs)
        method = operators.python_method(m, args[0], f"__{function.__name__}__")
        if method is not None and not (function is operator.index and isinstance(args[0], int)):
            result = m.call(method, args, kwargs)
            fits = type(result) in GIVEN.get(function, {type(result)})
            return result if fits else answered(m, function, args, result)
    return native(m, function, args, kwargs)


#: What such methods give as it should be; what Python makes of others it says itself.
GIVEN = {int: {int, torch.SymInt}, operator.index: {int, torch.SymInt}, float: {float, torch.SymFloat},
         complex: {complex}, bytes: {bytes}}  # fmt: skip


def answered(m: Machine, function: Any, args: Args, result: Any) -> Any:
    """What a builtin makes of a result of the special method that it has asked."""
    methods = {f"__{function.__name__}__": lambda *args: result}
    return m.native(function, type(type(args[0]).__name__, (), methods)(), *args[1:])


for _sign, _binary in {**operators.BINARY, **operators.COMPARE}.items():

    def _operator(m: Machine, args: Args, kwargs: Kwargs, sign: str = _sign) -> Any:
        step = operators.compare if sign in operators.COMPARE else operators.binary
        return step(m, sign, *args)

    handles(_binary)(_operator)

declare({
    operator.getitem: lambda m, args, kwargs: operators.getitem(m, *args),
    operator.setitem: lambda m, args, kwargs: operators.setitem(m, *args),
    operator.delitem: lambda m, args, kwargs: operators.delitem(m, *args),
    operator.contains: lambda m, args, kwargs: operators.contains(m, *args),
    operator.not_: lambda m, args, kwargs: not m.truth(*args),
    operator.truth: lambda m, args, kwargs: m.truth(*args),
    operator.is_: lambda m, args, kwargs: m.same(*args),
    operator.is_not: lambda m, args, kwargs: not m.same(*args),
    operator.neg: lambda m, args, kwargs: operators.unary(m, "UNARY_NEGATIVE", *args),
    operator.pos: lambda m, args, kwargs: operators.unary(m, "UNARY_POSITIVE", *args),
    operator.invert: lambda m, args, kwargs: operators.unary(m, "UNARY_INVERT", *args),
    all: lambda m, args, kwargs: all(m.truth(item) for item in items_of(m, args[0])),
    any: lambda m, args, kwargs: any(m.truth(item) for item in items_of(m, args[0])),
    map: lambda m, args, kwargs: Mapped(m, map, args[0], [m.iterate(a) for a in args[1:]]),
    filter: lambda m, args, kwargs: Mapped(m, filter, args[0], [m.iterate(args[1])]),
    contextlib.nullcontext.__enter__: lambda m, args, kwargs: m.getattr(args[0], "enter_result"),
})  # fmt: skip


def items_of(m: Machine, value: Any) -> Any:
    """An iterable that native code may walk: Python iterators go through the interpreter."""
    kind = type(value)
    if kind in (list, tuple, set, dict, str, range, frozenset):
        return m.world.touch(value)
    return Stepper(m, m.iterate(value))


class Stepper(Iterating):
    """A native iterator over an iterator of the program."""

    def __init__(self, machine: Machine, inner: Any) -> None:
        self.machine, self.inner = machine, inner

    def __next__(self) -> Any:
        value = self.machine.next(self.inner)
        if value is MISSING:
            raise StopIteration
        return value


MAKERS[Stepper] = lambda r, stepper: r.push(stepper.inner)


@handles(list, tuple, set, frozenset, enumerate, collections.deque, dict.fromkeys, told=True)
def over_items(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """Builtins that walk their first argument: user-defined iterables are interpreted."""
    walked = [list(m.iterate(a)) if isinstance(a, FakeTensor) else items_of(m, a) for a in args[:1]]
    return native(m, function, (*walked, *args[1:]), kwargs)


@handles(zip)
def together(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return native(m, zip, tuple([items_of(m, a) for a in args]), kwargs)


@handles(sum)
def total(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    result = args[1] if len(args) > 1 else kwargs.get("start", 0)
    if isinstance(result, (str, bytes, bytearray)):
        return m.native(sum, *args, **kwargs)  # raises
    for item in items_of(m, args[0]):
        if type(item) is OpenNumber and sys.version_info >= (3, 12):  # where floats are summed exactly
            raise item.needed()
        result = operators.binary(m, "+", result, item)
    return result


@handles(dict)
def dictionary(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if args and not isinstance(args[0], dict):
        if not has_attribute(m, (args[0], "keys"), {}):
            args = ([m.world.touch(pair) if operators.python_method(m, pair, "__iter__") is None
                     else tuple(items_of(m, pair))
                     for pair in items_of(m, args[0])],)  # fmt: skip
        else:
            keys = list(items_of(m, m.call(m.getattr(args[0], "keys"))))
            args = ({key: operators.getitem(m, args[0], key) for key in keys},)
    return native(m, dict, args, kwargs)


@handles(max, min, told=True)
def extremum(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    values = list(items_of(m, args[0])) if len(args) == 1 else list(args)
    key = kwargs.get("key")
    if not values:
        if "default" in kwargs:
            return kwargs["default"]
        return m.native(function, values)
    if not kwargs and len({symbolic.SEEN_AS.get(type(v), type(v)) for v in values} - {int, float}) == 0:
        kinds = {symbolic.is_float(value) for value in values}
        if len(kinds) == 1 and any(type(value) in symbolic.SYMBOLIC for value in values):
            return symbolic.extreme(function, values)
    best, score = values[0], m.call(key, (values[0],)) if key else values[0]
    for value in values[1:]:
        other = m.call(key, (value,)) if key else value
        better = operators.compare(m, ">" if function is max else "<", other, score)
        if type(better) is FakeTensor and not key and alike(best, value):
            pair = value, best
            best = score = m.torch_call(torch.where, (better, *pair), {})
            m.chosen.append(Chosen.made(m, best, pair))
        elif m.truth(better):
            best, score = value, other
    return best


def alike(one: Any, other: Any) -> bool:
    """Whether a tensor may stand for whichever of two is chosen: numbers of a kind, one in a tensor."""
    kinds = {type(value): value for value in (one, other)}
    scalar = kinds.pop(FakeTensor)
    if scalar.shape or scalar.dtype is torch.bool:
        return False
    if not kinds:
        facts = ("shape", "dtype", "device", "requires_grad")
        return all(getattr(one, fact) == getattr(other, fact) for fact in facts)
    return kinds.keys() <= ({int, float} if scalar.is_floating_point() else {int})


@handles(functools.reduce)
def reduced(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    function, values, *start = args
    return m.native(functools.reduce, lambda a, b: m.call(function, (a, b)), items_of(m, values), *start)


@handles(functools.wraps)
def wraps(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    return lambda function: (
        functools.update_wrapper(function, *args, **kwargs) if m.source(function) is None else function
    )


@handles(functools.update_wrapper)
def update_wrapper(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if m.source(args[0]) is not None:
        raise Break("function-write", "a function from outside is changed", "decorate it outside")
    return m.native(functools.update_wrapper, *args, **kwargs)


# ---------------------------------------------------------- native methods with a treatment of their own


def dict_get(m: Machine, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    if args:
        args = (sought(m, owner, args[0]), *args[1:])
    if len(args) == 2:
        found = m.world.item(owner, args[0])
        if found is not MISSING:
            return found
        return MISSING if m.world.contains(owner, args[0]) is None else args[1]
    return m.world.item(owner, args[0]) if args else MISSING


def walk(function: Any, m: Machine, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """Native methods that walk their arguments: user-defined iterables are interpreted."""
    if function in EXTENDS and len(args) == 1 and type(args[0]) in (list, tuple) and not kwargs:
        if m.world.append(owner, m.world.touch(args[0])):
            return None
    m.world.touch(owner)
    if m.world.unguarded(owner) and not isinstance(owner, (str, frozenset)):
        return MISSING
    return native(m, function, (owner, *(a if a is owner else items_of(m, a) for a in args)), kwargs)


EXTENDS = (list.extend, collections.deque.extend)
for _kind, _name in (
    (list, "extend"), (collections.deque, "extend"), (collections.deque, "extendleft"), (set, "update"),
    (str, "join"), (list, "__init__"), (set, "union"), (set, "intersection"), (set, "difference"),
    (set, "symmetric_difference"), (set, "issubset"), (set, "issuperset"), (set, "isdisjoint"),
    (set, "difference_update"), (set, "intersection_update"), (frozenset, "union"),
    (frozenset, "intersection"), (frozenset, "difference"), (set, "__init__"),
):  # fmt: skip
    METHODS[_kind, _name] = functools.partial(walk, getattr(_kind, _name))


def sort_list(m: Machine, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    m.world.touch(owner)
    key = kwargs.get("key")
    wrapped = None if key is None else (lambda value: m.call(key, (value,)))
    options = {**kwargs, "key": wrapped}
    m.operate(lambda: list.sort(owner, *args, **options), about=() if key else (owner,))
    return None


METHODS[dict, "get"] = METHODS[dict, "__getitem__"] = dict_get
METHODS[dict, "__contains__"] = lambda m, owner, args, kwargs: (
    MISSING if len(args) != 1 or (known := m.world.contains(owner, args[0])) is None else known)
METHODS[list, "sort"] = sort_list
METHODS[list, "append"] = METHODS[collections.deque, "append"] = lambda m, owner, args, kwargs: (
    None if len(args) == 1 and not kwargs and m.world.append(owner, args) else MISSING)


@handles(sorted)
def in_order(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    values = list(items_of(m, args[0]))
    sort_list(m, values, (), kwargs)
    return values


#: Names of the namespace, which a metaclass may have given, are not asked for.
FILLED = compile("global fill, locals; fill(locals())", "<class body>", "exec")


@handles(__build_class__)
def build_class(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Make a class; its body is interpreted, and fills the namespace that the metaclass gives."""

    def fill(space: Any) -> None:
        frame = m.enter(args[0], (), {})
        frame.locals, frame.mode = space, "opaque"
        m.run(frame)

    body = types.FunctionType(FILLED, {"fill": fill}, args[0].__name__)
    return m.world.made_class(m.native(builtins.__build_class__, body, *args[1:], **kwargs))


@handles(dataclasses._process_class, functools.total_ordering, enum.unique, told=True)  # type: ignore[attr-defined]
def decorate_class(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """Decorators that run as they are on a class that was made here."""
    if id(args[0]) not in m.world.made_classes:
        why = f"{args[0].__qualname__} is changed by {function.__qualname__}"
        raise Break("class-write", why, "decorate it outside")
    return m.world.made_class(m.native(function, *args, **kwargs))


declare({
    vars: lambda m, args, kwargs: (
        local_variables(m, args, kwargs) if not args else m.getattr(args[0], "__dict__")
        if hasattr(args[0], "__dict__") else m.native(vars, *args)),
    dataclasses.make_dataclass: lambda m, args, kwargs: m.world.made_class(
        m.native(dataclasses.make_dataclass, *args, **kwargs)),
})  # fmt: skip
