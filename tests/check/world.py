"""A small world of Python objects, guards on all of it, and random changes: some keep the guards true, some do not."""

from __future__ import annotations

import enum
import random
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

from kiln.base.source import Arg, Attr, CellContents, ClosureCell, Const, DictAttr, Global, Item, Source
from kiln.check.guards import (
    Absent,
    ClassAttr,
    Contains,
    Custom,
    Distinct,
    Equals,
    FunctionState,
    Guard,
    Is,
    Keys,
    Length,
    SameObject,
    SetEquals,
    TypeIs,
)
from kiln.check.values import MISSING, mro_lookup


class Thing:
    kind = "thing"

    def method(self) -> int:
        return 1


class Other(Thing):
    pass


class Slotted:
    __slots__ = ("left", "right")


def make_function(cell: Any) -> Callable[..., Any]:
    def function(x: Any, y: Any = 3, *, z: Any = 4) -> Any:
        return cell, x, y, z

    return function


def spare(x: Any, y: Any = 3, *, z: Any = 4) -> Any:
    return x


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Number(float):
    pass


Pair = namedtuple("Pair", "a b")

# Constants in pairs (was, is not the same); the first is also met as a fresh, equal object.
CONSTANTS: list[tuple[Any, Any]] = [
    (1, True), (1, 1.0), (0.0, -0.0), (float("nan"), 1.0), ("ab", "ba"), (b"x", b"y"), (None, 0), (2 + 3j, 2 - 3j),
    ((1, 2), (1, 2.0)), ((1, (2, 0.0)), (1, (2, -0.0))), (range(0, 3, 2), range(0, 4, 2)), (slice(1, 2), slice(1, 3)),
    (Pair(1, 2), Pair(1, 3)), (Pair(1, 2), (1, 2)), (Color.RED, Color.BLUE), (slice(0.0, None), slice(-0.0, None)),
    ((range(2),), (range(3),)), (Number(0.0), Number(-0.0)), (Number(0.0), 0.0), ((frozenset({1}),), (frozenset({True}),)),
    (10**30, 10**30 + 1), (Ellipsis, None), (frozenset({1, 2}), frozenset({True, 2})), ((), []), (True, 1),
]  # fmt: skip


def fresh(value: Any) -> Any:
    """An equal object that is another one where Python allows it."""
    if isinstance(value, float):
        return type(value)(str(value))
    if isinstance(value, str):
        return "".join(list(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return int(str(value))
    if isinstance(value, tuple):
        return type(value)._make(map(fresh, value)) if hasattr(value, "_make") else tuple(map(fresh, value))
    return value


def make_thing(depth: int = 2) -> Thing:
    thing = Thing()
    thing.flag = True
    thing.number = 12345.5
    thing.text = "a text"
    thing.items = [Thing(), 7, "seven"]
    thing.pair = (Thing(), 8)
    thing.table = {"a": 1, "b": Thing(), 3: "three"}
    thing.ordered = OrderedDict(one=1, two=2)
    thing.single = OrderedDict(one=1)
    thing.empty = OrderedDict()
    thing.nothing = {}
    thing.missing = defaultdict(list, k=[1])
    thing.bag = {1, 2}
    thing.frozen = frozenset({1, 2})
    thing.queue = deque([1, 2])
    thing.slotted = Slotted()
    thing.slotted.left = Thing()
    thing.slotted.right = 5
    thing.function = make_function(Thing())
    thing.module = types.ModuleType("a_module")
    thing.module.value = 3
    thing.module.thing = Thing()
    thing.constants = [was for was, _ in CONSTANTS]
    if depth:
        thing.child = make_thing(depth - 1)
    return thing


def guards_of(base: Source, thing: Thing, depth: int = 2) -> Iterator[Guard]:
    def at(name: str) -> Source:
        return DictAttr(base, name)

    yield TypeIs(base, Thing)
    for name in ("flag", "number", "text"):
        yield Equals(at(name), thing.__dict__[name])
    for name in ("method", "kind", "unknown"):
        yield Absent(base, name)
    yield Length(at("items"), 3)
    yield TypeIs(Item(at("items"), 0), Thing)
    yield Absent(Item(at("items"), 0), "flag")
    yield Equals(Item(at("items"), 1), 7)
    yield TypeIs(Item(at("pair"), 0), Thing)
    yield Equals(Item(at("pair"), 1), 8)
    yield Keys(at("table"), ("a", "b", 3))
    yield Equals(Item(at("table"), "a"), 1)
    yield TypeIs(Item(at("table"), "b"), Thing)
    yield Contains(at("table"), "z", False)
    yield Contains(at("table"), "a", True)
    yield Keys(at("ordered"), ("one", "two"))
    yield Keys(at("single"), ("one",))
    yield Length(at("empty"), 0)
    yield Length(at("nothing"), 0)
    yield Contains(at("missing"), "k", True)
    yield Equals(Item(Item(at("missing"), "k"), 0), 1)
    yield Contains(at("bag"), 1, True)
    yield Contains(at("frozen"), 9, False)
    yield SetEquals(at("bag"), frozenset({1, 2}))
    yield Length(at("bag"), 2)
    yield Length(at("queue"), 2)
    yield TypeIs(at("slotted"), Slotted)
    yield Absent(at("slotted"), "left")
    yield TypeIs(Attr(at("slotted"), "left"), Thing)
    yield Equals(Attr(at("slotted"), "right"), 5)
    yield Is(at("module"), thing.module)
    yield Equals(Attr(at("module"), "value"), 3)
    yield TypeIs(Attr(at("module"), "thing"), Thing)
    f = thing.function
    yield FunctionState(at("function"), f.__code__, f.__defaults__, f.__kwdefaults__)
    yield TypeIs(CellContents(ClosureCell(at("function"), 0, "cell")), Thing)
    yield Distinct([at("items"), at("table"), at("bag"), Attr(at("slotted"), "left")])
    yield SameObject(at("function"), Attr(base, "function"))
    yield Custom(at("number"), lambda v: v > 0, "was positive")
    for i, (was, _) in enumerate(CONSTANTS):
        yield Equals(Item(at("constants"), i), was)
    if depth:
        yield from guards_of(at("child"), thing.child, depth - 1)


def class_guards() -> Iterator[Guard]:
    for cls in (Thing, Other, Slotted):
        for name in ("kind", "method", "later"):
            yield ClassAttr(cls, name, mro_lookup(cls, name))
    yield ClassAttr(int, "bit_length", int.bit_length)
    yield ClassAttr(int, "nope", MISSING)


def global_guards(namespace: dict[str, Any]) -> Iterator[Guard]:
    where = Const(namespace, "globals")
    yield Equals(Global(where, "LIMIT"), 10)
    yield Contains(where, "len", False)
    yield TypeIs(Global(where, "thing"), Thing)
    yield Equals(DictAttr(Global(where, "thing"), "flag"), True)


Change = Callable[[random.Random, Thing], None]


def _set_attr(rng: random.Random, t: Thing) -> None:
    name = rng.choice(["flag", "number", "text", "method", "unknown", "other", "child"])
    if name in t.__dict__ and rng.random() < 0.5:
        setattr(t, name, fresh(t.__dict__[name]))
    else:
        setattr(t, name, rng.choice([True, 12345.5, "a text", 0, "".join(["a ", "text"])]))


def _delete_attr(rng: random.Random, t: Thing) -> None:
    t.__dict__.pop(rng.choice(["method", "unknown", "flag", "number", "items"]), None)


def _items(rng: random.Random, t: Thing) -> None:
    rng.choice([
        lambda: t.items.append(1),
        lambda: t.items.__setitem__(0, Thing()),
        lambda: t.items.__setitem__(1, fresh(7)),
        lambda: t.items.__setitem__(1, 6),
        lambda: t.items.pop(),
        lambda: setattr(t.items[0], "flag", 1),
        lambda: setattr(t, "items", list(t.items)),
        lambda: setattr(t, "pair", (t.pair[0], 8)),
        lambda: setattr(t, "pair", (t.pair[0], 9)),
    ])()  # fmt: skip


def _tables(rng: random.Random, t: Thing) -> None:
    rng.choice([
        lambda: t.table.__setitem__("a", 1),
        lambda: t.table.__setitem__("a", 2),
        lambda: t.table.__setitem__("z", 2),
        lambda: t.table.__setitem__("a", t.table.pop("a", 1)),
        lambda: t.table.pop("z", None),
        lambda: t.table.__setitem__("b", Thing()),
        lambda: t.ordered.move_to_end("one"),
        lambda: t.single.move_to_end("one"),
        lambda: t.single.__setitem__("two", 1),
        lambda: t.empty.__setitem__(1, 1),
        lambda: t.empty.clear(),
        lambda: t.nothing.update(a=1),
        lambda: t.nothing.clear(),
        lambda: setattr(t, "nothing", {}),
        lambda: t.missing["k"].insert(0, rng.choice([1, 2])),
        lambda: t.missing.pop("k"),
        lambda: t.bag.add(3),
        lambda: t.bag.discard(1),
        lambda: t.queue.append(1),
        lambda: t.queue.rotate(),
        lambda: setattr(t, "frozen", frozenset({1, 9})),
        lambda: setattr(t, "ordered", OrderedDict(t.ordered)),
    ])()  # fmt: skip


def _structure(rng: random.Random, t: Thing) -> None:
    rng.choice([
        lambda: setattr(t, "__dict__", dict(t.__dict__)),
        lambda: setattr(t, "__dict__", dict(t.__dict__, flag=False)),
        lambda: setattr(t, "__class__", Other),
        lambda: setattr(t, "__class__", Thing),
        lambda: setattr(t.slotted, "left", Thing()),
        lambda: setattr(t.slotted, "left", t.items),
        lambda: setattr(t.slotted, "right", rng.choice([5, 6])),
        lambda: delattr(t.slotted, "right"),
        lambda: setattr(t.module, "value", rng.choice([3, 4])),
        lambda: setattr(t.module, "thing", rng.choice([Thing(), Other()])),
        lambda: setattr(t.module, "unrelated", Thing()),
        lambda: delattr(t.module, "value"),
        lambda: setattr(t.function, "__code__", spare.__code__.replace(co_freevars=("cell",))),
        lambda: setattr(t.function, "__defaults__", (4,)),
        lambda: setattr(t.function, "__kwdefaults__", None),
        lambda: setattr(t.function.__closure__[0], "cell_contents", rng.choice([Thing(), 1])),
        lambda: setattr(t, "function", make_function(Thing())),
        lambda: t.constants.__setitem__((i := rng.randrange(len(CONSTANTS))), fresh(CONSTANTS[i][rng.randrange(2)])),
        lambda: setattr(t, "child", make_thing(0)),
    ])()  # fmt: skip


def _classes(rng: random.Random, t: Thing) -> None:
    cls = rng.choice([Thing, Other])
    rng.choice([
        lambda: setattr(cls, "unrelated", 1),
        lambda: setattr(cls, "later", 1),
        lambda: setattr(Thing, "kind", rng.choice(["thing", "".join(["thi", "ng"])])),
        lambda: delattr(cls, "later") if "later" in vars(cls) else None,
    ])()  # fmt: skip


CHANGES: tuple[Change, ...] = (_set_attr, _delete_attr, _items, _tables, _structure, _structure, _classes)


def change(rng: random.Random, thing: Thing) -> None:
    """One random change somewhere in the tree of a thing."""
    while "child" in thing.__dict__ and isinstance(thing.child, Thing) and rng.random() < 0.6:
        thing = thing.child
    try:
        rng.choice(CHANGES)(rng, thing)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        pass  # an earlier change took away what this one works on


def restore_classes(kind: str) -> None:
    Thing.kind = kind
    for cls in (Thing, Other):
        for name in ("later", "unrelated"):
            if name in vars(cls):
                delattr(cls, name)


def roots() -> tuple[Arg, Arg]:
    return Arg(0, "pinned"), Arg(1, "loose")
