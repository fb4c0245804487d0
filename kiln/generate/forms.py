"""Activations as other forms of their terms, which cost less and lose nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from kiln.fuse.nest import Apply, Const, Term
from kiln.generate import functions
from kiln.generate.functions import compute_type
from kiln.generate.llvm import F32, Value, fma
from kiln.generate.registers import LANES
from kiln.generate.scalar import TYPES

CUBE, ROOT_HALF, SLOPE = 0.044715, math.sqrt(0.5), math.sqrt(2 / math.pi)
BELL = math.sqrt(0.5 / math.pi)  # the normal curve at 0

Form = Callable[..., Value]

# Patterns: a function with its arguments, a number, or the name of any term; of one name it is one term.
_CUBIC = ("mul", ("add", "x", ("mul", ("mul", ("mul", "x", "x"), "x"), CUBE)), SLOPE)
_TWICE_AREA = ("add", ("erf", ("mul", "x", ROOT_HALF)), 1.0)
_LOGISTIC = ("mul", ("mul", "x", 0.5), ("add", ("tanh", "u"), 1.0))
_GELU_BY_TANH = ("mul", ("mul", "x", 0.5), ("add", ("tanh", _CUBIC), 1.0))
_GELU = ("mul", ("mul", "x", 0.5), _TWICE_AREA)
_LOG_OF_POWER = ("log1p", ("exp", "x"))
_SOFTPLUS = ("where", ("gt", "x", 20.0), "x", _LOG_OF_POWER)  # what is chosen is the same number there
_GELU_SLOPE = (
    "add",
    ("mul", _TWICE_AREA, 0.5),
    ("mul", "x", ("mul", ("exp", ("mul", ("mul", "x", "x"), -0.5)), BELL)),
)
_TANH = ("tanh", _CUBIC)
_GELU_BY_TANH_SLOPE = (
    "add",
    ("mul", ("add", _TANH, 1.0), 0.5),
    (
        "mul",
        ("mul", ("mul", "x", 0.5), ("add", ("neg", ("mul", _TANH, _TANH)), 1.0)),
        ("mul", ("add", ("mul", ("mul", "x", "x"), 3 * CUBE), 1.0), SLOPE),
    ),
)
_OTHER_SHARE = ("add", ("neg", ("sigmoid", "x")), 1.0)
_SILU_SLOPE = ("mul", ("mul", "g", ("sigmoid", "x")), ("add", ("mul", "x", _OTHER_SHARE), 1.0))  # times g


def _weighted(x: Value, u: Value) -> Value:
    """x / (1 + e^(-2 u)), which is x / 2 (1 + tanh u)."""
    return x / (functions.apply("exp", u * -2.0) + 1.0)


def _weighted_loosely(x: Value, u: Value) -> Value:
    return _shared_loosely(x, u * (-2 / functions.LN2))


def _gelu_by_tanh_loosely(x: Value) -> Value:
    slope = -2 * SLOPE / functions.LN2
    return _shared_loosely(x, x * fma(x * x, slope * CUBE, slope))


def _shared_loosely(x: Value, u: Value) -> Value:
    """x / (1 + 2^u)."""
    share: Value = x.fn.module.own["loose share"](u)
    return x * share


def _gelu_by_tanh(x: Value) -> Value:
    power = functions.apply("exp", x * fma(x * x, -2 * SLOPE * CUBE, -2 * SLOPE))
    return x / (power + 1.0)


def _gelu_by_tanh_slope_loosely(x: Value) -> Value:
    found: Value = x.fn.module.own["loose gelu_by_tanh_slope"](x, 2 * SLOPE * CUBE, 2 * SLOPE)
    return found


# log(1 + y) / y - 1 in y, 0 <= y <= 1, and to 2^-13
_SOFT = (-0.4999993276398183, 0.33330511329271517, -0.24958587502930804, 0.19695400920479303,
         -0.15355397347486263, 0.10680557239351414, -0.057664461061665645, 0.020204593839164467,
         -0.0033184745162644995)  # fmt: skip
_SOFT_LOOSE = (-0.4977744903224232, 0.30922474341763495, -0.16136303361943358, 0.04310625750290031)
OVERFLOW = 88.72283935546875  # from here on an exponential is infinite


def _softplus(x: Value) -> Value:
    """log(1 + e^x) as the larger of x and 0 and log(1 + y), y = e^-|x|."""
    return _above_zero(x, functions.exp_below(-functions.absolute(x)), _SOFT, "soft")


def _softplus_loosely(x: Value) -> Value:
    return _above_zero(x, x.fn.module.own["loose exp"](-functions.absolute(x)), _SOFT_LOOSE)


def _above_zero(x: Value, y: Value, terms: tuple[float, ...], name: str = "") -> Value:
    own = x.fn.module.own.get(name) if y.type.width % LANES == 0 else None
    share: Value = functions.polynomial(y, (1.0, *terms)) if own is None else own(y)
    return fma(share, y, functions.at_least(x, 0.0))


def _tanh_of_softplus(x: Value) -> Value:
    """n / (n + 2) with n = (1 + e^x)^2 - 1, which is a sum of positive numbers; 1 from 20 on."""
    power = functions.exp_below(functions.at_most(x, 20.0))
    n = power * (power + 2.0)
    return n / (n + 2.0)


def _tanh_of_softplus_loosely(x: Value) -> Value:
    power = x.fn.module.own["loose exp"](functions.at_most(x, 20.0))
    n = power * (power + 2.0)
    share: Value = n * x.fn.module.own["loose inverse"](n + 2.0)
    return share


def _until_overflow(softplus: Form) -> Form:
    return lambda x: (x >= OVERFLOW).where(math.inf, softplus(x))


#: Patterns, names of what they are computed from, how, and how where few places will do: a name is that of
#: what the machine does better.
_FORMS: tuple[tuple[Any, tuple[str, ...], Form | str, Form | str], ...] = (
    (_GELU_BY_TANH, ("x",), _gelu_by_tanh, _gelu_by_tanh_loosely),
    (_LOGISTIC, ("x", "u"), _weighted, _weighted_loosely),
    (_GELU_BY_TANH_SLOPE, ("x",), "gelu_by_tanh_slope", _gelu_by_tanh_slope_loosely),
    (_SILU_SLOPE, ("g", "x"), "silu_slope", "loose silu_slope"),
    (_GELU, ("x",), "gelu", "loose gelu"),
    (_GELU_SLOPE, ("x",), "gelu_slope", "loose gelu_slope"),
    (_SOFTPLUS, ("x",), _softplus, _softplus_loosely),
    (("tanh", _LOG_OF_POWER), ("x",), _tanh_of_softplus, _tanh_of_softplus_loosely),
    (_LOG_OF_POWER, ("x",), _until_overflow(_softplus), _until_overflow(_softplus_loosely)),
)

#: The same by the op that a pattern begins with.
_FORMS_OF = {op: [form for form in _FORMS if form[0][0] == op] for op in {form[0][0] for form in _FORMS}}


def another(
    term: Term, own: Mapping[str, Form], loose: bool = False
) -> tuple[tuple[Term, ...], Form] | None:
    """What a term of f32 is computed from, and how, where there is a form that costs less."""
    if not isinstance(term, Apply) or (forms := _FORMS_OF.get(term.op)) is None:
        return None
    if compute_type(TYPES[term.dtype]) != F32:
        return None
    for pattern, names, exact, rough in forms:
        form = rough if loose else exact
        how = own.get(form) if isinstance(form, str) else form
        found: dict[str, Term] = {}
        if how is not None and _fits(term, pattern, found):
            return tuple([found[name] for name in names]), how
    return None


def logistic(term: Term) -> tuple[Term, Term] | None:
    """x and u of x / 2 (1 + tanh u) in f32; None for other terms."""
    found: dict[str, Term] = {}
    if compute_type(TYPES[term.dtype]) != F32 or not _fits(term, _LOGISTIC, found):
        return None
    return found["x"], found["u"]


def _fits(term: Term, pattern: Any, found: dict[str, Term]) -> bool:
    """Whether a term is as a pattern says; what its names stand for is added to `found`."""
    if isinstance(pattern, str):
        return found.setdefault(pattern, term) is term
    if isinstance(pattern, float):
        return isinstance(term, Const) and term.value == pattern
    op, *below = pattern
    if not isinstance(term, Apply) or term.op != op:
        return False
    return all(_fits(a, b, found) for a, b in zip(term.args, below, strict=True))
