"""Writes at places that are data: loops that go in order along the indices, and side by side across them.

Zeros, or another number, are stored first; then each turn reads what is at its place and stores what it
becomes. Of equal places the later turn sees what the earlier one wrote, as in eager's kernels on one thread.
Loops over the dimensions that are not indexed have places of their own and run in vectors.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.graph import Node, argument
from kiln.fuse.axes import axes_for, coordinates, hinted
from kiln.fuse.folds import marked
from kiln.fuse.lower import HALVES, INDICES, chosen_by
from kiln.fuse.nest import Nest, Store, Term
from kiln.fuse.reading import Group, Groups
from kiln.fuse.views import Coords, broadcast, place_of, shape_of, supported
from kiln.ops.levels import name_of
from kiln.ops.table import aten

#: Elements side by side that are worth loops: eager's kernels go through others one by one as well.
SIDE_BY_SIDE = 8
#: Single elements that eager's kernels write on one thread.
FEW = 1 << 15


@dataclass(frozen=True, eq=False, slots=True)
class Update:
    """A node that writes at places that are data, and when it runs."""

    position: int
    node: Node


@dataclass(frozen=True, slots=True)
class Writes:
    """The loops of an update: their shape, the dimensions along which they are in order, what is where."""

    shape: Coords
    along: frozenset[int]
    places: dict[int, tuple[Node, Coords]]
    """For dimensions of the result the indices, and the loops that run over them."""
    others: dict[int, int]
    """For the other dimensions of the result, the loop of each."""
    value: Any
    adds: bool
    wraps: bool
    """Whether negative indices count from the end."""


def writes_of(node: Node) -> Writes | None:
    """The loops of an update; None for other nodes and for what is left to eager's kernels."""
    made = MADE.get(node.op)
    if made is None or not supported(node.spec) or node.spec.device.type != "cpu":
        return None
    base = node.args[0]
    if name_of(base.op) != "full" or any(not supported(n.spec) for n in node.inputs()):
        return None
    found = made(node)
    if found is None or found.adds and node.spec.dtype is torch.bool:
        return None
    if found.adds and not found.wraps and node.spec.dtype in HALVES:
        return None  # sums that eager does not round on the way
    if any(index.spec.dtype not in INDICES for index, _ in found.places.values()):
        return None
    last = len(node.spec.shape) - 1
    if last in found.others and hinted(node.spec.shape[last]) >= SIDE_BY_SIDE:
        return found
    few = found.adds or math.prod(map(hinted, found.shape)) <= FEW
    return found if few and _is_number(found.value) else None


def _is_number(value: Any) -> bool:
    """Whether the same is written everywhere, which eager's kernels want in memory."""
    return not isinstance(value, Node) or name_of(value.op) == "full" or shape_of(value) == ()


def _index_put(node: Node) -> Writes | None:
    shape, indices = shape_of(node), node.args[1]
    given, common, start = chosen_by(indices)
    if any(indices[d].spec.dtype not in INDICES for d in given):
        return None
    rest = [d for d in range(len(shape)) if d not in given]
    looped = [*rest[:start], *[None] * len(common), *rest[start:]]
    sizes = [shape[d] if d is not None else common[i - start] for i, d in enumerate(looped)]
    along = range(start, start + len(common))
    places = {d: (indices[d], tuple(along)[len(common) - len(shape_of(indices[d])) :]) for d in given}
    others = {d: i for i, d in enumerate(looped) if d is not None}
    adds = argument(node, 3, "accumulate", False)
    return Writes(tuple(sizes), frozenset(along), places, others, node.args[2], adds, True)


def _scatter(node: Node) -> Writes | None:
    shape, index = shape_of(node), node.args[2]
    if not shape or node.kwargs or len(node.args) > 4:
        return None
    dim = node.args[1] % len(shape)
    others = {d: d for d in range(len(shape)) if d != dim}
    adds = name_of(node.op) == "scatter_add"
    places = {dim: (index, tuple(range(len(shape))))}
    return Writes(shape_of(index), frozenset({dim}), places, others, node.args[3], adds, False)


def _index_add(node: Node) -> Writes | None:
    shape, index, source = shape_of(node), node.args[2], node.args[3]
    if not shape or len(shape_of(source)) != len(shape) or node.kwargs.get("alpha", 1) != 1:
        return None
    dim = node.args[1] % len(shape)
    others = {d: d for d in range(len(shape)) if d != dim}
    places = {dim: (index, (dim,) if shape_of(index) else ())}
    return Writes(shape_of(source), frozenset({dim}), places, others, source, True, False)


MADE = {
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: _scatter,
}


def nests_of(groups: Groups, update: Update) -> list[Nest]:
    """The loops that fill the result, and those that write to it."""
    node = update.node
    writes = writes_of(node)
    assert writes is not None
    filled = Group(update.position, axes_for(groups.scope, shape_of(node)), groups.new_terms())
    coords = coordinates(shape_of(node), filled.axes)
    assert coords is not None
    buffer, dtype = groups.buffer(node), node.spec.dtype
    start = groups.read(filled, node.args[0], coords, None)
    before = Store(buffer, place_of(coords, node.spec), start, 0, False)

    axes = marked(axes_for(groups.scope, writes.shape), writes.shape, writes.along)
    loops = Group(update.position, axes, groups.new_terms())
    turns = coordinates(writes.shape, axes)
    assert turns is not None
    terms, target = loops.terms, [0] * len(shape_of(node))
    inside: Term | None = None
    for d, (index, over) in writes.places.items():
        here, sizes = ([of[i] for i in over] for of in (turns, writes.shape))
        at = broadcast(tuple(here), shape_of(index), sizes)
        size, read = shape_of(node)[d], groups.read(loops, index, at, None)
        target[d] = terms.computed(read, size, None, writes.wraps, d)
        found = terms.apply("ge", torch.bool, terms.place(target[d]), terms.const(0, torch.int64))
        inside = found if inside is None else terms.apply("bitwise_and", torch.bool, inside, found)
    for d, i in writes.others.items():
        target[d] = turns[i]
    if isinstance(writes.value, Node):
        at = broadcast(turns, shape_of(writes.value), writes.shape)
        value = groups.read(loops, writes.value, at, None)
    else:
        value = terms.const(writes.value, dtype)
    if value.dtype != dtype:
        value = terms.apply("convert", dtype, value)
    place = place_of(tuple(target), node.spec)
    old = terms.load(buffer, place, dtype, None)
    assert inside is not None
    if writes.adds:
        new = terms.apply("add", dtype, old, value)
    else:  # the condition holds: an index outside has been reported, and another one stands for it
        new = terms.apply("where", dtype, inside, value, old)
    written = Nest(tuple(axes), [Store(buffer, place, new, 0, False)], ordered=True)
    return [Nest(tuple(filled.axes), [before]), written]

