"""Operators as the program sees them: on tensors, on objects with dunder methods, on everything native."""

from __future__ import annotations

import collections.abc
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kiln.base.errors import Break
from kiln.capture import attributes, symbolic
from kiln.capture.frame import UserError
from kiln.capture.iterators import Generator
from kiln.capture.purity import DICT_VIEWS
from kiln.capture.world import MISSING, nested
from kiln.ops.fake import LITERALS, FakeTensor, constant_of

if TYPE_CHECKING:
    from kiln.capture.machine import Machine

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "@": operator.matmul, "&": operator.and_, "|": operator.or_,
    "^": operator.xor, "<<": operator.lshift, ">>": operator.rshift,
    "+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "/=": operator.itruediv,
    "//=": operator.ifloordiv, "%=": operator.imod, "**=": operator.ipow, "@=": operator.imatmul,
    "&=": operator.iand, "|=": operator.ior, "^=": operator.ixor,
    "<<=": operator.ilshift, ">>=": operator.irshift,
}  # fmt: skip
DUNDER = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow",
    "@": "matmul", "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
COMPARE_DUNDER = {
    "<": ("__lt__", "__gt__"), "<=": ("__le__", "__ge__"), "==": ("__eq__", "__eq__"),
    "!=": ("__ne__", "__ne__"), ">": ("__gt__", "__lt__"), ">=": ("__ge__", "__le__"),
}  # fmt: skip
UNARY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "UNARY_NEGATIVE": (operator.neg, "__neg__"), "UNARY_POSITIVE": (operator.pos, "__pos__"),
    "UNARY_INVERT": (operator.invert, "__invert__"),
}  # fmt: skip
PLAIN = frozenset({int, float, bool, str, complex, type(None), bytes})
SYMBOLIC = symbolic.SYMBOLIC


def python_method(m: Machine, value: Any, name: str) -> Any:
    """The Python function that implements a dunder for the value's class, or None."""
    if type(value) in PLAIN or type(value) in SYMBOLIC:
        return None
    method = attributes.type_lookup(m, type(value), name)
    return method if isinstance(method, types.FunctionType) else None


def checked_bool(value: Any) -> Any:
    if type(value) is not bool:
        raise TypeError(f"__bool__ should return bool, returned {type(value).__name__}")
    return value


def checked_length(value: Any) -> int:
    """What `len` makes of the result of `__len__`."""
    n = operator.index(value)
    if n < 0:
        raise ValueError("__len__() should return >= 0")
    return n


TRUTH = {"__bool__": checked_bool, "__len__": checked_length}


def binary(m: Machine, sign: str, a: Any, b: Any, mode: str = "opaque") -> Any:
    """`a sign b`, in-place signs included."""
    ta, tb = type(a), type(b)
    if ta is FakeTensor or tb is FakeTensor:
        return tensor_binary(m, BINARY[sign if ta is FakeTensor else sign.rstrip("=")], a, b)
    if ta in PLAIN and tb in PLAIN:
        return m.native(BINARY[sign], a, b)
    if ta in SYMBOLIC or tb in SYMBOLIC:
        if ta in symbolic.NUMERIC and tb in symbolic.NUMERIC and sign.rstrip("=") in symbolic.ARITHMETIC:
            return m.native(symbolic.arithmetic, sign.rstrip("="), a, b)
        return binary(m, sign, symbolic.concrete(a) if ta in SYMBOLIC else a,
                      symbolic.concrete(b) if tb in SYMBOLIC else b, mode)  # fmt: skip
    stem = sign.rstrip("=")
    name = DUNDER[stem]
    if sign != stem:
        method = python_method(m, a, f"__i{name}__")
        if method is not None:
            result = m.inline(method, (a, b), {}, mode)
            if result is not NotImplemented:
                return result
    left, right = python_method(m, a, f"__{name}__"), python_method(m, b, f"__r{name}__")
    if left is None and right is None:
        return native_binary(m, BINARY[sign], a, b)
    first, second = (left, (a, b)), (right, (b, a))
    if right is not None and tb is not ta and issubclass(tb, ta):
        first, second = second, first
    for method, operands in (first, second):
        if method is not None:
            result = m.inline(method, operands, {}, mode)
            if result is not NotImplemented:
                return result
        elif operands[0] is a and left is None and sign == stem and hasattr(ta, f"__{name}__"):
            result = m.native(getattr(ta, f"__{name}__"), a, b)
            if result is not NotImplemented:
                return result
    raise UserError(TypeError(f"unsupported operand type(s) for {sign}: '{ta.__name__}' and '{tb.__name__}'"))


def tensor_binary(m: Machine, function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """An operator with a tensor operand; the other one may be a user's object that takes over."""
    for value in (a, b):
        if (
            type(value) is not FakeTensor
            and type(value) not in PLAIN
            and m.source(value) is not None
            and id(value) not in m.world.shadows
        ):
            if type(value).__module__ == "numpy" or not isinstance(value, (list, tuple)):
                method = next((python_method(m, value, f"__{p}{n}__")
                               for p in ("r", "") for n in DUNDER.values()
                               if BINARY.get({v: k for k, v in DUNDER.items()}[n]) is function
                               and python_method(m, value, f"__{p}{n}__")), None)  # fmt: skip
                if method is not None:
                    return m.inline(method, (b, a) if value is b else (a, b), {})
    m.world.touch(a)
    m.world.touch(b)
    return m.torch_call(function, (a, b), {})


def native_binary(m: Machine, function: Callable[..., Any], a: Any, b: Any) -> Any:
    m.world.touch_deep(a)
    m.world.touch_deep(b)
    m.world.looked = m.world.looked or any(type(v) is FakeTensor for v in nested((a, b)))
    with m.recorder.mode():
        return m.view(m.native(function, a, b))


def compare(m: Machine, sign: str, a: Any, b: Any, mode: str = "opaque") -> Any:
    """`a sign b` for the six comparisons."""
    ta, tb = type(a), type(b)
    if ta in PLAIN and tb in PLAIN:
        return m.native(COMPARE[sign], a, b)
    if (ta in SYMBOLIC and tb is not FakeTensor) or (tb in SYMBOLIC and ta is not FakeTensor):
        if ta in symbolic.NUMERIC and tb in symbolic.NUMERIC:
            return symbolic.compare(sign, a, b)
        return compare(m, sign, symbolic.concrete(a) if ta in SYMBOLIC else a,
                       symbolic.concrete(b) if tb in SYMBOLIC else b, mode)  # fmt: skip
    if ta is FakeTensor or tb is FakeTensor:
        if a is None or b is None or isinstance(a, str) or isinstance(b, str):
            return (
                m.native(COMPARE[sign], None if ta is FakeTensor else a, None if tb is FakeTensor else b)
                if sign not in ("==", "!=")
                else sign == "!="
            )
        return settled(m, sign, a, b, m.torch_call(COMPARE[sign], (a, b), {}))
    name, reflected = COMPARE_DUNDER[sign]
    left, right = python_method(m, a, name), python_method(m, b, reflected)
    if (
        sign == "!="
        and left is None
        and python_method(m, a, "__eq__") is not None
        and plain(type(a), "__ne__")
    ):
        result = compare(m, "==", a, b)
        return result if result is NotImplemented else not m.truth(result)
    if left is None and right is None:
        if sign in ("==", "!=") and plain(type(a), "__eq__") and plain(type(b), "__eq__"):
            return m.same(a, b) == (sign == "==")
        return native_binary(m, COMPARE[sign], a, b)
    pairs = [(left, (a, b)), (right, (b, a))]
    if right is not None and tb is not ta and issubclass(tb, ta):
        pairs.reverse()
    for method, operands in pairs:
        if method is not None:
            result = m.inline(method, operands, {}, mode)
            if result is not NotImplemented:
                return result
    if sign in ("==", "!="):
        return m.same(a, b) == (sign == "==")
    raise UserError(
        TypeError(f"'{sign}' not supported between instances of '{ta.__name__}' and '{tb.__name__}'")
    )


def settled(m: Machine, sign: str, a: Any, b: Any, out: Any) -> Any:
    """The result of a comparison; known where uniform random numbers meet one that is not between 0 and 1."""
    bound = b if type(a) is FakeTensor else a
    drawn = a if type(a) is FakeTensor else b
    if type(bound) not in (int, float) or m.recorder.made_by(drawn) is not torch.rand or drawn._version:
        return out
    known = BEYOND.get(sign if drawn is a else COMPARE_MIRROR[sign])
    truth = None if known is None else known(bound)
    if truth is not None and type(out) is FakeTensor:
        out.value, out.value_version = torch.full(tuple(out.shape), truth), out._version
        LITERALS.made = True
    return out


def beyond(
    low: Callable[[Any], bool], high: Callable[[Any], bool], if_low: bool
) -> Callable[[Any], bool | None]:
    """What a comparison of numbers from 0 to 1, without 1, with a bound says when all of them agree."""
    return lambda bound: if_low if low(bound) else (not if_low if high(bound) else None)


BEYOND = {
    "<": beyond(lambda c: c <= 0, lambda c: c >= 1, False),
    ">=": beyond(lambda c: c <= 0, lambda c: c >= 1, True),
    "<=": beyond(lambda c: c < 0, lambda c: c >= 1, False),
    ">": beyond(lambda c: c < 0, lambda c: c >= 1, True),
}
COMPARE_MIRROR = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}


def plain(cls: type, name: str) -> bool:
    """Whether a class has a special method from object alone."""
    return getattr(cls, name) is getattr(object, name)


def unary(m: Machine, name: str, value: Any, mode: str = "opaque") -> Any:
    function, dunder = UNARY[name]
    if type(value) is FakeTensor:
        return m.torch_call(function, (value,), {})
    if type(value) in SYMBOLIC:
        if name == "UNARY_NEGATIVE":
            return symbolic.negative(value)
        if name == "UNARY_INVERT" and type(value) is torch.SymInt:
            return symbolic.arithmetic("-", symbolic.negative(value), 1)
        if name == "UNARY_POSITIVE" and type(value) is not torch.SymBool:
            return value
        return m.native(function, symbolic.concrete(value))
    method = python_method(m, value, dunder)
    if method is not None:
        return m.inline(method, (value,), {}, mode)
    return m.native(function, value)


def opaque(m: Machine, value: Any) -> bool:
    """Whether native code would read a state of this value that no guard covers."""
    world = m.world
    return (world.source(value) is not None
            and id(value) not in world.shadows and id(value) not in world.frozen
            and not isinstance(value, READABLE))  # fmt: skip


READABLE = (
    str, bytes, tuple, frozenset, range, type, types.FunctionType, types.BuiltinFunctionType,
    types.MappingProxyType, types.ModuleType, types.GenericAlias, *DICT_VIEWS,
)  # fmt: skip


def getitem(m: Machine, container: Any, key: Any, mode: str = "opaque") -> Any:
    """`container[key]`."""
    kind = type(container)
    if kind is FakeTensor:
        return m.torch_call(operator.getitem, (container, index_of(m, key)), {})
    key = plain_key(m, container, key, "__getitem__")
    found = m.world.item(container, key)
    if found is not MISSING:
        return found
    method = python_method(m, container, "__getitem__")
    if method is not None:
        return m.inline(method, (container, key), {}, mode)
    if kind is types.MappingProxyType:
        found = m.world.class_item(container, key)
        if found is not MISSING:
            return found
    if isinstance(container, type):
        if isinstance(attributes.type_lookup(m, kind, "__getitem__"), types.FunctionType):
            return m.native(operator.getitem, container, key)
        hook = (
            attributes.load(m, container, "__class_getitem__")
            if hasattr(container, "__class_getitem__")
            else None
        )
        if isinstance(hook, types.MethodType) and not container.__module__.startswith(
            ("typing", "collections", "torch")
        ):
            return m.call(hook, (key,))
        return m.native(operator.getitem, container, key)
    if type(key) is FakeTensor and isinstance(container, (list, tuple, str, range)):
        if constant_of(key) is not None:
            return getitem(m, container, m.native(operator.index, constant_of(key)), mode)
        raise Break(
            "data-dependent",
            "a tensor is used as an index of a Python sequence",
            "index a tensor, or keep the index an int",
        )
    m.world.touch(container)
    if (
        isinstance(container, collections.defaultdict)
        and not dict.__contains__(container, key)
        and container.default_factory is not None
    ):
        value = m.call(container.default_factory, ())
        dict.__setitem__(container, key, value)
        return value
    missing = python_method(m, container, "__missing__") if isinstance(container, dict) else None
    if missing is not None and not dict.__contains__(container, key):
        return m.inline(missing, (container, key), {}, mode)
    if opaque(m, container):
        raise Break(
            "foreign-object",
            f"an item of {m.source(container)}, a {kind.__name__}, is read",
            "use a list, dict or tensor",
        )
    return m.view(m.native(operator.getitem, container, key))


def plain_key(m: Machine, container: Any, key: Any, name: str) -> Any:
    """A key or index without symbolic numbers, unless Python code of the user's is to see it."""
    if type(key) not in PLAIN and isinstance(container, collections.abc.Sequence):
        index = python_method(m, key, "__index__")
        if index is not None:
            return m.call(index, (key,))
    if type(key) in PLAIN or not symbolic.holds_symbols(key) or python_method(m, container, name) is not None:
        return key
    return symbolic.concrete(key)


def index_of(m: Machine, key: Any) -> Any:
    m.world.touch(key)
    if type(key) is tuple:
        for part in key:
            m.world.touch(part)
    return key


def setitem(m: Machine, container: Any, key: Any, value: Any, mode: str = "opaque") -> None:
    """`container[key] = value`."""
    if type(container) is FakeTensor:
        m.world.touch(value)
        m.torch_call(operator.setitem, (container, index_of(m, key), value), {})
        return
    key = plain_key(m, container, key, "__setitem__")
    method = python_method(m, container, "__setitem__")
    if method is not None:
        m.inline(method, (container, key, value), {}, mode)
        return
    if m.world.write_item(container, key, value):
        return
    m.world.touch(container)
    if opaque(m, container):
        raise Break(
            "foreign-object", f"an item of {m.source(container)} is written", "use a list, dict or tensor"
        )
    m.native(operator.setitem, container, key, value)


def delitem(m: Machine, container: Any, key: Any, mode: str = "opaque") -> None:
    """`del container[key]`."""
    if type(container) is FakeTensor:
        m.native(operator.delitem, container, key)
    key = plain_key(m, container, key, "__delitem__")
    method = python_method(m, container, "__delitem__")
    if method is not None:
        m.inline(method, (container, key), {}, mode)
        return
    m.world.touch(container)
    if opaque(m, container):
        raise Break(
            "foreign-object", f"an item of {m.source(container)} is deleted", "use a list, dict or tensor"
        )
    m.native(operator.delitem, container, key)


def contains(m: Machine, container: Any, value: Any) -> bool:
    """`value in container`."""
    if type(container) is FakeTensor:
        raise Break("data-dependent", "membership in a tensor depends on its values", "use (x == v).any()")
    if type(value) in SYMBOLIC and not isinstance(container, (list, tuple)):
        value = symbolic.concrete(value)
    known = m.world.contains(container, value)
    if known is not None:
        return known
    method = python_method(m, container, "__contains__")
    if method is not None:
        return m.truth(m.inline(method, (container, value), {}))
    if isinstance(container, Generator) or python_method(m, container, "__iter__") is not None:
        try:
            iterator = m.iterate(container)
        except UserError as e:
            if isinstance(e.error, TypeError):
                raise UserError(
                    TypeError(f"argument of type '{type(container).__name__}' is not iterable")
                ) from None
            raise
        while (item := m.next(iterator)) is not MISSING:
            if m.same(item, value) or m.truth(compare(m, "==", item, value)):
                return True
        return False
    m.world.touch(container)
    if isinstance(container, (list, tuple)) and python_method(m, value, "__eq__") is not None:
        return any(m.same(item, value) or m.truth(compare(m, "==", item, value)) for item in container)
    if opaque(m, container):
        raise Break(
            "foreign-object", f"membership in {m.source(container)} is asked", "use a list, dict or set"
        )
    if isinstance(container, (list, tuple)):
        return any(m.same(item, value) or m.truth(compare(m, "==", item, value)) for item in container)
    return bool(m.native(operator.contains, container, value))
