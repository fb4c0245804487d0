"""Frames of Kiln's own that stand between those of a program: tracebacks leave them out."""

from __future__ import annotations

import types

from kiln import _hook


def hide(*modules: types.ModuleType) -> None:
    """Keep the functions of these modules out of tracebacks, but for the one that raises."""
    for module in modules:
        for value in vars(module).values():
            if getattr(value, "__module__", None) == module.__name__:
                _hide(value)


def _hide(value: object) -> None:
    match value:
        case types.FunctionType():
            _hide(value.__code__)
        case type():
            for member in vars(value).values():
                if not isinstance(member, type):
                    _hide(member)
        case staticmethod() | classmethod():
            _hide(value.__func__)
        case types.CodeType():
            _hook.hide(value, _hook.INNER)
            for const in value.co_consts:
                _hide(const)
