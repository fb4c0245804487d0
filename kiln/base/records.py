"""Records: what capture did, for people and tests. Stages emit them; `collect` and `log` keep them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from dis import Bytecode
from types import CodeType
from typing import Any

from kiln.base import log as lines
from kiln.base.errors import Place

KEPT = 256
"""How many records of each kind the process-wide log keeps."""


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """A graph was captured and handed to the backend; `guards` are those of its entry, each with a `str`."""

    name: str
    graph: Any
    ops: int
    inputs: int
    start: Place | None
    region: str
    guards: tuple[Any, ...] = ()

    def light(self) -> GraphRecord:
        """The record without what keeps the user's objects alive."""
        return replace(self, graph=None, guards=())


@dataclass(frozen=True, slots=True)
class BreakRecord:
    """The graph ended before the end of the frame."""

    kind: str
    place: Place | None
    why: str
    hint: str
    region: str

    def light(self) -> BreakRecord:
        return self

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return f"[{self.kind}]{where}: {self.why}" + (f"; {self.hint}" if self.hint else "")


@dataclass(frozen=True, slots=True)
class RecompileRecord:
    """No entry of the region held; `reasons` names for each entry the first guard that failed."""

    region: str
    reasons: tuple[str, ...]

    def light(self) -> RecompileRecord:
        return self

    def __str__(self) -> str:
        return f"{self.region}: " + " | ".join(self.reasons)


@dataclass(frozen=True, slots=True)
class FallbackRecord:
    """The frame was left to Python; `error` says why."""

    region: str
    error: str

    def light(self) -> FallbackRecord:
        return self

    def __str__(self) -> str:
        return f"{self.region}: {self.error}"


@dataclass(frozen=True, slots=True)
class ResidualRecord:
    """The bytecode that runs in place of the frame."""

    region: str
    code: CodeType | None

    def light(self) -> ResidualRecord:
        return replace(self, code=None)


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """Machine code was made for the kernels of a graph, or found: `source` is compiled, disk or memory."""

    kernels: int
    distinct: int
    """The functions that are launched, after equal ones became one."""
    nests: int
    """The loop nests among them that differ."""
    source: str
    seconds: float

    def light(self) -> CodeRecord:
        return self

    def __str__(self) -> str:
        counts = f"{self.kernels} kernels, {self.distinct} distinct, {self.nests} nests"
        return f"{counts}, {self.source} in {self.seconds * 1000:.0f} ms"


@dataclass(frozen=True, slots=True)
class TunedRecord:
    """Variants of a kernel or a graph were timed: seconds of the usual one and of the best, and its name."""

    kernel: str
    variants: int
    usual: float
    best: float
    schedule: str

    def light(self) -> TunedRecord:
        return self

    def __str__(self) -> str:
        gain = self.usual / self.best
        return f"{self.kernel}: {self.variants} variants, {gain:.2f} times the usual speed by {self.schedule}"


Record = (
    GraphRecord | BreakRecord | RecompileRecord | FallbackRecord | ResidualRecord | CodeRecord | TunedRecord
)


class Records:
    """Records by kind, in order; with `kept`, only the last so many of each, and `totals` counts them all."""

    def __init__(self, kept: int | None = None) -> None:
        self._kept = kept
        self.graphs: MutableSequence[GraphRecord] = self._store()
        self.breaks: MutableSequence[BreakRecord] = self._store()
        self.recompiles: MutableSequence[RecompileRecord] = self._store()
        self.fallbacks: MutableSequence[FallbackRecord] = self._store()
        self.residuals: MutableSequence[ResidualRecord] = self._store()
        self.codes: MutableSequence[CodeRecord] = self._store()
        self.tuned: MutableSequence[TunedRecord] = self._store()
        self.totals: Counter[str] = Counter()

    def _store(self) -> MutableSequence[Any]:
        return [] if self._kept is None else deque(maxlen=self._kept)

    def add(self, record: Record) -> None:
        """Keep one record."""
        kind = KINDS[type(record)]
        self.totals[kind] += 1
        getattr(self, kind).append(record)

    def clear(self) -> None:
        """Forget all records and counts."""
        for kind in KINDS.values():
            getattr(self, kind).clear()
        self.totals.clear()

    def __repr__(self) -> str:
        return f"Records({', '.join(f'{kind}={self.totals[kind]}' for kind in KINDS.values())})"


KINDS: dict[type, str] = {
    GraphRecord: "graphs",
    BreakRecord: "breaks",
    RecompileRecord: "recompiles",
    FallbackRecord: "fallbacks",
    ResidualRecord: "residuals",
    CodeRecord: "codes",
    TunedRecord: "tuned",
}

log = Records(KEPT)
"""The process-wide log: the last records of each kind, without graphs and code, to keep no model alive."""

_lock = threading.Lock()
_collectors: ContextVar[tuple[Records, ...]] = ContextVar("kiln_collectors", default=())


def emit(record: Record) -> None:
    """Hand a record to the collectors of this context and to the log."""
    for collector in _collectors.get():
        collector.add(record)
    with _lock:
        log.add(record.light())
    topic = TOPICS[type(record)]
    if lines.wants(topic):
        lines.say(topic, text_of(record))
    if isinstance(record, GraphRecord) and lines.wants("guards"):
        lines.say("guards", "\n  ".join([record.region, *map(str, record.guards)]))


def text_of(record: Record) -> str:
    """A record as one line of the log."""
    match record:
        case GraphRecord():
            return f"{record.region}: {record.ops} ops, {record.inputs} inputs, from {record.start}"
        case BreakRecord():
            return f"{record.region}: {record}"
        case RecompileRecord():
            return f"{record.region}: {'; '.join(record.reasons)}"
        case FallbackRecord():
            return f"{record.region}: {record.error}"
        case CodeRecord():
            return f"code: {record}"
        case TunedRecord():
            return f"tuned: {record}"
        case _:
            if record.code is None:
                return f"{record.region}: none"
            return f"{record.region}: {record.code.co_qualname}\n{Bytecode(record.code).dis()}"


TOPICS: dict[type, str] = {
    GraphRecord: "graphs",
    BreakRecord: "breaks",
    RecompileRecord: "recompiles",
    FallbackRecord: "fallbacks",
    ResidualRecord: "code",
    CodeRecord: "times",
    TunedRecord: "times",
}


@contextmanager
def collect() -> Iterator[Records]:
    """Collect the full records of what this context captures meanwhile."""
    mine = Records()
    token = _collectors.set((*_collectors.get(), mine))
    try:
        yield mine
    finally:
        _collectors.reset(token)
