"""The loops of a kernel under construction: how tensors of several shapes run over one set of axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kiln.base.expressions import hinted as hinted
from kiln.base.symbols import LIMIT, Scope, Symbol
from kiln.fuse.nest import Axis


class Misfit(Exception):
    """A node cannot run in the loops of a kernel."""


def axis(scope: Scope, size: Any, name: str) -> Axis:
    """A new loop of this extent."""
    high = size - 1 if isinstance(size, int) else LIMIT
    return Axis(Symbol(scope, name, 0, "", 0, max(high, 0)), size)


def axes_for(scope: Scope, shape: Sequence[Any]) -> list[Axis]:
    """One loop for each dimension that is not of extent 1."""
    return [axis(scope, n, f"i{d}") for d, n in enumerate(shape) if n != 1]


def runs(shape: Sequence[Any], sizes: list[Any]) -> list[tuple[list[int], list[int]]] | None:
    """Dimensions of `shape` and axes, cut into the shortest runs of equal extent; None when they differ."""
    dims = [d for d, n in enumerate(shape) if n != 1]
    if [shape[d] for d in dims] == sizes:  # as most are
        return [([d], [j]) for j, d in enumerate(dims)]
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(dims) and j < len(sizes):
        mine, theirs = [dims[i]], [j]
        left, right = shape[dims[i]], sizes[j]
        i, j = i + 1, j + 1
        while left != right:
            if hinted(left) < hinted(right):
                if i == len(dims):
                    return None
                left, mine, i = left * shape[dims[i]], [*mine, dims[i]], i + 1
            else:
                if j == len(sizes):
                    return None
                right, theirs, j = right * sizes[j], [*theirs, j], j + 1
        found.append((mine, theirs))
    return found if i == len(dims) and j == len(sizes) else None


def refined(scope: Scope, axes: list[Axis], shape: Sequence[Any]) -> list[Axis] | None:
    """The axes cut so finely that each dimension of `shape` is a run of axes; None where that cannot be."""
    matched = runs(shape, [a.size for a in axes])
    if matched is None:
        return None
    finer: list[Axis] = []
    for dims, places in matched:
        if (
            len(dims) == 1
            or len(dims) == len(places)
            and all(shape[d] == axes[p].size for d, p in zip(dims, places, strict=True))
        ):
            finer += [axes[p] for p in places]
            continue
        if len(places) > 1:
            return None
        old = axes[places[0]]
        finer += [
            replace(axis(scope, shape[d], f"{old.variable.name}_{k}"), reduced=old.reduced)
            for k, d in enumerate(dims)
        ]
    return finer


def coordinates(shape: Sequence[Any], axes: Sequence[Axis]) -> tuple[Any, ...] | None:
    """For each dimension of `shape` its coordinate in terms of the loop variables; None without a match."""
    matched = runs(shape, [a.size for a in axes])
    if matched is None or any(len(dims) > 1 for dims, _ in matched):
        return None
    coords: list[Any] = [0] * len(shape)
    for (d,), (first, *more) in matched:
        place: Any = axes[first].variable
        for p in more:
            place = place * axes[p].size + axes[p].variable
        coords[d] = place
    return tuple(coords)
