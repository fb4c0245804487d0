"""Sums of values that go, made before loops that need them: these then lie in their memory."""

from __future__ import annotations

from dataclasses import replace

from kiln.fuse.costs import bytes_of
from kiln.fuse.merge import merged
from kiln.fuse.nest import Apply, Load, Nest, Store, Term, terms
from kiln.fuse.reading import MUCH, SHORT, Groups
from kiln.fuse.split import replaced

#: Values that loops make at once, from which on they may go in two.
CROWD = 4


def sums_first(nest: Nest, groups: Groups, position: int) -> list[Nest]:
    """The nest of a group after loops that make, of values that go with it, what its folds and others need.

    Where short loops make much at once, and what later phases store lies in another order than these values
    do, sums take the memory of one of them, and what comes then that of the others.
    """
    lasting = [s for s in nest.stores if not s.kept]
    if len(lasting) < CROWD or nest.volume() > SHORT or not nest.folds() or nest.ordered:
        return [nest]
    going = groups.going([groups.owners[buffer] for buffer in nest.buffers()[0]], position)

    def frees(store: Store) -> bool:
        """Whether several values go with what a store makes of them."""
        value, node = store.value, groups.owners[store.buffer]
        if store.phase or not isinstance(value, Apply) or value.dtype != node.spec.dtype:
            return False
        read = [t for t in terms([value]) if isinstance(t, Load) and t.index == store.index]
        left = {t.buffer for t in read if t.valid is None and groups.owners[t.buffer] in going}
        later = [s for s in lasting if s.phase and s.index == store.index]
        return len(left) > 1 + len(later) and bytes_of([node]) >= MUCH

    first = [store for store in lasting if frees(store)]
    if not first:
        return [nest]
    known: dict[int, Term] = {id(s.value): Load(s.buffer, s.index, s.value.dtype) for s in first}
    others = [s for s in nest.stores if s not in first]
    values = replaced([s.value for s in others], known)
    plain = Nest(tuple([replace(a, reduced=False) for a in nest.axes]), first)
    rest = [replace(s, value=v) for s, v in zip(others, values, strict=True)]
    return [merged(plain, groups.scope), replace(nest, stores=rest)]
