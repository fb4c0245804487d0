"""Folds of columns, row by row: memory is read in its order, what is folded waits in the nearest cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from kiln.base.dataclass import dataclass
from kiln.base.expressions import MAX, MIN, SUM, grows, hinted
from kiln.base.symbols import Expr
from kiln.fuse.moments import SHORT, is_call, is_plain, source
from kiln.fuse.nest import Apply, Axis, Fold, Load, Place, Term, children, is_affine, terms
from kiln.fuse.pairs import tree
from kiln.generate import avx512
from kiln.generate.cpu import host
from kiln.generate.functions import compute_type, exp_below, is_nan
from kiln.generate.lanes import combined, lanes, shuffled, varying
from kiln.generate.llvm import F32, F64, I16, U32, Type, Value, fma
from kiln.generate.scalar import FOLDS, IN_ORDER, TYPES
from kiln.generate.softmax import LOWEST, guarded, pair
from kiln.generate.streams import BEFORE, BEFORE_SHORT, Streams
from kiln.generate.words import Words

#: Rows that are worth it.
FEWEST = 32
#: Elements of columns that wait, of all folds together: a part of the nearest cache.
WAITING = 4096
#: Rows that are folded at once; what the caches do not hold is read fastest in more places, or in one, where
#: fewer rows of short numbers are enough.
TOGETHER, STREAMS, NEAR_STREAMS = 4, 8, 6
#: The same of sums in double of numbers of so few bits that some of them, and of their squares, are summed as
#: floats: those that are near to each other lose nothing, and of others the largest counts.
SHORT_TOGETHER = 16  # an even number
SMALL_SQUARES = 0x20000000  # the bits of 2^-63
#: Turns after which a sum of floats starts anew, at least.
ANEW = 16
#: The lanes of two registers, in turn; in turn by fours.
_IN_TURN, _BY_FOURS = (
    [k // (2 * n) * n + k % n + k // n % 2 * avx512.LANES for k in range(2 * avx512.LANES)] for n in (1, 4)
)
#: Where the first and the second register of the latter are in two rows of words, side by side.
_BESIDE = [[k // 8 * 8 + k % 8 // 2 + k % 2 * 32 + half for k in range(32)] for half in (0, 4)]


Memory: TypeAlias = "list[Value]"
"""Where the folds of a strip wait: an address for each part."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Columns that are folded together, over which rows, and where: the last of the levels starts anew.

    There are no more columns than there is room for.
    """

    rows: Axis
    left: Any
    right: Any
    room: int
    levels: list[Memory]
    rounds: bool
    """Whether errors of rounding are kept small: rows at once are folded by themselves."""
    same: dict[int, tuple[Term, Value]]
    """Values that rows have in common, and where they are kept."""


def anew(axis: Axis) -> int:
    """After how many turns of a loop a sum starts anew: about as many as there are such sums then."""
    turns = hinted(axis.size) - hinted(axis.low)
    return max(1 << (turns.bit_length() // 2), ANEW)


def may_pass(axes: Sequence[Axis], turns: int) -> bool:
    """Whether loops may have more turns than some in all: a length that varies may be any up to its bound."""
    count = math.prod([a.size - a.low for a in axes])
    return bool((count.scope.bounds(count)[1] if isinstance(count, Expr) else count) > turns)


def _whole(count: Any, together: int) -> bool:
    """Whether a number is one of rows that are folded at once, whatever its symbols are."""
    if not isinstance(count, Expr):
        return bool(count % together == 0)
    if count.op in (MIN, MAX):
        return all(_whole(part, together) for part in count.args)
    return count.op is SUM and all(factor % together == 0 for factor in count.poly.values())


class Columns(Words, Streams):
    """Emits nests whose folds run over rows while vectors run along columns."""

    blocked = False
    both: tuple[Fold, Fold] | None = None
    """The largest values of columns and the sums of powers below them, where these are what is folded."""

    along: Callable[..., list[Value]]
    rounds: Callable[[list[Fold]], bool]

    def by_rows(self) -> bool:
        """Whether columns are folded so: rows must be longer than what registers hold, and many."""
        axis, reduced = self.vector, self.nest.reduced
        if axis is None or axis.reduced or len(reduced) != 1:
            return False
        folds = self.nest.folds()
        if self.nest.ordered:
            return True
        self.both = self.pair_of_columns()
        if not folds or any(s.phase and not s.kept for s in self.nest.stores):
            return False
        if self.both is None and any(f.phase for f in folds):
            return False
        wide = self.schedule.columns * self.width
        return hinted(axis.size) > wide and hinted(reduced[0].size) - hinted(reduced[0].low) >= FEWEST

    def pair_of_columns(self) -> tuple[Fold, Fold] | None:
        found = pair(self.nest) if self.width == avx512.LANES else None
        alone = found is not None and len(self.nest.folds()) == 2 and guarded(found[1].value) is None
        return found if alone else None

    def fold_columns(self, low: Any, high: Any) -> None:
        """The columns from `low` to `high`, in strips for which there is room."""
        fn, kinds = self.fn, self.kinds()
        (rows,) = self.nest.reduced
        common = self.common(rows)
        room = max(WAITING // max(len(kinds) + len(common), 1) // self.width, 1) * self.width
        same = {
            id(t): (t, fn.at_entry(f"alloca [{room} x {compute_type(TYPES[t.dtype])}], align 64"))
            for t in common
        }
        rounds = self.rounds([fold for fold in self.nest.folds() if fold.dtype is not torch.float64])
        rounds = rounds and not any(fold.running or fold.phase for fold in self.nest.folds())
        count = 2 if rounds and may_pass([rows], 2 * ANEW * self.together()) else 1
        levels = [[fn.at_entry(f"alloca [{room} x {k}], align 64") for k in kinds] for _ in range(count)]
        if isinstance(low, int) and isinstance(high, int) and high - low <= room:
            self.fold_strip(Strip(rows, low, high, high - low, levels, rounds, same))
            return
        end = self.index(high)

        def strip(left: Value, _: list[Value]) -> list[Value]:
            right = left + room
            here = Strip(rows, left, (right < end).where(right, end), room, levels, rounds, same)
            self.fold_strip(here)
            return []

        fn.loop(self.index(low), end, room, [], strip)

    def common(self, rows: Axis) -> list[Term]:
        """What is computed of columns alone, whatever the row: the largest of such terms."""
        assert self.vector is not None
        found = [] if self.nest.ordered else terms(self.each_row())
        here, along = (varying(found, {a.variable}) for a in (rows, self.vector))
        used = {id(c): c for t in found if id(t) in here for c in children(t) if id(c) not in here}
        return [
            t for t in used.values()
            if isinstance(t, Apply) and id(t) in along and is_plain(t) and t.dtype is not torch.bool
        ]  # fmt: skip

    def each_row(self) -> list[Term]:
        return [f.value for f in self.nest.folds()] + [s.value for s in self.nest.stores if not s.kept]

    def kinds(self) -> list[Type]:
        """The types of what folds carry; with pairs goes what their powers are relative to."""
        found = [compute_type(TYPES[part.dtype]) for fold in self.nest.folds() for part in fold.parts]
        return found if self.both is None else [*found, F32]

    def fold_strip(self, strip: Strip) -> None:
        """All rows of some columns, then what follows from their folds."""
        low, end = self.index(strip.rows.low), self.index(strip.rows.size)
        self.each_column(strip, partial(self.keep_common, strip))
        self.each_column(strip, partial(self.begin_columns, strip, strip.levels[0]))
        if len(strip.levels) == 1:
            self.some_rows(strip, low, end)
        else:
            self.fn.loop(low, end, self.block_of(strip), [], partial(self.rows_apart, strip, end))
        self.each_column(strip, partial(self.end_columns, strip))

    def each_column(self, strip: Strip, body: Callable[[], None], factor: int = 1) -> None:
        """A loop over the columns of a strip, `factor` vectors a turn."""
        assert self.vector is not None

        def turn(_: list[Value]) -> list[Value]:
            body()
            return []

        self.along(self.vector, strip.left, strip.right, [], turn, factor=factor)

    def block_of(self, strip: Strip) -> int:
        """Rows after which sums start anew."""
        return max(anew(strip.rows), ANEW * self.together())

    def rows_apart(self, strip: Strip, end: Value, first: Value, _: list[Value]) -> list[Value]:
        """Some rows folded by themselves, then into the others."""
        total, part = strip.levels
        last = first + self.block_of(strip)
        self.each_column(strip, partial(self.begin_columns, strip, part))
        self.some_rows(strip, first, (last < end).where(last, end))

        def join() -> None:
            before, added = (self.read_waiting(strip, memory) for memory in (total, part))
            self.write_waiting(strip, total, combined(self.nest.folds(), before, added))

        self.each_column(strip, join)
        return []

    def keep_common(self, strip: Strip) -> None:
        for term, memory in strip.same.values():
            self.fn.store(self.value(term), self.at_column(strip, memory, term))

    def at_column(self, strip: Strip, memory: Value, term: Term) -> Value:
        assert self.vector is not None
        place = self.variables[self.vector.variable] - strip.left
        return self.fn.at(memory, place, compute_type(TYPES[term.dtype]))

    def some_rows(self, strip: Strip, first: Value, last: Value) -> None:
        """The rows of a block, some at once that lie apart: each of them goes on where memory does."""

        def rows(count: int, apart: Any, factor: int, i: Value, _: list[Value]) -> list[Value]:
            self.push()
            places = [i + apart * k if k else i for k in range(count)]
            self.each_column(strip, partial(self.fold_rows, strip, places), factor)
            self.pop()
            return []

        together, factor = self.together(), 2 if self.short_factors() else 1
        if together == 1:
            factor = self.factor(self.each_row(), self.schedule.vectors)
            self.fn.loop(first, last, 1, [], partial(rows, 1, 0, factor))
            return
        turns = (last - first) / together
        apart, step = (turns, 1) if self.lie_apart() else (1, together)
        self.fn.loop(first, first + turns * step, step, [], partial(rows, together, apart, factor))
        if not (_whole(strip.rows.low, together) and _whole(strip.rows.size, together)):
            self.fn.loop(first + turns * together, last, 1, [], partial(rows, 1, 0, 1))

    def together(self) -> int:
        """How many rows are folded at once: one where something is stored on the way."""
        if self.nest.ordered or any(not s.kept for s in self.nest.stores):
            return 1
        if self.past_caches():
            if not host().reads_in_steps or self.short_factors():
                return NEAR_STREAMS if host().takes_lines_near else STREAMS
            return 1 if self.both is None else TOGETHER
        return SHORT_TOGETHER if self.short_factors() else TOGETHER

    def lie_apart(self) -> bool:
        """Whether rows at once lie apart: not where the first of equal ones is sought."""
        found = self.past_caches() and self.together() > 1 and not host().reads_in_steps
        return found and not any(fold.place for fold in self.nest.folds())

    def fold_rows(self, strip: Strip, rows: list[Value]) -> None:
        """Some rows at the columns at hand; what is stored on the way is."""
        for key, (term, memory) in strip.same.items():
            kind = compute_type(TYPES[term.dtype]).wide(self.lanes)
            self.layers[-1][key] = self.fn.load(self.at_column(strip, memory, term), kind)
        held = self.read_waiting(strip, strip.levels[-1])
        if len(rows) > 1 and (short := self.short_factors()):
            held = self.with_short(strip, held, rows, short)
        elif len(rows) > 1 and strip.rounds and self.both is None:
            start = [part for fold in self.nest.folds() for part in self.neutral(fold, self.lanes)]
            held = combined(self.nest.folds(), held, self.with_each(strip, start, rows))
        else:
            held = self.with_each(strip, held, rows)
        self.write_waiting(strip, strip.levels[-1], held)

    def with_each(self, strip: Strip, held: list[Value], rows: list[Value]) -> list[Value]:
        """What folds carry after some rows."""
        met: list[Value] = []
        for _ in self.at_rows(strip, rows):
            if self.both is None:
                held = self.advanced(self.nest.folds(), held)
            else:
                met.append(held[0].like(self.value(self.both[0].value)))
            for store in self.nest.stores:
                if not store.kept:
                    self.store(store)
        return held if self.both is None else self.with_rows(held, met)

    def at_rows(self, strip: Strip, rows: list[Value]) -> Iterator[None]:
        """Some rows, one after the other, while later ones are asked for."""
        assert self.vector is not None
        length, apart = min(strip.room, hinted(self.vector.size)), self.lie_apart()
        before = BEFORE_SHORT if apart else BEFORE if F64 in self.kinds() else 0
        for row in rows:
            self.push()
            self.variables[strip.rows.variable] = row
            if not self.nest.ordered:
                self.fetch_piece(strip.rows, length, self.each_row(), before, 1 if apart else len(rows))
            yield
            self.pop()

    def short_factors(self) -> list[list[Term]]:
        """What is multiplied, for each fold, where all sum numbers of bf16, or their squares, in double."""
        found = []
        for fold in self.nest.folds():
            factors = fold.value.args if is_call(fold.value, "mul") else (fold.value,)
            if fold.kind != "sum" or fold.dtype is not torch.float64 or len(set(map(id, factors))) > 1:
                return []
            if not is_call(factors[0], "convert") or source(factors[0]).dtype is not SHORT:
                return []
            found.append([source(factor) for factor in factors])
        return found if any(len(factors) > 1 for factors in found) else []

    def with_short(
        self, strip: Strip, held: list[Value], rows: list[Value], short: list[list[Term]]
    ) -> list[Value]:  # fmt: skip
        """The same by sums of floats; again where squares are too large or small, which is rare."""
        pairs = self.lanes == 2 * self.width and all(self.pairs(factors[0]) for factors in short)
        if pairs and self.in_words and all(isinstance(factors[0], Load) for factors in short):
            sums, order = self.by_two_rows(strip, rows, short), _BY_FOURS
        else:
            sums, order = self.by_each_row(strip, rows, short, 2 if pairs else 1), _IN_TURN
        whole = [parts[0] if len(parts) == 1 else shuffled(parts[0], order, parts[1]) for parts in sums]
        usual = [self.sum_of(h, part.to(F64)) for h, part in zip(held, whole, strict=True)]
        outside = None
        for parts, factors in zip(sums, short, strict=True):
            for part in parts:  # other sums are asked as well, so that they are taken before the branch
                far = (part.bits(U32) - SMALL_SQUARES) >= 0x7F800000 - SMALL_SQUARES
                far = far if len(factors) > 1 else is_nan(part)
                outside = far if outside is None else outside | far
        assert outside is not None

        def again() -> list[Value]:
            def row(k: Value, held: list[Value]) -> list[Value]:
                return self.with_each(strip, held, [rows[0] + k * (rows[1] - rows[0])])

            return self.fn.loop(0, len(rows), 1, held, row)

        return self.fn.rarely(outside, usual, again)

    def by_each_row(
        self, strip: Strip, rows: list[Value], short: list[list[Term]], halves: int
    ) -> list[list[Value]]:  # fmt: skip
        """Sums of floats; where there are two halves, even and odd columns go apart: words are read whole."""
        sums = [[self.fn.constant(0.0, F32.wide(self.lanes // halves))] * halves for _ in short]
        for _ in self.at_rows(strip, rows):
            known: Any = ({}, {})
            for parts, factors in zip(sums, short, strict=True):
                values = [self.value(factors[0])] if halves == 1 else self.halves_of(factors[0], known)
                for n, value in enumerate(values):
                    parts[n] = fma(value, value, parts[n]) if len(factors) > 1 else parts[n] + value
        return sums

    def by_two_rows(
        self, strip: Strip, rows: list[Value], short: list[list[Any]]
    ) -> list[list[Value]]:  # fmt: skip
        """The same of numbers as they are in memory, two rows at once, whose products are summed in pairs."""
        sums = [[self.fn.constant(0.0, F32.wide(self.width))] * 2 for _ in short]
        ones = self.fn.constant(0x3F80, I16.wide(self.lanes))
        above: list[Value] = []
        for _ in self.at_rows(strip, rows):
            known: Any = ({}, {})
            words = [self.words_at(factors[0], known) for factors in short]
            for parts, factors, before, word in zip(sums, short, above, words, strict=False):
                for n, places in enumerate(_BESIDE):
                    both = shuffled(before, places, word)
                    parts[n] = avx512.products_of_pairs(parts[n], both, both if len(factors) > 1 else ones)
            above = [] if above else words
        return sums

    def halves_of(self, term: Term, known: Any) -> list[Value]:
        """A value at the even and at the odd columns at hand."""
        self.lanes //= 2
        found = self.apart(term, self.pairs(term), known)
        self.lanes *= 2
        return found

    def with_rows(self, held: list[Value], values: list[Value]) -> list[Value]:
        """The largest values of columns, sums of powers and what these are relative to, with some rows.

        Where a value is -inf, or near to that, the sum is no number.
        """
        assert self.both is not None
        loose, top = id(self.both[1].value) in self.loose, FOLDS["top"][2]
        most, sums, near = held
        powers = [avx512.exp_reaching(value - near, loose) for value in values]
        largest = tree(values, top)
        usual = [top(most, largest), sums + tree(powers, FOLDS["sum"][2]), near]
        return self.fn.rarely(largest - near > avx512.FURTHEST, usual, lambda: self.anew(held, values))

    def anew(self, held: list[Value], values: list[Value]) -> list[Value]:
        """The same of any values, relative to the largest so far."""
        assert self.both is not None
        loose = id(self.both[1].value) in self.loose
        most, sums, near = held
        new = tree([most, *values], FOLDS["amax"][2])
        powers = [avx512.exp_summed(value - new, loose) for value in values]
        return [new, fma(sums, exp_below(near - new, loose), tree(powers, FOLDS["sum"][2])), new]

    def careful(self, strip: Strip, held: list[Value]) -> list[Value]:
        """The same of all rows, again where that was no number."""
        low, end = self.index(strip.rows.low), self.index(strip.rows.size)

        def row(i: Value, held: list[Value]) -> list[Value]:
            self.push()
            self.variables[strip.rows.variable] = i
            assert self.both is not None
            found = self.anew(held, [held[0].like(self.value(self.both[0].value))])
            self.pop()
            return found

        start = self.of_no_rows()
        return self.fn.rarely(is_nan(held[1]), held, lambda: self.fn.loop(low, end, 1, start, row))

    def advanced(self, folds: list[Fold], carried: list[Value]) -> list[Value]:
        """What folds carry after a turn; values of running ones are known in it."""
        results: list[Value] = []
        for fold in folds:
            held = carried[len(results) : len(results) + len(fold.parts)]
            if fold.kind == "sum" and (self.blocked or held[0].type.scalar in (F32, F64)):
                results.append(self.added(fold.value, held[0]))
                continue
            if is_affine(fold.value):
                factor, value = [held[0].like(self.value(part)) for part in fold.value.args]
                results.append(factor * held[0] + value)
                self.layers[-1][id(fold)] = results[-1]
                continue
            values = [c.like(self.value(part)) for c, part in zip(held, fold.parts, strict=True)]
            if fold.running:
                here, after = self.ran(fold, held[0], values[0])
                self.layers[-1][id(fold)] = here
                results.append(after)
            elif fold.place is not None and self.in_order(fold.place):
                results += IN_ORDER[fold.kind](*held, *values)
            else:
                results += combined([fold], held, values)
        return results

    def in_order(self, place: Term) -> bool:
        """Whether the places that a lane sees grow from turn to turn."""
        loops = [a for a in self.nest.reduced if a is not self.vector]
        if self.vector in self.nest.reduced:
            loops.append(self.vector)
        if not isinstance(place, Place) or not isinstance(place.index, Expr):
            return False
        steps = [grows(place.index, a.variable) or 0 for a in loops]
        return steps[-1:] > [0] and steps == sorted(set(steps))[::-1]

    def added(self, term: Term, held: Value) -> Value:
        """A sum after a turn; products and sums in one."""
        if isinstance(term, Apply) and term.op == "mul":
            a, b = (held.like(self.value(part)) for part in term.args)
            return fma(a, b, held)
        return self.sum_of(held, held.like(self.value(term)))

    def sum_of(self, held: Value, value: Value) -> Value:
        """A sum, of doubles by the units that multiply where others convert floats meanwhile."""
        add = self.module.own.get("add_64") if held.type.scalar == F64 else None
        return held + value if add is None or held.type.width % 8 else add(held, value)

    def ran(self, fold: Fold, held: Value, value: Value) -> tuple[Value, Value]:
        """A running fold in a turn, and what it carries on: in all lanes the same, where lanes run along."""
        combine, count = FOLDS[fold.kind][2], self.lanes
        if count == 1 or self.vector is None or not self.vector.reduced:
            after = combine(held, value)
            return after, after
        along = self.scanned(fold, value)  # what is carried on waits for one step alone
        return combine(held, along), combine(held, shuffled(along, [count - 1] * count))

    def ran_apart(self, fold: Fold, held: Value, even: Value, odd: Value) -> tuple[Value, Value, Value]:
        """The same of numbers at even and at odd places, of which half as many sums are taken in steps."""
        combine, count = FOLDS[fold.kind][2], even.type.width
        odds = combine(held, self.scanned(fold, combine(even, odd)))
        before = shuffled(odds, [count, *range(count - 1)], held)
        return combine(before, even), odds, shuffled(odds, [count - 1] * count)

    def scanned(self, fold: Fold, value: Value) -> Value:
        """A running fold along lanes: in each register by itself, then with those before it."""
        combine, total = FOLDS[fold.kind][2], value.type.width
        count = total
        while count > 2 and count * fold.dtype.itemsize > self.width * 4:
            count //= 2
        parts = [lanes(value, start, count) for start in range(0, total, count)]
        if fold.kind == "cumsum" and parts[0].type == F64.wide(8):
            combine = self.module.own.get("add_64", combine)
        (neutral,) = self.neutral(fold, count)
        step = 1
        while step < count:  # the second half of each block with the last of its first half
            last = [i - i % (2 * step) + step - 1 if i & step else count for i in range(count)]
            before = [shuffled(part, last, neutral) for part in parts]
            parts, step = [combine(*pair) for pair in zip(before, parts, strict=True)], 2 * step
        while len(parts) > 1:
            wide = [count - 1] * count
            for k in range(1, len(parts), 2):
                parts[k] = combine(shuffled(parts[k - 1], wide), parts[k])
            parts = [shuffled(a, range(2 * count), b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            count *= 2
        return parts[0]

    def begin_columns(self, strip: Strip, memory: Memory) -> None:
        self.write_waiting(strip, memory, self.of_no_rows())

    def of_no_rows(self) -> list[Value]:
        """What is folded of no rows."""
        found = [part for fold in self.nest.folds() for part in self.neutral(fold, self.lanes)]
        return found if self.both is None else [found[0].like(LOWEST), found[1], found[0].like(LOWEST)]

    def end_columns(self, strip: Strip) -> None:
        """What comes once for each column."""
        values = self.read_waiting(strip, strip.levels[0])
        if self.both is not None:  # of values that are not all -inf one counts 1
            most, sums, near = self.careful(strip, values)
            sums = sums * exp_below(near - most)
            nothing = sums < 0.5
            values = [nothing.where(-math.inf, most), nothing.where(math.nan, sums)]
        for fold in self.nest.folds():
            *_, result = [values.pop(0) for _ in fold.parts]
            if not fold.running:
                self.layers[-1][id(fold)] = result
        for store in self.nest.stores:
            if store.kept:
                self.store(store)

    def waiting(self, strip: Strip, memory: Memory) -> list[Value]:
        """The addresses of what is folded at the columns at hand."""
        assert self.vector is not None
        place = self.variables[self.vector.variable] - strip.left
        return [self.fn.at(base, place, kind) for base, kind in zip(memory, self.kinds(), strict=True)]

    def read_waiting(self, strip: Strip, memory: Memory) -> list[Value]:
        pairs = zip(self.waiting(strip, memory), self.kinds(), strict=True)
        return [self.fn.load(address, kind.wide(self.lanes)) for address, kind in pairs]

    def write_waiting(self, strip: Strip, memory: Memory, values: list[Value]) -> None:
        for address, value in zip(self.waiting(strip, memory), values, strict=True):
            self.fn.store(value, address)
