"""Stack depth, reachability and live variables of bytecode, over rows of (opcode, argument, target row)."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Sequence
from functools import cache
from types import CodeType
from typing import NamedTuple

from kiln.base.errors import Bug
from kiln.bytecode.decode import Code, decode
from kiln.bytecode.versions import JUMPS, OPNAME, REAL, TERMINATORS


class Row(NamedTuple):
    """One instruction as it is laid out; `target` is the row it may jump to, or -1."""

    op: int
    arg: int | None
    target: int = -1


class Guarded(NamedTuple):
    """Rows `start` to `end` (excluded) whose exceptions go to row `target`."""

    start: int
    end: int
    target: int
    depth: int
    lasti: bool


_PRECALL = REAL.get("PRECALL", -1)
_CALL = REAL["CALL"]
_RETURN_GENERATOR = REAL["RETURN_GENERATOR"]
_PASSING = frozenset(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "NOP"))


@cache
def stack_effect(op: int, arg: int | None, jump: bool = False) -> int:
    """The change of the stack depth by one instruction, on its jump or on its fall-through."""
    # The compiler counts the operands of a call on PRECALL; the frame keeps them until CALL.
    if op == _PRECALL:
        return 0
    if op == _CALL and arg is not None:
        return -arg - 1
    # The frame goes on with a value that was sent to it on the stack.
    if op == _RETURN_GENERATOR:
        return 1
    return dis.stack_effect(op, arg, jump=jump)


def depths(
    rows: Sequence[Row], guarded: Iterable[Guarded] = (), entry: tuple[int, int] = (0, 0)
) -> list[int]:
    """The depth of the stack before each row, -1 where control never comes from `entry` (row, depth)."""
    found = [-1] * len(rows)
    pending = [entry] if rows else []
    pending.extend((g.target, g.depth + g.lasti + 1) for g in guarded)
    while pending:
        at, depth = pending.pop()
        while at < len(rows) and found[at] < 0:
            if depth < 0:
                raise Bug(f"more is taken from the stack before row {at} than there is")
            found[at] = depth
            op, arg, target = rows[at]
            if target >= 0:
                pending.append((target, depth + stack_effect(op, arg, True)))
            if op in TERMINATORS:
                break
            depth += stack_effect(op, arg)
            at += 1
        else:
            if at >= len(rows):
                raise Bug("control runs past the last instruction")
            if found[at] != depth:
                raise Bug(
                    f"{OPNAME[rows[at].op]} at row {at} is reached with {found[at]} and with {depth} values"
                )
    return found


def deepest(rows: Sequence[Row], before: Sequence[int]) -> int:
    """The largest number of values ever on the stack, given the depth before each row."""
    most = max(before, default=0)
    for row, depth in zip(rows, before, strict=True):
        if depth >= 0:
            most = max(most, depth + stack_effect(row.op, row.arg))
    return most


def landing(code: CodeType, index: int) -> int:
    """The first instruction from `index` on that does more than pass control on."""
    instructions = decode(code).instructions
    seen: set[int] = set()
    while instructions[index].name in _PASSING and index not in seen:
        seen.add(index)
        index = instructions[index].value if instructions[index].op in JUMPS else index + 1
    return index


def code_rows(code: CodeType) -> tuple[list[Row], list[Guarded]]:
    """The rows and guarded ranges of a code object."""
    decoded = decode(code)
    rows = [Row(i.op, i.arg, i.value if i.op in JUMPS else -1) for i in decoded.instructions]
    return rows, [Guarded(start, end, *handler) for start, end, handler in decoded.handlers]


def stack_depths(code: CodeType, entry: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    """The depth of the stack before each instruction, -1 where control never comes from `entry`."""
    return tuple(depths(*code_rows(code), entry))


def reachable(code: CodeType, starts: Iterable[int]) -> set[int]:
    """Indices of the instructions that control may come to from `starts`, through handlers too."""
    decoded = decode(code)
    instructions = decoded.instructions
    seen: set[int] = set()
    pending = list(starts)
    while pending:
        at = pending.pop()
        while at not in seen:
            seen.add(at)
            i = instructions[at]
            if i.op in JUMPS:
                pending.append(i.value)
            handler = decoded.handler(at)
            if handler is not None:
                pending.append(handler.target)
            if i.op in TERMINATORS:
                break
            at += 1
    return seen


READ, WRITE, CLEAR = "read", "write", "clear"

_READS = "LOAD_FAST LOAD_FAST_CHECK LOAD_CLOSURE LOAD_DEREF STORE_DEREF DELETE_DEREF".split()
_ACCESS = {
    **dict.fromkeys(_READS, (READ,)), **dict.fromkeys(("LOAD_FAST_AND_CLEAR", "DELETE_FAST"), (CLEAR,)),
    "STORE_FAST": (WRITE,), "LOAD_FAST_LOAD_FAST": (READ, READ), "STORE_FAST_LOAD_FAST": (WRITE, READ),
    "STORE_FAST_STORE_FAST": (WRITE, WRITE),
}  # fmt: skip
"""What an instruction does with each of its variables; a cell is read by everything that goes through it."""

_UNCHECKED = frozenset(("LOAD_FAST", "LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST"))
_LOADS_CHECK = "LOAD_FAST_CHECK" not in REAL


def live(code: CodeType, index: int) -> frozenset[str]:
    """The variables whose value before instruction `index` may still be read, by super() too."""
    return _before(decode(code), index, reachable(code, (index,)), checked=True) | _super_reads(code)


def needed(code: CodeType, index: int, running: Iterable[int]) -> frozenset[str]:
    """The variables that `running`, from `index` on, reads without a look at whether they are bound."""
    if _LOADS_CHECK:
        return frozenset()
    return _before(decode(code), index, running, checked=False)


def _super_reads(code: CodeType) -> frozenset[str]:
    if "__class__" in code.co_freevars and "super" in code.co_names and code.co_argcount:
        return frozenset(("__class__", code.co_varnames[0]))
    return frozenset()


def _before(decoded: Code, index: int, running: Iterable[int], checked: bool) -> frozenset[str]:
    """Backward flow: what is read before it is written, at `index`, one bit a variable."""
    bit = {name: 1 << at for at, name in enumerate(decoded.locals)}
    order = sorted(running, reverse=True)
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for at in order:
        reads[at], writes[at] = _access(decoded, at, bit, checked)
    before = dict.fromkeys(order, 0)
    settled = False
    while not settled:
        settled = True
        for at in order:
            i = decoded.instructions[at]
            after = 0 if i.op in TERMINATORS else before.get(at + 1, 0)
            if i.op in JUMPS:
                after |= before.get(i.value, 0)
            found = reads[at] | after & ~writes[at]
            handler = decoded.handler(at)
            if handler is not None:
                found |= before.get(handler.target, 0)
            if found != before[at]:
                before[at] = found
                settled = False
    return frozenset(name for name, mask in bit.items() if before[index] & mask)


def _access(decoded: Code, at: int, bit: dict[str, int], checked: bool) -> tuple[int, int]:
    """The variables that one instruction reads before writing them, and those that it writes or unbinds."""
    i = decoded.instructions[at]
    reads = writes = 0
    names = i.value if isinstance(i.value, tuple) else (i.value,)
    for how, name in zip(_ACCESS.get(i.name, ()), names, strict=False):
        mask = bit[name]
        if how == READ and (checked or i.name in _UNCHECKED) or how == CLEAR and checked:
            reads |= mask & ~writes
        # A load that checks raises for an unbound variable: behind it the variable is bound,
        # as if it had been written.
        if how != READ or i.name == "LOAD_FAST_CHECK" and not checked:
            writes |= mask
    return reads, writes
