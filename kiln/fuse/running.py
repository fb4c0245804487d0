"""Running sums and their like: calls of eager's kernels, along the last dimension.

Each value waits for the one before it, so that loops gain nothing over eager's kernels where those go through
memory in order. Along other dimensions they go through it in steps, up to twenty times slower: there a
transpose before and one after, which are kernels in tiles and fuse with what is around them, pay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kiln.ops.table import aten

#: Elements that are worth two transposes.
MANY = 1 << 12


def along_last(op: Any) -> Callable[..., Any]:
    """An expansion of an op along a dimension: the op along the last one, of what is transposed for it."""

    def expanded(x: torch.Tensor, dim: int, **kwargs: Any) -> Any:
        rank = x.dim()
        if rank < 2 or dim % rank == rank - 1 or not x.is_contiguous() or x.dtype.is_complex:
            return NotImplemented
        if not all(type(n) is int for n in x.shape) or x.numel() < MANY or x.shape[dim] < 2:
            return NotImplemented
        found = op(x.transpose(dim, -1).contiguous(), rank - 1, **kwargs)
        if isinstance(found, tuple):
            return tuple([part.transpose(dim, -1).contiguous() for part in found])
        return found.transpose(dim, -1).contiguous()

    return expanded


RUNNING: dict[Any, Callable[..., Any]] = {
    op: along_last(op)
    for op in (
        aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default,
        aten.logcumsumexp.default,
    )
}  # fmt: skip
