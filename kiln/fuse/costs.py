"""The cost model of fusion: when loops make a value anew, and when it is kept in memory.

A value that several kernels need costs, kept, one write of its bytes and one read in each of them; made
anew, in each of them, what it is computed from is read and its functions run. Loops are bound by memory as
long as a function costs a cycle or so for a vector, so what counts is bytes, up to a number of functions:

  - what is much smaller than the loops that read it comes out of the cache either way: it is made anew up to
    CHEAP functions, and saves a kernel; but not where much that it is made of would be held beside what they
    make;
  - what one node alone reads is made there up to SLIGHT functions: nothing is computed twice; but not after
    eager's kernels for which more than twice its bytes would be held;
  - what is read at SEVERAL places of its own loops, as neighbours are, is made for each up to CHEAP functions
    in all;
  - what is put together of other places, and read again and again at quotients of places, is kept: in memory
    its elements lie one after the other;
  - what several read is made anew where that reads no more bytes than the value has (a mask of what is read
    anyway, a normalised value of statistics and its source) and computes at most SLIGHT functions, none of
    them COSTLY; then its write is saved and nothing is lost;
  - everything else is kept.

What comes after a fold in the same row is not recomputed at all: loops go over the row again, and values of
COSTLY functions are kept beside it while it lasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kiln.base.expressions import FLOORDIV, Expr
from kiln.base.graph import Node
from kiln.fuse.axes import hinted
from kiln.fuse.nest import Apply, Fold, Load, Place, Term, children, terms
from kiln.fuse.views import shape_of
from kiln.ops.layout import is_contiguous

#: Terms of a value that is much smaller than the loops that read it.
CHEAP = 24
#: Terms of a value that is made where it is read.
SLIGHT = 8
#: Places of a value from which on it counts how much is computed for each.
SEVERAL = 3
#: Terms that a read counts as at places that are data, and at quotients of places.
SCATTERED, REPEATED = 8, 6
#: Terms that functions of dozens of instructions count as: they are not computed twice. Rounding is free.
LONG = frozenset({
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "pow", "sinh", "cosh", "asinh", "acosh", "atanh",
    "log10",
})  # fmt: skip
WEIGHTS = {**dict.fromkeys(LONG, CHEAP + 1), "convert": 0}
#: What is this many times smaller is small beside something.
MUCH_SMALLER = 4

#: Functions that cost more than a few instructions.
COSTLY = LONG | {
    "exp", "exp_below", "exp2", "expm1", "log", "log1p", "log2", "tanh", "erf", "sigmoid", "fmod",
    "remainder", "div_floor", "uniform_0", "uniform_1",
}  # fmt: skip

#: Functions that cost more than one.
SLOW = COSTLY | {"div", "reciprocal", "rsqrt", "sqrt"}


def elements(node: Node) -> int:
    """How many elements a tensor has, by the sizes when traced."""
    count = 1
    for n in shape_of(node):
        count *= hinted(n)
    return count


def bytes_of(nodes: Iterable[Node]) -> int:
    """The bytes of some tensors."""
    return sum(elements(node) * int(node.spec.dtype.itemsize) for node in nodes)


def lies_as(node: Node, other: Node) -> bool:
    """Whether a tensor is small beside another one, or lies in memory in the same order."""
    if elements(node) * MUCH_SMALLER <= elements(other):
        return True
    a, b = node.spec, other.spec
    if (a.shape, a.stride) == (b.shape, b.stride):
        return True
    known = all(type(n) is int for spec in (a, b) for n in (*spec.shape, *spec.stride))
    return known and is_contiguous(a.shape, a.stride) and is_contiguous(b.shape, b.stride)


def of_data(made_of: list[Term]) -> list[Term]:
    """Those of some terms, children first, that depend on what is in memory."""
    found: dict[int, Term] = {}
    for term in made_of:
        if isinstance(term, (Load, Fold)) or any(id(child) in found for child in children(term)):
            found[id(term)] = term
    return list(found.values())


def along(made_of: list[Term], coords: Sequence[Any]) -> list[Term]:
    """Those of some terms that differ from one element to the next one of the last dimension of several."""
    last = next((c for c in reversed(coords) if isinstance(c, Expr)), None)
    if last is None or sum(isinstance(c, Expr) for c in coords) < 2:
        return made_of
    inner = last.symbols()
    found: set[int] = set()
    for term in terms(made_of):
        differs = any(id(child) in found for child in children(term))
        if isinstance(term, (Load, Place)) and isinstance(term.index, Expr):
            differs = differs or not inner.isdisjoint(term.index.symbols())
        if differs or isinstance(term, Fold):
            found.add(id(term))
    return [term for term in made_of if id(term) in found]


def weight(term: Term) -> int:
    """In how many terms a term counts: reads that do not go through memory in order are several."""
    if isinstance(term, Apply) and term.op in WEIGHTS:
        return WEIGHTS[term.op]
    if not isinstance(term, Load) or not isinstance(term.index, Expr):
        return 1
    if term.places:
        return SCATTERED
    return REPEATED if any(atom.op is FLOORDIV for m in term.index.poly for atom in m) else 1


def reads_no_more(node: Node, made_of: list[Term], read: list[Node]) -> bool:
    """Whether making a value anew from these terms, which read these nodes, reads no more than the value."""
    for term in made_of:
        if isinstance(term, Fold) or isinstance(term, Apply) and term.op in COSTLY:
            return False
        if isinstance(term, (Load, Place)) and term.places:
            return False
    return 4 * bytes_of(read) <= 5 * bytes_of([node])
