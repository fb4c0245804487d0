"""Progress: a bar on a terminal for work that takes longer than a second. KILN_PROGRESS=0 silences it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds before a bar appears."""


def watched(items: Sequence[T], title: str) -> Iterator[T]:
    """The items, one after the other, with a bar for a person who waits."""
    if not wanted():
        yield from items
        return
    start, bar, task = perf_counter(), None, None
    try:
        for done, item in enumerate(items):
            if bar is None and perf_counter() - start > PATIENCE:
                bar, task = started(title, len(items))
            if bar is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()


def wanted() -> bool:
    """Whether somebody watches: the error stream is a terminal and KILN_PROGRESS does not forbid it."""
    return os.environ.get("KILN_PROGRESS", "1") not in ("", "0") and sys.stderr.isatty()


def started(title: str, total: int) -> tuple[Any, Any]:
    """A bar that is shown from now on, and its task. What draws it is loaded when one is first needed."""
    console = importlib.import_module("rich.console").Console(stderr=True)
    bar = importlib.import_module("rich.progress").Progress(console=console, transient=True)
    bar.start()
    return bar, bar.add_task(title, total=total)
