"""Values of terms in the body of a nest: what is known where, elements in memory, indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from kiln.base.expressions import FLOORDIV, MAX, MIN, MOD, SUM, from_poly, grows
from kiln.base.symbols import Expr
from kiln.fuse.lower import CHECKED, DIVISIONS
from kiln.fuse.nest import (
    Apply,
    Computed,
    Const,
    Fold,
    Load,
    Nest,
    Place,
    Store,
    Term,
    children,
)
from kiln.generate.forms import another
from kiln.generate.functions import compute_type
from kiln.generate.lanes import COMPUTED, STRIDES, aligned, lanes_along, symbols_of, vector_axis
from kiln.generate.llvm import F64, I1, I16, I32, I64, PTR, Module, Type, Value
from kiln.generate.reads import I8_OF, Reads
from kiln.generate.registers import LANES, in_registers
from kiln.generate.scalar import FOLDS, SCALARS, TYPES, convert
from kiln.generate.schedule import USUAL, Schedule
from kiln.generate.softmax import bounded

NAME = "kernel"  # of the function that is emitted
OUTSIDE, OUT_OF_BOUNDS, DIVIDED_BY_ZERO, NOT_HELD = 1, 2, 3, 4  # what a kernel reports; the launcher raises
VOID_TYPE = Type("void")
STREAMED = "!nontemporal"


def told(index: Value, size: Value, dim: int) -> Value:
    """An index that is outside of a dimension, beside a fault; nothing where the numbers are too large.

    The launcher knows the order: 4 bits for the fault, 4 for the dimension, 30 for the index, the size.
    """
    fits = (size < 1 << 25) & (index < 1 << 29) & (index > -(1 << 29))
    packed = size * (1 << 38) + (index & (1 << 30) - 1) * (1 << 8) + (dim << 4)
    return fits.where(packed, 0)


def words(value: Value) -> Value:
    """A vector as one that LLVM can store past the caches: none of bf16, and it must not see that it is."""
    if value.type.kind != "bf16":
        return value

    def hidden(same: Value) -> Value:
        return value.fn.emit(f'call {same.type} asm "", "=v,0"({same.type} {same.text})', same.type)

    bits = value.bits(I32)
    return in_registers(hidden, bits) if bits.type.width > LANES else hidden(bits)


class Values(Reads):
    """A function under construction, over the buffers and sizes of a nest."""

    of_registers: Callable[[Term], Value]
    returns = True
    """Whether a task ends where it finds a place out of bounds: what others do is lost with the error."""
    even_and_odd: tuple[dict[int, Value], dict[int, Value]] | None = None
    """What is known of the even and of the odd places, where lanes are those of two registers of bf16."""

    def __init__(self, nest: Nest, width: int, schedule: Schedule = USUAL) -> None:
        self.nest, self.module, self.schedule = nest, Module(), schedule
        self.buffers = nest.used()
        self.sizes = symbols_of(nest)
        parameters = [(f"b{i}", PTR) for i in range(len(self.buffers))]
        parameters += [(f"s{i}", I64) for i in range(len(self.sizes))]
        parameters += [("status", PTR), ("begin", I64), ("end", I64)]
        self.fn = self.module.function(NAME, parameters)
        self.fn.attributes = "nounwind noinline"
        self.pointers = {b: self.fn.parameters[f"b{i}"] for i, b in enumerate(self.buffers)}
        self.variables: dict[Expr, Value] = {
            s: self.fn.parameters[f"s{i}"] for i, s in enumerate(self.sizes)
        }
        self.vector = vector_axis(nest, schedule.axis, width)
        self.width = 1 if self.vector is None else lanes_along(self.vector, width)
        self.lanes = 1  # of the code being emitted
        self.loose: frozenset[int] = frozenset()  # ids of terms that need few places
        self.decided: dict[int, bool] = {}  # conditions, by their ids, that are known where code is emitted
        self.streams: list[Store] = []  # stores that go past the caches
        self.live: Value | None = None  # the lanes that count, where not all do
        self.layers: list[dict[int, Value]] = [{}]
        self.indices: list[dict[Any, Value]] = [{}]
        self.now = 0  # the phase being emitted
        self.kept_rows: dict[int, tuple[int, Value]] = {}

    # Scopes: what was computed inside a loop is not known outside of it

    def push(self) -> None:
        self.layers.append({})
        self.indices.append({})

    def pop(self) -> None:
        self.layers.pop()
        self.indices.pop()

    def known(self, term: Term) -> Value | None:
        key = id(term)
        for layer in reversed(self.layers):
            if key in layer:
                return layer[key]
        return None

    # Values

    def value(self, root: Term) -> Value:
        """The value of a term here: a scalar where it is the same for all lanes."""
        found = self.known(root)
        if found is not None:
            return found
        for term in self.pending(root):
            self.layers[-1][id(term)] = self.kept_or_computed(term)
        return self.layers[-1][id(root)]

    def kept_or_computed(self, term: Term) -> Value:
        """A value computed, or read back where an earlier phase kept it."""
        kept = self.kept_rows.get(id(term))
        if kept is None:
            return self.compute(term)
        first, memory = kept
        assert self.vector is not None
        kind = compute_type(TYPES[term.dtype])
        address = self.fn.at(memory, self.variables[self.vector.variable], kind)
        if self.now > first:
            return self.fn.load(address, kind.wide(self.lanes))
        value = self.compute(term)
        self.fn.store(value if value.type.width == self.lanes else value.splat(self.lanes), address)
        return value

    def pending(self, root: Term) -> list[Term]:
        """The terms below `root` that are not computed yet, children first."""
        ordered: list[Term] = []
        self._visit(root, set(), ordered)
        return ordered

    def _visit(self, term: Term, seen: set[int], ordered: list[Term]) -> None:
        if id(term) in seen or self.known(term) is not None:
            return
        seen.add(id(term))
        kept = self.kept_rows.get(id(term))
        for child in self.needed(term) if kept is None or self.now == kept[0] else ():
            self._visit(child, seen, ordered)
        ordered.append(term)

    def needed(self, term: Term) -> tuple[Term, ...]:
        """The terms that a term is computed from, given what is decided."""
        if not self.decided:
            form = another(term, self.module.own, id(term) in self.loose)
            return children(term) if form is None else form[0]
        if id(term) in self.decided:
            return ()
        if isinstance(term, Apply) and term.op == "where" and id(term.args[0]) in self.decided:
            return (self.chosen(term),)
        if isinstance(term, Load) and term.valid is not None and id(term.valid) in self.decided:
            return tuple([place.term for place in term.places]) if self.decided[id(term.valid)] else ()
        return children(term)

    def chosen(self, choice: Apply) -> Term:
        """What a choice whose condition is decided gives."""
        return choice.args[1 if self.decided[id(choice.args[0])] else 2]

    def compute(self, term: Term) -> Value:
        if id(term) in self.decided:
            return self.fn.constant(self.decided[id(term)], I1)
        if isinstance(term, Const):
            kind = compute_type(TYPES[term.dtype])
            if isinstance(term.value, Expr):
                number = self.variables[term.value]
                return (number.bits(F64) if term.value.real else number).to(kind)  # the bits of a double
            return self.fn.constant(term.value, kind)
        if isinstance(term, Place):
            self.bind(term.places)
            return self.lanes_of(term.index) if term.dtype is torch.int64 else self.narrow(term.index)
        if isinstance(term, Load):
            return self.load(term)
        if isinstance(term, Apply):
            if term.op == "where" and id(term.args[0]) in self.decided:
                return self.value(self.chosen(term))
            loose = id(term) in self.loose
            if (form := another(term, self.module.own, loose)) is not None:
                return form[1](*aligned([self.value(part) for part in form[0]]))
            given = [self.value(a) for a in term.args]
            if term.op in DIVISIONS and not given[1].type.is_float:
                given[1] = self.nonzero(given[1])
            if term.op == CHECKED:
                self.report(~given[1], NOT_HELD)
                return given[0]
            if term.op == "convert":
                return convert(given[0], term.dtype)
            found = bounded(term, given, loose)
            if found is None and loose and (own := self.module.own.get(f"loose {term.op}")) is not None:
                found = own(*aligned(given))
            if found is None and term.op in ("eq", "ne"):
                found = self.at_lane(term, given)
            return SCALARS[term.op](*aligned(given)) if found is None else found
        raise AssertionError(f"a fold is computed before it is read: {term.kind}")

    def at_lane(self, term: Apply, given: list[Value]) -> Value | None:
        """Whether lanes are at a place, which is the same for all: their numbers need few bits."""
        place, (_, other) = term.args[0], given
        if not isinstance(place, Place) or place.places or self.lanes == 1 or self.stride(place.index) != 1:
            return None
        if other.type != I64:
            return None
        distance = other - self.index(place.index)
        near = ((distance >= 0) & (distance < self.lanes)).where(distance, self.lanes).to(I32)
        return self.ramp(self.lanes, I32).compare(term.op, near.splat(self.lanes))

    def from_memory(self) -> bool:
        """Whether rows of some length come from further than the caches."""
        return False

    def foresee(self, load: Load, lanes: int) -> None:
        """Ask for what is read some time later, where the processor does not foresee it."""

    def load(self, term: Load) -> Value:
        return self.load_as(self.module.held(TYPES[term.dtype]), term)

    def load_as(self, stored: Type, term: Load) -> Value:
        """What is loaded, for numbers of a type, which may be another one of as many bits."""
        fn, address = self.fn, self.pointers[term.buffer]
        valid = term.valid
        if valid is not None and id(valid) in self.decided:
            if not self.decided[id(valid)]:
                return fn.constant(0, compute_type(stored))
            valid = None
        self.bind(term.places)
        step = self.stride(term.index)
        mask = None if valid is None else self.value(valid)
        if step == 0 or self.lanes == 1:
            place = self.index(term.index)
            return self.loaded(address, place, stored, 1, mask)
        if self.live is not None:
            mask = self.live if mask is None else self.live & mask
        if step == 1:
            self.foresee(term, self.lanes)
            return self.loaded(address, self.index(term.index), stored, self.lanes, mask)
        if step in STRIDES and stored.bits >= 32:
            return self.strided(address, self.index(term.index), stored, step, mask)
        times = self.repeats(term.index)
        if times:
            return self.repeated(address, self.index(term.index), stored, times, mask)
        far = bool(term.places) and self.from_memory()
        same, rest = self.of_lanes(term.index)
        return self.gathered(fn.at(address, self.index(same), stored), self.lanes_of(rest), stored, mask, far)

    def store(self, store: Store) -> None:
        fn = self.fn
        stored, term = self.module.held(TYPES[store.buffer.dtype]), store.value
        rounds = self.module.own.get("to_bf16") if store.buffer.dtype is torch.bfloat16 else None
        bits = self.moved(term, {}) if rounds and not store.adds else None
        if bits is not None:
            stored, value = I16, bits
        elif rounds and self.lanes == 32 and self.even_and_odd is not None:
            value = self.of_registers(term)
        else:
            value = self.value(term)
        base = self.pointers[store.buffer]
        if self.lanes == 1:
            place = fn.at(base, self.index(store.index), stored)
            fn.store((fn.load(place, stored) + value if store.adds else value).to(stored), place)
            return
        value = value if value.type.width > 1 else value.splat(self.lanes)
        if store.adds:
            value = self.loaded(base, self.index(store.index), stored, self.lanes, self.live) + value
        value = value.to(stored)
        memory = I8_OF["i1"] if stored.kind == "i1" else stored
        align = fn.constant(max(memory.bits // 8, 1), I32)
        if self.stride(store.index) == 1:
            address = fn.at(base, self.index(store.index), stored)
            if self.live is None and store in self.streams:
                lies = min(stored.bits * self.lanes // 8, 64)
                fn.store(words(value), address, f", {STREAMED} !0", align=lies)
            elif self.live is None:
                fn.store(value, address)
            else:
                value = value.to(memory)
                name = f"llvm.masked.store.{value.type.suffix}.p0"
                fn.call(name, VOID_TYPE, value, address, align, self.live)
            return
        value = value.to(memory) if stored.kind == "i1" else value
        places = self.lanes_of(store.index)
        lanes = self.lanes
        places = places if places.type.width > 1 else places.splat(lanes)
        pointers = fn.emit(
            f"getelementptr {memory.scalar}, ptr {base.text}, {places.type} {places.text}", PTR.wide(lanes)
        )
        live = fn.constant(1, I1.wide(lanes)) if self.live is None else self.live
        name = f"llvm.masked.scatter.{value.type.suffix}.v{lanes}p0"
        fn.call(name, VOID_TYPE, value, pointers, align, live)

    def moved(self, term: Term, seen: dict[int, Value | None]) -> Value | None:
        """The bits of a number of bf16 that is only moved here; None for one that is computed.

        The instruction that rounds to bf16 takes subnormal numbers for zeros.
        """
        if id(term) not in seen:
            seen[id(term)] = self._moved(term, seen)
        return seen[id(term)]

    def _moved(self, term: Term, seen: dict[int, Value | None]) -> Value | None:
        if isinstance(term, Apply) and term.op == "where":
            if id(term.args[0]) in self.decided:
                return self.moved(self.chosen(term), seen)
            here, there = (self.moved(choice, seen) for choice in term.args[1:])
            if here is None or there is None:
                return None
            return SCALARS["where"](*aligned([self.value(term.args[0]), here, there]))
        if isinstance(term, Const) and not isinstance(term.value, Expr):
            number = torch.tensor(term.value, dtype=torch.bfloat16)
            return self.fn.constant(number.view(torch.int16).item(), I16)
        if not isinstance(term, Load) or id(term) in self.kept_rows or self.known(term) is not None:
            return None
        return self.load_as(I16, term)

    def neutral(self, fold: Fold, wide: int) -> list[Value]:
        """What a fold starts with."""
        kind = compute_type(TYPES[fold.value.dtype]).wide(wide)
        floating, integral, _ = FOLDS[fold.kind]
        start = self.fn.constant(floating if kind.is_float else integral(kind.scalar), kind)
        return [start] if fold.place is None else [start, self.fn.constant(0, TYPES[fold.dtype].wide(wide))]

    # Indices

    def bind(self, places: Sequence[Computed]) -> None:
        """Let the symbols of computed indices stand for their values, checked."""
        for place in places:
            value = self.value(place.term).to(I64)
            size = value.like(self.index(place.size))
            wrapped = (value < 0).where(value + size, value) if place.wraps else value
            outside = (wrapped < 0) | (wrapped >= size)
            fault = OUTSIDE if place.wraps else OUT_OF_BOUNDS
            details = None if place.dim < 0 else told(value, size, place.dim)
            self.report(outside, fault, details, ends=self.returns)
            self.variables[place.symbol] = wrapped if self.returns else outside.where(0, wrapped)

    def nonzero(self, divisor: Value) -> Value:
        """A divisor of integers, with 1 in place of 0, which is reported."""
        zero = divisor.compare("eq", 0)
        self.report(zero, DIVIDED_BY_ZERO)
        return zero.where(1, divisor)

    def report(
        self, wrong: Value, fault: int, details: Value | None = None, ends: bool = False
    ) -> None:  # fmt: skip
        """Say that something is at fault, in one lane at least, and what; with `ends`, that is all then."""
        fn, said = self.fn, self.fn.constant(fault, I64)
        lanes = wrong.type.width
        if lanes > 1:
            wrong = wrong if self.live is None else wrong & self.live
            if details is not None:
                details = wrong.where(details, 0)
                details = fn.call(f"llvm.vector.reduce.smax.v{lanes}i64", I64, details)
            wrong = fn.call(f"llvm.vector.reduce.or.v{lanes}i1", I1, wrong)
        said = said if details is None else said | details
        bad, fine = fn.label("bad"), fn.label("fine")
        fn.branch(wrong, bad, fine)
        fn.start(bad)
        fn.store(said, fn.parameters["status"])
        if ends:
            fn.do("ret void")
        else:
            fn.jump(fine)
        fn.start(fine)

    def stride(self, index: Any) -> int | None:
        """By how much an index grows from lane to lane; None when that is not one number."""
        if self.vector is None or not isinstance(index, Expr):
            return 0
        variable = self.vector.variable
        if self.lanes > 1 and any(
            s in self.variables and self.variables[s].type.width > 1
            for s in index.symbols()
            if s is not variable
        ):
            return None
        return grows(index, variable)

    def of_lanes(self, index: Any) -> tuple[Any, Any]:
        """The part of an index that is the same in all lanes, and the rest."""
        assert self.vector is not None
        wide = {s for s in index.symbols() if s in self.variables and self.variables[s].type.width > 1}
        wide.add(self.vector.variable)
        same = {m: n for m, n in index.poly.items() if all(wide.isdisjoint(atom.symbols()) for atom in m)}
        rest = {m: n for m, n in index.poly.items() if m not in same}
        return from_poly(index.scope, same), from_poly(index.scope, rest)

    def lanes_of(self, index: Any) -> Value:
        """An index as a value: a vector where it differs from lane to lane."""
        if self.lanes == 1 or self.stride(index) == 0:
            return self.index(index)
        assert self.vector is not None
        variable = self.vector.variable
        scalar = self.variables[variable]
        self.push()
        self.variables[variable] = scalar.splat(self.lanes) + self.ramp(self.lanes)
        hidden, self.indices[:-1] = self.indices[:-1], [{} for _ in self.indices[:-1]]
        value = self.index(index)
        self.indices[:-1] = hidden
        self.variables[variable] = scalar
        self.pop()
        return value

    def narrow(self, index: Any) -> Value:
        """The same in 32 bits."""
        step = self.stride(index)
        if self.lanes == 1 or not step:
            return self.lanes_of(index).to(I32)
        return self.index(index).to(I32).splat(self.lanes) + self.ramp(self.lanes, I32) * step

    def ramp(self, lanes: int, kind: Type = I64) -> Value:
        """0, 1, 2, … in the lanes."""
        return Value(self.fn, f"<{', '.join(f'{kind} {i}' for i in range(lanes))}>", kind.wide(lanes))

    def index(self, index: Any) -> Value:
        """An index expression at the first lane."""
        if isinstance(index, Value):
            return index
        if not isinstance(index, Expr):
            return self.fn.constant(index, I64)
        if index.op not in COMPUTED:
            return self.variables[index]
        for layer in reversed(self.indices):
            known: Value | None = layer.get(index)
            if known is not None:
                return known
        value = self.index_of(index)
        self.indices[-1][index] = value
        return value

    def index_of(self, index: Expr) -> Value:
        if index.op is SUM:
            total: Value | None = None
            for monomial, factor in index.poly.items():
                part: Value | None = None
                for atom in monomial:
                    value = self.index(atom)
                    part = value if part is None else part * value
                part = (
                    self.fn.constant(factor, I64) if part is None else part * factor if factor != 1 else part
                )
                total = part if total is None else total + part
            assert total is not None
            return total
        values = [self.index(x) for x in index.args]
        if index.op in (MIN, MAX):
            return reduce(lambda a, b: ((a < b) if index.op is MIN else (a > b)).where(a, b), values)
        a, b = values
        assert index.op in (FLOORDIV, MOD), f"an index with {index.op}"
        numerator, divisor = index.args
        if isinstance(divisor, int) and divisor & (divisor - 1) == 0:
            return a >> divisor.bit_length() - 1 if index.op is FLOORDIV else a & divisor - 1
        if index.scope.bounds(divisor)[0] < 1:  # a size of no elements, outside of a loop that makes no turn
            b = (b < 1).where(1, b)
        if index.scope.bounds(numerator)[0] >= 0:
            return a / b if index.op is FLOORDIV else a % b
        # LLVM rounds to zero, indices round down.
        rest = a % b
        below = rest < 0
        return below.where(a / b - 1, a / b) if index.op is FLOORDIV else below.where(rest + b, rest)
