"""What the answers of a scope amount to: its ranges and conditions, as text and as a function of values."""

from kiln.base.conditions import zero
from kiln.base.expressions import Condition, function_of
from kiln.base.symbols import LIMIT, Record


def limits(scope):
    """The ranges of the symbols as conditions, as far as they are narrower than those of all ints."""
    found = []
    for symbol in scope.symbols:
        if not symbol.real:
            if symbol.low > -LIMIT:
                found.append(zero("<=", symbol.low - symbol))
            if symbol.high < LIMIT:
                found.append(zero("<=", symbol - symbol.high))
    return [limit for limit in found if isinstance(limit, Condition)]


def text(scope):
    """What `check` computes, as Python source over the symbols' names."""
    parts = [f"({c})" if c.op in ("or", "not") else str(c) for c in [*limits(scope), *scope.conditions]]
    return " and ".join(parts) or "True"


def check(scope):
    """A function of the values of all symbols, in order, that says whether the scope's answers hold."""
    return function_of(scope.symbols, text(scope))


def failing(scope, values):
    """The first range or recorded condition that these values of the symbols break."""
    given = dict(zip(scope.symbols, values, strict=True))
    for record in [*[Record(limit, None) for limit in limits(scope)], *scope.records]:
        if not record.condition.evaluate(given):
            return record
    return None
