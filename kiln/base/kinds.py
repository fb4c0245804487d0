"""The kinds of breaks: what each means, what to do, and programs that show it."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from kiln.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of break, or of a graph that is not differentiated (`ahead`).

    `failing` and `fixed` are programs that define `f`, and `args` or `calls` for its arguments where it takes
    other than one tensor; `since` is the first version of Python that reads them.
    """

    name: str
    meaning: str
    remedy: str
    failing: str
    fixed: str
    ahead: bool = False
    since: str = ""


@cache
def kinds() -> dict[str, Kind]:
    """All kinds by name, read from kinds.toml."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {name: Kind(name, **row) for name, row in tomllib.loads(text).items()}
