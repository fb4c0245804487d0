"""Residual code as text, and beside its source: a line a statement, for debuggers, tracebacks and people."""

from __future__ import annotations

import inspect
import linecache
import weakref
from collections.abc import Callable, Sequence
from itertools import count, zip_longest
from types import CodeType, FunctionType
from typing import Any

from kiln.base.errors import Place
from kiln.bytecode.decode import Instruction, decode
from kiln.bytecode.flow import Guarded, Row, depths

NULL = "NULL"
RAISED = "# Where the graph raises, the function runs in Python, so that its handlers see the exception."

_numbers = count()


def statement_lines(rows: Sequence[Row], guarded: Sequence[Guarded]) -> list[int]:
    """A line for each row: 1 before any statement, one more wherever the stack is empty."""
    handlers = {g.target for g in guarded}
    lines, line = [], 1
    for at, depth in enumerate(depths(rows, guarded)):
        line += at > 0 and (depth == 0 or at in handlers)
        lines.append(line)
    return lines


def show(function: FunctionType) -> None:
    """Have linecache know the text of a function whose code has a name of `generated_name`."""
    filename = function.__code__.co_filename
    lines: Any = _Lines((0, None, [], filename))
    lines.function = weakref.ref(function)
    linecache.cache[filename] = lines
    weakref.finalize(function, linecache.cache.pop, filename, None)


def generated_name(name: str) -> str:
    """A new name of a file for generated code."""
    return f"<kiln {name} {next(_numbers)}>"


class _Lines(tuple[Any, ...]):
    """An entry of linecache whose lines are made when somebody reads them."""

    function: Callable[[], FunctionType | None]

    def __getitem__(self, at: Any) -> Any:
        item = super().__getitem__(at)
        if at == 2 and not item and (function := self.function()) is not None:
            item += [f"{line}\n" for line in statements(function.__code__)]
        return item


def statements(code: CodeType) -> list[str]:
    """The text of straight-line code, a statement a line, as `statement_lines` counts them."""
    parameters = ", ".join(code.co_varnames[: code.co_argcount])
    lines = {1: f"def {code.co_name.strip('<>').partition(' ')[0]}({parameters}):"}
    groups: dict[int, list[Instruction]] = {}
    for instruction in decode(code).instructions:
        groups.setdefault(instruction.line or 1, []).append(instruction)
    for line, group in groups.items():
        if line > 1:
            lines[line] = "    " + statement(group)
    return [lines[line] for line in sorted(lines)]


def statement(group: Sequence[Instruction]) -> str:
    """One statement; instructions that it cannot put into words stand by their names."""
    if group[0].name == "PUSH_EXC_INFO":
        return RAISED if group[-1].name == "POP_EXCEPT" else "# Where the graph raises, lines are named."
    machine = _Machine()
    for instruction in group:
        rule = RULES.get(instruction.name)
        if rule is not None:
            rule(machine, instruction)
        elif instruction.name not in SILENT:
            machine.done.append(f"{instruction.name}({'' if instruction.arg is None else instruction.arg})")
    return "; ".join([*machine.done, *machine.stack]) or "pass"


class _Machine:
    """The texts of the values on the stack, and of what is done with them."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.done: list[str] = []
        self.names: tuple[str, ...] = ()

    def pop(self) -> str:
        return self.stack.pop() if self.stack else "…"

    def take(self, n: int) -> list[str]:
        return list(reversed([self.pop() for _ in range(n)]))

    def call(self, arguments: Sequence[str]) -> None:
        callee = self.pop()
        if callee == NULL:
            callee = self.pop()
        elif self.stack and self.stack[-1] == NULL:
            self.pop()
        self.stack.append(f"{callee}({', '.join(arguments)})")


def named(value: Any) -> str:
    """A constant in a text: plain values as they are, other objects by their names."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(named, value))}{',' * (len(value) == 1)})"
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else f"<{type(value).__name__}>"


def _call(m: _Machine, i: Instruction) -> None:
    arguments = m.take(i.arg or 0)
    plain = len(arguments) - len(m.names)
    m.call([*arguments[:plain], *map("=".join, zip(m.names, arguments[plain:], strict=True))])
    m.names = ()


def _made(count: int | None, text: Callable[..., str]) -> Callable[[_Machine, Instruction], None]:
    """Push the text of what is made of `count` values, or of as many as the instruction says."""
    return lambda m, i: m.stack.append(text(i, *m.take(i.arg or 0 if count is None else count)))


def _done(count: int, text: Callable[..., str]) -> Callable[[_Machine, Instruction], None]:
    """Note the text of what is done with `count` values."""
    return lambda m, i: m.done.append(text(i, *m.take(count)))


def _map(m: _Machine, i: Instruction) -> None:
    parts = m.take(2 * (i.arg or 0))
    m.stack.append(f"{{{', '.join(f'{k}: {v}' for k, v in zip(parts[::2], parts[1::2], strict=True))}}}")


SILENT = frozenset({"RESUME", "PRECALL"})
#: What residual code is made of.
RULES: dict[str, Callable[[_Machine, Instruction], None]] = {
    "CALL": _call, "BUILD_MAP": _map,
    "KW_NAMES": lambda m, i: setattr(m, "names", tuple(i.value)),
    "LOAD_FAST": lambda m, i: m.stack.append(i.value),
    "PUSH_NULL": lambda m, i: m.stack.append(NULL),
    "LOAD_CONST": lambda m, i: m.stack.append(named(i.value)),
    "COPY": lambda m, i: m.stack.append(m.stack[-(i.arg or 1)] if len(m.stack) >= (i.arg or 1) else "…"),
    "LOAD_ATTR": _made(1, lambda i, owner: f"{owner}.{i.value}"),
    "BINARY_SUBSCR": _made(2, lambda i, value, key: f"{value}[{key}]"),
    "BUILD_TUPLE": _made(None, lambda i, *parts: f"({', '.join(parts)}{',' * (len(parts) == 1)})"),
    "BUILD_LIST": _made(None, lambda i, *parts: f"[{', '.join(parts)}]"),
    "BUILD_SLICE": _made(None, lambda i, *parts: f"slice({', '.join(parts)})"),
    "STORE_FAST": _done(1, lambda i, value: f"{i.value} = {value}"),
    "STORE_ATTR": _done(2, lambda i, value, owner: f"{owner}.{i.value} = {value}"),
    "POP_TOP": _done(1, lambda i, value: value),
    "RETURN_VALUE": _done(1, lambda i, value: f"return {value}"),
}  # fmt: skip


WIDEST = 72
"""Columns of the source; longer lines are cut."""


CALL = "    __out = "
"""How the line begins that calls the graph."""


def became(code: CodeType, graph: str = "", broke: Place | None = None) -> list[str]:
    """Residual code as lines that read like Python, with the name of the graph and of where it ended."""
    lines = statements(code)
    for i, line in enumerate(lines):
        if graph and line.startswith(CALL):
            lines[i] = f"{CALL}<graph {graph}>({line.partition('(')[2]}"
    if broke is not None:
        last = next((i for i, line in enumerate(lines) if line.startswith("    return ")), len(lines) - 1)
        lines[last] += f"  # goes on from line {broke.line}"
    return lines


def source_of(code: CodeType) -> list[str]:
    """The lines of the source of a code object, without their margin; none where there is no file."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    if not lines:
        return []
    try:
        block = inspect.getblock(lines)
    except (IndentationError, SyntaxError):
        block = lines[:1]
    return inspect.cleandoc("\n" + "".join(block)).splitlines()


def beside(original: CodeType, code: CodeType, graph: str = "", broke: Place | None = None) -> str:
    """The source of a frame to the left, what runs in its place to the right."""
    left, right = source_of(original), became(code, graph, broke)
    width = min(max([3, *map(len, left)]), WIDEST)
    rows = zip_longest(["was", *left], ["became", *right], fillvalue="")
    return "\n".join(f"{a[:width]:{width}} | {b}".rstrip() for a, b in rows)
