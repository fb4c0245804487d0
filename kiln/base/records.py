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
from typing import Any

from kiln.base import log as lines
from kiln.base import recorded as kinds
from kiln.base.recorded import *  # noqa: F403  (the kinds of records are asked of this module)

KEPT = 256
"""How many records of each kind the process-wide log keeps."""


class Records:
    """Records by kind, in order; with `kept`, only the last so many of each, and `totals` counts them all.

    Those that are `light` keep nothing of the program's alive and have nothing made that is costly.
    As a context manager it collects what happens meanwhile, in all threads.
    """

    def __init__(self, kept: int | None = None, light: bool = False) -> None:
        self._kept, self.light = kept, light
        self.graphs: MutableSequence[kinds.GraphRecord] = self._store()
        self.breaks: MutableSequence[kinds.BreakRecord] = self._store()
        self.recompiles: MutableSequence[kinds.RecompileRecord] = self._store()
        self.fallbacks: MutableSequence[kinds.FallbackRecord] = self._store()
        self.residuals: MutableSequence[kinds.ResidualRecord] = self._store()
        self.codes: MutableSequence[kinds.CodeRecord] = self._store()
        self.tuned: MutableSequence[kinds.TunedRecord] = self._store()
        self.stages: MutableSequence[kinds.StageRecord] = self._store()
        self.kernels: MutableSequence[kinds.KernelRecord] = self._store()
        self.plans: MutableSequence[kinds.PlanRecord] = self._store()
        self.values: MutableSequence[kinds.ValuesRecord] = self._store()
        self.texts: MutableSequence[kinds.TextRecord] = self._store()
        self.caches: MutableSequence[kinds.CacheRecord] = self._store()
        self.totals: Counter[str] = Counter()

    def _store(self) -> MutableSequence[Any]:
        return [] if self._kept is None else deque(maxlen=self._kept)

    def add(self, record: kinds.Record) -> None:
        """Keep one record."""
        kind = kinds.KINDS[type(record)]
        self.totals[kind] += 1
        getattr(self, kind).append(record)

    def clear(self) -> None:
        """Forget all records and counts."""
        for kind in kinds.KINDS.values():
            getattr(self, kind).clear()
        self.totals.clear()

    def copy(self) -> Records:
        """The records as they are now."""
        made = Records()
        with _lock:
            for kind in kinds.KINDS.values():
                getattr(made, kind).extend(getattr(self, kind))
            made.totals.update(self.totals)
        return made

    def __enter__(self) -> Records:
        global _everywhere
        with _lock:
            self.clear()
            _everywhere = (*_everywhere, self)
        return self

    def __exit__(self, *error: object) -> None:
        global _everywhere
        with _lock:
            _everywhere = tuple(one for one in _everywhere if one is not self)

    def __repr__(self) -> str:
        counts = [f"{kind}={self.totals[kind]}" for kind in kinds.KINDS.values() if self.totals[kind]]
        return f"Records({', '.join(counts)})"


log = Records(KEPT)
"""The process-wide log: the last records of each kind, without graphs and code, to keep no model alive."""

_lock = threading.Lock()
_collectors: ContextVar[tuple[Records, ...]] = ContextVar("kiln_collectors", default=())
_everywhere: tuple[Records, ...] = ()
_names: Counter[str] = Counter()


def emit(record: kinds.Record) -> None:
    """Hand a record to the collectors of this context, to those of all threads, and to the log."""
    topic = kinds.TOPICS.get(type(record), "")
    if isinstance(record, kinds.HEAVY) and not heard() and not lines.wants(topic):
        return
    light = record.light() if isinstance(record, (kinds.GraphRecord, kinds.ResidualRecord)) else record
    for collector in (*_collectors.get(), *_everywhere):
        collector.add(light if collector.light else record)
    if not isinstance(record, kinds.HEAVY):
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

    def __exit__(self, *error: object) -> None:
        if began := self._began:
            emit(kinds.StageRecord(self.graph, self._stage, self._half, began, perf_counter() - began))


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
