"""What a softmax is in terms: other forms of it cost less and lose nothing."""

from __future__ import annotations

import math

import torch

from kiln.fuse.nest import Apply, Const, Fold, Nest, Term, children
from kiln.fuse.split import pair_of
from kiln.generate import functions
from kiln.generate.functions import compute_type
from kiln.generate.llvm import F32, Value, fma
from kiln.generate.scalar import TYPES

#: The lowest finite number: powers relative to it are 0 or 1, those relative to an infinity are no numbers.
LOWEST = -3.4028234663852886e38


def pair(nest: Nest) -> tuple[Fold, Fold] | None:
    """The first two folds of a nest where they are a largest value and a sum of exponentials below it."""
    if any(s.phase < 2 and not s.kept for s in nest.stores):
        return None
    first, second = ([f for f in nest.folds() if f.phase == phase] for phase in (0, 1))
    found = pair_of(first, second)
    if found is not None:
        return found if subtracted(found[1].value) is found[0] else None
    if len(first) != 1 or len(second) != 1:
        return None
    (top,), (total,) = first, second
    return (top, total) if total.kind == "sum" and guarded(total.value) is top else None


def forgetful(nest: Nest) -> Fold | None:
    """A largest value that need not be a NaN where one is in its row: the sum of exponentials is one then."""
    found = pair(nest)
    if found is None:
        return None
    top, total = found
    if guarded(total.value) is top:
        return top if _in_logarithm_alone(nest, top, total) else None
    for term in nest.terms():
        below = children(term)
        if any(c is top for c in below) and not _less(term, top):
            return None
        if any(_less(c, top) for c in below) and term is not total.value and not _less_logarithm(term, total):
            return None
    return None if any(s.value is top or _less(s.value, top) for s in nest.stores) else top


def _in_logarithm_alone(nest: Nest, top: Fold, total: Fold) -> bool:
    """Whether a guarded largest value is asked for beside the logarithm of its sum alone."""
    (difference,) = children(total.value)
    shift = children(difference)[1]
    infinite = children(shift)[0]
    own = [shift, infinite, children(infinite)[0]]
    for term in nest.terms():
        below = children(term)
        if any(c is top for c in below) and not any(term is t for t in own):
            return False
        if any(c is shift for c in below) and term is not difference and not logarithm_added(term, total):
            return False
    return not any(s.value is top or s.value is shift for s in nest.stores)


def shares(nest: Nest) -> tuple[Fold, Fold] | None:
    """The pair where all that is asked for are the exponentials' shares of their sum.

    They are the same below any number in place of the largest.
    """
    found = pair(nest)
    if found is None:
        return None
    top, total = found
    power = total.value
    (difference,) = children(power)
    users: dict[int, Term | None] = {id(top): difference, id(difference): power, id(power): total}
    users[id(total)] = None
    for term in nest.terms():
        share = isinstance(term, Apply) and term.op == "div" and normalised(term)
        if not share and any(users.get(id(child), term) is not term for child in children(term)):
            return None
    return None if any(id(s.value) in users for s in nest.stores) else found


def _less(term: Term, top: Fold) -> bool:
    """Whether a term is something less this value."""
    return isinstance(term, Apply) and term.op == "sub" and term.args[1] is top and term.args[0] is not top


def _less_logarithm(term: Term, total: Fold) -> bool:
    """Whether a term is something less the logarithm of this sum."""
    if not isinstance(term, Apply) or term.op != "sub":
        return False
    other = term.args[1]
    return isinstance(other, Apply) and other.op == "log" and other.args[0] is total


def normalised(term: Apply) -> bool:
    """Whether a quotient is that of a softmax: its divisor is 1 or more, or no number."""
    value, total = term.args
    if not isinstance(total, Fold) or total.kind != "sum" or total.value is not value:
        return False
    return subtracted(value) is not None


def subtracted(power: Term) -> Fold | None:
    """The largest value of a row that all of it is less than in an exponential of f32; None for others."""
    if not isinstance(power, Apply) or power.op != "exp":
        return None
    (difference,) = power.args
    if not isinstance(difference, Apply) or difference.op != "sub":
        return None
    value, top = difference.args
    if not isinstance(top, Fold) or top.kind != "amax" or top.value is not value:
        return None
    return top if compute_type(TYPES[value.dtype]) == F32 else None


def guarded(power: Term) -> Fold | None:
    """The same where it is 0 in place of an infinite largest value that is subtracted."""
    match power:
        case Apply("exp", (Apply("sub", (value, Apply("where", (infinite, Const(0.0), Fold() as top)))),)):
            fits = top.kind == "amax" and top.value is value and value.dtype is torch.float32
        case _:
            return None
    match infinite:
        case Apply("eq", (Apply("abs", (largest,)), Const(math.inf))) if fits and largest is top:
            return top
    return None


def summed(total: Fold) -> bool:
    """Whether a fold is the sum of a softmax: one of what is summed is 1."""
    if total.kind != "sum":
        return False
    return subtracted(total.value) is not None or guarded(total.value) is not None


def logarithm_added(term: Term, total: Fold | None = None) -> bool:
    """Whether a term is the logarithm of a guarded sum, of this one, and what its powers are below."""
    match term:
        case Apply("add", (Apply("log", (Fold() as found,)), shift)) if total is None or found is total:
            return guarded(found.value) is not None and children(children(found.value)[0])[1] is shift
    return False


def logarithm_subtracted(term: Apply) -> bool:
    """Whether a term is that of a logarithmic softmax: no two numbers of one sign are subtracted in it."""
    if term.op != "sub" or not isinstance(term.args[1], Apply) or not term.args[1].args:
        return False
    total = term.args[1].args[0]
    if not isinstance(total, Fold) or not summed(total) or not _less_logarithm(term, total):
        return False
    top = subtracted(total.value)
    return top is not None and _less(term.args[0], top)


def bounded(term: Apply, given: list[Value], loose: bool) -> Value | None:
    """An exponential or a quotient of a softmax in f32; None for other terms.

    The inverse of the divisor comes in two parts, but where fewer places will do.
    """
    if term.op == "exp" and subtracted(term) is not None:
        return functions.exp_below(given[0], loose)
    if term.op != "div" or not normalised(term):
        return None
    value, total = given
    inverse = 1.0 / total
    if loose:
        return value * inverse
    return fma(value, inverse, value * (fma(-total, inverse, 1.0) * inverse))
