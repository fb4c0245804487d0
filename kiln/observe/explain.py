"""Explain: records of one run as something to read and to test."""

from __future__ import annotations

import dis
import io
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from kiln.base.errors import KilnError
from kiln.base.records import (
    BreakRecord,
    FallbackRecord,
    GraphRecord,
    RecompileRecord,
    Records,
    ResidualRecord,
)


@dataclass(frozen=True)
class Explanation:
    """What one run captured: graphs, breaks, recompiles, fallbacks, residual bytecode; and its result."""

    graph_records: tuple[GraphRecord, ...]
    breaks: tuple[BreakRecord, ...]
    recompiles: tuple[RecompileRecord, ...]
    fallbacks: tuple[FallbackRecord, ...]
    residuals: tuple[ResidualRecord, ...]
    result: Any

    @classmethod
    def of(cls, records: Records, result: Any) -> Explanation:
        """The explanation of the collected records."""
        return cls(
            tuple(records.graphs),
            tuple(records.breaks),
            tuple(records.recompiles),
            tuple(records.fallbacks),
            tuple(records.residuals),
            result,
        )

    @property
    def graphs(self) -> tuple[Any, ...]:
        """The captured GraphModules, in order."""
        return tuple(record.graph for record in self.graph_records)

    @property
    def guards(self) -> tuple[Any, ...]:
        """The guards of all graphs, in order."""
        return tuple(guard for record in self.graph_records for guard in record.guards)

    @property
    def ops(self) -> int:
        """How many calls the graphs hold."""
        return sum(record.ops for record in self.graph_records)

    @property
    def graph_count(self) -> int:
        """How many graphs were captured."""
        return len(self.graph_records)

    @property
    def break_count(self) -> int:
        """How many times a graph ended before its frame did."""
        return len(self.breaks)

    def bytecode(self) -> str:
        """The disassembly of what runs in place of each frame."""
        return "\n".join(f"{r.region}:\n{disassembly(r.code)}" for r in self.residuals if r.code is not None)

    def summary(self) -> str:
        """One line of counts."""
        sizes = {"graph": len(self.graphs), "op": self.ops, "break": len(self.breaks)}
        counts = [counted(n, noun) for noun, n in sizes.items()]
        if self.recompiles:
            counts.append(counted(len(self.recompiles), "recompile"))
        if self.fallbacks:
            counts.append(f"{counted(len(self.fallbacks), 'frame')} left to Python")
        return ", ".join(counts)

    def __str__(self) -> str:
        parts = [self.summary()]
        parts += [graph_text(i, record) for i, record in enumerate(self.graph_records)]
        parts += [break_text(i, record) for i, record in enumerate(self.breaks)]
        parts += [listing("Recompiles", self.recompiles), listing("Left to Python", self.fallbacks)]
        if any(record.code for record in self.residuals):
            parts.append("Residual bytecode\n" + indented(self.bytecode()))
        return "\n\n".join(part for part in parts if part)

    def __repr__(self) -> str:
        return f"<Explanation: {self.summary()}>"


@dataclass(frozen=True)
class Captured:
    """A full graph, the inputs it was captured with, the guards under which it holds, and its result."""

    graph_module: Any
    guards: tuple[Any, ...]
    example_inputs: tuple[Any, ...]
    result: Any

    @classmethod
    def of(cls, records: Records, inputs: Sequence[list[Any]], result: Any) -> Captured:
        """The one graph of the collected records; none, or more than one, is an error that says why."""
        if len(records.graphs) != 1:
            why = "; ".join(str(record) for record in (*records.fallbacks, *records.breaks))
            raise KilnError(
                f"{counted(len(records.graphs), 'graph')} captured where one is needed"
                + (f": {why}" if why else ": the function calls no tensor operation")
            )
        (graph,) = records.graphs
        return cls(graph.graph, tuple(graph.guards), tuple(inputs[0]), result)

    def __str__(self) -> str:
        guards = "\n".join(str(guard) for guard in self.guards)
        return f"{source(self.graph_module)}\n\nGuards\n{indented(guards)}"


def counted(n: int, noun: str) -> str:
    """A count with its noun: "1 graph", "2 graphs"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def indented(text: str) -> str:
    """Text moved right by four columns."""
    return "\n".join("    " + line if line else line for line in text.splitlines())


def source(graph_module: Any) -> str:
    """The Python text of a graph."""
    return str(getattr(graph_module, "code", graph_module)).strip()


def graph_text(index: int, record: GraphRecord) -> str:
    """One graph: where it starts, its size, its code, its guards."""
    start = f" from {record.start}" if record.start else ""
    size = f"{counted(record.ops, 'op')}, {counted(record.inputs, 'input')}"
    head = f"Graph {index} of {record.region}{start}: {size}"
    body = indented(source(record.graph))
    guards = "\n".join(str(guard) for guard in record.guards)
    return f"{head}\n{body}" + (f"\n  guards\n{indented(guards)}" if guards else "")


def break_text(index: int, record: BreakRecord) -> str:
    """One break: kind, place, source line, reason and remedy, a line each."""
    lines = [f"Break {index} [{record.kind}] in {record.region}"]
    if record.place:
        lines.append(f"    at {record.place.file}:{record.place.line} in {record.place.function}")
        if record.place.text:
            lines.append(f"       {record.place.text.strip()}")
    lines.append(f"    reason: {record.why}")
    if record.hint:
        lines.append(f"    remedy: {record.hint}")
    return "\n".join(lines)


def listing(title: str, items: Sequence[object]) -> str:
    """A titled list, empty text for none."""
    return f"{title}\n" + indented("\n".join(str(item) for item in items)) if items else ""


def disassembly(code: CodeType | None) -> str:
    """The disassembly of a code object, without nested ones."""
    if code is None:
        return ""
    text = io.StringIO()
    dis.dis(code, depth=0, file=text)
    return text.getvalue().rstrip()
