"""What a softmax and a GELU by tanh are in terms: other forms of them cost less and lose nothing."""

from __future__ import annotations

from typing import TypeGuard

from kiln.fuse.nest import Apply, Const, Fold, Nest, Term, children, terms
from kiln.generate import functions
from kiln.generate.functions import compute_type
from kiln.generate.llvm import F32, Value
from kiln.generate.scalar import TYPES


def pair(nest: Nest) -> tuple[Fold, Fold] | None:
    """The first two folds of a nest where they are a largest value and a sum of exponentials below it."""
    found = [f for f in nest.folds() if f.phase < 2]
    if len(found) != 2 or any(s.phase < 2 and not s.kept for s in nest.stores):
        return None
    top, total = sorted(found, key=lambda f: f.phase)
    if (top.kind, total.kind, top.phase, total.phase) != ("amax", "sum", 0, 1):
        return None
    return (top, total) if subtracted(total.value) is top else None


def forgetful(nest: Nest) -> Fold | None:
    """A largest value that need not be a NaN where one is in its row: the sum of exponentials is one then."""
    found = pair(nest)
    if found is None:
        return None
    top, total = found
    power = total.value
    (difference,) = children(power)
    everything = terms(s.value for s in nest.stores)
    for term in everything:
        below = children(term)
        if any(c is top for c in below) and term is not difference:
            return None
        if any(c is difference for c in below) and term is not power and not _less_logarithm(term, total):
            return None
    return None if any(s.value is top or s.value is difference for s in nest.stores) else top


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


def logistic(term: Term) -> tuple[Term, Term] | None:
    """x and u of x / 2 (1 + tanh u) in f32, which is x / (1 + e^(-2 u)); None for other terms."""
    if not isinstance(term, Apply) or term.op != "mul" or compute_type(TYPES[term.dtype]) != F32:
        return None
    half, sum_ = term.args
    if not _is(half, "mul", 0.5) or not _is(sum_, "add", 1.0):
        return None
    curve = sum_.args[0]
    return (half.args[0], curve.args[0]) if isinstance(curve, Apply) and curve.op == "tanh" else None


def _is(term: Term, op: str, number: float) -> TypeGuard[Apply]:
    """Whether a term is a function of another one and of this number."""
    if not isinstance(term, Apply) or term.op != op:
        return False
    other = term.args[1]
    return isinstance(other, Const) and other.value == number


def weighted(x: Value, u: Value) -> Value:
    """x / (1 + e^(-2 u))."""
    power = functions.apply("exp", u * -2.0)
    return x / (power + 1.0)


def bounded(term: Apply, given: list[Value]) -> Value | None:
    """An exponential or a quotient of a softmax in f32; None for other terms."""
    if term.op == "exp" and subtracted(term) is not None:
        return functions.exp_below(given[0])
    if term.op != "div" or not normalised(term):
        return None
    value, total = given
    return value * (1.0 / total)
