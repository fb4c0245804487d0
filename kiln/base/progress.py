"""Progress: long work is shown to a person who waits, as a bar on a terminal and as lines in a log.

Work that takes less than a second is not shown, and none with KILN_PROGRESS=0.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import INFO
from time import perf_counter
from typing import Any, TypeVar

from kiln.base.dataclass import dataclass
from kiln.base.log import logger

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds before work is shown."""
PAUSE = 0.1
"""Seconds between two looks at what is shown."""


@dataclass(slots=True)
class Work:
    """Something that takes time: `done` of `total` parts, or no parts."""

    title: str
    start: float
    done: int = 0
    total: int | None = None


def wanted() -> bool:
    """Whether progress may be shown at all."""
    return os.environ.get("KILN_PROGRESS", "1") not in ("", "0")


@contextmanager
def working(title: str, total: int | None = None) -> Iterator[Work]:
    """Show this work while the block runs, once it has taken long enough."""
    work = Work(title, perf_counter(), total=total)
    if not wanted():
        yield work
        return
    watched_by_person = sys.stderr.isatty()
    if watched_by_person:
        _screen.enter(work)
    try:
        yield work
    finally:
        if watched_by_person:
            _screen.leave(work)
        elif (seconds := perf_counter() - work.start) > PATIENCE and logger.isEnabledFor(INFO):
            logger.info("%s took %.1f s", title, seconds)


def watched(items: Sequence[T], title: str) -> Iterator[T]:
    """The items, one after the other, with a bar for a person who waits."""
    with working(title, len(items)) as work:
        for item in items:
            yield item
            work.done += 1


class Screen:
    """The bar of this process: a thread draws the innermost work, once the outermost has taken long."""

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def enter(self, work: Work) -> None:
        with self._lock:
            self._works.append(work)
            if len(self._works) == 1:
                self._ended = threading.Event()
                drawing = threading.Thread(target=self._draw, args=(self._ended,), daemon=True)
                drawing.start()

    def leave(self, work: Work) -> None:
        with self._lock:
            self._works.remove(work)
            if not self._works:
                self._ended.set()

    def _draw(self, ended: threading.Event) -> None:
        """Show what is at work until nothing is."""
        if ended.wait(PATIENCE):
            return
        bar, task = started("")
        try:
            while not ended.is_set():
                for work in self._works[-1:]:
                    bar.update(task, description=work.title, total=work.total, completed=work.done)
                ended.wait(PAUSE)
        finally:
            bar.stop()


_screen = Screen()


def started(title: str) -> tuple[Any, Any]:
    """A bar that is shown from now on, and its task. What draws it is loaded when one is first needed."""
    console = importlib.import_module("rich.console").Console(stderr=True)
    bar = importlib.import_module("rich.progress").Progress(console=console, transient=True)
    bar.start()
    return bar, bar.add_task(title, total=None)
