"""Keeps torch's eager library from importing torch's compiler behind our back."""

from __future__ import annotations

import sys
from types import CellType, FunctionType
from typing import Any

import torch

_LAZY_FILE = torch._disable_dynamo.__code__.co_filename
_KERNEL_MODULES = (
    "torch._refs", "torch._refs.nn.functional", "torch._refs.special", "torch._refs.linalg",
    "torch._refs.fft", "torch._refs._conversions", "torch._decomp.decompositions",
    "torch._meta_registrations",
)  # fmt: skip


def keep_compiler_out() -> None:
    """Stop torch's Python meta kernels from importing torch's compiler on their first call.

    Each elementwise kernel is wrapped in a function that imports it to mark the kernel as not to be traced,
    and keeps the marked kernel on the kernel itself: putting the kernel there first makes the import
    unnecessary.
    """
    check_quietly()
    modules = [vars(sys.modules[name]) for name in _KERNEL_MODULES if name in sys.modules]
    work = [value for names in modules for value in names.values() if isinstance(value, FunctionType)]
    seen: set[int] = set()
    while work:
        function = work.pop()
        if id(function) in seen or not function.__closure__:
            continue
        seen.add(id(function))
        held = map(_contents, function.__closure__)
        inner: list[Any] = [value for value in held if isinstance(value, FunctionType)]
        work += inner
        if function.__code__.co_filename == _LAZY_FILE:
            for kernel in inner:
                if not hasattr(kernel, "__dynamo_disable"):
                    kernel.__dynamo_disable = kernel


def check_quietly() -> None:
    """Let torch's checks of plain conditions that hold return before they import symbolic shapes."""
    original = torch._check_with
    if getattr(original, "quiet", False):
        return

    def check_with(error_type: Any, cond: Any, message: Any) -> None:
        if cond is not True:
            original(error_type, cond, message)

    check_with.quiet = True  # type: ignore[attr-defined]
    torch._check_with = check_with


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
