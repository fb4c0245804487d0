"""Schedules: the choices that a target has in running loop nests. Results differ by rounding alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from kiln.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the CPU runs the nests of a kernel."""

    narrower: int = 0
    """How many times vectors are halved from the processor's width."""

    chunk: int = 4096
    """Elements of one task, when a kernel has one axis only."""

    stretch: int = 1
    """Vectors that a turn without folds takes at once."""

    vectors: int = 4
    """Vectors that a short turn of a fold takes at once."""

    columns: int = 8
    """Vectors of columns that are folded at once."""

    rows: int = 1024
    """Elements of short rows that one task takes."""

    tile: int = 0
    """The side of squares in which transposes go; 0 where the sizes say."""

    axis: int = 0
    """Which axis runs in vectors: the cheapest to read and write along, the second, …"""

    def joined(self, others: Iterable[Schedule]) -> Schedule:
        """This schedule with all choices in which others differ from it; of two that clash the first."""
        changes: dict[str, int] = {}
        for other in others:
            for name, value in other.data().items():
                if value != getattr(self, name):
                    changes.setdefault(name, value)
        return replace(self, **changes)

    def data(self) -> dict[str, int]:
        """The choices, by name."""
        return asdict(self)


USUAL = Schedule()


def alternatives() -> Iterator[Schedule]:
    """Schedules worth a try: the usual one first, each of the others with one other choice."""
    yield USUAL
    for name, values in (
        ("stretch", (2, 4)), ("narrower", (1,)), ("chunk", (1024, 16384, 65536)), ("vectors", (1, 2, 8)),
        ("columns", (1, 4, 16)), ("rows", (256, 4096)), ("tile", (16, 64, 256)), ("axis", (1,)),
    ):  # fmt: skip
        for value in values:
            yield replace(USUAL, **{name: value})


def schedule_of(data: Any) -> Schedule | None:
    """A schedule from what `data` gave; None where it is nothing of the kind."""
    names = {f.name for f in fields(Schedule)}
    if not isinstance(data, dict) or data.keys() != names or not all(type(v) is int for v in data.values()):
        return None
    made = Schedule(**data)
    counts = (made.chunk, made.stretch, made.vectors, made.columns, made.rows)
    return made if min(counts) > 0 and min(made.narrower, made.axis, made.tile) >= 0 else None
