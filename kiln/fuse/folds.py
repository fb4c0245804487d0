"""Reductions as folds: which dimensions they fold, and which loops those are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kiln.base.graph import Node, TensorSpec, argument
from kiln.fuse.axes import Misfit
from kiln.fuse.nest import RUNNING, Axis
from kiln.fuse.views import Coords, shape_of, supported
from kiln.ops.levels import name_of

#: Reductions over some dimensions, by the names of ops and of folds: those that give a place, and all.
PLACED = frozenset({"argmax", "argmin", "kiln::pooled_place"})
FOLDS = frozenset({"sum", "prod", "amax", "amin", "any", "all"}) | PLACED | RUNNING


def folded_dims(node: Node) -> frozenset[int] | None:
    """The dimensions that a reduction folds; None for other ops."""
    name = name_of(node.op)
    if name not in FOLDS or not isinstance(node.spec, TensorSpec) or not supported(node.spec):
        return None
    source = node.args[0]
    if not isinstance(source.spec, TensorSpec) or not supported(source.spec):
        return None
    rank = len(shape_of(source))
    dims = argument(node, 1, "dim")
    if dims is None or dims == []:
        dims = range(rank)
    elif isinstance(dims, int):
        dims = [dims]
    return frozenset(d % rank for d in dims) if rank else frozenset()


def is_running(node: Node) -> bool:
    """Whether a fold gives a value for each element: what was folded up to it."""
    return name_of(node.op) in RUNNING


def kept_shape(node: Node) -> Coords:
    """The shape of what is folded, with the folded dimensions as 1."""
    dims = folded_dims(node) or frozenset()
    return tuple([1 if d in dims else n for d, n in enumerate(shape_of(node.args[0]))])


def marked(axes: list[Axis], shape: Coords, dims: frozenset[int]) -> list[Axis]:
    """The axes with those of these dimensions folded over; each dimension must be a run of axes."""
    result = list(axes)
    place = 0
    for d, n in enumerate(shape):
        if n == 1:
            continue
        extent: Any = 1
        while extent != n:
            if place == len(axes):
                raise Misfit
            extent = extent * axes[place].size
            if d in dims:
                result[place] = replace(axes[place], reduced=True)
            place += 1
    return result


def folded_place(node: Node, coords: Coords) -> Any:
    """Where an element lies among those that are folded into one, as argmax counts."""
    dims = folded_dims(node) or frozenset()
    place: Any = 0
    for d, (c, n) in enumerate(zip(coords, shape_of(node.args[0]), strict=True)):
        if d in dims:
            place = place * n + c
    return place
