"""Primitives that loop nests do better as smaller ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kiln.ops.table import aten


def _var_mean(
    x: torch.Tensor, dims: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    """Two passes over a row that stays in the cache."""
    dims = list(range(x.dim())) if not dims else [d % x.dim() for d in dims]
    if not x.dim() or not x.is_floating_point():
        return NotImplemented
    count: Any = 1
    for d in dims:
        count = count * x.shape[d]
    if type(count) is not int or not count:
        return NotImplemented
    mean = aten.sum.dim_IntList(x, dims, True) / float(count)
    centred = x - mean
    divisor = count - (1 if correction is None else correction)
    spread = aten.sum.dim_IntList(centred * centred, dims, keepdim) / float(max(divisor, 0))
    if not keepdim:
        mean = mean.reshape([n for d, n in enumerate(x.shape) if d not in dims])
    return spread, mean


#: Expansions in addition to those of the level of primitives.
FOR_LOOPS: dict[Any, Callable[..., Any]] = {aten.var_mean.correction: _var_mean}
