"""Expressions over symbols: integers in a normal form, floats as trees, and the conditions between them.

Constants are plain Python numbers; an `Expr` has at least one symbol. Equal expressions of one scope are one
object, so `is`, `==`, `hash` and dict keys compare what they mean, and no operator decides anything. `str`
gives Python source over the names of the symbols.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeAlias

Monomial: TypeAlias = "tuple[Expr, ...]"
Poly: TypeAlias = "dict[Monomial, int]"
Value: TypeAlias = "int | float | Expr"
Truth: TypeAlias = "bool | Condition"

SYMBOL, SUM, FLOORDIV, MOD, MIN, MAX = "symbol", "sum", "//", "%", "min", "max"
CALLS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "float": float, "abs": abs, "round": round,
    **{f"math.{name}": getattr(math, name) for name in (
        "floor", "ceil", "trunc", "sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "sinh", "cosh",
        "tanh", "asin", "acos", "atan", "fabs")},
}  # fmt: skip
#: Functions from floats that give integers.
TO_INT = frozenset({"math.floor", "math.ceil", "math.trunc", "round"})
#: How strongly each operator binds, and what it computes.
INFIX: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "//": (2, operator.floordiv), "%": (2, operator.mod), "/": (2, operator.truediv), "+": (1, operator.add),
    "-": (1, operator.sub), "*": (2, operator.mul), "**": (3, operator.pow), "&": (0, operator.and_),
    "|": (0, operator.or_), "^": (0, operator.xor), "<<": (0, operator.lshift), ">>": (0, operator.rshift),
    "==": (-1, operator.eq), "<": (-1, operator.lt), "<=": (-1, operator.le), "!=": (-1, operator.ne),
}  # fmt: skip

#: What the operators of an expression do: `kiln.base.arithmetic` fills it.
OPERATORS: dict[str, Callable[[Value, Value], Value]] = {}
Operator: TypeAlias = "Callable[[Any, Value], Value]"


class Term:
    """An immutable expression or condition over the symbols of one scope; equal ones are one object."""

    __slots__ = ("__weakref__", "_run", "_symbols", "_text", "args", "hint", "op", "order", "scope")

    def __init__(self, scope: Any, op: str, args: tuple[Any, ...], hint: Any) -> None:
        self.scope, self.op, self.args, self.hint = scope, op, args, hint
        self.order: int = scope.next_order()
        self._text: str | None = None
        self._symbols: frozenset[Symbol] | None = None
        self._run: Callable[..., Any] | None = None

    def symbols(self) -> frozenset[Symbol]:
        """The symbols that occur in it."""
        if self._symbols is None:
            found = [part.symbols() for part in self.parts() if isinstance(part, Term)]
            self._symbols = found[0].union(*found[1:]) if found else frozenset()
        return self._symbols

    def parts(self) -> Iterable[Any]:
        """What it is made of."""
        return self.args

    def evaluate(self, values: Mapping[Symbol, int | float]) -> Any:
        """What it is for these values of its symbols."""
        return evaluate(self, values)

    def __str__(self) -> str:
        if self._text is None:
            self._text = render(self, 0)
        return self._text

    __repr__ = __str__

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __copy__(self) -> Self:
        return self


class Expr(Term):
    """An expression, made only by the functions of `arithmetic`."""

    __slots__ = ("poly", "range", "real", "simple")

    def __init__(self, scope: Any, op: str, args: tuple[Any, ...], poly: Poly | None, hint: Any) -> None:
        super().__init__(scope, op, args, hint)
        self.real = type(hint) is float
        self.poly: Poly = {(self,): 1} if poly is None else poly
        #: What the scope remembers of it: (version, low, high) and (version, simplified).
        self.range: tuple[int, int, int] | None = None
        self.simple: tuple[int, Any] | None = None

    def parts(self) -> Iterable[Any]:
        return [part for monomial in self.poly for part in monomial] if self.op is SUM else self.args

    def __bool__(self) -> bool:
        raise TypeError(f"whether {self} is zero is a condition; ask its scope to decide it")

    # The operators: `kiln.base.arithmetic` defines them.
    __add__: Operator
    __radd__: Operator
    __sub__: Operator
    __rsub__: Operator
    __mul__: Operator
    __rmul__: Operator
    __floordiv__: Operator
    __rfloordiv__: Operator
    __mod__: Operator
    __rmod__: Operator
    __truediv__: Operator
    __rtruediv__: Operator

    def __neg__(self) -> Value:
        return OPERATORS["*"](-1, self)


class Symbol(Expr):
    """A number that is known when the compiled function is entered."""

    __slots__ = ("high", "low", "name", "source")

    def __init__(self, scope: Any, name: str, hint: Any, source: Any, low: int, high: int) -> None:
        super().__init__(scope, SYMBOL, (), None, hint)
        self._symbols = frozenset((self,))
        self.name = name
        self.source = source
        #: The range within which the compiled function is used; the check of the entry has to see to it.
        self.low = low
        self.high = high


class Condition(Term):
    """A statement about symbols that is true or false once they are known.

    `op` is "==", "!=" or "<=" with one integer expression in `args`, which is compared with zero; "float"
    with an operator and two operands; "and", "or" with conditions; "not" with one.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        raise TypeError(f"whether {self} holds is for its scope to decide")


# ---------------------------------------------------------------------------------------------- construction


def atom(scope: Any, op: str, args: tuple[Any, ...], hint: Any) -> Expr:
    """The one expression of this operator and operands."""
    return _interned(Expr, scope, op, args, None, hint)  # type: ignore[no-any-return]


def condition(scope: Any, op: str, args: tuple[Any, ...], hint: bool) -> Condition:
    """The one condition of this operator and operands."""
    return _interned(Condition, scope, op, args, hint)  # type: ignore[no-any-return]


def _interned(kind: type[Term], scope: Any, op: str, args: tuple[Any, ...], *rest: Any) -> Any:
    key = (kind, op, *[(type(a), a) if type(a) in NUMBERS else a for a in args])
    known = scope.table.get(key)
    if known is None:
        known = scope.table[key] = kind(scope, op, args, *rest)
    return known


def poly_of(value: Value) -> Poly:
    """An integer as a sum of products."""
    if isinstance(value, Expr):
        return value.poly
    return {(): int(value)} if value else {}


def from_poly(scope: Any, poly: Poly) -> int | Expr:
    """The one expression for a sum of products; `poly` is given away."""
    if not poly:
        return 0
    if len(poly) == 1:
        ((monomial, factor),) = poly.items()
        if not monomial:
            return factor
        if factor == 1 and len(monomial) == 1:
            return monomial[0]
    key = frozenset(poly.items())
    known: Expr | None = scope.table.get(key)
    if known is None:
        hint = 0
        for monomial, factor in poly.items():
            for part in monomial:
                factor *= part.hint
            hint += factor
        known = scope.table[key] = Expr(scope, SUM, (), poly, hint)
    return known


def accumulate(into: Poly, poly: Poly, factor: int) -> None:
    """Add `factor` times `poly` to a sum of products."""
    for monomial, n in poly.items():
        total = into.get(monomial, 0) + n * factor
        if total:
            into[monomial] = total
        else:
            into.pop(monomial, None)


def _order(part: Expr) -> int:
    return part.order


def times(a: Poly, b: Poly) -> Poly:
    """The product of two sums of products."""
    out: Poly = {}
    for left, m in a.items():
        for right, n in b.items():
            product = left + right if not left or not right else tuple(sorted(left + right, key=_order))
            total = out.get(product, 0) + m * n
            if total:
                out[product] = total
            else:
                del out[product]
    return out


def scope_of(a: Any, b: Any) -> Any:
    """The scope of two operands, of which one is an expression."""
    if type(a) in NUMBERS:
        return b.scope
    if type(b) in NUMBERS or a.scope is b.scope:
        return a.scope
    raise ValueError(f"{a} and {b} belong to different scopes")


NUMBERS = frozenset({int, float, bool})


def is_real(value: Value) -> bool:
    """Whether `value` is a float."""
    return value.real if isinstance(value, Expr) else type(value) is float  # type: ignore[return-value]


def hint_of(value: Any) -> Any:
    """The value that a number or expression has now."""
    return value.hint if isinstance(value, Expr) else value


def hinted(size: Any) -> int:
    """A size as a number: what it was when traced."""
    return size if type(size) is int else int(getattr(size, "hint", size))


def grows(index: Any, symbol: Any) -> int | None:
    """By how much an index grows with a symbol, wherever that is; None where it is not one number."""
    step = 0
    for monomial, factor in index.poly.items() if hasattr(index, "poly") else ():
        if monomial == (symbol,):
            step = factor
        elif any(symbol in atom.symbols() for atom in monomial):
            return None
    return step


def weight(monomial: Monomial) -> tuple[int, tuple[int, ...]]:
    """The order of terms: high degrees first."""
    return -len(monomial), tuple([part.order for part in monomial])


# ------------------------------------------------------------------------------------ evaluation and printing


def evaluate(value: Any, values: Mapping[Symbol, int | float]) -> Any:
    """An expression or condition for these values of its symbols; plain values are themselves."""
    if not isinstance(value, Term):
        return value
    symbols = sorted(value.symbols(), key=_order)
    if value._run is None:
        value._run = function_of(symbols, str(value))
    return value._run(*[values[s] for s in symbols])


def function_of(symbols: Iterable[Symbol], text: str) -> Callable[..., Any]:
    """A Python function of the symbols that gives the value of `text`."""
    arguments = ", ".join([s.name for s in symbols])
    function: Callable[..., Any] = eval(f"lambda {arguments}: {text}", {"math": math})
    return function


NAMED = {"inf": "math.inf", "-inf": "-math.inf", "nan": "math.nan"}


def render(value: Any, level: int) -> str:
    """Python source for a number, expression or condition, in parentheses where it binds below `level`."""
    if isinstance(value, Condition):
        return render_condition(value)
    if not isinstance(value, Expr):
        text = NAMED.get(repr(value)) or repr(value)
        return text if value >= 0 or level < 2 else f"({text})"
    if isinstance(value, Symbol):
        return value.name
    if value.op is SUM:
        text, own = render_poly(value.poly)
    elif value.op in INFIX:
        own = INFIX[value.op][0]
        text = f"{render(value.args[0], max(own, 1))} {value.op} {render(value.args[1], max(own, 0) + 1)}"
    else:
        return f"{value.op}({', '.join([render(a, 0) for a in value.args])})"
    return text if own >= level else f"({text})"


def render_poly(poly: Poly) -> tuple[str, int]:
    """Python source for a sum of products, and how strongly it binds."""
    text = ""
    for monomial in sorted(poly, key=weight):
        n = poly[monomial]
        sign = (" - " if n < 0 else " + ") if text else ("-" if n < 0 else "")
        alone = abs(n) == 1 and len(monomial) == 1 and sign != "-"
        factors = [render(part, 2 if alone else 3) for part in monomial]
        if abs(n) != 1 or not monomial:
            factors.insert(0, str(abs(n)))
        text += sign + "*".join(factors)
    single = len(poly) == 1 and not text.startswith("-")
    return text or "0", 2 if single else 1


def render_condition(value: Condition) -> str:
    """Python source for a condition."""
    if value.op in ("and", "or"):
        parts = [f"({arg})" if arg.op in ("and", "or") else str(arg) for arg in value.args]
        return f" {value.op} ".join(parts)
    if value.op == "not":
        return f"not ({value.args[0]})"
    if value.op == "float":
        return f"{render(value.args[1], 0)} {value.args[0]} {render(value.args[2], 0)}"
    left: Poly = {}
    right: Poly = {}
    for monomial, n in poly_of(value.args[0]).items():
        (left if n > 0 else right)[monomial] = abs(n)
    # Constants stand on the right.
    op = value.op
    if not [m for m in left if m]:
        left, right, op = right, left, ">=" if op == "<=" else op
    if () in left:
        accumulate(right, {(): left.pop(())}, -1)
    return f"{render_poly(left)[0]} {op} {render_poly(right)[0]}"
