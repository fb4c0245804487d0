"""Elements in memory as lanes: side by side, at equal distances, repeated, or here and there."""

from __future__ import annotations

from kiln.base.expressions import FLOORDIV
from kiln.base.symbols import Expr
from kiln.fuse.nest import Axis, Nest
from kiln.generate.cpu import host
from kiln.generate.functions import compute_type
from kiln.generate.lanes import lanes as some_lanes
from kiln.generate.lanes import shuffled, with_lane
from kiln.generate.llvm import I1, I32, PTR, U8, Function, Type, Value
from kiln.generate.pieces import borders

I8_OF = {"i1": U8}


class Reads:
    """Reads elements for the lanes of the code being emitted."""

    nest: Nest
    fn: Function
    vector: Axis | None
    width: int
    lanes: int
    variables: dict[Expr, Value]

    def repeats(self, index: Expr) -> int:
        """How many lanes, one after the other, read the same of elements side by side; 0 for other reads."""
        assert self.vector is not None
        variable, times = self.vector.variable, 0
        if any(s in self.variables and self.variables[s].type.width > 1 for s in index.symbols()):
            return 0
        for monomial, factor in index.poly.items():
            if not any(variable in atom.symbols() for atom in monomial):
                continue
            if len(monomial) != 1 or factor != 1 or times:
                return 0
            (atom,) = monomial
            if atom.op is not FLOORDIV or atom.args[0] is not variable or type(atom.args[1]) is not int:
                return 0
            times = atom.args[1]
        whole = times > 1 and self.lanes % times == 0 and self.vector.low == 0
        whole = whole and all(edge % times == 0 for edge in borders(self.nest, self.vector, self.width))
        return times if whole else 0

    def repeated(self, base: Value, place: Value, stored: Type, times: int, mask: Value | None) -> Value:
        """Few elements, each in several lanes: vectors start where such lanes do."""
        few = self.lanes // times
        if mask is not None:
            wide = mask if mask.type.width == self.lanes else mask.splat(self.lanes)
            if few == 1:
                return self.gathered(base, place.splat(self.lanes), stored, wide)
            mask = shuffled(wide, range(0, self.lanes, times))
            for turn in range(1, times):  # an element is read where one of its lanes wants it
                mask = mask | shuffled(wide, range(turn, self.lanes, times))
        value = self.loaded(base, place, stored, few, mask)
        if few == 1:
            return value
        return shuffled(value, [lane // times for lane in range(self.lanes)])

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
        if mask.type.width == 1:  # what is not read at all may lie where no memory is, which takes long
            place = mask.where(place, 0)
        wide = mask if mask.type.width == lanes else mask.splat(lanes)
        memory = I8_OF[kind.kind].wide(lanes) if kind.kind == "i1" else kind
        zero = fn.constant(0, memory)
        address = fn.at(base, place, stored)
        align = fn.constant(max(memory.bits // 8, 1), I32)
        name = f"llvm.masked.load.{memory.suffix}.p0"
        value = fn.call(name, memory, address, align, wide, zero)
        return (value.to(I1) if kind.kind == "i1" else value).to(held)

    def strided(self, base: Value, place: Value, stored: Type, step: int, mask: Value | None) -> Value:
        """Every second, third or fourth element, or all backwards: whole vectors are read and sorted out."""
        fn, lanes = self.fn, self.lanes
        first, span = (0, lanes * step) if step > 0 else (1 - lanes, lanes)
        chosen = [lane * step - first for lane in range(lanes)]
        memory = stored.wide(span)
        bits = ", ".join(f"i1 {str(i in chosen).lower()}" for i in range(span))
        wanted = Value(fn, f"<{bits}>", I1.wide(span))
        if mask is not None:
            mask = mask if mask.type.width == lanes else mask.splat(lanes)
            source = [i // step if step > 0 else lanes - 1 - i for i in range(span)]
            wanted = wanted & shuffled(mask, source)
        address = fn.at(base, place + first, stored)
        if mask is None and step < 0:
            value = fn.load(address, memory)
        else:
            align = fn.constant(stored.bits // 8, I32)
            name = f"llvm.masked.load.{memory.suffix}.p0"
            value = fn.call(name, memory, address, align, wanted, fn.constant(0, memory))
        return shuffled(value, chosen).to(compute_type(stored))

    def gathered(
        self, base: Value, places: Value, stored: Type, mask: Value | None, far: bool = False
    ) -> Value:
        """Elements here and there; `far` ones, which the caches may not have, at once."""
        fn, held, lanes = self.fn, compute_type(stored), places.type.width
        memory = I8_OF["i1"] if stored.kind == "i1" else stored
        never = host().waits_for_lanes
        one_by_one = never or host().reads_lanes_faster and not (far and stored.bits >= 32)
        if mask is None and stored.kind != "i1" and one_by_one:
            return self.one_by_one(base, places, stored).to(held)
        pointers = fn.emit(
            f"getelementptr {memory.scalar}, ptr {base.text}, {places.type} {places.text}", PTR.wide(lanes)
        )
        wide = fn.constant(1, I1.wide(lanes)) if mask is None else mask.splat(lanes // mask.type.width)
        if never and stored.kind != "i1":
            return self.where_wanted(pointers, stored, wide).to(held)
        kind = memory.wide(lanes)
        align = fn.constant(max(memory.bits // 8, 1), I32)
        name = f"llvm.masked.gather.{kind.suffix}.v{lanes}p0"
        value = fn.call(name, kind, pointers, align, wide, fn.constant(0, kind))
        return (value.to(I1) if stored.kind == "i1" else value).to(held)

    def where_wanted(self, pointers: Value, stored: Type, mask: Value) -> Value:
        """Elements at addresses, each by a read of its own; 0 where none is wanted."""
        fn, nowhere = self.fn, self.fn.at_entry(f"alloca {stored}")
        found = Value(fn, "poison", stored.wide(pointers.type.width))
        places = mask.where(pointers, nowhere)
        for lane in range(found.type.width):
            found = with_lane(found, lane, fn.load(some_lanes(places, lane, 1), stored))
        return mask.where(found, 0)

    def one_by_one(self, base: Value, places: Value, stored: Type) -> Value:
        """Elements at places that are all valid, each by a read of its own."""
        fn, kind = self.fn, stored.wide(places.type.width)
        found = Value(fn, "poison", kind)
        for lane in range(kind.width):
            found = with_lane(found, lane, fn.load(fn.at(base, some_lanes(places, lane, 1), stored), stored))
        return found
