"""Every difference between the supported CPython releases, as data; other modules ask by name."""

from __future__ import annotations

import opcode
import sys
from typing import Final

from kiln.base.dataclass import dataclass


class Kind:
    """How the argument of an instruction is read: plain integers, which are compared many times."""

    NONE, PLAIN, CONST, NAME, LOCAL, PAIR, FORWARD, BACKWARD, COMPARE = range(9)
    BINARY, INTRINSIC_1, INTRINSIC_2 = range(9, 12)


@dataclass(frozen=True, slots=True)
class Release:
    """What one CPython release does in its own way."""

    compare_shift: int
    """Bits to the right of the comparison number in the argument of COMPARE_OP."""
    compare_bool: int
    """The bit of COMPARE_OP that asks for a bool, or 0."""
    null_first: bool
    """The NULL of a call stands below the callable (3.11, 3.12), not above it (3.13)."""
    precall: bool
    """CALL is announced by PRECALL."""
    kw_names: bool
    """Keyword names travel in KW_NAMES (3.11, 3.12), not as a tuple on the stack for CALL_KW (3.13)."""
    for_exit_skip: int
    """Instructions at the target of FOR_ITER that an exhausted iterator passes over, already popped."""
    directed_jumps: bool
    """Conditional jumps carry their direction in their name (3.11)."""
    handler_before_call: bool
    """An exception from a function called in line goes to the handler of the unit before the call (3.13)."""
    shifts: dict[str, int]
    """Instructions whose argument carries flags to the right of a name index, with the number of bits."""


_NEW = {"LOAD_GLOBAL": 1, "LOAD_ATTR": 1, "LOAD_SUPER_ATTR": 2}

RELEASES: Final = {
    (3, 11): Release(
        compare_shift=0, compare_bool=0, null_first=True, precall=True, kw_names=True, for_exit_skip=0,
        directed_jumps=True, handler_before_call=False,
        shifts={"LOAD_GLOBAL": 1},
    ),
    (3, 12): Release(
        compare_shift=4, compare_bool=0, null_first=True, precall=False, kw_names=True, for_exit_skip=1,
        directed_jumps=False, handler_before_call=False,
        shifts=_NEW,
    ),
    (3, 13): Release(
        compare_shift=5, compare_bool=16, null_first=False, precall=False, kw_names=False, for_exit_skip=2,
        directed_jumps=False, handler_before_call=True,
        shifts=_NEW,
    ),
}  # fmt: skip

PYTHON: Final = sys.version_info[:2]
if PYTHON not in RELEASES:
    raise ImportError(
        f"Kiln reads the bytecode of CPython 3.11, 3.12 and 3.13, not of {PYTHON[0]}.{PYTHON[1]}"
    )
HERE: Final = RELEASES[PYTHON]

REAL: Final = {
    name: op for name, op in opcode.opmap.items() if op < 256 and not name.startswith(("INSTRUMENTED_", "<"))
}
"""Instructions that occur in `co_code`, by name."""

OPNAME: Final = tuple(opcode.opname[op] for op in range(256))
EXTENDED_ARG: Final = REAL["EXTENDED_ARG"]

_entries = opcode._inline_cache_entries  # type: ignore[attr-defined]
CACHES: Final[tuple[int, ...]] = tuple(
    (_entries.get(OPNAME[op], 0) if isinstance(_entries, dict) else _entries[op]) for op in range(256)
)
"""Inline cache units after each instruction, by opcode."""

SHIFT: Final = tuple(HERE.shifts.get(OPNAME[op], 0) for op in range(256))

COMPARISONS: Final = tuple(opcode.cmp_op)
OPERATORS: Final[tuple[str, ...]] = tuple(sign for _, sign in opcode._nb_ops)  # type: ignore[attr-defined]
INTRINSICS_1: Final[tuple[str, ...]] = tuple(getattr(opcode, "_intrinsic_1_descs", ()))
INTRINSICS_2: Final[tuple[str, ...]] = tuple(getattr(opcode, "_intrinsic_2_descs", ()))

_PAIRS = {"LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"}
_SPECIAL = {
    "COMPARE_OP": Kind.COMPARE, "BINARY_OP": Kind.BINARY,
    "CALL_INTRINSIC_1": Kind.INTRINSIC_1, "CALL_INTRINSIC_2": Kind.INTRINSIC_2,
}  # fmt: skip


def _kind(op: int) -> int:
    name = OPNAME[op]
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name in _PAIRS:
        return Kind.PAIR
    if op in opcode.hasconst:
        return Kind.CONST
    if op in opcode.hasname:
        return Kind.NAME
    if op in opcode.haslocal or op in opcode.hasfree:
        return Kind.LOCAL
    if op in opcode.hasjrel:
        return Kind.BACKWARD if "BACKWARD" in name else Kind.FORWARD
    has_arg = op in opcode.hasarg if hasattr(opcode, "hasarg") else op >= opcode.HAVE_ARGUMENT
    return Kind.PLAIN if has_arg else Kind.NONE


KIND: Final[tuple[int, ...]] = tuple(_kind(op) for op in range(256))

JUMPS: Final = frozenset(op for op in range(256) if KIND[op] in (Kind.FORWARD, Kind.BACKWARD))
"""Instructions that have a jump target."""

TERMINATORS: Final = frozenset(
    REAL[name]
    for name in (
        "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE",
        "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT",
    )
    if name in REAL
)  # fmt: skip
"""Instructions that never pass control to the next one."""
