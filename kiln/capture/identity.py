"""Addresses of objects: what `id` gives during capture.

An address may be compared, hashed and used as a key, which is all that it means. Where it meets a number
that the program got elsewhere it is guarded. The number itself differs from call to call, so whatever else
would look at it breaks the graph.

Numbers that count what was made, as that of the next hook does, are keys, too: which keys of a dict one
equals is guarded, and not the number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kiln.base.errors import Break
from kiln.base.expressions import Expr
from kiln.base.source import Const, Derived
from kiln.capture import symbolic
from kiln.capture.purity import DICT_VIEWS
from kiln.capture.world import nested, rooted
from kiln.check.guards import Custom, Equals
from kiln.ops.fake import FakeTensor
from kiln.ops.symint import as_key, expr_of

if TYPE_CHECKING:
    from kiln.capture.frame import Machine


class _Refused:
    """A special method that breaks the graph; no function, so that nobody interprets or binds it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        why = "id() gives an address that differs from call to call"
        raise Break("identity", why, "compare objects with `is`")


class Address(int):
    """The address of an object that is alive during capture; residual code asks for it again.

    The number is that of the object itself, also where the program meets a copy of it or a fake.
    """

    owner: Any
    ask: Callable[[Any], int]

    def __new__(cls, owner: Any, ask: Callable[[Any], int], number: int) -> Address:
        self = int.__new__(cls, number)
        self.owner, self.ask = owner, ask
        return self


for _name in "add sub mul floordiv truediv mod divmod pow lshift rshift and or xor".split():
    setattr(Address, f"__{_name}__", _Refused())
    setattr(Address, f"__r{_name}__", _Refused())
for _name in "lt le gt ge neg pos abs invert index int float complex round trunc str repr format".split():
    setattr(Address, f"__{_name}__", _Refused())

#: So many keys are told apart from one that is sought; among more, it is the very object.
APART = 16
BY_IDENTITY: Any = object.__hash__
KEYED = (dict, set, frozenset)
SEARCHED = (*KEYED, list, tuple, deque)


def sought(m: Machine, container: Any, key: Any) -> Any:
    """The key that is looked for; what is found by an identity, or an address, depends on which it is."""
    by_address = type(key) is Address
    owner = key.owner if by_address else key
    if type(key) in symbolic.NUMERIC and isinstance(container, KEYED):
        return number_sought(m, container, key)
    known = by_address or type(owner).__hash__ is BY_IDENTITY
    source, kinds = m.source(owner) if known else None, SEARCHED if by_address else KEYED
    if source is None or isinstance(source, Const) or not isinstance(container, kinds):
        return key
    is_tensor, outside = isinstance(owner, FakeTensor), m.source(container) is not None
    if isinstance(owner, type) or is_tensor and not by_address:
        return key
    m.world.touch(container)
    # Which tensors are the same is guarded elsewhere.
    others = [] if is_tensor else [k.owner if by_address else k for k in container if type(k) is type(key)]
    ask, number, numbers = id, id(owner), frozenset[int]()
    if by_address:
        ask, number, numbers = key.ask, int.__pos__(key), frozenset(k for k in container if type(k) is int)
    elif outside:
        numbers = frozenset(map(id, others))
    if by_address and number in numbers:
        m.world.guard(Equals(Derived(source, ask, ask.__name__), number))
    elif number in numbers or len(others) > APART:
        m.world.identify(owner)
    else:
        for other in others:
            m.same(other, owner)
        if numbers:
            m.world.guard(Custom(source, lambda value: ask(value) not in numbers, "was another object"))
    return number if by_address and outside else key


def number_sought(m: Machine, container: Any, key: Any) -> Any:
    """The key of a container that a number equals, or the number: decided where one of both may vary."""
    varies = type(key) is torch.SymInt
    if not varies and not m.world.counted:
        return key
    m.world.touch(container)
    for other in container:
        if type(other) is torch.SymInt or varies and type(other) in symbolic.NUMERIC:
            if symbolic.compare("==", key, other):
                return other
    if varies:
        m.world.counted = True
        return as_key(key)
    return key


def counts(m: Machine, key: Any) -> bool:
    """Whether a key is a number that neither an argument nor a size has to do with."""
    if type(key) is not torch.SymInt:
        return False
    expr, reads = expr_of(key), m.world.varying.reads
    symbols = expr.symbols() if isinstance(expr, Expr) else ()
    return bool(symbols) and all(
        s in reads and reads[s].what == "value" and rooted(reads[s].source) for s in symbols
    )


def settle_keys(m: Machine, values: Iterable[Any]) -> None:
    """Numbers that are keys are what they are now for native code that puts keys together."""
    for value in nested(values) if m.world.counted else ():
        if isinstance(value, KEYED + DICT_VIEWS):
            symbolic.concrete(tuple(nested(value)))


def put(m: Machine, container: Any, keys: Sequence[Any]) -> Any:
    """The container, into which these keys are put one after the other."""
    for place, key in enumerate(keys):
        if type(key) in symbolic.NUMERIC:
            sought(m, container, key)
        elif type(key) is Address or type(key).__hash__ is BY_IDENTITY:
            sought(m, container, key)
            sought(m, {other for other in keys[:place] if type(other) is type(key)}, key)
    return container
