"""Comparing two worlds: values, types, identity relations, memory sharing, gradients."""

from __future__ import annotations

import cmath
import enum
import functools
import os
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

ATOMS = (
    int, float, complex, str, bytes, bool, type(None), range, slice, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, type(Ellipsis), type(NotImplemented),
)  # fmt: skip
BY_IDENTITY = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, types.CodeType)
VALUES = (tuple, frozenset, torch.Size, types.MethodType, np.generic)
UNSEEN = {"_backward_hooks_state", "__orig_class__"}


#: Whether the backend that the tests run through has arithmetic of its own, which differs in the last bits.
COMPUTES_ANEW = os.environ.get("KILN_COURSE_BACKEND") == "kiln"


def same_number(a: Any, b: Any) -> bool:
    return repr(a) == repr(b) or (COMPUTES_ANEW and cmath.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor reachable through containers and attributes, each once."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def walk(v: Any) -> None:
        if id(v) in seen or isinstance(v, (*ATOMS, type, types.ModuleType)):
            return
        seen.add(id(v))
        if isinstance(v, torch.Tensor):
            found.append(v)
        elif isinstance(v, dict):
            for k, item in v.items():
                walk(k)
                walk(item)
        elif isinstance(v, (list, tuple, set, frozenset, deque)):
            for item in v:
                walk(item)
        for name in attributes(v):
            walk(getattr(v, name, None))

    walk(value)
    return found


def attributes(v: Any) -> list[str]:
    """The instance's own attribute names: dict and slots."""
    if isinstance(v, (types.FunctionType, *ATOMS, *BY_IDENTITY)):
        return []
    names = list(getattr(v, "__dict__", {}))
    for cls in type(v).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [n for n in names if n not in UNSEEN and n not in ("__dict__", "__weakref__")]


class Same:
    """Callable that fails where two worlds differ; one instance spans everything that must be compared together."""

    def __init__(self) -> None:
        self.there: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.memory: dict[int, int] = {}
        self.memory_back: dict[int, int] = {}
        self.alive: list[Any] = []

    def __call__(self, a: Any, b: Any, path: str = "value") -> None:
        ta, tb = type(a), type(b)
        assert ta is tb or ("<locals>" in ta.__qualname__ and ta.__qualname__ == tb.__qualname__), (
            f"{path}: type {ta} became {tb}: {a!r} and {b!r}"
        )
        if isinstance(a, BY_IDENTITY) and not (isinstance(a, type) and "<locals>" in a.__qualname__):
            assert a is b, f"{path}: {a!r} became {b!r}"
        elif isinstance(a, type):
            assert a.__qualname__ == b.__qualname__, f"{path}: {a!r} became {b!r}"
        elif isinstance(a, ATOMS) and not hasattr(a, "__dict__"):
            same = same_number(a, b) if isinstance(a, (float, complex)) else a == b
            assert same, f"{path}: {a!r} became {b!r}"
        elif not self.met(a, b, path):
            self.compare(a, b, path)

    def met(self, a: Any, b: Any, path: str) -> bool:
        """Whether this pair was compared before; the same object must stay the same object."""
        if isinstance(a, VALUES):
            return False
        known = self.there.get(id(a)), self.back.get(id(b))
        if known == (None, None):
            self.there[id(a)], self.back[id(b)] = id(b), id(a)
            self.alive += [a, b]
            return False
        assert known == (id(b), id(a)), f"{path}: identity is not kept: {a!r} and {b!r}"
        return True

    def compare(self, a: Any, b: Any, path: str) -> None:
        if isinstance(a, torch.Tensor):
            self.tensor(a, b, path)
        elif isinstance(a, types.FunctionType):
            self.function(a, b, path)
            return
        elif isinstance(a, functools.partial):
            self((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), path)
        elif isinstance(a, types.MethodType):
            self(a.__func__, b.__func__, f"{path}.__func__")
            self(a.__self__, b.__self__, f"{path}.__self__")
            return
        elif isinstance(a, BaseException):
            self.error(a, b, path)
        elif isinstance(a, (dict, types.MappingProxyType)):
            self.sequence(list(a.items()), list(b.items()), path)
            if isinstance(a, defaultdict):
                self(a.default_factory, b.default_factory, f"{path}.default_factory")
        elif isinstance(a, (list, tuple, deque)):
            self.sequence(list(a), list(b), path)
            if isinstance(a, deque):
                assert a.maxlen == b.maxlen, f"{path}: maxlen {a.maxlen} became {b.maxlen}"
        elif isinstance(a, (set, frozenset)):
            self.members(a, b, path)
        elif isinstance(a, types.CellType):
            self(a.cell_contents, b.cell_contents, f"{path}.cell_contents")
        elif isinstance(a, Iterator) and not hasattr(a, "__dict__"):
            self.sequence(list(a), list(b), f"{path}<iterator>")
        elif hasattr(a, "__array__"):
            assert a.dtype == b.dtype and a.shape == b.shape and (a == b).all(), f"{path}: {a!r} became {b!r}"
        elif isinstance(a, weakref.ref):
            self(a(), b(), f"{path}()")
        elif not attributes(a):
            plain = type(a).__eq__ is object.__eq__
            assert plain or a == b or repr(a) == repr(b), f"{path}: {a!r} became {b!r}"
        self.attributes(a, b, path)

    def attributes(self, a: Any, b: Any, path: str) -> None:
        names = attributes(a)
        assert names == attributes(b), f"{path}: attributes {names} became {attributes(b)}"
        for name in names:
            missing = object()
            x, y = (vars(v).get(name, missing) if name in getattr(v, "__dict__", {}) else getattr(v, name, missing)
                    for v in (a, b))  # fmt: skip
            assert (x is missing) == (y is missing), f"{path}.{name}: set in one world only"
            if x is not missing:
                self(x, y, f"{path}.{name}")

    def sequence(self, a: list[Any], b: list[Any], path: str) -> None:
        assert len(a) == len(b), f"{path}: length {len(a)} became {len(b)}: {a!r} and {b!r}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            self(x, y, f"{path}[{i}]")

    def members(self, a: Any, b: Any, path: str) -> None:
        assert len(a) == len(b), f"{path}: {a!r} became {b!r}"
        if all(isinstance(m, (*ATOMS, tuple)) for m in a):
            assert a == b, f"{path}: {a!r} became {b!r}"
            return
        by_name = [sorted(s, key=lambda m: (type(m).__qualname__, str(getattr(m, "shape", "")))) for s in (a, b)]
        self.sequence(*by_name, path)

    def function(self, a: Any, b: Any, path: str) -> None:
        assert a.__qualname__ == b.__qualname__, f"{path}: {a} became {b}"
        for part in ("__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__dict__", "__module__"):
            self(getattr(a, part), getattr(b, part), f"{path}.{part}")
        if a is not b:
            assert a.__code__ is b.__code__, f"{path}: {a} has other code"
            self.sequence(list(a.__closure__ or ()), list(b.__closure__ or ()), f"{path}.__closure__")

    def error(self, a: BaseException, b: BaseException, path: str) -> None:
        assert str(a) == str(b), f"{path}: {type(a).__name__}: {a} became {b}"
        self.sequence(list(a.args), list(b.args), f"{path}.args")
        for part in ("__cause__", "__context__", "__suppress_context__"):
            self(getattr(a, part), getattr(b, part), f"{path}.{part}")

    def tensor(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        for name in ("dtype", "device", "shape", "layout", "requires_grad", "is_leaf", "is_inference"):
            x, y = getattr(a, name), getattr(b, name)
            x, y = (x(), y()) if callable(x) else (x, y)
            assert x == y, f"{path}.{name}: {x} became {y}"
        assert (a.grad_fn is None) == (b.grad_fn is None), f"{path}.grad_fn: {a.grad_fn} became {b.grad_fn}"
        if a.layout == torch.strided and a.device.type != "meta":
            assert a.stride() == b.stride(), f"{path}.stride: {a.stride()} became {b.stride()}"
            assert a.storage_offset() == b.storage_offset(), f"{path}.storage_offset"
            assert a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg(), f"{path}: conj or neg bit"
            self.sharing(a, b, path)
        if a.device.type != "meta":
            near = {} if COMPUTES_ANEW else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(b.detach(), a.detach(), **near, equal_nan=True, msg=lambda m: f"{path}: {m}")
        if a.is_leaf:
            self.gradient(a.grad, b.grad, f"{path}.grad")

    def gradient(self, a: torch.Tensor | None, b: torch.Tensor | None, path: str) -> None:
        """Gradients are sums whose order is free."""
        assert (a is None) == (b is None), f"{path}: {a} became {b}"
        if a is not None and b is not None:
            near = {} if COMPUTES_ANEW else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(b, a, **near, equal_nan=True, msg=lambda m: f"{path}: {m}")

    def sharing(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        """Tensors over one storage stay over one storage, others stay apart."""
        x, y = a.untyped_storage(), b.untyped_storage()
        if not x.nbytes() and not y.nbytes():
            return
        self.alive += [x, y]
        kept = self.memory.setdefault(x._cdata, y._cdata) == y._cdata
        assert kept and self.memory_back.setdefault(y._cdata, x._cdata) == x._cdata, f"{path}: memory sharing differs"


