"""Redirect: `torch.compile` and its companions answered by Kiln, until undone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kiln.base import log
from kiln.base.options import MODES, OPTION_NAMES

FOREIGN_BACKENDS = {"inductor": "kiln"}
"""Names of other compilers' backends that Kiln's stand in for."""

FOREIGN_ARGUMENTS = frozenset({"name", "recompile_limit", "isolate_recompiles", "shapes_spec"})
"""Arguments of `torch.compile` that Kiln has no use for."""

_lock = threading.RLock()
_before: dict[tuple[Any, str], Any] = {}


class Redirection:
    """The redirection in force; `undo` it, or use it in a with statement."""

    def undo(self) -> None:
        """Give the functions of torch back."""
        undo()

    def __enter__(self) -> Redirection:
        return self

    def __exit__(self, *error: object) -> None:
        undo()


def redirect(functions: Mapping[tuple[Any, str], Callable[..., Any]]) -> Redirection:
    """Put these functions in the place of (owner, name); those in force already stay."""
    with _lock:
        for (owner, name), function in functions.items():
            if (owner, name) not in _before:
                _before[owner, name] = getattr(owner, name)
                setattr(owner, name, function)
    return Redirection()


def undo() -> None:
    """Give every redirected function back; nothing happens when none is."""
    with _lock:
        while _before:
            (owner, name), function = _before.popitem()
            setattr(owner, name, function)


def torch_compile(compile: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for `torch.compile` that hands over to `compile`, without what means nothing to Kiln."""

    def compile_with_kiln(model: Any = None, **arguments: Any) -> Any:
        for name in FOREIGN_ARGUMENTS & arguments.keys():
            del arguments[name]
        backend = arguments.get("backend") or "inductor"
        if isinstance(backend, str) and backend in FOREIGN_BACKENDS:
            arguments["backend"] = FOREIGN_BACKENDS[backend]
            if arguments.get("mode") not in (None, *MODES):
                arguments["mode"] = None
            options = arguments.get("options") or {}
            dropped = sorted(options.keys() - set(OPTION_NAMES))
            if dropped:
                log.warn_once(("options", *dropped), f"without effect here: options {', '.join(dropped)}")
            arguments["options"] = {name: value for name, value in options.items() if name in OPTION_NAMES}
        return compile(model, **arguments)

    compile_with_kiln.__name__ = "compile"
    compile_with_kiln.__doc__ = torch.compile.__doc__
    return compile_with_kiln
