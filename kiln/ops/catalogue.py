"""The catalogue: for every op its level, its shape rule, its expansion, and where each is declared."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from kiln.base.dataclass import dataclass
from kiln.ops import rules  # noqa: F401  (fills the table of shape rules)
from kiln.ops.expansions import all as expansions  # noqa: F401  (fills the table of expansions)
from kiln.ops.levels import level_of
from kiln.ops.meta import DECOMPOSES
from kiln.ops.table import EXPANSIONS, aten, rule_of

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Entry:
    """All that is declared for one overload.

    `level` is prims, kernel, core or aten, as in `kiln.ops.levels`. An aten op without an expansion is
    `composite` if the dispatcher takes it apart before a graph sees it, else a `call` of its kernel.
    """

    name: str
    level: str
    rule: str
    expansion: str


def entries() -> Iterator[Entry]:
    """One entry for every overload of torch's aten ops that returns something new, in alphabetical order."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            found = getattr(getattr(aten, packet, None), overload or "default", None)
            if found is not None and not found._schema.is_mutable:
                yield entry(found)


def entry(overload: Any) -> Entry:
    """What is declared for one overload."""
    level, expansion, rule = level_of(overload), EXPANSIONS.get(overload), rule_of(overload)
    if level == "aten" and expansion is None:
        level = "composite" if DECOMPOSES[overload] else "call"
    return Entry(
        str(overload).removeprefix("aten."),
        level,
        "meta kernel" if rule is None else declared(rule),
        "" if expansion is None else declared(expansion),
    )


def declared(function: Callable[..., Any]) -> str:
    """Where a function is written: file:line."""
    code = inspect.unwrap(getattr(function, "func", function)).__code__
    path = Path(code.co_filename)
    where = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE.parent) else path
    return f"{where}:{code.co_firstlineno}"


def show(part: str = "", file: TextIO | None = None) -> None:
    """Print the catalogue, or the ops whose names contain `part`."""
    out = file or sys.stdout
    found = [e for e in entries() if part in e.name]
    rows = [
        ("op", "level", "shape rule", "expansion"),
        *[(e.name, e.level, e.rule, e.expansion) for e in found],
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths)]
        out.write("  ".join([*cells, row[3]]).rstrip() + "\n")
