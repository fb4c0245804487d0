"""What the steps of a plan come from: their names in profiles, and the lines of the program in tracebacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kiln.base.graph import CONSTANT, INPUT, Node, label, reached
from kiln.base.places import places_of
from kiln.base.tracebacks import add_lines
from kiln.fuse.steps import Launch
from kiln.ops.levels import name_of

SHOWN = 4
"""How many of the ops of a kernel its name in a profile lists."""

#: What may raise inside a kernel: an index out of range, a division by zero.
RAISING = frozenset({"index", "gather", "div", "floor_divide", "remainder", "fmod"})


class Sources:
    """For each step of a plan its name, and where in the program it stands."""

    __slots__ = ("names", "places")

    def __init__(self, kinds: Sequence[str], sources: Sequence[Launch | Node]) -> None:
        given, known = iter(sources), dict[Any, tuple[str, str]]()
        named = ("launch", "grid", "call")
        found = [described(next(given), known) if kind in named else ("", "") for kind in kinds]
        self.names, self.places = tuple([name for name, _ in found]), tuple([place for _, place in found])

    def __call__(self, step: int, error: BaseException) -> None:
        """Put the lines of the program that a step stands for before the error's own traceback."""
        add_lines(error, places_of(self.places[step]))


def described(source: Launch | Node, known: dict[Any, tuple[str, str]]) -> tuple[str, str]:
    """The name of a step in a profile, and its place in the program; `known` are those of other steps."""
    if isinstance(source, Node):
        return f"kiln.call {label(source.op)}", source.where
    key = source.kernel, *[node.where for node in source.writes.values()]
    if key not in known:  # equal layers run the same kernels
        known[key] = _described(source)
    return known[key]


def _described(source: Launch) -> tuple[str, str]:
    nodes = computed_in(source)
    ops = list(dict.fromkeys(label(node.op) for node in nodes))
    more = "+…" if len(ops) > SHOWN else ""
    suspects = [node for node in nodes if node.where and name_of(node.op) in RAISING] or nodes
    place = next((node.where for node in suspects if node.where), "")
    return f"kiln.kernel {source.kernel.name} {'+'.join(ops[:SHOWN])}{more}", place


def computed_in(launch: Launch) -> list[Node]:
    """The nodes between what a kernel reads and what it writes, those that are read first."""
    read = set(launch.reads.values())

    def made(nodes: Iterable[Node]) -> list[Node]:
        return [n for n in nodes if n not in read and n.op is not INPUT and n.op is not CONSTANT]

    return list(reached(made(launch.writes.values()), lambda node: made(node.inputs())))[::-1]
