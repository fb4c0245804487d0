"""numpy in captured programs: calls on constants run now, arrays from outside are known by their contents."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import numpy
import torch

from kiln.base.errors import Break
from kiln.base.graph import mapped
from kiln.base.source import Source
from kiln.base.symbols import LIMIT
from kiln.capture.array_calls import (
    KNOWN,
    call_function,
    constant_tensor,
    of_outside,
    of_tensor,
    scalar_outside,
    to_tensor,
)
from kiln.capture.array_checks import ArrayEquals, ArrayMatch, facts_of, quiet, stand_ins
from kiln.capture.calls import CALLERS, POLICIES, Args, Kwargs, foreign, handles, native, unknown
from kiln.capture.fake_arrays import FakeArray
from kiln.capture.frame import Machine
from kiln.capture.rebuild import MAKERS, Raw, Rebuilder, Unbuildable
from kiln.capture.torch_calls import literal_tensor, zeroed
from kiln.capture.world import READERS, World, nested, rooted
from kiln.check.guards import Equals
from kiln.ops.fake import FakeTensor

#: Functions of numpy that touch more than their arguments.
IMPURE = frozenset("""
    load save savez savez_compressed savetxt loadtxt genfromtxt fromfile memmap seterr setbufsize
    set_printoptions seterrcall fromregex source info show_config test get_include
""".split())  # fmt: skip
#: Functions that make an array of a size: one that varies stays open.
FILLING: frozenset[Any] = frozenset(
    {numpy.zeros, numpy.ones, numpy.full, numpy.empty, numpy.arange, numpy.eye, numpy.identity}
)
SCALARS = frozenset(v for v in vars(numpy).values() if isinstance(v, type) and issubclass(v, numpy.generic))


def read_array(world: World, value: Any, source: Source) -> Any:
    """An array from outside: an input of the graph, or a constant where its place hardly changes."""
    settled = rooted(source) and value.nbytes <= KNOWN and str(source) not in world.unstable
    if value.dtype.hasobject:
        return world.thing(value, source)
    if not settled and of_torch(value):
        world.guard(ArrayMatch(source, facts_of(value)))
        world.thing(value, source)
        made = world.stands_for(of_outside(world, value, source), value, source)
        world.frozen.add(id(made))
        return made
    if value.nbytes > KNOWN:
        return world.thing(value, source)
    copy = value.copy(order="K")
    copy.setflags(write=False)
    world.guard(ArrayEquals(source, copy))
    world.arrays.append((value, source))
    world.frozen.add(id(copy))
    return world.stands_for(copy, value, source)


def of_torch(value: Any) -> bool:
    """Whether a tensor can share the memory of an array."""
    if not value.flags.writeable or any(stride < 0 for stride in value.strides):
        return False
    try:
        torch.from_numpy(value)
    except (TypeError, ValueError):
        return False
    return True


def call_array_function(m: Machine, function: Any, args: Args, kwargs: Kwargs, mode: str = "opaque") -> Any:
    """A function of numpy: it runs now when all it reads is constant."""
    name, module = getattr(function, "__name__", ""), getattr(function, "__module__", None) or "numpy"
    if name in IMPURE or module.startswith(("numpy.random", "numpy.testing")):
        raise unknown(function)
    if any(type(value) is FakeTensor for value in nested((*args, *kwargs.values()))):
        return call_on_tensors(m, function, args, kwargs)
    kinds = (FakeArray, torch.SymInt) if function in FILLING else (FakeArray,)
    if any(type(value) in kinds for value in nested((*args, *kwargs.values()))):
        return call_function(m, function, args, kwargs)
    for value in nested((*args, *kwargs.values())):
        refuse_large(m, value)
        if isinstance(function, types.FunctionType) and foreign(m, value):
            return m.inline(function, args, kwargs, mode)
    return native(m, function, args, kwargs)


def call_on_tensors(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function of numpy that tensors are arguments of: it sees the arrays over their memory.

    What numpy gives for real tensors says what becomes of the result: an array, or a tensor again, as
    universal functions hand it back to them. Others call methods of theirs.
    """
    m.world.touch_deep([args, kwargs])
    tensors = [value for value in nested((args, kwargs)) if type(value) is FakeTensor]
    arrays = {id(tensor): of_tensor(m, tensor) for tensor in tensors}
    real = mapped(
        (args, kwargs), lambda v: torch.from_numpy(arrays[id(v)].like.copy()) if id(v) in arrays else v
    )
    args, kwargs = mapped((args, kwargs), lambda v: arrays.get(id(v), v))
    try:
        with quiet(), torch._C.DisableTorchFunction():
            answer = function(*stand_ins(real[0]), **stand_ins(real[1]))
    except Exception:
        answer = None
    again = type(answer) is torch.Tensor and isinstance(function, numpy.ufunc)
    again = again and answer.dim() > 0 and answer.dtype is not torch.uint8  # which truth values become
    if not again and not isinstance(answer, (numpy.ndarray, numpy.generic)):
        why = f"numpy.{getattr(function, '__name__', '')} needs the values of a tensor"
        raise Break("data-dependent", why, "use the torch function instead")
    result = call_function(m, function, args, kwargs)
    return to_tensor(m, result, torch.from_numpy, (), {}) if again else result


def refuse_large(m: Machine, value: Any) -> None:
    """Break for an array from outside whose contents no guard covers."""
    if isinstance(value, numpy.ndarray) and m.source(value) is not None and id(value) not in m.world.frozen:
        why = f"{m.source(value)} is a large array"
        raise Break("foreign-object", why, "turn it into a tensor outside the compiled function")


def constant_array(value: Any) -> Any:
    """The array, which nobody may change any more because a tensor made from it is part of the graph."""
    if isinstance(value, numpy.ndarray):
        value.setflags(write=False)
    return value


@handles(torch.from_numpy)
def from_numpy(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A new tensor in every call, which does not share memory with the array seen during capture."""
    if not args:
        return m.native(torch.from_numpy, **kwargs)
    if type(args[0]) is FakeArray:
        return to_tensor(m, args[0], torch.from_numpy, args[1:], kwargs)
    refuse_large(m, args[0])
    return constant_tensor(m, constant_array(args[0]))


@handles(torch.as_tensor, torch.asarray, torch.tensor, told=True)
def as_tensor(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    if args and type(args[0]) is FakeArray:
        return to_tensor(m, args[0], function, args[1:], kwargs)
    if args and isinstance(args[0], (numpy.ndarray, numpy.generic)):
        refuse_large(m, args[0])
        return constant_tensor(m, constant_array(args[0]), args[1:], kwargs)
    if args and kwargs.get("dtype") is None and any(map(is_scalar, nested((m.world.touch_deep(args[0]),)))):
        # In a graph's text they are numbers of Python, which count less.
        alike = mapped(args[0], lambda v: v.like if type(v) is FakeArray else zeroed(v))
        kwargs = {**kwargs, "dtype": m.native(function, alike).dtype}
    return literal_tensor(m, args, kwargs, function)


def is_scalar(value: Any) -> bool:
    return isinstance(value, numpy.generic)


def make_array(r: Rebuilder, value: Any) -> None:
    """An array made during capture: a copy of it in every call."""
    if value.dtype.hasobject:
        raise Unbuildable(value)
    r.call(numpy.array, Raw(value.copy(order="K")))


def read_scalar(world: World, value: Any, source: Source) -> Any:
    """A constant; one that has been another before is an input of the graph."""
    open_number = isinstance(value, (numpy.integer, numpy.floating)) and -LIMIT <= value <= LIMIT
    if open_number and str(source) in world.unstable and world.varying.dynamic.mode is not False:
        with contextlib.suppress(TypeError):  # of a dtype that torch lacks
            return scalar_outside(world, value, source)
    world.guard(Equals(source, value))
    return value


for _kind in SCALARS:
    READERS[_kind] = read_scalar
    MAKERS[_kind] = Rebuilder.constant
READERS[numpy.ndarray], MAKERS[numpy.ndarray] = read_array, make_array
READERS[numpy.ufunc], MAKERS[numpy.ufunc] = World.pin, Rebuilder.constant
READERS[type(numpy.sum)], MAKERS[type(numpy.sum)] = World.pin, Rebuilder.constant
DTYPES: set[Any] = {
    type(numpy.dtype(v)) for v in SCALARS if not (issubclass(v, numpy.flexible) or v.__subclasses__())
}
for _dtype in (numpy.dtype, *DTYPES):
    READERS[_dtype], MAKERS[_dtype] = read_scalar, Rebuilder.constant
CALLERS[numpy.ufunc] = CALLERS[type(numpy.sum)] = POLICIES["array"] = call_array_function
FUNCTIONS = [
    function for space in (numpy, numpy.linalg, numpy.fft) for name, function in vars(space).items()
    if isinstance(function, (types.BuiltinFunctionType, types.FunctionType)) and name not in IMPURE
]  # fmt: skip
handles(*SCALARS, numpy.dtype, *FUNCTIONS, told=True)(
    lambda m, args, kwargs, function: call_array_function(m, function, args, kwargs)
)
