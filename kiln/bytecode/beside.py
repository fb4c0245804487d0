"""What a frame became: its source and the code that runs in its place, side by side."""

from __future__ import annotations

import inspect
import linecache
from itertools import zip_longest
from types import CodeType

from kiln.base.errors import Place
from kiln.bytecode.decompile import statements

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
