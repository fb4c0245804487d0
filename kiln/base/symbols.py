"""Symbolic integers: a `Scope` owns the symbols of one capture and decides conditions about them.

scope = Scope(place=lambda: "model.py:12")     # place: asked for when a condition is recorded
n = scope.symbol(5, "x.size(0)")               # a size: hint 5, at least 2 unless `low` says otherwise
k = scope.symbol(3, "k", low=-LIMIT)           # any int;  scope.symbol(0.5, "p") is a float

(n + 1) * 64 // 2, minimum(n, 3), total([n, 1])     # expressions; constants are plain ints
eq(n, k), lt(n, 8), negate(…), all_of(…), any_of(…) # conditions, or a bool where no symbol matters

scope.decide(lt(n, 8))      # -> bool: from what is known, else by the hints, and then recorded
scope.known(lt(n, 8))       # -> bool | None: from what is known, nothing is recorded
scope.specialise(n * 2)     # -> 10, recorded as n == 5
scope.simplify(expr)        # the expression under what was recorded: an int once it is determined
scope.shorter(expr)         # the same unless it takes other symbols
scope.records               # (condition, where) in order;  scope.conditions: without the superfluous
expr.evaluate({n: 7, k: 3}), str(expr)              # a value; Python source over the symbols' names
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

from kiln.base.arithmetic import (
    add,
    call,
    extreme,
    floordiv,
    infix,
    maximum,
    minimum,
    mod,
    mul,
    sub,
    total,
    truediv,
    without_quotients,
)
from kiln.base.conditions import all_of, any_of, eq, ge, gt, le, lt, ne, negate, zero
from kiln.base.dataclass import dataclass
from kiln.base.errors import Break
from kiln.base.expressions import (
    FLOORDIV,
    MAX,
    MIN,
    MOD,
    SUM,
    SYMBOL,
    Condition,
    Expr,
    Monomial,
    Symbol,
    Truth,
    Value,
    from_poly,
)
from kiln.base.ranges import LIMIT, RANGES, relaxed

__all__ = [
    "LIMIT", "Condition", "Expr", "Record", "Scope", "Symbol", "Truth", "Value", "all_of", "any_of", "call",
    "eq", "ge", "gt", "infix", "le", "lt", "maximum", "minimum", "ne", "negate", "total", "truediv",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """A condition on which the captured program depends, and where it was asked."""

    condition: Condition
    where: Any

    def __str__(self) -> str:
        return f"{self.condition}" + (f"  # {self.where}" if self.where else "")


class Scope:
    """The symbols of one capture and what is known of them; the one owner of its expressions."""

    def __init__(self, place: Callable[[], Any] | None = None) -> None:
        self.symbols: list[Symbol] = []
        #: Those of which no more is known than their type, each with what is raised where a value is needed:
        #: what the graph reads from tensors, or is drawn. Their hints mean nothing.
        self.open: dict[Symbol, Exception | None] = {}
        #: What may be taken for granted of those, as the graph checks it: the answer that follows, or None.
        self.assume: Callable[[Condition], bool | None] | None = None
        self.records: list[Record] = []
        self.place = place
        #: Interned expressions, and the results of operations on them.
        self.table: dict[Any, Any] = {}
        self.memo: dict[Any, Any] = {}
        self._orders = 0
        #: Counts what was learnt; what is remembered of an expression holds for one version.
        self._version = 0
        self._answers: dict[Condition, bool | None] = {}
        #: Sums without a constant, in lowest terms: the most that they can be.
        self._most: dict[Expr, int] = {}
        #: Symbols and other parts that equal something simpler.
        self._solved: dict[Expr, Value] = {}
        #: Conditions that hold, of the kinds that say nothing about ranges.
        self._facts: set[Condition] = set()

    @property
    def settles(self) -> bool:
        """Whether what was learnt makes some expressions simpler."""
        return bool(self._solved)

    def __deepcopy__(self, memo: Any) -> Scope:
        return self

    def knowledge(self) -> str:
        """All that is known of the symbols, as text that differs where it does."""
        facts = [*map(str, self.records), *map(str, self._facts)]
        facts += [f"{value} <= {most}" for value, most in self._most.items()]
        facts += [f"{value} = {simpler}" for value, simpler in self._solved.items()]
        return "; ".join(sorted(facts))

    def next_order(self) -> int:
        """A number for a new expression, larger than all before."""
        self._orders += 1
        return self._orders

    def symbol(
        self,
        hint: int | float,
        source: Any = "",
        low: int | None = None,
        high: int | None = None,
        name: str | None = None,
    ) -> Symbol:
        """A new symbol that is `hint` now; an int lies between `low` (2 if not given) and `high`."""
        if type(hint) is float:
            low, high = -LIMIT, LIMIT
        low, high = 2 if low is None else low, LIMIT if high is None else high
        if type(hint) is int and not low <= hint <= high:
            raise ValueError(f"{source or 'the symbol'} is {hint}, which is not between {low} and {high}")
        made = Symbol(
            self, name or f"{'f' if type(hint) is float else 's'}{len(self.symbols)}", hint, source, low, high
        )
        self.symbols.append(made)
        return made

    # ------------------------------------------------------------------------------------------- decisions

    def decide(self, question: Truth) -> bool:
        """Whether `question` holds: from what is known, else by the hints, and then that is recorded."""
        answer = self.known(question)
        if answer is None:
            assert isinstance(question, Condition)
            if self.is_open(question):
                answer = None if self.assume is None else self.assume(question)
                if answer is not None:
                    return answer
                names = ", ".join(sorted(symbol.name for symbol in self.open.keys() & question.symbols()))
                why = f"the program asks whether {question}, with {names} the item of a tensor"
                hint = "say it before with torch._check, or keep it a tensor"
                raise self._needed(question) or Break("data-dependent", why, hint)
            answer = question.hint
            holds = self._simple_condition(question)
            fact = self._narrowed(holds if answer else negate(holds))
            self.records.append(Record(fact, None if self.place is None else self.place()))
            self.learn(fact)
        return answer

    def is_open(self, question: Condition | Expr) -> bool:
        """Whether numbers are in question that only a graph will have."""
        return bool(self.open) and not self.open.keys().isdisjoint(question.symbols())

    def _needed(self, question: Condition | Expr) -> Exception | None:
        """What the maker of an open symbol wants to be raised where a question needs its value."""
        return next(filter(None, map(self.open.get, question.symbols())), None)

    def _narrowed(self, fact: Truth) -> Condition:
        """A fact as it is recorded: another value than an end of the range means a narrower range."""
        assert isinstance(fact, Condition)
        if fact.op == "!=":
            low, high = self.bounds(fact.args[0])
            if low == 0 or high == 0:
                narrower = zero("<", fact.args[0] if high == 0 else mul(-1, fact.args[0]))
                if isinstance(narrower, Condition):
                    return narrower
        return fact

    def specialise(self, value: Value) -> Any:
        """The number that `value` is now, which is recorded."""
        if not isinstance(value, Expr):
            return value
        if not value.real:
            simple = self.simplify(value)
            if not isinstance(simple, Expr):
                return simple
        if self.is_open(value):
            why = f"the program needs the value of {value}, the item of a tensor"
            hint = "keep it a tensor, or move it out of the compiled function"
            raise self._needed(value) or Break("data-dependent", why, hint)
        # Zeros of both signs are equal: what a float that is zero follows from tells them apart.
        zero = value.real and value.hint == 0
        for known in sorted(value.symbols(), key=lambda s: s.order) if zero else (value,):
            self.decide(eq(known, known.hint))
        return value.hint

    def known(self, question: Truth) -> bool | None:
        """Whether `question` holds as far as what is known says it."""
        if not isinstance(question, Condition):
            return bool(question)
        if question in self._answers:
            return self._answers[question]
        simple = self._simple_condition(question)
        answer = self._known(simple) if isinstance(simple, Condition) else bool(simple)
        self._answers[question] = answer
        return answer

    def _known(self, question: Condition) -> bool | None:
        op, args = question.op, question.args
        if op == "!=":
            same = self.known(negate(question))
            return None if same is None else not same
        if op == "==":
            low, high = self.bounds(args[0])
            if low == high == 0:
                return True
            differs = self._surely(add(args[0], 1)) or self._surely(sub(1, args[0]))
            return False if differs or negate(question) in self._facts else None
        if op == "<=":
            return True if self._surely(args[0]) else False if self._surely(sub(1, args[0])) else None
        if op in ("and", "or"):
            answers = [self.known(arg) for arg in args]
            decisive = op == "or"
            if decisive in answers:
                return decisive
            return None if None in answers else not decisive
        if question in self._facts:
            return True
        return False if negate(question) in self._facts else None

    def _surely(self, value: Value, depth: int = 2) -> bool:
        """Whether `value` is at most zero, as far as ranges and facts show it."""
        if self.bounds(value)[1] <= 0:
            return True
        if not isinstance(value, Expr):
            return False
        for form, most in self._most.items():
            if form.poly.keys().isdisjoint(value.poly):
                continue  # the rest would be longer
            rest = sub(value, form)
            if not isinstance(rest, Expr) or len(rest.poly) <= len(value.poly):
                if self.bounds(rest)[1] + most <= 0:
                    return True
        return depth > 0 and any(self._surely(larger, depth - 1) for larger in relaxed(value))

    # ----------------------------------------------------------------------------------------------- facts

    def learn(self, fact: Truth) -> None:
        """Take `fact` as true, without recording it."""
        if not isinstance(fact, Condition):
            return
        self._version += 1
        self._answers.clear()
        if fact.op == "and":
            for part in fact.args:
                self.learn(part)
        elif fact.op == "==":
            self._solve(fact.args[0])
        elif fact.op == "<=":
            self._limit(fact.args[0])
        else:
            self._facts.add(fact)

    def _limit(self, value: Value) -> None:
        """Note that `value` is at most zero."""
        form, factor, constant = self._form(value)
        if form is None:
            return
        limit, most = -constant // factor, self._most.get(form)
        if most is None or limit < most:
            self._most[form] = limit
            self._version += 1
            low, high = self.bounds(form)
            if low == high:
                self._solve(sub(form, low))

    def _form(self, value: Value) -> tuple[Expr | None, int, int]:
        """What varies in `value` in lowest terms, its factor, and the constant."""
        if not isinstance(value, Expr):
            return None, 1, value  # type: ignore[return-value]
        if value.op is not SUM:
            return value, 1, 0
        constant = value.poly.get((), 0)
        factor = math.gcd(*[n for m, n in value.poly.items() if m])
        if not constant and factor == 1:
            return value, 1, 0
        form = from_poly(self, {m: n // factor for m, n in value.poly.items() if m})
        return form if isinstance(form, Expr) else None, factor, constant

    def _solve(self, value: Value) -> None:
        """Note that `value` is zero: one part of it is now a name for the rest."""
        value = self.simplify(value)
        if not isinstance(value, Expr):
            return
        self._version += 1
        chosen = _unknown(value)
        if chosen is None:
            self._limit(value)
            self._limit(mul(-1, value))
            return
        factor = value.poly[chosen,]
        answer = mul(-factor, sub(value, mul(factor, chosen)))
        low, high = self.bounds(chosen)
        self._solved[chosen] = answer
        for part, other in self._solved.items():
            self._solved[part] = self.simplify(other)
        # What was known of the part is now known of what it equals.
        limits, self._most = self._most, {}
        self._version += 1
        for form, most in limits.items():
            self._limit(sub(self.simplify(form), most))
        self._limit(sub(low, answer))
        self._limit(sub(answer, high))
        if chosen.op is FLOORDIV and type(chosen.args[1]) is int:
            # a // b == c means that a lies in the b numbers from b * c on.
            a, b = chosen.args
            self._limit(sub(mul(answer, b), a))
            self._limit(sub(a, add(mul(answer, b), b - 1)))
        self._recompose(chosen)
        for part, other in list(self._solved.items()):
            args = [self.simplify(arg) for arg in part.args] if part.op is not SYMBOL else []
            if any(new is not old for new, old in zip(args, part.args, strict=False)):
                self._solve(sub(apply(part.op, args, self), other))
        facts, self._facts = self._facts, set()
        for fact in facts:
            self.learn(self._simple_condition(fact))
        self._version += 1
        self._answers.clear()

    def _recompose(self, part: Expr) -> None:
        """Where the quotient and the remainder of a number are known, so is the number."""
        if part.op not in (FLOORDIV, MOD):
            return
        a, b = part.args
        known = {p.op: answer for p, answer in self._solved.items() if p.args == part.args}
        if type(b) is int and FLOORDIV in known and MOD in known:
            self._solve(sub(a, add(mul(known[FLOORDIV], b), known[MOD])))

    def simplify(self, value: Value) -> Value:
        """`value` with what was learnt put in: an int once it is determined."""
        if not isinstance(value, Expr) or not self._solved and not self._most:
            return value
        if value.simple is not None and value.simple[0] == self._version:
            return value.simple[1]  # type: ignore[no-any-return]
        out = self._rebuilt(value)
        value.simple = (self._version, out)
        return out

    def _rebuilt(self, value: Expr) -> Value:
        if value.op is SUM:
            out = _with_parts(value, self.simplify)
            return from_poly(self, without_quotients(out.poly)) if isinstance(out, Expr) else out
        if value in self._solved:
            return self._solved[value]
        args = [self.simplify(arg) for arg in value.args]
        if value.op is MOD and self._divides(value):
            return 0
        same = all(new is old for new, old in zip(args, value.args, strict=True))
        if same and value.op not in (MIN, MAX):  # of which bounds may know one by now
            return value
        changed = apply(value.op, args, self)
        return self.simplify(changed) if changed is not value else changed

    def determined(self, value: Value) -> Value:
        """`value` with a number, or the one name, for symbols that are known to be that; other ones stay."""
        if not isinstance(value, Expr) or not self._solved:
            return value
        if value.op is SYMBOL:
            known = self.simplify(value)
            return value if isinstance(known, Expr) and known.op is not SYMBOL else known
        if value.op is SUM:
            return _with_parts(value, self.determined)
        args = [self.determined(arg) for arg in value.args]
        same = all(new is old for new, old in zip(args, value.args, strict=True))
        return value if same else apply(value.op, args, self)

    def shorter(self, value: Value) -> Value:
        """`value` with what was learnt put in as far as that has no symbol which `value` has not."""
        simple = self.simplify(value)
        if simple is value or not isinstance(simple, Expr):
            return simple
        assert isinstance(value, Expr)
        return simple if simple.symbols() <= value.symbols() else value

    def _divides(self, remainder: Expr) -> bool:
        """Whether a remainder is zero because it is for a multiple of its divisor."""
        a, b = remainder.args
        return type(b) is int and any(
            part.op is MOD and part.args[0] is a and type(part.args[1]) is int and part.args[1] % b == 0
            for part, answer in self._solved.items()
            if answer == 0
        )

    def _simple_condition(self, question: Condition) -> Truth:
        if not self._solved and not self._most:
            return question
        if question.op in ("==", "!=", "<="):
            simple = self.simplify(question.args[0])
            return question if simple is question.args[0] else zero(question.op, simple)
        if question.op in ("and", "or"):
            parts = [self._simple_condition(arg) for arg in question.args]
            return (all_of if question.op == "and" else any_of)(*parts)
        return question

    # ---------------------------------------------------------------------------------------------- ranges

    def bounds(self, value: Value) -> tuple[int, int]:
        """The least and the largest value that an integer can have as far as is known."""
        if not isinstance(value, Expr):
            return value, value  # type: ignore[return-value]
        if value.range is not None and value.range[0] == self._version:
            return value.range[1:]
        low, high = RANGES[value.op](self, value) if value.op in RANGES else (-LIMIT, LIMIT)
        if self._most:
            form, factor, constant = self._form(value)
            if form is not None:
                if form in self._most:
                    high = min(high, factor * self._most[form] + constant)
                mirrored = mul(-1, form)
                if mirrored in self._most:
                    low = max(low, constant - factor * self._most[mirrored])  # type: ignore[index]
        value.range = (self._version, low, high)
        return low, high

    # ---------------------------------------------------------------------------------------------- results

    @property
    def conditions(self) -> list[Condition]:
        """The recorded conditions without those that later ones made superfluous."""
        pinned: dict[Symbol, int | float] = {}
        tightest: dict[Expr, int] = {}
        for record in self.records:
            op, args = record.condition.op, record.condition.args
            if op == "==":
                form, factor, constant = self._form(args[0])
                if isinstance(form, Symbol):
                    pinned[form] = -constant // factor
            elif op == "<=":
                form, _, constant = self._form(args[0])
                if form is not None:
                    tightest[form] = max(constant, tightest.get(form, constant))
        kept = []
        for record in self.records:
            found = record.condition
            if found.op == "<=" and tightest[self._form(found.args[0])[0]] > self._form(found.args[0])[2]:  # type: ignore[index]
                continue
            pins = found.op == "==" and isinstance(self._form(found.args[0])[0], Symbol)
            if pins or not (found.symbols() <= pinned.keys() and found.evaluate(pinned)):
                kept.append(found)
        return kept


def apply(op: str, args: list[Any], scope: Scope) -> Value:
    """The expression of an operator on other operands."""
    if op is FLOORDIV:
        return floordiv(*args)
    if op is MOD:
        return mod(*args)
    if op is MIN or op is MAX:
        return reduce(partial(extreme, op), args)  # type: ignore[no-any-return]
    if len(args) == 2 and op != "round":
        return infix(op, *args)
    return call(op, *args)


def _unknown(value: Expr) -> Expr | None:
    """A part that stands in a sum once, with the factor 1 or -1: the youngest symbol, else another part."""
    found: list[Expr] = []
    for monomial, n in value.poly.items():
        if len(monomial) == 1 and n in (1, -1):
            part = monomial[0]
            if not any(part in _parts(m) for m in value.poly if m is not monomial):
                found.append(part)
    return max(found, key=lambda part: (part.op is SYMBOL, part.order), default=None)


def _parts(monomial: Monomial) -> set[Expr]:
    """Everything that a product is made of."""
    found: set[Expr] = set()
    work: list[Any] = list(monomial)
    while work:
        part = work.pop()
        if isinstance(part, Expr) and part not in found:
            found.add(part)
            work += [p for m in part.poly for p in m] if part.op is SUM else part.args
    return found


def _with_parts(value: Expr, change: Callable[[Any], Value]) -> Value:
    """A sum of products with each factor changed."""
    parts: list[Value] = []
    for monomial, n in value.poly.items():
        product: Value = n
        for part in monomial:
            product = mul(product, change(part))
        parts.append(product)
    return total(parts)
