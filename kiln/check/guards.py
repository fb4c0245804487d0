"""Guard kinds that need no torch: each is a frozen predicate on a Source, and `holds` is its meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from types import CodeType, FunctionType
from typing import Any, ClassVar, Protocol

from kiln import _hook
from kiln.base.dataclass import dataclass
from kiln.base.source import Const, Source, readable
from kiln.check.values import MISSING as MISSING
from kiln.check.values import alike, is_plain, keys_of, mro_lookup, same, show, typed


class Paths(Protocol):
    """The tree under construction: numbers the nodes that guards hang on."""

    def node(self, source: Source) -> int: ...

    def instance_dict(self, base: Source) -> int: ...


def sentence(guard: Guard) -> str:
    """What must hold, in a line: "x is a float32 tensor of shape (8, 64) on cpu"."""
    return readable(" ".join(str(guard).split()))


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """A predicate on the bound arguments of a call; a value that cannot be fetched fails it."""

    source: Source

    def __str__(self) -> str:
        """What must hold, for a person."""
        raise NotImplementedError

    def nodes(self, paths: Paths) -> tuple[int, ...]:
        """The nodes whose values the check reads."""
        return (paths.node(self.source),)

    check: ClassVar[int] = _hook.CHECK_TEST
    """The kind of the check in C; another than a call of `test` takes the guard's one fact."""

    patience: ClassVar[int] = 1
    """How many entries must fail by it before what it is about is taken to vary."""

    def about(self) -> str:
        """What it is about, by name."""
        return str(self.source)

    def emit(self) -> tuple[int, Any]:
        """The kind and the operand of the check in C."""
        return self.check, self.test if self.check == _hook.CHECK_TEST else self._facts()[0]

    def fetch(self, argv: Sequence[Any]) -> Any:
        """What is tested, of the arguments of a call."""
        return self.source.fetch(argv)

    def test(self, value: Any) -> bool:
        """Whether what was fetched passes."""
        raise NotImplementedError

    def describe(self, value: Any) -> str:
        """What was expected and what came, without the name of the value."""
        raise NotImplementedError

    def key(self) -> object:
        """Guards with equal keys are the same guard."""
        return type(self), self.source, *self._facts()

    def at(self, source: Source) -> Guard:
        """The same predicate on the value at another path."""
        return type(self)(source, *self._facts())

    def _facts(self) -> list[Any]:
        names: tuple[str, ...] = self.__match_args__[1:]
        return [getattr(self, name) for name in names]

    def holds(self, argv: Sequence[Any]) -> bool:
        try:
            return self.test(self.fetch(argv))
        except Exception:
            return False

    def why(self, argv: Sequence[Any]) -> str:
        try:
            return f"{self.source}{self.describe(self.source.fetch(argv))}"
        except Exception as error:
            return f"{self.source} can no longer be read ({type(error).__name__}: {error})"


@dataclass(frozen=True, slots=True, eq=False)
class TypeIs(Guard):
    """The value's exact type."""

    check = _hook.CHECK_TYPE
    type: type

    def __str__(self) -> str:
        home = "" if self.type.__module__ in ("builtins", "__main__") else f"{self.type.__module__}."
        return f"{self.source} is of type {home}{self.type.__qualname__}"

    def test(self, value: Any) -> bool:
        return type(value) is self.type

    def describe(self, value: Any) -> str:
        return f" was of type {show(self.type)}, now {show(type(value))}"

    def key(self) -> object:
        return TypeIs, self.source, id(self.type)


@dataclass(frozen=True, slots=True, eq=False)
class Is(Guard):
    """The value's identity."""

    check = _hook.CHECK_IS
    value: Any

    def __str__(self) -> str:
        name = getattr(self.value, "__qualname__", None) or getattr(self.value, "__name__", None)
        if isinstance(name, str):
            return f"{self.source} is {name}"
        if self.value is None or isinstance(self.value, (bool, int, float, str)):
            return f"{self.source} is {show(self.value)}"
        return f"{self.source} is the same {type(self.value).__name__} as before"

    def test(self, value: Any) -> bool:
        return value is self.value

    def describe(self, value: Any) -> str:
        if show(value) == show(self.value):
            return f" was {show(self.value)}, now another object that prints alike"
        return f" was {show(self.value)}, now {show(value)}"

    def key(self) -> object:
        return Is, self.source, id(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class Equals(Guard):
    """The value of an immutable constant, in the sense of `same`."""

    value: Any

    def __str__(self) -> str:
        return f"{self.source} is {show(self.value)}"

    def test(self, value: Any) -> bool:
        return same(value, self.value)

    def describe(self, value: Any) -> str:
        kind = "" if type(value) is type(self.value) else f" ({type(value).__name__})"
        return f" was {show(self.value)}, now {show(value)}{kind}"

    def emit(self) -> tuple[int, Any]:
        return (_hook.CHECK_EQUALS, self.value) if is_plain(self.value) else (_hook.CHECK_CONSTANT, self.test)

    def key(self) -> object:
        return Equals, self.source, type(self.value), repr(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class Length(Guard):
    """The length of a container."""

    check = _hook.CHECK_LENGTH
    n: int

    def __str__(self) -> str:
        if not self.n:
            return f"{self.source} is empty"
        return f"{self.source} has {self.n} element{'s' * (self.n > 1)}"

    def test(self, value: Any) -> bool:
        return len(value) == self.n

    def describe(self, value: Any) -> str:
        now = str(len(value)) if hasattr(value, "__len__") else f"a {type(value).__name__}"
        return f" had length {self.n}, now {now}"


@dataclass(frozen=True, slots=True, eq=False)
class Keys(Guard):
    """The keys of a dict, in order."""

    keys: tuple[Any, ...]

    def __str__(self) -> str:
        keys = ", ".join(map(show, self.keys))
        return f"{self.source} has the keys {keys}, in this order" if keys else f"{self.source} is empty"

    def test(self, value: Any) -> bool:
        return isinstance(value, dict) and same(tuple(keys_of(value)), self.keys)

    def describe(self, value: Any) -> str:
        now = show(list(keys_of(value))) if isinstance(value, dict) else f"a {type(value).__name__}"
        return f" had keys {show(list(self.keys))}, now {now}"

    def emit(self) -> tuple[int, Any]:
        return (_hook.CHECK_KEYS, self.keys) if is_plain(self.keys) else (_hook.CHECK_TEST, self.test)

    def key(self) -> object:
        return Keys, self.source, tuple((type(k), k) for k in self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class Contains(Guard):
    """Whether a dict or set has a key."""

    item: Any
    present: bool

    def __str__(self) -> str:
        return f"{self.source} {'has' if self.present else 'lacks'} {show(self.item)}"

    def test(self, value: Any) -> bool:
        kind = next((kind for kind in (dict, set, frozenset) if isinstance(value, kind)), None)
        return kind is not None and kind.__contains__(value, self.item) is self.present

    def describe(self, value: Any) -> str:
        if not isinstance(value, (dict, set, frozenset)):
            return f" was a dict or set, now a {type(value).__name__}"
        was, now = ("had", "lacks") if self.present else ("lacked", "has")
        return f" {was} {show(self.item)}, now it {now} it"

    def emit(self) -> tuple[int, Any]:
        return _hook.CHECK_HAS if self.present else _hook.CHECK_LACKS, self.item

    def key(self) -> object:
        return Contains, self.source, type(self.item), self.item, self.present


@dataclass(frozen=True, slots=True, eq=False)
class Absent(Guard):
    """The instance dict of an object lacks a name; an object without a dict lacks every name."""

    check = _hook.CHECK_ABSENT
    name: str

    def __str__(self) -> str:
        return f"{self.source} has no attribute {self.name} of its own"

    def test(self, value: Any) -> bool:
        return self.name not in getattr(value, "__dict__", ())

    def describe(self, value: Any) -> str:
        return f" had no attribute {self.name!r} of its own, now {show(value.__dict__[self.name])}"

    def nodes(self, paths: Paths) -> tuple[int, ...]:
        return (paths.instance_dict(self.source),)


@dataclass(frozen=True, slots=True, eq=False)
class SetEquals(Guard):
    """The elements of a set or frozenset, by type and value."""

    elements: frozenset[Any]

    def __str__(self) -> str:
        return f"{self.source} is {show(set(self.elements))}"

    def test(self, value: Any) -> bool:
        return isinstance(value, (set, frozenset)) and typed(value) == typed(self.elements)

    def describe(self, value: Any) -> str:
        return f" was {show(set(self.elements))}, now {show(value)}"

    def key(self) -> object:
        return SetEquals, self.source, frozenset(typed(self.elements))


@dataclass(frozen=True, slots=True, eq=False)
class FunctionState(Guard):
    """The code of a function, by identity, and defaults and keyword defaults that are alike."""

    code: CodeType
    defaults: Any
    kwdefaults: Any

    @classmethod
    def of(cls, source: Source, function: FunctionType) -> FunctionState:
        """The state that a function has now: the dict of its keyword defaults may change in place."""
        named = function.__kwdefaults__
        return cls(source, function.__code__, function.__defaults__, None if named is None else dict(named))

    def __str__(self) -> str:
        return f"{self.source} has the code and the defaults it had"

    def test(self, value: Any) -> bool:
        return (
            value.__code__ is self.code
            and alike(value.__defaults__, self.defaults)
            and alike(value.__kwdefaults__, self.kwdefaults)
        )

    def describe(self, value: Any) -> str:
        if getattr(value, "__code__", None) is not self.code:
            return f" ran {self.code.co_name} (line {self.code.co_firstlineno}), now another function"
        if not alike(value.__defaults__, self.defaults):
            return f" had defaults {show(self.defaults)}, now {show(value.__defaults__)}"
        return f" had keyword defaults {show(self.kwdefaults)}, now {show(value.__kwdefaults__)}"

    def emit(self) -> tuple[int, Any]:
        return _hook.CHECK_FUNCTION, (self.code, self.defaults, self.kwdefaults)

    def key(self) -> object:
        named = None if self.kwdefaults is None else tuple([(k, id(v)) for k, v in self.kwdefaults.items()])
        return FunctionState, self.source, id(self.code), id(self.defaults), named


@dataclass(frozen=True, slots=True, eq=False)
class ClassAttr(Guard):
    """MRO lookup of a name on a class gives this very object, or MISSING."""

    source: Source = field(init=False)
    cls: type
    name: str
    value: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", Const(self.cls))

    def __str__(self) -> str:
        if self.value is MISSING:
            return f"{self.source} has no attribute {self.name}"
        return f"{self.source}.{self.name} is as the class defines it"

    def test(self, value: Any) -> bool:
        return mro_lookup(value, self.name) is self.value

    def describe(self, value: Any) -> str:
        return f".{self.name} was {show(self.value)}, now {show(mro_lookup(value, self.name))}"

    def nodes(self, paths: Paths) -> tuple[int, ...]:
        return ()

    def emit(self) -> tuple[int, Any]:
        value = () if self.value is MISSING else (self.value,)
        return _hook.CHECK_CLASS, (self.cls, self.name, *value)

    def key(self) -> object:
        return ClassAttr, id(self.cls), self.name, id(self.value)


class Relation(Guard):
    """A predicate on the identities of several values."""

    __slots__ = ("sources",)
    sources: tuple[Source, ...]

    def __init__(self, *sources: Source) -> None:
        Guard.__init__(self, sources[0])
        object.__setattr__(self, "sources", sources)

    def fetch(self, argv: Sequence[Any]) -> list[Any]:
        return [s.fetch(argv) for s in self.sources]

    def nodes(self, paths: Paths) -> tuple[int, ...]:
        return tuple(map(paths.node, self.sources))

    def emit(self) -> tuple[int, Any]:
        return self.check, None

    def key(self) -> object:
        return type(self), self.sources


class SameObject(Relation):
    """Two paths lead to one object."""

    __slots__ = ()
    check = _hook.CHECK_SAME

    def __str__(self) -> str:
        return f"{self.sources[0]} and {self.sources[1]} are one object"

    def test(self, value: Any) -> bool:
        return value[0] is value[1]

    def why(self, argv: Sequence[Any]) -> str:
        a, b = self.sources
        return f"{a} and {b} were one object, now they are two"


class Distinct(Relation):
    """Several paths lead to pairwise different objects."""

    __slots__ = ()

    check = _hook.CHECK_DISTINCT

    def __init__(self, sources: Sequence[Source]) -> None:
        Relation.__init__(self, *sources)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.sources))} are different objects"

    def test(self, value: Any) -> bool:
        return len({id(v) for v in value}) == len(value)

    def why(self, argv: Sequence[Any]) -> str:
        seen: dict[int, Source] = {}
        for source in self.sources:
            try:
                value = source.fetch(argv)
            except Exception as error:
                return f"{source} can no longer be read ({type(error).__name__}: {error})"
            if id(value) in seen:
                return f"{seen[id(value)]} and {source} were different objects, now they are one"
            seen[id(value)] = source
        return "the values are different objects"


@dataclass(frozen=True, slots=True, eq=False)
class Custom(Guard):
    """Any predicate on one value, with the text of its failure: for what no other kind can say."""

    predicate: Callable[[Any], bool]
    text: str

    def __str__(self) -> str:
        return f"{self.source} {self.text}"

    def test(self, value: Any) -> bool:
        return bool(self.predicate(value))

    def describe(self, value: Any) -> str:
        return f" {self.text}, now {show(value)}"

    def key(self) -> object:
        return Custom, self.source, id(self.predicate), self.text
