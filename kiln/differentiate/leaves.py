"""Gradients of leaves in the layout that the leaves have.

Autograd steals a gradient that lies as its leaf does, and copies another, after the backward half has run:
with all gradients there. So the half makes that copy itself, where the gradient is made. Who asks for the
gradient as such, with `torch.autograd.grad` or a hook, has it in eager's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kiln.base.graph import Made, Node, TensorSpec
from kiln.differentiate.functionalise import same_strides
from kiln.differentiate.halves import Halves
from kiln.differentiate.joint import Joint, Primal
from kiln.ops.layout import is_contiguous, is_dense
from kiln.ops.table import aten

_will_run = torch._C._will_engine_execute_node  # type: ignore[attr-defined]


class Leaves:
    """The gradients that a backward half, which is changed to do so, lays out as their leaves."""

    def __init__(self, joint: Joint, halves: Halves) -> None:
        graph, self.edges = halves.backward, dict[int, int]()
        outputs = list(graph.outputs)
        self.specs = {k: outputs[k].spec for k, p in enumerate(joint.primals) if _otherwise(p, outputs[k])}
        for k, spec in self.specs.items():
            node, primal = outputs[k], joint.primals[k]
            made = Made(graph, node)
            own = TensorSpec(spec.shape, primal.spec.stride, spec.dtype, spec.device)
            outputs[k] = made.call(aten.clone.default, own, node, memory_format=torch.contiguous_format)
            after = 0 if node in graph.inputs else graph.nodes.index(node) + 1
            graph.nodes[after:after] = made.nodes
            self.edges[k] = sum(isinstance(each.spec, TensorSpec) for each in joint.primals[:k])
        graph.outputs = tuple(outputs)

    def settled(self, ctx: Any, gradients: Sequence[Any]) -> Sequence[Any]:
        """The gradients as autograd wants them: those that are not added to leaves as eager lays them out."""
        if not self.specs:
            return gradients
        found = list(gradients)
        for k, spec in self.specs.items():
            if found[k] is not None and not _steals(ctx.next_functions[self.edges[k]][0]):
                found[k] = found[k].new_empty_strided(spec.shape, spec.stride).copy_(found[k])
        return found


def _otherwise(primal: Primal, gradient: Any) -> bool:
    """Whether a gradient has each element once, but lies otherwise than its leaf, which is contiguous."""
    if type(gradient) is not Node or not primal.leaf or not primal.requires_grad:
        return False
    own, spec = primal.spec, gradient.spec
    if not isinstance(own, TensorSpec) or not isinstance(spec, TensorSpec) or own.dtype != spec.dtype:
        return False
    if any(type(n) is not int for n in (*own.shape, *own.stride, *spec.stride)):
        return False
    dense = own.shape == spec.shape and is_dense(spec.shape, spec.stride)
    return dense and is_contiguous(own.shape, own.stride) and not same_strides(own, spec)


def _steals(node: Any) -> bool:
    """Whether autograd adds a gradient to the leaf of this node, and nobody else sees it."""
    variable = getattr(node, "variable", None)
    if variable is None or variable._backward_hooks:
        return False
    try:
        return bool(_will_run(node))
    except RuntimeError:  # of a leaf whose gradient is asked for
        return False
