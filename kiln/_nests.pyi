from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

def gathered(kind: type[T], *nests: Any) -> list[T]:
    """The objects of exactly this class in nests of tuples, lists, dicts and slices."""

def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The nest with `leaf` applied to all that is not a tuple, list, dict or slice."""

def replaced(kind: type[T], nest: Any, instead: dict[T, Any]) -> Any:
    """The nest with what a dict has for objects of exactly this class."""
