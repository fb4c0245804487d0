"""Arrays and numbers whose contents are tensors of the graph; arrays record what is done to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kiln.base.errors import Break
from kiln.base.graph import mapped
from kiln.capture.frame import Looked, Restart

OPERATIONS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod".split()
#: Special methods that are operations on the contents.
RECORDED = frozenset({
    *(f"__{prefix}{name}__" for name in OPERATIONS for prefix in ("", "r", "i")),
    *(f"__{name}__" for name in "lt le eq ne gt ge neg pos abs invert getitem setitem".split()),
})  # fmt: skip
#: Special methods that ask for the contents themselves.
ASKING = frozenset(
    f"__{name}__" for name in "bool int float index complex str repr format contains round array".split()
)


class Memory:
    """What arrays that share a buffer share: the arrays from outside that their contents follow from.

    `roots` is None when the contents follow from tensors, so that they are not known while capturing.
    """

    __slots__ = ("outside", "owner", "roots")

    def __init__(self, owner: Any, roots: frozenset[Any] | None, outside: bool = False) -> None:
        self.owner, self.roots, self.outside = owner, roots, outside


class Forward:
    """A special method of what stands for a value; not a Python function, so nobody inlines it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, fake: Any, owner: Any = None) -> Any:
        return self if fake is None else functools.partial(fake.special, self.name)

    def __call__(self, fake: Any, *args: Any) -> Any:
        return fake.special(self.name, *args)


class FakeArray:
    """An array or scalar of numpy over the tensor of a graph.

    `like` is a real array (or scalar) of the same type, dtype, shape, strides and sharing of memory: numpy
    itself made it by doing the same on stand-ins, so it answers all that does not depend on the contents.
    """

    __slots__ = ("__weakref__", "like", "memory", "tensor", "world")

    def __init__(self, world: Any, tensor: Any, like: Any, memory: Memory) -> None:
        self.world, self.tensor, self.like, self.memory = world, tensor, like, memory

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.like)

    def __hash__(self) -> int:
        return hash(RULES["contents"](self) if self.like.__hash__ is not None else self.like)

    def special(self, name: str, *args: Any) -> Any:
        """What a special method gives: what the rules make of it."""
        return RULES["special"](self, name, *args)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return RULES["ufunc"](self.world.machine, ufunc, method, args, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return RULES["function"](self.world.machine, function, args, kwargs)


for _name in (*RECORDED, *ASKING, "__len__", "__iter__"):
    setattr(FakeArray, _name, Forward(_name))

#: What the special methods do; filled by `arrays`.
RULES: dict[str, Callable[..., Any]] = {}


class OpenNumber:
    """A Python number that one element of a tensor is, of which nobody knows more yet than its type.

    A program that looks at it breaks where the number was read: capture begins again for that.
    """

    __slots__ = ("__weakref__", "kind", "reason", "step", "tensor")

    def __init__(self, kind: type, tensor: Any, step: int, reason: Break) -> None:
        self.kind, self.tensor, self.step, self.reason = kind, tensor, step, reason

    def needed(self) -> Any:
        """What is raised where the value is looked at."""
        return Restart(self.step, self.reason)

    def special(self, name: str, *args: Any) -> Any:
        """What a special method gives: all of them look at the value."""
        raise self.needed()


for _name in (*RECORDED, *ASKING, "__hash__", "__ceil__", "__floor__", "__trunc__"):
    setattr(OpenNumber, _name, Forward(_name))


class OpenText(OpenNumber):
    """A text from outside that was another one in an earlier call: of no consequence while it is only kept.

    Where the program looks at it, capture begins again for this text.
    """

    __slots__ = ("source",)

    def __init__(self, kind: type, source: Any) -> None:
        self.kind, self.source = kind, source

    def needed(self) -> Any:
        """What is raised where the text is looked at."""
        return Looked(str(self.source))


for _name in ("__len__", "__iter__", "__reduce_ex__"):
    setattr(OpenText, _name, Forward(_name))


class ArrayMethod:
    """A method bound to such an array."""

    __slots__ = ("array", "name")

    def __init__(self, array: FakeArray, name: str) -> None:
        self.array, self.name = array, name


class ArrayFunction:
    """A node's function: what numpy does, on tensors."""

    def __init__(self, name: str, function: Callable[..., Any], wrap: type) -> None:
        self.function, self.wrap = function, wrap
        self.__name__ = self.__qualname__ = f"numpy_{name.strip('_')}"
        self.__module__ = "numpy.on_tensors"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrap: Any = self.wrap
        args, kwargs = mapped((args, kwargs), lambda v: wrap(v) if isinstance(v, torch.Tensor) else v)
        return mapped(self.function(*args, **kwargs), lambda v: v.tensor if isinstance(v, wrap) else v)


def to_array(tensor: torch.Tensor) -> Any:
    """The array that shares memory with the tensor."""
    return tensor.detach().resolve_conj().resolve_neg().numpy()


def to_scalar(tensor: torch.Tensor) -> Any:
    """The scalar of numpy with the tensor's value."""
    return to_array(tensor)[()]
