"""Kernels that may write where they read: results that can take the memory of a value that has been used up.

Each element of such a result lies where an element of the value lies that is read for it, in the same turn of
the loops, and read nowhere later. The store needs what is loaded there, so no order of instructions puts it
first, whatever the code takes for granted about memory that does not overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch

from kiln.base.expressions import hinted
from kiln.base.graph import Node, nodes_in, reached
from kiln.fuse.costs import COSTLY
from kiln.fuse.lower import HALVES
from kiln.fuse.nest import Apply, Buffer, Fold, Kernel, Load, Nest, Store, Term, children, terms
from kiln.fuse.program import Program
from kiln.fuse.repeats import nodes_of
from kiln.fuse.steps import Launch, Step
from kiln.generate.functions import FUNCTIONS, PARTLY_BY_LIBRARY
from kiln.launch.memory import size_of


def heirs(kernel: Kernel, reads_first: Collection[Nest] = ()) -> dict[Buffer, list[Buffer]]:
    """For each buffer that a kernel writes, those that it reads and that may be the same memory.

    Nests of `reads_first` store nothing of a turn before they have read all that it needs.
    """
    loads: dict[Buffer, list[tuple[int, Nest, Load]]] = defaultdict(list)
    stores: dict[Buffer, list[tuple[int, Nest, Store]]] = defaultdict(list)
    for number, stage in enumerate(kernel.stages):
        for nest in stage:
            for store in nest.stores:
                stores[store.buffer].append((number, nest, store))
            for term in nest.terms():
                if isinstance(term, Load):
                    loads[term.buffer].append((number, nest, term))
    found: dict[Buffer, list[Buffer]] = {}
    for written, places in stores.items():
        number, nest, store = places[0]
        if len(places) != 1 or any(stage <= number for stage, *_ in loads[written]):  # later ones wait for it
            continue
        if store.kept:  # what nothing else reads, once a row
            others = _loads([*[s.value for s in nest.stores if s is not store], *nest.folds()])
            found[written] = [
                b for b in nest.buffers()[0]
                if b not in stores and b not in others and b.dtype == written.dtype and len(loads[b]) == 1
                and _lies_as(number, nest, store, loads[b])
            ]  # fmt: skip
            continue
        read = [b for b in nest.buffers()[0] if b not in stores and b.dtype == written.dtype]
        found[written] = [b for b in read if _lies_as(number, nest, store, loads[b])]
        if found[written]:
            used, beside = _direct(store.value), set() if nest in reads_first else _beside(nest, store)
            # What one term loads is loaded once in a turn, but halves: as they are, and as numbers.
            if beside and not nest.ordered and _in_vectors(nest):
                again = _beside(nest, store, store.phase + 1)
                beside = {b for b in beside if b in again or b.dtype in HALVES or _times(loads[b]) > 1}
            found[written] = [b for b in found[written] if b in used and b not in beside]
    return found


def successors(kernel: Kernel) -> dict[Buffer, list[Buffer]]:
    """For each buffer that later stages alone use, those that earlier ones alone do."""
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for number, stage in enumerate(kernel.stages):
        for buffer in [b for nest in stage for b in nest.used()]:
            first.setdefault(buffer, number)
            last[buffer] = number
    written = kernel.buffers()[1]
    return {b: [o for o, end in last.items() if end < first[b] and o.dtype == b.dtype] for b in written}


def with_writes_last(program: Program) -> list[Step]:
    """The steps of a program with kernels at the end that only give inputs their new values.

    Nothing can fail after them, so that they may write where the inputs lie. Those stay where they are that
    would keep more memory meanwhile than they write.
    """
    if not program.overwrites:
        return program.steps
    stays = {*program.graph.inputs, *nodes_in(program.graph.outputs)}
    read = {node for step in program.steps for node in nodes_of(step)[1]}

    def may_wait(step: Step) -> bool:
        made, used = nodes_of(step)
        if not isinstance(step, Launch) or any(n not in program.overwrites or n in read for n in made):
            return False
        kept = {*used} - stays
        return sum(map(_bytes, kept)) <= sum(map(_bytes, made)) and never_fails(step.kernel)

    return sorted(program.steps, key=may_wait)


def _bytes(node: Node) -> int:
    return hinted(size_of(node.spec))


def never_fails(kernel: Kernel) -> bool:
    """Whether a kernel finds no fault in any data: all is floats and booleans, no index is data."""
    found = terms(store.value for nest in kernel.nests for store in nest.stores)
    plain = all(term.dtype.is_floating_point or term.dtype is torch.bool for term in found)
    return plain and not any(nest.ordered for nest in kernel.nests) and not any(
        term.places for term in found if isinstance(term, Load)
    )  # fmt: skip


def _lies_as(number: int, nest: Nest, store: Store, uses: list[tuple[int, Nest, Load]]) -> bool:
    """Whether a buffer is loaded where a store writes, if not in a stage before it."""
    return any(where is nest for _, where, _ in uses) and all(
        load.index == store.index and load.valid is None and not load.places
        if where is nest
        else stage < number
        for stage, where, load in uses
    )


def _in_vectors(nest: Nest) -> bool:
    """Whether all is computed in whole vectors: of what is taken apart, LLVM may load parts again, later."""
    found = [t for t in nest.terms() if isinstance(t, Apply)]
    apart = {torch.float64: FUNCTIONS | COSTLY, torch.bool: frozenset[str]()}
    return all(
        (term.dtype.is_floating_point or term.dtype is torch.bool)
        and term.op not in apart.get(term.dtype, PARTLY_BY_LIBRARY)
        for term in found
    )


def _times(loads: list[tuple[int, Nest, Load]]) -> int:
    """How many terms load a buffer."""
    return len({id(load) for *_, load in loads})


def _beside(nest: Nest, store: Store, phase: int | None = None) -> set[Buffer]:
    """The buffers that may be loaded after a store, for other ones: from a phase on, or from its own.

    Of two stores of a turn either may come first in machine code.
    """
    start = store.phase if phase is None else phase
    others = [s.value for s in nest.stores if s.phase >= start and s is not store]
    folds = [t for t in nest.terms() if isinstance(t, Fold) and t.phase >= start]
    roots = [*others, *[part for fold in folds for part in children(fold)]]
    # Folds of earlier phases are done.
    found = reached(roots, lambda term: () if isinstance(term, Fold) else children(term))
    return {term.buffer for term in found if isinstance(term, Load)}


def _loads(roots: list[Term]) -> set[Buffer]:
    return {term.buffer for term in terms(roots) if isinstance(term, Load)}


def _direct(root: Term) -> set[Buffer]:
    """The buffers that are loaded for a value in its own phase, whatever its place is."""

    def below(term: Term) -> tuple[Term, ...]:
        if isinstance(term, Apply) and term.op == "where" and not _loads([term.args[0]]):
            return term.args[:1]  # LLVM may know the answer, and that a value is not needed
        return () if isinstance(term, Fold) else children(term)

    return {term.buffer for term in reached([root], below) if isinstance(term, Load)}
