"""Fit: results in the layouts that are asked for: those of an expansion as the op gave them, others dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kiln.base.conditions import eq
from kiln.base.expressions import hinted
from kiln.base.graph import Graph, Node, Spec, TensorSpec, nodes_in
from kiln.ops.aliases import shows
from kiln.ops.fake import FakeTensor
from kiln.ops.layout import CHANNELS_LAST_ORDER, is_dense, overlaps, packed, suggests_channels_last
from kiln.ops.record import Recording, spec_of
from kiln.ops.table import aten


def fit(out: Any, spec: Spec, inputs: Sequence[Node], recording: Recording) -> Any:
    """Nodes for what an expansion gave: of the type `spec`, and none of `inputs` itself.

    Strides other than the op's are mended by a copy: what reads the op relies on them. Where the op's are
    those of a tensor whose elements share places (a view of broadcast memory), the expansion's stay.
    """
    if isinstance(spec, (tuple, list)):
        if len(out) != len(spec):
            raise ValueError(f"{len(out)} results in place of {len(spec)}")
        return tuple([fit(item, part, inputs, recording) for item, part in zip(out, spec, strict=True)])
    if not isinstance(spec, TensorSpec):
        # A gradient that is not asked for.
        return None
    if not isinstance(out, FakeTensor):
        raise TypeError(f"{type(out).__name__} in place of a tensor")
    found = spec_of(out)
    shape, stride = settled(spec.shape), settled(spec.stride)
    if not _same(settled(found.shape), shape) or found.dtype is not spec.dtype or found.device != spec.device:
        raise ValueError(f"{found} on {found.device} in place of {spec} on {spec.device}")
    moved = found.stride != stride and _differ(settled(found.stride), stride, shape)
    if moved:
        out = restride(out, shape, stride)
    node = recording.node(out)
    made = settled(spec_of(out).stride)
    gaps = moved and _differ(made, stride, shape) and not overlaps(shape, stride)
    if gaps or _read_otherwise(shape, made, stride):
        own = replace(node.spec, stride=stride, offset=0)
        return recording.graph.call(aten.clone.default, (node,), spec=own)
    if node in inputs:
        return recording.node(out.clone())
    if made != stride and not moved and isinstance(node.op, torch._ops.OpOverload) and not shows(node.op):
        # Strides of extents of 1 lead nowhere: what is made here may have the op's, which a result shows.
        node.spec = replace(node.spec, stride=stride)
    return node


def settled(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes with a number where it has become known what a symbolic one is."""
    return tuple([n if type(n) is int else n.scope.shorter(n) for n in sizes])


def _differ(found: tuple[Any, ...], wanted: tuple[Any, ...], shape: tuple[Any, ...]) -> bool:
    """Whether the strides of dimensions that have more than one place differ."""
    if 0 in shape:
        return False
    return any(n != 1 and a != b and not _equal(a, b) for n, a, b in zip(shape, found, wanted, strict=True))


def _read_otherwise(shape: tuple[Any, ...], found: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """Whether kernels take one layout for channels-last, not the other: by the strides of extents of 1."""
    if found == wanted or len(shape) not in CHANNELS_LAST_ORDER or 1 not in shape:
        return False
    if any(type(n) is not int for n in (*shape, *found, *wanted)) or _differ(found, wanted, shape):
        return False
    return suggests_channels_last(shape, found) != suggests_channels_last(shape, wanted)


def _same(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    return found == wanted or len(found) == len(wanted) and all(map(_equal, found, wanted))


def _equal(a: Any, b: Any) -> bool:
    """Whether two sizes are one: a product may be known to be a number though its factors are not."""
    if a == b or type(a) is int and type(b) is int:
        return bool(a == b)
    return (b if type(a) is int else a).scope.known(eq(a, b)) is True


def restride(x: Any, shape: tuple[Any, ...], stride: tuple[Any, ...]) -> Any:
    """A copy of `x` with these strides, if they are dense; else `x`."""
    order = sorted(range(len(shape)), key=lambda d: (-hinted(stride[d]), hinted(shape[d]) == 1))
    step: Any = 1
    for d in reversed(order):
        if shape[d] != 1:
            if stride[d] != step:
                return x
            step = step * shape[d]
    if order == list(range(len(order))):
        return x.clone(memory_format=torch.contiguous_format)
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


#: Ops whose result takes the layout of what they are given, a part of a value with gaps.
LAID_OUT = frozenset({aten.slice_scatter.default, aten.clone.default})


def filled(graph: Graph) -> Graph:
    """The graph, changed in place, where new values of parts have no gaps if no view shows them."""
    found = [n for n in graph.nodes if n.op in LAID_OUT and _has_gaps(n.spec)]
    users, outputs = graph.users() if found else {}, set(nodes_in(graph.outputs))
    for node in found:
        if node not in outputs and not any(shows(user.op) for user in users[node]):
            node.spec = replace(node.spec, stride=packed(node.spec.shape, [node.spec.stride]), offset=0)
    return graph


def _has_gaps(spec: TensorSpec) -> bool:
    if not all(type(n) is int for n in (*spec.shape, *spec.stride)):
        return False
    return not is_dense(spec.shape, spec.stride) and not overlaps(spec.shape, spec.stride)
