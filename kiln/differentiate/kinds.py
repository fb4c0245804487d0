"""What the partition knows of ops and values: views, random numbers, cost, size."""

from __future__ import annotations

import math
import operator
from functools import cache
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.expressions import hinted
from kiln.base.graph import CONSTANT, Node, TensorSpec
from kiln.ops.aliases import QUIETLY_SHARED, shows
from kiln.ops.table import aten

#: Ops without arithmetic to speak of that are not tagged as pointwise.
CHEAP = frozenset({
    "_to_copy", "arange", "as_strided_scatter", "cat", "constant_pad_nd", "copy", "diagonal_scatter", "empty",
    "empty_like", "empty_strided", "eye", "fill", "full", "full_like", "lift_fresh_copy", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor",
    "select_scatter", "slice_scatter", "tril", "triu", "zeros", "zeros_like",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """What the partition knows of an op: whether it gives views, draws random numbers, acts, costs little."""

    view: bool = False
    random: bool = False
    acts: bool = False
    cheap: bool = False


@cache
def kind(op: Any) -> Kind:
    """What the partition knows of an op; one that is not torch's may do anything."""
    if op is operator.getitem or op is CONSTANT:
        return Kind(cheap=True)
    if not isinstance(op, torch._ops.OpOverload):
        return Kind(random=True, acts=True)
    schema = op._schema
    random = torch.Tag.nondeterministic_seeded in op.tags
    if schema.is_mutable or not schema.returns:
        return Kind(random=random, acts=True)
    view = shows(op) or op in QUIETLY_SHARED
    own = op.namespace in ("aten", "prims")
    name = schema.name.partition("::")[2]
    cheap = not random and (view or torch.Tag.pointwise in op.tags or own and name in CHEAP)
    return Kind(view, random, not own and not view and torch.Tag.pt2_compliant_tag not in op.tags, cheap)


def is_mask(node: Node) -> bool:
    """Whether a value is drawn from zero and one only, so that a byte an element keeps it."""
    return node.op is aten.bernoulli.p and node.spec.dtype is not torch.bool


def part_of_views(node: Node) -> bool:
    """Whether a node takes one of the views that an op gave."""
    return node.op is operator.getitem and type(node.args[0]) is Node and kind(node.args[0].op).view


def nbytes(spec: Any) -> int:
    """The memory of a value in bytes."""
    if isinstance(spec, TensorSpec):
        return math.prod(map(hinted, spec.shape)) * int(spec.dtype.itemsize)
    return sum(map(nbytes, spec)) if isinstance(spec, (tuple, list)) else 8


def work(node: Node) -> float:
    """About how many multiplications or moves an op makes."""
    moved = nbytes(node.spec)
    shapes = [[hinted(d) for d in n.spec.shape] for n in node.inputs() if isinstance(n.spec, TensorSpec)]
    if kind(node.op).cheap or len(shapes) < 2:
        return moved
    # Products of two tensors: each result takes as many steps as the rows or filters have elements.
    steps = math.prod(shapes[1]) / max(1, shapes[1][0]) if len(shapes[1]) > 1 else 1
    return moved * max(1.0, steps)
