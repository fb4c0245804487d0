"""Expansions of views, pieces, joins and borders."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from kiln.ops.expansions.support import zero
from kiln.ops.table import Rule, aten, expansion, expansions


@expansion(aten.transpose.int, complex_too=True)
def transpose(x: Tensor, a: int, b: int) -> Tensor:
    order = list(range(x.dim()))
    if order:
        order[a], order[b] = order[b], order[a]
    return x.permute(order)


@expansion(aten.unsqueeze.default, complex_too=True)
def unsqueeze(x: Tensor, dim: int) -> Tensor:
    shape = list(x.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return x.view(shape)


@expansion(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, complex_too=True)
def squeeze(x: Tensor, dims: Any = None) -> Tensor:
    rank = max(x.dim(), 1)
    if dims is None:
        gone = set(range(rank))
    else:
        gone = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    return x.view([n for d, n in enumerate(x.shape) if d not in gone or n != 1])


def _pieces(x: Tensor, sizes: list[int], dim: int = 0) -> list[Tensor]:
    out, start = [], 0
    for size in sizes:
        out.append(aten.slice(x, dim, start, start + size))
        start = start + size
    return out


@expansion(aten.split.Tensor, aten.unsafe_split.Tensor, complex_too=True)
def split(x: Tensor, size: int, dim: int = 0) -> Any:
    whole = x.shape[dim]
    if size <= 0 or whole == 0:
        return NotImplemented
    return _pieces(x, [min(size, whole - start) for start in range(0, whole, size)], dim)


@expansion(aten.cat.default, complex_too=True)
def cat(tensors: list[Tensor], dim: int = 0) -> Any:
    """At level prims: the parts are of one dtype."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) == 1:
        return NotImplemented
    dtype = reduce(torch.promote_types, dtypes)
    return torch.cat([x.to(dtype) for x in tensors], dim)


@expansion(aten.repeat.default, complex_too=True)
def repeat(x: Tensor, repeats: list[int]) -> Any:
    if 0 in repeats or 0 in x.shape:
        return NotImplemented
    shape = [1] * (len(repeats) - x.dim()) + list(x.shape)
    if all(n == 1 or r == 1 for n, r in zip(shape, repeats)):
        expanded = x.view(shape).expand([n * r for n, r in zip(shape, repeats)])
        return expanded.clone(memory_format=torch.contiguous_format)
    apart = x.view([n for size in shape for n in (1, size)])
    expanded = apart.expand([n for size, r in zip(shape, repeats) for n in (r, size)])
    copied = expanded.clone(memory_format=torch.contiguous_format)
    return copied.view([n * r for n, r in zip(shape, repeats)])


@expansion(aten.roll.default, complex_too=True)
def roll(x: Tensor, shifts: list[int], dims: list[int] = []) -> Any:  # noqa: B006
    if 0 in x.shape or not x.dim():
        return NotImplemented
    if not dims:
        return torch.roll(x.reshape(-1), shifts, 0).view(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        cut = (size - shift) % size
        x = torch.cat([aten.slice(x, dim, cut, size), aten.slice(x, dim, 0, cut)], dim) if cut else x.clone()
    return x


def _shuffled(x: Tensor, apart: list[int], order: list[int], together: list[int]) -> Any:
    """The last dimensions of `x` taken apart, put into another order, and joined again."""
    if 0 in x.shape:
        return NotImplemented
    lead = list(x.shape[:-3])
    moved = x.view(lead + apart).permute([*range(len(lead)), *[len(lead) + d for d in order]])
    return moved.clone(memory_format=torch.contiguous_format).view(lead + together)


def pixel_shuffle(x: Tensor, factor: int) -> Any:
    c, h, w = x.shape[-3:]
    c = c // factor**2
    return _shuffled(x, [c, factor, factor, h, w], [0, 3, 1, 4, 2], [c, h * factor, w * factor])


def pixel_unshuffle(x: Tensor, factor: int) -> Any:
    c, h, w = x.shape[-3], x.shape[-2] // factor, x.shape[-1] // factor
    return _shuffled(x, [c, h, factor, w, factor], [0, 2, 4, 1, 3], [c * factor**2, h, w])


# Gradients of views, and writes into them


def _padded(x: Tensor, dim: int, before: Any, after: Any) -> Tensor:
    """Zeros before and after `x` along a dimension."""
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [before, after])


@expansion(aten.slice_backward.default, complex_too=True)
def slice_backward(grad: Tensor, sizes: list[int], dim: int, start: int, end: int, step: int) -> Any:
    dim, size = dim % len(sizes), sizes[dim]
    if 0 in grad.shape:
        return grad.new_zeros(sizes)
    if step != 1:
        return torch.slice_scatter(grad.new_zeros(sizes), grad, dim, start, end, step)
    first = max(start + size, 0) if start < 0 else start
    return _padded(grad, dim, first, size - first - grad.shape[dim])


@expansion(aten.select_backward.default, complex_too=True)
def select_backward(grad: Tensor, sizes: list[int], dim: int, index: int) -> Any:
    dim, size = dim % len(sizes), sizes[dim]
    place = index + size if index < 0 else index
    return _padded(grad.unsqueeze(dim), dim, place, size - place - 1)


@expansion(aten.select_scatter.default, complex_too=True)
def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Any:
    place = index + x.shape[dim] if index < 0 else index
    return torch.slice_scatter(x, source.unsqueeze(dim), dim, place, place + 1)


@expansion(aten.constant_pad_nd.default, complex_too=True)
def constant_pad(x: Tensor, pad: list[int], value: Any = 0) -> Any:
    """At level prims: a border is not negative; what it cuts off is a slice."""
    if all(n >= 0 for n in pad):
        return NotImplemented
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2])):
        dim = x.dim() - 1 - i
        if before < 0 or after < 0:
            x = aten.slice(x, dim, max(-before, 0), x.shape[dim] - max(-after, 0))
    grown = [max(n, 0) for n in pad]
    return torch.constant_pad_nd(x, grown, value) if any(grown) else x.clone()


# Triangles


def _below(x: Tensor, diagonal: int) -> Tensor:
    """Whether an element of the last two dimensions lies on or below a diagonal."""
    rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
    return torch.arange(x.shape[-1], device=x.device) - rows <= diagonal


# Borders that repeat the inside


def _bordered(x: Tensor, pad: list[int], edges: Any) -> Any:
    """`x` between borders, or cut: `edges(x, dim, before, after)` makes the borders of a dimension."""
    if 0 in x.shape:
        return NotImplemented
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2])):
        dim = x.dim() - 1 - i
        first, last = edges(x, dim, max(before, 0), max(after, 0))
        parts = [part for part, wide in ((first, before > 0), (x, True), (last, after > 0)) if wide]
        x = torch.cat(parts, dim) if len(parts) > 1 else x
        if before < 0 or after < 0:
            x = aten.slice(x, dim, max(-before, 0), x.shape[dim] - max(-after, 0))
    return x


def _mirrored(x: Tensor, dim: int, before: int, after: int) -> tuple[Tensor, Tensor]:
    last = x.narrow(dim, x.shape[dim] - 1 - after, after)
    return x.narrow(dim, 1, before).flip(dim), last.flip(dim)


def _repeated(x: Tensor, dim: int, before: int, after: int) -> tuple[Tensor, Tensor]:
    def edge(place: int, count: int) -> Tensor:
        return x.narrow(dim, place, 1).expand([count if d == dim else -1 for d in range(x.dim())])

    return edge(0, before), edge(x.shape[dim] - 1, after)


VIEWS: dict[str, Rule] = {
    "detach alias lift lift_fresh": lambda x: x,
    "_unsafe_view": lambda x, size: x.view(size),
    "_reshape_alias": lambda x, size, stride: x.view(size),
    "t": lambda x: x.permute(list(range(x.dim()))[::-1]),
    "unbind.int": lambda x, dim=0: [x.select(dim, i) for i in range(x.shape[dim])],
    "split_with_sizes unsafe_split_with_sizes": _pieces,
    "stack": lambda tensors, dim=0: torch.cat([x.unsqueeze(dim) for x in tensors], dim),
    "diagonal_backward": lambda grad, sizes, *where: torch.diagonal_scatter(
        grad.new_zeros(sizes), grad, *where
    ),
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
}
expansions(VIEWS, complex_too=True)
CHOICES: dict[str, Rule] = {
    "tril": lambda x, diagonal=0: torch.where(_below(x, diagonal), x, zero(x)),
    "triu": lambda x, diagonal=0: torch.where(_below(x, diagonal - 1), zero(x), x),
    "reflection_pad1d reflection_pad2d reflection_pad3d": lambda x, pad: _bordered(
        x, pad, _mirrored
    ),
    "replication_pad1d replication_pad2d replication_pad3d": lambda x, pad: _bordered(
        x, pad, _repeated
    ),
}
expansions(CHOICES)
