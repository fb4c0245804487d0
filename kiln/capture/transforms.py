"""torch.func in captured programs, and torch.cond: the functions they take are graphs inside the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kiln.base.errors import Break
from kiln.capture.bodies import HINT, PLAIN, TENSOR, Function, capture_body, examples, name_of, refused
from kiln.capture.calls import ALIVE, BY_CODE, CALLERS, Args, Kwargs, call, handles, leaf, runs_now
from kiln.capture.frame import Machine
from kiln.capture.world import MISSING
from kiln.ops.fake import FakeTensor

#: What turns a function into another one: they run as they are, and their results are known by their code.
MAKERS = tuple(getattr(torch.func, name) for name in ("vmap", "grad", "grad_and_value", "jacrev", "jacfwd"))


class Transform:
    """A node's function: a transform of a captured function, applied to tensors."""

    def __init__(self, name: str, body: Function, apply: Callable[..., Any]) -> None:
        self.body, self.apply = body, apply
        self.__name__ = self.__qualname__ = name
        self.__module__ = "captured.func"

    def __call__(self, graph: Any, free: Any, args: Any, kwargs: Any) -> Any:
        return self.apply(self.body.over(graph, free))(*args, **kwargs)


def cells_of(m: Machine, function: Any) -> dict[str, Any]:
    values = map(m.world.read_cell, m.world.closure(function))
    pairs = zip(function.__code__.co_freevars, values, strict=True)
    return {name: value for name, value in pairs if value is not MISSING}


def call_transformed(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function that a transform other than vmap has made: its function sees tensors of the same shapes."""
    given = cells_of(m, function)
    for value in (*args, *kwargs.values()):
        m.world.touch_deep(value)
    body = capture_body(m, given["func"], *examples((args, kwargs), lambda v, d: v.detach()))
    again = rebuilt(function, given)
    return record(m, Transform(function.__code__.co_qualname.partition(".")[0], body, again), args, kwargs)


def rebuilt(function: Any, given: dict[str, Any]) -> Callable[..., Any]:
    """The transform with the settings of `function`, for another function."""
    maker = next(maker for maker in MAKERS if maker(abs).__code__ is function.__code__)
    settings = {k: given[k] for k in ("argnums", "has_aux", "chunk_size", "randomness") if k in given}
    return lambda f: maker(f, **settings)


def call_vmap(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function made by vmap: its function sees one slice of each argument."""
    given = cells_of(m, function)
    for value in (*args, *kwargs.values()):
        m.world.touch_deep(value)
    dims = flat_dims(m, given["in_dims"], args)
    inner = examples(args, sliced, dims), examples(kwargs, sliced, [0] * len(pytree.tree_leaves(kwargs)))
    body = capture_body(m, given["func"], *inner)
    settings = {k: given[k] for k in ("in_dims", "out_dims", "randomness", "chunk_size") if k in given}
    return record(m, Transform("vmap", body, lambda f: torch.func.vmap(f, **settings)), args, kwargs)


def sliced(value: Any, dim: int | None) -> Any:
    """One slice of a value along a dimension, which may have none."""
    value = value.detach()
    if dim is None or value.shape[dim] != 0:
        return value if dim is None else value.select(dim, 0)
    return value.new_empty([n for i, n in enumerate(value.shape) if i != dim % value.dim()])


def flat_dims(m: Machine, dims: Any, args: Args) -> list[int | None]:
    """The dimension of every leaf of the arguments; vmap itself says what is wrong with them."""
    shape = pytree.tree_flatten(args)[1]
    flat = pytree._broadcast_to_and_flatten(tuple(dims) if isinstance(dims, list) else dims, shape)
    leaves = pytree.tree_leaves(args)

    def fits(d: int | None, v: Any) -> bool:
        return d is None or type(v) is FakeTensor and -v.dim() <= d < v.dim()

    if flat is None or not all(map(fits, flat, leaves)):
        raise Break("transform", "the dimensions given to vmap do not fit its arguments", HINT)
    return flat  # type: ignore[no-any-return]


def record(m: Machine, node: Transform, args: Args, kwargs: Kwargs) -> Any:
    body = node.body
    out = m.torch_call(node, (body.graph, tuple(body.free), args, kwargs), {})
    leaves = pytree.tree_leaves(out)
    if not all(type(v) is FakeTensor or isinstance(v, PLAIN) for v in leaves):
        raise Break("transform", f"torch.func.{node.__name__} gives more than tensors", HINT)
    return out


@handles(torch.func.jvp)
def jvp(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """The function and its derivative along tangents."""
    function, primals, tangents, *rest = args
    for value in args[1:]:
        m.world.touch_deep(value)
    if type(primals) is not tuple or type(tangents) is not tuple or rest:
        raise Break("transform", "torch.func.jvp takes tuples of tensors", HINT)
    body = capture_body(m, function, examples(primals, lambda v, d: v.detach()), {})
    settings = dict(kwargs)

    def apply(f: Any) -> Callable[..., Any]:
        return lambda primals, tangents: torch.func.jvp(f, primals, tangents, **settings)

    return record(m, Transform("jvp", body, apply), (primals, tangents), {})


class Pullback:
    """What `torch.func.vjp` gives while capturing: in the graph, a function of cotangents."""

    def __init__(self, function: Any) -> None:
        self.function = function


def pull(back: Any, *args: Any, **kwargs: Any) -> Any:
    return (back.function if type(back) is Pullback else back)(*args, **kwargs)


def call_pullback(m: Machine, back: Pullback, args: Args, kwargs: Kwargs, mode: str) -> Any:
    if not m.recorder.holds(back):
        raise refused(m, "transform", "a transformed function calls what torch.func.vjp gave outside of it")
    return leaf(m, pull, (back, *args), kwargs)


CALLERS[Pullback] = call_pullback


@handles(torch.func.vjp)
def vjp(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """What the function gives, and a function of the graph that takes cotangents of it."""
    function, *primals = args
    m.world.touch_deep(primals)
    body = capture_body(m, function, examples(tuple(primals), lambda v, d: v.detach()), {})
    settings = dict(kwargs)
    node = Transform("vjp", body, lambda f: lambda *primals: torch.func.vjp(f, *primals, **settings))
    out, function, *aux = m.torch_call(node, (body.graph, tuple(body.free), tuple(primals), {}), {})
    back = Pullback(function)
    m.recorder.hold(1, back)
    m.steps[id(back)] = m.safe_step()
    return (out, back, *aux)


class Cond:
    """A node's function: one of two captured functions runs, as the condition says."""

    __name__ = __qualname__ = "cond"
    __module__ = "captured.func"

    def __init__(self, yes: Function, no: Function) -> None:
        self.yes, self.no = yes, no
        self.shaping = True  # while capturing the shapes of one arm, which are those of the other, will do

    def __call__(self, condition: Any, graphs: Any, free: Any, operands: Any) -> Any:
        chosen = 0 if self.shaping or bool(condition) else 1
        arm = (self.yes, self.no)[chosen]
        return arm.over(graphs[chosen], free[chosen])(*operands)


@handles(torch.cond, torch.ops.higher_order.cond)
def cond(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """One arm when the condition is a constant, else a node that holds both."""
    names = ("pred", "true_fn", "false_fn", "operands")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not {"pred", "true_fn", "false_fn"} <= given.keys() <= set(names) or len(args) > 4:
        raise Break("transform", "torch.cond takes a condition, two functions and operands", HINT)
    condition, operands = given["pred"], given.get("operands", ())
    m.world.touch_deep(operands)
    if type(condition) is not FakeTensor:
        return call(m, given["true_fn" if m.truth(condition) else "false_fn"], tuple(operands), {})
    arms = [capture_body(m, given[name], examples(tuple(operands), lambda v, d: v.detach()), {})
            for name in ("true_fn", "false_fn")]  # fmt: skip
    yes, no = arms
    if yes.shape != no.shape or facts(yes) != facts(no):
        why = f"{name_of(given['true_fn'])} and {name_of(given['false_fn'])} give different kinds of results"
        raise Break("transform", why, "let both functions return tensors of the same shapes and dtypes")
    node = Cond(yes, no)
    graphs, free = (yes.graph, no.graph), (tuple(yes.free), tuple(no.free))
    out = m.torch_call(node, (condition, graphs, free, tuple(operands)), {})
    node.shaping = False
    return out


def facts(arm: Function) -> list[Any]:
    (output,) = (n for n in arm.graph.graph.nodes if n.op == "output")
    tensors = [n.meta.get("example_value") for n in output.args[0]]
    constants = [v for v in arm.leaves if v is not TENSOR]
    return [*((tuple(t.shape), t.dtype, t.device) for t in tensors if t is not None), constants]


runs_now(*MAKERS, torch.func.hessian)  # only calls of what they make do anything
for _maker in MAKERS:
    _code = _maker(abs).__code__
    ALIVE.append(_code)
    BY_CODE[id(_code)] = call_vmap if _maker is torch.func.vmap else call_transformed
