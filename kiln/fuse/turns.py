"""Loops that follow each other plane by plane: what one makes for the other alone, a task holds meanwhile.

Resampling goes along rows and then across them; images with borders are made to be summed up. Of what comes
between, a plane is there at a time, near the processor, and none of it takes memory beside the result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.expressions import poly_of
from kiln.base.graph import CONSTANT, Node, nodes_in
from kiln.base.symbols import Expr
from kiln.fuse.axes import axis
from kiln.fuse.costs import bytes_of
from kiln.fuse.merge import rewritten, substituted
from kiln.fuse.nest import Axis, Buffer, Kernel, Load, Nest, Place, Store
from kiln.fuse.repeats import chain_of, nodes_of
from kiln.fuse.steps import Launch, Step

#: Planes at least: they are the tasks.
PLANES = 16
#: Bytes of a plane at most, which lie on the stack.
LONGEST = 1 << 19
#: Bytes between two nests that are worth it.
WORTH = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class InTurns(Kernel):
    """Nests of one stage that follow each other in each turn of the first loop, which is the same of all.

    `held` is what a task has for itself, and how many elements: the last reads it, and those before make it.
    """

    held: Mapping[Buffer, int]

    def buffers(self) -> tuple[list[Buffer], list[Buffer]]:
        reads, writes = Kernel.buffers(self)
        return reads, [b for b in writes if b not in self.held]


def fits(planes: int, size: int) -> bool:
    """Whether so many planes of so many bytes are for the stack."""
    return planes >= PLANES and size <= LONGEST and planes * size >= WORTH


def in_turns(steps: list[Step], outputs: Any) -> list[Step]:
    """The steps with pairs of launches as one where the second alone reads what loops of the first make."""
    used = Counter(n for step in steps for n in set(nodes_of(step)[1]))
    kept = {n for out in nodes_in(outputs) for n in chain_of(out)}
    made: list[Step] = []
    known: dict[Any, tuple[Kernel, Kernel | None] | None] = {}
    for step in steps:
        before = made[-1] if made else None
        if isinstance(step, Launch) and isinstance(before, Launch):
            read = set(step.reads.values())
            own = {b: n for b, n in before.writes.items() if n in read and used[n] == 1 and n not in kept}
            going = {b: n for b, n in before.reads.items() if used[n] == 1 and n.op is not CONSTANT}
            others = _same(before, step)
            key = before.kernel, step.kernel, (*own, 0, *going), *others.items()
            if key not in known:
                known[key] = _paired(before, step, own, going, others)
            if (found := known[key]) is not None:
                kernel, rest = found
                made[-1:] = [_launched(before, before, rest, {})] if rest is not None else []
                made.append(_launched(before, step, kernel, others))
                continue
        made.append(step)
    return made


def _same(first: Launch, second: Launch) -> dict[Buffer, Buffer]:
    """For buffers of the second launch those of the first that are of the same value."""
    owners = {n: b for buffers in (first.reads, first.writes) for b, n in buffers.items()}
    return {b: owners[n] for b, n in second.reads.items() if n in owners}


def _launched(first: Launch, second: Launch, kernel: Kernel, others: dict[Buffer, Buffer]) -> Launch:
    """A launch of a kernel of what two do."""
    reads, writes = kernel.buffers()
    owners = {**first.writes, **first.reads, **{others.get(b, b): n for b, n in second.reads.items()}}
    return Launch(kernel, {b: owners[b] for b in reads}, {b: second.writes[b] for b in writes}, {})


def _paired(
    first: Launch, second: Launch, own: dict[Buffer, Node], going: dict[Buffer, Node],
    others: dict[Buffer, Buffer],
) -> tuple[Kernel, Kernel | None] | None:  # fmt: skip
    """The kernel of two launches in turns, and one of what the first does besides, if that saves memory.

    The second alone reads the buffers of the first's `own`, and others of the first's for some of its; what
    is `going` would be there as long as what the second makes.
    """
    beside = [b for b in (*second.reads, *second.writes) if b not in others]
    if any(b in first.reads or b in first.writes for b in beside):  # equal blocks share buffers
        return None
    kernels = first.kernel, second.kernel
    if first.scratch or second.scratch or any(type(k) is not Kernel or len(k.stages) != 1 for k in kernels):
        return None
    if len(second.kernel.nests) != 1 or not _plain(second.kernel.nests[0]) or bytes_of(own.values()) < WORTH:
        return None
    (reader,) = second.kernel.nests
    reader = Nest(reader.axes, rewritten(reader.stores, lambda index: index, others))
    plane = reader.axes[0]
    if plane.reduced or plane.size < PLANES or _moves(reader, plane) is None:
        return None
    held = {b: _plane(reader, plane, b) for b in own}
    makers = {n: _by_plane(n, plane, held) for n in first.kernel.nests if all(map(held.get, n.buffers()[1]))}
    taken = [n for n, made in makers.items() if made is not None and _moves(made, plane) is not None]
    reads, writes = Kernel("", (tuple(taken),)).buffers()
    room = sum([held[b] * b.dtype.itemsize for b in writes])
    longer = bytes_of([going[b] for b in reads if b in going])
    if room > LONGEST or max(longer, WORTH) > bytes_of([own[b] for b in writes]):
        return None
    nests = [made for n, made in makers.items() if made is not None and n in taken]
    rest = tuple([n for n in first.kernel.nests if n not in taken])
    if any(b in writes for n in rest for b in n.buffers()[1]):
        return None
    paired = InTurns(second.kernel.name, ((*nests, reader),), {b: held[b] for b in writes})
    return paired, Kernel(first.kernel.name, (rest,)) if rest else None


def _plain(nest: Nest) -> bool:
    """Whether the results of a nest are made in its own turns, as many as are known."""
    known = all(type(a.size) is int and a.low == 0 for a in nest.axes)
    usual = not (nest.part or nest.ordered or nest.several or nest.rolled)
    return known and usual and bool(nest.axes) and not any(s.adds for s in nest.stores)


def _plane(nest: Nest, plane: Axis, buffer: Buffer) -> int:
    """How many elements of a buffer each turn of a loop reads, those after the ones before; 0 for others."""
    loads = [t for t in nest.terms() if isinstance(t, Load) and t.buffer is buffer]
    sizes = {_factor(t.index, plane) for t in loads}
    if len(sizes) != 1 or (size := sizes.pop()) is None:
        return 0
    most = {a.variable: a.size - 1 for a in nest.axes if a is not plane}
    for place in [place for load in loads for place in load.places]:
        most[place.symbol] = place.size - 1
    return size if all(_last(t.index, plane, most) < size for t in loads) else 0


def _factor(index: Any, loop: Axis) -> int | None:
    """By how much an index moves from one turn to the next, if always by as much."""
    mixed = [m for m in poly_of(index) if m != (loop.variable,) and any(_has(atom, loop) for atom in m)]
    return None if mixed else poly_of(index).get((loop.variable,), 0)


def _has(atom: Expr, loop: Axis) -> bool:
    return loop.variable in atom.symbols()


def _last(index: Any, plane: Axis, most: dict[Any, int]) -> float:
    """The last place in a plane that an index reaches."""
    total = 0
    for monomial, factor in poly_of(index).items():
        if monomial == (plane.variable,):
            continue
        if len(monomial) > 1 or factor < 0 or any(type(most.get(atom)) is not int for atom in monomial):
            return math.inf
        total += factor * math.prod([most[atom] for atom in monomial])
    return total


def _by_plane(nest: Nest, plane: Axis, sizes: dict[Buffer, int]) -> Nest | None:
    """The nest with a loop over planes of these sizes, of what it stores, as its first."""
    if not _plain(nest) or nest.reduced:
        return None
    outer, *inner = nest.axes
    rows, most = outer.size // plane.size, {a.variable: a.size - 1 for a in inner}
    if rows * plane.size != outer.size or rows == 1 and not inner:
        return None
    for store in nest.stores:
        factor = _factor(store.index, outer) or 0
        if factor * rows != sizes[store.buffer] or _last(store.index, outer, most) >= factor:
            return None
    within = [axis(plane.variable.scope, rows, outer.variable.name)] if rows > 1 else []
    moved = plane.variable * rows + (within[0].variable if within else 0)
    stores = rewritten(nest.stores, lambda index: substituted(index, {outer.variable: moved}))
    return Nest((plane, *within, *inner), stores)


def _moves(nest: Nest, plane: Axis) -> dict[Buffer, int] | None:
    """By how many elements a nest moves on in each of its buffers from plane to plane; None for others."""
    found: dict[Buffer, int] = {}
    for part in (*nest.terms(), *nest.stores):
        if isinstance(part, (Load, Store)):
            step = _factor(part.index, plane)
            if step is None or found.setdefault(part.buffer, step) != step:
                return None
        elif isinstance(part, Place) and isinstance(part.index, Expr) and _has(part.index, plane):
            return None
    return found


def of_a_plane(nest: Nest) -> tuple[Nest, dict[Buffer, int]]:
    """What a nest does in a turn of its first loop, and by how much its buffers move on from turn to turn."""
    plane, *inner = nest.axes
    moves = _moves(nest, plane)
    assert moves is not None
    return Nest(tuple(inner), rewritten(nest.stores, lambda i: substituted(i, {plane.variable: 0}))), moves
