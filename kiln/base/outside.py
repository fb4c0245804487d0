"""What code that runs on fakes may change beside what it is given: whether it can, and how it is put back."""

from __future__ import annotations

import dis
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

import torch

MISSING = object()
HOLDING = frozenset({list, dict, set, deque})


class Outside:
    """What methods of an autograd function name beside their own: globals, closures, and what these hold."""

    def __init__(self, cls: type, *names: str) -> None:
        self.globals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.held: list[tuple[Any, Any]] = []
        for name in names:
            function = getattr(cls, name, None)
            function = getattr(function, "__func__", function)
            if isinstance(function, types.FunctionType) and not function.__module__.startswith("torch."):
                self.add(function)

    def add(self, function: types.FunctionType) -> None:
        there = function.__globals__
        found = {name: there.get(name, MISSING) for name in function.__code__.co_names}
        self.globals.append((there, found))
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
        package = function.__module__.partition(".")[0]  # objects of other ones may keep what they need
        for value in [*found.values(), *cells]:
            kind = value if isinstance(value, type) else type(value)
            own = kind.__module__.partition(".")[0] == package and hasattr(value, "__dict__")
            if own or kind in HOLDING and value is not kind:
                self.held.append((value, parts_of(value)))

    def put_back(self) -> bool:
        """Let all hold what it held; whether something did not."""
        changed = False
        for there, found in self.globals:
            for name, value in found.items():
                if there.get(name, MISSING) is not value:
                    changed = True
                    there.update({name: value}) if value is not MISSING else there.pop(name)
        for value, parts in self.held:
            if not same(parts_of(value), parts):
                changed = True
                refill(value, parts)
        return changed


@contextmanager
def going_back(functions: Iterable[type]) -> Iterator[list[type]]:
    """A block in which backwards of autograd functions run on fakes; after it, those that changed something.

    What they changed is put back. Where one printed, any may have.
    """
    outside = {cls: Outside(cls, "backward", "vjp") for cls in functions}
    changed: list[type] = []
    try:
        with unheard() as said:
            yield changed
    finally:
        changed += [cls for cls, there in outside.items() if there.put_back() or said]


class Unheard:
    """A stream that keeps what one thread prints, while it is told to."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.thread, self.said = stream, threading.get_ident(), list[str]()
        self.keeps = True

    def write(self, text: str) -> Any:
        if self.keeps and threading.get_ident() == self.thread:
            self.said.append(text)
            return len(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def unheard() -> Iterator[list[str]]:
    """A block that runs code on fakes: what it prints is not for anybody to see."""
    before, kept = sys.stdout, Unheard(sys.stdout)
    sys.stdout = cast(TextIO, kept)
    try:
        yield kept.said
    finally:
        kept.keeps = False  # other threads may have put it back by then
        if sys.stdout is cast(TextIO, kept):
            sys.stdout = before


def parts_of(value: Any) -> Any:
    """What an object holds, to be compared and put back."""
    if type(value) not in HOLDING:
        return dict(vars(value))
    return dict(value) if isinstance(value, dict) else list(value)


def same(parts: Any, others: Any) -> bool:
    """Whether two such are made of the same objects."""
    if isinstance(parts, dict):
        return parts.keys() == others.keys() and all(others[key] is part for key, part in parts.items())
    return len(parts) == len(others) and all(a is b for a, b in zip(parts, others, strict=True))


def refill(value: Any, parts: Any) -> None:
    if isinstance(value, type):
        for name in vars(value).keys() - parts.keys():
            delattr(value, name)
        for name, part in parts.items():
            if vars(value).get(name, MISSING) is not part:
                setattr(value, name, part)
        return
    held = value if type(value) in HOLDING else value.__dict__
    held.clear()
    getattr(held, "update" if isinstance(held, (dict, set)) else "extend")(parts)


def computes(function: Any) -> bool:
    """Whether a function reads only its arguments and torch, and writes only local variables."""
    if type(function) is not types.FunctionType or function.__closure__ or function.__defaults__:
        return False
    for step in dis.get_instructions(function.__code__):
        if step.opname.startswith(("STORE_", "DELETE_", "IMPORT_", "MAKE_")) and step.opname != "STORE_FAST":
            return False
        home = function.__globals__.get(step.argval) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else torch
        if not str(getattr(home, "__module__", None) or getattr(home, "__name__", "")).startswith("torch"):
            return False
    return True
