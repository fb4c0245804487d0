"""How a write into a view becomes a new value of the tensor viewed: one row a view op."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kiln.base.graph import Node, TensorSpec, argument
from kiln.differentiate.joint import Step
from kiln.ops.table import aten

if TYPE_CHECKING:
    from kiln.differentiate.functionalise import Functionaliser

Undo = Callable[["Functionaliser", Node, Node, Step, TensorSpec], Node]


def _permuted(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    rank = len(spec.shape)
    order = [d % rank for d in step.args[0]]
    return f.emit(aten.permute.default, (new, [order.index(d) for d in range(rank)]), {})


def _split(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    part, dim = step.args[0], argument(step, 1, "dim", 0)
    start = part * (step.item or 0)
    return f.scattered(aten.slice_scatter.default, base, new, dim, start, start + new.spec.shape[dim])


def _split_with_sizes(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    parts, dim, item = step.args[0], argument(step, 1, "dim", 0), step.item or 0
    start = sum(parts[:item])
    return f.scattered(aten.slice_scatter.default, base, new, dim, start, start + parts[item])


def _strided(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    base = f.from_start(base)
    return f.scattered(aten.as_strided_scatter.default, base, new, *f.shifted(step.args, base.spec, spec))


def _unfolded(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    """Windows may overlap, as in memory: the view's own layout says where each element lies."""
    base = f.from_start(base)
    view = f.take(base, step, spec).spec
    place = list(view.shape), list(view.stride), view.offset
    return f.scattered(aten.as_strided_scatter.default, base, new, *place)


#: From a view op to the function that puts the new value of its view into the tensor viewed. It receives the
#: present value of that tensor, the view's new value, the step that took the view, and the tensor's type.
UNDO: dict[Any, Undo] = {
    **dict.fromkeys(
        (aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default),
        lambda f, base, new, step, spec: new),
    # Only an expansion that repeats nothing can be written.
    **dict.fromkeys(
        (aten.view.default, aten._reshape_alias.default, aten.squeeze.default, aten.squeeze.dim,
         aten.squeeze.dims, aten.unsqueeze.default, aten.expand.default),
        lambda f, base, new, step, spec: f.reshaped(new, spec.shape)),
    # These undo themselves.
    **dict.fromkeys(
        (aten.transpose.int, aten.t.default, aten._conj.default, aten._neg_view.default),
        lambda f, base, new, step, spec: f.emit(step.op, (new, *step.args), {})),
    aten.permute.default: _permuted,
    aten.select.int: lambda f, base, new, step, spec: f.scattered(
        aten.select_scatter.default, base, new, *step.args),
    aten.unbind.int: lambda f, base, new, step, spec: f.scattered(
        aten.select_scatter.default, base, new, argument(step, 0, "dim", 0), step.item),
    aten.slice.Tensor: lambda f, base, new, step, spec: f.scattered(
        aten.slice_scatter.default, base, new, *step.args, **step.kwargs),
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.diagonal.default: lambda f, base, new, step, spec: f.scattered(
        aten.diagonal_scatter.default, base, new, *step.args, **step.kwargs),
    aten.as_strided.default: _strided,
    aten.unfold.default: _unfolded,
    aten.view.dtype: lambda f, base, new, step, spec: f.emit(aten.view.dtype, (new, spec.dtype), {}),
    aten.view_as_real.default: lambda f, base, new, step, spec: f.emit(
        aten.view_as_complex.default, (new,), {}),
    aten.view_as_complex.default: lambda f, base, new, step, spec: f.emit(
        aten.view_as_real.default, (new,), {}),
}  # fmt: skip
