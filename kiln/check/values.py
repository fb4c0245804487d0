"""What guards need to know of values: sameness of constants, keys, class attributes, short texts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import torch

FEW = 8  # elements of a tensor that is printed


class _Missing:
    """The value of a name that no class of an MRO defines."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING: Final = _Missing()


def _same_float(a: float, b: float) -> bool:
    return a.hex() == b.hex()


def same(a: Any, b: Any) -> bool:
    """Whether a program could not tell two constants apart: exact types, signs of zeros and NaNs included."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return _same_float(a, b)
    if isinstance(a, complex):
        return _same_float(a.real, b.real) and _same_float(a.imag, b.imag)
    if isinstance(a, tuple):
        return tuple.__len__(a) == tuple.__len__(b) and all(map(same, tuple.__iter__(a), tuple.__iter__(b)))
    if isinstance(a, (slice, range)):
        return same(a.start, b.start) and same(a.stop, b.stop) and same(a.step, b.step)
    if isinstance(a, frozenset):
        return typed(a) == typed(b)
    return bool(a == b)


def alike(a: Any, b: Any) -> bool:
    """Whether two defaults of functions, or tables of them, hold the same constants and the same objects."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(alike, a, b))
    if type(a) is dict:
        return a.keys() == b.keys() and all(alike(value, b[key]) for key, value in a.items())
    return type(a) in NUMBERS_AND_TEXTS and same(a, b)


NUMBERS_AND_TEXTS = (int, float, complex, str, bytes)


def typed(elements: set[Any] | frozenset[Any]) -> set[tuple[type, Any]]:
    """The elements with their types, so that 1 and True differ."""
    return {(type(e), e) for e in elements}


def keys_of(mapping: dict[Any, Any]) -> Iterator[Any]:
    """The keys of a dict in its own order, whatever its subclass says."""
    return OrderedDict.__iter__(mapping) if isinstance(mapping, OrderedDict) else dict.__iter__(mapping)


def mro_lookup(cls: type, name: str) -> Any:
    """What the MRO of a class gives for a name, without binding; MISSING when nothing."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING


class Words(str):
    """A text that stands for a value."""

    def __repr__(self) -> str:
        return str(self)


def brief(value: Any, limit: int) -> Any:
    """What is printed of a value: no more elements than texts are shown of, and no tensor's numbers."""
    if type(value) in (list, tuple):
        return type(value)([brief(one, limit) for one in value[:limit]])
    if isinstance(value, dict):
        keys = islice(keys_of(value), limit)
        return {brief(key, limit): brief(dict.__getitem__(value, key), limit) for key in keys}
    if isinstance(value, torch.Tensor) and value.numel() > FEW:
        return Words(f"a tensor of shape {tuple(value.shape)}")
    return value


def show(value: Any, limit: int = 60) -> str:
    """A short text of a value for a recompile reason."""
    try:
        value = brief(value, limit // 3 + 1)
        text = f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else repr(value)
    except Exception:  # the program's own code
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def is_plain(value: Any) -> bool:
    """Whether C compares this constant as `same` does."""
    if isinstance(value, tuple):
        return all(map(is_plain, tuple.__iter__(value)))
    if isinstance(value, slice):
        return is_plain(value.start) and is_plain(value.stop) and is_plain(value.step)
    return not isinstance(value, (range, frozenset))
