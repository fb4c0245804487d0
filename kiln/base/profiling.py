"""Ranges in traces of torch.profiler: graphs, kernels and calls by name, while a profile is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import record_function as record_function

active: list[Any] = []
"""One item for each profile that is on: generated code that finds it not empty runs with marks."""


def begin(name: str) -> Callable[[], None]:
    """Begin a range; gives what ends it."""
    made = record_function(name)
    made.__enter__()

    def end() -> None:
        made.__exit__(None, None, None)

    return end
