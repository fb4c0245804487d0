"""Explain: records of one run as something to read and to test."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.errors import KilnError
from kiln.base.records import Records
from kiln.bytecode.decompile import became, beside
from kiln.observe.facts import Fact, facts


def _listed(kind: str) -> Any:
    """The records of one kind, in order."""
    return property(lambda explanation: tuple(getattr(explanation.records, kind)))


@dataclass(frozen=True)
class Explanation:
    """What one run captured: graphs, breaks, recompiles, fallbacks, residual bytecode; and its result."""

    records: Records
    result: Any

    @property
    def facts(self) -> Fact:
        """All of it as plain data."""
        return facts(self.records)

    graph_records = _listed("graphs")
    breaks = _listed("breaks")
    recompiles = _listed("recompiles")
    fallbacks = _listed("fallbacks")
    residuals = _listed("residuals")

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

    def code(self) -> str:
        """The text of the graphs."""
        return "\n\n".join(f"{r.name}:\n{indented(source(r.graph))}" for r in self.graph_records)

    def bytecode(self) -> str:
        """What each frame became, as lines that read like Python."""
        return "\n".join(
            "\n".join([f"{r.region}:", *became(r.code, r.graph, r.broke)])
            for r in self.residuals
            if r.code is not None and r.original is not None
        )

    def beside(self) -> str:
        """What each frame became, beside its source."""
        return "\n\n".join(
            f"{r.region}\n{beside(r.original, r.code, r.graph, r.broke)}"
            for r in self.residuals
            if r.code is not None and r.original is not None
        )

    def summary(self) -> str:
        """One line of counts."""
        return str(_tables().summary(self.facts))

    def __str__(self) -> str:
        """The tables as text of a fixed width."""
        return str(_tables().text(self.facts))

    def __rich__(self) -> Any:
        return _tables().shown(self.facts)

    def __repr__(self) -> str:
        return f"<Explanation: {self.summary()}>"


def _tables() -> Any:
    """What draws tables is loaded when one is first needed."""
    return importlib.import_module("kiln.observe.tables")


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
            count = len(records.graphs)
            raise KilnError(
                f"{count} {'graph' if count == 1 else 'graphs'} captured where one is needed"
                + (f": {why}" if why else ": the function calls no tensor operation")
            )
        (graph,) = records.graphs
        return cls(graph.graph, tuple(graph.guards), tuple(inputs[0]), result)

    def __str__(self) -> str:
        guards = "\n".join(str(guard) for guard in self.guards)
        return f"{source(self.graph_module)}\n\nGuards\n{indented(guards)}"


def indented(text: str) -> str:
    """Text moved right by four columns."""
    return "\n".join("    " + line if line else line for line in text.splitlines())


def source(graph_module: Any) -> str:
    """The Python text of a graph."""
    return str(getattr(graph_module, "code", graph_module)).strip()
