"""Functions that a torch call takes as arguments: captured as graphs of their own inside the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from kiln.base.errors import Break
from kiln.capture.frame import Machine, Restart
from kiln.capture.nodes import Args, Kwargs
from kiln.capture.recorder import Recorder
from kiln.ops.fake import LITERALS, FakeTensor, fake_like

HINT = "move the call out of the compiled function"


class Body(Recorder):
    """Records the graph of a function; tensors from around it become inputs of that graph."""

    def __init__(self, parent: Recorder) -> None:
        made = LITERALS.made
        super().__init__()
        LITERALS.made = made
        self.parent, self.where, self.within = parent, parent.where, parent.within
        self.dispatch, self.fakes, self.lent = parent.dispatch, parent.fakes, parent.lent
        self.free: list[FakeTensor] = []
        self.versions: list[tuple[FakeTensor, int]] = []  # inputs, and how often they had been written to

    def input(self, *args: Any, **kwargs: Any) -> FakeTensor:
        return self.parent.input(*args, **kwargs)

    def symbol(self, *args: Any, **kwargs: Any) -> None:
        self.parent.symbol(*args, **kwargs)

    def knows(self, fake: FakeTensor) -> bool:
        return super().knows(fake) or self.parent.knows(fake)

    def node(self, fake: FakeTensor) -> Node:
        if not super().knows(fake) and self.parent.knows(fake):
            self.free.append(fake)
            self.bind(fake, self.parameter(fake, "free"))
        return super().node(fake)

    def parameter(self, fake: FakeTensor, name: str) -> Node:
        """A new input of the graph."""
        with self.graph.inserting_after(self._start):
            node = self.graph.placeholder(f"{name}_{len(self._nodes)}")
        self._start = node
        self.versions.append((fake, fake._version))
        return self._added(node, fake)

    def _number(self, value: Any) -> Any:
        # A body takes tensors alone: a symbolic number is settled here, by a guard.
        for symbolic, plain in ((torch.SymBool, bool), (torch.SymInt, int)):
            if isinstance(value, symbolic):
                return plain(value)
        return float(value)

    def module(self, outputs: list[FakeTensor]) -> GraphModule:
        self.graph.output(tuple([self.node(fake) for fake in outputs]))
        used = {n.target for n in self.graph.nodes if n.op == "get_attr"}
        return GraphModule({name: value for name, value in self._attrs.items() if name in used}, self.graph)


class Function:
    """A captured function: its graph, the tensors from around it, and how results are put together."""

    def __init__(self, graph: GraphModule, free: list[FakeTensor], shape: Any, leaves: list[Any]) -> None:
        self.graph, self.free = graph, free
        self.shape, self.leaves = shape, leaves

    def over(self, graph: Callable[..., Any], free: Any) -> Callable[..., Any]:
        """The function over its graph, with values for the tensors from around it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            flat = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
            results = iter(graph(*free, *flat))
            return pytree.tree_unflatten(
                [next(results) if v is TENSOR else v for v in self.leaves], self.shape
            )

        return run


TENSOR = object()
PLAIN = (int, float, str, type(None))


def capture_body(m: Machine, function: Any, args: Args, kwargs: Kwargs, writes: bool = False) -> Function:
    """Interpret a call of the function, on example tensors, into a graph of its own.

    With `writes` it may write to the tensors that it is given.
    """
    parent, before = m.recorder, pending(m)
    body = Body(parent)
    m.recorder = m.world.recorder = body
    try:
        for fake in pytree.tree_leaves((args, kwargs)):
            if type(fake) is FakeTensor:
                body.bind(fake, body.parameter(fake, "x"))
        given = {id(fake) for fake in pytree.tree_leaves((args, kwargs))}
        out = m.call(function, args, kwargs)
        m.world.touch_deep(out)
        leaves, shape = pytree.tree_flatten(out)
        watched = [(t, version) for t, version in body.versions if not (writes and id(t) in given)]
        if pending(m) != before or any(fake._version != version for fake, version in watched):
            raise refused(m, "side-effect", f"{name_of(function)} has effects outside itself")
        tensors = [leaf for leaf in leaves if type(leaf) is FakeTensor]
        if any(type(leaf) is not FakeTensor and not isinstance(leaf, PLAIN) for leaf in leaves):
            raise refused(m, "foreign-object", f"{name_of(function)} returns more than tensors and numbers")
        # The order of inputs is: tensors from around, then those given.
        graph = body.module(tensors)
        reorder(graph, given)
        return Function(graph, body.free, shape, [TENSOR if type(v) is FakeTensor else v for v in leaves])
    finally:
        m.recorder = m.world.recorder = parent


def refused(m: Machine, kind: str, why: str) -> Restart:
    """What was interpreted must not count: capture begins again and breaks where it led to this."""
    return Restart(m.safe_step(), Break(kind, why, HINT))


def reorder(graph: GraphModule, given: set[int]) -> None:
    """Put the inputs that stand for tensors from around the function first."""
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
    first = next(iter(graph.graph.nodes))
    for node in [n for n in inputs if id(n.meta["example_value"]) not in given]:
        if node is not first:
            first.prepend(node)
    graph.recompile()


def pending(m: Machine) -> tuple[int, ...]:
    """How much is to be written to the outside world."""
    world = m.world
    overlays = (*world.instance.values(), *world.spaces.values(), *world.cells.values())
    changed = sum(shadow.changed() for shadow in list(world.shadows.values()))
    return sum(len(overlay.writes) for overlay in overlays), changed


def name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def examples(value: Any, dims: Any = None) -> Any:
    """The nest with a new tensor for each one, as the function inside a transform sees it.

    `dims` are the dimensions of which it sees one slice, for each leaf.
    """
    leaves, shape = pytree.tree_flatten(value)
    where = [None] * len(leaves) if dims is None else dims
    pairs = zip(leaves, where, strict=True)
    made = [fake_like(sliced(v.detach(), d)) if type(v) is FakeTensor else v for v, d in pairs]
    return pytree.tree_unflatten(made, shape)


def sliced(value: Any, dim: int | None) -> Any:
    """One slice of a value along a dimension, which may have none; all of it where none is given."""
    if dim is None:
        return value
    if value.shape[dim] != 0:
        return value.select(dim, 0)
    return value.new_empty([n for i, n in enumerate(value.shape) if i != dim % value.dim()])
