"""Hooked: runs a block with the frame hook on, with regions for chosen functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kiln import _hook


class Hooked:
    """Regions by function; frames of other functions are left alone."""

    def __init__(self, miss: Callable[..., Any], *functions: Callable[..., Any]) -> None:
        self.asked: list[str] = []
        self.regions = {function: _hook.Region(function, miss) for function in functions}

    def __call__(self, function: Callable[..., Any], argv: tuple[Any, ...]) -> _hook.Region | None:
        self.asked.append(function.__name__)
        return self.regions.get(function)


@contextmanager
def hooked(miss: Callable[..., Any], *functions: Callable[..., Any]) -> Iterator[Hooked]:
    callback = Hooked(miss, *functions)
    before = _hook.set_frame_callback(callback)
    _hook.skip(miss.__code__)
    for function in functions:
        _hook.forget(function.__code__)
    _hook.enter()
    try:
        yield callback
    finally:
        _hook.leave()
        _hook.set_frame_callback(before)
