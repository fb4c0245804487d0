"""Cuts long folds into parts that run side by side, and a last stage that folds the parts."""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import Any

import torch

from kiln.base.arithmetic import minimum
from kiln.base.dataclass import dataclass
from kiln.base.graph import TensorSpec
from kiln.base.symbols import Expr, Scope
from kiln.fuse.axes import axis, hinted
from kiln.fuse.lower import HALVES
from kiln.fuse.merge import merged
from kiln.fuse.nest import (
    Apply,
    Axis,
    Buffer,
    Const,
    Fold,
    Load,
    Nest,
    Place,
    Store,
    Term,
    children,
    rebuilt,
    terms,
)


@dataclass(frozen=True, slots=True)
class Cuts:
    """What a target gains by cutting folds."""

    part: int
    """Elements that are worth a part of their own."""
    most: int
    """Parts of one fold at most."""
    enough: int
    """A nest of this many tasks is left as it is."""
    line: int
    """Elements along the innermost axis that the target makes one task of, where it is the only one."""
    columns: int
    """The same, where it is not the only one."""
    wanted: int
    """Tasks that a nest is cut into at most."""
    borders: bool = False
    """Whether loops are cut where conditions on their places change."""
    runs: bool = False
    """Whether loops may run in order, each turn with what the ones before it carry."""
    together: int = 0
    """Elements of a row that a task holds for several phases; tasks are enough where there are `few`."""
    held: int = 0
    """Bytes of all that is read along such a row, at most."""
    few: int = 16
    kept_first: bool = False
    """Whether the order of loops is free: those that are folded over stand together and join if they can."""
    at_once: bool = False
    """Whether threads read neighbours at once, where no condition keeps them from it."""
    turns: int = 0
    """Turns of a part at least, where that leaves a `few`: each writes all results, and begins anew."""
    anew: int = 0
    """Terms, functions among them, of a value that is made anew from no more bytes than it has."""

    def parts(self, nest: Nest, cut: Axis) -> int:
        """How many parts a fold is cut into, by the sizes when traced."""
        wanted, products = self.wanted if nest.kept else self.wanted * LINES, self.products(nest)
        if products > 1:  # threads have many sums, and few of them fit a processor
            wanted *= MORE
        most = max(min(self.most, wanted // self.tasks(nest)), 1)
        turns = nest.volume() // results(nest)
        few = min(turns // FEWEST, max(turns // self.turns, self.few)) if self.turns else turns // FEWEST
        wanted = min(hinted(cut.size), most, nest.volume() * products // self.part, few)
        return max(wanted, FEWEST) if type(cut.size) is not int else wanted

    def products(self, nest: Nest) -> int:
        """The products that a turn adds up, where threads have several sums of them; else 1."""
        sums = sums_of_products(nest) if self.at_once else None
        return sum(map(len, sums)) if sums is not None else 1

    def tasks(self, nest: Nest) -> int:
        """How many tasks the target finds, with the innermost axis in vectors."""
        inner = along_memory(nest) if self.kept_first else nest.axes[-1]
        outer = [a for a in nest.axes if a is not inner]
        alone = all(a.reduced for a in outer)
        count = 1 if inner.reduced else -(-hinted(inner.size) // (self.line if alone else self.columns))
        for a in outer:
            count *= 1 if a.reduced else hinted(a.size)
        return max(count, 1)

    def ordered(self, nest: Nest) -> Nest:
        """The nest with its loops in the order that the target likes."""
        if not self.kept_first or not nest.reduced:
            return nest
        return replace(nest, axes=(*nest.kept, *nest.reduced))


def results(nest: Nest) -> int:
    """How many results the folds of a nest have."""
    return max(math.prod(hinted(a.size) for a in nest.kept), 1)


def along_memory(nest: Nest) -> Axis:
    """The axis whose neighbours lie side by side in most of what is read and written."""
    indices = [t.index for t in nest.terms() if isinstance(t, Load)]
    indices += [store.index for store in nest.stores]

    def moved(index: Expr) -> int:
        """The elements that all turns of the loops read or write there."""
        return math.prod(hinted(a.size) for a in nest.axes if a.variable in index.symbols())

    def beside(axis: Axis) -> int:
        return sum(moved(i) for i in indices if isinstance(i, Expr) and i.poly.get((axis.variable,)) == 1)

    return max(reversed(nest.axes), key=beside)


def sums_of_products(nest: Nest) -> list[list[tuple[Term, ...]]] | None:
    """The factors of what each fold adds up in a turn, where that are several products; None for others."""
    folds = nest.folds()
    found = [products_of(fold) for fold in folds]
    if len(folds) < SUMS or None in found or not all(store.kept for store in nest.stores):
        return None
    return [parts for parts in found if parts is not None]


def products_of(fold: Fold) -> list[tuple[Term, ...]] | None:
    """The factors of the products that a fold adds up in a turn; None for other folds."""
    value, found = fold.value, list[tuple[Term, ...]]()
    while isinstance(value, Apply) and value.op == "addcmul":
        found.insert(0, value.args[1:])
        value = value.args[0]
    plain = fold.kind == "sum" and fold.phase == 0 and fold.dtype is torch.float32
    if not plain or not isinstance(value, Apply) or value.op != "mul":
        return None
    return [value.args, *found]


MANY = 1 << 60
#: Cores with long vectors.
CORES = Cuts(
    part=1 << 15, most=64, enough=8, line=4096, columns=MANY, wanted=MANY, borders=True, runs=True,
    turns=1024,
)  # fmt: skip
#: Hundreds of processors, each with thousands of threads.
GRIDS = Cuts(
    part=1 << 15, most=1024, enough=128, line=256, columns=256, wanted=264, kept_first=True,
    at_once=True, anew=32, together=1 << 17, held=8 * (98 << 10),
)  # fmt: skip
#: Parts at least, and the length of a loop that is cut at least.
FEWEST = 8
#: Times the parts that a fold of all into one is cut into.
LINES = 4
#: Times the parts that sums of several products a turn are cut into, and such sums at least.
MORE, SUMS = 4, 4
#: Elements of a part that is near by when it is gone over again.
NEAR = 1 << 17
#: Long parts are of whole vectors.
WHOLE = 16



@dataclass(slots=True)
class Split:
    """The nests that a nest became, one after the other, and the memory between them."""

    nests: list[Nest]
    scratch: dict[Buffer, TensorSpec] = field(default_factory=dict)


def split(nest: Nest, scope: Scope, name: str, cuts: Cuts = CORES) -> Split:
    """The nest, or nests that compute the same with its first folds in parts."""
    cut = axis_to_cut(nest, cuts)
    if cut is None:
        return Split([nest])
    parts = cuts.parts(nest, cut)
    if pair_to_cut(nest, cuts) is not None:
        parts = max(parts, min(nest.volume() // NEAR, hinted(cut.size) // FEWEST))
    length = (cut.size + (parts - 1)) // parts
    if hinted(length) > 8 * WHOLE:
        length = (length + (WHOLE - 1)) // WHOLE * WHOLE
        parts = -(-hinted(cut.size) // length) if type(length) is int else parts
    return Splitting(nest, cut, parts, length, scope, name, cuts).run()


def axis_to_cut(nest: Nest, cuts: Cuts) -> Axis | None:
    """The loop whose turns are spread; None where nothing is to gain, by the sizes when traced."""
    if not nest.reduced or nest.volume() * cuts.products(nest) < 2 * cuts.part:
        return None
    tasks = cuts.tasks(nest)
    if tasks >= cuts.enough:
        return None
    if nest.volume() < 2 * FEWEST * results(nest):  # parts would leave nearly as much as there is
        return None
    row = nest.volume() // tasks
    if tasks >= cuts.few and row <= cuts.together and row * bytes_of_turn(nest) <= cuts.held:
        again = any(f.phase > 0 for f in nest.folds()) or any(s.phase > 0 and not s.kept for s in nest.stores)
        if again and along_memory(nest).reduced:
            return None
    if any(f.running or f.place is not None and f.phase == 0 for f in nest.folds()):
        return None
    if not any(f.phase == 0 for f in nest.folds()):
        return None
    longest = max(nest.reduced, key=lambda a: hinted(a.size))
    return next((a for a in nest.reduced if hinted(a.size) >= FEWEST), longest)


def bytes_of_turn(nest: Nest) -> int:
    """The bytes that a turn of the reduced axes reads of its own."""
    folded = {axis.variable for axis in nest.reduced}
    loads = [t for t in nest.terms() if isinstance(t, Load) and isinstance(t.index, Expr)]
    own = {(t.buffer, t.index): t.dtype.itemsize for t in loads if folded <= t.index.symbols()}
    return sum(own.values())


class Splitting:
    """One cut: the folds of the first phase become partial ones, final ones, and values for the rest."""

    def __init__(
        self, nest: Nest, cut: Axis, parts: int, length: Any, scope: Scope, name: str, cuts: Cuts
    ) -> None:
        self.nest, self.cut, self.parts, self.length = nest, cut, parts, length
        self.scope, self.name, self.cuts = scope, name, cuts
        self.scratch: dict[Buffer, TensorSpec] = {}
        self.pair = pair_to_cut(nest, cuts)
        self.folds = [f for f in nest.folds() if f.phase == 0] if self.pair is None else list(self.pair)
        self.row: Any = 0  # the place among the results of a fold
        self.rows: Any = 1
        for a in nest.kept:
            self.row, self.rows = self.row * a.size + a.variable, self.rows * a.size

    def run(self) -> Split:
        part, again = (axis(self.scope, self.parts, f"{self.cut.variable.name}_{kind}") for kind in "pf")
        low = part.variable * self.length
        strip = replace(self.cut, low=low, size=minimum(low + self.length, self.cut.size))
        partial = Nest((part, *[strip if a is self.cut else a for a in self.nest.axes]))
        final = Nest((*self.nest.kept, replace(again, reduced=True)))
        totals: dict[int, Term] = {}
        parts: list[Term] = []
        for f in self.folds:
            held = self.memory(f.dtype, self.parts * self.rows)
            value: Term = f
            if f.phase:  # where all are -inf there are no powers
                none = Apply("eq", (self.folds[0], Const(-math.inf, f.dtype)), torch.bool)
                value = Apply("where", (none, Const(0.0, f.dtype), f), f.dtype)
            partial.stores.append(Store(held, part.variable * self.rows + self.row, value, f.ready, True))
            parts.append(Load(held, again.variable * self.rows + self.row, held.dtype))
            totals[id(f)] = replace(f, value=parts[-1])
        if self.pair is not None:
            top, total = self.pair
            totals[id(total)] = replace(total, value=in_terms_of(totals[id(top)], *parts))
        rest: list[Store] = []
        for store in self.nest.stores:
            if store.phase == 0 and not store.kept:
                partial.stores.append(store)
            elif store.kept and store.phase <= self.folds[-1].ready:
                final.stores.append(replace(store, value=replaced([store.value], totals)[0]))
            else:
                rest.append(store)
        if not rest:
            return Split([partial, final], self.scratch)
        known: dict[int, Term] = {}
        values = [s.value for s in rest]
        inverted = None if self.pair is None else divisor_alone(values, self.pair[1])
        needed: list[Term] = self.of_rows(values)
        if not self.cuts.at_once:
            used = {id(t) for t in terms(values)}
            needed = [f for f in self.folds if id(f) in used]
        for term in needed:
            held = self.memory(term.dtype, self.rows)
            ready = self.folds[-1].ready
            value = replaced([term], totals)[0]
            value = Apply("reciprocal", (value,), term.dtype) if term is inverted else value
            final.stores.append(Store(held, self.row, value, ready, True))
            known[id(term)] = Load(held, self.row, held.dtype)
        return self.with_rest([partial, final], rest, known, inverted)

    def of_rows(self, roots: list[Term]) -> list[Term]:
        """The largest terms that are the same in a row and follow from the first folds."""
        mine, along = {id(f) for f in self.folds}, {a.variable for a in self.nest.reduced}
        same, follows = set[int](), set[int]()
        ordered = terms(roots)
        for term in ordered:
            below = children(term)
            if id(term) in mine or isinstance(term, Apply) and any(id(c) in follows for c in below):
                follows.add(id(term))
            if id(term) in mine or not isinstance(term, Fold) and all(id(c) in same for c in below):
                if not isinstance(term, (Load, Place)) or not _symbols(term.index) & along:
                    same.add(id(term))
        chosen = {id(t): t for t in ordered if id(t) in same and id(t) in follows}
        inner = {id(c) for t in ordered if id(t) in chosen and id(t) not in mine for c in children(t)}
        outer = {id(c) for t in ordered if id(t) not in chosen for c in children(t)} | {id(r) for r in roots}
        return [t for key, t in chosen.items() if key in outer or key not in inner]

    def with_rest(
        self, nests: list[Nest], rest: list[Store], known: dict[int, Term], inverted: Fold | None
    ) -> Split:
        """What follows from the first folds, earlier than before by the phases that they took."""
        earlier = self.folds[-1].ready
        values = replaced([s.value for s in rest], known, earlier, inverted)
        phases = [max(s.phase - earlier, 0) for s in rest]
        stores = [replace(s, value=v, phase=p) for s, v, p in zip(rest, values, phases, strict=True)]
        last = Nest(self.nest.axes, stores)
        if not last.folds():
            last = merged(Nest(tuple(replace(a, reduced=False) for a in last.axes), stores), self.scope)
        more = split(last, self.scope, f"{self.name}_rest", self.cuts)
        return Split([*nests, *more.nests], {**self.scratch, **more.scratch})

    def memory(self, dtype: torch.dtype, count: Any) -> Buffer:
        """Memory between stages; what is of half precision is not rounded there."""
        dtype = torch.float32 if dtype in HALVES else dtype
        made = Buffer(f"{self.name}_part{len(self.scratch)}", dtype)
        self.scratch[made] = TensorSpec((count,), (1,), dtype, torch.device("cpu"))
        return made


def pair_to_cut(nest: Nest, cuts: Cuts) -> tuple[Fold, Fold] | None:
    """The largest values and sums of powers below them that parts are gone over for at once, on CPUs."""
    folds = nest.folds()
    found = pair_of(*([f for f in folds if f.phase == phase] for phase in (0, 1)))
    if cuts.at_once or found is None or any(f.dtype is not torch.float32 for f in found):
        return None
    return found if found[0].value.dtype is torch.float32 else None


def in_terms_of(top: Term, largest: Term, powers: Term) -> Term:
    """A part's sum of powers below its largest value as one of powers below that of all parts."""
    less = Apply("sub", (largest, top), top.dtype)
    return Apply("mul", (powers, Apply("exp", (less,), top.dtype)), top.dtype)


def pair_of(first: list[Fold], second: list[Fold]) -> tuple[Fold, Fold] | None:
    """The folds of two phases, where they are the largest value of a row and the sum of powers below it."""
    if len(first) != 1 or len(second) != 1:
        return None
    (largest,), (total,) = first, second
    power = total.value
    fits = largest.kind == "amax" and largest.place is None and total.kind == "sum"
    if not fits or not isinstance(power, Apply) or power.op != "exp":
        return None
    less = power.args[0]
    below = isinstance(less, Apply) and less.op == "sub"
    return (largest, total) if below and children(less) == (largest.value, largest) else None


def divisor_alone(roots: list[Term], total: Fold) -> Fold | None:
    """A sum of powers, where all that is asked for are their shares of it."""
    users = [term for term in terms(roots) if any(child is total for child in children(term))]
    shares = [t for t in users if isinstance(t, Apply) and t.op == "div" and t.args[0] is total.value]
    return total if users == shares and all(root is not total for root in roots) else None


def _symbols(index: Any) -> frozenset[Any]:
    return index.symbols() if isinstance(index, Expr) else frozenset()


def replaced(
    roots: list[Term], known: dict[int, Term], earlier: int = 0, inverted: Fold | None = None
) -> list[Term]:
    """Terms with some replaced, by their ids; other folds happen that many phases earlier.

    What one of them divided, powers up to 1, is multiplied by what is known of it.
    """
    made = dict(known)
    for term in terms(roots):
        if id(term) not in made:
            new = rebuilt(term, made)
            if isinstance(new, Apply) and inverted is not None:
                shares = new.op == "div" and children(term)[1] is inverted
                new = replace(new, op="mul" if shares else "exp_below" if term is inverted.value else new.op)
            made[id(term)] = replace(new, phase=new.phase - earlier) if isinstance(new, Fold) else new
    return [made[id(root)] for root in roots]
