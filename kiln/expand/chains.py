"""Chains: a convolution or a product with a held weight, and what happens to its result alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.graph import Node, TensorSpec, argument
from kiln.expand.onednn import NONE, Epilogue
from kiln.ops.table import aten


@dataclass(eq=False, slots=True)
class Chain:
    """An anchor and the nodes after it that one call computes: normalised, added to, sent through a function.

    `last` is the node whose value the call gives, `views` are those among the covered nodes that only give
    another shape.
    """

    anchor: Node
    last: Node
    norm: Node | None = None
    other: Node | None = None
    epilogue: Epilogue = NONE
    loops: bool = False
    """Whether loops compute it, which take any function after one another."""
    after: list[Node] = field(default_factory=list)
    views: list[Node] = field(default_factory=list)
    covered: set[Node] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Whether nothing but views and a normalisation happened so far."""
        return self.epilogue == NONE and self.other is None


@dataclass(frozen=True, slots=True)
class Matcher:
    """Finds chains in a graph. `known` values are the same in every call; `taken` nodes are in chains."""

    users: Mapping[Node, list[Node]]
    outputs: Collection[Node]
    known: Collection[Node]
    taken: set[Node]

    def chain(self, anchor: Node, loops: bool = False) -> Chain:
        """The longest chain from an anchor on."""
        chain = Chain(anchor, anchor, loops=loops)
        while chain.last not in self.outputs and len(self.users[chain.last]) == 1:
            after = self.users[chain.last][0]
            step = STEPS.get(after.op, _elementwise if loops else None)
            if after in self.taken or step is None or not step(self, chain, after):
                break
            chain.covered.add(chain.last)
            chain.after.append(after)
            chain.last = after
        self.trim(chain)
        self.taken.update(chain.covered, [chain.last])
        return chain

    def trim(self, chain: Chain) -> None:
        """Leave views at the end out: they are views of the result."""
        while chain.views and chain.views[-1] is chain.last:
            chain.views.pop()
            chain.after.pop()
            chain.last = chain.last.args[0]
            chain.covered.discard(chain.last)


def _norm(matcher: Matcher, chain: Chain, node: Node) -> bool:
    """A batch normalisation by statistics that are held."""
    x, *parts, training = node.args[:6]
    held = [part for part in parts if part is not None]
    items = [user.args[1] for user in matcher.users[node]]
    if x is not chain.last or training or None in parts[2:] or items != [0] or chain.views:
        return False
    if not chain.open or chain.norm is not None or any(part not in matcher.known for part in held):
        return False
    if any(part.spec.dtype is not x.spec.dtype for part in held):
        return False
    chain.norm = node
    return True


def _item(matcher: Matcher, chain: Chain, node: Node) -> bool:
    """The first result of the normalisation."""
    return chain.last is chain.norm


def _add(matcher: Matcher, chain: Chain, node: Node) -> bool:
    """A tensor of the same size added to a convolution."""
    a, b = node.args
    open = chain.open or chain.loops
    if chain.anchor.op is not aten.convolution.default or not open or node.kwargs.get("alpha", 1) != 1:
        return False
    if chain.anchor.args[6]:  # oneDNN's call of a transposed convolution has no room for it
        return False
    other = b if a is chain.last else a
    if type(other) is not Node or other is chain.last or not isinstance(other.spec, TensorSpec):
        return False
    spec = chain.last.spec
    if other.spec.shape != spec.shape or other.spec.dtype is not spec.dtype:
        return False
    chain.other = other
    return True


def _function(make: Callable[[Node], Epilogue | None]) -> Callable[[Matcher, Chain, Node], bool]:
    def step(matcher: Matcher, chain: Chain, node: Node) -> bool:
        # After a sum oneDNN's call takes none of these functions.
        if chain.loops:
            return _of_each(chain, node)
        epilogue = make(node) if chain.open else None
        if epilogue is None or node.args[0] is not chain.last:
            return False
        chain.epilogue = epilogue
        return True

    return step


def _of_each(chain: Chain, node: Node) -> bool:
    """Whether a function of elements has no other tensor to read, and keeps the type."""
    spec = node.spec
    same = isinstance(spec, TensorSpec) and spec.shape == chain.last.spec.shape
    return same and spec.dtype is chain.last.spec.dtype and list(node.inputs()) == [chain.last]


def _elementwise(matcher: Matcher, chain: Chain, node: Node) -> bool:
    """Any function of elements, for loops."""
    op = node.op
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.pointwise in op.tags and _of_each(chain, node)


def _view(matcher: Matcher, chain: Chain, node: Node) -> bool:
    """Another shape of a product: functions of elements come after it as well as before it."""
    if chain.anchor.op is aten.convolution.default or chain.epilogue != NONE:
        return False
    chain.views.append(node)
    return True


def _leaky(node: Node) -> Epilogue | None:
    slope = argument(node, 1, "negative_slope")
    return None if slope == 0 else Epilogue("leaky_relu", (0.01 if slope is None else float(slope),))


def _gelu(node: Node) -> Epilogue:
    return Epilogue("gelu", (), node.kwargs.get("approximate", "none"))


#: What an epilogue is made of, by op. Those that clamp (relu, hardtanh, hardsigmoid) are not among them:
#: oneDNN's make a bound of NaN, and as loops in place they cost nothing that could be measured.
FUNCTIONS: dict[Any, Callable[[Node], Epilogue | None]] = {
    aten.silu.default: lambda node: Epilogue("swish"),
    aten.gelu.default: _gelu,
    aten.sigmoid.default: lambda node: Epilogue("sigmoid"),
    aten.tanh.default: lambda node: Epilogue("tanh"),
    aten.hardswish.default: lambda node: Epilogue("hardswish"),
    aten.leaky_relu.default: _leaky,
}

#: How a chain grows, by the op that comes next.
STEPS: dict[Any, Callable[[Matcher, Chain, Node], bool]] = {
    aten.native_batch_norm.default: _norm,
    operator.getitem: _item,
    aten.add.Tensor: _add,
    aten.view.default: _view,
    **{op: _function(make) for op, make in FUNCTIONS.items()},
}
