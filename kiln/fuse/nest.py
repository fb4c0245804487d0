"""Kernels: loop nests with expression-tree bodies. Ranges, loads, arithmetic, reductions, stores; no text.

A nest runs over `axes`, in the order of the loops. Kept axes come with every result; over the axes marked
`reduced` values are folded into one. What depends on a fold over the reduced axes runs in a later phase: the
same loops once more, over the same row. The target chooses vectors, threads and tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any, TypeAlias, TypeGuard

import torch

from kiln.base.dataclass import dataclass
from kiln.base.symbols import Symbol


@dataclass(eq=False, frozen=True, slots=True)
class Axis:
    """One loop: its variable runs from `low` to `size` - 1."""

    variable: Symbol
    size: Any
    reduced: bool = False
    low: Any = 0


@dataclass(eq=False, frozen=True, slots=True)
class Buffer:
    """Memory that a kernel reads or writes: elements of one dtype, addressed by a flat index."""

    name: str
    dtype: torch.dtype


@dataclass(eq=False, frozen=True, slots=True)
class Const:
    """A number."""

    value: Any
    dtype: torch.dtype


@dataclass(eq=False, frozen=True, slots=True)
class Place:
    """An index expression as a value, int64, or int32 if small; `places` are the computed indices in it."""

    index: Any
    places: tuple[Computed, ...] = ()
    dtype: torch.dtype = torch.int64


@dataclass(eq=False, frozen=True, slots=True)
class Load:
    """An element of a buffer. Where `valid` (a boolean term) does not hold nothing is read, and 0 stands.

    `places` are the computed indices that occur in the index.
    """

    buffer: Buffer
    index: Any
    dtype: torch.dtype
    valid: Term | None = None
    places: tuple[Computed, ...] = ()


@dataclass(eq=False, frozen=True, slots=True)
class Computed:
    """An index that is data: `symbol` stands in index expressions for the value of `term`.

    It is checked: a kernel that meets one outside of `size` says so. Where it `wraps`, negative ones count
    from the end.
    """

    symbol: Symbol
    term: Term
    size: Any
    wraps: bool = True
    dim: int = -1
    """The dimension that what is said of an index outside names; -1 where it names none."""


@dataclass(eq=False, frozen=True, slots=True)
class Apply:
    """A scalar function, by the name of its primitive, of terms of one dtype; computes in `dtype`."""

    op: str
    args: tuple[Term, ...]
    dtype: torch.dtype


RECURRENCE = "kiln::recurrence"
RUNNING = frozenset({
    "cumsum", "cumprod", "kiln::running_max", "kiln::running_min", "kiln::running_sum",
    "kiln::running_product", RECURRENCE,
})  # fmt: skip
"""Folds that have a value in each turn."""


@dataclass(eq=False, frozen=True, slots=True)
class Fold:
    """A value folded over the reduced axes, by `kind`: sum, prod, amax, amin, any, all, argmax, argmin.

    The last two carry a `place` with the value and give the first place of the largest or smallest. Running
    ones (cumsum, cumprod, …) have a value in each turn of the loops: what was folded so far.
    """

    kind: str
    value: Term
    dtype: torch.dtype
    phase: int
    place: Term | None = None

    @property
    def running(self) -> bool:
        return self.kind in RUNNING

    @property
    def ready(self) -> int:
        """The first phase in which it can be read."""
        return self.phase if self.running else self.phase + 1

    @property
    def parts(self) -> tuple[Term, ...]:
        """What is carried along the loops."""
        return (self.value,) if self.place is None else (self.value, self.place)


Term: TypeAlias = Const | Place | Load | Apply | Fold


AFFINE = "affine"
"""Of a factor and a value, which are folded so: what was folded before times the factor, and the value."""


def is_affine(term: Term) -> TypeGuard[Apply]:
    return type(term) is Apply and term.op == AFFINE


@dataclass(eq=False, frozen=True, slots=True)
class Store:
    """A value written to a buffer; in phase 0, or after the folds of the phases before it."""

    buffer: Buffer
    index: Any
    value: Term
    phase: int
    kept: bool
    """Whether it happens once a row, after the loops over the reduced axes."""
    adds: bool = False
    """Whether it is added to what is there: 0, when the part of the rows begins."""


@dataclass(eq=False, frozen=True, slots=True)
class Part:
    """The rows of a nest in parts, one after the other within a part: its number, and rows of each."""

    variable: Symbol
    rows: int


@dataclass(eq=False, slots=True)
class Nest:
    """One loop nest, ready for a target."""

    axes: tuple[Axis, ...]
    stores: list[Store] = field(default_factory=list)
    part: Part | None = None
    ordered: bool = False
    """Whether the turns of reduced axes see what those before them stored."""
    like: Nest | None = None
    """A nest that differs from this one in its buffers alone: code for it is code for this one."""
    several: bool = False
    """Whether a turn is several turns of other loops, which share what they read and store side by side."""
    rolled: Axis | None = None
    """A loop inside of each turn, over which all folds are."""
    _known: tuple[Any, ...] = field(default=(0, [], [], []), init=False, repr=False)
    """How many stores there were when they were looked at last, their terms, folds and the buffers read."""

    @property
    def kept(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if not a.reduced)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.reduced)

    def volume(self) -> int:
        """The turns of all loops, by the sizes when traced."""
        count = 1
        for a in self.axes:
            count *= max(int(getattr(a.size, "hint", a.size)) - int(getattr(a.low, "hint", a.low)), 1)
        return count

    def _seen(self) -> tuple[Any, ...]:
        if self._known[0] != len(self.stores):  # stores are added, and never changed
            found = terms(store.value for store in self.stores)
            read = dict.fromkeys([t.buffer for t in found if type(t) is Load])
            self._known = len(self.stores), found, [t for t in found if type(t) is Fold], list(read)
        return self._known

    def terms(self) -> list[Term]:
        """All terms of the stores, once each, children first."""
        return list(self._seen()[1])

    def folds(self) -> list[Fold]:
        """The folds that the stores need, each after those it needs itself."""
        return list(self._seen()[2])

    def buffers(self) -> tuple[list[Buffer], list[Buffer]]:
        """The buffers that are read and those that are written, in order of first use."""
        return list(self._seen()[3]), list(dict.fromkeys([s.buffer for s in self.stores]))

    def used(self) -> list[Buffer]:
        """All buffers: first those that are read."""
        reads, writes = self.buffers()
        return list(dict.fromkeys([*reads, *writes]))


@dataclass(frozen=True, eq=False, slots=True)
class Kernel:
    """What is launched at once: stages, one after the other, of nests whose order does not matter."""

    name: str
    stages: tuple[tuple[Nest, ...], ...]

    @property
    def nests(self) -> list[Nest]:
        return [nest for stage in self.stages for nest in stage]

    def buffers(self) -> tuple[list[Buffer], list[Buffer]]:
        """The buffers that are read alone and those that are written, in order of first use."""
        used = [nest.buffers() for nest in self.nests]
        written = dict.fromkeys(buffer for _, writes in used for buffer in writes)
        read = dict.fromkeys(buffer for reads, _ in used for buffer in reads if buffer not in written)
        return list(read), list(written)


def children(term: Term) -> tuple[Term, ...]:
    """The terms that a term is made of."""
    if type(term) is Apply:
        return term.args
    if type(term) is Fold:
        return term.parts
    if not isinstance(term, (Load, Place)):
        return ()
    inner = tuple([place.term for place in term.places]) if term.places else ()
    return (*inner, term.valid) if type(term) is Load and term.valid is not None else inner


def rebuilt(term: Term, made: Mapping[int, Term]) -> Term:
    """The term over what its children became, by their ids."""
    if isinstance(term, Apply):
        return Apply(term.op, tuple([made[id(a)] for a in term.args]), term.dtype)
    if isinstance(term, Fold):
        place = None if term.place is None else made[id(term.place)]
        return replace(term, value=made[id(term.value)], place=place)
    if isinstance(term, (Load, Place)):
        places = tuple([replace(place, term=made[id(place.term)]) for place in term.places])
        if isinstance(term, Place):
            return replace(term, places=places)
        valid = None if term.valid is None else made[id(term.valid)]
        return Load(term.buffer, term.index, term.dtype, valid, places)
    return term


def changed(
    stores: Iterable[Store], known: Mapping[int, Term], change: Callable[[Term], Term] = lambda term: term
) -> list[Store]:
    """The stores with some terms known, by their ids, and others changed after what they are made of."""
    made, stores = dict(known), list(stores)
    for term in terms([store.value for store in stores]):
        if id(term) not in made:
            made[id(term)] = change(rebuilt(term, made))
    return [replace(store, value=made[id(store.value)]) for store in stores]


def read_again(
    stores: Iterable[Store], home: Iterable[Store], keeps: Callable[[Store], bool]
) -> dict[int, Term] | None:
    """What stands for reads of what other stores store, by their ids: the values themselves.

    None where one lies elsewhere, or its memory does not keep all of it.
    """
    stored = {store.buffer: store for store in home}
    known: dict[int, Term] = {}
    for term in terms([store.value for store in stores]):
        if isinstance(term, Load) and (store := stored.get(term.buffer)) is not None:
            if term.index != store.index or term.valid is not None or not keeps(store):
                return None
            known[id(term)] = store.value
    return known


def terms(roots: Iterator[Term] | list[Term]) -> list[Term]:
    """All terms below the roots, once each, children first."""
    seen: set[int] = set()
    ordered: list[Term] = []
    for root in roots:
        if id(root) not in seen:
            _visit(root, seen, ordered)
    return ordered


def _visit(term: Term, seen: set[int], ordered: list[Term]) -> None:
    # Not a closure: one that calls itself is garbage that only a collection frees.
    seen.add(id(term))
    for child in term.args if type(term) is Apply else children(term):
        if id(child) not in seen:
            _visit(child, seen, ordered)
    ordered.append(term)
