"""Gradients that the program itself asks for: `torch.autograd.grad` and `backward` as nodes of the graph.

`backward` is the gradients of the leaves that the tensor comes from, and what autograd does with them: it
lays one out as its leaf and makes it the leaf's `grad`, or adds it to the one that is there. So a step of
training, with the optimizer's, is one graph. What autograd calls while it does so, hooks and the reducers of
distributed modules, is not in the graph, and leaves it to Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed
from torch.autograd.graph import Node

from kiln.base.errors import Break, Skip
from kiln.base.outside import going_back
from kiln.base.source import Attr
from kiln.capture import spent
from kiln.capture.calls import METHODS, SUBCLASSED, Args, Kwargs, handles, leaf
from kiln.capture.frame import Machine, Recalled, Restart
from kiln.capture.world import MISSING, nested
from kiln.ops.fake import FakeTensor, tensors_in
from kiln.ops.layout import is_dense

HINT = "compute all of it in one function, or call backward outside of it"
#: Of how many nodes a graph takes no second backward pass: steps of training in a loop are unrolled.
LONG = 1000
#: Where hooks are kept on a tensor that autograd calls when its gradient is there.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@handles(torch.autograd.grad)
def gradients(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """One node, where all that may lead from the inputs to the outputs is in the graph."""
    if m.copies:
        raise Recalled  # what copies of nodes give has no history
    chosen = {id(value) for value in nested((args[1:], kwargs.get("inputs")))}
    for fake, real in m.recorder.given():
        if real.requires_grad and (real._backward_hooks if id(fake) in chosen else not real.is_leaf):
            raise Break("backward", "gradients may flow through what was computed outside, or to hooks", HINT)
    outputs = list(tensors_in(args[0] if args else kwargs["outputs"]))
    return passed(m, outputs, lambda: leaf(m, torch.autograd.grad, args, kwargs))


def passed(m: Machine, outputs: Sequence[Any], call: Callable[[], Any]) -> Any:
    """What a call gives that goes back from tensors; where that changes an object capture begins again."""
    if m.recorder.watched:
        raise Break("backward", "a hook on gradients may do more than compute", HINT)
    nodes: list[Any] = [type(node) for node in spent.history(outputs)]
    changed: list[type] = []
    try:
        with going_back({node._forward_cls for node in nodes if hasattr(node, "_forward_cls")}) as changed:
            return spent.by(m.recorder.spent, outputs, call)
    finally:
        if changed:
            why = f"the backward of {changed[0].__name__} changes an object that others have"
            raise Restart(m.safe_step(), Break("side-effect", why, "return what is new"))


def hooked(m: Machine, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """A hook on a node of autograd's: compiled code has other ones."""
    raise Skip("a hook is registered on a node of autograd's, which compiled code does not have")


METHODS.update({(Node, name): hooked for name in ("register_hook", "register_prehook")})


@handles(torch.Tensor.backward, torch.autograd.backward, told=True)
def backward_called(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> None:
    """A backward pass, unless the classes of the tensors make something else of it."""
    if SUBCLASSED["intercept"](m, function, args, kwargs) is MISSING:
        named = _of_tensor if function is torch.Tensor.backward else _of_function
        backward(m, *named(*args, **kwargs))


def _of_tensor(tensor: Any, gradient: Any = None, retain_graph: Any = None, create_graph: Any = False,
               inputs: Any = None) -> Args:  # fmt: skip
    return (tensor,), None if gradient is None else (gradient,), retain_graph, create_graph, inputs


def _of_function(tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: Any = False,
                 grad_variables: Any = None, inputs: Any = None) -> Args:  # fmt: skip
    given = grad_variables if grad_tensors is None else grad_tensors
    return _sequence(tensors), _sequence(given), retain_graph, create_graph, inputs


def _sequence(value: Any) -> Any:
    return (value,) if isinstance(value, torch.Tensor) else value


def backward(m: Machine, tensors: Any, given: Any, retain: Any, create: Any, inputs: Any) -> None:
    """The gradients of the leaves, one node, and each of them added to what its leaf has."""
    if m.copies:
        raise Recalled
    if create or retain not in (None, True, False):
        raise Break("backward", "the backward pass is to be differentiated, too", HINT)
    if m.recorder.spent and len(m.recorder.graph.nodes) > LONG:
        raise Break("backward", "another backward pass of a long graph: each has its own", HINT)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise Break("backward", "processes may exchange gradients while backward computes them", HINT)
    if any(node.target == "retain_grad" for node in m.recorder.graph.nodes):
        raise Break("backward", "backward leaves gradients on tensors that are no leaves", HINT)
    if not all(type(t) is FakeTensor for t in tensors):
        raise Break("backward", "backward of what is no plain tensor", HINT)
    reached = list(leaves(tensors))
    if inputs is not None:
        wanted = [id(each) for each in _sequence(inputs)]
        if not {*wanted} <= {*map(id, reached)}:
            raise Break("backward", "gradients of tensors that are no leaves are asked for", HINT)
        reached = [each for each in reached if id(each) in wanted]
    if not reached:
        raise Break("backward", "backward of what does not require grad", HINT)
    for each in reached:
        unwatched(m, each)
    kwargs = {"grad_outputs": given, "retain_graph": retain, "allow_unused": True}
    call = functools.partial(leaf, m, torch.autograd.grad, (tensors, tuple(reached)), kwargs)
    found = passed(m, tensors, call)
    for each, gradient in zip(reached, found, strict=True):
        if gradient is not None:
            accumulate(m, each, gradient)


def leaves(tensors: Sequence[torch.Tensor]) -> Iterator[FakeTensor]:
    """The tensors at the ends of what these were computed by, in the order in which the program used them."""
    ends = [node.variable for node in spent.history(tensors) if hasattr(node, "variable")]
    alone = [t for t in tensors if t.requires_grad and t.grad_fn is None]
    return iter(dict.fromkeys([*reversed(ends), *alone], None))


def unwatched(m: Machine, tensor: FakeTensor) -> None:
    """Break unless a tensor is a leaf to autograd, too, and none is to be told of its gradient."""
    source, real = m.source(tensor), m.world.reals.get(id(tensor))
    if not m.recorder.knows(tensor):
        raise Break("backward", "gradients flow to what was computed outside", HINT)
    if source is None or real is None:
        return  # made here
    if not isinstance(real, torch.nn.Parameter) and not m.getattr(tensor, "is_leaf"):
        raise Break("backward", "gradients flow to what was computed outside", HINT)
    for name in HOOKS:
        if m.world.outside(getattr(real, name, None), Attr(source, name)) is not None:
            raise Break("backward", "hooks are registered on a tensor that gradients flow to", HINT)


def accumulate(m: Machine, tensor: FakeTensor, gradient: Any) -> None:
    """Give a leaf its gradient, in memory of its own and laid out as the leaf, or add to what it has."""
    if type(gradient) is not FakeTensor or gradient.layout is not torch.strided:
        raise Break("backward", "a gradient is no plain tensor", HINT)
    there = m.getattr(tensor, "grad")
    if there is None:
        if gradient.stride() != tensor.stride() and is_dense(tensor.shape, tensor.stride()):
            own = m.torch_call(torch.empty_like, (tensor,), {"requires_grad": False})
            gradient = m.torch_call(torch.Tensor.copy_, (own, gradient), {})
        else:
            gradient = m.torch_call(torch.clone, (gradient,), {})
        m.setattr(tensor, "grad", gradient)
    elif there.requires_grad:
        raise Break("backward", "a gradient is added to one with a history", HINT)
    else:
        m.torch_call(torch.Tensor.add_, (there, gradient), {})
