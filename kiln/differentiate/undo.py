"""How a write into a view becomes a new value of the tensor viewed: one function a view op."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kiln.base.graph import Node, TensorSpec, argument
from kiln.differentiate.joint import Step
from kiln.ops.table import aten

if TYPE_CHECKING:
    from kiln.differentiate.functionalise import Functionaliser

Undo = Callable[["Functionaliser", Node, Node, Step, TensorSpec], Node]

#: From a view op to the function that puts the new value of its view into the tensor viewed. It receives the
#: present value of that tensor, the view's new value, the step that took the view, and the tensor's type.
UNDO: dict[Any, Undo] = {}


def undoes(*ops: Any) -> Callable[[Undo], Undo]:
    """Declare the decorated function for these view ops."""

    def declare(function: Undo) -> Undo:
        UNDO.update(dict.fromkeys(ops, function))
        return function

    return declare


@undoes(aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default)
def _same(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    return new


@undoes(aten.view.default, aten._reshape_alias.default, aten.squeeze.default, aten.squeeze.dim,
        aten.squeeze.dims, aten.unsqueeze.default, aten.expand.default)  # fmt: skip
def _reshaped(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    """Only an expansion that repeats nothing can be written."""
    return f.reshaped(new, spec.shape)


@undoes(aten.permute.default)
def _permuted(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    rank = len(spec.shape)
    order = [d % rank for d in step.args[0]]
    return f.emit(aten.permute.default, (new, [order.index(d) for d in range(rank)]), {})


@undoes(aten.transpose.int)
def _transposed(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    return f.emit(aten.transpose.int, (new, *step.args), {})


@undoes(aten.t.default)
def _t(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    return f.emit(aten.t.default, (new,), {})


@undoes(aten.select.int)
def _selected(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    return f.scattered(aten.select_scatter.default, base, new, *step.args)


@undoes(aten.unbind.int)
def _unbound(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    dim = argument(step, 0, "dim", 0)
    return f.scattered(aten.select_scatter.default, base, new, dim, step.item)


@undoes(aten.slice.Tensor)
def _sliced(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    return f.scattered(aten.slice_scatter.default, base, new, *step.args, **step.kwargs)


@undoes(aten.split.Tensor)
def _split(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    part, dim = step.args[0], argument(step, 1, "dim", 0)
    start = part * (step.item or 0)
    return f.scattered(aten.slice_scatter.default, base, new, dim, start, start + new.spec.shape[dim])


@undoes(aten.split_with_sizes.default)
def _split_with_sizes(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    parts, dim, item = step.args[0], argument(step, 1, "dim", 0), step.item or 0
    start = sum(parts[:item])
    return f.scattered(aten.slice_scatter.default, base, new, dim, start, start + parts[item])


@undoes(aten.diagonal.default)
def _diagonal(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    return f.scattered(aten.diagonal_scatter.default, base, new, *step.args, **step.kwargs)


@undoes(aten.as_strided.default)
def _strided(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    base = f.from_start(base)
    return f.scattered(aten.as_strided_scatter.default, base, new, *f.shifted(step.args, base.spec, spec))


@undoes(aten.unfold.default)
def _unfolded(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    """Windows may overlap, as in memory: the view's own layout says where each element lies."""
    base = f.from_start(base)
    view = f.take(base, step, spec).spec
    place = list(view.shape), list(view.stride), view.offset
    return f.scattered(aten.as_strided_scatter.default, base, new, *place)


@undoes(aten.view.dtype)
def _as_dtype(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    return f.emit(aten.view.dtype, (new, spec.dtype), {})


@undoes(aten.view_as_real.default)
def _as_real(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    return f.emit(aten.view_as_complex.default, (new,), {})


@undoes(aten.view_as_complex.default)
def _as_complex(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    return f.emit(aten.view_as_real.default, (new,), {})


@undoes(aten._conj.default, aten._neg_view.default)
def _twice(f: Functionaliser, base: Node, new: Node, step: Step, spec: TensorSpec) -> Node:
    return f.emit(step.op, (new,), {})
