"""Operators as the program sees them: on tensors, on objects with dunder methods, on everything native."""

from __future__ import annotations

import collections
import collections.abc
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from kiln.base.errors import Break
from kiln.base.graph import mapped
from kiln.capture import attributes, symbolic
from kiln.capture.fake_arrays import RULES as ARRAYS
from kiln.capture.fake_arrays import FakeArray, OpenNumber, OpenText
from kiln.capture.frame import Machine, UserError
from kiln.capture.identity import KEYED, Address, counts, settle_keys, sought
from kiln.capture.iterators import Generator
from kiln.capture.purity import DICT_VIEWS
from kiln.capture.world import MISSING, nested
from kiln.ops.fake import LITERALS, FakeTensor, constant_of, needed

#: The names of the special methods behind operators, without underscores.
DUNDER = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow",
    "@": "matmul", "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{sign: getattr(operator, f"__{name}__") for sign, name in DUNDER.items()},
    **{f"{sign}=": getattr(operator, f"__i{name}__") for sign, name in DUNDER.items()},
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
COMPARE_MIRROR = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
UNARY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "UNARY_NEGATIVE": (operator.neg, "__neg__"), "UNARY_POSITIVE": (operator.pos, "__pos__"),
    "UNARY_INVERT": (operator.invert, "__invert__"),
}  # fmt: skip
PLAIN = frozenset({int, float, bool, str, complex, type(None), bytes})
SYMBOLIC = symbolic.SYMBOLIC
EXTENDED: tuple[Any, ...] = (list, collections.deque)
#: Operands whose classes have no arithmetic in Python.
NATIVE = frozenset({FakeTensor, FakeArray, OpenNumber, list, tuple, dict, set, *PLAIN})


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
    if n > sys.maxsize:
        raise OverflowError("cannot fit 'int' into an index-sized integer")
    return n


TRUTH = {"__bool__": checked_bool, "__len__": checked_length}


def binary(m: Machine, sign: str, a: Any, b: Any, mode: str = "opaque") -> Any:
    """`a sign b`, in-place signs included."""
    ta, tb, stem = type(a), type(b), sign.rstrip("=")
    if OpenNumber in (ta, tb) and (found := open_arithmetic(m, sign, a, b)) is not None:
        return found
    if ta is FakeTensor or tb is FakeTensor:
        return tensor_binary(m, sign, a, b)
    if ta in PLAIN and tb in PLAIN:
        return m.native(BINARY[sign], a, b)
    if ta in SYMBOLIC or tb in SYMBOLIC:
        if ta in symbolic.NUMERIC and tb in symbolic.NUMERIC and stem in symbolic.ARITHMETIC:
            return m.native(symbolic.arithmetic, stem, a, b)
        if ta is FakeArray:
            return m.native(BINARY[sign], a, b)
        if tb is FakeArray:
            return m.native(b.special, f"__r{DUNDER[stem]}__", a)
        return binary(m, sign, plain_number(a), plain_number(b), mode)
    return by_methods(m, sign, a, b, mode)


def by_methods(m: Machine, sign: str, a: Any, b: Any, mode: str) -> Any:
    """The same by the special methods of the operands."""
    ta, tb, stem = type(a), type(b), sign.rstrip("=")
    name = DUNDER[stem]
    first = said_by(m, a, f"__i{name}__", b) if sign != stem else None
    left, right = said_by(m, a, f"__{name}__", b), said_by(m, b, f"__r{name}__", a)
    if OPAQUE in (first, left, right) or first is left is right is None:
        return native_binary(m, BINARY[sign], a, b)
    pairs = [(left, (a, b)), (right, (b, a))]
    if tb is ta:
        pairs.pop()
    elif issubclass(tb, ta) and right is not attributes.mro_lookup(ta, f"__r{name}__"):
        pairs.reverse()
    for method, operands in ((first, (a, b)), *pairs):
        if method is not None:
            result = m.inline(method, operands, {}, mode)
            if result is not NotImplemented:
                return result
    shown = "** or pow()" if sign == "**" else sign
    text = f"unsupported operand type(s) for {shown}: '{ta.__name__}' and '{tb.__name__}'"
    raise UserError(TypeError(text))


OPAQUE: Any = object()


def said_by(m: Machine, value: Any, name: str, other: Any) -> Any:
    """The Python function by which an operand answers; None where it does not, OPAQUE where others do."""
    if type(value) in PLAIN:
        return OPAQUE if isinstance(other, (int, float, str, complex, types.NoneType, bytes)) else None
    method = attributes.mro_lookup(type(value), name)
    m.world.class_attr(type(value), name, method)
    if isinstance(method, types.FunctionType):
        return method
    return None if method is MISSING or method is getattr(object, name, MISSING) else OPAQUE


EXACT = 1 << 53  # up to which every int is a double
NUMBERS = frozenset({float, torch.SymFloat, torch.SymInt})


def open_arithmetic(m: Machine, sign: str, a: Any, b: Any) -> Any:
    """What arithmetic of a float gives that is read after the graph; None where its value is needed."""
    stem = sign.rstrip("=")
    if stem not in ("+", "-", "*", "/"):
        return None
    if FakeTensor in (type(a), type(b)):
        return scaled(m, sign if type(a) is FakeTensor else stem, a, b)
    operands = []
    for value in (a, b):
        if type(value) is OpenNumber and value.kind is float:
            operands.append(m.torch_call(torch.Tensor.double, (value.tensor,), {}))
        elif type(value) in NUMBERS or type(value) is int and abs(value) <= EXACT:
            operands.append(value)
    if len(operands) < 2 or stem == "/" and (type(b) is OpenNumber or not m.truth(b)):
        return None
    first = a if type(a) is OpenNumber else b
    return OpenNumber(float, tensor_binary(m, stem, *operands), first.step, first.reason)


def scaled(m: Machine, sign: str, a: Any, b: Any) -> Any:
    """Arithmetic of a tensor and such a float, which is a tensor of the graph where that keeps the types."""
    tensor, number = (a, b) if type(b) is OpenNumber else (b, a)
    near = number.tensor.device.type in ("cpu", tensor.device.type)
    if number.kind is not float or not near or not tensor.is_floating_point() or not tensor.dim():
        return None
    factor = m.torch_call(torch.Tensor.double, (number.tensor,), {})
    factor = m.torch_call(torch.Tensor.reshape, (factor, ()), {}) if factor.dim() else factor
    return tensor_binary(m, sign, *((tensor, factor) if type(b) is OpenNumber else (factor, tensor)))


def plain_number(value: Any) -> Any:
    return symbolic.concrete(value) if type(value) in SYMBOLIC else value


def tensor_binary(m: Machine, sign: str, a: Any, b: Any) -> Any:
    """An operator with a tensor operand."""
    stem = sign.rstrip("=")
    if type(a) is not FakeTensor and sign != stem:
        found = taken_over(m, BINARY[sign], a, b, f"i{DUNDER[stem]}")
        if found is not MISSING:
            return found
        kind = next((kind for kind in EXTENDED if isinstance(a, kind) and sign == "+="), None)
        if kind is not None:
            m.call(kind.extend, (a, b))
            return a
        sign = stem
    found = taken_over(m, BINARY[sign], a, b, DUNDER[stem], f"r{DUNDER[stem]}")
    if found is not MISSING:
        return found
    m.world.touch(a)
    m.world.touch(b)
    if type(a) is FakeTensor and sign in DUNDER and is_array(b):
        return ARRAYS["beside"](m, a, lambda array: binary(m, sign, array, b))
    return m.torch_call(BINARY[sign], (a, b), {})


def taken_over(m: Machine, function: Any, a: Any, b: Any, name: str, reflected: str = "") -> Any:
    """What an object of the user's, or its hook, makes of an operator beside a tensor; else MISSING."""
    other = b if type(a) is FakeTensor else a
    if type(other) in NATIVE:
        return MISSING
    asked = attributes.mro_lookup(type(other), "__torch_function__") is not MISSING
    if other is b:  # torch computes with numbers, and asks classes that have a hook for it
        plain, own = (attributes.mro_lookup(kind, f"__{name}__") for kind in (torch.Tensor, a.real_type))
        name = "" if asked or own is not plain or isinstance(b, (int, float, complex)) else reflected
    method = python_method(m, other, f"__{name}__") if name else None
    result = NotImplemented if method is None else m.inline(method, (other, b if other is a else a), {})
    if result is not NotImplemented:
        return result
    return attributes.SUBCLASSES["intercept"](m, function, (a, b), {}) if asked and reflected else MISSING


def is_array(value: Any) -> bool:
    """Whether numpy, not torch, does what a tensor does with this value by an operator."""
    kind: type = value.__class__
    return kind.__module__ == "numpy" and kind.__name__ == "ndarray"


def native_binary(m: Machine, function: Callable[..., Any], a: Any, b: Any) -> Any:
    if function is operator.iadd and type(b) in (list, tuple) and m.world.append(a, m.world.touch(b)):
        return a
    m.world.touch_deep(a)
    m.world.touch_deep(b)
    settle_keys(m, (a, b))
    m.world.looked = m.world.looked or any(type(v) is FakeTensor for v in nested((a, b)))
    with m.recorder.mode():
        return m.view(m.operate(function, a, b))


def compare(m: Machine, sign: str, a: Any, b: Any, mode: str = "opaque") -> Any:
    """`a sign b` for the six comparisons."""
    ta, tb = type(a), type(b)
    if ta in PLAIN and tb in PLAIN:
        return m.native(COMPARE[sign], a, b)
    if (ta in SYMBOLIC and tb is not FakeTensor) or (tb in SYMBOLIC and ta is not FakeTensor):
        if ta in symbolic.NUMERIC and tb in symbolic.NUMERIC:
            truth = settled_number(m, sign, a, b)
            return symbolic.compare(sign, a, b) if truth is None else truth
        return compare(m, sign, plain_number(a), plain_number(b), mode)
    if ta is FakeTensor or tb is FakeTensor:
        if a is None or b is None or isinstance(a, str) or isinstance(b, str):
            if sign in ("==", "!="):
                return sign == "!="
            return m.native(COMPARE[sign], None if ta is FakeTensor else a, None if tb is FakeTensor else b)
        names = COMPARE[sign].__name__, COMPARE[COMPARE_MIRROR[sign]].__name__
        found = taken_over(m, COMPARE[sign], a, b, *names)
        if found is not MISSING:
            return found
        return settled(m, sign, a, b, m.torch_call(COMPARE[sign], (a, b), {}))
    if (ta is Address or tb is Address) and sign in ("==", "!="):
        sought(m, {b}, a) if ta is Address else sought(m, {a}, b)
    signs = (sign, COMPARE_MIRROR[sign])
    left, right = (rich(m, s, *pair) for s, pair in zip(signs, ((a, b), (b, a)), strict=True))
    if OPAQUE in (left, right):
        return native_binary(m, COMPARE[sign], a, b)
    pairs = [(left, (a, b)), (right, (b, a))]
    if tb is not ta and issubclass(tb, ta):
        pairs.reverse()
    for method, operands in pairs:
        if method is not None:
            opposite = sign == "!=" and method.__name__ == "__eq__"
            result = m.inline(method, operands, {}, "opaque" if opposite else mode)
            if result is not NotImplemented:
                return not m.truth(result) if opposite else result
    if sign in ("==", "!="):
        return m.same(a, b) == (sign == "==")
    text = f"'{sign}' not supported between instances of '{ta.__name__}' and '{tb.__name__}'"
    raise UserError(TypeError(text))


def rich(m: Machine, sign: str, value: Any, other: Any) -> Any:
    """How an operand answers a comparison; what is not unequal by a method of its own is so by `==`."""
    method = said_by(m, value, f"__{COMPARE[sign].__name__}__", other)
    if sign == "!=" and method is None and type(value) not in PLAIN:
        return said_by(m, value, "__eq__", other)
    return method


def settled(m: Machine, sign: str, a: Any, b: Any, out: Any) -> Any:
    """The result of a comparison; known where uniform random numbers meet one that is not between 0 and 1."""
    drawn, bound, sign = (a, b, sign) if type(a) is FakeTensor else (b, a, COMPARE_MIRROR[sign])
    if type(bound) not in (int, float) or m.recorder.made_by(drawn) is not torch.rand or drawn._version:
        return out
    truth = beyond(sign, bound, 0.0, 1.0, False)
    if truth is not None and type(out) is FakeTensor:
        out.value, out.value_version = torch.full(tuple(out.shape), truth), out._version
        LITERALS.made = True
    return out


def settled_number(m: Machine, sign: str, a: Any, b: Any) -> bool | None:
    """What a comparison says of a float that is drawn, where that is so for all that may be drawn."""
    drawn, bound, sign = (a, b, sign) if type(a) in SYMBOLIC else (b, a, COMPARE_MIRROR[sign])
    spans = m.world.varying.spans
    if not spans or type(bound) not in (int, float):
        return None
    span = spans.get(symbolic.number(drawn))
    return None if span is None else beyond(sign, bound, *span)


def beyond(sign: str, bound: float, low: float, high: float, closed: bool) -> bool | None:
    """What a comparison of numbers from `low` to `high`, which may be one, says when all of them agree."""
    if sign in ("==", "!="):
        return None
    if bound < low or bound == low and sign in ("<", ">="):
        return sign in (">", ">=")
    most = bound > high or bound == high and (not closed or sign in ("<=", ">"))
    return sign in ("<", "<=") if most else None


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
    return m.operate(function, value)


READABLE = (
    str, bytes, tuple, frozenset, range, type, types.FunctionType, types.BuiltinFunctionType,
    types.MappingProxyType, types.ModuleType, types.GenericAlias, *DICT_VIEWS,
)  # fmt: skip


def getitem(m: Machine, container: Any, key: Any, mode: str = "opaque") -> Any:
    """`container[key]`."""
    kind = type(container)
    if kind is FakeTensor:
        return m.torch_call(operator.getitem, (container, tensor_key(m, key)), {})
    key = sought(m, container, plain_key(m, container, key, "__getitem__"))
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
        hook = None
        if hasattr(container, "__class_getitem__"):
            hook = attributes.load(m, container, "__class_getitem__")
        library = container.__module__.startswith(("typing", "collections", "torch"))
        if isinstance(hook, types.MethodType) and not library:
            return m.call(hook, (key,))
        return m.native(operator.getitem, container, key)
    if type(key) is FakeTensor and isinstance(container, (list, tuple, str, range)):
        if needed(key) is not None:
            return getitem(m, container, m.native(operator.index, constant_of(key)), mode)
        why = "a tensor is used as an index of a Python sequence"
        raise Break("data-dependent", why, "index a tensor, or keep the index an int")
    m.world.touch(container)
    factory = container.default_factory if isinstance(container, collections.defaultdict) else None
    missing = python_method(m, container, "__missing__") if isinstance(container, dict) else None
    if (factory or missing) is not None and not m.operate(dict.__contains__, container, key):
        if missing is not None:
            return m.inline(missing, (container, key), {}, mode)
        value = m.call(factory, ())
        dict.__setitem__(container, key, value)
        return value
    refuse_opaque(m, container, f"an item of a {kind.__name__} is read")
    return m.view(m.operate(operator.getitem, container, key, about=asked(container, key)))


def tensor_key(m: Machine, key: Any) -> Any:
    """An index of a tensor, with tensors in the place of the graph's arrays."""
    return mapped(m.world.touch_deep(key), lambda v: ARRAYS["index"](v) if type(v) is FakeArray else v)


def plain_key(m: Machine, container: Any, key: Any, name: str) -> Any:
    """A key or index without symbolic numbers, unless Python code of the user's is to see it."""
    if not isinstance(key, (int, str)) and isinstance(container, collections.abc.Sequence):
        index = python_method(m, key, "__index__")
        if index is not None:
            return m.call(index, (key,))
    if type(key) in PLAIN or type(container) is FakeArray or not symbolic.holds_symbols(key):
        return key
    if python_method(m, container, name) is not None or isinstance(container, KEYED) and counts(m, key):
        return key
    return symbolic.concrete(key)


def asked(container: Any, key: Any) -> tuple[Any, ...]:
    """Whose methods may be asked where a key is sought; what a native container holds is not."""
    return (key,) if type(container) in (list, tuple, dict, set, frozenset) else (container, key)


def setitem(m: Machine, container: Any, key: Any, value: Any, mode: str = "opaque") -> None:
    """`container[key] = value`."""
    if type(container) is FakeTensor:
        m.world.touch(value)
        if id(value) in m.merged:
            m.torch_call(torch.Tensor.copy_, (container, value), {})
            return
        m.torch_call(operator.setitem, (container, tensor_key(m, key), value), {})
        return
    key = plain_key(m, container, key, "__setitem__")
    known = sought(m, container, key)
    key = known if type(key) is torch.SymInt else key
    method = python_method(m, container, "__setitem__")
    if method is not None:
        m.inline(method, (container, key, value), {}, mode)
        return
    if m.world.write_item(container, key, value):
        return
    m.world.touch(container)
    refuse_opaque(m, container, "an item is written")
    m.operate(operator.setitem, container, key, value, about=asked(container, key))


def delitem(m: Machine, container: Any, key: Any, mode: str = "opaque") -> None:
    """`del container[key]`."""
    if type(container) is FakeTensor:
        m.operate(operator.delitem, container, key)
    key = plain_key(m, container, key, "__delitem__")
    known = sought(m, container, key)
    key = known if type(key) is torch.SymInt else key
    method = python_method(m, container, "__delitem__")
    if method is not None:
        m.inline(method, (container, key), {}, mode)
        return
    m.world.touch(container)
    refuse_opaque(m, container, "an item is deleted")
    m.operate(operator.delitem, container, key, about=asked(container, key))


def refuse_opaque(m: Machine, container: Any, what: str) -> None:
    """Break where native code would read a state of the container that no guard covers."""
    if m.world.unguarded(container) and not isinstance(container, READABLE):
        raise Break("foreign-object", f"{m.source(container)}: {what}", "use a list, dict, set or tensor")


def equal(m: Machine, item: Any, value: Any) -> bool:
    """Whether a search for the value ends at this item."""
    return m.same(item, value) or m.truth(compare(m, "==", item, value))


def contains(m: Machine, container: Any, value: Any) -> bool:
    """`value in container`."""
    if type(container) is FakeTensor:
        raise Break("data-dependent", "membership in a tensor depends on its values", "use (x == v).any()")
    counted = isinstance(container, KEYED) and counts(m, value)
    if type(value) in SYMBOLIC and not isinstance(container, (list, tuple)) and not counted:
        value = symbolic.concrete(value)
    if type(value) is OpenText:
        raise value.needed()
    value = sought(m, container, value)
    there = m.world.contains(container, value)
    if there is not None:
        return there
    method = python_method(m, container, "__contains__")
    if method is not None:
        return m.truth(m.inline(method, (container, value), {}))
    known = attributes.mro_lookup(type(container), "__contains__") is not MISSING
    if isinstance(container, Generator) or not known and python_method(m, container, "__iter__") is not None:
        try:
            iterator = m.iterate(container)
        except UserError as e:
            if isinstance(e.error, TypeError):
                text = f"argument of type '{type(container).__name__}' is not iterable"
                raise UserError(TypeError(text)) from None
            raise
        while (item := m.next(iterator)) is not MISSING:
            if equal(m, item, value):
                return True
        return False
    m.world.touch(container)
    if isinstance(container, (list, tuple)):
        return any(equal(m, item, value) for item in container)
    refuse_opaque(m, container, "membership is asked")
    return bool(m.operate(operator.contains, container, value, about=asked(container, value)))
