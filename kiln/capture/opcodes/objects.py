"""Building containers and functions, attributes, calls, with blocks and exceptions."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from kiln.base.errors import Break
from kiln.bytecode import versions
from kiln.bytecode.decode import Instruction
from kiln.capture import attributes, builtin_calls, operators, symbolic
from kiln.capture.frame import NULL, Frame, UserError
from kiln.capture.opcodes.control import sequence
from kiln.capture.opcodes.table import opcode

if TYPE_CHECKING:
    from kiln.capture.machine import Machine


def take(f: Frame, n: int) -> list[Any]:
    """Pop n values, the first pushed first."""
    if not n:
        return []
    values = f.stack[-n:]
    del f.stack[-n:]
    return values


@opcode("BUILD_TUPLE")
def build_tuple(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(tuple(take(f, i.arg or 0)))


@opcode("BUILD_LIST")
def build_list(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(take(f, i.arg or 0))


@opcode("BUILD_SET")
def build_set(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(m.native(set, symbolic.concrete(take(f, i.arg or 0))))


@opcode("BUILD_MAP")
def build_map(m: Machine, f: Frame, i: Instruction) -> Any:
    flat = take(f, 2 * (i.arg or 0))
    keys = symbolic.concrete(flat[::2])
    f.stack.append(m.native(lambda: dict(zip(keys, flat[1::2], strict=True))))


@opcode("BUILD_CONST_KEY_MAP")
def build_const_key_map(m: Machine, f: Frame, i: Instruction) -> Any:
    keys = f.stack.pop()
    f.stack.append(dict(zip(keys, take(f, i.arg or 0), strict=True)))


@opcode("BUILD_STRING")
def build_string(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append("".join(take(f, i.arg or 0)))


@opcode("BUILD_SLICE")
def build_slice(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(slice(*take(f, i.arg or 2)))


@opcode("LIST_TO_TUPLE")
def list_to_tuple(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack[-1] = tuple(f.stack[-1])


def target(m: Machine, f: Frame, i: Instruction) -> Any:
    """The container that an instruction adds to; it may have come from outside, through a resumed frame."""
    return m.world.touch(f.stack[-(i.arg or 1)])


@opcode("LIST_APPEND")
def list_append(m: Machine, f: Frame, i: Instruction) -> Any:
    value = f.stack.pop()
    target(m, f, i).append(value)


@opcode("SET_ADD")
def set_add(m: Machine, f: Frame, i: Instruction) -> Any:
    value = f.stack.pop()
    m.native(target(m, f, i).add, symbolic.concrete(value))


@opcode("MAP_ADD")
def map_add(m: Machine, f: Frame, i: Instruction) -> Any:
    key, value = take(f, 2)
    m.native(target(m, f, i).__setitem__, symbolic.concrete(key), value)


@opcode("LIST_EXTEND")
def list_extend(m: Machine, f: Frame, i: Instruction) -> Any:
    try:
        items = sequence(m, f.stack[-1])
    except UserError as e:
        if isinstance(e.error, TypeError) and "non-iterable" in str(e.error):
            raise UserError(
                TypeError(f"Value after * must be an iterable, not {type(f.stack[-1]).__name__}")
            ) from None
        raise
    f.stack.pop()
    target(m, f, i).extend(items)


@opcode("SET_UPDATE")
def set_update(m: Machine, f: Frame, i: Instruction) -> Any:
    items = sequence(m, f.stack.pop())
    m.native(target(m, f, i).update, items)


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


@opcode("DICT_UPDATE")
def dict_update(m: Machine, f: Frame, i: Instruction) -> Any:
    items = mapping(m, f.stack[-1])
    f.stack.pop()
    target(m, f, i).update(items)


@opcode("DICT_MERGE")
def dict_merge(m: Machine, f: Frame, i: Instruction) -> Any:
    items = mapping(m, f.stack[-1])
    f.stack.pop()
    merged = target(m, f, i)
    for key in items:
        if key in merged:
            name = getattr(f.stack[-(i.arg or 1) - 2], "__qualname__", "function")
            raise UserError(TypeError(f"{name}() got multiple values for keyword argument '{key}'"))
    merged.update(items)


@opcode("FORMAT_VALUE")
def format_value(m: Machine, f: Frame, i: Instruction) -> Any:
    flags = i.arg or 0
    spec = f.stack[-1] if flags & 4 else ""
    value = f.stack[-2] if flags & 4 else f.stack[-1]
    convert = (None, str, repr, ascii)[flags & 3]
    text = builtin_calls.formatted(m, value, convert, spec)
    del f.stack[-2 if flags & 4 else -1 :]
    f.stack.append(text)


@opcode("CONVERT_VALUE")
def convert_value(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack[-1] = builtin_calls.formatted(m, f.stack[-1], (None, str, repr, ascii)[i.arg or 0], "")


@opcode("FORMAT_SIMPLE")
def format_simple(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack[-1] = builtin_calls.formatted(m, f.stack[-1], None, "")


@opcode("FORMAT_WITH_SPEC")
def format_with_spec(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack[-2:] = [builtin_calls.formatted(m, f.stack[-2], None, f.stack[-1])]


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


@opcode("STORE_ATTR")
def store_attr(m: Machine, f: Frame, i: Instruction) -> Any:
    attributes.store(m, f.stack[-1], i.value, f.stack[-2], "drop")
    del f.stack[-2:]


@opcode("DELETE_ATTR")
def delete_attr(m: Machine, f: Frame, i: Instruction) -> Any:
    attributes.delete(m, f.stack[-1], i.value, "drop")
    f.stack.pop()


# ---------------------------------------------------------------------- calls


@opcode("CALL")
def call(m: Machine, f: Frame, i: Instruction) -> Any:
    n = i.arg or 0
    values = f.stack[len(f.stack) - n :]
    names, f.kwnames = f.kwnames, ()
    finish_call(m, f, n, values, names)


@opcode("CALL_KW")
def call_kw(m: Machine, f: Frame, i: Instruction) -> Any:
    n = i.arg or 0
    names = f.stack.pop()
    finish_call(m, f, n, f.stack[len(f.stack) - n :], names)


def finish_call(m: Machine, f: Frame, n: int, values: list[Any], names: tuple[str, ...]) -> None:
    split = len(values) - len(names)
    args, kwargs = tuple(values[:split]), dict(zip(names, values[split:], strict=True))
    if versions.HERE.null_first:
        first, second = f.stack[-n - 2], f.stack[-n - 1]
        function, args = (second, args) if first is NULL else (first, (second, *args))
    else:
        function, owner = f.stack[-n - 2], f.stack[-n - 1]
        args = args if owner is NULL else (owner, *args)
    result = m.call(function, args, kwargs, "push")
    del f.stack[-n - 2 :]
    f.stack.append(result)


@opcode("CALL_FUNCTION_EX")
def call_function_ex(m: Machine, f: Frame, i: Instruction) -> Any:
    has_kwargs = (i.arg or 0) & 1
    function, args = f.stack[-3 if has_kwargs else -2 :][:2]
    if not versions.HERE.null_first:
        function = f.stack[-4 if has_kwargs else -3]
    kwargs = mapping(m, f.stack[-1]) if has_kwargs else {}
    args = tuple(sequence(m, args))
    result = m.call(function, args, kwargs, "push")
    del f.stack[-4 if has_kwargs else -3 :]
    f.stack.append(result)


@opcode("CALL_INTRINSIC_1")
def call_intrinsic(m: Machine, f: Frame, i: Instruction) -> Any:
    if i.value == "INTRINSIC_LIST_TO_TUPLE":
        f.stack[-1] = tuple(f.stack[-1])
    elif i.value == "INTRINSIC_UNARY_POSITIVE":
        f.stack[-1] = operators.unary(m, "UNARY_POSITIVE", f.stack[-1])
    elif i.value == "INTRINSIC_STOPITERATION_ERROR":
        error = f.stack[-1]
        f.stack[-1] = (
            RuntimeError("generator raised StopIteration") if isinstance(error, StopIteration) else error
        )
    else:
        raise Break(
            "opcode", f"{i.value} is not captured", "move this construct out of the compiled function"
        )


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
        fresh = types.FunctionType(
            function.__code__, f.globals, function.__name__, function.__defaults__, value
        )
        fresh.__kwdefaults__, fresh.__annotations__ = function.__kwdefaults__, function.__annotations__
        function = fresh
    elif i.arg == 4:
        function.__annotations__ = (
            dict(zip(value[::2], value[1::2], strict=True)) if isinstance(value, tuple) else value
        )
    else:
        setattr(function, "__defaults__" if i.arg == 1 else "__kwdefaults__", value)
    f.stack.append(function)


@opcode("LOAD_BUILD_CLASS")
def load_build_class(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(__build_class__)


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
