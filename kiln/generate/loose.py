"""Which values need few places: they have a type of two bytes, or what comes of them is rounded to one."""

from __future__ import annotations

import torch

from kiln.fuse.lower import HALVES
from kiln.fuse.nest import Apply, Fold, Nest, Term, children
from kiln.generate.softmax import logarithm_added, logarithm_subtracted, summed

#: Functions whose relative error is no more than that of what they are given.
_STEADY = ("mul", "div", "neg", "where", "tanh")


def loose(nest: Nest) -> frozenset[int]:
    """The ids of such terms: of f32 those whose errors stay as small in products and sums of a softmax."""
    found = nest.terms()
    half = {id(term) for term in found if isinstance(term, Apply) and term.dtype in HALVES}
    strict = {id(store.value) for store in nest.stores}
    for term in reversed(found) if half else ():  # what uses a term comes before it
        if not (id(term) in half or id(term) not in strict and _hands_on(term)):
            strict.update(id(child) for child in children(term))
    few = [id(t) for t in found if t.dtype is torch.float32 and id(t) not in strict] if half else ()
    return frozenset(half.union(few))


def _hands_on(term: Term) -> bool:
    """Whether a term is as exact as what it is made of."""
    if isinstance(term, Fold):
        return summed(term)
    if not isinstance(term, Apply):
        return False
    if term.op == "log":
        (below,) = term.args
        return isinstance(below, Fold) and summed(below)
    if term.op == "log1p":  # of a positive number
        (below,) = term.args
        return isinstance(below, Apply) and below.op == "exp"
    return term.op in _STEADY or logarithm_subtracted(term) or logarithm_added(term)
