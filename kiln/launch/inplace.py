"""Kernels that may write where they read: results that can take the memory of a value that nobody needs again.

Each element of such a result lies where an element of the value lies that is read for it, in the same turn of
the loops, and read nowhere later. The store needs what is loaded there, so no order of the instructions can put
it first, whatever the code takes for granted about memory that does not overlap.
"""

from __future__ import annotations

from collections import defaultdict

from kiln.fuse.nest import Buffer, Fold, Kernel, Load, Nest, Store, terms


def heirs(kernel: Kernel) -> dict[Buffer, list[Buffer]]:
    """For each buffer that a kernel writes, those that it reads and that may be the same memory."""
    loads: dict[Buffer, list[tuple[int, Nest, Load]]] = defaultdict(list)
    stores: dict[Buffer, list[tuple[int, Nest, Store]]] = defaultdict(list)
    for number, stage in enumerate(kernel.stages):
        for nest in stage:
            for store in nest.stores:
                stores[store.buffer].append((number, nest, store))
            for term in terms(store.value for store in nest.stores):
                if isinstance(term, Load):
                    loads[term.buffer].append((number, nest, term))
    found: dict[Buffer, list[Buffer]] = {}
    for written, places in stores.items():
        if len(places) != 1 or written in loads or places[0][2].kept:
            continue
        number, nest, store = places[0]
        found[written] = [
            read
            for read, uses in loads.items()
            if read not in stores and read.dtype == written.dtype and _follows(number, nest, store, uses)
        ]
    return found


def _follows(number: int, nest: Nest, store: Store, uses: list[tuple[int, Nest, Load]]) -> bool:
    """Whether a store comes after all loads of a buffer, element by element."""
    here = [load for stage, where, load in uses if where is nest]
    if not here or any(where is not nest and stage >= number for stage, where, _ in uses):
        return False
    if any(load.index != store.index or load.valid is not None or load.places for load in here):
        return False
    if not set(map(id, here)) <= set(map(id, terms([store.value]))):
        return False
    for other in nest.stores:
        if other.phase > store.phase and _reads(other.value, here):
            return False
    folds = [term for term in terms(s.value for s in nest.stores) if isinstance(term, Fold)]
    return not any(fold.phase > store.phase and _reads(fold, here) for fold in folds)


def _reads(term: object, loads: list[Load]) -> bool:
    wanted = set(map(id, loads))
    return any(id(one) in wanted for one in terms([term]))  # type: ignore[list-item]
