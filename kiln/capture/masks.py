"""Indices of tensors that are tensors themselves.

A place, a tensor of one number, says no more than which item it is: the graph has it as it is.
Masks and repeats have results as long as a number says, which the graph reads. Where the program looks at it
the graph breaks where it was read, unless nothing may break.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._library import fake_impl

from kiln.base.conditions import eq, ge, le
from kiln.base.errors import Break
from kiln.base.expressions import Condition, Expr
from kiln.base.symbols import LIMIT, Symbol, total
from kiln.capture.frame import Machine, Restart
from kiln.capture.recorder import Recorder
from kiln.capture.torch_calls import Named
from kiln.capture.varying import Item
from kiln.check.guards import MISSING
from kiln.ops.fake import FakeTensor, constant_of, make, overlaps
from kiln.ops.layout import INTEGERS, is_place
from kiln.ops.symint import expr_of, wrap


def selected(m: Machine, function: Any, args: Any, kwargs: Any, reason: Break) -> Any:
    """What a call gives whose size depends on numbers; MISSING where another call needs values.

    `reason` is that of the break without it.
    """
    rule = RULES.get(function) or registered(function)
    if rule is None or kwargs.keys() & ELSEWHERE or not m.numbers and not taken(m):
        return MISSING
    m.selecting = m.frames[-1].step, Break(reason.kind, reason.why, reason.hint, m.frames[-1].place())
    return rule(m, *args, **kwargs)


def taken(m: Machine) -> bool:
    """Whether the call at hand is taken to give two items or more, as it was not to give fewer so far."""
    plain = type(m.recorder) is Recorder and not m.recorder.subclassed
    return plain and m.unforeseen is not None and text_of(m.place()) not in m.unforeseen


def text_of(place: Any) -> str:
    """What the check says when it fails."""
    return f"fewer than two items are selected at {place.file}:{place.line}:{place.column}"


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


def opened(m: Machine, low: int = -LIMIT) -> Symbol:
    """A number that only the graph has; where the program needs it, the graph breaks, if it may."""
    needed = None if m.numbers else Restart(*m.selecting)
    return m.world.varying.item(int, low, needed)


def found_by(m: Machine, symbol: Symbol, what: str, *call: Any) -> Any:
    """The number that a symbol stands for, an item or a size of a tensor, as this call gives it."""
    step, reason = m.selecting
    text = "" if m.numbers else text_of(reason.at)
    m.world.varying.items[symbol] = Item(call, step, reason, text)
    m.recorder.symbol(symbol, what, call[1])
    return wrap(symbol)


def expect_size(m: Machine, symbol: Symbol) -> None:
    """Take a number that the graph reads to be a size of two or more.

    The graph checks it; where it is not so the frame runs in Python, as after a branch that is expected.
    """
    item = m.world.varying.items[symbol]
    said = item.text or "a size is less than two"
    made = Named(functools.partial(unless, RuntimeError, said, "<="), "check", RuntimeError)
    m.recorder.note(made, (wrap(2 - symbol),))
    symbol.scope.learn(ge(symbol, 2))
    m.foreseen.update({item.text} - {""})
    # Such a graph runs in parts, in the program's order: what it wrote by now stays when the check fails.
    m.expected.append((item.step, item.reason, "" if m.recorder.dispatch.lasting else item.text))


def expect(m: Machine, fact: Condition) -> None:
    """Take for granted what torch would raise without, of numbers that the graph reads and checks."""
    item = next(m.world.varying.items[symbol] for symbol in fact.scope.open if symbol in fact.symbols())
    said = functools.partial(unless, RuntimeError, f"{fact} does not hold", fact.op)
    m.recorder.note(Named(said, "check", RuntimeError), (wrap(fact.args[0]),))
    fact.scope.learn(fact)
    m.expected.append((item.step, item.reason, ""))


def of_graph(m: Machine, fact: Condition) -> bool:
    """Whether only the graph can say if this holds."""
    numbers = fact.scope.open.keys() & fact.symbols()
    return bool(numbers) and numbers <= m.world.varying.items.keys() and fact.scope.known(fact) is None


HOLDS = {"==": operator.eq, "!=": operator.ne, "<=": operator.le}


def unless(error: type[Exception], text: str, sign: str, value: Any) -> None:
    """Raise where a number is not as told: equal to zero, unequal, or at most zero."""
    if not HOLDS[sign](value, 0):
        raise error(text)


def number_of(m: Machine, tensor: FakeTensor) -> Any:
    """The only number of a tensor, which the graph reads."""
    return found_by(m, opened(m), "item", torch.Tensor.item, tensor)


def places(m: Machine, mask: FakeTensor) -> Any:
    """Where a tensor is not zero, one row for each such element; the same one for a mask used again."""
    key = None if mask.is_inference() else (id(mask), mask._version)
    known = m.places.get(key)
    if known is None:
        length = opened(m, low=2)
        size = wrap(length), mask.dim()
        found = m.recorder.record(
            torch.nonzero, (mask,), lambda mask: make(size, (1, size[0]), torch.int64, mask.device)
        )
        found_by(m, length, "size", torch.Tensor.size, found, 0)
        expect_size(m, length)
        known = mask, found
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
    if (known := m.world.varying.of_only(bound)) is not None:
        return wrap(known)
    given, bound = bound, m.torch_call(torch.Tensor.long, (bound,), {})
    below = m.torch_call(torch.lt, (bound, 0), {})
    front = m.torch_call(torch.where, (below, m.torch_call(torch.add, (bound, size), {}), bound), {})
    number = number_of(m, m.torch_call(torch.clamp, (front, 0, size), {}))
    symbol = expr_of(number)
    symbol.scope.learn(ge(symbol, 0))
    symbol.scope.learn(le(symbol, expr_of(size)))
    m.world.varying.bounds[symbol] = given
    return number


def with_places(m: Machine, x: Any, key: Any, *value: Any) -> tuple[Any, ...]:
    """The arguments of a read or write with places for numbers that only the graph has."""
    parts = key if type(key) is tuple else (key,)
    found = tuple([as_place(m, part) for part in parts])
    changed = any(part is not before for part, before in zip(found, parts, strict=True))
    return (x, found, *value) if changed else (x, key, *value)


def as_place(m: Machine, part: Any) -> Any:
    """A number that only the graph has as a place, and so the bounds of a slice; other parts as they are."""
    if type(part) is slice:
        start, stop = (n if counted(n) else as_place(m, n) for n in (part.start, part.stop))
        return part if start is part.start and stop is part.stop else slice(start, stop, part.step)
    expr = expr_of(part) if type(part) is torch.SymInt else None
    if not isinstance(expr, Expr) or not expr.scope.is_open(expr):
        return part
    place = m.torch_call(torch.scalar_tensor, (part,), {"dtype": torch.int64})
    m.world.varying.placed[id(place)] = place, expr
    return place


def counted(number: Any) -> bool:
    """Whether a bound of a slice is known to count from the front."""
    expr = expr_of(number)
    return not isinstance(expr, Expr) or bool(expr.scope.known(ge(expr, 0)))


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


def merged(m: Machine, x: FakeTensor, mask: FakeTensor, target: Any) -> Any:
    """What `target` becomes by `target[mask] = x[mask]`: a choice where they are alike, else MISSING."""
    plain = type(m.recorder) is Recorder and not m.recorder.subclassed and not m.modes
    if type(target) is not FakeTensor or not plain or constant_of(mask) is not None:
        return MISSING
    if x.dtype is not target.dtype or not x.device == mask.device == target.device or overlaps(target):
        return MISSING
    if tuple(x.shape) != tuple(target.shape) or tuple(mask.shape) != tuple(x.shape[: mask.dim()]):
        return MISSING
    if mask.dim() < x.dim():
        mask = m.torch_call(operator.getitem, (mask, (..., *[None] * (x.dim() - mask.dim()))), {})
    found = m.torch_call(torch.where, (mask, x, target), {})
    m.merged[id(found)] = found
    return found


def written(m: Machine, function: Any, args: Any) -> Any:
    """A write of items of a tensor where a mask is true of which the places are known; else MISSING.

    The gradient of what is written is as long as they are many.
    """
    if len(args) != 3 or RULES.get(function) is not write:
        return MISSING
    _, mask, value = args
    known = is_mask(mask) and not mask.is_inference() and (id(mask), mask._version) in m.places
    return write(m, *args) if known and type(value) is FakeTensor and value.dim() else MISSING


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
    # Told the size, torch does not look for negative counts, and writes before its result.
    below = m.torch_call(torch.any, (m.torch_call(torch.lt, (times, 0), {}),), {})
    size = number_of(m, m.torch_call(torch.where, (below, -1, m.torch_call(torch.sum, (times,), {})), {}))
    given = (x,) if repeats is None else (x, repeats, dim)
    return m.torch_call(torch.repeat_interleave, given, {"output_size": size})


def split(m: Machine, x: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    """The parts are taken to be those of the whole, as torch raises otherwise."""
    if type(split_size_or_sections) not in (list, tuple):
        return MISSING
    sizes = [expr_of(n) for n in split_size_or_sections]
    facts = [eq(total(sizes), expr_of(x.shape[dim])), *[ge(n, 0) for n in sizes]]
    unknown = [fact for fact in facts if isinstance(fact, Condition) and of_graph(m, fact)]
    for fact in unknown:
        expect(m, fact)
    given = x, split_size_or_sections, dim
    return m.torch_call(torch.split_with_sizes, given, {}) if unknown else MISSING


def bincount(m: Machine, x: Any, weights: Any = None, minlength: Any = 0) -> Any:
    """As many counts as are asked for at least, taken to be all; MISSING where that cannot be checked."""
    step, reason = m.selecting
    said = f"another length than {minlength} is counted at {reason.at}"
    late = m.numbers or m.recorder.dispatch.lasting or m.unforeseen is None or said in m.unforeseen
    plain = x.dtype in INTEGERS and x.dim() == 1 and x.device.type == "cpu"
    if late or weights is not None or not plain or not minlength:
        return MISSING
    bounds = m.torch_call(torch.ge, (x, 0), {}), m.torch_call(torch.lt, (x, minlength), {})
    fits = m.torch_call(torch.all, (m.torch_call(torch.logical_and, bounds, {}),), {})
    m.recorder.note(torch._assert_async, (fits, said))
    m.foreseen.add(said)
    m.expected.append((step, reason, said))
    zeros = m.torch_call(torch.zeros, (minlength,), {"dtype": torch.int64})
    ones = m.torch_call(torch.ones_like, (x,), {"dtype": torch.int64})
    return m.torch_call(torch.scatter_add, (zeros, 0, m.torch_call(torch.Tensor.long, (x,), {}), ones), {})


def registered(function: Any) -> Callable[..., Any] | None:
    """The rule of a custom op for which the program says what it gives, with sizes that it asks for."""
    op = function
    if isinstance(function, torch._ops.OpOverloadPacket):
        names = function.overloads()
        op = getattr(function, names[0]) if len(names) == 1 else None
    if not isinstance(op, torch._ops.OpOverload) or op.namespace == "aten" or op._schema.is_mutable:
        return None
    kernel = torch._library.simple_registry.singleton.find(op.name()).fake_impl.kernel
    return None if kernel is None else functools.partial(sized, op=op, gives=kernel.func)


class Sizes:
    """What a function that a program registered for fakes asks for sizes that depend on values."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.made: list[Symbol] = []

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> Any:
        self.made.append(symbol := opened(self.m, low=2))
        if type(max) is int:
            symbol.scope.learn(le(symbol, max))
        return wrap(symbol)

    create_unbacked_symint = new_dynamic_size


def sized(m: Machine, *args: Any, op: Any, gives: Callable[..., Any], **kwargs: Any) -> Any:
    """A custom op whose results have sizes that the graph reads; MISSING where it may have a gradient."""
    names = [arg.name for arg in op._schema.arguments]
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    lists = any(isinstance(value, (list, tuple)) for value in (*args, *kwargs.values()))
    differs = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if differs or lists or kwargs.keys() - set(names):
        return MISSING
    args += tuple([kwargs.get(arg.name, arg.default_value) for arg in op._schema.arguments[len(args) :]])
    sizes = Sizes(m)

    def on_fakes(*args: Any) -> Any:
        with fake_impl.set_ctx_getter(lambda: sizes):
            return gives(*args)

    found = m.native(m.recorder.record, op, args, on_fakes)
    parts = [part for part in (found if isinstance(found, tuple) else (found,)) if type(part) is FakeTensor]
    for symbol in sizes.made:
        places = ((part, dim) for part in parts for dim, n in enumerate(part.shape) if expr_of(n) is symbol)
        part, dim = next(places, (None, 0))
        if part is None:
            raise Restart(*m.selecting)
        found_by(m, symbol, "size", torch.Tensor.size, part, dim)
        expect_size(m, symbol)
    return found


#: Arguments of calls that the rules leave alone.
ELSEWHERE = frozenset({"input", "out"})
RULES: dict[Any, Callable[..., Any]] = {
    torch.where: where,
    **dict.fromkeys((torch.bincount, torch.Tensor.bincount), bincount),
    **dict.fromkeys((torch.split, torch.Tensor.split), split),
    **dict.fromkeys((operator.getitem, torch.Tensor.__getitem__), read),
    **dict.fromkeys((operator.setitem, torch.Tensor.__setitem__), write),
    **dict.fromkeys((torch.nonzero, torch.Tensor.nonzero), nonzero),
    **dict.fromkeys((torch.argwhere, torch.Tensor.argwhere), places),
    **dict.fromkeys((torch.masked_select, torch.Tensor.masked_select), masked_select),
    **dict.fromkeys((torch.repeat_interleave, torch.Tensor.repeat_interleave), repeat_interleave),
}  # fmt: skip
