"""Building containers and functions, attributes, calls, with blocks and exceptions."""

from __future__ import annotations

import types
from typing import Any

from kiln.bytecode import versions
from kiln.bytecode.decode import Instruction
from kiln.capture import attributes, builtin_calls, calls, operators, symbolic
from kiln.capture.frame import NULL, Frame, Machine, UserError
from kiln.capture.identity import put
from kiln.capture.iterators import ended_early
from kiln.capture.opcodes.control import sequence
from kiln.capture.opcodes.table import computes, consumes, not_captured, opcode


def take(f: Frame, n: int | None) -> list[Any]:
    """Pop n values, the first pushed first."""
    at = len(f.stack) - (n or 0)
    values = f.stack[at:]
    del f.stack[at:]
    return values


def build_set(m: Machine, f: Frame, i: Instruction) -> Any:
    items = symbolic.concrete(take(f, i.arg))
    put(m, (), items)
    return m.operate(set, items)


def build_map(m: Machine, f: Frame, i: Instruction) -> Any:
    flat = take(f, 2 * (i.arg or 0))
    keys = symbolic.concrete(flat[::2])
    put(m, (), keys)
    return m.operate(dict, zip(keys, flat[1::2], strict=True), about=tuple(keys))


def build_string(m: Machine, f: Frame, i: Instruction) -> str:
    """The pieces of a formatted text as one; those from before a break may have been left open."""
    pieces = take(f, i.arg)
    calls.look(pieces)
    return "".join(pieces)


computes(0, {
    "BUILD_TUPLE": lambda m, f, i: tuple(take(f, i.arg)),
    "BUILD_LIST": lambda m, f, i: take(f, i.arg),
    "BUILD_SET": build_set,
    "BUILD_MAP": build_map,
    "BUILD_STRING": build_string,
    "BUILD_SLICE": lambda m, f, i: slice(*take(f, i.arg)),
    "LOAD_BUILD_CLASS": lambda m, f, i: __build_class__,
})  # fmt: skip
computes(1, {
    "LIST_TO_TUPLE": lambda m, f, i, value: tuple(value),
    "BUILD_CONST_KEY_MAP": lambda m, f, i, keys: dict(zip(keys, take(f, i.arg), strict=True)),
})  # fmt: skip


def target(m: Machine, f: Frame, i: Instruction) -> Any:
    """The container that an instruction adds to; it may have come from outside, through a resumed frame."""
    return m.world.touch(f.stack[-(i.arg or 1)])


def keyed(m: Machine, f: Frame, i: Instruction, *keys: Any) -> Any:
    """The set or dict that keys are put into."""
    return put(m, target(m, f, i), keys)


def list_extend(m: Machine, f: Frame, i: Instruction, value: Any) -> None:
    unfit = f"Value after * must be an iterable, not {type(value).__name__}"
    target(m, f, i).extend(sequence(m, value, unfit))


def mapping(m: Machine, value: Any) -> dict[Any, Any]:
    """The items of a mapping as a plain dict."""
    m.world.touch(value)
    if type(value) is dict or (isinstance(value, dict) and operators.python_method(m, value, "keys") is None
                               and operators.python_method(m, value, "__getitem__") is None):  # fmt: skip
        return dict(dict.items(value))
    if not hasattr(value, "keys"):
        raise UserError(TypeError(f"'{type(value).__name__}' object is not a mapping"))
    keys = sequence(m, m.call(m.getattr(value, "keys"), ()))
    return {key: operators.getitem(m, value, key) for key in keys}


def shown(function: Any) -> str:
    """How a function is called in what Python says of its arguments."""
    name = getattr(function, "__qualname__", None)
    if name is None:
        return str(function)
    module = getattr(function, "__module__", None)
    return f"{name}()" if module in (None, "builtins") else f"{module}.{name}()"


def keywords_of(m: Machine, function: Any, value: Any) -> dict[str, Any]:
    """The keyword arguments that `**value` of a call stands for."""
    if not hasattr(value, "keys"):
        text = f"{shown(function)} argument after ** must be a mapping, not {type(value).__name__}"
        raise UserError(TypeError(text))
    return mapping(m, value)


def set_update(m: Machine, f: Frame, i: Instruction, items: Any) -> None:
    added = sequence(m, items)
    m.operate(keyed(m, f, i, *added).update, added)


def dict_update(m: Machine, f: Frame, i: Instruction, items: Any) -> None:
    added = mapping(m, items)
    m.operate(keyed(m, f, i, *added).update, added)


def dict_merge(m: Machine, f: Frame, i: Instruction, value: Any) -> None:
    items, merged = keywords_of(m, f.stack[-(i.arg or 1) - 2], value), target(m, f, i)
    for key in items:
        if key in merged:
            name = shown(f.stack[-(i.arg or 1) - 2])
            raise UserError(TypeError(f"{name} got multiple values for keyword argument '{key}'"))
    merged.update(items)


consumes(1, {
    "LIST_APPEND": lambda m, f, i, value: target(m, f, i).append(value),
    "SET_ADD": lambda m, f, i, value: m.operate(keyed(m, f, i, value).add, symbolic.concrete(value)),
    "LIST_EXTEND": list_extend,
    "SET_UPDATE": set_update,
    "DICT_UPDATE": dict_update,
    "DICT_MERGE": dict_merge,
})  # fmt: skip
consumes(2, {
    "MAP_ADD": lambda m, f, i, key, value: m.operate(
        keyed(m, f, i, key).__setitem__, symbolic.concrete(key), value, about=(key,)),
})  # fmt: skip

CONVERSIONS = (None, str, repr, ascii)


@opcode("FORMAT_VALUE")
def format_value(m: Machine, f: Frame, i: Instruction) -> Any:
    flags = i.arg or 0
    value, spec = take(f, 2) if flags & 4 else (f.stack.pop(), "")
    f.stack.append(builtin_calls.formatted(m, value, CONVERSIONS[flags & 3], spec))


computes(1, {
    "CONVERT_VALUE": lambda m, f, i, value: builtin_calls.formatted(m, value, CONVERSIONS[i.arg or 0], ""),
    "FORMAT_SIMPLE": lambda m, f, i, value: builtin_calls.formatted(m, value, None, ""),
})  # fmt: skip
computes(2, {
    "FORMAT_WITH_SPEC": lambda m, f, i, value, spec: builtin_calls.formatted(m, value, None, spec),
})  # fmt: skip


# ---------------------------------------------------------------------- attributes


@opcode("LOAD_ATTR")
def load_attr(m: Machine, f: Frame, i: Instruction) -> Any:
    if i.flag:
        return load_method(m, f, i)
    f.stack[-1] = attributes.load(m, f.stack[-1], i.value, "push")


@opcode("LOAD_METHOD")
def load_method(m: Machine, f: Frame, i: Instruction) -> Any:
    value = attributes.load(m, f.stack[-1], i.value)
    f.stack[-1:] = [NULL, value] if versions.HERE.null_first else [value, NULL]


@opcode("LOAD_SUPER_ATTR")
def load_super_attr(m: Machine, f: Frame, i: Instruction) -> Any:
    _, cls, owner = f.stack[-3:]
    value = attributes.load(m, m.native(super, cls, owner), i.value)
    f.stack[-3:] = ([NULL, value] if versions.HERE.null_first else [value, NULL]) if i.flag else [value]


consumes(1, {"DELETE_ATTR": lambda m, f, i, owner: attributes.delete(m, owner, i.value, "drop")})
consumes(2, {"STORE_ATTR": lambda m, f, i, item, owner: attributes.store(m, owner, i.value, item, "drop")})


# ---------------------------------------------------------------------- calls


@opcode("CALL", "CALL_KW")
def call(m: Machine, f: Frame, i: Instruction) -> Any:
    names = f.stack.pop() if i.name == "CALL_KW" else f.kwnames
    f.kwnames = ()
    first, second, *values = take(f, (i.arg or 0) + 2)
    split = len(values) - len(names)
    args, kwargs = tuple(values[:split]), dict(zip(names, values[split:], strict=True))
    if versions.HERE.null_first:
        function, args = (second, args) if first is NULL else (first, (second, *args))
    else:
        function, args = first, args if second is NULL else (second, *args)
    f.stack.append(m.call(function, args, kwargs, "push"))


@opcode("CALL_FUNCTION_EX")
def call_function_ex(m: Machine, f: Frame, i: Instruction) -> Any:
    keywords = f.stack.pop() if (i.arg or 0) & 1 else {}
    first, second, args = take(f, 3)
    function = second if versions.HERE.null_first else first
    kwargs = keywords_of(m, function, keywords)
    if not all(isinstance(name, str) for name in kwargs):
        raise UserError(TypeError("keywords must be strings"))
    unfit = ""
    if type(args) not in (list, tuple):  # a module as a text takes long
        unfit = f"{shown(function)} argument after * must be an iterable, not {type(args).__name__}"
    f.stack.append(m.call(function, tuple(sequence(m, args, unfit)), kwargs, "push"))


@opcode("CALL_INTRINSIC_1")
def call_intrinsic(m: Machine, f: Frame, i: Instruction) -> Any:
    if i.value == "INTRINSIC_LIST_TO_TUPLE":
        f.stack[-1] = tuple(f.stack[-1])
    elif i.value == "INTRINSIC_UNARY_POSITIVE":
        f.stack[-1] = operators.unary(m, "UNARY_POSITIVE", f.stack[-1])
    elif i.value == "INTRINSIC_STOPITERATION_ERROR":
        if isinstance(f.stack[-1], StopIteration):
            f.stack[-1] = ended_early(f.stack[-1])
    else:
        raise not_captured(i.value)


@opcode("MAKE_FUNCTION")
def make_function(m: Machine, f: Frame, i: Instruction) -> Any:
    code, flags = f.stack.pop(), i.arg or 0
    closure = f.stack.pop() if flags & 8 else None
    annotations = f.stack.pop() if flags & 4 else ()
    kwdefaults = f.stack.pop() if flags & 2 else None
    defaults = f.stack.pop() if flags & 1 else None
    function = types.FunctionType(code, f.globals, code.co_name, defaults, closure)
    function.__kwdefaults__ = kwdefaults
    if annotations:
        function.__annotations__ = dict(zip(annotations[::2], annotations[1::2], strict=True))
    function.__qualname__ = code.co_qualname
    f.stack.append(function)


@opcode("SET_FUNCTION_ATTRIBUTE")
def set_function_attribute(m: Machine, f: Frame, i: Instruction) -> Any:
    function, value = f.stack.pop(), f.stack.pop()
    if i.arg == 8:
        code, defaults = function.__code__, function.__defaults__
        fresh = types.FunctionType(code, f.globals, function.__name__, defaults, value)
        fresh.__kwdefaults__, fresh.__annotations__ = function.__kwdefaults__, function.__annotations__
        function = fresh
    elif i.arg == 4:
        pairs = isinstance(value, tuple)
        function.__annotations__ = dict(zip(value[::2], value[1::2], strict=True)) if pairs else value
    else:
        setattr(function, "__defaults__" if i.arg == 1 else "__kwdefaults__", value)
    f.stack.append(function)


# ---------------------------------------------------------------------- with


@opcode("BEFORE_WITH")
def before_with(m: Machine, f: Frame, i: Instruction) -> Any:
    manager = f.stack[-1]
    bound = []
    for name in ("__enter__", "__exit__"):
        method = attributes.type_lookup(m, type(manager), name)
        if method is None:
            text = f"'{type(manager).__name__}' object does not support the context manager protocol"
            raise UserError(TypeError(text))
        bound.append(attributes.bind(m, method, manager, type(manager), name))
    result = m.call(bound[0], ())
    f.stack[-1:] = [bound[1], result]


@opcode("WITH_EXCEPT_START")
def with_except_start(m: Machine, f: Frame, i: Instruction) -> Any:
    error, leave = f.stack[-1], f.stack[-4]
    f.stack.append(m.call(leave, (type(error), error, error.__traceback__)))
