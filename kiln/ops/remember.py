"""Functions of sizes that remember their results, symbolic sizes included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

from kiln.base.symbols import Expr, eq

F = TypeVar("F", bound=Callable[..., Any])


def remembered(function: F) -> F:
    """`function`, which depends on its arguments alone, remembering what it gave.

    Symbolic sizes have no hash, so the way for them starts where the one for numbers fails. What it gives is
    kept in the scope of the symbols, which holds the conditions on which the result rests as well.
    """
    cached = lru_cache(8192)(function)

    @wraps(function)
    def recall(*args: Any) -> Any:
        try:
            return cached(*args)
        except TypeError:
            return by_expression(function, args)

    return recall  # type: ignore[return-value]


def by_expression(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What `function` gives for symbolic sizes."""
    scopes: list[Any] = []
    key = (function, _frozen(args, scopes))
    if not scopes:
        return function(*args)
    memo = scopes[0].memo
    if key not in memo:
        memo[key] = function(*args)
    return memo[key]


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sizes or strides are equal; a sure difference settles it before anything is asked."""
    if len(a) != len(b):
        return False
    open_questions = []
    for one, other in zip(a, b, strict=True):
        if type(one) is int and type(other) is int:
            if one != other:
                return False
        else:
            question = eq(_frozen(one, []), _frozen(other, []))
            if question is False:
                return False
            if question is not True:
                answer = question.scope.known(question)
                if answer is False:
                    return False
                if answer is None:
                    open_questions.append(question)
    return all(question.scope.decide(question) for question in open_questions)


def _frozen(value: Any, scopes: list[Any]) -> Any:
    """A hashable stand-in for sizes."""
    kind = type(value)
    if kind is torch.SymInt:
        expr = value.node.expr
        if isinstance(expr, Expr):
            scopes.append(expr.scope)
        return expr
    if kind is tuple or kind is torch.Size or kind is list:
        return tuple([_frozen(item, scopes) for item in value])
    return value
