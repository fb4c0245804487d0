"""Operators, subscripts, jumps and iteration."""

from __future__ import annotations

import builtins
import collections.abc
from typing import TYPE_CHECKING, Any

from kiln.bytecode import versions
from kiln.bytecode.decode import Instruction
from kiln.capture import attributes, builtin_calls, operators
from kiln.capture.expected import taken
from kiln.capture.frame import YIELD, Frame, UserError
from kiln.capture.iterators import Generator
from kiln.capture.opcodes.table import opcode
from kiln.capture.world import MISSING
from kiln.ops.fake import FakeTensor

if TYPE_CHECKING:
    from kiln.capture.machine import Machine


@opcode("BINARY_OP")
def binary_op(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack[-2:] = [operators.binary(m, i.value, f.stack[-2], f.stack[-1], "push")]


@opcode("COMPARE_OP")
def compare_op(m: Machine, f: Frame, i: Instruction) -> Any:
    result = operators.compare(m, i.value, f.stack[-2], f.stack[-1], "opaque" if i.flag else "push")
    f.stack[-2:] = [m.truth(result) if i.flag else result]


@opcode("IS_OP")
def is_op(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack[-2:] = [m.same(f.stack[-2], f.stack[-1]) != bool(i.arg)]


@opcode("CONTAINS_OP")
def contains_op(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack[-2:] = [operators.contains(m, f.stack[-1], f.stack[-2]) != bool(i.arg)]


@opcode("UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT")
def unary(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack[-1] = operators.unary(m, i.name, f.stack[-1], "push")


@opcode("UNARY_NOT")
def unary_not(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack[-1] = not m.truth(f.stack[-1])


@opcode("TO_BOOL")
def to_bool(m: Machine, f: Frame, i: Instruction) -> Any:
    if type(f.stack[-1]) is not FakeTensor:
        f.stack[-1] = m.truth(f.stack[-1])


@opcode("BINARY_SUBSCR")
def binary_subscr(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack[-2:] = [operators.getitem(m, f.stack[-2], f.stack[-1], "push")]


@opcode("BINARY_SLICE")
def binary_slice(m: Machine, f: Frame, i: Instruction) -> Any:
    container, start, end = f.stack[-3:]
    f.stack[-3:] = [operators.getitem(m, container, slice(start, end), "push")]


@opcode("STORE_SUBSCR")
def store_subscr(m: Machine, f: Frame, i: Instruction) -> Any:
    value, container, key = f.stack[-3:]
    operators.setitem(m, container, key, value, "drop")
    del f.stack[-3:]


@opcode("STORE_SLICE")
def store_slice(m: Machine, f: Frame, i: Instruction) -> Any:
    value, container, start, end = f.stack[-4:]
    operators.setitem(m, container, slice(start, end), value, "drop")
    del f.stack[-4:]


@opcode("DELETE_SUBSCR")
def delete_subscr(m: Machine, f: Frame, i: Instruction) -> Any:
    operators.delitem(m, f.stack[-2], f.stack[-1], "drop")
    del f.stack[-2:]


# ---------------------------------------------------------------------- jumps


@opcode("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
def jump(m: Machine, f: Frame, i: Instruction) -> Any:
    return i.value


@opcode("POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_IF_TRUE")
def pop_jump_if_true(m: Machine, f: Frame, i: Instruction) -> Any:
    truth = taken(m, f, i, True) if type(f.stack[-1]) is FakeTensor else m.truth(f.stack[-1])
    f.stack.pop()
    return i.value if truth else None


@opcode("POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_FALSE", "POP_JUMP_IF_FALSE")
def pop_jump_if_false(m: Machine, f: Frame, i: Instruction) -> Any:
    truth = taken(m, f, i, False) if type(f.stack[-1]) is FakeTensor else m.truth(f.stack[-1])
    f.stack.pop()
    return None if truth else i.value


@opcode("POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NONE", "POP_JUMP_IF_NONE")
def pop_jump_if_none(m: Machine, f: Frame, i: Instruction) -> Any:
    return i.value if f.stack.pop() is None else None


@opcode("POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE", "POP_JUMP_IF_NOT_NONE")
def pop_jump_if_not_none(m: Machine, f: Frame, i: Instruction) -> Any:
    return i.value if f.stack.pop() is not None else None


@opcode("JUMP_IF_TRUE_OR_POP")
def jump_if_true_or_pop(m: Machine, f: Frame, i: Instruction) -> Any:
    if m.truth(f.stack[-1]):
        return i.value
    f.stack.pop()


@opcode("JUMP_IF_FALSE_OR_POP")
def jump_if_false_or_pop(m: Machine, f: Frame, i: Instruction) -> Any:
    if not m.truth(f.stack[-1]):
        return i.value
    f.stack.pop()


# ---------------------------------------------------------------------- iteration


@opcode("GET_ITER", "GET_YIELD_FROM_ITER")
def get_iter(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack[-1] = m.iterate(f.stack[-1])


@opcode("FOR_ITER")
def for_iter(m: Machine, f: Frame, i: Instruction) -> Any:
    value = m.next(f.stack[-1])
    if value is MISSING:
        f.stack.pop()
        return i.value + versions.HERE.for_exit_skip
    f.stack.append(value)


@opcode("UNPACK_SEQUENCE")
def unpack_sequence(m: Machine, f: Frame, i: Instruction) -> Any:
    items = sequence(m, f.stack[-1])
    if len(items) != i.arg:
        what = f"too many values to unpack (expected {i.arg})" if len(items) > (i.arg or 0) else \
            f"not enough values to unpack (expected {i.arg}, got {len(items)})"  # fmt: skip
        raise UserError(ValueError(what))
    f.stack[-1:] = reversed(items)


@opcode("UNPACK_EX")
def unpack_ex(m: Machine, f: Frame, i: Instruction) -> Any:
    assert i.arg is not None
    items, before, after = sequence(m, f.stack[-1]), i.arg & 255, i.arg >> 8
    if len(items) < before + after:
        raise UserError(
            ValueError(f"not enough values to unpack (expected at least {before + after}, got {len(items)})")
        )
    middle = items[before : len(items) - after]
    parts = [*items[:before], middle, *items[len(items) - after :]]
    f.stack[-1:] = reversed(parts)


def sequence(m: Machine, value: Any) -> list[Any]:
    """The items of an iterable, as a fresh list."""
    if type(value) in (list, tuple):
        return list(m.world.touch(value))
    try:
        iterator = m.iterate(value)
    except UserError as e:
        if isinstance(e.error, TypeError) and "not iterable" in str(e.error):
            raise UserError(TypeError(f"cannot unpack non-iterable {type(value).__name__} object")) from None
        raise
    items = []
    while (item := m.next(iterator)) is not MISSING:
        items.append(item)
    return items


# ---------------------------------------------------------------------- generators


@opcode("RETURN_GENERATOR")
def return_generator(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(None)


@opcode("YIELD_VALUE")
def yield_value(m: Machine, f: Frame, i: Instruction) -> Any:
    return YIELD


@opcode("SEND")
def send(m: Machine, f: Frame, i: Instruction) -> Any:
    receiver, sent = f.stack[-2:]
    if isinstance(receiver, Generator):
        value = receiver.advance(sent)
        result = receiver.result
    elif sent is None:
        value, result = m.next(receiver), None
    else:
        value, result = m.call(m.getattr(receiver, "send"), (sent,)), None
    if value is MISSING:
        if versions.HERE.for_exit_skip or "END_SEND" in versions.REAL:
            f.stack[-1] = result
        else:
            f.stack[-2:] = [result]
        return i.value
    f.stack[-1] = value


@opcode("END_SEND")
def end_send(m: Machine, f: Frame, i: Instruction) -> Any:
    del f.stack[-2]


# ---------------------------------------------------------------------- match


@opcode("GET_LEN")
def get_len(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(builtin_calls.length(m, (f.stack[-1],), {}))


@opcode("MATCH_MAPPING")
def match_mapping(m: Machine, f: Frame, i: Instruction) -> Any:
    f.stack.append(isinstance(f.stack[-1], collections.abc.Mapping))


@opcode("MATCH_SEQUENCE")
def match_sequence(m: Machine, f: Frame, i: Instruction) -> Any:
    value = f.stack[-1]
    f.stack.append(
        isinstance(value, collections.abc.Sequence) and not isinstance(value, (str, bytes, bytearray))
    )


@opcode("MATCH_KEYS")
def match_keys(m: Machine, f: Frame, i: Instruction) -> Any:
    subject, keys = f.stack[-2:]
    if all(operators.contains(m, subject, key) for key in keys):
        f.stack.append(tuple(operators.getitem(m, subject, key) for key in keys))
    else:
        f.stack.append(None)


@opcode("MATCH_CLASS")
def match_class(m: Machine, f: Frame, i: Instruction) -> Any:
    subject, cls, names = f.stack[-3:]
    f.stack[-3:] = [match_attributes(m, subject, cls, i.arg or 0, names)]


def match_attributes(m: Machine, subject: Any, cls: Any, count: int, names: tuple[str, ...]) -> Any:
    if not m.truth(m.call(builtins.isinstance, (subject, cls))):
        return None
    positional: tuple[str, ...] = ()
    found: list[Any] = []
    if count:
        if cls in (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple):
            found.append(subject)
        else:
            positional = attributes.load(m, cls, "__match_args__")
            if len(positional) < count:
                raise UserError(
                    TypeError(
                        f"{cls.__name__}() accepts {len(positional)} positional sub-patterns ({count} given)"
                    )
                )
    for name in (*positional[:count], *names):
        try:
            found.append(m.getattr(subject, name))
        except UserError as e:
            if isinstance(e.error, AttributeError):
                return None
            raise
    return tuple(found)
