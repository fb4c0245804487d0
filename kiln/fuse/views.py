"""Views as index maps: where an element of a view lies in the tensor that is viewed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from kiln.base.arithmetic import dot
from kiln.base.graph import CONSTANT, INPUT, Node, TensorSpec, argument
from kiln.base.symbols import Expr, lt
from kiln.fuse.axes import hinted
from kiln.ops.layout import is_contiguous
from kiln.ops.levels import name_of

Coords: TypeAlias = "tuple[Any, ...]"

VIEWS: dict[str, Callable[[Node, Coords], Coords]] = {}
"""Where an element of a view lies in the tensor that is viewed, by the name of the op."""


def shape_of(node: Node) -> Coords:
    spec: TensorSpec = node.spec
    return spec.shape


def place_of(coords: Coords, spec: TensorSpec) -> Any:
    """Where an element lies in the memory of a tensor, counted from its first."""
    return dot(coords, spec.stride)


def broadcast(coords: Coords, shape: Sequence[Any], out: Sequence[Any]) -> Coords:
    """Coordinates in a tensor of `shape` that was broadcast to `out`."""
    if shape == out:  # as most are
        return coords
    skip = len(coords) - len(shape)
    return tuple(
        [0 if _repeated(n, m) else c for c, n, m in zip(coords[skip:], shape, out[skip:], strict=True)]
    )


def _repeated(size: Any, out: Any) -> bool:
    """Whether one element is read along an extent; a size that varies was asked for that when traced."""
    return bool(size == 1 and out != 1 or hinted(size) == 1 and hinted(out) != 1)


def view(name: str) -> Callable[[Callable[[Node, Coords], Coords]], Callable[[Node, Coords], Coords]]:
    def declare(function: Callable[[Node, Coords], Coords]) -> Callable[[Node, Coords], Coords]:
        VIEWS[name] = function
        return function

    return declare


def from_front(place: Any, extent: Any) -> Any:
    """A place counted from the front of a dimension; one before it is its first."""
    if place is None:
        return 0
    if not _negative(place):
        return place
    place = place + extent
    return 0 if _negative(place) else place


def _negative(place: Any) -> bool:
    """Whether a place is negative; the shape rule of the op has asked that of a symbolic one before."""
    return bool(place.scope.decide(lt(place, 0))) if isinstance(place, Expr) else place < 0


@view("expand")
def _expand(node: Node, coords: Coords) -> Coords:
    return broadcast(coords, shape_of(node.args[0]), shape_of(node))


@view("permute")
def _permute(node: Node, coords: Coords) -> Coords:
    source: list[Any] = [0] * len(coords)
    for c, d in zip(coords, node.args[1], strict=True):
        source[d] = c
    return tuple(source)


@view("slice")
def _slice(node: Node, coords: Coords) -> Coords:
    dim, start, step = (
        argument(node, 1, "dim", 0),
        argument(node, 2, "start", 0),
        argument(node, 4, "step", 1),
    )
    dim %= len(coords)
    first = from_front(start, shape_of(node.args[0])[dim])
    return (*coords[:dim], first + coords[dim] * step, *coords[dim + 1 :])


@view("select")
def _select(node: Node, coords: Coords) -> Coords:
    dim, place = node.args[1], node.args[2]
    shape = shape_of(node.args[0])
    dim %= len(shape)
    return (*coords[:dim], from_front(place, shape[dim]), *coords[dim:])


@view("flip")
def _flip(node: Node, coords: Coords) -> Coords:
    dims = {d % len(coords) for d in node.args[1]} if coords else set()
    shape = shape_of(node)
    return tuple([shape[i] - 1 - c if i in dims else c for i, c in enumerate(coords)])


@view("view")
def _view(node: Node, coords: Coords) -> Coords:
    return reshaped(coords, shape_of(node), shape_of(node.args[0]))


def reshaped(coords: Coords, shape: Sequence[Any], source: Sequence[Any]) -> Coords:
    """Coordinates in a tensor of shape `source` of an element of its reshaped form."""
    result: list[Any] = [0] * len(source)
    i = j = 0
    while i < len(shape) or j < len(source):
        first_i, first_j = i, j
        left = shape[i] if i < len(shape) else 1
        right = source[j] if j < len(source) else 1
        i, j = i + 1, j + 1
        # Extents that are equal in another form are so at the end, at the latest.
        while left != right and (i < len(shape) or j < len(source)):
            if j >= len(source) or i < len(shape) and hinted(left) < hinted(right):
                left = left * shape[i]
                i += 1
            else:
                right = right * source[j]
                j += 1
        flat: Any = 0
        for k in range(first_i, min(i, len(shape))):
            flat = flat * shape[k] + coords[k]
        last = min(j, len(source))
        for k in range(last - 1, first_j - 1, -1):
            if k == first_j:
                result[k] = flat
            else:
                result[k] = flat % source[k]
                flat = flat // source[k]
    return tuple(result)


@view("diagonal")
def _diagonal(node: Node, coords: Coords) -> Coords:
    rank = len(coords) + 1
    offset = argument(node, 1, "offset", 0)
    first, second = argument(node, 2, "dim1", 0) % rank, argument(node, 3, "dim2", 1) % rank
    *others, along = coords
    return tuple([
        along + max(-offset, 0) if d == first else along + max(offset, 0) if d == second else others.pop(0)
        for d in range(rank)
    ])  # fmt: skip


@view("unfold")
def _unfold(node: Node, coords: Coords) -> Coords:
    *places, within = coords
    if places:  # a number without dimensions has one place
        dim, step = node.args[1] % len(places), node.args[3]
        places[dim] = places[dim] * step + within
    return tuple(places)


@view("as_strided")
def _as_strided(node: Node, coords: Coords) -> Coords:
    flat = _start(node)
    for c, s in zip(coords, node.args[2], strict=True):
        flat = flat + c * s
    shape = shape_of(node.args[0])
    return reshaped((flat,), (math.prod(shape),), shape)


def _start(node: Node) -> Any:
    """Where what as_strided shows starts in a source that lies where memory starts."""
    start = argument(node, 3, "storage_offset", None)
    return 0 if start is None else start


def _shows_source(node: Node) -> bool:
    """Whether what as_strided shows are elements of its source, which lies in order where memory starts."""
    source: Node = node.args[0]
    spec: TensorSpec = source.spec
    root = source
    while root.op is not INPUT and root.op is not CONSTANT and is_map(root):
        root = root.args[0]
    numbers = (*spec.shape, *spec.stride, *node.args[1], *node.args[2], _start(node))
    if root.op is INPUT or root.op is CONSTANT or not all(type(n) is int for n in numbers):
        return False
    if spec.offset != 0 or not is_contiguous(spec.shape, spec.stride):
        return False
    last = numbers[-1] + sum((n - 1) * s for n, s in zip(node.args[1], node.args[2], strict=True))
    return bool(last < math.prod(spec.shape))


#: Views that are index maps for some arguments only.
CONDITIONS: dict[str, Callable[[Node], bool]] = {
    "view": lambda node: node.op is not torch.ops.aten.view.dtype,
    "as_strided": _shows_source,
}


def is_view(node: Node) -> bool:
    """Whether a node only shows the elements of its first argument at other places."""
    name = name_of(node.op)
    return name in VIEWS and (name not in CONDITIONS or CONDITIONS[name](node))


def is_map(node: Node) -> bool:
    """Whether loops read a node where it comes from: a view, by its index map."""
    return is_view(node) and supported(node.spec)


NUMERIC = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                     torch.int16, torch.int8, torch.uint8, torch.bool})  # fmt: skip


#: Devices that kernels are made for.
TARGETS = frozenset({"cpu", "cuda"})


def supported(spec: TensorSpec) -> bool:
    """Whether loops can run over such a tensor; eager kernels know the rules for what is empty."""
    return spec.dtype in NUMERIC and spec.device.type in TARGETS and 0 not in spec.shape
