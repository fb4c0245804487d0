"""Source: a frozen path from a frame's arguments to a value, rendered as text, bytecode or guard accessor."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from kiln.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """Base of all paths; `fetch` evaluates it against the bound arguments of a call."""

    def fetch(self, args: Sequence[Any]) -> Any:
        raise NotImplementedError

    def __str__(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Arg(Source):
    """The bound argument in slot `index`."""

    index: int
    name: str

    def fetch(self, args: Sequence[Any]) -> Any:
        return args[self.index]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, eq=False)
class Const(Source):
    """One object, pinned by identity and kept alive by whoever holds this path."""

    value: Any
    name: str = ""

    def fetch(self, args: Sequence[Any]) -> Any:
        return self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and other.value is self.value

    def __hash__(self) -> int:
        return hash((Const, id(self.value)))

    def __str__(self) -> str:
        known = self.name or getattr(self.value, "__qualname__", None)
        return known if known and isinstance(known, str) else type(self.value).__name__


@dataclass(frozen=True, slots=True)
class Step(Source):
    """A path that goes on from another one, `base`."""

    base: Source

    def of(self, value: Any) -> Any:
        """Where the last step leads from the value at `base`."""
        raise NotImplementedError

    def after(self, base: Source) -> Step:
        """The same step after another path."""
        names: tuple[str, ...] = self.__match_args__[1:]
        return type(self)(base, *[getattr(self, name) for name in names])

    def fetch(self, args: Sequence[Any]) -> Any:
        return self.of(self.base.fetch(args))


@dataclass(frozen=True, slots=True)
class Attr(Step):
    """`getattr(base, name)`, by the generic protocol (slots, getset descriptors, module attributes)."""

    name: str

    def of(self, value: Any) -> Any:
        return getattr(value, self.name)

    def __str__(self) -> str:
        return f"{self.base}.{self.name}"


@dataclass(frozen=True, slots=True)
class DictAttr(Step):
    """`base.__dict__[name]`: an attribute that lives in the instance dict."""

    name: str

    def of(self, value: Any) -> Any:
        return value.__dict__[self.name]

    def __str__(self) -> str:
        return f"{self.base}.{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Item(Step):
    """`base[key]` of an exact list, tuple or dict (or a subclass of dict); keys compare by type and value."""

    key: Any
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((Item, self.base, type(self.key), self.key)))

    def of(self, value: Any) -> Any:
        if isinstance(value, dict) and not dict.__contains__(value, self.key):
            raise KeyError(self.key)  # a class of its own may make what is missing
        return dict.__getitem__(value, self.key) if isinstance(value, dict) else value[self.key]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Item) or self._hash != other._hash or type(self.key) is not type(other.key):
            return False
        return (self.key is other.key or bool(self.key == other.key)) and self.base == other.base

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        # The text of a tensor is long, and a GPU gives it number by number.
        text = "" if hasattr(self.key, "data_ptr") else repr(self.key)
        return f"{self.base}[{text if 0 < len(text) <= 60 else type(self.key).__name__}]"


@dataclass(frozen=True, slots=True)
class CellContents(Step):
    """The contents of the cell `base`."""

    def of(self, value: Any) -> Any:
        return value.cell_contents

    def __str__(self) -> str:
        return f"{self.base}.cell_contents"


@dataclass(frozen=True, slots=True)
class ClosureCell(Step):
    """The cell `base.__closure__[index]` of a function."""

    index: int
    name: str

    def of(self, value: Any) -> Any:
        return value.__closure__[self.index]

    def __str__(self) -> str:
        return f"{self.base}.<cell {self.name}>"


@dataclass(frozen=True, slots=True)
class Global(Source):
    """The name in a globals dict, pinned by identity."""

    namespace: Const
    name: str

    def fetch(self, args: Sequence[Any]) -> Any:
        return self.namespace.value[self.name]

    def __str__(self) -> str:
        return self.name


def readable(text: str) -> str:
    """A path as one writes it: what a module holds is an attribute of it."""
    return HELD.sub(r".\1", text)


#: The dicts of a module, and a name in one.
HELD = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")


@dataclass(frozen=True, slots=True)
class Derived(Step):
    """What a pure function says of the value at `base`."""

    function: Callable[[Any], Any]
    name: str

    def of(self, value: Any) -> Any:
        return self.function(value)

    def __str__(self) -> str:
        return f"{self.base}.<{self.name}>"
