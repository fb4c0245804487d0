"""Indices of tensors that are tensors themselves.

A place, a tensor of one number, says no more than which item it is: the graph has it as it is.
Masks and repeats have results as long as a number says; where nothing may break, the graph reads that number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from kiln.base.conditions import ge, le
from kiln.capture.frame import Machine
from kiln.check.guards import MISSING
from kiln.ops.fake import FakeTensor
from kiln.ops.layout import is_place
from kiln.ops.symint import expr_of


def selected(m: Machine, function: Any, args: Any, kwargs: Any) -> Any:
    """What a call gives whose size depends on numbers; MISSING where another call needs values."""
    rule = RULES.get(function)
    return MISSING if rule is None else rule(m, *args, **kwargs)


def placed(m: Machine, function: Any, args: Any, kwargs: Any) -> Any:
    """An item of a tensor that is read or written at places in tensors; MISSING where it is another call."""
    if function not in ITEMS or len(args) < 2 or type(args[0]) is not FakeTensor:
        return MISSING
    x, key, *value = args
    parts = key if type(key) is tuple else (key,)
    if not any(map(is_place, parts)) or any(type(n) is int and n == 0 for n in x.shape):
        return MISSING
    shown = x, tuple([0 if is_place(part) else part for part in parts]), *value
    found = m.native(m.recorder.call, function, args, kwargs, shown)
    (x if value else found).value = None  # what is known is that of the first place
    return found


ITEMS = frozenset({operator.getitem, operator.setitem, torch.Tensor.__getitem__, torch.Tensor.__setitem__})


def places(m: Machine, mask: FakeTensor) -> Any:
    """Where a tensor is not zero, one row for each such element; the same one for a mask used again."""
    key = None if mask.is_inference() else (id(mask), mask._version)
    known = m.places.get(key)
    if known is None:
        count = m.torch_call(torch.count_nonzero, (mask,), {})
        size = m.call(torch.Tensor.item, (count,))
        known = mask, m.torch_call(torch.nonzero_static, (mask,), {"size": size})
        if key is not None:
            m.places[key] = known
    return known[1]


def columns(m: Machine, mask: FakeTensor) -> tuple[Any, ...]:
    """The same for each dimension."""
    return tuple(m.torch_call(torch.unbind, (places(m, mask), 1), {}))


def is_mask(part: Any) -> bool:
    return type(part) is FakeTensor and part.dtype is torch.bool and bool(part.dim())


def is_bounded(part: Any) -> bool:
    """Whether a part of an index is a slice up to, or from, a number in a tensor."""
    return type(part) is slice and part.step is None and (is_place(part.start) or is_place(part.stop))


def bounded(m: Machine, x: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index with numbers that the graph reads for such bounds, each within its dimension."""
    found, dim = [], 0
    for part in parts:
        if is_bounded(part) and dim < x.dim():
            part = slice(*[bound_of(m, bound, x.shape[dim]) for bound in (part.start, part.stop)])
        found.append(part)
        dim += part.dim() if is_mask(part) else part is not None
    return tuple(found)


def bound_of(m: Machine, bound: Any, size: Any) -> Any:
    """A bound of a slice of a dimension, counted from its front."""
    if not is_place(bound):
        return bound
    bound = m.torch_call(torch.Tensor.long, (bound,), {})
    below = m.torch_call(torch.lt, (bound, 0), {})
    front = m.torch_call(torch.where, (below, m.torch_call(torch.add, (bound, size), {}), bound), {})
    number = m.call(torch.Tensor.item, (m.torch_call(torch.clamp, (front, 0, size), {}),))
    symbol = expr_of(number)
    symbol.scope.learn(ge(symbol, 0))
    symbol.scope.learn(le(symbol, expr_of(size)))
    return number


def spelled_out(m: Machine, x: Any, key: Any) -> Any:
    """An index of `x` with places for masks; MISSING where it has none, or they are not of its shape."""
    parts = key if type(key) is tuple else (key,)
    if any(map(is_bounded, parts)) and not any(part is ... for part in parts):
        parts = bounded(m, x, parts)
        if not any(map(is_mask, parts)):
            return parts
    if not any(map(is_mask, parts)) or any(part is ... or type(part) is bool for part in parts):
        return MISSING
    found: list[Any] = []
    dim = 0
    for part in parts:
        if is_mask(part):
            if tuple(part.shape) != tuple(x.shape[dim : dim + part.dim()]):
                return MISSING  # eager says so
            found += columns(m, part)
            dim += part.dim()
        else:
            found.append(part)
            dim += part is not None
    return tuple(found)


def read(m: Machine, x: Any, key: Any) -> Any:
    index = spelled_out(m, x, key)
    return MISSING if index is MISSING else m.torch_call(operator.getitem, (x, index), {})


def write(m: Machine, x: Any, key: Any, value: Any) -> Any:
    index = spelled_out(m, x, key)
    return MISSING if index is MISSING else m.torch_call(operator.setitem, (x, index, value), {})


def nonzero(m: Machine, x: Any, *, as_tuple: bool = False) -> Any:
    return columns(m, x) if as_tuple and x.dim() else MISSING if as_tuple else places(m, x)


def where(m: Machine, x: Any, *values: Any) -> Any:
    return MISSING if values or not x.dim() else columns(m, x)


def masked_select(m: Machine, x: Any, mask: Any) -> Any:
    x, mask = m.torch_call(torch.broadcast_tensors, (x, mask), {})
    return read(m, x, mask)


def repeat_interleave(
    m: Machine, x: Any, repeats: Any = None, dim: Any = None, *, output_size: Any = None
) -> Any:
    times = x if repeats is None else repeats
    if output_size is not None or type(times) is not FakeTensor or not times.dim():
        return MISSING
    size = m.call(torch.Tensor.item, (m.torch_call(torch.sum, (times,), {}),))
    given = (x,) if repeats is None else (x, repeats, dim)
    return m.torch_call(torch.repeat_interleave, given, {"output_size": size})


RULES: dict[Any, Callable[..., Any]] = {
    torch.where: where,
    **dict.fromkeys((operator.getitem, torch.Tensor.__getitem__), read),
    **dict.fromkeys((operator.setitem, torch.Tensor.__setitem__), write),
    **dict.fromkeys((torch.nonzero, torch.Tensor.nonzero), nonzero),
    **dict.fromkeys((torch.argwhere, torch.Tensor.argwhere), places),
    **dict.fromkeys((torch.masked_select, torch.Tensor.masked_select), masked_select),
    **dict.fromkeys((torch.repeat_interleave, torch.Tensor.repeat_interleave), repeat_interleave),
}  # fmt: skip
