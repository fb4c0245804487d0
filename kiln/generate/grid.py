"""How a loop nest is laid over a GPU: which threads share a row, how many elements each takes at once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.expressions import MAX, MIN, MOD, hinted
from kiln.base.graph import reached
from kiln.base.symbols import Expr, Symbol
from kiln.fuse.nest import Apply, Axis, Fold, Load, Nest, Term, children
from kiln.fuse.split import pair_of, sums_of_products
from kiln.generate.functions import compute_type
from kiln.generate.lanes import vector_axis
from kiln.generate.llvm import F32
from kiln.generate.scalar import TYPES

WIDEST = 16  # bytes of one access
MOST_BYTES = 32  # of the largest type in one thread's elements
WARP = 32
SQUARE = 32  # elements along each side of what a block turns
BLOCK = 256  # threads of a block that shares nothing
LARGEST = 1024  # threads of a block
LOOPED = 512  # threads of a block whose rows do not fit registers; two run on a processor
HELD = 32  # elements of a row that a thread holds in registers
CLUSTER = 8  # blocks that share a row
STRIP = 768  # threads of a block that keep the sums of columns, eight each
STAGES = 2  # rows that are read ahead there
PROCESSORS = 132  # of a large GPU
IN_CLUSTERS = 128  # of those, that clusters find
MEMORY, RESERVED = 228 << 10, 1 << 10  # bytes of shared memory of a processor, those that each block costs
GRANULE = 128  # bytes in whose steps blocks have it
ALONE = 226 << 10  # bytes of shared memory that a block may have where blocks form clusters
UNEVEN = 1.25  # times the rows that a processor has on average: those that one may have
SHARED = 99 << 10  # bytes of shared memory that blocks of all architectures may have
FOLDING = 512  # of those, for what threads exchange
STATIC = 48 << 10  # bytes of shared memory that a function may declare
SECTOR = 32  # bytes that memory gives at once
MANY = 8  # turns of a thread along a row in shared memory that are enough
FEW_TURNS = 6  # of those, where a row is read once
AT_40 = 1536  # threads of a processor that have 40 registers each
WRITTEN = 16  # turns of a row in shared memory that are written out
SUMS = 64  # sums of products in the registers of a thread
SUMMING = 128  # threads of a block that has so many
COLUMNS = 32  # threads along the kept axis of a nest that folds across it
BUSY = 132 * 1024  # threads that keep a large GPU busy
#: Functions of several instructions.
COSTLY = frozenset({"exp", "log", "tanh", "erf", "sigmoid", "exp2", "expm1", "log1p", "sin", "cos", "pow"})


@dataclass(frozen=True, eq=False, slots=True)
class Grid:
    """The shape of a launch: `rows` rows or column groups a block, `team` threads on each.

    Without reduced axes a thread is its own row, of `width` elements; where folds are running, it takes all
    turns of its row in their order. `along`: the team shares a row along
    the vector axis, neighbouring threads on neighbouring elements; else it shares the turns of the reduced
    axes, and neighbouring threads are on neighbouring columns. `turns`: how often each thread takes elements
    of its row, where that is known and they are written out, else 0; then what they read stays in registers,
    or, where it takes so many bytes, in `shared` memory.
    `members`: the blocks that share a row, neighbours that exchange what they folded.
    `beside`: the blocks that a processor is to run at once, where threads take no more registers for it.
    `across`: some memory runs along that axis; blocks take squares of it and the vector axis, and turn them.
    `many`: without reduced axes, how many rows a thread takes. `tail`: the last thread has fewer elements.
    """

    vector: Axis | None
    width: int
    rows: int
    team: int = 1
    along: bool = False
    turns: int = 0
    shared: int = 0
    across: Axis | None = None
    many: int = 1
    tail: bool = False
    members: int = 1
    beside: int = 1

    @property
    def threads(self) -> int:
        return self.rows * self.team

    @property
    def part(self) -> int:
        """The elements of a row that a block has, where it shares it with others."""
        return self.turns * self.team * self.width if self.members > 1 else 0


def laid(nest: Nest, clusters: bool = True) -> Grid:
    """The grid for a nest, on a machine that has `clusters` of blocks or not."""
    if in_order(nest):  # where rows are few, small blocks are spread over more processors
        return Grid(None, 1, BLOCK if kept_extent(nest) >= BUSY else 2 * WARP)
    vector = axis_stored(nest, vector_axis(nest))
    width = width_for(nest, vector)
    if not nest.reduced:
        if nest.volume() <= BLOCK * BLOCK and sum(isinstance(t, Load) for t in nest.terms()) > MANY:
            width = 1  # of few elements, each made of many: no thread waits for those of several
        narrow = axis_written(nest, vector)
        if narrow is not None:
            width = width_for(nest, narrow) if all_along(nest, narrow) else 1
            return Grid(narrow, width, BLOCK, many=several(nest, narrow, width))
        other = axis_across(nest, vector)
        if other is not None:
            return Grid(vector, 1, BLOCK, across=other)
        tail = vector is not None and not whole(vector.size, width)
        return Grid(vector, width, BLOCK, many=several(nest, vector, width), tail=tail)
    if nest.part is not None:
        return in_strips(nest, vector, width)
    if vector is None or vector.reduced:
        return along_rows(nest, vector, width, clusters)
    if sums_of_products(nest):
        return of_products(nest, vector, width)
    columns = -(-extent(vector) // width)
    rows = side_by_side(columns)
    blocks = kept_extent(nest) // extent(vector) * (columns // rows)
    while blocks * LARGEST < BUSY // 2 and rows * width * 4 > SECTOR:  # few columns: a block takes fewer
        width, rows = (width // 2, rows) if width > 1 else (1, rows // 2)
        blocks *= 2
    team = power_of_two(BLOCK // rows)  # BLOCK threads, or some more where rows are no power of two
    turned = reduced_extent(nest)
    while 2 * team * rows <= LARGEST and blocks * rows * team < BUSY // 2 and team * WARP // 2 <= turned:
        team *= 2
    team = max(min(team, power_of_two(turned) // 4), 1)
    parts = [compute_type(TYPES[part.dtype]) for fold in nest.folds() for part in fold.parts]
    while team * rows * width * sum(kind.bits // 8 for kind in parts) > STATIC:
        team //= 2
    return Grid(vector, width, rows, team)


def in_order(nest: Nest) -> bool:
    """Whether turns of the reduced axes need what those before them left."""
    return any(fold.running for fold in nest.folds())


def side_by_side(columns: int) -> int:
    """How many threads are on neighbouring columns: all, or as many as leave no rest."""
    rows = next((n for n in range(COLUMNS, COLUMNS // 2, -1) if columns % n == 0), COLUMNS)
    return columns if columns <= COLUMNS else rows


def of_products(nest: Nest, vector: Axis, width: int) -> Grid:
    """A block for some columns and turns, whose threads have a sum for each place of a factor."""
    sums = len(nest.folds())
    while sums * width > SUMS and width > 1:
        width //= 2
    rows = side_by_side(-(-extent(vector) // width))
    return Grid(vector, width, rows, max(power_of_two(SUMMING // rows + 1) // 2, 1))


def several(nest: Nest, vector: Axis | None, width: int) -> int:
    """How many groups of elements a thread takes: two where it computes much of the little that it reads.

    Of those that take a few bytes, as rows of odd lengths do, so many that 16 bytes are on their way.
    """
    known = all(type(a.size) is int and type(a.low) is int for a in nest.axes)
    read, groups = row_bytes(nest, vector, width), nest.volume() // width

    def all_exist(many: int) -> bool:
        return nest.volume() % (width * BLOCK * many) == 0 and groups >= 2 * many * BUSY

    if not known or not 0 < read <= WIDEST:
        return 1
    many = WIDEST // max(read, 2)
    if many > 2 and all_exist(many):
        return many
    computed = nest.terms()
    costly = any(isinstance(t, Apply) and t.op in COSTLY for t in computed)
    return 2 if costly and all_exist(2) else 1


def axis_stored(nest: Nest, vector: Axis | None) -> Axis | None:
    """The vector axis, or another long one that all results lie along, where none does along that.

    What is read across it blocks turn in shared memory; what is written across it they cannot.
    """
    if nest.reduced:
        return vector
    return along_results(nest, vector, [axis for axis in nest.axes if extent(axis) >= SQUARE // 2]) or vector


def axis_written(nest: Nest, vector: Axis | None) -> Axis | None:
    """A short axis that results lie along, where they do not along the vector axis: threads go along them."""
    return along_results(nest, vector, [axis for axis in nest.axes if extent(axis) < SQUARE // 2])


def along_results(nest: Nest, vector: Axis | None, axes: list[Axis]) -> Axis | None:
    """The first of some axes that all results lie along, where none lies along the vector axis."""
    places = [store.index for store in nest.stores]
    if vector is None or any(not isinstance(i, Expr) or i.poly.get((vector.variable,)) == 1 for i in places):
        return None
    return next((a for a in axes if all(i.poly.get((a.variable,)) == 1 for i in places)), None)


def all_along(nest: Nest, axis: Axis) -> bool:
    """Whether all that is read along an axis are neighbours."""
    places = [t.index for t in nest.terms() if isinstance(t, Load) and not t.places]
    own = [i for i in places if isinstance(i, Expr) and axis.variable in i.symbols()]
    return all(i.poly.get((axis.variable,)) == 1 for i in own)


def as_written(nest: Nest, axes: list[Axis]) -> list[Axis]:
    """Other axes than the vector axis in the order in which results lie in memory, where that is known."""
    index = nest.stores[0].index
    steps = [index.poly.get((axis.variable,), 0) if isinstance(index, Expr) else 0 for axis in axes]
    if nest.reduced and not in_order(nest) or not all(steps):
        return axes
    return [axis for _, axis in sorted(zip(steps, axes, strict=True), key=lambda pair: -pair[0])]


def axis_across(nest: Nest, vector: Axis | None) -> Axis | None:
    """Another axis than the vector axis that some memory is read along."""
    if vector is None or extent(vector) < SQUARE // 2:
        return None
    for term in nest.terms():
        if isinstance(term, Load):
            for axis in nest.axes:
                if axis is not vector and extent(axis) >= SQUARE // 2 and turns(term, vector, axis):
                    return axis
    return None


def turns(load: Load, vector: Axis, other: Axis) -> bool:
    """Whether memory is read along `other` while threads are along `vector`."""
    if load.valid is not None or load.places or not isinstance(load.index, Expr) or vector.low or other.low:
        return False
    poly = load.index.poly
    mixed = [m for m in poly if len(m) > 1 or not isinstance(m[0] if m else other.variable, Symbol)]
    linear = not any(axis.variable in part.symbols() for m in mixed for part in m for axis in (other,))
    apart = [m for m in poly if any(vector.variable in part.symbols() for part in m)]
    return linear and poly.get((other.variable,)) == 1 and bool(apart) and poly.get((vector.variable,)) != 1


def along_rows(nest: Nest, vector: Axis | None, width: int, clusters: bool) -> Grid:
    """A team for each row: threads of a warp where that is enough, else a block, or neighbouring ones."""
    chunks = -(-reduced_extent(nest) // width)
    known = all(type(a.size) is int and type(a.low) is int for a in nest.reduced)
    most = max(HELD // width, 1)
    rows = kept_extent(nest)
    team = min(power_of_two(chunks), WARP)
    while team < LARGEST and (team * most < chunks or rows * team < BUSY and team * 2 < chunks):
        team *= 2
    beside_weights = width <= WIDEST // 4 and has_weights(nest)
    while beside_weights and team < LOOPED and team * 2 < chunks and chunks % (team * 2) == 0:
        team *= 2  # those of f32 take many registers: fewer elements each leave room for more threads
    if known and rows == 1 and chunks <= LARGEST:
        team = max(team, power_of_two(chunks))  # no thread waits for memory twice
    turns = -(-chunks // team)
    shared, looped = 0, BLOCK if chunks <= BLOCK * MANY and largest_and_sum(nest) is None else LOOPED
    once, long = read_once(nest), chunks > BLOCK * most  # in registers, few blocks would fit a processor
    many_once = once and rows > PROCESSORS and chunks <= LOOPED * MANY
    if known and clusters and many_once and chunks >= LOOPED * FEW_TURNS // 2:  # processors with much memory
        return in_turns(nest, vector, width, chunks)
    if known and long and not many_once:
        shared = sum(kept.bytes for kept in read_again(nest).values())
        members, threads = shares(nest, shared, chunks)
        each = -(-chunks // (threads * members))
        loops = once and rows * LOOPED * members > 2 * BUSY  # do as well, where rows are many
        if shared and clusters and 1 < members <= CLUSTER and each <= WRITTEN and not loops:
            shared = sum(kept.bytes for kept in read_again(nest, each * threads * width).values())
            beside = max(min(LARGEST // threads, ALONE // (shared + FOLDING)), 2)
            return Grid(vector, width, 1, threads, True, each, shared, members=members, beside=beside)
        shared = shared if shared <= SHARED - FOLDING else 0
    if not shared and once and long:
        team = BLOCK
        while team < LARGEST and rows * team < (BUSY // 2 if chunks >= team * WARP else BUSY // 4):
            team *= 2
        return Grid(vector, width, 1, team, True)
    if shared:
        team = LARGEST if rows <= BUSY // LARGEST else looped
        turns = -(-chunks // team)
        turns = turns if turns <= WRITTEN else 0
    elif not known or turns > most:
        team, turns = min(team, LOOPED), 0
    three = team <= BLOCK or largest_and_sum(nest) is not None and 3 * (shared + FOLDING) <= ALONE
    beside = 1 if not shared or team == LARGEST else 3 if three else 2
    return Grid(vector, width, max(BLOCK // 2 // team, 1), team, True, turns, shared, beside=beside)


def in_turns(nest: Nest, vector: Axis | None, width: int, chunks: int) -> Grid:
    """A block for each row that is read once: copies of all turns are under way at once."""
    turns = max(FEW_TURNS, -(-chunks // LOOPED))
    team = -(-chunks // (turns * WARP)) * WARP
    shared = sum(kept.bytes for kept in read_again(nest).values())
    beside = max(min(AT_40 // team, ALONE // (shared + FOLDING)), 1)
    return Grid(vector, width, 1, team, True, -(-chunks // team), shared, beside=beside)


def shares(nest: Nest, shared: int, chunks: int) -> tuple[int, int]:
    """How many blocks share a row that takes so much memory, and the threads of each."""
    rows = kept_extent(nest)
    members, alone = (power_of_two(-(-shared // most)) for most in (SHARED - FOLDING, ALONE))
    if 1 < alone < members and 0.75 * PROCESSORS < rows * alone <= PROCESSORS:
        return alone, LOOPED
    busiest = -(-rows // PROCESSORS) * PROCESSORS
    if members <= 2 and chunks > BLOCK * MANY and rows > PROCESSORS and busiest > UNEVEN * rows:
        if not read_once(nest):
            return CLUSTER, BLOCK // 2
        if members == 1:
            return 2, BLOCK
    if members == CLUSTER // 2 and rows > PROCESSORS and not read_once(nest):
        return CLUSTER, BLOCK
    while members < CLUSTER and rows * LOOPED * members * 2 <= BUSY and LOOPED * members < chunks:
        members *= 2
    return members, LOOPED


def spread(grid: Grid, blocks: Any) -> int:
    """The bytes of shared memory that blocks are started with.

    So many that no processor takes more of them than there are for each: where they start early, they would
    crowd on those that are free first.
    """
    if not grid.shared or type(blocks) is not int:
        return grid.shared
    each = max(-(-blocks // (PROCESSORS if grid.members == 1 else IN_CLUSTERS)), 1)
    return max(grid.shared, -(-(MEMORY // (each + 1) - RESERVED) // GRANULE) * GRANULE)


def in_strips(nest: Nest, vector: Axis | None, width: int) -> Grid:
    """A block for each strip of rows: its teams take rows in turn, threads keep the sums of their columns."""
    chunks = -(-reduced_extent(nest) // width)
    turns = 1 if chunks <= STRIP // 3 else -(-chunks // (2 * LOOPED)) * 2
    team = max(-(-chunks // (turns * WARP)), 1) * WARP
    costly = any(isinstance(t, Apply) and t.op in COSTLY for t in nest.terms())
    for threads in (LOOPED,) if costly or turns > 1 else (STRIP, LOOPED):
        grid = Grid(vector, width, max(threads // team, 1), team, True, turns)
        size = sum(row.bytes for row in rows_ahead(nest, grid).values())
        stages = min((SHARED - FOLDING) // size, STAGES) if size else 0
        if stages > 1:
            return replace(grid, shared=size * stages)
    return grid


def rows_ahead(nest: Nest, grid: Grid) -> dict[tuple[Any, ...], Again]:
    """What is read of each row of a strip, and where a block keeps it: what threads read, turn by turn."""
    found: dict[tuple[Any, ...], Again] = {}
    place = 0
    for key in phases_of(nest):
        if all(axis.variable in key[1].symbols() for axis in nest.axes):
            found[key] = Again(0, place, grid.turns * grid.threads * grid.width * int(key[2].itemsize))
            place += found[key].bytes
    return found


@dataclass(frozen=True, eq=False, slots=True)
class Again:
    """What is read of a row by later phases than the first: where it is kept, and in how many bytes."""

    first: int
    place: int
    bytes: int


def read_again(nest: Nest, part: int = 0) -> dict[tuple[Any, ...], Again]:
    """The loads along a row, or a part of it, that several phases read, by what tells them apart.

    Of a row that is read once for the largest value and the sum of powers, all: copies come at once.
    """
    at_once = largest_and_sum(nest) is not None
    found: dict[tuple[Any, ...], Again] = {}
    place = 0
    for key, phases in phases_of(nest).items():
        read = {0 if at_once and phase == 1 else phase for phase in phases}
        if len(read) > 1 or read_once(nest):
            size = -(-(part or reduced_extent(nest)) * int(key[2].itemsize) // WIDEST) * WIDEST
            found[key] = Again(min(read), place, size)
            place += size
    return found


def phases_of(nest: Nest) -> dict[tuple[Any, ...], set[int]]:
    """For each load along a row, which has an element for each turn, the phases that read it."""
    phases: dict[tuple[Any, ...], set[int]] = {}
    roots = [(part, fold.phase) for fold in nest.folds() for part in fold.parts]
    roots += [(store.value, store.phase) for store in nest.stores if not store.kept]
    along = {axis.variable for axis in nest.reduced}
    for root, phase in roots:
        for load in loads_before_folds(root):
            if load.valid is None and not load.places and isinstance(load.index, Expr):
                if along <= load.index.symbols():
                    phases.setdefault(key_of(load), set()).add(phase)
    return phases


def key_of(load: Load) -> tuple[Any, ...]:
    return load.buffer, load.index, load.dtype


def loads_before_folds(root: Term) -> list[Load]:
    """The loads of a term that are not inside of folds."""
    found = reached([root], lambda term: () if isinstance(term, Fold) else children(term))
    return [term for term in found if isinstance(term, Load)]


def largest_and_sum(nest: Nest) -> tuple[Fold, Fold] | None:
    """The folds of a nest's first two phases, where they are the largest value and the sum of powers."""
    folds = nest.folds()
    phases = {s.phase for s in nest.stores if not s.kept}
    if 1 in phases or 0 in phases and (len(phases) > 1 or not in_whole_stores(nest)):
        return None
    found = pair_of(*([f for f in folds if f.phase == phase] for phase in (0, 1)))
    return found if found is not None and compute_type(TYPES[found[1].value.dtype]) == F32 else None


def in_whole_stores(nest: Nest) -> bool:
    """Whether elements of a row are stored 16 bytes at once."""
    (along, *more), each = nest.reduced, [s for s in nest.stores if not s.kept]
    return not more and all(whole(s.index, WIDEST // s.buffer.dtype.itemsize, along.variable) for s in each)


def has_weights(nest: Nest) -> bool:
    """Whether something that all rows share is read along them."""
    kept = {axis.variable for axis in nest.kept}
    return bool(kept) and any(kept.isdisjoint(key[1].symbols()) for key in phases_of(nest))


def read_once(nest: Nest) -> bool:
    """Whether nothing is stored but copies, and what follows from the largest value and the sum of powers."""
    return all(store.kept or not store.phase for store in nest.stores) and largest_and_sum(nest) is not None


def row_bytes(nest: Nest, vector: Axis | None, width: int) -> int:
    """The bytes that a thread reads in one turn."""
    found = {(t.buffer, t.index, t.dtype) for t in nest.terms() if isinstance(t, Load)}
    varying = [d for _, i, d in found if isinstance(i, Expr) and vector and vector.variable in i.symbols()]
    return width * sum(int(d.itemsize) for d in varying)


def width_for(nest: Nest, vector: Axis | None) -> int:
    """How many neighbouring elements along the vector axis a thread takes: 16 bytes of the smallest type."""
    if vector is None:
        return 1
    accesses = [(t.index, t.dtype) for t in nest.terms() if isinstance(t, Load)]
    accesses += [(s.index, s.buffer.dtype) for s in nest.stores]
    sizes = [d.itemsize for i, d in accesses if isinstance(i, Expr) and vector.variable in i.symbols()]
    if not sizes:
        return 1
    width: int = max(min(WIDEST // min(sizes), MOST_BYTES // max(sizes)), 1)
    if len(nest.axes) == 1 and not vector.reduced and vector.low == 0:
        return width  # where elements are left over, the last thread takes them one by one
    while width > 1 and not (whole(vector.size, width) and whole(vector.low, width)):
        width //= 2
    return width


def whole(index: Any, by: int, steps: Symbol | None = None) -> bool:
    """Whether an index is always a multiple of `by`; `steps` is a loop variable that is."""
    if not isinstance(index, Expr):
        return bool(index % by == 0)
    return all(
        factor % by == 0 or monomial == (steps,) or any(whole_atom(atom, by, steps) for atom in monomial)
        for monomial, factor in index.poly.items()
    )


def whole_atom(atom: Expr, by: int, steps: Symbol | None) -> bool:
    return atom.op in (MIN, MAX, MOD) and all(whole(part, by, steps) for part in atom.args)


def extent(axis: Axis) -> int:
    """The turns of a loop, by the sizes when traced."""
    return max(hinted(axis.size) - hinted(axis.low), 1)


def reduced_extent(nest: Nest) -> int:
    """The elements that are folded into one."""
    return math.prod(map(extent, nest.reduced))


def kept_extent(nest: Nest) -> int:
    """The results of each fold."""
    return math.prod(map(extent, nest.kept))


def power_of_two(n: int) -> int:
    """The smallest one that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()
