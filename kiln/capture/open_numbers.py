"""Numbers that `Tensor.item` gives: left open while the program only keeps them; the graph goes on."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kiln.base.arithmetic import mul
from kiln.base.conditions import eq, ge, le
from kiln.base.errors import Break
from kiln.base.expressions import Condition, Expr, Truth
from kiln.base.graph import gathered, mapped
from kiln.capture import attributes, masks, operators, symbolic
from kiln.capture.calls import HANDLERS, Args, Kwargs, handles
from kiln.capture.fake_arrays import OpenNumber, OpenText
from kiln.capture.frame import Machine, UserError
from kiln.capture.rebuild import MAKERS
from kiln.capture.torch_calls import Named
from kiln.capture.varying import Item
from kiln.check.guards import MISSING
from kiln.ops.fake import FakeTensor
from kiln.ops.symint import wrap


@handles(torch.Tensor.item)
def item(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """The number where it is known, or what eager raises; else one that is read after the graph."""
    try:
        return m.torch_call(torch.Tensor.item, args, kwargs)
    except Break as reason:
        if reason.kind == "data-dependent" and all(type(n) is int and n == 1 for n in args[0].shape):
            return left_open(m, args[0], reason)
        raise


def left_open(m: Machine, tensor: FakeTensor, reason: Break) -> Any:
    """The only number of a tensor, as it is now; `reason` is that of the break where the value is needed.

    Where nothing may break, the number is one that the graph computes with.
    """
    reason.at = m.frames[-1].place()
    kind, varying = kind_of(tensor), m.world.varying
    computes = m.numbers and kind in (int, float, bool)
    known = varying.of_only(tensor) if computes else None
    if known is not None:
        return wrap(known) != 0 if kind is bool else wrap(known)
    kept = m.torch_call(torch.clone, (m.torch_call(torch.Tensor.detach, (tensor,), {}),), {})
    if computes:
        if kind is bool:
            kept = m.torch_call(torch.Tensor.int, (kept,), {})
        symbol = varying.item(float if kind is float else int, needed=reason if kind is bool else None)
        varying.items[symbol] = Item((torch.Tensor.item, kept), m.frames[-1].step, reason)
        m.recorder.symbol(symbol, "item", kept)
        if not tensor.is_inference():
            varying.only[id(tensor)] = tensor, tensor._version, symbol
        return wrap(symbol) != 0 if kind is bool else wrap(symbol)
    return OpenNumber(kind, kept, m.frames[-1].step, reason)


def given(m: Machine, function: Any, args: Args, kwargs: Kwargs, reason: Break) -> Any:
    """A call that is given a tensor where it takes a number: of that number, where nothing may break.

    MISSING where another call needs values.
    """
    read: Any = reason.read
    number = m.numbers and type(read) is FakeTensor and kind_of(read) in (int, float)
    own = hasattr(function, "__objclass__") and args[0] is read  # what a method is one of is no number
    if not number or own or not any(one is read for one in gathered(FakeTensor, args, kwargs)):
        return MISSING
    known = left_open(m, read, reason)
    args, kwargs = mapped((args, kwargs), lambda value: known if value is read else value)
    try:
        return m.torch_call(function, args, kwargs)
    except UserError:
        raise reason from None


def assume_sizes(m: Machine, question: Condition) -> bool | None:
    """What torch asks of a size that the graph reads: taken to be two or more, as sizes are that vary.

    Where nothing may break, it is also taken to be within bounds, and parts to be those of the whole.
    """
    scope, items = m.world.varying.scope, m.world.varying.items
    symbols = scope.open.keys() & question.symbols()
    if not m.recorder.asking or not symbols <= items.keys() or any(s.real for s in symbols):
        return None
    for symbol in symbols:
        if scope.known(ge(symbol, 2)) is None:
            masks.expect_size(m, symbol)
    answer = scope.known(question)
    if answer is None and m.numbers:
        for part in question.args if question.op == "and" else (question,):
            fact = None
            if scope.known(part) is None:
                fact = same if (same := as_number(m, part)) is not None else within_bounds(part)
            if isinstance(fact, Condition):
                masks.expect(m, fact)
        answer = scope.known(question)
    return answer


def as_number(m: Machine, question: Condition) -> Truth | None:
    """That a bound of a slice is the number itself, where both are compared."""
    for symbol in question.symbols() if question.op in ("==", "!=") else ():
        number = m.world.varying.number_within(symbol)
        if isinstance(number, Expr) and not question.symbols() - number.symbols() - {symbol}:
            same = eq(symbol, number)
            if isinstance(same, Condition) and same.args[0] in (question.args[0], mul(-1, question.args[0])):
                return same
    return None


def within_bounds(question: Condition) -> Truth | None:
    """The question or its contrary: sizes are not zero, the numbers of the graph not too great, or as asked.

    Of numbers of which none is known to be the greater, what holds is what does where they are equal.
    """
    scope = question.scope
    expr = scope.simplify(question.args[0]) if question.op in ("<=", "!=", "==") else None
    if not isinstance(expr, Expr):
        return None
    if question.op != "<=":
        least, most = scope.known(ge(expr, 0)), scope.known(le(expr, 0))
        return ge(expr, 1) if least else le(expr, -1) if most else eq(expr, 0)
    signs = {factor > 0 for term, factor in expr.poly.items() if scope.open.keys() & set(term)}
    upper = signs == {True} or len(signs) == 2 and expr.poly.get((), 0) <= 0
    return le(expr, 0) if upper else ge(expr, 1) if signs else None


@handles(torch.Tensor.tolist)
def tolist(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """The numbers of a short tensor, where nothing may break."""
    (tensor,) = args
    if not m.numbers or tensor.numel() > LONGEST:
        return m.torch_call(torch.Tensor.tolist, args, kwargs)
    if not tensor.dim():
        return item(m, args, kwargs)
    rows = [m.torch_call(torch.Tensor.select, (tensor, 0, i), {}) for i in range(tensor.shape[0])]
    return [tolist(m, (row,), {}) for row in rows]


#: How many numbers of a tensor one graph reads at most.
LONGEST = 64


@handles(torch._check_with)
def check(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """What the program says of numbers: known from then on, and checked where the graph has them."""
    error, holds, message = args
    told = holds.node.expr if type(holds) is torch.SymBool else None
    if told is None or told.op not in masks.HOLDS:
        if not m.truth(holds):
            raise UserError(error(check_text(m, message)))
        return
    made = Named(functools.partial(masks.unless, error, check_text(m, message), told.op), "check", error)
    m.recorder.note(made, (wrap(told.args[0]),))
    told.scope.learn(told)


def check_text(m: Machine, message: Any) -> str:
    """What torch says where such a condition does not hold."""
    text = "Expected cond to be True, but got False. (Could this error message be improved? If so, please "
    return f"{text}report an enhancement request to PyTorch.)" if message is None else str(m.call(message))


def kind_of(tensor: FakeTensor) -> type:
    """The type of the tensor's numbers in Python."""
    if tensor.dtype is torch.bool:
        return bool
    return complex if tensor.is_complex() else float if tensor.is_floating_point() else int


#: The types of what stands for numbers and texts of which less than the value is known.
UNKNOWN = symbolic.SYMBOLIC | {OpenNumber, OpenText}
#: Of these Python has one object each.
SMALL = range(-5, 257)


def one_object(m: Machine, a: Any, b: Any) -> bool:
    """`a is b` of two values, one unknown: truths and small integers are one where they are equal."""
    kind, other = map(kind_in_python, (a, b))
    if kind is not other or kind in (float, complex):
        return False
    for value in (a, b):
        if isinstance(value, OpenNumber):
            raise value.needed()
    equal = m.truth(operators.compare(m, "==", a, b))
    return equal and (kind is bool or symbolic.concrete(a) in SMALL)


def kind_in_python(value: Any) -> Any:
    """The type that the program sees."""
    return value.kind if isinstance(value, OpenNumber) else symbolic.SEEN_AS.get(type(value), type(value))


def load(m: Machine, number: OpenNumber, name: str) -> Any:
    """An attribute of a number: a method of it would look at the value."""
    if name == "__class__":
        return m.world.constant(number.kind)
    raise number.needed()


attributes.LOADERS[OpenNumber] = attributes.LOADERS[OpenText] = load
MAKERS[OpenText] = lambda r, value: r.source(value.source)
MAKERS[OpenNumber] = lambda r, value: r.call(torch.Tensor.item, value.tensor)


BEFORE: dict[Any, Any] = {kind: HANDLERS[id(kind)] for kind in (float, int)}


@handles(*BEFORE, told=True)
def converted(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """`float(x)` and `int(x)` are captured, of a tensor, as those of `x.item()`, where that is open."""
    before = BEFORE[function]
    if len(args) == 1 and type(args[0]) is FakeTensor and kind_of(args[0]) in (int, float):
        same = kind_of(args[0]) is function
        if same or m.numbers:
            number = item(m, args, kwargs)
            return number if same else before(m, (number,), kwargs)
    return before(m, args, kwargs)


@handles(bool)
def truth(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """`bool(x)`: left open, where nothing may break, for a program that only keeps it."""
    (value,) = args or (False,)
    if m.numbers and type(value) in symbolic.SYMBOLIC:
        return value if type(value) is torch.SymBool else m.native(symbolic.compare, "!=", value, 0)
    try:
        return m.truth(value)
    except Break as reason:
        one = type(value) is FakeTensor and all(type(n) is int and n == 1 for n in value.shape)
        if not m.numbers or not one:
            raise
        return left_open(m, m.torch_call(torch.Tensor.bool, (value,), {}), reason)
