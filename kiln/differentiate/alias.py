"""Which tensors of a call share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kiln.differentiate.joint import Layout, Storage
from kiln.ops.meta import reach


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte and the byte after the last that a tensor can reach in its storage."""
    size = tensor.element_size()
    return tensor.storage_offset() * size, reach(tensor) * size


def overlapping(values: Sequence[Any]) -> list[list[int]]:
    """The groups, by position, of tensors whose extents in memory overlap; alone ones are in no group."""
    by_storage: dict[int, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            by_storage.setdefault(value.untyped_storage()._cdata, []).append(i)
    groups: list[list[int]] = []
    for members in by_storage.values():
        if len(members) > 1:
            groups += _runs(sorted((*extent(values[i]), i) for i in members))
    return groups


def layout_of(tensor: torch.Tensor) -> Layout:
    """Sizes, strides and offset."""
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def lies_as(origin: Storage, length: int, args: Sequence[Any]) -> bool:
    """Whether the arguments that an origin names lie in one memory of `length` elements as they did."""
    members = [args[i] for i in origin.members]
    storage = members[0].untyped_storage()
    return (
        storage.nbytes() == length * members[0].element_size()
        and all(t.untyped_storage()._cdata == storage._cdata for t in members)
        and tuple([layout_of(t) for t in members]) == origin.layouts
    )


def _runs(extents: list[tuple[int, int, int]]) -> list[list[int]]:
    """Chains of overlapping extents, sorted by start, of at least two."""
    runs: list[list[int]] = []
    end = -1
    for start, stop, i in extents:
        if start < end:
            runs[-1].append(i)
        else:
            runs.append([i])
        end = max(end, stop)
    return [sorted(run) for run in runs if len(run) > 1]
