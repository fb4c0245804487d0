"""Values and memory in a GPU kernel: accesses of 16 bytes, elements that a thread holds, faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kiln.base.symbols import Expr
from kiln.fuse.nest import Apply, Const, Load, Nest, Place, Store, Term
from kiln.fuse.split import sums_of_products
from kiln.generate.forms import logistic
from kiln.generate.functions import compute_type
from kiln.generate.grid import Grid, key_of, laid, read_again, whole
from kiln.generate.lanes import lanes as some_lanes
from kiln.generate.llvm import I1, I8, I32, I64, PTR, U8, VOID, Type, Value
from kiln.generate.ptx_functions import (
    AND_ONE,
    AND_ONE_OF_HALVES,
    OWN,
    OWN_OF_HALVES,
    exp_of_small,
)
from kiln.generate.scalar import TYPES
from kiln.generate.values import DIVIDED_BY_ZERO, NAME, NOT_HELD, OUT_OF_BOUNDS, OUTSIDE, Values

#: What a fault is called where a kernel ends with one.
FAULTS = {
    OUTSIDE: "index out of bounds", OUT_OF_BOUNDS: "index out of bounds", DIVIDED_BY_ZERO: "division by zero",
    NOT_HELD: "value out of range",
}  # fmt: skip


#: Words of 32 bits that are read at once, by the bytes that they take.
WORDS = {4: 1, 8: 2, 16: 4}


class DeviceValues(Values):
    """A kernel under construction, over the buffers and sizes of a nest."""

    here: Value
    """The place in its row that a thread is at, where there are loops over rows."""
    returns = False

    def __init__(self, nest: Nest, aligned: bool = True, clusters: bool = True) -> None:
        super().__init__(nest, 1)
        self.grid: Grid = laid(nest, clusters)
        self.aligned, self.new = aligned, clusters
        self.vector, self.width = self.grid.vector, self.grid.width
        halves = rounds_to_halves(nest)
        self.module.own = OWN_OF_HALVES if halves else OWN
        self.module.saturates = True
        # Long rows wait for instructions; where eager's bits are asked for, sums are not folded here.
        sums = any(fold.kind == "sum" and fold.dtype.is_floating_point for fold in nest.folds())
        self.module.contracts = halves and sums and bool(self.grid.shared)
        self.and_one: dict[str, Callable[[Value], Value]] = AND_ONE_OF_HALVES if halves else AND_ONE
        self.fn.convention = "ptx_kernel "
        members, beside = self.grid.members, self.grid.beside
        self.fn.attributes = f'nounwind "nvvm.minctasm"="{beside}"' if beside > 1 else "nounwind"
        if members > 1:
            self.fn.attributes += f' "nvvm.cluster_dim"="{members},1,1"'
        self.stored = {store.buffer for store in nest.stores}
        self.products = sums_of_products(nest)  # what folds add up, where that are several products a turn
        self.conditions: list[Value] = []  # under which what is stored is stored
        self.now = 0  # the phase being emitted
        self.again = read_again(nest, self.grid.part) if self.grid.shared and nest.part is None else {}
        self.held = bool(self.grid.turns) and not self.again  # whether threads hold what they read of a row
        self.fetched = False  # whether they are on their way before the first phase
        if self.grid.shared:
            self.module.memory.append(f"@{NAME}_row = external addrspace(3) global [0 x i8], align 16")

    def unsigned(self, value: Value) -> Value:
        """The same bits, never negative."""
        return Value(self.fn, value.text, replace(value.type, signed=False))

    @contextmanager
    def only_if(self, condition: Value | None) -> Iterator[None]:
        """Store nothing where this does not hold."""
        if condition is not None:
            self.conditions.append(condition)
        yield
        if condition is not None:
            self.conditions.pop()

    @contextmanager
    def branch(self, condition: Value) -> Iterator[None]:
        """What is emitted runs where this holds."""
        fn = self.fn
        inside, after = fn.label("then"), fn.label("after")
        fn.branch(condition, inside, after)
        fn.start(inside)
        self.push()
        yield
        self.pop()
        fn.jump(after)
        fn.start(after)

    # Values

    def compute(self, term: Term) -> Value:
        """A value; sums with 1, quotients by what is one for all elements, and some powers cost less."""
        if isinstance(term, Apply) and (found := self.of_all_lanes(term)) is not None:
            return found
        if isinstance(term, Apply) and term.op == "where" and self.is_read_so(term):
            return self.value(term.args[1])
        if not isinstance(term, Apply) or not self.in_f32(term):
            return super().compute(term)
        if (parts := logistic(term)) is not None:
            x, u = (self.value(part) for part in parts)
            return x * 0.5 * self.and_one["tanh"](u)
        if term.op == "add":
            for known, other in (term.args, term.args[::-1]):
                if (
                    isinstance(known, Apply)
                    and known.op in self.and_one
                    and is_one(other)
                    and self.in_f32(known)
                ):
                    return self.and_one[known.op](self.value(known.args[0]))
        if term.op == "exp" and is_below_largest(term.args[0]):
            return exp_of_small(self.value(term.args[0]))
        if term.op == "div":
            above, below = (self.value(a) for a in term.args)
            if below.type.width < above.type.width:
                return above * (1.0 / below)
        return super().compute(term)

    def of_all_lanes(self, term: Apply) -> Value | None:
        """The answer to whether a place is before a border between the elements of two threads."""
        if self.lanes == 1 or self.vector is None or term.op not in ("lt", "ge"):
            return None
        place, border = term.args
        if not isinstance(place, Place) or place.places or not isinstance(border, Const):
            return None
        if type(border.value) is not int or border.value % self.lanes or self.stride(place.index) != 1:
            return None
        if not whole(place.index, self.lanes, self.vector.variable):
            return None
        return self.index(place.index).compare(term.op, border.value)

    def is_read_so(self, choice: Apply) -> bool:
        """Whether a choice is between an element that is read under its condition, and 0."""
        condition, value, other = choice.args
        while isinstance(value, Apply) and value.op == "convert" and value.dtype.is_floating_point:
            (value,) = value.args
        if not isinstance(value, Load) or value.valid is not condition or not self.skips(value):
            return False
        if not isinstance(other, Const) or type(other.value) is not float or other.value != 0.0:
            return False
        return math.copysign(1, other.value) > 0 and self.value(condition).type.width == 1

    def in_f32(self, term: Apply) -> bool:
        return compute_type(TYPES[term.dtype]).kind == "f32" and len(term.args) <= 2

    # Memory

    def load(self, term: Load) -> Value:
        fn, base, stored = self.fn, self.pointers[term.buffer], TYPES[term.dtype]
        held = compute_type(stored)
        self.bind(term.places)
        mask = None if term.valid is None else self.value(term.valid)
        step = self.stride(term.index)
        one = self.lanes == 1 or step == 0
        if one and mask is not None:
            if mask.type.width > 1:  # one place for all lanes, which is there if one of them asks for it
                mask = fn.call(f"llvm.vector.reduce.or.v{mask.type.width}i1", I1, mask)
            return fn.load(fn.at(base, mask.where(self.index(term.index), 0), stored), stored).to(held)
        if mask is None and (one or step == 1):
            memory = (U8 if stored.kind == "i1" else stored).wide(1 if one else self.lanes)
            address = fn.at(base, self.index(term.index), stored)
            value = self.read(term, memory, address, 1 if one else self.granule(term.index))
            return (value.to(I1) if stored.kind == "i1" else value).to(held)
        if step == 1 and mask is not None and mask.type.width == 1 and stored.kind != "i1":
            memory, align = stored.wide(self.lanes), self.granule(term.index) * stored.bits // 8
            if self.skips(term):
                return self.read_if(mask, term, memory).to(held)
            address = fn.at(base, mask.where(self.index(term.index), 0), stored)
            return fn.emit(f"load {memory}, ptr {address.text}, align {align}", memory).to(held)
        if step == 1 and mask is not None and stored.kind != "i1":
            return self.at_once_if_all(term, mask).to(held)
        return self.each_lane(term, mask, step).to(held)

    def skips(self, term: Load) -> bool:
        """Whether elements that are read at once under one condition are 0 without it."""
        size = self.lanes * int(term.dtype.itemsize)
        if not self.nest.several and self.products is None or self.lanes == 1 or term.valid is None:
            return False
        whole = size in WORDS and self.granule(term.index) == self.lanes and self.stride(term.index) == 1
        return whole and term.buffer not in self.stored

    def read_if(self, condition: Value, term: Load, memory: Type) -> Value:
        """Elements of memory, which is whole words; zeros where the condition does not hold."""
        fn, many = self.fn, WORDS[memory.width * memory.bits // 8]
        index, far = term.index, 0
        if isinstance(index, Expr) and (far := index.poly.get((), 0)):
            index = index - far  # neighbours differ in a number: the instruction adds it
        address = fn.at(self.pointers[term.buffer], self.index(index), TYPES[term.dtype])
        words = [f"${i}" for i in range(many)]
        zeros = " ".join(f"mov.b32 {word}, 0;" for word in words)
        kind = f"v{many}.b32 {{{', '.join(words)}}}" if many > 1 else "b32 $0"
        text = f"{zeros} @${many + 1} ld.global.nc.{kind}, [${many}+{far * memory.bits // 8}];"
        made = "{" + ", ".join(["i32"] * many) + "}" if many > 1 else "i32"
        rules = ",".join([*["=&r"] * many, "l", "b"])
        given = f"ptr {address.text}, i1 {condition.text}"
        found = fn.emit(f'call {made} asm "{text}", "{rules}"({given})', I32)
        if many == 1:
            return fn.emit(f"bitcast i32 {found.text} to {memory}", memory)
        value = Value(fn, "poison", I32.wide(many))
        for i in range(many):
            word = fn.emit(f"extractvalue {made} {found.text}, {i}", I32)
            value = fn.emit(f"insertelement {value.type} {value.text}, i32 {word.text}, i64 {i}", value.type)
        return fn.emit(f"bitcast {value.type} {value.text} to {memory}", memory)

    def each_lane(self, term: Load, mask: Value | None, step: int | None) -> Value:
        """The elements of all lanes, each by itself; without the mask it is the first of the buffer."""
        fn, base, stored = self.fn, self.pointers[term.buffer], TYPES[term.dtype]
        result = Value(fn, "poison", stored.wide(self.lanes))
        for lane, place in enumerate(self.each_place(term.index, step)):
            if mask is not None:
                valid = mask if mask.type.width == 1 else some_lanes(mask, lane, 1)
                place = valid.where(place, 0)
            value = fn.load(fn.at(base, place, stored), stored)
            inserted = f"insertelement {result.type} {result.text}, {value.type} {value.text}, i64 {lane}"
            result = fn.emit(inserted, result.type)
        return result

    def at_once_if_all(self, term: Load, mask: Value) -> Value:
        """Neighbours in memory, read at once where the mask holds in all lanes."""
        fn, stored = self.fn, TYPES[term.dtype]
        memory, align = stored.wide(self.lanes), self.granule(term.index) * stored.bits // 8
        address = fn.at(self.pointers[term.buffer], self.index(term.index), stored)
        every = fn.call(f"llvm.vector.reduce.and.v{mask.type.width}i1", I1, mask)
        together, apart, after = (fn.label(name) for name in ("together", "apart", "after"))
        fn.branch(every, together, apart)
        fn.start(together)
        whole_value = fn.emit(f"load {memory}, ptr {address.text}, align {align}", memory)
        fn.jump(after)
        fn.start(apart)
        parts = self.each_lane(term, mask, 1)
        fn.jump(after)
        fn.start(after)
        found = fn.phi(memory)
        found.arrive(whole_value, together)
        found.arrive(parts, apart)
        return found

    def read(self, term: Load, memory: Type, address: Value, many: int) -> Value:
        """Elements of memory, which is aligned to `many` of them; a row that is read again is kept."""
        fn, again = self.fn, self.again.get(key_of(term))
        text = f"load {memory}, ptr {address.text}, align {many * memory.bits // 8}"
        if again is None:
            return fn.emit(text, memory)
        # Every thread finds what it put there itself: no others need to be waited for.
        kept = fn.at(self.row_memory(), self.here * (memory.bits // 8) + again.place, I8).text
        align = memory.width * memory.bits // 8
        if self.fetched or self.now > again.first:
            return fn.emit(f"load {memory}, ptr {kept}, align {align}", memory)
        value = fn.emit(text, memory)
        fn.do(f"store {memory} {value.text}, ptr {kept}, align {align}")
        return value

    def row_memory(self) -> Value:
        """The memory of the block for what it keeps of rows."""
        return Value(self.fn, f"addrspacecast (ptr addrspace(3) @{NAME}_row to ptr)", PTR)

    def each_place(self, index: Any, step: int | None) -> list[Value]:
        """An index in each lane."""
        if step is not None:
            first = self.index(index)
            return [first + lane * step if lane and step else first for lane in range(self.lanes)]
        places = self.lanes_of(index)
        if places.type.width == 1:
            return [places] * self.lanes
        return [some_lanes(places, lane, 1) for lane in range(self.lanes)]

    def granule(self, index: Any) -> int:
        """How many elements an index is always a multiple of, up to the lanes."""
        many = self.lanes if self.aligned else 1
        assert self.vector is not None
        while many > 1 and not whole(index, many, self.vector.variable):
            many //= 2
        return many

    def store(self, store: Store) -> None:
        value = self.value(store.value)
        index, step = store.index, self.stride(store.index)
        places = None
        if self.lanes > 1 and step != 1:
            places = self.each_place(index, step)
        else:
            self.index(index)
        if not self.conditions:
            self.written(store, value, places)
            return
        condition = self.conditions[0]
        for other in self.conditions[1:]:
            condition = condition & other
        with self.branch(condition):
            self.written(store, value, places)

    def written(self, store: Store, value: Value, places: list[Value] | None) -> None:
        fn, stored = self.fn, TYPES[store.buffer.dtype]
        base = self.pointers[store.buffer]
        value = value.to(stored)
        if self.lanes == 1:
            fn.store(value, fn.at(base, self.index(store.index), stored))
            return
        value = value if value.type.width > 1 else value.splat(self.lanes)
        if places is None:
            value = value.to(U8) if stored.kind == "i1" else value
            address = fn.at(base, self.index(store.index), stored)
            align = self.granule(store.index) * value.type.bits // 8
            fn.do(f"store {value.type} {value.text}, ptr {address.text}, align {align}")
            return
        for lane, place in enumerate(places):
            fn.store(some_lanes(value, lane, 1), fn.at(base, place, stored))

    # Faults

    def report(
        self, wrong: Value, fault: int, details: Value | None = None, ends: bool = False
    ) -> None:  # fmt: skip
        """What eager kernels do with an index outside of its range: end the program of the device."""
        fn = self.fn
        if wrong.type.width > 1:
            wrong = fn.call(f"llvm.vector.reduce.or.v{wrong.type.width}i1", I1, wrong)
        with self.branch(wrong):
            parts = [self.text(FAULTS[fault]), self.text("kiln"), fn.constant(0, I32), self.text("kernel")]
            fn.call("__assertfail", VOID, *parts, fn.constant(1, I64))

    def text(self, words: str) -> Value:
        """A text in the memory of the device."""
        name = f"@{NAME}_text{len(self.module.memory)}"
        self.module.memory.append(f'{name} = internal constant [{len(words) + 1} x i8] c"{words}\\00"')
        return Value(self.fn, name, PTR)

    def nonzero(self, divisor: Value) -> Value:
        """A divisor of integers, with 1 in place of 0: eager kernels report nothing here."""
        return divisor.compare("eq", 0).where(1, divisor)


def rounds_to_halves(nest: Nest) -> bool:
    """Whether all that a nest stores of floats is of half types."""
    stored = [store.buffer.dtype for store in nest.stores if store.buffer.dtype.is_floating_point]
    return bool(stored) and all(dtype.itemsize == 2 for dtype in stored)


def is_below_largest(term: Term) -> bool:
    """Whether a value is one less the largest of its row: its power matters where it is near 0."""
    return isinstance(term, Apply) and term.op == "sub" and getattr(term.args[1], "kind", "") == "amax"


def is_one(term: Term) -> bool:
    return isinstance(term, Const) and type(term.value) is float and term.value == 1.0
