"""Which tensors of a call share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kiln.differentiate.joint import Layout, Storage
from kiln.ops.meta import reach


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the byte after the last that a tensor can reach."""
    start = tensor.data_ptr()
    return start, start + (reach(tensor) - tensor.storage_offset()) * tensor.element_size()


def overlapping(values: Sequence[Any]) -> list[list[int]]:
    """The groups, by position, of tensors whose extents in memory overlap; alone ones are in no group.

    Storages tell less than addresses: tensors over the memory of one array have each their own.
    """
    by_device: dict[torch.device, list[tuple[int, int, int]]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.numel():
            by_device.setdefault(value.device, []).append((*extent(value), i))
    return [run for extents in by_device.values() if len(extents) > 1 for run in _runs(sorted(extents))]


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
