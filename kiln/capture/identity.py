"""Addresses of objects: what `id` gives during capture.

An address may be compared, hashed and used as a key, which is all that it means; the number itself differs
from call to call, so whatever would look at it breaks the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kiln.base.errors import Break


class _Refused:
    """A special method that breaks the graph; no function, so that nobody interprets or binds it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        why = "id() gives an address that differs from call to call"
        raise Break("identity", why, "compare objects with `is`")


class Address(int):
    """The address of an object that is alive during capture; residual code asks for it again."""

    owner: Any
    ask: Callable[[Any], int]

    def __new__(cls, owner: Any, ask: Callable[[Any], int] = id) -> Address:
        self = int.__new__(cls, ask(owner))
        self.owner, self.ask = owner, ask
        return self


for _name in "add sub mul floordiv truediv mod divmod pow lshift rshift and or xor".split():
    setattr(Address, f"__{_name}__", _Refused())
    setattr(Address, f"__r{_name}__", _Refused())
for _name in "lt le gt ge neg pos abs invert index int float complex round trunc str repr format".split():
    setattr(Address, f"__{_name}__", _Refused())
