"""Tensors that leave a graph without a history and are given another: spent ones, and leaves made in it.

Autograd cannot go back behind a loss once a backward pass in the graph has freed what was saved there. The
program may still hand it out: its history outside is one whose backward pass says what autograd's would.
A leaf that the graph makes, which gradients do not flow to from outside, is made a leaf again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kiln.base.graph import reached


def by(spent: set[Any], outputs: Sequence[Any], call: Callable[[], Any]) -> Any:
    """What a call gives that computes gradients of tensors; nodes of autograd's that it empties are noted."""
    before = history(outputs)
    found = call()
    spent.update(node for node in before if _is_empty(node, type(node)))
    return found


def history(tensors: Sequence[Any]) -> list[Any]:
    """Autograd's nodes behind tensors, each once."""
    last = [node for node in map(_last, tensors) if node is not None]
    return list(reached(last, _before))


def _before(node: Any) -> list[Any]:
    return [before for before, _ in reversed(node.next_functions) if before is not None]


def _last(value: Any) -> Any:
    """The node of autograd's that gave a tensor; None also where autograd refuses to say."""
    try:
        return value.grad_fn
    except RuntimeError:
        return None


def is_spent(spent: set[Any], value: Any) -> bool:
    """Whether a node behind a tensor is one of the emptied."""
    return bool(spent) and value.requires_grad and any(node in spent for node in history([value]))


def ending(spent: set[Any], value: Any, results: Sequence[Any]) -> Callable[[Any], Any] | None:
    """What makes of a result without a history the one that the program has; None for one with its own."""
    is_parameter = value.real_type is torch.nn.Parameter
    if not value.requires_grad:
        return as_frozen if is_parameter else None
    if _last(value) is not None:
        return used_up if is_spent(spent, value) else None
    if value._is_view() and value._base.requires_grad:
        return None  # one taken without grad mode says so of what it shows; or that was written to since
    made = torch.nn.Parameter if is_parameter else as_leaf
    others = [each for each in results if each.requires_grad and not is_spent(spent, each)]
    return None if any(getattr(node, "variable", None) is value for node in history(others)) else made


def _is_empty(node: Any, kind: Any) -> bool:
    """Whether autograd has freed what a node of it had saved."""
    try:
        for name in _saved_by(kind):
            getattr(node, name)
    except RuntimeError:
        return True
    return False


@functools.cache
def _saved_by(kind: Any) -> tuple[str, ...]:
    names = [name for name in dir(kind) if name.startswith("_saved_")]
    return (*names, *(["saved_tensors"] if hasattr(kind, "saved_tensors") else []))


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # Autograd itself says it, of a graph that was gone through.
        with torch.enable_grad():
            gone = torch.zeros((), requires_grad=True).exp()
        gone.backward()
        gone.backward()


def used_up(value: torch.Tensor) -> torch.Tensor:
    """The tensor, with a history that nobody can go back."""
    with torch.enable_grad():
        found: torch.Tensor = _Spent.apply(value.detach().requires_grad_())
    return found


def as_leaf(value: torch.Tensor) -> torch.Tensor:
    """The tensor, as one that requires grad."""
    return value.requires_grad_()


def as_frozen(value: torch.Tensor) -> torch.nn.Parameter:
    """The tensor, as a parameter that does not."""
    return torch.nn.Parameter(value, requires_grad=False)
