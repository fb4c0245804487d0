"""What is done with arrays over tensors of the graph: a node that does on tensors what numpy does on arrays.

numpy itself runs on stand-ins first. Its answer says what the node must give: kind, dtype, shape, strides and
what shares memory with what. Where the tensors' answer differs in any of it the graph breaks and numpy runs.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import numpy
import torch

from kiln.base.dataclass import dataclass
from kiln.base.errors import Break
from kiln.base.graph import mapped
from kiln.base.source import Derived, Source
from kiln.capture import attributes
from kiln.capture.array_checks import (
    HINT,
    KEYED,
    ArrayEquals,
    check_values,
    dtype_name,
    quiet,
    refusal,
    seen,
    sizes,
    stand_ins,
)
from kiln.capture.calls import CALLERS, Args, Kwargs, handles, leaf
from kiln.capture.fake_arrays import (
    RECORDED,
    RULES,
    ArrayFunction,
    ArrayMethod,
    FakeArray,
    Memory,
    to_array,
    to_scalar,
)
from kiln.capture.frame import Machine, UserError
from kiln.capture.rebuild import MAKERS, Rebuilder
from kiln.capture.symbolic import SYMBOLIC, concrete, holds_symbols
from kiln.capture.world import World, nested, rooted
from kiln.check.guards import TypeIs
from kiln.check.torch_guards import TensorMatch
from kiln.ops.fake import FakeTensor
from kiln.ops.symint import specialised

LARGEST = 1 << 28  # bytes of a stand-in
KNOWN = 1 << 16  # bytes of an array that are compared in every call
#: Facts of an array that do not depend on its contents, of its tensor and of its stand-in.
FACTS: dict[str, Callable[[Any, Any], Any]] = {
    "shape": lambda tensor, like: tuple(tensor.shape),
    "ndim": lambda tensor, like: like.ndim,
    "size": lambda tensor, like: tensor.numel(),
    "dtype": lambda tensor, like: like.dtype,
    "itemsize": lambda tensor, like: like.itemsize,
    "nbytes": lambda tensor, like: tensor.numel() * like.itemsize,
    "strides": lambda tensor, like: tuple([
        theirs if type(mine) is int else mine * like.itemsize
        for mine, theirs in zip(tensor.stride(), like.strides, strict=True)
    ]),
}  # fmt: skip
VIEWS = frozenset({"T", "real", "imag"})
WRITING = frozenset({"fill", "sort", "put", "__setitem__", *(n for n in RECORDED if n.startswith("__i"))}) - {
    "__invert__", "__index__", "__int__",
}  # fmt: skip
READING = frozenset({"item", "tolist"})


@functools.cache
def on_tensors() -> Any:
    """numpy's functions on tensors; loaded when a program first uses an array, which few do."""
    return importlib.import_module("torch._numpy")


@functools.cache
def functions() -> dict[int, ArrayFunction]:
    """The nodes' functions, by id of numpy's."""
    spaces = ((numpy, on_tensors()), (numpy.linalg, on_tensors().linalg), (numpy.fft, on_tensors().fft))
    return {
        id(getattr(space, name)): made(name, getattr(tensors, name))
        for space, tensors in spaces
        for name in dir(tensors)
        if not name.startswith("_")
        and callable(getattr(space, name, None))
        and not isinstance(getattr(space, name), type)
    }


@functools.cache
def method_node(name: str) -> ArrayFunction | None:
    function = getattr(on_tensors().ndarray, name, None)
    return None if function is None else made(name, function)


def made(name: str, function: Callable[..., Any]) -> ArrayFunction:
    divides = functools.partial(in_doubles, function) if name in DIVIDING else function
    return ArrayFunction(name, divides, on_tensors().ndarray)


def in_doubles(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A division whose integers are doubles first, as in numpy: torch divides them in its default dtype."""
    array = on_tensors().ndarray
    tensors = [value.tensor for value in args if isinstance(value, array)]
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        args = tuple([value.astype("float64") if isinstance(value, array) else value for value in args])
    return function(*args, **kwargs)


DIVIDING = frozenset({"__truediv__", "__rtruediv__", "divide", "true_divide"})


@functools.cache
def operator_node(name: str) -> ArrayFunction:
    """An operator of tensors themselves, which leave a number open that varies."""
    array = on_tensors().ndarray
    return ArrayFunction(name, lambda a, *rest: array(getattr(a.tensor, name)(*rest)), array)


@functools.cache
def view_node(name: str) -> ArrayFunction:
    return ArrayFunction(name, lambda array: getattr(array, name), on_tensors().ndarray)


# ---------------------------------------------------------------------- making


def of_tensor(m: Machine, tensor: FakeTensor) -> FakeArray:
    """What `tensor.numpy()` gives: an array over the same memory."""
    with torch._C.DisableTorchFunction():
        empty = torch.empty(0, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        m.native(torch.Tensor.numpy, empty)  # raises for what has no array
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        raise Break("data-dependent", "Tensor.numpy is called", HINT)
    stand_in = torch.empty_strided(sizes(tensor), tuple(map(seen, tensor.stride())), dtype=tensor.dtype)
    if stand_in.nbytes > LARGEST:
        raise refusal("array", "is too large for a stand-in")
    like = stand_in.numpy()
    like[...] = numpy.random.default_rng(0).random(like.shape) + 0.5 if like.dtype.kind in "fc" else 0
    view = m.torch_call(torch.Tensor.view_as, (tensor, tensor), {})
    return adopt(m.world, view, like, None)


def of_outside(world: World, value: Any, source: Source) -> FakeArray:
    """An array from outside: an input of the graph."""
    tensor, path = torch.from_numpy(value), Derived(source, torch.from_numpy, "tensor")
    shape = world.varying.tensor(tensor, path, not rooted(source), {})
    if shape is None:
        world.guard(TensorMatch.of(path, tensor))
        fake = world.recorder.input(tensor, path)
    else:
        fake = world.shaped(tensor, path, shape)
    like = value.copy(order="K")
    known = frozenset({Root(source, value.copy(order="K"))}) if value.nbytes <= KNOWN else None
    return adopt(world, fake, like, known, outside=True)


def scalar_outside(world: World, value: Any, source: Source) -> Any:
    """A scalar from outside that varies: an input of the graph, a symbolic number where torch takes it."""
    fake = world.recorder.input(tensor_of_scalar(value), Derived(source, tensor_of_scalar, "tensor"))
    world.guard(TypeIs(source, type(value)))
    roots = frozenset({Root(source, value)})
    made = world.stands_for(adopt(world, fake, value, roots), value, source)
    world.frozen.add(id(made))
    return made


def tensor_of_scalar(value: Any) -> torch.Tensor:
    return torch.from_numpy(numpy.array(value))


def number_of(value: Any) -> Any:
    """The number that a scalar is for torch."""
    return value.item()


def as_argument(array: FakeArray) -> Any:
    """What a function of torch takes for an array: a scalar from outside is a number like any other."""
    (root,) = array.memory.roots if array.memory.roots and len(array.memory.roots) == 1 else (None,)
    if root is None or root.value is not array.like or not isinstance(array.like, numpy.generic):
        return contents(array)
    source, value = Derived(root.source, number_of, "number"), number_of(array.like)
    world = array.world
    return world.number(world.varying.number(value, source, True, varies=True), value, source)


def as_index(array: FakeArray) -> Any:
    """What a tensor is indexed by for an array: positions and masks are tensors of the graph."""
    known = array.tensor.dtype in (torch.int64, torch.int32, torch.bool) and array.like.ndim
    return array.tensor if known else array


def adopt(
    world: World, tensor: Any, like: Any, roots: frozenset[Root] | None, outside: bool = False
) -> FakeArray:
    """The array over a tensor; arrays that share memory share what is known of it."""
    owner = root(like)
    memory = world.memories.get(id(owner))
    if memory is None:
        memory = world.memories[id(owner)] = Memory(owner, roots, outside)
    array = FakeArray(world, tensor, like, memory)
    world.keep.append(array)
    return array


@dataclass(frozen=True, eq=False, slots=True)
class Root:
    """A small array from outside, and its contents when capture began."""

    source: Source
    value: Any


def root(like: Any) -> Any:
    """The array that owns the memory of another."""
    while isinstance(like, numpy.ndarray) and isinstance(like.base, numpy.ndarray):
        like = like.base
    return like


# ---------------------------------------------------------------------- doing


def apply(m: Machine, node: ArrayFunction | None, function: Callable[..., Any], args: Args, kwargs: Kwargs,
          name: str, writes: bool = False) -> Any:  # fmt: skip
    """What numpy gives: a node's result, or a constant where tensors do otherwise and scalars are known."""
    try:
        return recorded(m, node, function, args, kwargs, name, writes)
    except Break as e:
        if e.kind == "numpy" and (holds_symbols(args) or holds_symbols(kwargs)):
            fixed, node = concrete(args), method_node(name) if node is operator_node(name) else node
            return apply(m, node, function, fixed, concrete(kwargs), name, writes)
        arrays = [value for value in nested((*args, *kwargs.values())) if type(value) is FakeArray]
        known = all(array.memory.roots and isinstance(array.like, numpy.generic) for array in arrays)
        if e.kind != "numpy" or not known or any(type(v) is FakeTensor for v in nested((*args, kwargs))):
            raise
        return m.native(function, *stand_ins(args, contents), **stand_ins(kwargs, contents))


def recorded(m: Machine, node: ArrayFunction | None, function: Callable[..., Any], args: Args, kwargs: Kwargs,
             name: str, writes: bool = False) -> Any:  # fmt: skip
    """Run numpy on the stand-ins, record the node, and give its result."""
    if node is None:
        raise refusal(name, "has no counterpart on tensors")
    for value in (*args, *kwargs.values()):
        m.world.touch_deep(value)
    arrays = [value for value in nested((*args, *kwargs.values())) if type(value) is FakeArray]
    if any(type(value) is FakeTensor for value in nested((*args, *kwargs.values()))):
        raise refusal(name, "is called with a tensor and an array")
    writes = writes or kwargs.get("out") is not None
    target = kwargs.get("out", args[0] if args else None) if writes else None
    if writes and type(target) is not FakeArray:
        raise refusal(name, "writes to an array that is a constant of the graph")
    with torch._C.DisableTorchFunction():  # the tensors of the check are nothing to the recorder
        check_values(node, function, args, kwargs, name, target)
    try:
        with quiet():
            answer = function(*stand_ins(args), **stand_ins(kwargs))
    except Exception as e:
        raise refusal(name, f"raises {type(e).__name__} on a stand-in: {e}") from None
    if answer is NotImplemented:
        return answer
    if not writes:
        for array in arrays:
            if answer is array.like:
                return array
    mark = m.recorder.checkpoint()
    keyed = name in KEYED
    try:
        lowered = [mapped(v, functools.partial(lower, m, keyed and i == 1)) for i, v in enumerate(args)]
        got = m.torch_call(node, tuple(lowered), mapped(kwargs, functools.partial(lower, m, False)))
        if type(target) is FakeArray:
            wrote(m, target, arrays)
            return target if answer is not None else None
        return result(m, answer, got, arrays, name)
    except UserError as e:
        m.recorder.rollback(mark)
        raise refusal(name, f"raises {type(e.error).__name__} on tensors: {e.error}") from None
    except Break:
        m.recorder.rollback(mark)
        raise


def lower(m: Machine, index: bool, value: Any) -> Any:
    """A value among the arguments for the node: tensors for arrays, names for dtypes."""
    if type(value) is FakeArray:
        return value.tensor
    if index and isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray):
        value.setflags(write=False)
    array = isinstance(value, (numpy.ndarray, numpy.generic))
    return constant_tensor(m, value) if array else dtype_name(value)


def constant_tensor(m: Machine, value: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
    """The tensor of a constant array or scalar; in a graph's text one element has no dtype of its own."""
    given = dict(kwargs or {})
    if value.shape == () and not args and given.get("dtype") is None:
        given["dtype"] = m.native(tensor_of_scalar, value).dtype
    return leaf(m, torch.tensor, (value, *args), given)


def wrote(m: Machine, target: FakeArray, arrays: list[FakeArray]) -> None:
    """What is known of contents after a write: other arrays from outside may share the memory."""
    target.memory.roots = roots_of(arrays)
    if target.memory.outside:
        for memory in m.world.memories.values():
            memory.roots = None if memory.outside else memory.roots


def roots_of(arrays: list[FakeArray]) -> frozenset[Root] | None:
    """The arrays from outside that contents made of these follow from."""
    roots = [array.memory.roots for array in arrays]
    return None if None in roots else frozenset().union(*roots)  # type: ignore[arg-type]


def result(m: Machine, answer: Any, got: Any, arrays: list[FakeArray], name: str) -> Any:
    """What the node gave as the program sees it, where numpy agrees."""
    if type(answer) in (list, tuple) and type(got) in (list, tuple) and len(got) == len(answer):
        return type(answer)([result(m, a, g, arrays, name) for a, g in zip(answer, got, strict=True)])
    if type(got) is not FakeTensor or not isinstance(answer, (numpy.ndarray, numpy.generic)):
        raise refusal(name, "gives something else than arrays")
    expected = torch.from_numpy(numpy.empty(0, answer.dtype)).dtype
    if got.dtype != expected or sizes(got) != answer.shape:
        raise refusal(name, f"gives another dtype or shape on tensors ({got.dtype}, {tuple(got.shape)})")
    shares = isinstance(answer, numpy.ndarray) and any(root(answer) is root(array.like) for array in arrays)
    shared = any(base(got) is base(array.tensor) for array in arrays)
    if shares and not (shared and same_strides(answer, got)):
        raise refusal(name, "gives a view of an array that tensors do not have")
    if not shares and (shared or not same_strides(answer, got)):
        got = m.torch_call(torch.clone, (got,), {"memory_format": torch.contiguous_format})
        if not same_strides(answer, got):
            raise refusal(name, "gives an array with another order of elements than tensors")
    return adopt(m.world, got, answer, roots_of(arrays))


def base(tensor: Any) -> Any:
    return tensor if tensor._base is None else tensor._base


def same_strides(answer: Any, got: FakeTensor) -> bool:
    """Whether elements lie in memory in the same order."""
    return 0 in answer.shape or all(
        n == 1 or seen(mine) * answer.itemsize == theirs
        for n, mine, theirs in zip(answer.shape, got.stride(), answer.strides, strict=True)
    )


def contents(array: FakeArray) -> Any:
    """The contents, guarded where they follow from small arrays from outside."""
    roots = array.memory.roots
    if roots is None or roots and array.world.wrote_outside():
        raise Break("data-dependent", "the contents of an array are needed", HINT)
    for root in roots:
        array.world.guard(ArrayEquals(root.source, root.value))
    return array.like


# ---------------------------------------------------------------------- what the interpreter meets


def special(array: FakeArray, name: str, *args: Any) -> Any:
    """A special method, called by native code or by an operator."""
    if name == "__len__":
        return specialised(array.tensor.shape[0]) if array.like.shape else len(array.like)
    if name == "__iter__":
        return iterate(array)
    if name in RECORDED:
        m = array.world.machine
        if isinstance(array.like, numpy.generic) and name.startswith("__i") and name != "__invert__":
            return NotImplemented  # scalars have no operators in place
        if isinstance(array.like, numpy.generic) and any(type(value) is FakeTensor for value in args):
            return getattr(contents(array), name)(*args)
        given = method(m, array, name, args, {})
        swapped = f"__r{name[2:]}"
        if given is NotImplemented and type(args[0]) is FakeArray and swapped in RECORDED:
            return method(m, args[0], swapped, (array,), {})  # of one class here, of two in numpy
        return given
    return getattr(contents(array), name)(*args)


def method(m: Machine, array: FakeArray, name: str, args: Args, kwargs: Kwargs) -> Any:
    if name in READING:
        known = as_argument(array) if name == "item" and not args and not kwargs else contents(array)
        return m.native(getattr(known, name), *args, **kwargs) if hasattr(known, name) else known
    function = getattr(type(array.like), name)
    open_number = name in RECORDED and any(type(value) in SYMBOLIC for value in args)
    node = operator_node(name) if open_number else method_node(name)
    return apply(m, node, function, (array, *args), kwargs, name, name in WRITING)


def load(m: Machine, array: FakeArray, name: str) -> Any:
    """An attribute of an array."""
    if name in FACTS:
        return FACTS[name](array.tensor, array.like)
    if name == "__class__":
        return m.world.constant(type(array.like))
    if name in VIEWS:
        return apply(m, view_node(name), lambda a: getattr(a, name), (array,), {}, name)
    found = attributes.mro_lookup(type(array.like), name)
    if isinstance(found, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return ArrayMethod(array, name)
    if not hasattr(array.like, name):
        return m.native(getattr, array.like, name)
    raise refusal(f"ndarray.{name}", "has no counterpart on tensors")


def call_method(m: Machine, function: ArrayMethod, args: Args, kwargs: Kwargs, mode: str) -> Any:
    if function.name in RECORDED or not function.name.startswith("__"):
        return method(m, function.array, function.name, args, kwargs)
    return m.native(special, function.array, function.name, *args, **kwargs)


def call_function(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function of numpy that arrays of the graph are arguments of."""
    name = getattr(function, "__name__", str(function))
    if isinstance(function, numpy.ufunc) and len(args) > function.nin:
        args, out = args[: function.nin], args[function.nin :]
        if len(out) > 1 or "out" in kwargs:
            raise refusal(name, "writes more than one result")
        kwargs = {**kwargs, "out": out[0]}
    return apply(m, functions().get(id(function)), function, args, kwargs, name)


def call_ufunc(m: Machine, ufunc: Any, how: str, args: Args, kwargs: Kwargs) -> Any:
    """A universal function that native code calls on an array of the graph."""
    if how != "__call__":
        raise refusal(f"{ufunc.__name__}.{how}", "has no counterpart on tensors")
    out = kwargs.get("out")
    if out is not None:
        (kwargs["out"],) = out
    return call_function(m, ufunc, args, kwargs)


def iterate(array: FakeArray) -> Any:
    iter(array.like)  # raises for what has no items
    return iter([special(array, "__getitem__", i) for i in range(len(array))])  # type: ignore[arg-type]


RULES.update(
    special=special, contents=contents, argument=as_argument, index=as_index, ufunc=call_ufunc,
    function=call_function,
)  # fmt: skip
attributes.LOADERS[FakeArray] = load
CALLERS[ArrayMethod] = call_method


@handles(torch.Tensor.numpy)
def numpy_of(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    (tensor,) = args
    if kwargs.get("force"):
        tensor = m.torch_call(torch.Tensor.detach, (tensor,), {})
        tensor = m.torch_call(torch.Tensor.cpu, (tensor,), {})
    elif set(kwargs) - {"force"}:
        return m.native(torch.Tensor.numpy, torch.empty(0), **kwargs)
    return of_tensor(m, tensor)


def to_tensor(m: Machine, array: FakeArray, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """torch.from_numpy, as_tensor, asarray or tensor of an array of the graph."""
    array.memory.roots = None  # from now on torch may write there
    scalar = isinstance(array.like, numpy.generic)
    if args or kwargs.keys() - {"dtype"} or scalar and function is torch.from_numpy:
        raise refusal("array", f"is given to torch.{function.__name__} with more than a dtype")
    copies = function is torch.tensor or scalar
    if copies:
        made = m.torch_call(torch.clone, (array.tensor,), {"memory_format": torch.contiguous_format})
    else:
        made = m.torch_call(torch.Tensor.view_as, (array.tensor, array.tensor), {})
    wanted = kwargs.get("dtype")
    if wanted is None or wanted == made.dtype:
        return made
    return m.torch_call(torch.Tensor.to, (made, wanted), {})


def beside(m: Machine, tensor: FakeTensor, operation: Callable[[FakeArray], Any]) -> Any:
    """A tensor of what numpy gives for the tensor's array."""
    given = operation(of_tensor(m, tensor))
    return to_tensor(m, given, torch.as_tensor, (), {}) if type(given) is FakeArray else given


RULES["beside"] = beside


def make_method(r: Rebuilder, value: ArrayMethod) -> None:
    r.push(value.array)
    r.e.attr(value.name)


MAKERS[ArrayMethod] = make_method
MAKERS[FakeArray] = lambda r, value: r.call(
    to_scalar if isinstance(value.like, numpy.generic) else to_array, value.tensor
)
