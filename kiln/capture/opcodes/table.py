"""The table of opcodes: one function each, by name, for every CPython that has it."""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import partial
from typing import Any

from kiln.base.errors import Break
from kiln.bytecode.decode import Instruction
from kiln.capture.frame import Frame, Machine

Handler = Callable[["Machine", Frame, Instruction], Any]
NAMED: dict[str, Handler] = {}


def opcode(*names: str) -> Callable[[Handler], Handler]:
    """Declare the function that interprets these opcodes; it returns None, a jump target, RETURN or YIELD."""

    def declare(function: Handler) -> Handler:
        for name in names:
            assert name not in NAMED, f"opcode {name} is declared twice"
            NAMED[name] = function
        return function

    return declare


def steps(rules: dict[str, Handler]) -> None:
    """Declare opcodes, a row each."""
    for name, function in rules.items():
        opcode(name)(function)


def computes(count: int, rules: dict[str, Callable[..., Any]], push: bool = True) -> None:
    """Declare opcodes that take `count` values from the stack and push what a rule makes of them.

    A rule is given the machine, the frame, the instruction and the values, the first pushed first.
    """
    for name, rule in rules.items():

        def run(m: Machine, f: Frame, i: Instruction, rule: Callable[..., Any] = rule) -> None:
            at = len(f.stack) - count
            values = f.stack[at:]
            del f.stack[at:]
            result = rule(m, f, i, *values)
            if push:
                f.stack.append(result)

        opcode(name)(run)


def consumes(count: int, rules: dict[str, Callable[..., Any]]) -> None:
    """Declare opcodes that take `count` values from the stack and push nothing."""
    computes(count, rules, push=False)


def not_captured(name: str) -> Break:
    return Break("opcode", f"{name} is not captured", "move this construct out of the compiled function")


def refuse(name: str, m: Machine, f: Frame, i: Instruction) -> Any:
    """Run an opcode that always breaks the graph."""
    raise not_captured(name)


REFUSED = frozenset("""
    ASYNC_GEN_WRAP BEFORE_ASYNC_WITH CLEANUP_THROW END_ASYNC_FOR GET_AITER GET_ANEXT GET_AWAITABLE
    IMPORT_STAR PRINT_EXPR LOAD_FROM_DICT_OR_GLOBALS
    INTERPRETER_EXIT RESERVED
""".split())  # fmt: skip


def build() -> list[Handler]:
    """The dispatch list by opcode number; fails at import when an opcode of this Python is unknown."""
    left_out = ("INSTRUMENTED_", "ENTER_EXEC")
    known = {name: op for name, op in dis.opmap.items() if op < 256 and not name.startswith(left_out)}
    lacking = known.keys() - NAMED.keys() - REFUSED - {"CACHE", "EXTENDED_ARG"} - SPECIALIZED
    assert not lacking, f"opcodes without a function: {sorted(lacking)}"
    table: list[Handler] = [partial(refuse, "an unknown opcode")] * 256
    for name, op in known.items():
        table[op] = NAMED.get(name) or partial(refuse, name)
    return table


SPECIALIZED: frozenset[str] = frozenset(getattr(dis, "_all_opmap", {}).keys() - dis.opmap.keys())
