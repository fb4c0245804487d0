"""Scans in captured programs: those of a recurrence are one op, others the tree of ops that torch makes."""

from __future__ import annotations

import functools
import operator
from types import FunctionType
from typing import Any

import torch
from torch._higher_order_ops.associative_scan import generic_associative_scan
from torch.fx import GraphModule

from kiln.base.expressions import hinted
from kiln.capture.bodies import capture_body, examples
from kiln.capture.calls import BY_CODE, Args, Kwargs, handles
from kiln.capture.frame import Machine
from kiln.capture.transforms import call_vmap, cells_of
from kiln.ops.reductions import differentiable

#: Numbers at which polynomials of few terms are equal if they are the same.
NUMBERS = (1_000_003, 2_000_000_011, 3_000_000_000_013, 5_000_000_000_000_017)
POLYNOMIAL = {torch.mul: operator.mul, torch.add: operator.add}
POLYNOMIAL |= {function: function for function in POLYNOMIAL.values()}


@handles(generic_associative_scan)
def scan(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A scan over the first dimension of some tensors, by a function of rows that `vmap` made one of many."""
    mapped = mapped_by(args[0])
    by_vmap = type(mapped) is FunctionType and BY_CODE.get(id(mapped.__code__)) is call_vmap
    place = factor_of(m, *args, cells_of(m, mapped)["func"]) if by_vmap and len(args) == 2 else None
    if place is None:
        return m.inline(generic_associative_scan, args, kwargs)
    return recurrence(m, place, args[1])


@handles(torch.ops.higher_order.associative_scan)
def scan_pointwise(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """The same by a function of elements, which takes many rows as well as one."""
    combine, leaves, *given = *args, *kwargs.values()
    mapped = mapped_by(combine)
    place = factor_of(m, combine, leaves, mapped) if mapped is not None and not any(given) else None
    if place is not None:
        return tuple(recurrence(m, place, leaves))
    return tuple(m.inline(generic_associative_scan, (combine, leaves, 0, *given), {}))


def mapped_by(combine: Any) -> Any:
    """The function that `associative_scan` was given to combine two elements; None where it is another's."""
    return combine.keywords.get("combine_fn") if type(combine) is functools.partial else None


def recurrence(m: Machine, place: int, leaves: Any) -> list[Any]:
    """The products of the factors, and the values of a recurrence, in the order in which they are given."""
    factor, value = leaves[place], leaves[1 - place]
    (products,) = m.inline(generic_associative_scan, (torch.mul, [factor]), {})
    found = products, scanned(m, value, factor)
    return [found[place], found[1 - place]]


def scanned(m: Machine, value: Any, factor: Any) -> Any:
    """The values of a recurrence along the first dimension, contiguous.

    On a GPU it has its dimensions in the order of memory: a scan moved the one that it goes along first.
    """
    if value.device.type == "cpu":
        return m.torch_call(differentiable(), (value, 0, factor), {})
    order = sorted(range(value.dim()), key=lambda dim: -hinted(value.stride(dim)))
    parts = [m.torch_call(torch.permute, (x, order), {}) for x in (value, factor)]
    result = m.torch_call(differentiable(), (parts[0], order.index(0), parts[1]), {})
    moved = m.torch_call(torch.permute, (result, [order.index(dim) for dim in range(len(order))]), {})
    return m.torch_call(torch.Tensor.contiguous, (moved,), {})


def factor_of(m: Machine, combine: Any, leaves: Any, mapped: Any) -> int | None:
    """Which of two tensors has the factors of a recurrence; None where this is not what is scanned."""
    if len(leaves) != 2:
        return None
    x, y = leaves
    if x.dtype not in (torch.float32, torch.float64) or x.dtype != y.dtype:
        return None
    if x.shape != y.shape or x.shape[0] < 2:
        return None
    inner = functools.partial(combine.func, **{**combine.keywords, "combine_fn": mapped})
    body = capture_body(m, inner, examples((x, y, x, y), [0] * 4), {})
    a, b, c, d = NUMBERS
    pairs: list[tuple[int, ...]] = [(a, b), (c, d), (a * c, c * b + d)]
    for place in (0, 1):
        first, second, both = [pair[::-1] if place else pair for pair in pairs]
        if not body.free and values(body.graph, *first, *second) == both:
            return place
    return None


def values(graph: GraphModule, *given: int) -> tuple[Any, ...]:
    """What a graph gives for these numbers; nothing where it is no polynomial."""
    known: dict[Any, Any] = {}
    left = iter(given)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(left)
        elif node.op == "output":
            return tuple([known[out] for out in node.args[0]])
        elif node.target in POLYNOMIAL and len(node.args) == 2 and not node.kwargs:
            known[node] = POLYNOMIAL[node.target](*[known.get(a, a) for a in node.args])
        else:
            break
    return ()
