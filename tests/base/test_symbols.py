"""Symbolic integers: normal forms mean what was written, and what a scope answers holds wherever its check does."""

from __future__ import annotations

import copy
import itertools
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest

from kiln.base import symbols as s
from kiln.base.arithmetic import without_quotients
from kiln.base.expressions import from_poly
from kiln.base.symbols import LIMIT, Condition, Expr, Scope, Symbol, eq, ge, gt, le, lt, maximum, minimum, ne
from tests import scopes

Build = Callable[[list[Any]], Any]


def two(a: int = 8, b: int = 12, **options: Any) -> tuple[Scope, Symbol, Symbol]:
    scope = Scope()
    return scope, scope.symbol(a, "x.size(0)", **options), scope.symbol(b, "x.size(1)", **options)


# ---------------------------------------------------------------------------------------------- normal forms


def test_equal_expressions_are_one_object() -> None:
    _, a, b = two()
    assert (a + b) * 2 is 2 * b + 2 * a
    assert (a + 1) * (a - 1) is a * a - 1
    assert a - a == 0 and a * 0 == 0 and a // 1 is a and a % 1 == 0
    assert copy.deepcopy(a) is a and copy.copy(a + 1) is a + 1
    assert len({a + b, b + a, a * b}) == 2


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda a, b: a + 1, "s0 + 1"),
        (lambda a, b: -a - 3, "-s0 - 3"),
        (lambda a, b: a * b * 64, "64*s0*s1"),
        (lambda a, b: a * b * 768 // (a * 12), "64*s1"),
        (lambda a, b: a * b * 768 % (a * 12), "0"),
        (lambda a, b: (a * 64 + 64) // (a + 1), "64"),
        (lambda a, b: (a + b + 1) * 5 // (a + b + 1), "5"),
        (lambda a, b: (8 * a + b) // 8, "s0 + s1 // 8"),
        (lambda a, b: (9 * a + 17) % 8, "(s0 + 1) % 8"),
        (lambda a, b: (a - 1) // 2 + 1, "(s0 + 1) // 2"),
        (lambda a, b: -(-a // 2), "(s0 + 1) // 2"),
        (lambda a, b: (a // 2) // 3, "s0 // 6"),
        (lambda a, b: 4 * a // 6, "s0 - (s0 + 2) // 3"),
        (lambda a, b: a % 8 % 4, "s0 % 4"),
        (lambda a, b: (a - a % 8) // 8, "s0 // 8"),
        (lambda a, b: minimum(a, a + 1), "s0"),
        (lambda a, b: maximum(a, 2), "s0"),
        (lambda a, b: maximum(minimum(a, b), 3), "max(3, min(s0, s1))"),
        (lambda a, b: a / 2 + 1, "s0 / 2 + 1"),
        (lambda a, b: s.call("math.floor", (a + b) / 3), "math.floor((s0 + s1) / 3)"),
    ],
)
def test_text(build: Callable[..., Any], text: str) -> None:
    _, a, b = two()
    assert str(build(a, b)) == text


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda a, b: eq(a, b), "s0 == s1"),
        (lambda a, b: eq(b * 2, a * 2), "s0 == s1"),
        (lambda a, b: eq(a * b * 4, a * 12), "s1 == 3"),
        (lambda a, b: eq(2 * a, 7), "False"),
        (lambda a, b: ne(2 * a, 7), "True"),
        (lambda a, b: lt(2 * a, 7), "s0 <= 3"),
        (lambda a, b: gt(a, 7), "s0 >= 8"),
        (lambda a, b: ge(a * b, b), "s0 >= 1"),
        (lambda a, b: eq(a // 8 * 8, a), "s0 % 8 == 0"),
        (lambda a, b: ge((a + 3) // 4, 2), "s0 >= 5"),
        (lambda a, b: lt(a // 4, 2), "s0 <= 7"),
        (lambda a, b: s.negate(le(a, b)), "s1 <= s0 - 1"),
        (lambda a, b: s.any_of(eq(a, b), s.all_of(lt(a, 5), lt(b, 5))), "s0 == s1 or (s0 <= 4 and s1 <= 4)"),
        (lambda a, b: lt(a / 2, 1.5), "s0 / 2 < 1.5"),
    ],
)
def test_text_of_conditions(build: Callable[..., Any], text: str) -> None:
    _, a, b = two()
    found = build(a, b)
    assert str(found) == text
    assert not isinstance(found, Condition) or found.hint is found.evaluate({a: 8, b: 12})


def test_expressions_have_no_truth() -> None:
    _, a, b = two()
    for value in (a, lt(a, b)):
        with pytest.raises(TypeError, match="scope"):
            bool(value)
    with pytest.raises(ValueError, match="different scopes"):
        a + Scope().symbol(5)


# ------------------------------------------------------------------------------------------------- decisions


def test_a_size_is_neither_zero_nor_one() -> None:
    scope, a, b = two()
    assert not scope.decide(eq(a, 1)) and not scope.decide(eq(a, 0)) and scope.decide(gt(a * b, 3))
    assert scope.decide(ge(a - 1, 1)) and not scope.decide(eq(a * b + a, 1)) and scope.decide(eq(a * b, b * a))
    assert scope.records == []
    with pytest.raises(ValueError, match="not between 2"):
        scope.symbol(1, "y.size(0)")


def test_what_is_recorded_is_known() -> None:
    scope, a, b = two()
    scope.place = lambda: "model.py:3"
    assert scope.decide(le(a, 512)) and scope.decide(le(a, 512)) and scope.decide(lt(a, 600))
    assert [str(r) for r in scope.records] == ["s0 <= 512  # model.py:3"]
    assert not scope.decide(gt(a, 100))
    assert [str(c) for c in scope.conditions] == ["s0 <= 100"]
    assert scope.known(gt(a, 100)) is False and scope.known(gt(a, 99)) is None
    assert not scope.decide(eq(a, 2)) and scope.known(ge(a, 3))


def test_equal_symbols_become_one() -> None:
    scope, a, b = two(8, 8)
    assert scope.decide(eq(a, b))
    assert scope.known(eq(a * 3 + 1, b * 3 + 1)) and scope.known(le(a, b)) and scope.simplify(b - a) == 0
    assert scope.decide(le(b, 100)) and scope.known(le(a, 100))
    assert scopes.text(scope) == "s0 >= 2 and s1 >= 2 and s0 == s1 and s0 <= 100"


def test_ranges_pass_through_equalities() -> None:
    scope = Scope()
    a, b = scope.symbol(10), scope.symbol(21, low=10, high=50)
    assert scope.decide(eq(b, 2 * a + 1))
    assert scope.known(le(a, 24)) and scope.known(ge(a, 5)) and scope.known(le(a, 23)) is None


def test_remainders_pass_through_equalities() -> None:
    scope, a, b = two(64, 64)
    assert scope.decide(eq(b % 2, 0)) and scope.decide(eq(a, b))
    assert scope.known(eq(a // 2 * 2, a))


def test_multiples() -> None:
    scope, a, b = two()
    assert scope.decide(eq(a % 8, 0))
    assert scope.known(eq(a % 4, 0)) and scope.simplify(a // 8 * 8 * b + 1) is a * b + 1
    assert scope.known(eq(a // 8 * 8, a)) and scope.known(eq(b % 8, 0)) is None
    assert scopes.text(scope) == "s0 >= 2 and s1 >= 2 and s0 % 8 == 0"


def test_multiples_of_quotients() -> None:
    scope = Scope()
    n = scope.symbol(12, "n")
    assert scope.known(eq(2 * (n // 4), n // 2)) is None
    assert scope.decide(eq(n // 2 % 2, 0))
    assert scope.known(eq(2 * (n // 4), n // 2)) is True
    assert scope.known(eq(6 * (n // 8), 3 * (n // 4))) is None


def test_order_is_transitive_over_one_step() -> None:
    scope, a, b = two()
    c = scope.symbol(20)
    assert scope.decide(le(a, b)) and scope.decide(le(b, c))
    assert scope.known(le(a, c)) and scope.known(gt(a, c)) is False and scope.known(lt(a, c)) is None


def test_parts_of_sizes_are_no_larger() -> None:
    scope, a, b = two()
    assert scope.known(le(a // 2, a)) and scope.known(lt(a // 2, a)) and scope.known(eq(a // 2, 2 * a)) is False
    assert scope.known(le(minimum(a, b), b)) and scope.known(lt(maximum(a, b), a)) is False
    assert scope.known(le((a + 3) // 4 * 4, a + 3)) and scope.known(ge((a + 3) // 4 * 4, a))


def test_products_are_larger_than_their_parts() -> None:
    """The strides of what has borders: products of sums, of which nothing is to be recorded."""
    scope = Scope()
    a, b, c = (scope.symbol(n, "") for n in (4, 5, 6))
    assert scope.known(ne((a + 2) * (b + 2), b + 2)) is True
    assert scope.known(lt((b + 2) * (c + 2), a * (b + 2) * (c + 2))) is True
    assert scope.known(lt(a * b, a * c)) is None
    assert scope.known(lt((a - 2) * (b + 2), b)) is None


def test_specialise() -> None:
    scope, a, b = two()
    assert scope.decide(le(a, 100)) and scope.specialise(a * 2) == 16 and scope.simplify(a * b) is 8 * b
    assert scope.specialise(a + 1) == 9 and scope.specialise(3) == 3
    assert [str(c) for c in scope.conditions] == ["s0 == 8"]
    assert scopes.check(scope)(8, 3) and not scopes.check(scope)(9, 3) and str(scopes.failing(scope, [9, 3])) == "s0 == 8"
    assert scopes.failing(scope, [8, 3]) is None and str(scopes.failing(scope, [8, 1])) == "s1 >= 2"


def test_floats() -> None:
    scope = Scope()
    p, n = scope.symbol(0.5, "p"), scope.symbol(8)
    assert (p.name, n.name) == ("f0", "s1")
    assert str(p * n) == "f0 * s1" and (p * n).evaluate({p: 0.25, n: 12}) == 3.0
    assert scope.decide(lt(p, 1)) and scope.decide(lt(p, 1)) and not scope.decide(ge(p * 2, n))
    assert len(scope.records) == 2 and scopes.check(scope)(0.5, 8) and not scopes.check(scope)(1.5, 8)
    assert scope.specialise(p) == 0.5
    assert s.call("math.ceil", p * n).evaluate({p: 0.3, n: 4}) == 2
    assert eq(n + 1, n + 1.0) is True and str(n * 2.0 - 1) == "float(2*s1 - 1)" and str(lt(n + 0.0, 9)) == "s1 <= 8"


def test_division_by_zero_raises() -> None:
    _, a, _ = two()
    for divide in (operator.floordiv, operator.mod):
        with pytest.raises(ZeroDivisionError):
            divide(a, 0)


def test_any_int() -> None:
    scope = Scope()
    k = scope.symbol(-3, "k", low=-LIMIT)
    assert scopes.text(scope) == "True" and not scope.decide(ge(k, 0)) and scopes.text(scope) == "s0 <= -1"
    assert str(s.call("abs", k)) == "-s0" and (k // 2).evaluate({k: -5}) == -3  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------------------- properties

BINARY: list[Callable[[Any, Any], Any]] = [operator.add, operator.sub, operator.mul]
CONSTANTS = [1, 2, 3, 4, 6, 8, 12, -1, -2, -3]


def random_build(choose: random.Random, depth: int, count: int) -> Build:
    """A random program over `count` numbers; a divisor is a constant or the first number."""
    if depth == 0 or choose.random() < 0.15:
        if choose.random() < 0.3:
            constant = choose.choice(CONSTANTS)
            return lambda v: constant
        i = choose.randrange(count)
        return lambda v: v[i]
    left, right = random_build(choose, depth - 1, count), random_build(choose, depth - 1, count)
    kind = choose.random()
    if kind < 0.6:
        op = choose.choice(BINARY)
        return lambda v: op(left(v), right(v))
    if kind < 0.75:
        pick = choose.choice([(minimum, min), (maximum, max)])
        return lambda v: pick[isinstance(v, tuple)](left(v), right(v))  # type: ignore[operator]
    divide = choose.choice([operator.floordiv, operator.mod])
    if choose.random() < 0.7:
        constant = choose.choice(CONSTANTS)
        return lambda v: divide(left(v), constant)
    return lambda v: divide(left(v), v[0])


def symbolic(build: Build, symbols: list[Any]) -> Any:
    return build(symbols)


def plain(build: Build, values: tuple[int, ...]) -> Any:
    return build(values)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_expressions_mean_what_was_written(seed: int) -> None:
    choose = random.Random(seed)
    scope = Scope()
    names = [scope.symbol(choose.randint(2, 9)) for _ in range(3)]
    for _ in range(40):
        build = random_build(choose, 4, 3)
        expr = symbolic(build, names)
        for _ in range(12):
            values = tuple(choose.randint(2, 30) for _ in names)
            given = dict(zip(names, values, strict=True))
            expected = plain(build, values)
            assert (expr.evaluate(given) if isinstance(expr, Expr) else expr) == expected, (str(expr), given)
            if isinstance(expr, Expr):
                low, high = scope.bounds(expr)
                assert low <= expected <= high, (str(expr), given)


COMPARE: list[tuple[Callable[..., Any], Callable[..., bool]]] = [
    (eq, operator.eq), (ne, operator.ne), (lt, operator.lt), (le, operator.le), (gt, operator.gt), (ge, operator.ge),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_answers_hold_wherever_the_check_does(seed: int) -> None:
    choose = random.Random(seed)
    scope = Scope()
    hints = tuple(choose.choice([2, 4, 4, 8, 6]) for _ in range(3))
    lows = (1, choose.choice([2, 0]), choose.choice([2, -5]))
    names = [scope.symbol(h, low=low, high=choose.choice([None, 12])) for h, low in zip(hints, lows, strict=True)]
    asked = []
    for _ in range(12):
        depth = choose.choice([1, 1, 2, 3])
        left, right = random_build(choose, depth, 3), random_build(choose, choose.choice([0, 1, depth]), 3)
        compare, exact = choose.choice(COMPARE)
        question = compare(symbolic(left, names), symbolic(right, names))
        answer = scope.decide(question)
        assert answer is exact(plain(left, hints), plain(right, hints))
        asked.append((left, right, exact, answer))
    check = scopes.check(scope)
    assert check(*hints)
    for values in [tuple(choose.randint(-5, 14) for _ in names) for _ in range(400)]:
        if values[0] < 1 or not check(*values):
            assert scopes.failing(scope, values) is not None
            continue
        for left, right, exact, answer in asked:
            assert exact(plain(left, values), plain(right, values)) is answer, (values, scopes.text(scope))


@pytest.mark.parametrize("seed", range(10))
def test_simplified_expressions_keep_their_value(seed: int) -> None:
    choose = random.Random(1000 + seed)
    scope = Scope()
    hints = (4, 4, 8)
    names = [scope.symbol(h) for h in hints]
    a, b, c = names
    facts = [eq(a, b), eq(c, 2 * a), eq(c % 4, 0), eq(a % 2, 0), le(a, 9), ne(b, 6), eq(a // 2, b - 2)]
    for fact in choose.sample(facts, 3):
        assert scope.decide(fact)
    check = scopes.check(scope)
    for _ in range(20):
        expr = symbolic(random_build(choose, 3, 3), names)
        simple = scope.simplify(expr)
        for values in itertools.product(range(2, 14), repeat=3):
            if check(*values) and isinstance(expr, Expr):
                given = dict(zip(names, values, strict=True))
                found = simple.evaluate(given) if isinstance(simple, Expr) else simple
                assert found == expr.evaluate(given), (str(expr), str(simple), scopes.text(scope), values)


@pytest.mark.parametrize("turned", [False, True])
def test_a_quotient_and_a_remainder_say_the_number(turned):
    scope = Scope()
    n, m = scope.symbol(6), scope.symbol(3)
    facts = [eq(n // 2, m), eq(n % 2, 0)]
    for fact in facts[::-1] if turned else facts:
        assert scope.decide(fact)
    assert scope.known(eq(n, 2 * m)) and scope.simplify(n - 2 * m) == 0
    assert scope.decide(eq(m, 3)) and scope.simplify(n) == 6


def test_quotients_and_remainders_make_up_what_they_are_of() -> None:
    scope = Scope()
    i, k = scope.symbol(100), scope.symbol(5)
    for whole, parts in {
        i: i % 7 + 7 * (i // 7 % 7) + 49 * (i // 49),
        62 * k + i + 1: 62 * k + (i + 1) % 62 + 62 * ((i + 1) // 62),
        3 * i: 3 * (i % 5) + 15 * (i // 5),
    }.items():
        assert from_poly(scope, without_quotients(parts.poly)) is whole
    other = i % 7 + 8 * (i // 7)
    assert without_quotients(other.poly) == other.poly


def test_bounds_that_are_learnt_choose_between_numbers() -> None:
    scope = Scope()
    n = scope.symbol(5, low=-LIMIT)
    most = maximum(1, n)
    assert isinstance(most, Expr) and scope.simplify(most) is most and scope.known(eq(n, most)) is None
    scope.learn(ge(n, 2))
    assert scope.simplify(most) is n and scope.known(eq(n, most)) and scope.known(lt(n, most)) is False
