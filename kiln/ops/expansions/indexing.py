"""Expansions of reads and writes at places given by tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kiln.ops.expansions.support import HALF, number, zero
from kiln.ops.table import Rule, aten, expansion, expansions


def _at(dim: int, x: Tensor, index: Tensor) -> list[Tensor | None]:
    """Indices that pick places of one dimension."""
    return [None] * (dim % x.dim()) + [index.reshape(-1)]


def _has_places(x: Tensor) -> bool:
    """Whether places of a dimension mean anything: eager takes any for some tensors without elements."""
    return bool(x.dim()) and 0 not in x.shape


def _filled(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Any:
    return aten.index_put(x, _at(dim, x, index), value) if _has_places(x) else NotImplemented


@expansion(aten.index_put.default, complex_too=True)
def index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """At level prims: one value under a mask is a choice, for each element."""
    if accumulate or len(indices) != 1 or indices[0] is None or indices[0].dtype is not torch.bool:
        return NotImplemented
    if values.numel() != 1:
        return NotImplemented
    mask = indices[0]
    mask = mask.view([*mask.shape, *[1] * (x.dim() - mask.dim())])
    return torch.where(mask, values.view(()), x)


@expansion(aten.index_copy.default, complex_too=True)
def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    if not _has_places(x) or source.dim() != x.dim():
        return NotImplemented
    return aten.index_put(x, _at(dim, x, index), source)


@expansion(aten.index_add.default)
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Any:
    if not _has_places(x) or source.dim() != x.dim() or x.dtype in HALF or x.dtype is torch.bool:
        return NotImplemented
    return aten.index_put(x, _at(dim, x, index), source if alpha == 1 else source * alpha, True)


CHOSEN: dict[str, Rule] = {
    "index_select": lambda x, dim, index: aten.index(x, _at(dim, x, index)) if x.dim() else NotImplemented,
    "_unsafe_index.Tensor": lambda x, indices: aten.index(x, indices),
    "_unsafe_index_put": lambda x, indices, *given: aten.index_put(x, indices, *given),
    "index_fill.int_Scalar": lambda x, dim, index, value: _filled(x, dim, index, number(value, x)),
    "index_fill.int_Tensor": lambda x, dim, index, value: _filled(x, dim, index, value.to(x.dtype)),
    "take": lambda x, index: aten.index(x.reshape(-1), [index]),
    "embedding": lambda weight, index, *_, **__: (
        aten.index(weight, [index]) if weight.dim() == 2 else NotImplemented
    ),
}
expansions(CHOSEN, complex_too=True)


@expansion(aten.embedding_dense_backward.default)
def embedding_backward(grad: Tensor, index: Tensor, rows: int, padding: int, scale_by_freq: bool) -> Any:
    # Half types: eager adds in float32, index_add in the type itself.
    if scale_by_freq or grad.dtype in HALF:
        return NotImplemented
    if padding >= 0:
        grad = torch.where((index == padding).unsqueeze(-1), zero(grad), grad)
    table = grad.new_zeros([rows, grad.shape[-1]])
    return aten.index_add(table, 0, index.reshape(-1), grad.reshape(index.numel(), grad.shape[-1]))


# Nearest neighbours


def _nearest(x: Tensor, sizes: list[int], scales: tuple[Any, ...], exact: bool) -> Tensor:
    for i, (size, scale) in enumerate(zip(sizes, scales, strict=True)):
        dim = x.dim() - len(sizes) + i
        extent = x.shape[dim]
        # Eager computes places in float32: so must this, or borders shift by one.
        ratio = 1 / scale if scale is not None and scale > 0 else extent / size
        if _in_whole_steps(size, extent, ratio, exact):
            places = torch.div(torch.arange(size, device=x.device), size // extent, rounding_mode="floor")
            x = aten.index(x, [None] * dim + [places])
            continue
        step = torch.full((), ratio, dtype=torch.float32, device=x.device)
        places = torch.arange(size, device=x.device).to(torch.float32)
        places = torch.floor(((places + 0.5) if exact else places) * step).to(torch.int64)
        places = torch.clamp(places, 0, extent - 1)
        x = aten.index(x, [None] * dim + [places])
    return x


def _in_whole_steps(size: Any, extent: Any, ratio: float, exact: bool) -> bool:
    """Whether each place is taken equally often, one after the other."""
    if type(size) is not int or type(extent) is not int or size % extent:
        return False
    turns = np.arange(size, dtype=np.float32) + np.float32(0.5 if exact else 0)
    return np.array_equal(np.floor(turns * np.float32(ratio)), np.arange(size) // (size // extent))


def _upsampled(exact: bool, x: Tensor, sizes: list[int], *scales: Any) -> Any:
    given = scales + (None,) * (len(sizes) - len(scales))
    return NotImplemented if 0 in x.shape else _nearest(x, sizes, given, exact)


expansions({
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d": partial(_upsampled, False),
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d":
        partial(_upsampled, True),
})  # fmt: skip
