"""torch's global switches: what programs and graphs may flip, how to put it back, and what is left to set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kiln.base import strict

Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _are_deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _autocast(device: str) -> list[Switch]:
    bound = functools.partial
    return [
        (bound(torch.is_autocast_enabled, device), bound(torch.set_autocast_enabled, device)),
        (bound(torch.get_autocast_dtype, device), bound(torch.set_autocast_dtype, device)),
    ]


def _refuse_saved_hooks(message: str | None) -> None:
    """With which words hooks on saved tensors are refused, if they are."""
    if message is None:
        torch._C._autograd._saved_tensors_hooks_enable()
    else:
        torch._C._autograd._saved_tensors_hooks_disable(message)


@functools.cache
def _settle_order() -> None:
    """Have torch choose the order of attention's kernels on the GPU: it does so at the first attention."""
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        one = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(one, one, one)


def _attention() -> list[Switch]:
    """Which kernels attention may use."""
    kinds = ("flash", "math", "mem_efficient", "cudnn", "overrideable")
    names = [(f"_get_{kind}_sdp_enabled", f"_set_sdp_use_{kind}") for kind in kinds]
    return _switches([*names, ("_get_sdp_priority_order", "_set_sdp_priority_order")])


def _switches(names: list[tuple[str, str]]) -> list[Switch]:
    space = vars(torch._C)
    return [(space[read], space[write]) for read, write in names if read in space and write in space]


ATTENTION = _attention()
#: What libraries of kernels may do.
LIBRARIES = """cudnn_enabled cudnn_benchmark cudnn_deterministic cudnn_allow_tf32 cudnn_depthwise_kernel
    mkldnn_enabled mkldnn_deterministic""".split()
SWITCHES: tuple[Switch, ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    *_autocast("cpu"),
    *_autocast("cuda"),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.get_default_dtype, torch._C._set_default_dtype),
    (_are_deterministic, _deterministic),
    (torch._C._autograd._saved_tensors_hooks_get_disabled_error_message, _refuse_saved_hooks),
    *ATTENTION,
    *_switches([(f"_get_{name}", f"_set_{name}") for name in LIBRARIES]),
    (strict.now, strict.put),
)


def snapshot() -> tuple[Any, ...]:
    """The values of all switches."""
    if torch.cuda.is_initialized():  # what torch chooses during a capture would be undone after it
        _settle_order()
    return tuple([read() for read, _ in SWITCHES])


def restore(before: tuple[Any, ...]) -> None:
    """Put the switches back to a snapshot."""
    for (read, write), value in zip(SWITCHES, before, strict=True):
        if read() != value:
            write(value)


_set_tracing = getattr(torch._C._autograd, "_saved_tensors_hooks_set_tracing", bool)


@contextmanager
def unhooked() -> Iterator[None]:
    """The user's hooks on saved tensors are meant for real tensors: meanwhile they stay silent."""
    was = _set_tracing(True)
    try:
        yield
    finally:
        _set_tracing(was)


def difference(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[tuple[Callable[[Any], Any], Any]]:
    """The writes that lead from one snapshot to another."""
    return [(write, new) for (_, write), old, new in zip(SWITCHES, before, after, strict=True) if old != new]


def guarded(graph: Callable[..., Any], left: tuple[Any, ...] | None = None) -> Callable[..., Any]:
    """A graph that flips switches; when it raises they are put to `left`, or back to what it found."""

    def run(*args: Any) -> Any:
        before = left or snapshot()
        try:
            return graph(*args)
        except BaseException:
            restore(before)
            raise

    return run
