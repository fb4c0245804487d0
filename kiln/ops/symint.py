"""Expressions as torch.SymInt, SymFloat and SymBool: what PyTorch's code computes with sizes stays symbolic.

    n = wrap(scope.symbol(5, "x.size(0)"))     # torch.SymInt; wrap(7) is 7
    n * 2 + 1, n // 4, torch.sym_max(n, 3)     # torch.SymInt, or an int where no symbol is left
    n > 3                                      # a bool where it is known, else a torch.SymBool
    if n > 8: …                                # asks the scope, which records the condition
    int(n), range(n), [0] * n                  # n becomes a constant: the scope records n == 5
    expr_of(n), expr_of(7)                     # the expression behind it; the int

The operators of these classes and PyTorch's C++ code call the methods of `Node`, by the attribute `node`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kiln.base import arithmetic, conditions
from kiln.base.expressions import NUMBERS, Condition, Expr, Truth, Value
from kiln.ops import layout

SymInt, SymFloat, SymBool = torch.SymInt, torch.SymFloat, torch.SymBool
SYMBOLIC = frozenset({SymInt, SymFloat, SymBool})


class Seen:
    """Whether there were symbolic numbers in this process: until then, nothing looks for them."""

    symbols = False


SEEN = Seen()


def wrap(value: Any, scope: Any = None) -> Any:
    """A number, expression or condition as Python sees it: a plain value once it is determined."""
    if type(value) in NUMBERS:
        return value
    scope = value.scope
    if isinstance(value, Condition):
        known = scope.known(value)
        return SymBool(Node(value, bool)) if known is None else known
    found = scope.memo.get(value)
    if found is None:
        SEEN.symbols = True
        found = scope.memo[value] = (SymFloat if value.real else SymInt)(
            Node(value, float if value.real else int)
        )
    if not value.real:
        simple = scope.simplify(value)
        if type(simple) is int:
            return simple
    return found


def expr_of(value: Any) -> Any:
    """The expression or condition behind a symbolic value; the value itself if it is a plain one.

    What is determined by now is a plain number, in an expression too, but a symbol stays itself: it may be
    bound by the size that has this value.
    """
    if type(value) in SYMBOLIC:
        value = value.node.expr
        if type(value) is Expr and not value.real:
            simple = value.scope.simplify(value)
            return simple if type(simple) is int else value.scope.determined(value)
    return value


def plain(value: Any) -> Any:
    """A nest of arguments in which what is symbolic in form only is a plain number."""
    kind = type(value)
    if kind in SYMBOLIC:
        return wrap(value.node.expr) if type(value.node) is Node else value
    if kind is list or kind is tuple or kind is torch.Size:
        for item in value:
            if type(item) in NESTS:
                return (list if kind is list else tuple)([plain(item) for item in value])
        return value
    if kind is dict and value:
        return {key: plain(item) for key, item in value.items()}
    return value


NESTS = SYMBOLIC | {list, tuple, dict, torch.Size}


def specialised(value: Any) -> Any:
    """The number that a symbolic value is now, which its scope records; other values as they are."""
    if type(value) in SYMBOLIC:
        node = value.node
        return node.guard_bool() if node.kind is bool else node.fixed()
    return value


def assume(truth: Any) -> None:
    """Note a truth that follows from what was recorded, where its scope does not see that it does."""
    if type(truth) is SymBool and isinstance(truth.node.expr, Condition):
        truth.node.expr.scope.learn(truth.node.expr)


def is_open(value: Any) -> bool:
    """Whether a symbolic number follows from what only the graph has."""
    return isinstance(expr := value.node.expr, Expr) and expr.scope.is_open(expr)


def below_zero(value: Any) -> bool:
    """Whether a number is negative with which an op raises then: one that only the graph has is not."""
    if type(value) is SymInt and is_open(value):
        value.node.expr.scope.learn(conditions.ge(value.node.expr, 0))
        return False
    return bool(value < 0)


class Node:
    """What PyTorch asks of the object behind a symbolic number."""

    __slots__ = ("__weakref__", "counts", "expr", "kind")

    def __init__(self, expr: Any, kind: type) -> None:
        self.expr: Any = expr
        self.kind = kind
        self.counts = False  # whether it is a key: those that it equals are decided

    def clone(self) -> Node:
        return self

    def __deepcopy__(self, memo: Any) -> Node:
        return self

    def str(self) -> str:
        return str(self.expr)

    __str__ = __repr__ = str

    def _graph_repr(self) -> Any:
        """The text of the number for the program, which sees what it is; `str` is that of the expression."""
        return repr(self.guard_bool() if self.kind is bool else self.fixed())

    @property
    def hint(self) -> Any:
        return self.expr.hint if isinstance(self.expr, (Expr, Condition)) else self.expr

    def is_constant(self) -> bool:
        return not isinstance(self._simple(), (Expr, Condition))

    def _simple(self) -> Any:
        value = self.expr
        if isinstance(value, Expr):
            return value.scope.simplify(value)
        if isinstance(value, Condition):
            known = value.scope.known(value)
            return value if known is None else known
        return value

    def maybe_as_int(self) -> int | None:
        value = self.expr
        if type(value) is int:
            return value
        # C++ asks this before each step of its arithmetic.
        if not value.scope.settles:
            return None
        value = self._simple()
        return value if type(value) is int else None

    def maybe_as_float(self) -> float | None:
        return self.expr if type(self.expr) is float else None

    def maybe_as_bool(self) -> bool | None:
        value = self._simple()
        return value if type(value) is bool else None

    constant_int = maybe_as_int
    constant_bool = maybe_as_bool

    def fixed(self, file: Any = "", line: int = 0) -> Any:
        """The number that it is now, recorded as a condition."""
        value = self._simple()
        return value.scope.specialise(value) if isinstance(value, Expr) else value

    guard_int = guard_float = fixed

    def int_(self) -> int:
        return int(self.guard_bool()) if self.kind is bool else int(self.fixed())

    def guard_bool(self, file: Any = "", line: int = 0) -> bool:
        """Whether it holds, from what is known or recorded now."""
        value = self.expr
        if isinstance(value, Expr):
            value = conditions.ne(value, 0)
        return bool(value.scope.decide(value)) if isinstance(value, Condition) else bool(value)

    guard_size_oblivious = expect_true = bool_ = guard_bool

    def guard_or_false(self, file: Any = "", line: int = 0, otherwise: bool = False) -> bool:
        """Whether it holds, where the program goes on either way if only a graph can tell."""
        value = self._simple()
        if isinstance(value, (Expr, Condition)) and value.scope.is_open(value):
            return otherwise
        return self.guard_bool()

    def guard_or_true(self, file: Any = "", line: int = 0) -> bool:
        return self.guard_or_false(file, line, otherwise=True)

    def statically_known_true(self, file: Any = "", line: int = 0) -> bool:
        value = self.expr
        return value.scope.known(value) is True if isinstance(value, Condition) else bool(value)

    def expect_size(self, file: Any = "", line: int = 0) -> bool:
        return Node(conditions.ge(self.expr, 0), bool).guard_bool()

    def sym_sum(self, parts: Any) -> Node:
        return Node(arithmetic.total([part.expr for part in parts]), int)

    def sym_ite(self, yes: Node, no: Node) -> Node:
        return yes if self.guard_bool() else no

    def round(self, digits: int | None = None) -> Node:
        if digits is None:
            return Node(arithmetic.call("round", self.expr), int)
        return Node(arithmetic.call("round", self.expr, digits), self.kind)


def _laid_out(asked: Callable[..., Any], rank: int = 0, kind: type = bool) -> Callable[..., Node]:
    """The method of a node for a question about a layout, one that only tensors of `rank` have if given."""

    def method(self: Node, sizes: Any, strides: Any) -> Node:
        fits = not rank or len(sizes) == rank
        answer = fits and asked(*[tuple([wrap(n.expr) for n in nodes]) for nodes in (sizes, strides)])
        return Node(int(answer) if kind is int else answer, kind)

    return method


LAYOUTS: dict[str, Callable[..., Node]] = {
    "is_contiguous": _laid_out(layout.is_contiguous),
    "is_channels_last_contiguous_2d": _laid_out(layout.is_channels_last, 4),
    "is_channels_last_contiguous_3d": _laid_out(layout.is_channels_last, 5),
    "is_channels_last_strides_2d": _laid_out(layout.suggests_channels_last, 4),
    "is_channels_last_strides_3d": _laid_out(layout.suggests_channels_last, 5),
    "is_non_overlapping_and_dense": _laid_out(layout.is_dense),
    "is_non_overlapping_and_dense_indicator": _laid_out(layout.is_dense, kind=int),
}


# ------------------------------------------------------------------------------------------------- operations


def _divided(function: Callable[[Value, Value], Value], a: Value, b: Value) -> Value:
    """A division, once it is sure that one may divide by the second number."""
    if isinstance(b, Expr) and b.scope.decide(conditions.eq(b, 0)):
        raise ZeroDivisionError("integer division or modulo by zero")
    return function(a, b)


def _power(a: Value, b: Value) -> Value:
    if isinstance(b, Expr) and not b.real:
        b = b.scope.specialise(b)
    return arithmetic.power(a, b)


def _bits(op: str) -> Callable[[Value, Value], Value]:
    return lambda a, b: arithmetic.infix(op, a, b)


def _called(name: str) -> Callable[[Value], Value]:
    return lambda a: arithmetic.call(name, a)


def _truth(function: Callable[..., Truth]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(_as_truth(a), _as_truth(b))


def _as_truth(value: Any) -> Truth:
    return conditions.ne(value, 0) if isinstance(value, Expr) else value  # type: ignore[no-any-return]


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": arithmetic.add, "sub": arithmetic.sub, "mul": arithmetic.mul,
    "mod": partial(_divided, arithmetic.mod),
    **dict.fromkeys(("floordiv", "int_floordiv"), partial(_divided, arithmetic.floordiv)),
    **dict.fromkeys(("truediv", "int_truediv", "float_truediv"), partial(_divided, arithmetic.truediv)),
    "pow": _power, "float_pow": _power, "pow_by_natural": _power, "sym_min": arithmetic.minimum,
    "sym_max": arithmetic.maximum, "bitwise_and": _bits("&"), "bitwise_or": _bits("|"),
    "bitwise_xor": _bits("^"), "lshift": _bits("<<"), "rshift": _bits(">>"),
}  # fmt: skip
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": conditions.eq, "ne": conditions.ne, "lt": conditions.lt, "le": conditions.le, "gt": conditions.gt,
    "ge": conditions.ge,
}  # fmt: skip
LOGIC: dict[str, Callable[[Any, Any], Any]] = {
    "sym_and": _truth(conditions.all_of), "sym_or": _truth(conditions.any_of),
    "and_": _truth(conditions.all_of), "or_": _truth(conditions.any_of),
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "neg": lambda a: arithmetic.mul(-1, a), "pos": lambda a: a, "abs": _called("abs"),
    "floor": _called("math.floor"), "ceil": _called("math.ceil"), "trunc": _called("math.trunc"),
    "sym_int": _called("math.trunc"), "sym_float": _called("float"),
    "sym_not": lambda a: conditions.negate(_as_truth(a)),
    "is_integer": lambda a: conditions.eq(a, arithmetic.call("math.floor", a)),
    **{f"sym_{n}": _called(f"math.{n}") for n in (
        "sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")},
}  # fmt: skip


#: Questions that have one answer for all numbers.
ANSWERS = {"has_hint": True, "is_symbolic": True, "is_nested_int": False, "nested_int": None}


def _kind(value: Any) -> type:
    if isinstance(value, Expr):
        return float if value.real else int
    return bool if isinstance(value, Condition) else type(value)


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Node, Node], Node]:
    """The method of a node for an operation; results on integers, which C++ asks over and over, are kept."""

    def method(self: Node, other: Node) -> Node:
        a, b = self.expr, other.expr
        if self.kind is int is other.kind:
            scope = a.scope if type(a) is not int else b.scope if type(b) is not int else None
            if scope is not None:
                key = (function, a, b)
                node = scope.memo.get(key)
                if node is None:
                    value = function(a, b)
                    node = scope.memo[key] = Node(value, _kind(value))
                return node  # type: ignore[no-any-return]
        value = function(a, b)
        return Node(value, _kind(value))

    return method


def _unary(function: Callable[[Any], Any]) -> Callable[[Node], Node]:
    def method(self: Node) -> Node:
        value = function(self.expr)
        return Node(value, _kind(value))

    return method


for _name, _function in {**ARITHMETIC, **COMPARISONS, **LOGIC}.items():
    setattr(Node, _name, _binary(_function))
for _name, _of_one in FUNCTIONS.items():
    setattr(Node, _name, _unary(_of_one))
for _name, _method in LAYOUTS.items():
    setattr(Node, _name, _method)
for _name, _answer in ANSWERS.items():
    setattr(Node, _name, lambda self, answer=_answer: answer)
for _type in (int, float, bool):
    setattr(Node, f"is_{_type.__name__}", lambda self, kind=_type: self.kind is kind)
    setattr(Node, f"wrap_{_type.__name__}", lambda self, value, kind=_type: Node(value, kind))


def as_key(number: Any) -> Any:
    """A number that has a hash; no op is given it, as ops compute what they know by the hashes of sizes."""
    key = SymInt(Node(number.node.expr, int))
    key.node.counts = True
    return key


def hash_of(number: Any, before: Callable[[Any], int] = SymInt.__hash__) -> int:
    """The hash of a number that is a key; torch refuses it of all others."""
    node = number.node
    return hash(node.hint) if type(node) is Node and node.counts else before(number)


SymInt.__hash__ = hash_of  # type: ignore[method-assign, assignment]
