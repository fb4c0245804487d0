"""Which variables the rest of a function still reads."""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType

from kiln.bytecode.decode import Code, decode
from kiln.bytecode.flow import reachable
from kiln.bytecode.versions import JUMPS, REAL, TERMINATORS

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
