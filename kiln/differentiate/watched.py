"""Hooks and retained gradients of results that other results of the same call are computed from.

Both halves are one node of autograd's graph: the gradient that autograd hands it for a result is what came
from outside, without what other results add within the node. Where somebody looks at such a gradient, the
captured graph runs again in eager, and what looks is told there, in its place.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from kiln.base.graph import Node
from kiln.differentiate.joint import Joint
from kiln.ops.table import aten

Hook: TypeAlias = Callable[[torch.Tensor], Any]
Watchers: TypeAlias = "dict[int, list[Hook]]"
"""What looks at the gradient of a result, by its number among the tangents, in order."""

_register_hooks = torch._C._FunctionBase._register_hook_dict
#: Ops that give the same values otherwise laid out: of a result, what it is a copy of.
LAID = {aten.clone.default: 0, aten.as_strided.default: 0, aten.copy.default: 1}


class Late:
    """A hook that the backward pass of the node calls, once it knows the whole gradient."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, grad: Any) -> None: ...


class Hooks(OrderedDict[int, Any]):
    """The hooks on one of several results: called where it has a gradient, as if its node were its own."""

    late = False

    def __setitem__(self, key: int, hook: Hook) -> None:
        held = Late(hook) if self.late else lambda grad: None if grad is None else hook(grad)
        super().__setitem__(key, held)


class Watched:
    """Who looks at gradients of results: in which calls, and which of these the node has to find out."""

    def __init__(self, function: Any, joint: Joint, shown: Sequence[int]) -> None:
        self.places = {at: joint.tangents.index(i) for at, i in enumerate(shown) if i in joint.tangents}
        self.within = within(joint)
        self.inner = [(shown[at], k) for at, k in self.places.items() if self.within[k]]
        if len(joint.tangents) > 1 or self.inner:
            function._backward_cls._register_hook_dict = lambda node, result: self.register(node, result)

    def register(self, node: Any, result: torch.Tensor) -> None:
        """Give a result, which has its first hook now, the dict of its hooks."""
        result._backward_hooks = hooks = Hooks()
        k = self.places[result.output_nr]
        if self.within[k]:
            hooks.late = True
            node.hooks[k] = hooks
        _register_hooks(node, result)

    def remember(self, ctx: Any, results: Sequence[Any]) -> None:
        """Know the results of a call again, as long as they are there."""
        if self.inner:
            ctx.hooks = {}
            ctx.inner = [(weakref.ref(results[i]), i, k) for i, k in self.inner]

    def watchers(self, ctx: Any, grads: Sequence[Any]) -> Watchers | None:
        """Who looks at gradients of inner results, given those from outside; None where nobody does."""
        if not self.inner:
            return None
        there = [(k, hooks) for k, hooks in ctx.hooks.items() if hooks]
        found: Watchers = {k: [late.hook for late in hooks.values()] for k, hooks in there}
        for ref, i, k in ctx.inner:
            result = ref()
            if result is not None and result.retains_grad:
                found.setdefault(k, []).append(_retain(result, grads[i]))
        return found or None


def called(hooks: Sequence[Hook], grad: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient after hooks have seen it, as autograd calls them."""
    for hook in hooks if grad is not None else ():
        given = hook(grad)
        grad = grad if given is None else given
    return grad


def _retain(result: torch.Tensor, outside: torch.Tensor | None) -> Hook:
    """A hook that retains a gradient of which autograd has retained what came from outside."""

    def retain(grad: torch.Tensor) -> None:
        if outside is grad:
            return
        more = grad.clone() if outside is None else grad - outside
        result.grad = more if result.grad is None else result.grad + more

    return retain


def within(joint: Joint) -> list[int]:
    """For each tangent, as bits, those whose results the node computes from its own.

    Of a result that has a hook in the graph, its own, too: what comes from outside has not passed that.
    """
    own: dict[Node, int] = {}
    for k, index in enumerate(joint.tangents):
        node = joint.graph.outputs[index]
        while type(node) is Node:
            own[node] = own.get(node, 0) | 1 << k
            node = node.args[LAID[node.op]] if node.op in LAID else None
    found: dict[Node, int] = {}
    if len(joint.tangents) > 1:
        for node in (*joint.graph.inputs, *joint.graph.nodes):
            bits = own.get(node, 0)
            for read in node.inputs():
                bits |= found.get(read, 0)
            if bits:
                found[node] = bits
    depends = [found.get(joint.graph.outputs[index], 0) for index in joint.tangents]
    return [
        sum(1 << j for j, bits in enumerate(depends) if j != k and bits >> k & 1) | (k in joint.hooked) << k
        for k in range(len(depends))
    ]
