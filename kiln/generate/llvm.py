"""LLVM's language as text: types, values with operators, functions and blocks. Knows no machine."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import TypeAlias

from kiln.base.dataclass import dataclass

_SCALARS = {"f64": "double", "f32": "float", "f16": "half", "bf16": "bfloat", "ptr": "ptr", "void": "void"}
_SCALARS["b16"] = "i16"  # bf16, where the machine has no instructions for it
_SCALARS |= {f"i{bits}": f"i{bits}" for bits in (1, 8, 16, 32, 64, 128)}


FLOATS = frozenset(("f64", "f32", "f16", "bf16", "b16"))


@dataclass(frozen=True, slots=True)
class Type:
    """A scalar type, or a vector of `width`; `signed` tells how integers compare, widen and divide."""

    kind: str
    width: int = 1
    signed: bool = True
    is_float: bool = field(init=False, compare=False)
    bits: int = field(init=False, compare=False)
    text: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        scalar = _SCALARS[self.kind]
        set_once = partial(object.__setattr__, self)  # they are asked for with each instruction
        set_once("is_float", self.kind in FLOATS)
        set_once("bits", int(self.kind.lstrip("bfi")) if self.kind[-1].isdigit() else 64)
        set_once("text", scalar if self.width == 1 else f"<{self.width} x {scalar}>")

    def wide(self, width: int) -> Type:
        """The vector of `width` such scalars; the scalar for 1."""
        if width == self.width:
            return self
        key = self.kind, width, self.signed
        made = _WIDE.get(key)
        if made is None:
            made = _WIDE[key] = Type(*key)
        return made

    @property
    def scalar(self) -> Type:
        return self.wide(1)

    @property
    def suffix(self) -> str:
        """The type as it stands in the name of an intrinsic."""
        kind = "i16" if self.kind == "b16" else self.kind
        return kind if self.width == 1 else f"v{self.width}{kind}"

    def __str__(self) -> str:
        return self.text


_WIDE: dict[tuple[str, int, bool], Type] = {}  # asked for with each instruction

F64, F32, F16, BF16, B16 = Type("f64"), Type("f32"), Type("f16"), Type("bf16"), Type("b16")
I1, I8, I16, I32, I64 = (Type(f"i{bits}") for bits in (1, 8, 16, 32, 64))
U8, U16, U32, U64 = (Type(kind, signed=False) for kind in ("i8", "i16", "i32", "i64"))
PTR, VOID = Type("ptr"), Type("void")

Number: TypeAlias = "int | float | bool"


CONSTANT = re.compile(r"(?:splat \(\w+ )?0x([0-9A-F]{16})\)?").fullmatch


def literal(value: Number, type: Type) -> str:
    """A constant of this type, in all lanes."""
    text = _scalar_literal(value, type.scalar)
    return text if type.width == 1 else f"splat ({type.scalar} {text})"


def _scalar_literal(value: Number, type: Type) -> str:
    if type.kind == "i1":
        return "true" if value else "false"
    if type.kind == "ptr":
        return "null"
    if not type.is_float:
        return str(int(value))
    number = float(value)
    if type.kind == "f32":
        number = rounded(number)
    elif type.kind == "f16":
        return f"0xH{struct.unpack('<H', struct.pack('<e', number))[0]:04X}"
    elif type.kind == "bf16":
        return f"0xR{_bf16_bits(number):04X}"
    elif type.kind == "b16":
        return str(_bf16_bits(number))
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


def rounded(number: float) -> float:
    """The f32 nearest to a number."""
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def _bf16_bits(number: float) -> int:
    bits = int(struct.unpack("<I", struct.pack("<f", rounded(number)))[0])
    if number != number:
        return 0x7FC0
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


Operator: TypeAlias = "Callable[[Value, Value | Number], Value]"


def _operator(float_op: str, signed: str, unsigned: str = "") -> Operator:
    """The instruction of an operator: for floats, for signed integers, and for others where that differs."""

    def emit(self: Value, other: Value | Number) -> Value:
        left, right = self._beside(other)
        op = float_op if left.type.is_float else signed if left.type.signed or not unsigned else unsigned
        if left.type.is_float and self.fn.module.contracts:
            op += " contract"
        return self.fn.emit(f"{op} {left.type} {left.text}, {right.text}", left.type)

    return emit


def _swapped(operator: Operator) -> Operator:
    """The same with a number on the left."""
    return lambda self, other: operator(self.like(other), self)


def _comparison(relation: str) -> Operator:
    return lambda self, other: self.compare(relation, other)


class Value:
    """An SSA value in a function under construction; Python's operators emit instructions."""

    __slots__ = ("fn", "text", "type")

    def __init__(self, fn: Function, text: str, type: Type) -> None:
        self.fn, self.text, self.type = fn, text, type

    def like(self, other: Value | Number) -> Value:
        """`other` as a value of this type: numbers become constants, scalars fill all lanes."""
        if not isinstance(other, Value):
            return Value(self.fn, literal(other, self.type), self.type)
        return other.splat(self.type.width) if other.type.width < self.type.width else other

    def number(self) -> float | None:
        """The float that this is in all lanes, where it is a constant."""
        found = CONSTANT(self.text)
        return float(struct.unpack(">d", bytes.fromhex(found[1]))[0]) if found else None

    def splat(self, width: int) -> Value:
        """This scalar in all lanes of a vector."""
        if width == 1:
            return self
        wide = self.type.wide(width)
        if not self.text.startswith("%"):
            return Value(self.fn, f"splat ({self.type} {self.text})", wide)
        first = self.fn.emit(f"insertelement {wide} poison, {self.type} {self.text}, i64 0", wide)
        return self.fn.emit(
            f"shufflevector {wide} {first.text}, {wide} poison, <{width} x i32> zeroinitializer", wide
        )

    def _beside(self, other: Value | Number) -> tuple[Value, Value]:
        """This value and another one, both of the wider one's width."""
        wider = isinstance(other, Value) and other.type.width > self.type.width
        left = other.like(self) if wider else self  # type: ignore[union-attr]
        return left, left.like(other)

    __add__ = _operator("fadd", "add")
    __sub__ = _operator("fsub", "sub")
    __mul__ = _operator("fmul", "mul")
    __truediv__ = _operator("fdiv", "sdiv", "udiv")
    __mod__ = _operator("frem", "srem", "urem")
    __and__ = _operator("and", "and")
    __or__ = _operator("or", "or")
    __xor__ = _operator("xor", "xor")
    __lshift__ = _operator("shl", "shl")
    __rshift__ = _operator("ashr", "ashr", "lshr")

    __radd__, __rsub__ = _swapped(__add__), _swapped(__sub__)
    __rmul__, __rtruediv__ = _swapped(__mul__), _swapped(__truediv__)

    def __neg__(self) -> Value:
        if self.type.is_float:
            return self.fn.emit(f"fneg {self.type} {self.text}", self.type)
        return self.like(0) - self

    def __invert__(self) -> Value:
        return self ^ self.like(1 if self.type.kind == "i1" else -1)

    def compare(self, relation: str, other: Value | Number) -> Value:
        """A mask: `relation` is eq, ne, lt, le, gt or ge; false where a number is not one, but for ne."""
        left, right = self._beside(other)
        if left.type.is_float:
            op = f"fcmp {'une' if relation == 'ne' else 'o' + relation}"
        elif relation in ("eq", "ne"):
            op = f"icmp {relation}"
        else:
            op = f"icmp {'s' if left.type.signed and left.type.kind != 'i1' else 'u'}{relation}"
        return self.fn.emit(f"{op} {left.type} {left.text}, {right.text}", I1.wide(left.type.width))

    __lt__ = _comparison("lt")
    __le__ = _comparison("le")
    __gt__ = _comparison("gt")
    __ge__ = _comparison("ge")

    def where(self, yes: Value | Number, no: Value | Number) -> Value:
        """`yes` in the lanes of this mask, `no` in the others."""
        model = yes if isinstance(yes, Value) else no
        assert isinstance(model, Value), "one of the choices is a value"
        if isinstance(yes, Value) and isinstance(no, Value) and no.type.width > yes.type.width:
            model = no
        if self.type.width > model.type.width:
            model = model.splat(self.type.width)
        a, b, mask = model.like(yes), model.like(no), self
        if mask.type.width < model.type.width:
            mask = mask.splat(model.type.width)
        return self.fn.emit(
            f"select {mask.type} {mask.text}, {model.type} {a.text}, {model.type} {b.text}", model.type
        )

    def intrinsic(self, name: str, *others: Value | Number, flags: str = "") -> Value:
        """`llvm.name` of values of this type."""
        given = [self, *map(self.like, others)]
        return self.fn.call(f"llvm.{name}.{self.type.suffix}", self.type, *given, flags=flags)

    def bits(self, type: Type) -> Value:
        """The same bits as numbers of another type, more or fewer where these have another size."""
        wide = type.wide(self.type.width * self.type.bits // type.bits)
        return self.fn.emit(f"bitcast {self.type} {self.text} to {wide}", wide)

    def to_mask(self) -> Value:
        """Where this integer is not zero."""
        return self.compare("ne", 0)

    def to(self, type: Type) -> Value:
        """This value converted: floats to integers towards zero, integers to booleans by being nonzero."""
        wide = self.fn.module.held(type).wide(self.type.width)
        here = self.type
        if here == wide:
            return self
        if here.kind == wide.kind:
            return Value(self.fn, self.text, wide)
        if wide.kind == "i1":
            return self.compare("ne", 0)
        if here.kind == "b16":
            return (Value(self.fn, self.text, U16.wide(here.width)).to(U32) << 16).bits(F32).to(wide)
        if wide.kind == "b16":
            word = (self.to(F32).rounded() >> 16).to(U16)
            return Value(self.fn, word.text, wide)
        if here.is_float and not wide.is_float:
            return self._truncated(wide)
        if here.kind == "i1" and wide.is_float:
            return self.where(Value(self.fn, literal(1, wide), wide), 0)
        if here.kind == "i1" and wide.bits == wide.width == 16 and not self.fn.module.saturates:
            return self.fn.emit(f"zext {here} {self._hidden().text} to {wide}", wide)
        return self.fn.emit(f"{_conversion(here, wide)} {here} {self.text} to {wide}", wide)

    def rounded(self) -> Value:
        """The bits of this f32 with the nearest number of bf16 in their upper half."""
        bits = self.bits(U32)
        return self.compare("ne", self).where(0x7FC00000, bits + ((bits >> 16) & 1) + 0x7FFF)

    def _hidden(self) -> Value:
        """This mask of 16 lanes, of which LLVM does not know what it was made by.

        Joined to a comparison of what was bf16, it would find no instruction on x86 for a result of 16 bits.
        """
        bits = self.fn.emit(f"bitcast {self.type} {self.text} to i16", I16)
        bits = self.fn.emit(f'call i16 asm "", "=r,0"(i16 {bits.text})', I16)
        return self.fn.emit(f"bitcast i16 {bits.text} to {self.type}", self.type)

    def _truncated(self, wide: Type) -> Value:
        """This float without its fraction: the smallest integer where it fits none, as processors give it.

        Through i32 for narrow types, whose bits then are the low ones.
        """
        whole = (I64 if wide.bits == 64 else I32).wide(wide.width)
        if self.fn.module.saturates:  # what is no number is given here: LLVM may know that it is none
            value = self.fn.emit(f"fptosi {self.type} {self.text} to {whole}", whole)
            none = -1 << whole.bits - 1 if 64 in (whole.bits, self.type.bits) else 0
            return self.compare("eq", self).where(value, none).to(wide)
        limit = 2.0 ** (whole.bits - 1)
        fits = self.compare("ge", -limit) & self.compare("lt", limit)
        inside = fits.where(self, 0.0)
        value = self.fn.emit(f"fptosi {inside.type} {inside.text} to {whole}", whole)
        return fits.where(value, -1 << whole.bits - 1).to(wide)


def _conversion(here: Type, there: Type) -> str:
    if here.is_float and there.is_float:
        return "fpext" if there.bits > here.bits else "fptrunc"
    signed = here.signed and here.kind != "i1"
    if there.is_float:
        return "sitofp" if signed else "uitofp"
    if there.bits < here.bits:
        return "trunc"
    return "sext" if signed else "zext"


def fma(a: Value, b: Value | Number, c: Value | Number) -> Value:
    """a * b + c with one rounding."""
    return a.intrinsic("fma", b, c)


#: Instructions whose results depend on their operands alone; and calls of LLVM's for which that is not so.
PURE = frozenset((
    "add sub mul and or xor shl ashr lshr sdiv udiv srem urem fadd fsub fmul fdiv fneg icmp fcmp select "
    "bitcast trunc zext sext fptrunc fpext sitofp uitofp fptosi getelementptr extractelement insertelement "
    "shufflevector"
).split())  # fmt: skip
OPERANDS = re.compile(r"%[\w.]+").findall
PLAIN = re.compile(r"(  %\S+ = (\w+) .*)?").fullmatch
DIVISIONS = "sdiv", "udiv", "srem", "urem"
DIVISION = re.compile(r"[su](div|rem) (?!.*, [1-9]\d*$)").match  # it may fail, and stays where it is
#: The attribute of a function that needs more of LLVM's passes than others.
THOROUGH = '"thorough"'
#: The attribute of a function that takes so little time that none of them pays.
BRIEF = '"brief"'
FEW_TURNS = 8  # of a loop that is unrolled
IMPURE_CALLS = ("llvm.masked", "llvm.nvvm", "llvm.x86.sse", "llvm.assume", "llvm.prefetch")


def has_no_effect(lines: str) -> bool:
    """Whether instructions do nothing but compute values."""
    found = map(PLAIN, lines.split("\n"))
    return all(one is not None and (one[2] is None or one[2] in PURE) for one in found)


class Function:
    """The text of one function: emits instructions into the current block.

    What was computed before, in this block or in one that always comes before it, is not computed again;
    where its module `hoists`, what is the same in all turns of a loop is computed before it.
    """

    def __init__(
        self, module: Module, name: str, parameters: Sequence[tuple[str, Type]], result: Type
    ) -> None:
        self.module, self.name, self.result = module, name, result
        self.parameters = {n: Value(self, f"%{n}", t) for n, t in parameters}
        self.lines: list[str] = []
        self._first: list[str] = []
        self.block = "entry"
        self._known: list[dict[str, str]] = [{}]
        self._depth = {f"%{n}": 0 for n, _ in parameters}  # the loops around the place where a value is made
        self._before: list[list[str]] = []  # what is computed before each loop around the current place
        self._certain: list[str] = []  # and the block that each begins with, where it has a turn
        self._kept: set[str] = set()  # addresses of what stays as it is
        self.unwritten: set[str] = set()  # pointers to memory that is not written
        self.short_loops = False  # whether an innermost loop has so few turns that it is better unrolled
        self._count = self._loops = 0
        self.attributes = ""
        self.convention = ""  # how it is called, where not as C does
        self._parameter_text = ", ".join(
            f"{t} {'noalias ' if t.kind == 'ptr' else ''}%{n}" for n, t in parameters
        )

    def takes(self, text: str) -> None:
        """Say in LLVM's words what the function takes in place of its parameters."""
        self._parameter_text = text

    def emit(self, instruction: str, type: Type) -> Value:
        """The result of an instruction."""
        pure = instruction[: instruction.find(" ")] in PURE
        return Value(self, self._computed(instruction) if pure else self._new(instruction), type)

    def _new(self, instruction: str, depth: int | None = None) -> str:
        """The name of the result of an instruction, here or before the loop at a depth."""
        self._count += 1
        name = f"%v.{self._count}"
        lines = self.lines if depth is None else self._before[depth]
        lines.append(f"  {name} = {instruction}")
        self._depth[name] = len(self._before) if depth is None else depth
        return name

    def _computed(self, instruction: str, least: int = 0) -> str:
        """The name of the result of an instruction that depends on its operands alone, in `least` loops."""
        for known in self._known:
            if instruction in known:
                return known[instruction]
        depth = here = len(self._before)
        if here and self.module.hoists and not (instruction.startswith(DIVISIONS) and DIVISION(instruction)):
            depth = max([self._depth.get(name, here) for name in OPERANDS(instruction)], default=0)
        depth = max(depth, least)
        name = self._known[depth][instruction] = self._new(instruction, depth if depth < here else None)
        return name

    def at_entry(self, instruction: str) -> Value:
        """The address that an instruction at the start of the function gives."""
        self._count += 1
        name = f"%a.{self._count}"
        self._depth[name] = 0
        self._first.append(f"  {name} = {instruction}")
        return Value(self, name, PTR)

    def do(self, instruction: str) -> None:
        """An instruction without a result."""
        self.lines.append(f"  {instruction}")

    def constant(self, value: Number, type: Type) -> Value:
        return Value(self, literal(value, type), type)

    def call(self, name: str, result: Type, *arguments: Value, flags: str = "") -> Value:
        """A call of an intrinsic or of a function of another library, declared on first use."""
        self.module.declare(name, result, [a.type for a in arguments])
        given = ", ".join(f"{a.type} {a.text}" for a in arguments)
        if result.kind == "void":
            self.do(f"call void @{name}({given})")
            return Value(self, "", VOID)
        call = f"call {flags}{result} @{name}({given})"
        if name.startswith("llvm.") and not name.startswith(IMPURE_CALLS):
            return Value(self, self._computed(call), result)
        return self.emit(call, result)

    def at(self, base: Value, index: Value | int, type: Type) -> Value:
        """The address of element `index` of an array of scalars of this type."""
        place = index.text if isinstance(index, Value) else str(index)
        stored = I8 if type.kind == "i1" else type.scalar
        made = self.emit(f"getelementptr {stored}, ptr {base.text}, i64 {place}", PTR)
        if base.text in self.unwritten:
            self._kept.add(made.text)
        return made

    def load(self, address: Value, type: Type, flags: str = "") -> Value:
        """A scalar or vector in memory; a boolean is stored as a byte."""
        if type.kind == "i1":
            return self.load(address, U8.wide(type.width)).to(I1)
        align = type.bits // 8
        load = f"load {type}, ptr {address.text}, align {align}{flags}"
        here = len(self._before)
        if self.module.hoists and address.text in self._kept:
            certain = here > 0 and self.block == self._certain[-1]
            return Value(self, self._computed(load, here - certain), type)
        return self.emit(load, type)

    def store(self, value: Value, address: Value, flags: str = "", align: int = 0) -> None:
        if value.type.kind == "i1":
            value = value.to(U8)
        align = align or value.type.bits // 8
        self.do(f"store {value.type} {value.text}, ptr {address.text}, align {align}{flags}")

    def label(self, hint: str) -> str:
        """A name for a block to come."""
        self._count += 1
        return f"{hint}{self._count}"

    def start(self, block: str) -> None:
        """Go on in a new block; the one before must have ended with a jump."""
        self._known[-1].clear()  # control may come here without it
        self.lines.append(f"{block}:")
        self.block = block

    def jump(self, block: str) -> None:
        self.do(f"br label %{block}")

    def branch(self, condition: Value, yes: str, no: str) -> None:
        self.do(f"br i1 {condition.text}, label %{yes}, label %{no}")

    def phi(self, type: Type) -> Phi:
        """A value that depends on the block that control came from; its sources are given by `arrive`."""
        self._count += 1
        phi = Phi(self, f"%p.{self._count}", type)
        self._depth[phi.text] = len(self._before)
        self.lines.append("")
        phi.line = len(self.lines) - 1
        return phi

    def rarely(
        self, condition: Value, values: Sequence[Value], others: Callable[[], Sequence[Value]]
    ) -> list[Value]:
        """Some values, or others, computed where a condition holds, in one lane at least."""
        if condition.type.width > 1:
            condition = self.call(f"llvm.vector.reduce.or.{condition.type.suffix}", I1, condition)
        rare, usual, before = self.label("rare"), self.label("usual"), self.block
        self.branch(condition, rare, usual)
        self.start(rare)
        found, after = others(), self.block
        self.jump(usual)
        self.start(usual)
        results = [self.phi(one.type) for one in values]
        for result, one, other in zip(results, values, found, strict=True):
            result.arrive(one, before)
            result.arrive(other, after)
        return list(results)

    def loop(
        self,
        low: Value | int,
        high: Value | int,
        step: int,
        carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:
        """`for i in range(low, high, step)` with values carried from turn to turn; their last values."""
        zero = self.constant(0, I64)
        low, high = zero.like(low), zero.like(high)
        counted = low.text.isdigit() and high.text.isdigit()
        turns = -((int(low.text) - int(high.text)) // step) if counted else 0
        if turns == 1:
            return list(body(low, list(carried)))
        head, inside, done = self.label("head"), self.label("body"), self.label("done")
        origin, place = self.block, len(self.lines)
        self.lines.append("")
        self.jump(head)
        self._known.append({})
        self._before.append([])
        self._certain.append(inside if turns > 0 else "")
        self.start(head)
        i = self.phi(I64)
        phis = [self.phi(v.type) for v in carried]
        i.arrive(low, origin)
        for phi, value in zip(phis, carried, strict=True):
            phi.arrive(value, origin)
        self.branch(i < high, inside, done)
        self.start(inside)
        first, loops = len(self.lines), self._loops
        results = body(i, list(phis))
        idle = not carried and all(map(has_no_effect, self.lines[first:]))
        following = i + step
        i.arrive(following, self.block)
        for phi, value in zip(phis, results, strict=True):
            phi.arrive(value, self.block)
        self.jump(head)
        self._known.pop()
        self._certain.pop()
        before = "\n".join(self._before.pop())
        if idle:
            self.lines[place:] = [before]
            self.block = origin
            return []
        self.lines[place] = before
        self.short_loops |= self._loops == loops and 0 < turns <= FEW_TURNS
        self._loops += 1
        self._depth.update((phi.text, len(self._before)) for phi in phis)
        self.lines.append(f"{done}:")
        self.block = done
        return list(phis)

    def text(self) -> str:
        body = "\n".join([*self._first, *self.lines])
        head = f"define {self.convention}{self.result} @{self.name}({self._parameter_text}) {self.attributes}"
        return f"{head} {{\nentry:\n{body}\n}}\n"


class Phi(Value):
    """A phi whose text is completed as its sources become known."""

    __slots__ = ("line", "sources")

    def __init__(self, fn: Function, text: str, type: Type) -> None:
        super().__init__(fn, text, type)
        self.line = 0
        self.sources: list[str] = []

    def arrive(self, value: Value, block: str) -> None:
        """Say which value this has when control comes from `block`."""
        self.sources.append(f"[ {value.text}, %{block} ]")
        self.fn.lines[self.line] = f"  {self.text} = phi {self.type} {', '.join(self.sources)}"


class Module:
    """Functions and declarations that are compiled together."""

    def __init__(self) -> None:
        self.functions: list[Function] = []
        self.memory: list[str] = []  # definitions of data
        self.hoists = False  # whether loops leave to what stands before them what is the same in all turns
        self.saturates = False  # whether the machine's conversions to integers end at the largest
        self.contracts = False  # whether products and sums may become one instruction
        self.in_words = False  # whether numbers of bf16 are held as words
        self.own: dict[str, Callable[..., Value]] = {}  # elementary functions that the machine does better
        self._declared: dict[str, str] = {}

    def function(self, name: str, parameters: Sequence[tuple[str, Type]], result: Type = VOID) -> Function:
        made = Function(self, name, parameters, result)
        self.functions.append(made)
        return made

    def held(self, type: Type) -> Type:
        """A type as this machine's instructions take it."""
        return B16.wide(type.width) if self.in_words and type.kind == "bf16" else type

    def declare(self, name: str, result: Type, parameters: Sequence[Type]) -> None:
        # LLVM takes the remainder of a whole number to be a number, though what it is divided by may be none.
        trusted = "" if name != "fmod" else " nobuiltin"
        given = ", ".join(map(str, parameters))
        self._declared.setdefault(name, f"declare {result} @{name}({given}){trusted}")

    def define(self, name: str, text: str) -> None:
        """A line of the module beside its functions, once."""
        self._declared.setdefault(name, text)

    def text(self) -> str:
        return "\n".join([*self.declarations().values(), self.definitions()])

    def declarations(self) -> dict[str, str]:
        """What the functions call and do not define, by name."""
        own = {f.name for f in self.functions}
        return {name: text for name, text in self._declared.items() if name not in own}

    def definitions(self) -> str:
        """The functions alone, with their data."""
        return "\n".join([*self.memory, *(f.text() for f in self.functions)])
