"""Loop nests as LLVM functions for the CPU: loops over tasks, vectors along an axis, folds in registers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, TypeAlias

import torch

from kiln.base.expressions import hinted
from kiln.base.symbols import Expr
from kiln.fuse.costs import COSTLY
from kiln.fuse.moments import is_plain
from kiln.fuse.nest import (
    Apply,
    Axis,
    Const,
    Fold,
    Load,
    Nest,
    Part,
    Place,
    Store,
    Term,
    children,
    is_affine,
    terms,
)
from kiln.generate import avx512
from kiln.generate.afterwards import TOGETHER, Afterwards
from kiln.generate.columns import Columns, anew, may_pass
from kiln.generate.cpu import host
from kiln.generate.lanes import (
    access_cost,
    across_lanes,
    combined,
    first_lane,
    lanes_along,
    varying,
    with_first_lane,
)
from kiln.generate.llvm import THOROUGH, Value
from kiln.generate.loose import loose
from kiln.generate.online import Online
from kiln.generate.pieces import FEW, borders, decided
from kiln.generate.scans import BESIDE, Scans
from kiln.generate.schedule import USUAL, Schedule
from kiln.generate.softmax import forgetful
from kiln.generate.tiles import Tiles, crossing
from kiln.generate.woven import Woven, woven

Loop: TypeAlias = "Callable[[Any, Any, list[Value]], list[Value]]"
Body: TypeAlias = "Callable[[list[Value]], list[Value]]"
BLOCK = 512  # turns after which a sum of floats starts anew
LONG = 400  # lines of a function whose loops are not worth being unrolled, however short they are

STRIP = 256  # columns of a task that are folded row by row
REGISTERS = 24  # of vectors, for what folds carry
SHORT_TURN, MANY_TERMS = 16, 64  # of a turn
BESIDE_SLOW, MANY_BESIDE = 4, 4  # vectors of elementary functions, and turns that are worth it
CROWDED = frozenset({"pow", "fmod", "remainder", "atan2"})  # functions that take most registers alone
DOUBLES = 2  # vectors of a turn that computes in double


class Emitter(Tiles, Online, Columns, Scans, Afterwards, Woven):
    """Writes one nest as `void (ptr …, i64 sizes …, ptr status, i64 begin, i64 end)` over its tasks."""

    def __init__(self, nest: Nest, width: int, schedule: Schedule = USUAL) -> None:
        super().__init__(nest, width, schedule)
        self.module.hoists = True
        written = nest.buffers()[1]
        self.fn.unwritten = {at.text for buffer, at in self.pointers.items() if buffer not in written}
        self.crossing = crossing(nest, width, schedule.tile)
        if self.crossing is not None:
            self.vector, self.width = self.crossing.along, width
        elif self.only_reads() and not self.by_rows():
            self.width //= 2
        self.blocked = nest.several and bool(nest.reduced)
        if self.blocked:
            self.vector = nest.kept[-1]
            self.width = math.gcd(lanes_along(self.vector, width), self.vector.size)
        elif self.crossing is None and self.width > 1:
            self.weaves = woven(nest, self.vector)
        rounds = "+avx512bf16" in host().features
        self.module.in_words = not rounds
        self.masks = width == avx512.LANES  # whether lanes can be left out at no cost
        if self.masks:
            self.module.own.update(avx512.OWN)
            if any(term.dtype is torch.float16 for term in nest.terms()):
                self.module.own.update(avx512.FINER)
            self.module.own["to_bf16"] = avx512.to_bf16 if rounds else avx512.to_bf16_by_words
            self.in_words = rounds and "+avx512vbmi2" in host().features
            self.loose = loose(nest)
        self.emit()
        unrolls = self.fn.short_loops and len(self.fn.lines) < LONG and not nest.several
        if self.crossing is not None or unrolls:
            self.fn.attributes += f" {THOROUGH}"

    # The frame: tasks and loops

    def emit(self) -> None:
        """Write the loop over the tasks, and a second one where stores may go past the caches."""
        if streamed := self.streamed():
            fn = self.fn
            fast, usual = fn.label("fast"), fn.label("usual")
            fn.branch(self.lie_right(streamed), fast, usual)
            fn.start(fast)
            self.streams = streamed
            self.all_tasks()
            self.streams = []
            fn.start(usual)
        if self.crossing is None and self.in_halves():
            self.width //= 2
        self.all_tasks()

    def all_tasks(self) -> None:
        fn = self.fn
        begin, end = fn.parameters["begin"], fn.parameters["end"]
        self.begin_late()
        if self.in_strips():
            self.rows(begin, end)
        else:
            fn.loop(begin, end, 1, [], lambda task, _: self.task(task))
        self.end_late()
        self.finish_streams()
        fn.do("ret void")

    def outer(self) -> list[Axis]:
        """The axes whose turns are the tasks."""
        return [a for a in self.nest.kept if a is not self.vector and a is not self.weaves]

    def tasks(self) -> Any:
        """The number of tasks, in terms of the sizes."""
        count: Any = 1
        for axis in self.outer():
            count = count * self.turns(axis)
        if not self.outer() and self.vector is not None and not self.vector.reduced:
            chunk = self.chunk()
            return (self.vector.size + (chunk - 1)) // chunk
        return count

    def in_strips(self) -> bool:
        """Whether tasks are strips of columns that are folded row by row: those of a thread go at once."""
        return not self.outer() and self.nest.part is None and self.by_rows()

    def chunk(self) -> int:
        """Elements of one task, where there is one axis only beside what is folded."""
        return min(self.schedule.chunk, STRIP) if self.in_strips() else self.schedule.chunk

    def block(self, axis: Axis) -> int:
        """How many turns of an axis one task takes: several where rows are short, or go in tiles."""
        if self.nest.part is not None:
            return self.nest.part.rows
        if self.crossing is not None:
            return self.crossing.block if axis is self.crossing.across else 1
        *others, last = self.outer()
        if axis is last and self.beside():
            return BESIDE
        if axis is not last or not (others or self.waiting_folds):
            return 1
        few = self.schedule.rows // max(self.row_length(), 1)
        return max(min(max(few, TOGETHER) if self.waiting_folds else few, hinted(axis.size)), 1)

    def turns(self, axis: Axis) -> Any:
        """How many tasks an axis makes."""
        block = self.block(axis)
        return axis.size if block == 1 else (axis.size + (block - 1)) // block

    def task(self, task: Value) -> Sequence[Value]:
        self.push()
        rest, outer = task, self.outer()
        for axis in reversed(outer[1:]):
            size = self.index(self.turns(axis))
            self.variables[axis.variable] = rest % size
            rest = rest / size
        if outer:
            self.variables[outer[0].variable] = rest
        if self.crossing is not None:
            along = self.crossing.along
            self.tiled(
                self.variables[self.crossing.across.variable],
                lambda low, high: self.in_pieces(along, low, high, 1),
                self.row,
            )
        elif outer and (block := self.block(outer[-1])) > 1:
            if self.nest.part is not None:
                self.begin_part(self.nest.part, task)
            low = self.variables[outer[-1].variable] * block
            high, size = low + block, self.index(outer[-1].size)
            high = (high < size).where(high, size)
            low = self.rows_beside(low, high) if self.beside() else low
            if self.waiting_folds:
                self.hold(block, low)
            self.fn.loop(low, high, 1, [], self.one_row)
            if self.waiting_folds:
                self.store_held(outer[-1], low, high)
        else:
            self.rows(task)
        self.pop()
        return []

    def begin_part(self, part: Part, task: Value) -> None:
        """Zeros where the rows of this task add."""
        self.variables[part.variable] = task
        (axis,) = self.nest.reduced
        for store in self.nest.stores:
            if store.adds:
                zero = replace(store, value=Const(0.0, store.buffer.dtype), adds=False)

                def turn(_: list[Value], zero: Store = zero) -> list[Value]:
                    self.store(zero)
                    return []

                self.along(axis, 0, axis.size, [], turn)

    def one_row(self, i: Value, carried: list[Value]) -> list[Value]:
        """A turn of the last of the outer axes within a task."""
        self.push()
        self.variables[self.outer()[-1].variable] = i
        self.rows(i)
        self.pop()
        return []

    def rows(self, task: Value, end: Value | None = None) -> None:
        """What is inside of the outer axes, or several tasks of the vector axis, up to `end`."""
        vector = self.vector
        if vector is None or vector.reduced:
            self.row()
            return
        low: Any = 0
        high, factor = vector.size, self.columns()
        if not self.outer() and self.tasks() != 1:
            chunk = self.chunk()
            low = task * chunk
            last, size = low + chunk if end is None else end * chunk, self.index(vector.size)
            high = (last < size).where(last, size)
        if self.by_rows():
            self.fold_columns(low, high)
        else:
            self.in_pieces(vector, low, high, factor)

    def in_pieces(self, axis: Axis, low: Any, high: Any, factor: int) -> None:
        """The loop along the vector axis, in pieces in which conditions are decided."""
        edges = borders(self.nest, axis, self.width)
        if not edges:
            self.along(axis, low, high, [], self.row_of_lanes, factor=factor)
            return
        for left, right in zip([0, *edges], [*edges, axis.size], strict=True):
            start: Any = left
            end: Any = right
            if not (isinstance(low, int) and isinstance(high, int)):
                first, last, begin, stop = map(self.index, (low, high, left, right))
                start, end = (first > begin).where(first, begin), (last < stop).where(last, stop)
            self.decided = decided(self.nest, axis, left, right)
            self.along(axis, start, end, [], self.row_of_lanes, factor=factor)
            self.decided = {}

    def row_of_lanes(self, carried: list[Value]) -> list[Value]:
        self.row()
        return []

    def columns(self) -> int:
        """How many vectors of columns are folded at once: rows are read in longer pieces."""
        folds = self.nest.folds()
        if self.blocked and self.vector is not None:
            return int(self.vector.size) // self.width
        if not folds:
            return 1 if self.weaves is not None else max(self.schedule.stretch, self.vectors_beside())
        roots = [s.value for s in self.nest.stores]
        most = self.schedule.columns
        while self.vector is not None and most > 1 and most * self.width > hinted(self.vector.size):
            most //= 2  # of few columns all at once
        return self.factor(roots, most) if len(folds) * most <= REGISTERS else 1

    def vectors_beside(self) -> int:
        """How many vectors are computed at once where nothing is folded."""
        assert self.vector is not None
        found = self.nest.terms()
        many = hinted(self.vector.size) >= MANY_BESIDE * BESIDE_SLOW * self.width
        crowded = any(isinstance(t, Apply) and t.op in CROWDED for t in found)
        if self.in_pairs() or crowded or not (many and host().finds_few_beside):
            return 2 if self.in_pairs() or self.slow_stream() else 1
        return BESIDE_SLOW if self.slow(found) else 1

    def in_pairs(self) -> bool:
        """Whether two vectors at once become one of bf16 that is stored."""
        found, stores = self.nest.terms(), self.nest.stores
        if "to_bf16" not in self.module.own or any(s.buffer.dtype is not torch.bfloat16 for s in stores):
            return False
        reads = [t for t in found if isinstance(t, Load)]
        indices = [t.index for t in reads] + [s.index for s in stores]
        assert self.vector is not None
        beside = all(access_cost(i, self.vector) <= 1 for i in indices if isinstance(i, Expr))
        simple = len(found) <= MANY_TERMS and not any(t.places for t in reads) and not self.nest.several
        return beside and simple

    def factor(self, roots: list[Term], most: int) -> int:
        """How many vectors one turn takes: several where a turn is short, so that folds wait less."""
        assert self.vector is not None
        found = terms(iter(roots))
        loops = {a.variable for a in self.nest.reduced} | {self.vector.variable}
        simple = len(varying(found, loops)) <= SHORT_TURN and all(
            t.op not in COSTLY if isinstance(t, Apply) else not getattr(t, "places", ()) for t in found
        )
        if not simple:
            return 1
        if any(t.dtype.itemsize > 4 for t in found if isinstance(t, (Load, Apply))):
            most = min(most, DOUBLES)
        indices = [t.index for t in found if isinstance(t, (Load, Place)) and isinstance(t.index, Expr)]
        return most if all(access_cost(i, self.vector) <= 1 for i in indices) else 1

    def along(
        self, axis: Axis, low: Any, high: Any, carried: list[Value], body: Body,
        folds: Sequence[Fold] = (), factor: int = 1,
    ) -> list[Value]:  # fmt: skip
        """A loop along the vector axis, `factor` vectors a turn, then one, the rest by a mask or in scalars.

        What `folds` carry is a vector; theirs are `factor` of them, in turn.
        """
        fn, values = self.fn, carried
        start, end = self.index(low), self.index(high)

        def turn(i: Value, held: list[Value], lanes: int) -> list[Value]:
            self.push()
            self.variables[axis.variable], outside, self.lanes = i, self.lanes, lanes
            results = body(held)
            self.lanes = outside
            self.pop()
            return list(results)

        for lanes in dict.fromkeys((self.width if folds else factor * self.width, self.width, 1)):
            count = high - low if isinstance(high, int) and isinstance(low, int) else None
            single = bool(self.decided) and count is not None and count <= FEW
            if lanes == 1 < self.width and self.masks and not single:
                return fn.loop(start, end, self.width, values, partial(self.rest, turn, end))
            if count is not None and count < lanes:
                continue
            exact = lanes == 1 or (count is not None and count % lanes == 0)
            stop = end if exact else start + (end - start) / lanes * lanes
            here = partial(turn, lanes=lanes)
            if folds and lanes < self.width:  # the rest is folded into the first lane
                found = fn.loop(start, stop, lanes, [first_lane(v) for v in values], here)
                values = [with_first_lane(v, r) for v, r in zip(values, found, strict=True)]
            elif folds:
                sets = factor if count is None or count >= factor * lanes else 1
                values = self.in_turn(list(folds), sets, start, stop, values, here)
            else:
                values = fn.loop(start, stop, lanes, values, here)
            start = stop
            if exact:
                break
            if count is not None:
                low = high - count % lanes
        return values

    def in_turn(
        self, folds: list[Fold], sets: int, start: Value, stop: Value, carried: list[Value],
        body: Callable[[Value, list[Value]], list[Value]],
    ) -> list[Value]:  # fmt: skip
        """A loop in vectors that folds into several sets of values in turn, so that none is waited for.

        It reads by one instruction, line after line: most processors foresee that, not several in steps.
        """
        count = len(carried)
        others = [part for fold in folds for part in self.neutral(fold, self.width)] * (sets - 1)
        held = [*carried, *others]

        def turn(i: Value, held: list[Value]) -> list[Value]:
            return [*held[count:], *body(i, held[:count])]

        def several(i: Value, held: list[Value]) -> list[Value]:
            for k in range(sets):
                held = turn(i + k * self.width if k else i, held)
            return held

        wide = any(fold.dtype.itemsize > 4 for fold in folds)
        if sets > 1 and (self.now or wide or host().reads_in_steps):  # memory is not what is waited for
            step = sets * self.width
            whole = start + (stop - start) / step * step
            held, start = self.fn.loop(start, whole, step, held, several), whole
        held = self.fn.loop(start, stop, self.width, held, turn)
        return reduce(partial(combined, folds), [held[k : k + count] for k in range(0, len(held), count)])

    def rest(self, turn: Callable[..., list[Value]], end: Value, i: Value, held: list[Value]) -> list[Value]:
        """A turn for fewer places than a vector has lanes: the others neither read nor write."""
        self.live = live = (i.splat(self.width) + self.ramp(self.width)) < end
        results = turn(i, held, lanes=self.width)
        self.live = None
        return [live.where(r, h) for h, r in zip(held, results, strict=True)]

    def row(self) -> None:
        """One turn of the kept axes: the phases, one after the other."""
        stores, folds = self.nest.stores, self.nest.folds()
        if not self.nest.reduced:
            self.fetch_next()
            self.even_and_odd = {}, {}
            if self.nest.several:
                self.in_step(stores)
            if self.weaves is not None:
                self.store_woven(self.weaves, stores)
                return
            for store in stores:
                self.store(store)
            return
        last = max([s.phase for s in stores] + [f.phase for f in folds], default=0)
        self.keep_costly(last)
        joined, in_one_pass = self.joined()
        for phase in range(last + 1):
            self.now = phase
            here = [f for f in folds if f.phase == phase and (joined is None or f not in joined)]
            if phase == 0 and joined is not None:
                in_one_pass(*joined)
            inside = [s for s in stores if s.phase == phase and not s.kept]
            for store in stores:
                if store.kept and store.phase == phase and not self.held:
                    self.store(store)
            if here or inside and not self.late:
                self.phase(here, inside)
        if self.late:
            self.leave_row()
        if self.held:
            self.keep_folds(self.outer()[-1])

    def rounds(self, folds: list[Fold]) -> bool:
        """Whether folds gather errors of rounding in long loops; those of blocks do, as eager's products."""
        kinds = {fold.kind for fold in folds if fold.dtype.is_floating_point}
        return not self.blocked and not kinds.isdisjoint(("sum", "prod"))

    def in_step(self, stores: list[Store]) -> None:
        """Compute neighbours side by side: what they share is needed for a short while."""
        for terms_of in zip(*[self.pending(store.value) for store in stores], strict=False):
            for term in terms_of:
                self.value(term)

    def from_line(
        self, axis: Axis, low: Any, high: Any, carried: list[Value], body: Body, *how: Any
    ) -> list[Value]:
        """A loop whose one store goes past the caches from where a line begins on."""
        assert self.uneven is not None
        first, streams = self.first_line(self.uneven, self.index(high)), self.streams
        self.streams = []
        self.along(axis, low, first, carried, body)
        self.streams = streams
        return self.along(axis, first, high, carried, body, *how)

    def way_along(self, folds: list[Fold], stores: list[Store]) -> Callable[..., list[Value]]:
        """The loop along the vector axis: one of its own where running folds of bf16 become such."""
        if self.streams and self.uneven in stores:
            return self.from_line
        values = [f.value for f in folds] + [s.value for s in stores]
        fits = "to_bf16" in self.module.own and all(s.buffer.dtype is torch.bfloat16 for s in stores)
        fits = fits and all(f.running and f.dtype is not torch.float64 for f in folds)
        fits = fits and folds != [] and not any(is_affine(f.value) for f in folds)
        return self.along_pairs if fits and all(map(self.pairs_alone, values)) else self.along

    def along_pairs(
        self, axis: Axis, low: Any, high: Any, carried: list[Value], body: Body, folds: Sequence[Fold], _: int
    ) -> list[Value]:
        """A loop of running folds, even and odd places of two vectors apart, then over what is left."""
        start, end, wide = self.index(low), self.index(high), 2 * self.width
        stores = [s for s in self.nest.stores if s.phase == self.now and not s.kept]

        def turn(i: Value, held: list[Value]) -> list[Value]:
            self.push()
            self.variables[axis.variable], outside = i, self.lanes
            known = self.even_and_odd = {}, {}
            results = []
            for fold, value in zip(folds, held, strict=True):
                self.lanes = self.width
                both = self.apart(fold.value, self.pairs(fold.value), known)
                *found, after = self.ran_apart(fold, value, *both)
                for layer, here in zip(known, found, strict=True):
                    layer[id(fold)] = here
                results.append(after)
            self.lanes = wide
            for store in stores:
                self.store(store)
            self.lanes, self.even_and_odd = outside, None
            self.pop()
            return results

        whole = start + (end - start) / wide * wide
        return self.along(axis, whole, end, self.fn.loop(start, whole, wide, carried, turn), body, folds)

    def joined(self) -> tuple[tuple[Fold, Fold] | None, Callable[[Fold, Fold], None]]:
        """Two folds, one after the other, that go in one pass, and what emits it."""
        if self.masks and (found := self.online()) is not None:
            return found, self.pass_over
        return self.over_powers() if self.masks else None, self.pass_over_powers

    def vectors_at_once(self, folds: list[Fold], stores: list[Store]) -> int:
        """How many vectors a turn of a phase takes: two where they become one of bf16 that is stored."""
        if folds:
            return 1 if stores else self.factor([f.value for f in folds], self.schedule.vectors)
        pairs = "to_bf16" in self.module.own and self.width == avx512.LANES
        return 2 if pairs and all(s.buffer.dtype is torch.bfloat16 for s in stores) else 1

    def before_loops(self, roots: list[Term]) -> None:
        """Compute what is read from memory and the same in all turns of the loops over the reduced axes.

        Loops that may have no turn leave such reads inside.
        """
        reduced = self.nest.reduced
        if self.sizes or any(a.size == 0 for a in reduced):
            return
        found = terms(roots)
        moving = varying(found, {a.variable for a in reduced})
        for term in [below for t in found if id(t) in moving for below in children(t)]:
            if isinstance(term, Apply) and id(term) not in moving and is_plain(term):
                self.value(term)

    def phase(self, folds: list[Fold], stores: list[Store]) -> None:
        """The loops over the reduced axes, once: folds some values, stores others."""
        wanted, forgets = folds, forgetful(self.nest)
        folds = [replace(f, kind="top") if f is forgets else f for f in wanted]
        across = self.vector is not None and self.vector.reduced
        wide = self.width if across else self.lanes
        start = [part for fold in folds for part in self.neutral(fold, wide)]
        asked = self.long_phase()
        self.before_loops([f.value for f in folds] + [s.value for s in stores])

        def body(carried: list[Value]) -> list[Value]:
            if self.now == asked:
                self.fetch_next()
            self.fetch_pieces(folds)
            results = self.advanced(folds, carried)
            self.even_and_odd = ({}, {}) if self.lanes > wide else None
            for store in stores:
                self.store(store)
            self.even_and_odd = None
            return results

        axes = [a for a in self.nest.reduced if a is not self.vector]
        running = any(f.running for f in folds)
        factor = self.vectors_at_once(folds, stores) if across and not running else 1
        rounds = not running and self.rounds(folds)

        def apart(totals: list[Value], part: Callable[[list[Value]], list[Value]]) -> list[Value]:
            """A part of the loops folded by itself, then into the totals: errors of long sums stay small."""
            return combined(folds, totals, part(start))

        def blocks(axis: Axis, length: int, carried: list[Value], loop: Loop) -> list[Value]:
            """A long loop as a loop over blocks."""
            if not rounds or not may_pass([axis], length):
                return loop(axis.low, axis.size, carried)
            end = self.index(axis.size)

            def turn(low: Value, totals: list[Value]) -> list[Value]:
                high = low + length
                return apart(totals, lambda fresh: loop(low, (high < end).where(high, end), fresh))

            return self.fn.loop(self.index(axis.low), end, length, carried, turn)

        def nest(depth: int, carried: list[Value]) -> list[Value]:
            if depth < len(axes):
                axis = axes[depth]
                deep = [a for a in self.nest.reduced if a not in axes[: depth + 1]]
                long = rounds and may_pass(deep, BLOCK - 1)

                def turn(i: Value, values: list[Value]) -> list[Value]:
                    self.push()
                    self.variables[axis.variable] = i
                    deeper = partial(nest, depth + 1)
                    results = apart(values, deeper) if long else deeper(values)
                    self.pop()
                    return results

                return blocks(
                    axis, anew(axis), carried,
                    lambda low, high, held: self.fn.loop(self.index(low), self.index(high), 1, held, turn),
                )  # fmt: skip
            if across:
                vector = self.vector
                assert vector is not None
                along = self.way_along(folds, stores)
                return blocks(
                    vector, BLOCK * self.width, carried,
                    lambda low, high, values: along(vector, low, high, values, body, folds, factor),
                )  # fmt: skip
            self.push()
            results = body(carried)
            self.pop()
            return results

        totals = nest(0, start)
        if across:
            totals = across_lanes(totals, partial(combined, folds))
        for fold in wanted:
            *_, result = [totals.pop(0) for _ in fold.parts]
            if not fold.running:
                self.layers[-1][id(fold)] = result
