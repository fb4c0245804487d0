"""A loop nest as an LLVM function for the CPU: loops over tasks, vectors along an axis, folds in registers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kiln.base.expressions import FLOORDIV, MAX, MIN, MOD, SUM
from kiln.base.symbols import Expr, Symbol
from kiln.fuse.lower import DIVISIONS
from kiln.fuse.nest import (
    Apply,
    Axis,
    Buffer,
    Computed,
    Const,
    Fold,
    Load,
    Nest,
    Place,
    Store,
    Term,
    children,
    terms,
)
from kiln.generate.functions import compute_type
from kiln.generate.llvm import I1, I32, I64, PTR, Module, Type, Value
from kiln.generate.scalar import FOLDS, NOWHERE, PLACED, SCALARS, TYPES, convert

NAME = "kernel"  # of the function that is emitted
OUTSIDE, OUT_OF_BOUNDS, DIVIDED_BY_ZERO = 1, 2, 3  # what a kernel reports; the launcher raises
BLOCK = 512  # turns after which a sum of floats starts anew
CHUNK = 4096  # elements of one task, when a kernel has one axis only


class Emitter:
    """Writes one nest as `void (ptr …, i64 sizes …, ptr status, i64 begin, i64 end)` over its tasks."""

    def __init__(self, nest: Nest, width: int) -> None:
        self.nest, self.module = nest, Module()
        reads, writes = nest.buffers()
        self.buffers: list[Buffer] = list(dict.fromkeys([*reads, *writes]))
        self.sizes = symbols_of(nest)
        parameters = [(f"b{i}", PTR) for i in range(len(self.buffers))]
        parameters += [(f"s{i}", I64) for i in range(len(self.sizes))]
        parameters += [("status", PTR), ("begin", I64), ("end", I64)]
        self.fn = self.module.function(NAME, parameters)
        self.fn.attributes = "nounwind noinline"
        self.pointers = {b: self.fn.parameters[f"b{i}"] for i, b in enumerate(self.buffers)}
        self.variables: dict[Symbol, Value] = {
            s: self.fn.parameters[f"s{i}"] for i, s in enumerate(self.sizes)
        }
        self.vector = vector_axis(nest)
        size = self.vector.size if self.vector is not None else 1
        extent = int(getattr(size, "hint", size))
        self.width = 1
        while self.width < width and self.width * 2 <= extent:
            self.width *= 2
        self.lanes = 1  # of the code being emitted
        self.layers: list[dict[int, Value]] = [{}]
        self.indices: list[dict[Any, Value]] = [{}]
        self.now = 0  # the phase being emitted
        self.kept_rows: dict[int, tuple[int, Value]] = {}
        self.emit()

    # The frame: tasks and loops

    def emit(self) -> None:
        """Write the loop over the tasks."""
        fn = self.fn
        fn.loop(fn.parameters["begin"], fn.parameters["end"], 1, [], lambda task, _: self.task(task))
        fn.do("ret void")

    def outer(self) -> list[Axis]:
        """The axes whose turns are the tasks."""
        return [a for a in self.nest.kept if a is not self.vector]

    def tasks(self) -> Any:
        """The number of tasks, in terms of the sizes."""
        count: Any = 1
        for axis in self.outer():
            count = count * axis.size
        if not self.outer() and self.vector is not None and not self.vector.reduced:
            return (self.vector.size + (CHUNK - 1)) // CHUNK
        return count

    def task(self, task: Value) -> Sequence[Value]:
        self.push()
        rest = task
        for axis in reversed(self.outer()):
            size = self.index(axis.size)
            self.variables[axis.variable] = rest % size
            rest = rest / size
        vector = self.vector
        if vector is None or vector.reduced:
            self.row()
        elif self.outer():
            self.along(vector, 0, vector.size, [], lambda carried: self.row_of_lanes())
        else:
            low = task * CHUNK
            high = low + CHUNK
            size = self.index(vector.size)
            self.along(vector, low, (high < size).where(high, size), [], lambda carried: self.row_of_lanes())
        self.pop()
        return []

    def row_of_lanes(self) -> list[Value]:
        self.row()
        return []

    def along(self, axis: Axis, low: Any, high: Any, carried: list[Value], body: Any) -> list[Value]:
        """A loop along the vector axis, in vectors and then, for the rest, in scalars."""
        fn = self.fn
        start, end = self.index(low), self.index(high)
        exact = isinstance(high, int) and isinstance(low, int) and (high - low) % self.width == 0
        whole = end if exact else start + (end - start) / self.width * self.width

        def turn(i: Value, values: list[Value], lanes: int) -> list[Value]:
            self.push()
            self.variables[axis.variable], outside, self.lanes = i, self.lanes, lanes
            results = body(values)
            self.lanes = outside
            self.pop()
            return list(results)

        values = fn.loop(start, whole, self.width, carried, lambda i, v: turn(i, v, self.width))
        if exact or self.width == 1:
            return values
        if axis.reduced:  # the rest is folded into the first lane
            rest = [first_lane(v) for v in values]
            rest = fn.loop(whole, end, 1, rest, lambda i, v: turn(i, v, 1))
            return [with_first_lane(v, r) for v, r in zip(values, rest, strict=True)]
        return fn.loop(whole, end, 1, values, lambda i, v: turn(i, v, 1))

    def row(self) -> None:
        """One turn of the kept axes: the phases, one after the other."""
        stores, folds = self.nest.stores, self.nest.folds()
        if not self.nest.reduced:
            for store in stores:
                self.store(store)
            return
        last = max([s.phase for s in stores] + [f.phase for f in folds], default=0)
        self.keep_costly(last)
        for phase in range(last + 1):
            self.now = phase
            here = [f for f in folds if f.phase == phase]
            inside = [s for s in stores if s.phase == phase and not s.kept]
            for store in stores:
                if store.kept and store.phase == phase:
                    self.store(store)
            if here or inside:
                self.phase(here, inside)

    def keep_costly(self, last: int) -> None:
        """Find the costly values that several phases need, and memory on the stack for a row of each."""
        axis = self.vector
        if axis is None or not axis.reduced or len(self.nest.reduced) > 1 or not isinstance(axis.size, int):
            return
        if last == 0 or axis.size > LONGEST_KEPT or self.kept_rows:
            return
        phases: dict[int, set[int]] = {}
        costly: dict[int, Term] = {}
        for phase in range(last + 1):
            roots = [f.value for f in self.nest.folds() if f.phase == phase]
            roots += [s.value for s in self.nest.stores if s.phase == phase and not s.kept]
            for term in row_terms(roots):
                if isinstance(term, Apply) and term.op in COSTLY and self.varies(term):
                    phases.setdefault(id(term), set()).add(phase)
                    costly[id(term)] = term
        several = {key: min(found) for key, found in phases.items() if len(found) > 1}
        below = {id(t) for key in several for t in row_terms(list(children(costly[key])))}
        for key, first in several.items():
            if key not in below:
                kind = compute_type(TYPES[costly[key].dtype])
                memory = self.fn.at_entry(f"alloca [{axis.size} x {kind}], align 64")
                self.kept_rows[key] = (first, memory)

    def varies(self, term: Term) -> bool:
        """Whether a value depends on the vector axis."""
        assert self.vector is not None
        return any(
            isinstance(t.index, Expr) and self.vector.variable in t.index.symbols()
            for t in row_terms([term])
            if isinstance(t, (Load, Place))
        )

    def phase(self, folds: list[Fold], stores: list[Store]) -> None:
        """The loops over the reduced axes, once: folds some values, stores others."""
        across = self.vector is not None and self.vector.reduced
        wide = self.width if across else self.lanes
        start = [part for fold in folds for part in self.neutral(fold, wide)]

        def body(carried: list[Value]) -> list[Value]:
            values = [self.value(part) for fold in folds for part in fold.parts]
            results = combined(folds, carried, [c.like(v) for c, v in zip(carried, values, strict=True)])
            for store in stores:
                self.store(store)
            return results

        axes = [a for a in self.nest.reduced if a is not self.vector]
        rounds = any(f.dtype.is_floating_point and f.kind in ("sum", "prod") for f in folds)

        def apart(totals: list[Value], part: Callable[[list[Value]], list[Value]]) -> list[Value]:
            """A part of the loops folded by itself and then into the totals: errors of long sums stay small."""
            return combined(folds, totals, part(start))

        def blocks(axis: Axis, length: int, carried: list[Value], loop: Callable[..., list[Value]]) -> list[Value]:
            """A long loop as a loop over blocks."""
            if not rounds or hint(axis.size) <= length:
                return loop(axis.low, axis.size, carried)
            end = self.index(axis.size)

            def turn(low: Value, totals: list[Value]) -> list[Value]:
                high = low + length
                return apart(totals, lambda fresh: loop(low, (high < end).where(high, end), fresh))

            return self.fn.loop(self.index(axis.low), end, length, carried, turn)

        def nest(depth: int, carried: list[Value]) -> list[Value]:
            if depth < len(axes):
                axis = axes[depth]
                inner = math.prod([hint(a.size) for a in (*axes[depth + 1 :], *([self.vector] if across else []))])

                def turn(i: Value, values: list[Value]) -> list[Value]:
                    self.push()
                    self.variables[axis.variable] = i
                    deeper = partial(nest, depth + 1)
                    results = apart(values, deeper) if rounds and inner >= BLOCK else deeper(values)
                    self.pop()
                    return results

                return blocks(
                    axis, BLOCK, carried,
                    lambda low, high, values: self.fn.loop(self.index(low), self.index(high), 1, values, turn),
                )  # fmt: skip
            if across:
                vector = self.vector
                assert vector is not None
                return blocks(
                    vector, BLOCK * self.width, carried,
                    lambda low, high, values: self.along(vector, low, high, values, body),
                )  # fmt: skip
            self.push()
            results = body(carried)
            self.pop()
            return results

        totals = nest(0, start)
        if across:
            totals = across_lanes(totals, partial(combined, folds))
        for fold in folds:
            *_, result = [totals.pop(0) for _ in fold.parts]
            self.layers[-1][id(fold)] = result

    def neutral(self, fold: Fold, wide: int) -> list[Value]:
        """What a fold starts with."""
        kind = compute_type(TYPES[fold.value.dtype]).wide(wide)
        floating, integral, _ = FOLDS[fold.kind.replace("arg", "a")]
        start = self.fn.constant(floating if kind.is_float else integral(kind.scalar), kind)
        return [start] if fold.place is None else [start, self.fn.constant(NOWHERE, I64.wide(wide))]

    # Scopes: what was computed inside a loop is not known outside of it

    def push(self) -> None:
        self.layers.append({})
        self.indices.append({})

    def pop(self) -> None:
        self.layers.pop()
        self.indices.pop()

    def known(self, term: Term) -> Value | None:
        for layer in reversed(self.layers):
            if id(term) in layer:
                return layer[id(term)]
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
        self.fn.store(value, address)
        return value

    def pending(self, root: Term) -> list[Term]:
        """The terms below `root` that are not computed yet, children first."""
        ordered: list[Term] = []
        seen: set[int] = set()

        def visit(term: Term) -> None:
            if id(term) in seen or self.known(term) is not None:
                return
            seen.add(id(term))
            kept = self.kept_rows.get(id(term))
            for child in children(term) if kept is None or self.now == kept[0] else ():
                visit(child)
            ordered.append(term)

        visit(root)
        return ordered

    def compute(self, term: Term) -> Value:
        if isinstance(term, Const):
            kind = compute_type(TYPES[term.dtype])
            if isinstance(term.value, Expr):
                return self.index(term.value).to(kind)
            return self.fn.constant(term.value, kind)
        if isinstance(term, Place):
            self.bind(term.places)
            return self.lanes_of(term.index)
        if isinstance(term, Load):
            return self.load(term)
        if isinstance(term, Apply):
            given = [self.value(a) for a in term.args]
            if term.op in DIVISIONS and not given[1].type.is_float:
                given[1] = self.nonzero(given[1])
            if term.op == "convert":
                return convert(given[0], term.dtype)
            return SCALARS[term.op](*aligned(given, term.op))
        raise AssertionError(f"a fold is computed before it is read: {term.kind}")

    def load(self, term: Load) -> Value:
        address = self.pointers[term.buffer]
        stored = TYPES[term.dtype]
        self.bind(term.places)
        step = self.stride(term.index)
        mask = None if term.valid is None else self.value(term.valid)
        if step == 0 or self.lanes == 1:
            place = self.index(term.index)
            return self.loaded(address, place, stored, 1, mask)
        if step == 1:
            return self.loaded(address, self.index(term.index), stored, self.lanes, mask)
        return self.gathered(address, self.lanes_of(term.index), stored, mask)

    def loaded(self, base: Value, place: Value, stored: Type, lanes: int, mask: Value | None) -> Value:
        fn, held = self.fn, compute_type(stored)
        kind = stored.wide(lanes)
        if mask is None:
            return fn.load(fn.at(base, place, stored), kind).to(held)
        if lanes == 1 and mask.type.width == 1:  # a guarded read: of the first element where it must not be
            place = mask.where(place, 0)
            return fn.load(fn.at(base, place, stored), kind).to(held)
        if lanes == 1:
            return self.gathered(base, place.splat(mask.type.width), stored, mask)
        wide = mask if mask.type.width == lanes else mask.splat(lanes)
        memory = I8_OF[kind.kind].wide(lanes) if kind.kind == "i1" else kind
        zero = fn.constant(0, memory)
        address = fn.at(base, place, stored)
        align = fn.constant(max(memory.bits // 8, 1), I32)
        name = f"llvm.masked.load.{memory.suffix}.p0"
        value = fn.call(name, memory, address, align, wide, zero)
        return (value.to(I1) if kind.kind == "i1" else value).to(held)

    def gathered(self, base: Value, places: Value, stored: Type, mask: Value | None) -> Value:
        fn, held, lanes = self.fn, compute_type(stored), places.type.width
        memory = I8_OF["i1"] if stored.kind == "i1" else stored
        pointers = fn.emit(
            f"getelementptr {memory.scalar}, ptr {base.text}, {places.type} {places.text}", PTR.wide(lanes)
        )
        wide = (
            fn.constant(1, I1.wide(lanes))
            if mask is None
            else mask
            if mask.type.width > 1
            else mask.splat(lanes)
        )
        kind = memory.wide(lanes)
        align = fn.constant(max(memory.bits // 8, 1), I32)
        name = f"llvm.masked.gather.{kind.suffix}.v{lanes}p0"
        value = fn.call(name, kind, pointers, align, wide, fn.constant(0, kind))
        return (value.to(I1) if stored.kind == "i1" else value).to(held)

    def store(self, store: Store) -> None:
        fn = self.fn
        value = self.value(store.value)
        stored = TYPES[store.buffer.dtype]
        base = self.pointers[store.buffer]
        if self.lanes == 1:
            fn.store(value.to(stored), fn.at(base, self.index(store.index), stored))
            return
        value = value if value.type.width > 1 else value.splat(self.lanes)
        value = value.to(stored)
        if self.stride(store.index) == 1:
            fn.store(value, fn.at(base, self.index(store.index), stored))
            return
        memory = I8_OF["i1"] if stored.kind == "i1" else stored
        value = value.to(memory) if stored.kind == "i1" else value
        places = self.lanes_of(store.index)
        lanes = self.lanes
        places = places if places.type.width > 1 else places.splat(lanes)
        pointers = fn.emit(
            f"getelementptr {memory.scalar}, ptr {base.text}, {places.type} {places.text}", PTR.wide(lanes)
        )
        align = fn.constant(max(memory.bits // 8, 1), I32)
        name = f"llvm.masked.scatter.{value.type.suffix}.v{lanes}p0"
        from_llvm = fn.constant(1, I1.wide(lanes))
        fn.module.declare(name, VOID_TYPE, [value.type, pointers.type, I32, from_llvm.type])
        fn.do(
            f"call void @{name}({value.type} {value.text}, {pointers.type} {pointers.text}, "
            f"i32 {align.text}, {from_llvm.type} {from_llvm.text})"
        )

    # Indices

    def bind(self, places: Sequence[Computed]) -> None:
        """Let the symbols of computed indices stand for their values, checked."""
        for place in places:
            value = self.value(place.term).to(I64)
            size = value.like(self.index(place.size))
            wrapped = (value < 0).where(value + size, value) if place.wraps else value
            outside = (wrapped < 0) | (wrapped >= size)
            self.report(outside, OUTSIDE if place.wraps else OUT_OF_BOUNDS)
            self.variables[place.symbol] = outside.where(0, wrapped)

    def nonzero(self, divisor: Value) -> Value:
        """A divisor of integers, with 1 in place of 0, which is reported."""
        zero = divisor.compare("eq", 0)
        self.report(zero, DIVIDED_BY_ZERO)
        return zero.where(1, divisor)

    def report(self, wrong: Value, fault: int) -> None:
        """Say that something is at fault, where it is in one lane."""
        fn = self.fn
        if wrong.type.width > 1:
            wrong = fn.call(f"llvm.vector.reduce.or.v{wrong.type.width}i1", I1, wrong)
        bad, fine = fn.label("bad"), fn.label("fine")
        fn.branch(wrong, bad, fine)
        fn.start(bad)
        fn.store(fn.constant(fault, I64), fn.parameters["status"])
        fn.jump(fine)
        fn.start(fine)

    def stride(self, index: Any) -> int | None:
        """By how much an index grows from lane to lane; None when that is not one number."""
        if self.vector is None or not isinstance(index, Expr):
            return 0
        variable, step = self.vector.variable, 0
        if self.lanes > 1 and any(
            s in self.variables and self.variables[s].type.width > 1
            for s in index.symbols()
            if s is not variable
        ):
            return None
        for monomial, factor in index.poly.items():
            if monomial == (variable,):
                step = factor
            elif any(variable in atom.symbols() for atom in monomial):
                return None
        return step

    def lanes_of(self, index: Any) -> Value:
        """An index as a value: a vector where it differs from lane to lane."""
        if self.lanes == 1 or self.stride(index) == 0:
            return self.index(index)
        assert self.vector is not None
        variable = self.vector.variable
        scalar = self.variables[variable]
        self.push()
        self.variables[variable] = scalar.splat(self.lanes) + self.ramp()
        hidden, self.indices[:-1] = self.indices[:-1], [{} for _ in self.indices[:-1]]
        value = self.index(index)
        self.indices[:-1] = hidden
        self.variables[variable] = scalar
        self.pop()
        return value

    def ramp(self) -> Value:
        """0, 1, 2, … in the lanes."""
        wide = I64.wide(self.lanes)
        return Value(self.fn, f"<{', '.join(f'i64 {i}' for i in range(self.lanes))}>", wide)

    def index(self, index: Any) -> Value:
        """An index expression at the first lane."""
        if isinstance(index, Value):
            return index
        if not isinstance(index, Expr):
            return self.fn.constant(index, I64)
        if isinstance(index, Symbol):
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
        a, b = (self.index(x) for x in index.args)
        if index.op in (MIN, MAX):
            return ((a < b) if index.op is MIN else (a > b)).where(a, b)
        assert index.op in (FLOORDIV, MOD), f"an index with {index.op}"
        numerator, divisor = index.args
        if isinstance(divisor, int) and divisor & (divisor - 1) == 0:
            return a >> divisor.bit_length() - 1 if index.op is FLOORDIV else a & divisor - 1
        if index.scope.bounds(numerator)[0] >= 0:
            return a / b if index.op is FLOORDIV else a % b
        # LLVM rounds to zero, indices round down.
        rest = a % b
        below = rest < 0
        return below.where(a / b - 1, a / b) if index.op is FLOORDIV else below.where(rest + b, rest)


def hint(size: Any) -> int:
    """An extent as a number: what it was when traced."""
    return int(getattr(size, "hint", size))


#: Functions whose values are kept on the stack when a later phase needs them again.
COSTLY = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "log2", "tanh", "erf", "sigmoid", "sin", "cos", "pow"}
)
LONGEST_KEPT = 8192


def row_terms(roots: list[Term]) -> list[Term]:
    """The terms below the roots that are computed for each element, not below a fold."""
    seen: dict[int, Term] = {}

    def visit(term: Term) -> None:
        if id(term) in seen or isinstance(term, Fold):
            return
        seen[id(term)] = term
        for child in children(term):
            visit(child)

    for root in roots:
        visit(root)
    return list(seen.values())


I8_OF = {"i1": Type("i8", signed=False)}
VOID_TYPE = Type("void")


def aligned(values: list[Value], op: str) -> list[Value]:
    """Operands of one width."""
    width = max(v.type.width for v in values)
    return [v if v.type.width == width else v.splat(width) for v in values]


def first_lane(value: Value) -> Value:
    return value.fn.emit(f"extractelement {value.type} {value.text}, i64 0", value.type.scalar)


def with_first_lane(value: Value, first: Value) -> Value:
    return value.fn.emit(
        f"insertelement {value.type} {value.text}, {first.type} {first.text}, i64 0", value.type
    )


def combined(folds: list[Fold], left: list[Value], right: list[Value]) -> list[Value]:
    """Two turns of some folds as one."""
    results: list[Value] = []
    for fold in folds:
        parts = slice(len(results), len(results) + len(fold.parts))
        if fold.place is None:
            results += map(FOLDS[fold.kind][2], left[parts], right[parts])
        else:
            results += PLACED[fold.kind](*left[parts], *right[parts])
    return results


def across_lanes(values: list[Value], combine: Callable[..., list[Value]]) -> list[Value]:
    """The lanes of vectors folded into scalars, halves with halves."""
    while values and values[0].type.width > 1:
        half = values[0].type.width // 2
        values = combine(*[[lanes(value, start, half) for value in values] for start in (0, half)])
    return values


def lanes(value: Value, start: int, count: int) -> Value:
    """Some lanes of a vector."""
    fn = value.fn
    if count == 1:
        return fn.emit(f"extractelement {value.type} {value.text}, i64 {start}", value.type.scalar)
    chosen = ", ".join(f"i32 {i + start}" for i in range(count))
    return fn.emit(
        f"shufflevector {value.type} {value.text}, {value.type} poison, <{count} x i32> <{chosen}>",
        value.type.wide(count),
    )


GATHER_COST = 8  # of reading or writing lanes one by one, in reads of whole vectors


def vector_axis(nest: Nest) -> Axis | None:
    """The axis along which reading and writing in vectors costs least; the last one of equals.

    A loop whose variable is in the bounds of another one runs turn by turn.
    """
    bounds = [part for axis in nest.axes for part in (axis.low, axis.size) if isinstance(part, Expr)]
    able = [axis for axis in nest.axes if not any(axis.variable in part.symbols() for part in bounds)]
    if not able:
        return None
    accesses = [t.index for t in terms(s.value for s in nest.stores) if isinstance(t, Load)]
    accesses += [s.index for s in nest.stores]

    def cost(axis: Axis) -> int:
        return sum(access_cost(index, axis) for index in accesses if isinstance(index, Expr))

    return min(reversed(able), key=cost)


def access_cost(index: Expr, axis: Axis) -> int:
    """What an access costs in vectors along this axis: nothing where all lanes read one place."""
    if axis.variable not in index.symbols():
        return 0
    linear = index.poly.get((axis.variable,))
    return 1 if linear == 1 else GATHER_COST


def symbols_of(nest: Nest) -> list[Symbol]:
    """The sizes that the nest takes as arguments, in order."""
    loops = {axis.variable for axis in nest.axes}
    for term in terms(s.value for s in nest.stores):
        if isinstance(term, (Load, Place)):
            loops.update(place.symbol for place in term.places)
    found: dict[Symbol, None] = {}
    expressions = [part for axis in nest.axes for part in (axis.low, axis.size)]
    expressions += [s.index for s in nest.stores]
    for term in terms(s.value for s in nest.stores):
        if isinstance(term, (Load, Place)):
            expressions += [term.index, *(place.size for place in term.places)]
        elif isinstance(term, Const):
            expressions.append(term.value)
    for expression in expressions:
        if isinstance(expression, Expr):
            found.update(dict.fromkeys(sorted(expression.symbols() - loops, key=lambda s: s.order)))
    return list(found)
