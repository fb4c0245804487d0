"""Stores past the caches: of results so large that nothing of them is there any more when they are read.

A store of a whole line then saves reading it first. Where the memory does not lie right for it, or is that of
a value that is read, which is known when the kernel runs, stores are the usual ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kiln.base.expressions import grows, hinted
from kiln.base.symbols import Expr
from kiln.fuse.costs import COSTLY
from kiln.fuse.nest import Apply, Axis, Buffer, Fold, Load, Nest, Place, Store, Term, terms
from kiln.generate.cpu import host
from kiln.generate.lanes import row_terms
from kiln.generate.llvm import I1, I32, I64, VOID, Function, Value
from kiln.generate.pieces import borders
from kiln.generate.rows import Rows
from kiln.generate.scalar import TYPES
from kiln.generate.values import STREAMED

#: Bytes of a line.
LINE = 64
#: Pairs of what is stored and what is read that are compared before a nest, at most.
COMPARED = 256
#: What is taken for the last cache where the system does not say.
USUAL_CACHE = 32 << 20
#: Elements of a row for which it pays to ask for the next one: fewer are asked for by the processor itself,
#: and so are more where it reads one row after the other without a pause.
SHORTEST, SHORTEST_LATE, LONGEST = 512, 2560, 1 << 17
#: Elements of a piece of memory of which later ones are asked for, and how many bytes before they are read.
LONGEST_PIECE, BEFORE = 1 << 13, 16 << 10
#: The same of short rows of numbers of four bytes.
BEFORE_SHORT = 4 << 10
#: The same of what is read in one go, or comes to the nearest cache; of all that is read in one go together
#: where that cache takes it best.
BEFORE_LINES, BEFORE_ALL = 8 << 10, 16 << 10
#: Folds of floats that ask of each number whether it is one: that is more than is done while memory comes.
NAN_TOO = ("amax", "amin")
#: Bytes of a nest that the nearest caches do not hold.
FAR = 1 << 20


@functools.cache
def last_cache() -> int:
    """Bytes of the processor's last cache."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return USUAL_CACHE


def is_large(nest: Nest) -> bool:
    """Whether a nest moves more bytes than the last cache holds."""
    return moved(nest) >= last_cache()


class Streams(Rows):
    """Says which stores of a nest go past the caches, and when, and what is asked for meanwhile."""

    outer: Callable[[], list[Axis]]
    factor: Callable[[list[Term], int], int]
    late: tuple[Store, ...]
    uneven: Store | None = None
    """The one store past the caches where its rows begin anywhere in a line."""

    def streamed(self) -> list[Store]:
        """The stores that may: they write whole lines, and the nest moves more bytes than caches hold."""
        nest, vector = self.nest, self.vector
        if vector is None or self.width * 4 != LINE or not self.past_caches():
            return []
        edges = borders(nest, vector, self.width)
        if vector.low != 0 or any(type(edge) is not int or edge % self.width for edge in edges):
            return []
        rows = [s for s in nest.stores if not s.kept and not s.adds and in_rows(s, vector)]
        if even := [s for s in rows if self.in_lines(s, vector)]:
            return even if len(even) * len(self.read_as(even)) <= COMPARED else []
        self.uneven = next((s for s in rows if self.alone(s)), None)
        return [] if self.uneven is None else [self.uneven]

    def in_lines(self, store: Store, vector: Axis) -> bool:
        """Whether the places of vectors are those of lines, given that the memory starts at one."""
        line = max(LINE // store.buffer.dtype.itemsize, self.width)
        return all(f % line == 0 for m, f in store.index.poly.items() if m != (vector.variable,))

    def alone(self, store: Store) -> bool:
        """Whether a store of long rows is all that its phase does, so that it can begin at a line."""
        nest = self.nest
        others = [s for s in nest.stores if s.phase == store.phase and s is not store and not s.kept]
        folds = [f for f in nest.folds() if f.phase == store.phase]
        long = nest.reduced == (self.vector,) and self.row_length() >= SHORTEST
        return long and not others and not folds

    def first_line(self, store: Store, high: Value) -> Value:
        """The first turn, up to `high`, in which a store begins at a line."""
        assert self.vector is not None
        stored = TYPES[store.buffer.dtype]
        self.push()
        self.variables[self.vector.variable] = self.fn.constant(0, I64)
        row = _number(self.fn, self.fn.at(self.pointers[store.buffer], self.index(store.index), stored))
        self.pop()
        first = ((-row) & (LINE - 1)) / (stored.bits // 8)
        return (first < high).where(first, high)

    def lie_right(self, stores: list[Store]) -> Value:
        """Whether the memory of these stores starts at a line, if it must, and is none of what is read."""
        fn = self.fn
        written, read = [self.pointers[s.buffer] for s in stores], self.read_as(stores)
        right = fn.constant(1, I1)
        for pointer in written:
            address = _number(fn, pointer)
            if self.uneven is None:
                right = right & (address & (LINE - 1)).compare("eq", 0)
            for buffer in read:
                right = right & address.compare("ne", _number(fn, self.pointers[buffer]))
        return right

    def read_as(self, stores: list[Store]) -> list[Buffer]:
        """The memory that is read whose elements are of a type that these stores have."""
        kinds = {s.buffer.dtype for s in stores}
        loads = [t for t in self.nest.terms() if isinstance(t, Load)]
        return list(dict.fromkeys(t.buffer for t in loads if t.dtype in kinds))

    def only_reads(self) -> bool:
        """Whether a nest folds what lies in memory with little to compute: half lines come faster then."""
        nest, vector, folds = self.nest, self.vector, self.nest.folds()
        if vector is None or not folds or self.width * 4 != LINE or not self.past_caches():
            return False
        if host().reads_in_steps:
            return False
        if any(f.phase or f.running or f.place for f in folds) or not all(s.kept for s in nest.stores):
            return False
        found = terms(f.value for f in folds)
        whole = all(t.dtype.itemsize == 4 for t in found if isinstance(t, Load))
        return whole and self.factor([f.value for f in folds], 2) > 1

    def in_halves(self) -> bool:
        """Whether a nest that reads more than it writes goes by half lines, which come faster from memory.

        Nothing is lost where the processor takes whole ones in halves anyway.
        """
        nest, vector = self.nest, self.vector
        if vector is None or nest.reduced or self.width * 4 != LINE or not host().halves_vectors:
            return False
        roots = [s.value for s in nest.stores]
        loads = [t for t in terms(roots) if isinstance(t, Load)]
        if any(b.dtype.itemsize != 4 for b in [t.buffer for t in loads] + [s.buffer for s in nest.stores]):
            return False
        variables = {a.variable for a in nest.axes}
        read = {t.buffer for t in loads if isinstance(t.index, Expr) and variables <= t.index.symbols()}
        return len(read) > len(nest.stores) and self.factor(roots, 2) > 1

    def slow_stream(self) -> bool:
        """Whether elementary functions take longer than memory does where code is emitted."""
        return bool(self.streams) and self.slow(self.nest.terms())

    def slow(self, found: list[Term]) -> bool:
        return any(isinstance(t, Apply) and t.op in COSTLY and self.varies(t) for t in found)

    def long_phase(self) -> int:
        """The phase in which the next row is asked for: it has the row at hand and computes meanwhile.

        Where stores wait for memory anyway asking for more there gains nothing.
        """
        nest = self.nest
        values = [(f.phase, f.value) for f in nest.folds()]
        values += [(s.phase, s.value) for s in nest.stores if not s.kept]
        last = max([phase for phase, _ in values], default=0)
        if host().foresees_little:
            return last
        for phase in range(1, last + 1):
            if self.slow(row_terms([value for when, value in values if when == phase])):
                return phase
        return last

    def fetch_next(self) -> None:
        """Ask for what the next row reads where lines are not read one after the other as they lie.

        That is so between the phases of a row, and for places that are computed.
        """
        outer = self.outer()
        if not outer or self.lanes % self.width or self.live is not None:
            return
        if self.streams and not self.nest.reduced and self.row_length() < SHORTEST:
            self.fetch_ahead()
        if not self.goes_far():
            return
        # Into the second cache where rows are gone over again: the nearest has this one.
        self.ask_for(outer[-1], 1, self.fetched(outer[-1]), 2 if self.nest.reduced else 3)

    def fetch_ahead(self) -> None:
        """Ask for what is read some rows later: of short ones processors do not foresee it."""
        variables = {a.variable for a in self.nest.axes}
        found = [t for t in self.nest.terms() if isinstance(t, Load) and not t.places and t.valid is None]
        large = [t for t in found if isinstance(t.index, Expr) and variables <= t.index.symbols()]
        wide = [t for t in large if self.stride(t.index) == 1 and t.dtype.itemsize == 4]
        for load in {t.buffer: t for t in wide}.values():
            first = self.index(load.index) + BEFORE_SHORT // load.dtype.itemsize
            self.prefetch(load, first, 2)

    def foresee(self, load: Load, lanes: int) -> None:
        """Ask for lines to come where rows are read first."""
        if load.buffer in self.in_one_go and self.now == 0 and self.live is None and lanes % self.width == 0:
            before = BEFORE_ALL // len(self.in_one_go) if host().takes_lines_near else BEFORE_LINES
            first = self.index(load.index) + before // load.dtype.itemsize
            self.prefetch(load, first, 3, lanes)

    @functools.cached_property
    def in_one_go(self) -> set[Buffer]:
        """What is read line after line beside some computing, by processors that do not foresee it then."""
        nest, vector, outer = self.nest, self.vector, self.outer()
        if not host().reads_in_steps or vector is None or not self.asks() or nest.part:
            return set()
        folds = nest.folds()
        if nest.reduced and nest.reduced[-1] is not vector or any(f.running for f in folds):
            return set()
        if self.goes_back():
            return set()
        if outer and not folds and self.row_length() < SHORTEST:
            return set()
        short = all(f.place is None and f.dtype.itemsize <= 4 and f.phase == 0 for f in folds)
        if host().takes_lines_near:
            short = short and not any(f.kind in NAN_TOO and f.dtype.is_floating_point for f in folds)
        waits = short and self.factor([f.value for f in folds] or [s.value for s in nest.stores], 2) > 1
        if waits and (folds or not host().takes_lines_near):
            return set()  # memory is all that is waited for
        long = not outer or hinted(vector.size) > LONGEST_PIECE
        rows = ([a for a in nest.reduced if a is not vector] or outer)[-1:]

        def follow(index: Any) -> bool:
            """Whether rows lie one after the other."""
            return long or all(index.poly.get((a.variable,)) == vector.size for a in rows)

        found = [t for t in nest.terms() if isinstance(t, Load) and not t.places and t.valid is None]
        read = {
            t.buffer for t in found
            if isinstance(t.index, Expr) and self.stride(t.index) == 1 and follow(t.index)
        }  # fmt: skip
        # Several that go at one pace come faster unasked.
        at_one_pace = waits and len(read) > 1 and len({buffer.dtype.itemsize for buffer in read}) == 1
        return set() if at_one_pace else read

    def asks(self) -> bool:
        """Whether a nest moves so much that lines are asked for.

        From the last cache to the nearest one they come by themselves, and faster where others go back.
        """
        stores = any(not s.kept for s in self.nest.stores)
        return is_large(self.nest) if stores and host().takes_lines_near else moved(self.nest) >= FAR

    def prefetch(self, load: Load, first: Value, near: int, lanes: int = 0) -> None:
        """Ask for so many elements, or as many as there are lanes."""
        hints = [self.fn.constant(n, I32) for n in (0, near, 1)]
        for lane in range(0, lanes or self.lanes, LINE // load.dtype.itemsize):
            address = self.fn.at(self.pointers[load.buffer], first + lane, TYPES[load.dtype])
            self.fn.call("llvm.prefetch.p0", VOID, address, *hints)

    def fetch_pieces(self, folds: list[Fold]) -> None:
        """Ask for what the first folds over rows of several pieces read later."""
        vector, loops = self.vector, [a for a in self.nest.reduced if a is not self.vector]
        if vector is not None and vector.reduced and loops and self.now == 0:
            self.fetch_piece(loops[-1], hinted(vector.size), [f.value for f in folds])

    def rows_in_pieces(self) -> bool:
        """Whether what is folded lies in pieces that do not follow each other."""
        vector, folded = self.vector, self.nest.reduced
        return vector is not None and vector in folded[1:] and hinted(vector.size) <= LONGEST_PIECE

    def fetch_piece(
        self, axis: Axis, length: int, roots: list[Term], before: int = 0, least: int = 1
    ) -> None:
        """Ask for what is folded some turns of an axis later, of each a piece of memory of so many elements.

        The processor does not foresee pieces that do not follow each other, nor those that take some time.
        `before` says how many bytes earlier, for the second cache; 0 leaves that, and the cache, to the host.
        """
        whole = self.lanes % self.width == 0 and self.live is None
        if not whole or length > LONGEST_PIECE or moved(self.nest) < FAR:
            return
        assert self.vector is not None
        found = []
        for load in terms(roots):
            if isinstance(load, Load) and isinstance(load.index, Expr) and not load.places and not load.valid:
                apart, step = (load.index.poly.get((a.variable,), 0) for a in (axis, self.vector))
                if step == 1 and hinted(apart) >= length:
                    found.append(load)
        if found:
            near = not before and host().takes_lines_near
            ahead = -(-(BEFORE_LINES if near else before or BEFORE) // (length * found[0].dtype.itemsize))
            self.ask_for(axis, max(ahead, least), found, 3 if near else 2)

    def ask_for(self, axis: Axis, ahead: int, loads: list[Load], near: int) -> None:
        """Ask for what is read some turns of a loop later.

        Where places are read they are those of the last turn at most. Otherwise what follows is the next
        part's, and memory that is not there is no fault.
        """
        here = self.variables[axis.variable]
        later, last = here + ahead, self.index(axis.size) - 1
        known = self.layers, self.indices
        for load in loads:
            self.layers, self.indices = [{}], [{}]
            self.variables[axis.variable] = (later < last).where(later, last) if load.places else later
            for place in load.places:
                self.variables[place.symbol] = self.lane_or_value(place.term)
            self.prefetch(load, self.index(load.index), near)
        self.variables[axis.variable] = here
        self.layers, self.indices = known

    def lane_or_value(self, term: Term) -> Value:
        """A computed place of the next row; where it differs from lane to lane, the one in order."""
        assert self.vector is not None
        below = [t for t in terms([term]) if isinstance(t, (Load, Place)) and isinstance(t.index, Expr)]
        if any(self.vector.variable in t.index.symbols() for t in below):
            return self.variables[self.vector.variable]
        return self.value(term).to(I64)

    def fetched(self, axis: Axis) -> list[Load]:
        """What is asked for: reads along rows of some length that the nearest caches hold.

        Where a row is read in order, in one piece, and little is computed, the processor is there first.
        """
        nest, vector = self.nest, self.vector
        assert vector is not None
        if self.row_length() > LONGEST:
            return []
        waits = nest.reduced and (self.slow(nest.terms()) or self.rows_in_pieces() or self.goes_back())
        roots = [f.value for f in nest.folds() if f.phase == 0] or [s.value for s in nest.stores]
        found = []
        for load in terms(roots):
            if not isinstance(load, Load) or not isinstance(load.index, Expr) or load.valid is not None:
                continue
            if not (load.places or waits) or load.buffer in self.in_one_go:
                continue
            steps = {p.symbol for p in load.places} | {vector.variable}
            linear = [load.index.poly.get((step,)) for step in steps]
            if 1 in linear and (load.places or axis.variable in load.index.symbols()):
                found.append(load)
        return found

    def goes_back(self) -> bool:
        """Whether a row that was read is gone over again to be stored, where memory would wait meanwhile."""
        again = any(s.phase for s in self.nest.stores if not s.kept)
        return again and bool(self.nest.reduced) and host().foresees_little and self.goes_far()

    def goes_far(self) -> bool:
        least = SHORTEST_LATE if self.late and not host().foresees_little else SHORTEST
        return self.row_length() >= least and moved(self.nest) >= FAR

    def from_memory(self) -> bool:
        return self.row_length() >= SHORTEST and self.past_caches()

    def past_caches(self) -> bool:
        """Whether a nest moves more bytes than the last cache holds."""
        return is_large(self.nest)

    def row_length(self) -> int:
        return math.prod([hinted(a.size) for a in self.nest.axes if a.reduced or a is self.vector])

    def finish_streams(self) -> None:
        """Let what was stored be seen before anything that comes after."""
        if self.streams:
            self.module.define(STREAMED, "!0 = !{i32 1}")
            self.fn.do("call void @llvm.x86.sse.sfence()")
            self.module.define("llvm.x86.sse.sfence", "declare void @llvm.x86.sse.sfence()")


def in_rows(store: Store, vector: Axis) -> bool:
    """Whether vectors are written side by side, of elements of two bytes and more."""
    return store.buffer.dtype.itemsize >= 2 and grows(store.index, vector.variable) == 1


def _number(fn: Function, pointer: Value) -> Value:
    return fn.emit(f"ptrtoint ptr {pointer.text} to i64", I64)


def moved(nest: Nest) -> int:
    """Bytes of what a nest reads and writes in all of its loops, by the sizes when traced."""
    bounds = [part for a in nest.axes for part in (a.low, a.size) if isinstance(part, Expr)]
    parts = set[Expr]().union(*[part.symbols() for part in bounds])  # their loops are seen in others
    variables = {a.variable for a in nest.axes} - parts
    places = [(t.buffer, t.index) for t in nest.terms() if isinstance(t, Load)]
    places += [(s.buffer, s.index) for s in nest.stores]
    large = {b for b, index in places if isinstance(index, Expr) and variables <= index.symbols()}
    return sum(nest.volume() * b.dtype.itemsize for b in large)
