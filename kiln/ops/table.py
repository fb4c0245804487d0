"""The table of shape rules: one entry an aten overload, from its arguments to fake outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Rule = Callable[..., Any]
F = TypeVar("F", bound=Rule)

#: A rule receives the arguments of the overload as dispatched and returns what the overload returns.
#: `NotImplemented` sends the call on to the meta kernels.
RULES: dict[Any, Rule] = {}

aten = torch.ops.aten


def rule(*overloads: Any) -> Callable[[F], F]:
    """Declare the decorated function as the shape rule of `overloads`."""

    def declare(function: F) -> F:
        for overload in overloads:
            assert overload not in RULES, f"{overload} has two shape rules"
            RULES[overload] = function
        return function

    return declare
