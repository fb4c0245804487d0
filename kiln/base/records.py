"""Records: what the stages did, for people and tests. Stages emit them; `collect` and `log` keep them.

What costs something to make (an op's place in the source, a kernel's loops, a plan's steps) is made only
while somebody collects: stages ask `listening`.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from types import TracebackType
from typing import Any

from kiln.base import log as lines
from kiln.base.recorded import HEAVY as HEAVY
from kiln.base.recorded import KINDS as KINDS
from kiln.base.recorded import TOPICS as TOPICS
from kiln.base.recorded import BreakRecord as BreakRecord
from kiln.base.recorded import CacheRecord as CacheRecord
from kiln.base.recorded import CodeRecord as CodeRecord
from kiln.base.recorded import Failure as Failure
from kiln.base.recorded import FallbackRecord as FallbackRecord
from kiln.base.recorded import Fused as Fused
from kiln.base.recorded import GraphRecord as GraphRecord
from kiln.base.recorded import KernelRecord as KernelRecord
from kiln.base.recorded import Lodged as Lodged
from kiln.base.recorded import Op as Op
from kiln.base.recorded import PlanRecord as PlanRecord
from kiln.base.recorded import RecompileRecord as RecompileRecord
from kiln.base.recorded import Record as Record
from kiln.base.recorded import ResidualRecord as ResidualRecord
from kiln.base.recorded import StageRecord as StageRecord
from kiln.base.recorded import Step as Step
from kiln.base.recorded import TextRecord as TextRecord
from kiln.base.recorded import TunedRecord as TunedRecord
from kiln.base.recorded import Value as Value
from kiln.base.recorded import ValuesRecord as ValuesRecord

KEPT = 256
"""How many records of each kind the process-wide log keeps."""


class Records:
    """Records by kind, in order; with `kept`, only the last so many of each, and `totals` counts them all.

    Those that are `light` keep nothing of the program's alive and have nothing made that is costly.
    As a context manager it collects what happens meanwhile, in all threads.
    """

    def __init__(self, kept: int | None = None, light: bool = False) -> None:
        self._kept, self.light = kept, light
        self.graphs: MutableSequence[GraphRecord] = self._store()
        self.breaks: MutableSequence[BreakRecord] = self._store()
        self.recompiles: MutableSequence[RecompileRecord] = self._store()
        self.fallbacks: MutableSequence[FallbackRecord] = self._store()
        self.residuals: MutableSequence[ResidualRecord] = self._store()
        self.codes: MutableSequence[CodeRecord] = self._store()
        self.tuned: MutableSequence[TunedRecord] = self._store()
        self.stages: MutableSequence[StageRecord] = self._store()
        self.kernels: MutableSequence[KernelRecord] = self._store()
        self.plans: MutableSequence[PlanRecord] = self._store()
        self.values: MutableSequence[ValuesRecord] = self._store()
        self.texts: MutableSequence[TextRecord] = self._store()
        self.caches: MutableSequence[CacheRecord] = self._store()
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

    def copy(self) -> Records:
        """The records as they are now."""
        made = Records()
        with _lock:
            for kind in KINDS.values():
                getattr(made, kind).extend(getattr(self, kind))
            made.totals.update(self.totals)
        return made

    def __enter__(self) -> Records:
        global _everywhere
        with _lock:
            self.clear()
            _everywhere = (*_everywhere, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _everywhere
        with _lock:
            _everywhere = tuple(one for one in _everywhere if one is not self)

    def __repr__(self) -> str:
        counts = [f"{kind}={self.totals[kind]}" for kind in KINDS.values() if self.totals[kind]]
        return f"Records({', '.join(counts)})"


log = Records(KEPT)
"""The process-wide log: the last records of each kind, without graphs and code, to keep no model alive."""

_lock = threading.Lock()
_collectors: ContextVar[tuple[Records, ...]] = ContextVar("kiln_collectors", default=())
_everywhere: tuple[Records, ...] = ()
_names: Counter[str] = Counter()


def emit(record: Record) -> None:
    """Hand a record to the collectors of this context, to those of all threads, and to the log."""
    topic = TOPICS.get(type(record), "")
    if isinstance(record, HEAVY) and not heard() and not lines.wants(topic):
        return
    light = record.light() if isinstance(record, (GraphRecord, ResidualRecord)) else record
    for collector in (*_collectors.get(), *_everywhere):
        collector.add(light if collector.light else record)
    if not isinstance(record, HEAVY):
        with _lock:
            log.add(light)
    if lines.wants(topic):
        lines.say(topic, str(record))


def heard() -> bool:
    """Whether somebody collects, if only what is light."""
    return bool(_everywhere or _collectors.get())


def listening() -> bool:
    """Whether somebody collects: records that cost something are worth making."""
    return bool(_collectors.get()) or any(not one.light for one in _everywhere)


@contextmanager
def collect() -> Iterator[Records]:
    """Collect the full records of what this context captures meanwhile."""
    mine = Records()
    token = _collectors.set((*_collectors.get(), mine))
    try:
        yield mine
    finally:
        _collectors.reset(token)


class timed:  # noqa: N801
    """Times a stage of a graph: emits its record when the block ends, also by an error, unless for nobody."""

    __slots__ = ("_began", "_half", "_stage", "graph")

    def __init__(self, stage: str, graph: str = "", half: str = "") -> None:
        self._stage, self.graph, self._half = stage, graph, half

    def __enter__(self) -> timed:
        self._began = perf_counter() if heard() or lines.wants("time") else 0.0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if began := self._began:
            emit(StageRecord(self.graph, self._stage, self._half, began, perf_counter() - began))


def unique(region: str) -> str:
    """A name for the next graph of a region: no other graph of the process has it."""
    with _lock:
        number = _names[region]
        _names[region] += 1
    return f"{region}#{number}" if number else region


def forget() -> None:
    """Empty the log, and number graphs from the start again."""
    with _lock:
        log.clear()
        _names.clear()
