"""Tensor subclasses: which are captured, and what stands for those that are made of other tensors.

Of a class with `__tensor_flatten__` and `__torch_dispatch__` the program meets a fake with the outer layout.
Its `wrapped` is an instance of the class itself around fakes: torch calls run on it, so that the class says
what comes out, and the graph holds the outer tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from kiln.base.dataclass import dataclass
from kiln.base.errors import Break
from kiln.base.graph import mapped
from kiln.base.source import Attr, Source
from kiln.check.guards import MISSING, Custom, Guard
from kiln.check.shapes import Free, ShapedMatch
from kiln.check.torch_guards import TensorMatch
from kiln.ops.fake import FakeMode, FakeTensor, fake_like

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
HINT = "pass plain tensors, or disable the function"
_aside = torch._C.DisableTorchFunctionSubclass


def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class are made of others, and the class says which and what ops give."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


#: What is looked up on the class of a value by native code, which has a fake.
NATIVE_LOOKUPS = """
__len__ __iter__ __bool__ __contains__ __hash__ __getattribute__ __setattr__ __delattr__ __index__ __int__
__float__ __complex__ __array__ __del__ __torch_dispatch__
""".split()


def refuse(kind: type, what: str) -> None:
    """Raise Break for a class that does what cannot be followed, or whose tensors have no sizes yet."""
    if issubclass(kind, (UninitializedParameter, UninitializedBuffer)):
        raise Break("tensor-subclass", f"{what}, which has no size yet", "call the module once before")
    names = [name for name in NATIVE_LOOKUPS if kind not in PLAIN_TYPES and own_of(kind, name) is not MISSING]
    if names:
        raise Break("tensor-subclass", f"{what}, which has a {names[0]} of its own", HINT)


def own_of(kind: type, name: str) -> Any:
    """What a class has by a name that it has not from torch's classes."""
    for base in kind.__mro__:
        if base in PLAIN_TYPES:
            break
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING


@dataclass(frozen=True, slots=True)
class Same:
    """Whether a wrapper has the parts and the facts that an earlier one had."""

    names: tuple[str, ...]
    context: Any
    like: str | None = None
    """The part of the same sizes and strides, where these vary."""

    def __call__(self, value: Any) -> bool:
        names, context = value.__tensor_flatten__()
        if tuple(names) != self.names:
            return False
        if self.like is not None and layout_of(getattr(value, self.like)) != layout_of(value):
            return False
        known = getattr(type(value), "__metadata_guard__", None)
        return bool(context == self.context if known is None else known(self.context, context))


def layout_of(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a tensor, whatever its class says of them."""
    with _aside():
        return tuple(value.shape), tuple(value.stride())


def same_as(value: Any, source: Source, like: str | None) -> Custom:
    """The guard on the parts and the facts of a wrapper."""
    names, context = value.__tensor_flatten__()
    same = Same(tuple(names), context, like)
    try:
        if not same(value):
            raise TypeError
    except Exception:
        why = f"what {type(value).__name__} says of {source} cannot be compared"
        raise Break("tensor-subclass", why, HINT) from None
    laid = "" if like is None else f" and was laid out like {like}"
    return Custom(source, same, f"had the parts {', '.join(names)} and {context}{laid}")


def match_of(value: Any, source: Source, fake: Any) -> TensorMatch:
    """The guard on the outer layout of a wrapper: it may vary where it does in the one around fakes."""
    shape, strides = ([Free(0) if type(n) is torch.SymInt else n for n in part]
                      for part in (fake.shape, fake.stride()))  # fmt: skip
    if not any(isinstance(n, Free) for n in (*shape, *strides)):
        return TensorMatch.of(source, value)
    return ShapedMatch.of(source, value, tuple(shape), tuple(strides))


Part: TypeAlias = Callable[[torch.Tensor, Source | None, torch.Tensor], Any]
"""Makes the fake of a part: of the tensor, its path, and the wrapper that it is part of."""


def faked(value: Any, source: Source | None, part: Part, guard: Callable[[Guard], None] | None = None) -> Any:
    """An instance of a wrapper's class around fakes; `guard` takes what must hold of another one."""
    names, context = value.__tensor_flatten__()
    fakes = {}
    for name in names:
        inner, path = getattr(value, name), None if source is None else Attr(source, name)
        wrapper = is_wrapper(type(inner))
        fakes[name] = faked(inner, path, part, guard) if wrapper else part(inner, path, value)
    size, stride = layout_of(value)
    # A class that is told its sizes has those of a part that is laid out like it, which may vary.
    like = next((name for name in names if layout_of(getattr(value, name)) == (size, stride)), None)
    if like is not None:
        size, stride = layout_of(fakes[like])
        like = like if any(type(n) is torch.SymInt for n in (*size, *stride)) else None
    made = type(value).__tensor_unflatten__(fakes, context, size, stride)
    if guard is not None and source is not None:
        guard(match_of(value, source, made))
        guard(same_as(value, source, like))
    return made.requires_grad_() if value.requires_grad and not made.requires_grad else made


def plain(value: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass as a plain one over the same memory, part of the same autograd graph."""
    with _aside(), torch.enable_grad():
        return value.as_subclass(torch.Tensor)


def of_class(value: torch.Tensor, kind: type) -> torch.Tensor:
    """A plain tensor as one of a subclass."""
    with _aside():
        return value.as_subclass(kind)


def exotic(value: torch.Tensor) -> str:
    """What a tensor is that has no strides or stands for other numbers than it holds; empty for others."""
    if value.is_nested:
        return "nested"
    return str(value.layout) if value.layout is not torch.strided or value.is_quantized else ""


def outer(inner: Any) -> FakeTensor:
    """The fake that the program meets where a class gave `inner`."""
    with _aside():
        fake = fake_like(inner)
    fake.wrapped = inner
    return fake


class AroundMode(FakeMode):
    """The mode of fakes where wrappers are: their classes have the word before it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class Around:
    """Runs torch calls on what is inside of wrappers."""

    def __init__(self) -> None:
        self.outers: dict[int, FakeTensor] = {}

    def __call__(self, run: Any, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = mapped((args, kwargs), self.enter)
        result = run(func, args, kwargs)
        return mapped(result, self.leave)

    def enter(self, value: Any) -> Any:
        inner = value.wrapped if type(value) is FakeTensor else None
        if inner is None:
            return value
        self.outers[id(inner)] = value
        return inner

    def leave(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or type(value) is FakeTensor or not is_wrapper(type(value)):
            return value
        known = self.outers.get(id(value))
        if known is None:
            known = self.outers[id(value)] = outer(value)
        return known
