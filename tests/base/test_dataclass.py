"""Data classes beside those of the standard library: the same methods, written when they are first called."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import Any, ClassVar

import pytest

from kiln.base.dataclass import dataclass


def made(decorator: Any) -> list[type]:
    """The same classes by one decorator or the other."""

    @decorator(frozen=True, slots=True)
    class Point:
        """A point."""

        x: int
        y: int = 2
        tags: list[int] = field(default_factory=list, compare=False)
        ORIGIN: ClassVar[int] = 7

        def far(self) -> int:
            return self.x + self.y

    @decorator(frozen=True, slots=True)
    class Named(Point):
        name: str = field(default="n", repr=False)

    @decorator(slots=True)
    class Counter:
        count: int = 0
        twice: int = field(init=False)

        def __post_init__(self) -> None:
            self.twice = 2 * self.count

    @decorator(eq=False)
    class Loose:
        a: Any
        b: Any = None

        def __repr__(self) -> str:
            return "loose"

    @decorator(frozen=True)
    class Compared:
        a: Any

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Compared)

    return [Point, Named, Counter, Loose, Compared]


OURS, THEIRS = made(dataclass), made(dataclasses.dataclass)
GIVEN = [[(1,), (1, 3), (1, 3, [4])], [(1,), (1, 2, [], "m")], [(), (4,)], [(1,), (1, 2)], [(1,)]]
globals().update(Point=OURS[0])  # where pickle finds it
OURS[0].__qualname__ = "Point"


def facts(cls: type, given: tuple[Any, ...]) -> list[Any]:
    one, other = cls(*given), cls(*given)
    names = [f.name for f in dataclasses.fields(cls)]
    shown = repr(one).rpartition(">.")[2]
    same = [one == other, one == cls(9), one != other, one == given]
    hashed = cls.__hash__ is None or (hash(one) == hash(other), hash(one) == hash(cls(9)))
    values = [getattr(one, name) for name in names]
    return [names, shown, same, hashed, values, cls.__match_args__, cls.__doc__ == "A point.",
            "__slots__" in vars(cls), hasattr(one, "__dict__"), dataclasses.is_dataclass(cls)]  # fmt: skip


@pytest.mark.parametrize(("i", "given"), [(i, g) for i, each in enumerate(GIVEN) for g in each])
def test_methods_are_those_of_the_standard_library(i, given):
    assert facts(OURS[i], given) == facts(THEIRS[i], given)


def test_methods_are_written_at_their_first_call():
    cls = made(dataclass)[0]
    before = vars(cls)["__init__"], vars(cls)["__eq__"], vars(cls)["__hash__"]
    assert cls(1) == cls(1, 2)
    assert vars(cls)["__init__"] is not before[0] and vars(cls)["__eq__"] is not before[1]
    assert vars(cls)["__hash__"] is before[2]
    with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required positional argument: 'x'"):
        cls()
    assert cls.__init__.__code__.co_varnames == ("self", "x", "y", "tags")


def test_frozen_ones_refuse_writes_and_are_copied():
    one = OURS[0](1, tags=[5])
    for change in (lambda: setattr(one, "x", 2), lambda: delattr(one, "x")):
        with pytest.raises(dataclasses.FrozenInstanceError, match="field 'x'"):
            change()
    for twin in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one)), dataclasses.replace(one)):
        assert twin == one and twin.tags == [5] and twin is not one
    assert dataclasses.replace(one, y=8).far() == 9 and dataclasses.asdict(one) == {"x": 1, "y": 2, "tags": [5]}
    assert OURS[0](1).tags is not OURS[0](1).tags


def test_classes_that_hold_themselves_are_shown():
    one = OURS[3](1)
    one.b = [one]
    assert repr(one) == "loose"
    counter = OURS[2](1)
    counter.count = [counter]
    assert "..." in repr(counter)
