"""Sums and sums of squared distances from the mean, in one pass over what is read from memory.

The distances are taken from one of the row's elements: then no mean has to be known before. Of a row that
is far from 0 beside its width they are short, so that the sum of their squares less that of the mean keeps
its digits. Of three elements, none at the row's ends, it is the middle one: a single one may be far off.

A mean is that of distances from the first element in two passes, too: of equal numbers it is their own.
One that is stored is of the numbers themselves, unless they are equal: beside a far element it loses digits.

Eager's batch norm takes distances from a mean that is rounded to a float. Over long rows the rounding of the
distances themselves averages out: in one pass, in double, the result is the same number in single precision.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from kiln.fuse.merge import rewritten, substituted
from kiln.fuse.nest import Apply, Buffer, Const, Fold, Load, Nest, Store, Term, terms
from kiln.fuse.split import Cuts, axis_to_cut, replaced

FLOAT, DOUBLE = torch.float32, torch.float64
#: Numbers of so few bits that in doubles neither their squares nor sums of them lose any.
SHORT = torch.bfloat16
#: Elements of a row that the nearest cache does not hold.
LONG = 1 << 15


def in_one_pass(nest: Nest, cuts: Cuts) -> Nest:
    """The nest with its second phase in the first, where that is of squared distances from means alone.

    Where it is not cut, its rows are near by and gone over twice, which loses nothing; in double precision
    one pass loses nothing of numbers that are rounded to less.
    """
    folds = nest.folds()
    later = [f for f in folds if f.phase == 1]
    if not later or not all(type(a.size) is int and a.low == 0 for a in nest.reduced):
        return nest
    cut = axis_to_cut(nest, cuts) is not None
    if not cut and cuts.at_once:
        return nest
    count = math.prod(a.size for a in nest.reduced)
    means = [mean_of(squares, count) for squares in later]
    double = [f for f in later if f.dtype is DOUBLE]
    if None in means or double and (double != later or any(s.buffer.dtype is DOUBLE for s in nest.stores)):
        return nest
    if any(map(is_rounded, later)) and not cut and count < LONG:
        return nest
    once = cut or bool(double)
    # Of the same phase as before are the folds of the first; all others are a phase earlier in one pass.
    known: dict[int, Term] = {id(f): f for f in folds if f.phase == 0}
    stored: dict[int, Term] = {}
    for squares, mean in zip(later, means, strict=True):
        total, kind = mean.args[0], squares.dtype
        known.update({id(t): t for t in terms([total.value])})
        if source(total.value).dtype is SHORT:
            wide = Fold("sum", of_floats("mul", total.value, total.value), kind, 0)
            known[id(squares)] = around_mean(wide, total, mean)
            continue
        start = usual(total.value, nest) if once else finite(at(total.value, nest, 0))
        step = of_floats("sub", total.value, start)
        far: Term = Fold("sum", step, kind, 0)
        share = of_floats("div", far, number(count, kind))
        whole = of_floats("mul", start, number(count, kind))
        known[id(total)] = of_floats("add", far, whole)
        known[id(mean)] = of_floats("add", start, share)
        equal = Apply("eq", (far, number(0, kind)), torch.bool)
        if kind is FLOAT:
            stored[id(total)] = of_floats("where", equal, whole, total)
            stored[id(mean)] = of_floats("where", equal, start, of_floats("div", total, number(count, kind)))
        if once:
            wide = Fold("sum", of_floats("mul", step, step), kind, 0)
            if is_rounded(squares):
                middle = Apply("convert", (Apply("convert", (known[id(mean)],), FLOAT),), kind)
                share = of_floats("sub", middle, start)
                left = of_floats("sub", far, of_floats("mul", share, number(count, kind)))
                far = of_floats("add", far, left)
            known[id(squares)] = around_mean(wide, far, share)
    earlier, roots = 1 if once else 0, [s.value for s in nest.stores]
    made = replaced([*roots, *later], known, earlier)
    known |= stored | {id(squares): new for squares, new in zip(later, made[len(roots) :], strict=True)}
    stores = []
    for store, value in zip(nest.stores, made, strict=False):
        if store.kept:
            (value,) = replaced([store.value], known, earlier)
        phase = min(store.phase, max(store.phase - 1, 1)) if once else store.phase
        stores.append(replace(store, value=value, phase=phase))
    return replace(nest, stores=stores)


def mean_of(squares: Fold, count: int) -> Any:
    """The mean, a sum's share, that distances are from in a sum of their squares; None for other folds."""
    power: Any = source(squares.value)
    if squares.kind != "sum" or squares.dtype not in (FLOAT, DOUBLE) or not is_call(power, "mul"):
        return None
    distance = power.args[0]
    if distance is not power.args[1] or not is_call(distance, "sub"):
        return None
    element: Term = distance.args[0]
    mean: Any = distance.args[1]
    if is_rounded(squares):
        mean = mean.args[0] if power.dtype is FLOAT and is_call(mean, "convert") else None
    if not is_call(mean, "div") or not isinstance(mean.args[1], Const) or mean.args[1].value != count:
        return None
    total = mean.args[0]
    if not isinstance(total, Fold) or total.kind != "sum" or total.phase or total.dtype is not squares.dtype:
        return None
    fits = element in (total.value, source(total.value))
    return mean if fits and source(element).dtype in (FLOAT, SHORT) and is_plain(element) else None


def is_rounded(squares: Fold) -> bool:
    """Whether what is squared, and the mean, are rounded before squares are summed in double."""
    return source(squares.value) is not squares.value


def source(element: Term) -> Term:
    """What a number of double precision was before."""
    return element.args[0] if element.dtype is DOUBLE and is_call(element, "convert") else element


def around_mean(squares: Fold, far: Term, share: Term) -> Term:
    """The sum of squares less that of the mean: 0 at least, infinite where squares of finite numbers are."""
    none = number(0, far.dtype)
    left = of_floats("sub", squares, of_floats("mul", far, share))
    left = of_floats("where", Apply("lt", (left, none), torch.bool), none, left)
    if far.dtype is DOUBLE:
        return left
    many = Apply("eq", (squares, number(math.inf, far.dtype)), torch.bool)
    return of_floats("where", many, of_floats("add", squares, of_floats("mul", far, none)), left)


def of_floats(op: str, *args: Term) -> Term:
    return Apply(op, args, args[-1].dtype)


def number(value: float, dtype: torch.dtype) -> Term:
    return Const(float(value), dtype)


def is_plain(value: Term) -> bool:
    """Whether a value is read without conditions at places that are no data."""
    found = terms([value])
    return not any(isinstance(t, Fold) or isinstance(t, Load) and (t.places or t.valid) for t in found)


def is_call(term: Any, op: str) -> TypeGuard[Apply]:
    return isinstance(term, Apply) and term.op == op


def usual(value: Term, nest: Nest) -> Term:
    """The middle one of three of the values that are folded; 0 where it is not finite."""
    one, other, third = (at(value, nest, quarter) for quarter in (1, 2, 3))
    low, high = of_floats("minimum", one, other), of_floats("maximum", one, other)
    return finite(of_floats("maximum", low, of_floats("minimum", high, third)))


def finite(value: Term) -> Term:
    """The value, or 0 where it is an infinity or no number."""
    is_finite = Apply("lt", (of_floats("abs", value), number(math.inf, value.dtype)), torch.bool)
    return of_floats("where", is_finite, value, number(0, value.dtype))


def at(value: Term, nest: Nest, quarter: int) -> Term:
    """The value so many quarters along all that is folded."""
    moves: dict[Any, Any] = {axis.variable: axis.size * quarter // 4 for axis in nest.reduced}
    (store,) = rewritten(
        [Store(Buffer("", value.dtype), 0, value, 0, True)], lambda index: substituted(index, moves)
    )
    return store.value
