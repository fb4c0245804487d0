"""What compile calls share: options, resume functions, and the entries of functions that are alike."""

from __future__ import annotations

import ast
import threading
import types
from collections import Counter
from dataclasses import field, replace
from inspect import CO_VARARGS
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from kiln import _hook
from kiln.base import options
from kiln.base.dataclass import dataclass
from kiln.base.errors import Break
from kiln.base.options import Compile
from kiln.capture.run import slot_names
from kiln.capture.world import rooted
from kiln.check.guards import Is
from kiln.check.tree import GuardSet

LOCK = threading.RLock()


@dataclass(eq=False)
class Between:
    """What runs between the graphs of one compile call: how it is compiled, regions and resume functions."""

    options: Compile
    resumes: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Family:
    """What the regions of a function share that a compile call leads to, with their resume functions."""

    options: Compile
    between: Between
    raising: Break | None = None  # where the latest capture saw the program raise
    first: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)  # guards of first calls
    resumed: WeakSet[Any] = field(default_factory=WeakSet)  # the regions that go on after breaks
    causes: WeakKeyDictionary[Any, Counter[str]] = field(default_factory=WeakKeyDictionary)  # of recompiles
    modules: int = 1  # how many are called through the region
    settings: Any = field(default_factory=lambda: options.config.now)  # those in force when it was made


def family_of(asked: Compile) -> Family:
    """What the regions of a compile call share."""
    return Family(asked, Between(replace(asked, fullgraph=False)))


class Kept:
    """What the regions of one function share that come of equal compile calls; it leads to a copy of it."""

    def __init__(self, function: types.FunctionType, asked: Compile, most: int | None = None,
                 alike: Alike | None = None) -> None:  # fmt: skip
        self.function, self.family, self.entries = function, family_of(asked), list[Any]()
        self.most, self.alike = most, alike  # how many entries are lent; functions that close over others
        KEPT.add(self)

    def lend(self, region: Any) -> bool:
        """Give a region the entries that it lacks; False where there are so many that it has its own."""
        with LOCK:
            if self.most is not None and len(self.entries) > self.most:
                return False
            own = {id(entry.info) for entry in region.entries}
            for entry in self.entries:
                if id(entry.info) not in own:
                    region.add(entry.guards, entry.run, entry.info)
        return True

    def keep(self, region: Any) -> None:
        """Keep the entries of a region but those that keep something alive that was given to it."""
        with LOCK:
            self.entries = [entry for entry in region.entries if not holds(entry.info.found)]


def holds(found: GuardSet) -> bool:
    """Whether an entry leads to its function, which is left alone, or to a module or tensor of a call."""
    guards, held = found.direct(), (torch.nn.Module, torch.Tensor)
    return not guards or any(
        type(guard) is Is and isinstance(guard.value, held) and not rooted(guard.source) for guard in guards
    )


KEPT: WeakSet[Kept] = WeakSet()


class Alike:
    """Functions of one code that close over different objects of the same kinds.

    From the second on they are given to a function that calls them: what they close over is then read from an
    argument, and entries are good for all of them.
    """

    def __init__(self, code: types.CodeType, asked: Compile) -> None:
        named = asked if asked.name else replace(asked, name=code.co_qualname)
        self.count = 0
        self.kept = Kept(caller_of(code), named, most=asked.setting("cache_limit") // 2)


def caller_of(code: types.CodeType) -> types.FunctionType:
    """A function that calls another one with this code, its first argument, on bound arguments."""
    names, positional = slot_names(code), code.co_argcount
    named = positional + code.co_kwonlyargcount
    signs = ("*", "**") if code.co_flags & CO_VARARGS else ("**",)
    passed = [*names[:positional], *(f"{name}={name}" for name in names[positional:named])]
    passed += [f"{sign}{name}" for sign, name in zip(signs, names[named:], strict=False)]
    tree = ast.parse(f"lambda {', '.join((CALLED, *names))}: {CALLED}({', '.join(passed)})", mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.arg, ast.keyword)):  # columns that tracebacks do not show
            node.lineno = node.end_lineno = code.co_firstlineno
            node.col_offset = node.end_col_offset = 0
    made: types.FunctionType = eval(compile(tree, code.co_filename, "eval"))
    made.__code__ = made.__code__.replace(co_name=code.co_name, co_qualname=code.co_qualname)
    _hook.hide(made.__code__, _hook.HIDDEN)
    return made


CALLED = "__called"


def outline(function: types.FunctionType, depth: int = 4) -> tuple[Any, ...] | None:
    """The kinds of what a function closes over, a hint, as guards tell what differs; None for modules.

    A graph for any module of a class does not know its weights.
    """
    found: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        found.append(id(type(value)))
        if isinstance(value, types.FunctionType):
            inner = outline(value, depth - 1) if depth else ()
            if inner is None:
                return None
            found += (id(value.__code__), inner)
        elif isinstance(value, torch.nn.Module):
            return None
    return tuple(found)
