"""Operators, subscripts, jumps and iteration."""

from __future__ import annotations

import builtins
import collections.abc
from collections.abc import Callable
from typing import Any

from kiln.bytecode import versions
from kiln.bytecode.decode import Instruction
from kiln.capture import attributes, builtin_calls, masks, operators
from kiln.capture.expected import taken
from kiln.capture.fake_arrays import OpenNumber
from kiln.capture.frame import YIELD, Frame, Machine, UserError
from kiln.capture.iterators import Generator
from kiln.capture.opcodes.table import computes, consumes, opcode, steps
from kiln.capture.variables import first_read
from kiln.capture.world import MISSING
from kiln.ops.fake import FakeTensor


def compare(m: Machine, f: Frame, i: Instruction, a: Any, b: Any) -> Any:
    result = operators.compare(m, i.value, a, b, "opaque" if i.flag else "push")
    return m.truth(result) if i.flag else result


def subscript(m: Machine, f: Frame, i: Instruction, container: Any, key: Any) -> Any:
    """An item; `x[mask]` in `y[mask] = x[mask]` is what `y` becomes."""
    if type(container) is FakeTensor and masks.is_mask(key):
        target, mask = written_next(m, f)
        if mask is key and (found := masks.merged(m, container, key, target)) is not MISSING:
            return found
    return operators.getitem(m, container, key, "push")


def written_next(m: Machine, f: Frame) -> tuple[Any, Any]:
    """The variables in `a[b] = …`, where that is what comes next; nothing where something else does."""
    following = f.code.instructions[f.index + 1 : f.index + 4]
    if len(following) < 3:
        return None, None
    first, second, third = following
    names = (first.value, second.value)
    if first.name == "LOAD_FAST_LOAD_FAST":
        names, third = first.value, second
    elif first.name != "LOAD_FAST" or second.name != "LOAD_FAST":
        return None, None
    if third.name != "STORE_SUBSCR" or not all(n in f.locals or n in f.lazy for n in names):
        return None, None
    target, key = (f.locals[n] if n in f.locals else first_read(m, f, n) for n in names)
    return target, key


computes(1, {
    **dict.fromkeys(("UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT"),
                    lambda m, f, i, value: operators.unary(m, i.name, value, "push")),
    "UNARY_NOT": lambda m, f, i, value: not m.truth(value),
    "TO_BOOL": lambda m, f, i, value: value if type(value) is FakeTensor else m.truth(value),
    "GET_ITER": lambda m, f, i, value: m.iterate(value),
    "GET_YIELD_FROM_ITER": lambda m, f, i, value: m.iterate(value),
})  # fmt: skip
computes(2, {
    "BINARY_OP": lambda m, f, i, a, b: operators.binary(m, i.value, a, b, "push"),
    "COMPARE_OP": compare,
    "IS_OP": lambda m, f, i, a, b: m.same(a, b) != bool(i.arg),
    "CONTAINS_OP": lambda m, f, i, item, container: operators.contains(m, container, item) != bool(i.arg),
    "BINARY_SUBSCR": subscript,
    "END_SEND": lambda m, f, i, receiver, value: value,
})  # fmt: skip
computes(3, {
    "BINARY_SLICE": lambda m, f, i, items, start, end: operators.getitem(m, items, slice(start, end), "push"),
    "MATCH_CLASS": lambda m, f, i, subject, cls, names: match_attributes(m, subject, cls, i.arg or 0, names),
})  # fmt: skip
consumes(2, {"DELETE_SUBSCR": lambda m, f, i, items, key: operators.delitem(m, items, key, "drop")})
consumes(3, {
    "STORE_SUBSCR": lambda m, f, i, value, items, key: operators.setitem(m, items, key, value, "drop"),
})  # fmt: skip
consumes(4, {
    "STORE_SLICE": lambda m, f, i, value, items, start, end: operators.setitem(
        m, items, slice(start, end), value, "drop"),
})  # fmt: skip


# ---------------------------------------------------------------------- jumps


steps(dict.fromkeys(
    ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"),
    lambda m, f, i: i.value))  # fmt: skip


def truth_of_top(m: Machine, f: Frame, i: Instruction, sense: bool) -> bool:
    value = f.stack[-1]
    return taken(m, f, i, sense) if type(value) in (FakeTensor, OpenNumber) else m.truth(value)


def none_on_top(m: Machine, f: Frame, i: Instruction, sense: bool) -> bool:
    return f.stack[-1] is None


def pop_jumps(condition: str, holds: Callable[..., bool], sense: bool) -> None:
    """The jumps that drop the top of the stack and are taken where the condition is as `sense` says."""

    @opcode(*[f"POP_JUMP_{way}IF_{condition}" for way in ("", "FORWARD_", "BACKWARD_")])
    def pop_jump(m: Machine, f: Frame, i: Instruction) -> Any:
        jumps = holds(m, f, i, sense) == sense
        f.stack.pop()
        return i.value if jumps else None


pop_jumps("TRUE", truth_of_top, True)
pop_jumps("FALSE", truth_of_top, False)
pop_jumps("NONE", none_on_top, True)
pop_jumps("NOT_NONE", none_on_top, False)


@opcode("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
def jump_or_pop(m: Machine, f: Frame, i: Instruction) -> Any:
    if m.truth(f.stack[-1]) == (i.name == "JUMP_IF_TRUE_OR_POP"):
        return i.value
    f.stack.pop()


# ---------------------------------------------------------------------- iteration


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
        what = f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        raise UserError(ValueError(what))
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


steps({"YIELD_VALUE": lambda m, f, i: YIELD})


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


# ---------------------------------------------------------------------- match


def match_keys(m: Machine, f: Frame, i: Instruction) -> Any:
    subject, keys = f.stack[-2:]
    found = all(operators.contains(m, subject, key) for key in keys)
    return tuple(operators.getitem(m, subject, key) for key in keys) if found else None


computes(0, {
    "GET_LEN": lambda m, f, i: builtin_calls.length(m, (f.stack[-1],), {}),
    "MATCH_MAPPING": lambda m, f, i: isinstance(f.stack[-1], collections.abc.Mapping),
    "MATCH_SEQUENCE": lambda m, f, i: isinstance(f.stack[-1], collections.abc.Sequence)
    and not isinstance(f.stack[-1], (str, bytes, bytearray)),
    "MATCH_KEYS": match_keys,
})  # fmt: skip


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
                what = f"{cls.__name__}() accepts {len(positional)} positional sub-patterns ({count} given)"
                raise UserError(TypeError(what))
    for name in (*positional[:count], *names):
        try:
            found.append(m.getattr(subject, name))
        except UserError as e:
            if isinstance(e.error, AttributeError):
                return None
            raise
    return tuple(found)
