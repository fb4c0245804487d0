"""Joint: forward and backward of a captured graph as one graph, with all that its callable must know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import reduce
from typing import Any, TypeAlias

import torch

from kiln.base.dataclass import dataclass
from kiln.base.graph import Graph, Node, Own, Spec
from kiln.ops.table import aten


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The argument of the captured graph at this position."""

    index: int


@dataclass(frozen=True, slots=True)
class Attribute:
    """The tensor that the captured graph module holds under this name, dots included."""

    name: str


Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Storage:
    """The whole memory of an argument, as one flat tensor of the argument's dtype.

    Arguments that overlap, one of them being written, reach the graph as one input of this kind; the graph
    makes each of them by as_strided. None of them requires grad. `members` are the positions of all of them,
    `layouts` their sizes, strides and offsets: the joint holds for calls in which they lie in one memory so
    (`alias.lies_as`).
    """

    index: int
    members: tuple[int, ...]
    layouts: tuple[Layout, ...] = ()


Origin: TypeAlias = Placeholder | Attribute | Storage


@dataclass(frozen=True, slots=True)
class Primal:
    """An input of the forward: where its value comes from, and its type and autograd state when traced.

    `spec` is a TensorSpec, or a symbol (or the type) for a number.
    """

    origin: Origin
    spec: Spec
    requires_grad: bool = False
    leaf: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """One view taken of the value before it: `op(value, *args, **kwargs)`, then `[item]` where that is set.

    Symbolic expressions may stand in `args` and `kwargs`.
    """

    op: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    item: int | None = None

    def __call__(self, value: Any) -> Any:
        """The view of a value."""
        taken = self.op(value, *self.args, **self.kwargs)
        return taken if self.item is None else taken[self.item]

    def bound(self) -> Callable[[Any], Any]:
        """The same as a function that loses no time."""
        if self.item is not None or self.kwargs:
            return self
        op, args = QUICK.get(self.op, getattr(self.op, "_op", self.op)), self.args
        return (lambda value: op(value, *args)) if args else op


#: Functions of torch that read their arguments faster than what goes by schemas.
QUICK: dict[Any, Any] = {
    aten.t.default: torch.t, aten.transpose.int: torch.transpose, aten.permute.default: torch.permute,
    aten.select.int: torch.select, aten.unsqueeze.default: torch.unsqueeze, aten.squeeze.dim: torch.squeeze,
    aten.squeeze.default: torch.squeeze, aten.view.default: torch.Tensor.view,
    aten.expand.default: torch.Tensor.expand, aten.detach.default: torch.detach,
    aten.diagonal.default: torch.diagonal,
}  # fmt: skip


def turned(value: Any, steps: tuple[Step, ...]) -> Any:
    """A value in the shape that its base has given itself by these steps."""
    return reduce(lambda taken, step: step(taken), steps, value)


@dataclass(frozen=True, eq=False, slots=True)
class Fresh:
    """An output that is the result at `index` itself; `requires_grad` where it is differentiable."""

    index: int
    requires_grad: bool


@dataclass(frozen=True, eq=False, slots=True)
class Given:
    """An output that is an argument or attribute itself, after mutations are written back."""

    origin: Origin


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """An output that is a view of an argument or attribute (after write-back), or of the result `base`.

    It is made by taking the steps outside the autograd function, in `grad_mode` or not, as the program did;
    there is always a step (a `detach` is one). One that was taken without grad mode `claims` to require grad.
    """

    base: Origin | int
    steps: tuple[Step, ...]
    grad_mode: bool
    claims: bool

    @property
    def requires_grad(self) -> bool:
        """Whether it has a history."""
        return self.grad_mode and self.claims


@dataclass(frozen=True, eq=False, slots=True)
class Constant:
    """An output that is no tensor: a number, None, a symbolic expression, another object."""

    value: Any


Output: TypeAlias = Fresh | Given | View | Constant


@dataclass(frozen=True, slots=True)
class Mutation:
    """An input that the program writes: after the forward its value is the result at `index`.

    `with_grad` says that the write is part of the autograd graph: the copy is made in grad mode and the
    result has a tangent. Otherwise the copy is made under no_grad. `counted` is how often eager raises the
    tensor's version: not at all for running statistics of normalisations.
    """

    primal: int
    index: int
    with_grad: bool
    counted: int = 1


@dataclass(slots=True)
class Joint:
    """A captured graph as one functional graph of forward and backward, and how to run it as eager would.

    `graph.inputs` are the primals, in order, then one tangent for each entry of `tangents`.
    `graph.outputs` are the results (fresh outputs, new values of mutated inputs, bases that several outputs
    view: `results` of them), then, where there is a backward, one gradient for each primal: a node or None.
    Nodes that only gradients need have `backward` set, those of the forward have not.

    `outputs` says how each leaf of the captured graph's output is made; outputs that are one object in eager
    are one `Output` object. `nest` is the captured output with positions in `outputs` as leaves.
    `tangents` are the indices of the results that are differentiable. A tangent must have the strides of its
    input's spec. The graph does not write: what it reads of a mutated primal is the old value, so a backward
    that needs it must keep a copy, since the write-back comes between.

    `effects` are calls that the program leaves torch's state with (grad mode switched and left so).
    `apart` are the positions of primals that are written: the joint holds only for calls in which none of
    them overlaps another primal in memory (see `alias.overlapping`); other calls run the captured graph.
    `random` says which random numbers are Kiln's own.
    `turned` has, for each tangent, what its base became by ops that change a tensor's own shape.
    `layers`, where it is not empty, says that the graph stands for one of more layers: those between two that
    it has do the same over attributes of their own, by name.
    `hooked` are the tangents of results that the graph registered hooks on.
    """

    graph: Graph
    primals: tuple[Primal, ...]
    outputs: tuple[Output, ...]
    nest: Any
    mutated: tuple[Mutation, ...]
    tangents: tuple[int, ...]
    results: int
    effects: tuple[tuple[Any, tuple[Any, ...]], ...] = ()
    apart: tuple[int, ...] = ()
    random: str = "eager"
    turned: tuple[tuple[Step, ...], ...] = ()
    layers: tuple[Own, ...] = ()
    hooked: frozenset[int] = frozenset()

    @property
    def differentiates(self) -> bool:
        """Whether there is a backward half."""
        return bool(self.tangents)

    def forward_outputs(self) -> tuple[Any, ...]:
        """The results."""
        return self.graph.outputs[: self.results]

    def gradients(self) -> tuple[Node | None, ...]:
        """For each primal its gradient, or None; empty without a backward half."""
        return self.graph.outputs[self.results :]
