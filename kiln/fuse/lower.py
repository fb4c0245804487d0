"""From primitives to terms: what an element of a node's result is, given its coordinates."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from kiln.base.graph import Node, TensorSpec, argument
from kiln.base.symbols import LIMIT, Expr, Scope, Symbol
from kiln.fuse.axes import Misfit, hinted
from kiln.fuse.nest import Apply, Buffer, Computed, Const, Fold, Load, Place, Term, children
from kiln.fuse.nest import terms as below
from kiln.fuse.views import Coords, broadcast, from_front, shape_of, supported
from kiln.ops.levels import BINARY, PIECES, TERNARY, UNARY, name_of

Read: TypeAlias = "Callable[[Node, Coords, Term | None], Term]"
"""Gives the element of a node at coordinates; where the boolean term does not hold nothing may be read."""

HALVES = frozenset({torch.float16, torch.bfloat16})

#: Operands that eager takes in the dtype of the tensor beside them where they are numbers, half types too.
#: GPUs add them and raise to them in float32, as all take what scales.
WIDE_ON_GPUS = frozenset({"add", "sub", "pow"})
NUMBERS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((*WIDE_ON_GPUS, "eq", "ne", "lt", "le", "gt", "ge", "fmod", "remainder"), (0, 1)),
    "div_floor": (0,),
}

#: Functions that jump: two values that are nearly the same give another result.
JUMPS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "round", "trunc", "frac", "sign",
                   "div_floor", "div_trunc", "fmod", "remainder"})  # fmt: skip

#: Functions that raise for integers when the second operand is 0.
DIVISIONS = frozenset({"div_floor", "div_trunc", "fmod", "remainder"})

#: A value that is reported where a condition beside it does not hold.
CHECKED = "checked"

#: Functions of integers that indices may be made of.
INDEXED: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div_floor": operator.floordiv,
}  # fmt: skip

Lowering: TypeAlias = "Callable[[Terms, Node, Coords, Term | None, Read], Term]"
LOWER: dict[str, Lowering] = {}
"""How the element of a pointwise node follows from elements of its inputs, by the name of the op."""
CONDITIONS: dict[str, Callable[[Node], bool]] = {}
"""Which nodes of an op are lowered, where not all are."""


NONE: frozenset[int] = frozenset()


class Terms:
    """Makes terms; equal ones are one object, so that what is computed once is computed once."""

    def __init__(self, scope: Scope, rounds: bool = False) -> None:
        self.scope = scope
        self.rounds = rounds  # whether each function of half types rounds its result
        self._known: dict[Any, Any] = {}
        self._computed: dict[Symbol, Computed] = {}
        self._phases: dict[int, int] = {}
        self._runs: dict[int, frozenset[int]] = {}  # the phases of running folds that terms read

    def copy(self) -> Terms:
        """What makes more of them, the same ones for equal."""
        made = Terms(self.scope, self.rounds)
        made._known, made._computed = dict(self._known), dict(self._computed)
        made._phases, made._runs = dict(self._phases), dict(self._runs)
        return made

    def make(self, kind: Callable[..., Any], *fields: Any) -> Any:
        key = (kind, *map(_key, fields))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = kind(*fields)
        return known

    def apply(self, op: str, dtype: torch.dtype, *args: Term) -> Term:
        if op in JUMPS or op == "sub" and dtype in HALVES or op == "convert" and args[0].dtype is not dtype:
            args = self.rounded(args)
        made: Term = self.make(Apply, op, args, dtype)
        if self.rounds and dtype in HALVES and op != "convert":
            return self.make(Apply, "convert", (made,), dtype)  # type: ignore[no-any-return]
        return made

    def rounded(self, args: tuple[Term, ...]) -> tuple[Term, ...]:
        """Values as they would lie in memory: what jumps between two of them is asked of those.

        So are differences, and what computes in a wider type: of halves less their mean little may be left.
        """
        if self.rounds or any(isinstance(a, Const) and a.value == 0 for a in args):
            return args
        return tuple(map(self._rounded, args))

    def _rounded(self, term: Term) -> Term:
        if isinstance(term, Apply) and term.op == "convert":
            inner = self._rounded(term.args[0])
            return term if inner is term.args[0] else self.make(Apply, "convert", (inner,), term.dtype)
        if term.dtype not in HALVES or not isinstance(term, (Apply, Fold)):
            return term
        return self.make(Apply, "convert", (term,), term.dtype)  # type: ignore[no-any-return]

    def stored(self, number: Term) -> Term:
        """A number of a half type as it would lie in memory; other terms as they are."""
        if not isinstance(number, Const) or number.dtype not in HALVES:
            return number
        if isinstance(number.value, float):
            return self.const(rounded(number.value, number.dtype), number.dtype)
        return self.make(Apply, "convert", (number,), number.dtype)  # type: ignore[no-any-return]

    def const(self, value: Any, dtype: torch.dtype) -> Term:
        if dtype.is_floating_point and not isinstance(value, float) and not hasattr(value, "scope"):
            value = float(value)
        elif dtype is torch.bool:
            value = bool(value)
        return self.make(Const, value, dtype)  # type: ignore[no-any-return]

    def place(self, index: Any) -> Term:
        """An index as a value."""
        if isinstance(index, int):
            return self.const(index, torch.int64)
        return self.make(Place, index, self.places(index))  # type: ignore[no-any-return]

    def narrowed(self, place: Term) -> Term:
        """A place as a number of 32 bits, of which vectors have more lanes, where it surely is one."""
        if not isinstance(place, Place) or place.places or self.scope.bounds(place.index)[1] >= 1 << 31:
            return place
        return self.make(Place, place.index, (), torch.int32)  # type: ignore[no-any-return]

    def load(self, buffer: Buffer, index: Any, dtype: torch.dtype, valid: Term | None) -> Term:
        return self.make(Load, buffer, index, dtype, valid, self.places(index))  # type: ignore[no-any-return]

    def computed(self, term: Term, size: Any, valid: Term | None, wraps: bool = True, dim: int = -1) -> Any:
        """What stands for a value used as an index into `size` places; 0 where not `valid`.

        A symbol whose value is checked, or the index itself where it is one of loops and always inside.
        """
        place = self.as_index(term)
        if place is not None and type(size) is int:
            low, high = self.scope.bounds(place)
            if low >= 0 and high < size:
                return place
        term = self.guarded(term, valid, 0)
        key = ("computed", id(term), _key(size), wraps, dim)
        known = self._known.get(key)
        if known is None:
            high = size - 1 if isinstance(size, int) else LIMIT
            symbol = Symbol(self.scope, f"at{len(self._computed)}", 0, "", 0, max(high, 0))
            known = self._known[key] = self._computed[symbol] = Computed(symbol, term, size, wraps, dim)
        return known.symbol  # type: ignore[no-any-return]

    def as_index(self, term: Term) -> Any:
        """An integer term that is a function of loops alone, as an index; None for others."""
        if isinstance(term, Place):
            return None if term.places else term.index
        if isinstance(term, Const):
            return term.value if type(term.value) is int else None
        if not isinstance(term, Apply) or term.dtype is not torch.int64 or term.op not in INDEXED:
            return None
        parts = [self.as_index(arg) for arg in term.args]
        if None in parts or term.op == "div_floor" and (type(parts[1]) is not int or parts[1] < 1):
            return None
        return INDEXED[term.op](*parts)

    def guarded(self, term: Term, valid: Term | None, harmless: int) -> Term:
        """A value, or a harmless one where it is not valid: there it must raise nothing."""
        if valid is None or isinstance(term, Const):
            return term
        return self.apply("where", term.dtype, valid, term, self.const(harmless, term.dtype))

    def phase(self, term: Term) -> int:
        """The first phase in which a term of these can be computed: after the folds that it reads."""
        known = self._phases.get(id(term))
        if known is None:
            if isinstance(term, Fold):
                known, runs = term.ready, frozenset({term.phase}) if term.running else NONE
            else:
                known, runs = 0, NONE
                for child in children(term):
                    known = max(known, self.phase(child))
                    runs |= self._runs[id(child)]
                if runs and any(phase != known for phase in runs):
                    raise Misfit  # what runs along the loops is not there in later ones
            self._phases[id(term)], self._runs[id(term)] = known, runs
        return known

    def places(self, index: Any) -> tuple[Computed, ...]:
        """The computed indices in an index expression."""
        if not self._computed or not isinstance(index, Expr):
            return ()
        return tuple([self._computed[s] for s in sorted(index.symbols(), key=str) if s in self._computed])


#: What fields of terms are that are equal to others; terms and buffers are themselves alone.
EQUAL = frozenset({str, torch.dtype, Expr, Symbol})


def _key(value: Any) -> Any:
    kind = type(value)
    if kind in EQUAL:
        return value
    if kind is tuple:
        return tuple([_key(v) for v in value])
    if kind is int or kind is bool:
        return kind, value
    return (kind, repr(value)) if kind is float else id(value)  # zeros have signs


def dtype_of(node: Node) -> torch.dtype:
    """The element type of a tensor node."""
    spec: TensorSpec = node.spec
    return spec.dtype


def operand(terms: Terms, node: Node, arg: Any, coords: Coords, valid: Term | None, read: Read,
            dtype: torch.dtype) -> Term:  # fmt: skip
    """An operand of a broadcasting op: a tensor's element, or a number."""
    if isinstance(arg, Node):
        return read(arg, broadcast(coords, shape_of(arg), shape_of(node)), valid)
    return terms.const(arg, dtype)


def rounded(number: float, dtype: torch.dtype) -> float:
    """The nearest number of a dtype."""
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def _elementwise(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    name = name_of(node.op)
    tensor = next(a for a in node.args if isinstance(a, Node))
    dtype = dtype_of(tensor)
    count = 1 if name in OF_ONE else 2
    if name == "div" and (mode := node.kwargs.get("rounding_mode")):
        name = f"div_{mode}"
    given = [operand(terms, node, a, coords, valid, read, dtype) for a in node.args[:count]]
    if dtype in HALVES and (terms.rounds or name not in WIDE_ON_GPUS or node.spec.device.type == "cpu"):
        for place in NUMBERS.get(name, ()):
            given[place] = terms.stored(given[place])
    if name in DIVISIONS and not dtype.is_floating_point:
        given[1] = terms.guarded(given[1], valid, 1)
    return terms.apply(name, dtype_of(node), *given)


#: Functions that are loops on CPUs alone, of float32 and half types.
HERE = frozenset("sinh cosh asinh acosh atanh log10".split())
OF_ONE = UNARY | HERE

LOWER.update(dict.fromkeys([*OF_ONE, *BINARY], _elementwise))


def _is_here(node: Node) -> bool:
    spec = node.spec
    return spec.device.type == "cpu" and dtype_of(node.args[0]) is spec.dtype in (torch.float32, *HALVES)


def lowering(*names: str) -> Callable[[Lowering], Lowering]:
    def declare(function: Lowering) -> Lowering:
        LOWER.update(dict.fromkeys(names, function))
        return function

    return declare


@lowering("where")
def _where(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    condition, *choices = node.args
    dtype = dtype_of(node)
    mask = operand(terms, node, condition, coords, valid, read, torch.bool)
    return terms.apply(
        "where", dtype, mask, *[operand(terms, node, c, coords, valid, read, dtype) for c in choices]
    )


@lowering("kiln::checked")
def _checked(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    value, holds = (read(x, coords, valid) for x in node.args)
    return terms.apply(CHECKED, dtype_of(node), value, terms.guarded(holds, valid, True))


@lowering("addcmul")
def _addcmul(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    dtype = dtype_of(node)
    given = [operand(terms, node, a, coords, valid, read, dtype) for a in node.args]
    return terms.apply("addcmul", dtype, *given)


@lowering("clamp")
def _clamp(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    x, low, high = node.args[0], argument(node, 1, "min", None), argument(node, 2, "max", None)
    dtype = dtype_of(node)
    value = read(x, coords, valid)
    for bound, name in ((low, "maximum"), (high, "minimum")):
        if bound is not None:
            # Of zeros with two signs the second stays: that is x.
            value = terms.apply(name, dtype, terms.stored(terms.const(bound, dtype)), value)
    return value


@lowering("_to_copy")
def _convert(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    value = read(node.args[0], coords, valid)
    return value if value.dtype == dtype_of(node) else terms.apply("convert", dtype_of(node), value)


@lowering("clone")
def _clone(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    return read(node.args[0], coords, valid)


@lowering("full")
def _full(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    return terms.stored(terms.const(node.args[1], dtype_of(node)))


def is_drawn(node: Node) -> bool:
    """Whether a node is random numbers of our own: a function of a seed and a place."""
    return name_of(node.op) == "kiln::uniform"


@lowering("kiln::uniform")
def _random(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    seed, shape, _, word = node.args
    place: Any = 0
    for c, n in zip(coords, shape, strict=True):
        place = place * n + c
    name = f"uniform_{word}"
    return terms.apply(name, torch.float32, read(seed, (), None), terms.place(place))


@lowering("arange")
def _arange(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    start, step = 0, 1
    if len(node.args) > 1:
        start = node.args[0]
    if len(node.args) > 2:
        step = node.args[2]
    dtype = dtype_of(node)
    if isinstance(start, int) and isinstance(step, int):
        value = terms.place(start + step * coords[0])
        return value if dtype is torch.int64 else terms.apply("convert", dtype, value)
    scaled = terms.apply("mul", dtype, terms.apply("convert", dtype, terms.place(coords[0])),
                         terms.const(step, dtype))  # fmt: skip
    return terms.apply("add", dtype, scaled, terms.const(start, dtype))


def both(terms: Terms, a: Term | None, b: Term) -> Term:
    """A condition within another one."""
    return b if a is None else terms.apply("bitwise_and", torch.bool, a, b)


@lowering("cat")
def _cat(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    parts = [part for part in node.args[0] if shape_of(part) != (0,)]
    dim = argument(node, 1, "dim", 0)
    dim %= len(coords)
    here, start = coords[dim], 0
    pieces: list[tuple[Any, Node]] = []
    for part in parts:
        pieces.append((start, part))
        start = start + shape_of(part)[dim]
    result: Term | None = None
    for begin, part in reversed(pieces):
        end = begin + shape_of(part)[dim]
        inside = terms.apply("lt", torch.bool, terms.place(here), terms.place(end))
        if begin != 0:
            after = terms.apply("ge", torch.bool, terms.place(here), terms.place(begin))
            inside = terms.apply("bitwise_and", torch.bool, inside, after)
        moved = (*coords[:dim], here - begin, *coords[dim + 1 :])
        value = read(part, moved, both(terms, valid, inside))
        if value.dtype != dtype_of(node):
            value = terms.apply("convert", dtype_of(node), value)
        result = value if result is None else terms.apply("where", dtype_of(node), inside, value, result)
    assert result is not None
    return result


@lowering("constant_pad_nd")
def _pad(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    x, pad = node.args[0], node.args[1]
    fill = argument(node, 2, "value", 0)
    shape, moved = shape_of(x), list(coords)
    inside: Term | None = None
    for i in range(len(pad) // 2):
        dim = len(coords) - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        moved[dim] = coords[dim] - before
        place = terms.place(moved[dim])
        if before != 0:
            inside = both(terms, inside, terms.apply("ge", torch.bool, place, terms.const(0, torch.int64)))
        if after != 0:
            inside = both(terms, inside, terms.apply("lt", torch.bool, place, terms.place(shape[dim])))
    if inside is None:
        return read(x, tuple(moved), valid)
    value = read(x, tuple(moved), both(terms, valid, inside) if valid is not None else inside)
    return terms.apply("where", dtype_of(node), inside, value, terms.const(fill, dtype_of(node)))


@lowering("slice_scatter")
def _slice_scatter(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    x, source = node.args[:2]
    dim, step = argument(node, 2, "dim", 0) % len(coords), argument(node, 5, "step", 1)
    start = from_front(argument(node, 3, "start", 0), shape_of(x)[dim])
    past, zero = coords[dim] - start, terms.const(0, torch.int64)
    inside = terms.apply("lt", torch.bool, terms.place(past), terms.place(shape_of(source)[dim] * step))
    if start != 0:
        inside = both(terms, inside, terms.apply("ge", torch.bool, terms.place(past), zero))
    if step != 1:
        inside = both(terms, inside, terms.apply("eq", torch.bool, terms.place(past % step), zero))
    value = read(source, (*coords[:dim], past // step, *coords[dim + 1 :]), both(terms, valid, inside))
    if value.dtype != dtype_of(node):
        value = terms.apply("convert", dtype_of(node), value)
    return terms.apply("where", dtype_of(node), inside, value, read(x, coords, valid))


@lowering("gather")
def _gather(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    x, dim, index = node.args[:3]
    shape = shape_of(x)
    if not shape:
        return read(x, (), valid)
    dim %= len(shape)
    place = terms.computed(read(index, coords, valid), shape[dim], valid, wraps=False)
    return at(terms, read(x, (*coords[:dim], place, *coords[dim + 1 :]), valid), [place])


def common_shape(shapes: Sequence[Coords]) -> Coords:
    """What shapes that fit each other are broadcast to."""
    rank = max(map(len, shapes))
    columns = zip(*[(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes], strict=True)
    wide = [[n for n in column if n != 1] for column in columns]
    return tuple([next((n for n in column if hinted(n) != 1), (*column, 1)[0]) for column in wide])


def chosen_by(indices: Any) -> tuple[list[int], Coords, int]:
    """The dimensions that indices choose from, the shape of what they choose, its place in the result."""
    given = [d for d, index in enumerate(indices) if index is not None]
    common = common_shape([shape_of(indices[d]) for d in given])
    together = given == list(range(given[0], given[-1] + 1))
    return given, common, given[0] if together else 0


@lowering("index")
def _index(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    x, indices = node.args
    shape = shape_of(x)
    given, common, start = chosen_by(indices)
    chosen, others = coords[start : start + len(common)], list(coords[:start] + coords[start + len(common) :])
    source: list[Any] = []
    for d in range(len(shape)):
        if d in given:
            where = broadcast(chosen, shape_of(indices[d]), common)
            source.append(terms.computed(read(indices[d], where, valid), shape[d], valid))
        else:
            source.append(others.pop(0))
    return at(terms, read(x, tuple(source), valid), source)


def at(terms: Terms, value: Term, source: Sequence[Any]) -> Term:
    """A value that is read at these places, checked also where it is the same at all of them."""
    asked = {p.symbol: place for place in source for p in terms.places(place)}
    if not asked:
        return value
    found = {p.symbol for term in below([value]) if isinstance(term, (Load, Place)) for p in term.places}
    for place in (place for symbol, place in asked.items() if symbol not in found):
        inside = terms.apply("ge", torch.bool, terms.place(place), terms.const(0, torch.int64))
        value = terms.apply(CHECKED, value.dtype, value, inside)
    return value


def is_pointwise(node: Node) -> bool:
    """Whether each element of a node follows from elements of its inputs at known places."""
    spec = node.spec
    name = name_of(node.op)
    if not isinstance(spec, TensorSpec) or name not in LOWER or not supported(spec):
        return False
    if name in CONDITIONS and not CONDITIONS[name](node) or name in HERE and not _is_here(node):
        return False
    if name == "pow" and isinstance(node.args[1], Expr) and not spec.dtype.is_floating_point:
        return False  # eager's kernel raises where an integer's power is negative
    count = 1 if name in OF_ONE else 2
    more = len(node.args) > count or node.kwargs and node.kwargs.keys() - {"rounding_mode"}
    if more and LOWER[name] is _elementwise:
        return False  # a variant of the op with more arguments
    if name == "cat" and len(node.args[0]) > (PIECES if large(spec) else SMALL_PIECES):
        return False
    if name in TERNARY and (node.kwargs or not spec.dtype.is_floating_point):
        return False
    if name == "index" and any(i is not None and i.spec.dtype not in INDICES for i in node.args[1]):
        return False
    return all(isinstance(n.spec, TensorSpec) and supported(n.spec) for n in node.inputs())


#: Tensors that are joined in loops where the result is small, and an eager kernel not worth its call.
SMALL_PIECES = 48


def large(spec: TensorSpec) -> bool:
    """Whether an eager kernel is worth its call, by the sizes when traced."""
    return math.prod(map(hinted, spec.shape)) > 1 << 13


INDICES = frozenset({torch.int64, torch.int32})
