"""torch.func in captured programs, and torch.cond: the functions they take are graphs inside the graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kiln.base.errors import Break
from kiln.capture import symbolic
from kiln.capture.bodies import HINT, PLAIN, TENSOR, Function, capture_body, examples, name_of, refused
from kiln.capture.calls import ALIVE, BY_CODE, CALLERS, Args, Kwargs, call, handles, leaf, runs_now
from kiln.capture.frame import Machine
from kiln.capture.world import MISSING
from kiln.ops.fake import FakeTensor

#: What turns a function into another one: they run as they are, and their results are known by their code.
MAKERS = tuple(getattr(torch.func, name) for name in ("vmap", "grad", "grad_and_value", "jacrev", "jacfwd"))


class Transform:
    """A node's function: something applied to captured functions, called with tensors.

    While capturing `shape` stands for it where it is given: it says which shapes come out.
    """

    def __init__(
        self, name: str, apply: Callable[..., Any], *bodies: Function, shape: Callable[..., Any] | None = None
    ) -> None:
        self.run, self.apply, self.bodies = shape or apply, apply, bodies
        self.__name__ = self.__qualname__ = name
        self.__module__ = "captured.func"

    def __call__(self, graphs: Any, free: Any, args: Any, kwargs: Any) -> Any:
        given = zip(self.bodies, graphs, free, strict=True)
        return self.run(*[body.over(graph, around) for body, graph, around in given])(*args, **kwargs)


def cells_of(m: Machine, function: Any) -> dict[str, Any]:
    """What a transform was made with, by name; what are numbers holds for these alone."""
    values = map(symbolic.concrete, map(m.world.read_cell, m.world.closure(function)))
    pairs = zip(function.__code__.co_freevars, values, strict=True)
    return {name: value for name, value in pairs if value is not MISSING}


def call_transformed(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function that a transform other than vmap has made: its function sees tensors of the same shapes."""
    given = cells_of(m, function)
    m.world.touch_deep([args, kwargs])
    body = capture_body(m, given["func"], *examples((args, kwargs)))
    name = function.__code__.co_qualname.partition(".")[0]
    return record(m, Transform(name, rebuilt(function, given), body), args, kwargs)


def rebuilt(function: Any, given: dict[str, Any]) -> Callable[..., Any]:
    """The transform with the settings of `function`, for another function."""
    maker = next(maker for maker in MAKERS if maker(abs).__code__ is function.__code__)
    settings = {k: given[k] for k in ("argnums", "has_aux", "chunk_size", "randomness") if k in given}
    return lambda f: maker(f, **settings)


def call_vmap(m: Machine, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function made by vmap: its function sees one slice of each argument."""
    given = cells_of(m, function)
    m.world.touch_deep([args, kwargs])
    dims = flat_dims(given["in_dims"], args)
    inner = examples(args, dims), examples(kwargs, [0] * len(pytree.tree_leaves(kwargs)))
    body = capture_body(m, given["func"], *inner, writes=True)
    settings = {k: given[k] for k in ("in_dims", "out_dims", "randomness", "chunk_size") if k in given}
    return record(m, Transform("vmap", lambda f: torch.func.vmap(f, **settings), body), args, kwargs)


def flat_dims(dims: Any, args: Args) -> list[int | None]:
    """The dimension of every leaf of the arguments; vmap itself says what is wrong with them."""
    shape = pytree.tree_flatten(args)[1]
    flat = pytree._broadcast_to_and_flatten(tuple(dims) if isinstance(dims, list) else dims, shape)
    leaves = pytree.tree_leaves(args)

    def fits(d: int | None, v: Any) -> bool:
        return d is None or type(v) is FakeTensor and -v.dim() <= d < v.dim()

    if flat is None or not all(map(fits, flat, leaves)):
        raise Break("transform", "the dimensions given to vmap do not fit its arguments", HINT)
    return flat  # type: ignore[no-any-return]


def recorded(m: Machine, node: Transform, args: Any, kwargs: Any = {}) -> Any:  # noqa: B006
    """What a call of the node gives, which it is from then on."""
    graphs, free = zip(*[(body.graph, tuple(body.free)) for body in node.bodies], strict=True)
    out = m.torch_call(node, (graphs, free, args, kwargs), {})
    node.run = node.apply
    return out


def record(m: Machine, node: Transform, args: Args, kwargs: Kwargs = {}) -> Any:  # noqa: B006
    out = recorded(m, node, args, kwargs)
    if not all(type(v) is FakeTensor or isinstance(v, PLAIN) for v in pytree.tree_leaves(out)):
        raise Break("transform", f"torch.func.{node.__name__} gives more than tensors", HINT)
    return out


@handles(torch.func.jvp)
def jvp(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """The function and its derivative along tangents."""
    function, primals, tangents, *rest = args
    m.world.touch_deep(args[1:])
    if type(primals) is not tuple or type(tangents) is not tuple or rest:
        raise Break("transform", "torch.func.jvp takes tuples of tensors", HINT)
    body, settings = capture_body(m, function, examples(primals), {}), symbolic.concrete(kwargs)
    return record(m, Transform("jvp", lambda f: partial(torch.func.jvp, f, **settings), body), args[1:])


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
    body, settings = capture_body(m, function, examples(tuple(primals)), {}), symbolic.concrete(kwargs)
    node = Transform("vjp", lambda f: partial(torch.func.vjp, f, **settings), body)
    out, function, *aux = recorded(m, node, tuple(primals))
    back = Pullback(function)
    m.recorder.hold(1, back)
    m.steps[id(back)] = m.safe_step()
    return (out, back, *aux)


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
    arms = [capture_body(m, given[name], examples(tuple(operands)), {}) for name in ("true_fn", "false_fn")]
    yes, no = arms
    if yes.shape != no.shape or facts(yes) != facts(no):
        why = f"{name_of(given['true_fn'])} and {name_of(given['false_fn'])} give different kinds of results"
        raise Break("transform", why, "let both functions return tensors of the same shapes and dtypes")

    def choose(yes: Any, no: Any) -> Callable[..., Any]:
        return lambda condition, operands: (yes if bool(condition) else no)(*operands)

    def first(yes: Any, no: Any) -> Callable[..., Any]:
        return lambda condition, operands: yes(*operands)

    return recorded(m, Transform("cond", choose, *arms, shape=first), (condition, tuple(operands)))


@handles(torch.ops.higher_order.while_loop)
def while_loop(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A node that holds the condition and the body."""
    test, step, carried = args[:3]
    m.world.touch_deep(carried)
    if any(type(value) is not FakeTensor for value in carried) or any(args[3:]) or kwargs:
        raise Break("transform", "while_loop carries more than tensors", HINT)
    bodies = [capture_body(m, f, examples(tuple(carried)), {}) for f in (test, step)]
    if facts(bodies[1]) != [*((tuple(t.shape), t.dtype, t.device) for t in carried), []]:
        why = f"{name_of(step)} gives tensors of other shapes or dtypes than it takes"
        raise Break("transform", why, "let the body return what it is given")

    def once(test: Any, step: Any) -> Callable[..., Any]:
        return lambda *carried: tuple(pytree.tree_leaves(step(*carried)))

    def repeat(test: Any, step: Any) -> Callable[..., Any]:
        def run(*carried: Any) -> Any:
            carried = tuple([value.clone() for value in carried])
            while test(*carried):
                carried = once(test, step)(*carried)
            return carried

        return run

    return recorded(m, Transform("while_loop", repeat, *bodies, shape=once), tuple(carried))


@handles(torch.ops.higher_order.map_impl)
def map_rows(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """The function on each row of some tensors."""
    function, rows, given = args
    m.world.touch_deep([rows, given])
    body = capture_body(m, function, (*rows_of(rows), *examples(tuple(given))), {})

    def apply(f: Any) -> Callable[..., Any]:
        return lambda rows, given: stacked([f(*row, *given) for row in zip(*rows, strict=True)])

    return record(m, Transform("map", apply, body), (tuple(rows), tuple(given)))


@handles(torch.ops.higher_order.scan)
def scan_rows(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """The function on each row of some tensors and what it gave to carry on from the row before."""
    function, first, rows = args[:3]
    m.world.touch_deep([first, rows])
    body = capture_body(m, function, (*examples(tuple(first)), *rows_of(rows)), {})

    def apply(f: Any) -> Callable[..., Any]:
        def run(carried: Any, rows: Any) -> Any:
            results = []
            for row in zip(*rows, strict=True):
                carried, result = f(*pytree.tree_leaves(carried), *row)
                results.append(result)
            return carried, stacked(results)

        return run

    return record(m, Transform("scan", apply, body), (tuple(first), tuple(rows)))


def rows_of(tensors: Any) -> Any:
    """The first row of each tensor, as an example."""
    return examples(tuple(tensors), [0] * len(tensors))


def stacked(results: list[Any]) -> Any:
    return pytree.tree_map(lambda *parts: torch.stack(parts), *results)


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
