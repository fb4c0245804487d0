"""Operators, subscripts, jumps and iteration."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import torch

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
    "UNARY_NOT": lambda m, f, i, value: (
        torch.sym_not(value) if m.numbers and type(value) is torch.SymBool else not m.truth(value)),
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


def sequence(m: Machine, value: Any, unfit: str = "") -> list[Any]:
    """The items of an iterable, as a fresh list; `unfit` says of anything else that it is none."""
    if type(value) in (list, tuple):
        return list(m.world.touch(value))
    try:
        iterator = m.iterate(value)
    except UserError as e:
        if isinstance(e.error, TypeError) and attributes.mro_lookup(type(value), "__iter__") is MISSING:
            text = unfit or f"cannot unpack non-iterable {type(value).__name__} object"
            raise UserError(TypeError(text)) from None
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


#: What types say of themselves in their flags: how patterns see them.
IS_SEQUENCE, IS_MAPPING, MATCHES_SELF = 1 << 5, 1 << 6, 1 << 22


def match_keys(m: Machine, f: Frame, i: Instruction) -> Any:
    subject, keys = f.stack[-2:]
    seen, get = [], None if type(subject) is dict else m.getattr(subject, "get")
    for at, key in enumerate(keys):
        if key in keys[:at]:
            raise UserError(ValueError(f"mapping pattern checks duplicate key ({key!r})"))
        if get is not None:
            seen.append(m.call(get, (key, MISSING)))
        else:
            found = operators.contains(m, subject, key)
            seen.append(operators.getitem(m, subject, key) if found else MISSING)
        if seen[-1] is MISSING:
            return None
    return tuple(seen)


computes(0, {
    "GET_LEN": lambda m, f, i: builtin_calls.length(m, (f.stack[-1],), {}),
    "MATCH_MAPPING": lambda m, f, i: bool(type(f.stack[-1]).__flags__ & IS_MAPPING),
    "MATCH_SEQUENCE": lambda m, f, i: bool(type(f.stack[-1]).__flags__ & IS_SEQUENCE),
    "MATCH_KEYS": match_keys,
})  # fmt: skip


def match_attributes(m: Machine, subject: Any, cls: Any, count: int, names: tuple[str, ...]) -> Any:
    if not isinstance(cls, type):
        raise UserError(TypeError("called match pattern must be a class"))
    if not m.truth(m.call(builtins.isinstance, (subject, cls))):
        return None
    positional: Any = ()
    found: list[Any] = []
    if count:
        positional = builtin_calls.get_attribute(m, (cls, "__match_args__", MISSING), {})
        itself = positional is MISSING and cls.__flags__ & MATCHES_SELF
        positional = () if positional is MISSING else positional
        kind, most = type(positional), 1 if itself else len(positional) if type(positional) is tuple else 0
        if kind is not tuple:
            text = f"{cls.__name__}.__match_args__ must be a tuple (got {kind.__name__})"
            raise UserError(TypeError(text))
        if most < count:
            plural = "" if most == 1 else "s"
            text = f"{cls.__name__}() accepts {most} positional sub-pattern{plural} ({count} given)"
            raise UserError(TypeError(text))
        if itself:
            found.append(subject)
    seen: list[str] = []
    for name in (*positional[:count], *names):
        if type(name) is not str:
            text = f"__match_args__ elements must be strings (got {type(name).__name__})"
            raise UserError(TypeError(text))
        if name in seen:
            text = f"{cls.__name__}() got multiple sub-patterns for attribute {name!r}"
            raise UserError(TypeError(text))
        seen.append(name)
        try:
            found.append(m.getattr(subject, name))
        except UserError as e:
            if isinstance(e.error, AttributeError):
                return None
            raise
    return tuple(found)
