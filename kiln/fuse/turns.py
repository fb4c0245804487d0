"""Loops that follow each other plane by plane: what one makes for the other alone, a task holds meanwhile.

Resampling goes along rows and then across them; images with borders are made to be summed up. Of what comes
between, a plane is there at a time, near the processor, and none of it takes memory beside the result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

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

#: Planes at least: they are the tasks. Loops that they are the turns of, at most.
PLANES, DEEPEST = 8, 3
#: Bytes of a plane at most, which lie on the stack.
LONGEST = 5 << 18
#: Launches before one that may be of its kernel, at most.
LAUNCHES = 6
#: Bytes between two nests that are worth it.
WORTH = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class InTurns(Kernel):
    """Nests of one stage that follow each other in each turn of their first loops, which are the same of all.

    `held` is what a task has for itself, and how many elements: some nests make it, and those after read it.
    """

    held: Mapping[Buffer, int]
    depth: int = 1

    def buffers(self) -> tuple[list[Buffer], list[Buffer]]:
        reads, writes = Kernel.buffers(self)
        return reads, [b for b in writes if b not in self.held]

    @property
    def planes(self) -> tuple[int, ...]:
        """The extents of the first loops."""
        return tuple([a.size for a in self.nests[-1].axes[: self.depth]])


def fits(planes: int, size: int) -> bool:
    """Whether so many planes of so many bytes are for the stack."""
    return planes >= PLANES and size <= LONGEST and planes * size >= WORTH


def in_turns(steps: list[Step], outputs: Any) -> list[Step]:
    """The steps with launches as one where some alone read what loops of those before make."""
    read = [{n for one in nodes_of(step)[1] for n in chain_of(one)} for step in steps]
    used = Counter(n for nodes in read for n in nodes)
    kept = {n for out in nodes_in(outputs) for n in chain_of(out)}
    made: list[Step] = []
    known: dict[Any, tuple[Kernel, Kernel | None] | None] = {}
    runs: dict[Any, Run | None] = {}
    for step in steps:
        before = made[-1] if made else None
        if isinstance(step, Launch) and isinstance(before, Launch):
            found = _pair(before, step, used, kept, known) or _run(made, step, used, kept, runs)
            if found is not None:
                many, launches = found
                for node in [n for one in (*made[-many:], step) for n in nodes_of(one)[1]]:
                    used[node] -= 1
                used.update(n for launch in launches for n in nodes_of(launch)[1])
                made[-many:] = launches
                continue
        made.append(step)
    return made


def _pair(
    before: Launch, step: Launch, used: Counter[Node], kept: set[Node],
    known: dict[Any, tuple[Kernel, Kernel | None] | None],
) -> tuple[int, list[Launch]] | None:  # fmt: skip
    """The launches in the place of the last one and a step, and how many they replace of those before."""
    read = set(step.reads.values())
    own = {b: n for b, n in before.writes.items() if n in read and used[n] == 1 and n not in kept}
    going = {b: n for b, n in before.reads.items() if used[n] == 1 and n.op is not CONSTANT}
    others = _same(before, step)
    key = before.kernel, step.kernel, (*own, 0, *going), *others.items()
    if key not in known:
        known[key] = _paired(before, step, own, going, others)
    found = known[key]
    if found is None:
        return None
    kernel, rest = found
    first = [_launched(before, before, rest, {})] if rest is not None else []
    return 1, [*first, _launched(before, step, kernel, others)]


Run: TypeAlias = "tuple[Kernel, dict[Buffer, int]]"
"""The kernel of several launches, and which of their nodes, in order of first use, its buffers are."""


def _run(
    made: list[Step], step: Launch, used: Counter[Node], kept: set[Node], runs: dict[Any, Run | None]
) -> tuple[int, list[Launch]] | None:
    """The launch in the place of several and a step, the most there are, and how many they are."""
    last = [step]
    found = None
    for one in list(reversed(made))[:LAUNCHES]:
        if not isinstance(one, Launch):
            break
        last.insert(0, one)
        nodes: dict[Node, int] = {}
        for launch in last:
            for node in (*launch.reads.values(), *launch.writes.values()):
                nodes.setdefault(node, len(nodes))
        reads = Counter(n for launch in last for n in set(launch.reads.values()))
        written = {n for launch in last for n in launch.writes.values()}
        inside = {n for n, times in reads.items() if times == used[n] and n not in kept}
        inside = {n for n in inside if n.op is not CONSTANT}
        own = inside & written
        if bytes_of(own) < WORTH:
            continue
        parts = [part.values() for launch in last for part in (launch.reads, launch.writes)]
        places = tuple([tuple(map(nodes.get, part)) for part in parts])
        key = tuple([launch.kernel for launch in last]), places, frozenset(nodes[n] for n in inside)
        if key not in runs:
            runs[key] = _whole(last, nodes, own, inside - own)
        if (whole := runs[key]) is not None:
            kernel, numbers = whole
            by_number = list(nodes)
            owners = {b: by_number[n] for b, n in numbers.items()}
            first, then = ({b: owners[b] for b in part} for part in kernel.buffers())
            found = len(last) - 1, [Launch(kernel, first, then, {})]
    return found


def _whole(
    launches: list[Launch], nodes: dict[Node, int], own: set[Node], going: set[Node]
) -> Run | None:
    """The kernel of several launches over planes, of which each has for itself what is their own."""
    fresh: dict[Node, Buffer] = {}
    nests: list[tuple[Nest, bool]] = []
    held: dict[Buffer, int] = {}
    known: set[tuple[int, ...]] = set()
    for launch in launches:
        kernel = launch.kernel
        turns = kernel if isinstance(kernel, InTurns) else None
        if launch.scratch or len(kernel.stages) != 1 or type(kernel) is not Kernel and turns is None:
            return None
        owners = {**launch.reads, **launch.writes}
        names = {b: fresh.setdefault(n, Buffer(b.name, b.dtype)) for b, n in owners.items()}
        if turns is not None:
            inner = {b: Buffer(b.name, b.dtype) for b in turns.held}
            held |= {inner[b]: count for b, count in turns.held.items()}
            names |= inner
            known.add(turns.planes)
        for nest in kernel.nests:
            if not _plain(nest):
                return None
            stores = rewritten(nest.stores, lambda at: at, names)
            nests.append((Nest(nest.axes, stores), turns is not None))
    mine = {b: n for n, b in fresh.items() if n in own}  # in order: kernels that are alike share their code
    results = {n for launch in launches for n in launch.writes.values()} - own
    if len(known) > 1 or min(bytes_of(going), bytes_of(results)) > bytes_of(own):
        return None
    readers = [n for n, _ in nests if _of(n, mine)]
    reader = max(readers, key=lambda n: bytes_of(_of(n, mine)), default=None)
    if reader is None:
        return None
    stored = {b for n, _ in nests for b in n.buffers()[1]}
    inside = [b for b in stored if any(b in n.buffers()[0] for n, _ in nests)]  # of a plane, as what is held
    for room in (LONGEST // 4, LONGEST):
        for planes in known or _planes(reader, mine):
            split = [n if done else _split(n, _path(n, mine), planes) for n, done in nests]
            depth, ready = len(planes), [n for n in split if n is not None]
            if math.prod(planes) < PLANES or len(ready) != len(nests):
                continue
            if any(_moves(n, depth) is None or not _has_rows(n, depth) for n in ready):
                continue
            room = LONGEST if known else room
            own_planes = all(_plane(b, depth, ready) for b in inside if b not in held)
            sizes = held | {b: _plane(b, depth, ready) for b in mine}
            if own_planes and sum([n * b.dtype.itemsize for b, n in sizes.items()]) <= room:
                made = InTurns(launches[-1].kernel.name, (tuple(ready),), sizes, depth)
                return made, {b: nodes[n] for n, b in fresh.items()}
    return None


def _of(nest: Nest, own: dict[Buffer, Node]) -> list[Node]:
    """What a nest reads of what is made for it and others."""
    return [own[b] for b in nest.buffers()[0] if b in own]


def _path(nest: Nest, own: dict[Buffer, Node]) -> Any:
    """How a nest goes through what it makes or reads for itself and others."""
    stores = [s for s in nest.stores if s.buffer in own]
    if stores:
        return max(stores, key=lambda store: bytes_of([own[store.buffer]])).index
    return _index(nest, own) if _of(nest, own) else nest.stores[0].index


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
    if first.scratch or second.scratch or any(len(k.stages) != 1 for k in kernels):
        return None
    if any(type(k) is not Kernel and type(k) is not InTurns for k in kernels):
        return None
    if bytes_of(own.values()) < WORTH:
        return None
    readers = [Nest(n.axes, rewritten(n.stores, lambda index: index, others)) for n in second.kernel.nests]
    known = {k.planes for k in kernels if isinstance(k, InTurns)}
    if not isinstance(second.kernel, InTurns) and (len(readers) != 1 or not _plain(readers[0])):
        return None
    if len(known) > 1:
        return None
    # Whole planes, with room for what others will hold beside; smaller ones are calls of little work.
    for room in (LONGEST // 4, LONGEST):
        for planes in known or _planes(readers[0], own):
            found = _in_planes(first, second, readers, planes, LONGEST if known else room, own, going)
            if found is not None:
                return found
    return None


def _planes(reader: Nest, own: dict[Buffer, Node]) -> list[tuple[int, ...]]:
    """The extents of loops over planes that a nest may have, by how it goes through what it reads."""
    sizes = [a.size for a in _outermost(reader, _index(reader, own)) if not a.reduced]
    return [tuple(sizes[:depth]) for depth in range(1, min(len(sizes), DEEPEST) + 1)]


def _outermost(nest: Nest, index: Any) -> list[Axis]:
    """The loops that an index moves with, those first that move it most."""
    moves = {a: _factor(index, a) or 0 for a in nest.axes}
    return sorted([a for a in nest.axes if moves[a] > 0], key=lambda a: -moves[a])


def _in_planes(
    first: Launch, second: Launch, readers: list[Nest], planes: tuple[int, ...], room: int,
    own: dict[Buffer, Node], going: dict[Buffer, Node],
) -> tuple[Kernel, Kernel | None] | None:  # fmt: skip
    """The kernel of two launches in turns over planes of these extents, and of what the first does besides.

    What a task has for itself takes `room` at most.
    """
    if math.prod(planes) < PLANES:
        return None
    depth, before, after = len(planes), first.kernel, second.kernel
    if not isinstance(after, InTurns):
        split = _split(readers[0], _index(readers[0], own), planes)
        readers = [] if split is None else [split]
    makers: dict[Nest, Nest] = {}
    for nest in before.nests:
        made = nest if isinstance(before, InTurns) else _split(nest, nest.stores[0].index, planes)
        if made is not None and _moves(made, depth) is not None and _has_rows(made, depth):
            makers[nest] = made
    if not readers or any(_moves(n, depth) is None for n in readers):
        return None
    held = {b: _plane(b, depth, [*makers.values(), *readers]) for b in own}
    inner = set(before.held) if isinstance(before, InTurns) else set()
    taken = [n for n in makers if all(b in inner or held.get(b) for b in n.buffers()[1])]
    rest = tuple([n for n in before.nests if n not in taken])
    if inner and rest:
        return None
    reads, writes = Kernel("", (tuple(taken),)).buffers()
    within = {b: held[b] for b in writes if b not in inner}
    if any(b in writes for n in rest for b in n.buffers()[1]):
        return None
    # What is read is there until the results are, and nothing between them.
    longer = min(bytes_of([going[b] for b in reads if b in going]), bytes_of(second.writes.values()))
    if max(longer, WORTH) > bytes_of([own[b] for b in within]):
        return None
    for kernel in (before, after):
        within |= kernel.held if isinstance(kernel, InTurns) else {}
    if sum([count * b.dtype.itemsize for b, count in within.items()]) > room:
        return None
    paired = InTurns(after.name, ((*[makers[n] for n in taken], *readers),), within, depth)
    return paired, Kernel(before.name, (rest,)) if rest else None


def _has_rows(nest: Nest, depth: int) -> bool:
    """Whether a plane has several of the rows that a nest folds: single ones go better side by side."""
    return not nest.reduced or any(not a.reduced and a.size > 1 for a in nest.axes[depth:])


def _index(nest: Nest, own: dict[Buffer, Node]) -> Any:
    """How a nest goes through what is made for it, that of most memory."""
    loads = [t for t in nest.terms() if isinstance(t, Load) and t.buffer in own]
    return max(loads, key=lambda load: bytes_of([own[load.buffer]])).index


def _plain(nest: Nest) -> bool:
    """Whether the results of a nest are made in its own turns, as many as are known."""
    known = all(type(a.size) is int and a.low == 0 for a in nest.axes)
    usual = not (nest.part or nest.ordered or nest.several or nest.rolled)
    return known and usual and bool(nest.axes) and not any(s.adds for s in nest.stores)


def _plane(buffer: Buffer, depth: int, nests: list[Nest]) -> int:
    """How many elements of a buffer nests have in each plane, those after the ones before; 0 for others."""
    sizes = set()
    for nest in nests:
        most = {a.variable: a.size - 1 for a in nest.axes[depth:]}
        parts = [*nest.terms(), *nest.stores]
        uses = [t for t in parts if isinstance(t, (Load, Store)) and t.buffer is buffer]
        for place in [p for load in uses if isinstance(load, Load) for p in load.places]:
            most[place.symbol] = place.size - 1
        planes = nest.axes[:depth]
        for use in uses:
            steps = [_factor(use.index, a) for a in planes]
            size = steps[-1] or 0
            linear = steps == [size * math.prod([a.size for a in planes[d + 1 :]]) for d in range(depth)]
            sizes.add(size if linear and _last(use.index, planes, most) < size else 0)
    return sizes.pop() or 0 if len(sizes) == 1 else 0


def _factor(index: Any, loop: Axis) -> int | None:
    """By how much an index moves from one turn to the next, if always by as much."""
    mixed = [m for m in poly_of(index) if m != (loop.variable,) and any(_has(atom, loop) for atom in m)]
    return None if mixed else poly_of(index).get((loop.variable,), 0)


def _has(atom: Expr, loop: Axis) -> bool:
    return loop.variable in atom.symbols()


def _last(index: Any, planes: tuple[Axis, ...], most: dict[Any, int]) -> float:
    """The last place in a plane that an index reaches."""
    total, outer = 0, [(a.variable,) for a in planes]
    for monomial, factor in poly_of(index).items():
        if monomial in outer:
            continue
        if len(monomial) > 1 or factor < 0 or any(type(most.get(atom)) is not int for atom in monomial):
            return math.inf
        total += factor * math.prod([most[atom] for atom in monomial])
    return total


def _split(nest: Nest, index: Any, planes: tuple[int, ...]) -> Nest | None:
    """The nest with loops of these extents as its first, by how it goes through a buffer, if it can."""
    if not _plain(nest):
        return None
    scope, left = nest.axes[0].variable.scope, list(planes)
    loops = [axis(scope, size, "plane") for size in planes]
    moved: dict[Any, Any] = {}
    within: dict[Axis, list[Axis]] = {}
    for a in _outermost(nest, index):
        rows, rest = divmod(a.size, math.prod(left))
        if a.reduced or rest and a.size != left[0]:
            return None
        here = loops[len(planes) - len(left) :]
        if len(left) > 1 and a.size == left[0]:
            moved[a.variable], within[a] = here[0].variable, []
            del left[0]
            continue
        within[a] = [axis(scope, rows, a.variable.name)] if rows > 1 else []
        linear: Any = 0
        for loop in here:
            linear = linear * loop.size + loop.variable
        moved[a.variable] = linear * rows + (within[a][0].variable if rows > 1 else 0)
        left = []
        break
    inner = [kept for a in nest.axes for kept in within.get(a, [a])]
    if left or not inner:
        return None
    stores = rewritten(nest.stores, lambda at: substituted(at, moved))
    return Nest((*loops, *inner), stores)


def _moves(nest: Nest, depth: int) -> dict[Buffer, tuple[int, ...]] | None:
    """By how many elements a nest moves on in each of its buffers from plane to plane; None for others."""
    found: dict[Buffer, tuple[int, ...]] = {}
    planes = nest.axes[:depth]
    for part in (*nest.terms(), *nest.stores):
        if isinstance(part, (Load, Store)):
            moves = [_factor(part.index, plane) for plane in planes]
            steps = tuple([step for step in moves if step is not None])
            if len(steps) < depth or found.setdefault(part.buffer, steps) != steps:
                return None
        elif isinstance(part, Place) and isinstance(part.index, Expr):
            if any(_has(part.index, plane) for plane in planes):
                return None
    return found


def of_a_plane(nest: Nest, depth: int) -> tuple[Nest, dict[Buffer, tuple[int, ...]]]:
    """What a nest does in a turn of its first loops, and by how much its buffers move on from then on."""
    moves, begun = _moves(nest, depth), {a.variable: 0 for a in nest.axes[:depth]}
    assert moves is not None
    return Nest(nest.axes[depth:], rewritten(nest.stores, lambda i: substituted(i, begun))), moves
