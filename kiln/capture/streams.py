"""Native iterators from outside: a copy stands for each, and the real one is moved on after the graph.

A loop that was interrupted by a break hands its iterator to the resume function. Its position is guarded;
where the position keeps changing, the iterator is left alone and advanced in Python, so that one entry serves
every turn.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.source import Derived, Source
from kiln.capture.rebuild import REDUCIBLE
from kiln.capture.world import READERS, World
from kiln.check.guards import Equals, TypeIs


@dataclass(slots=True, eq=False)
class Stream:
    """An iterator from outside, the copy that stands for it, and where it stood."""

    real: Any
    copy: Any
    start: int
    inner: tuple[Any, ...]
    ended: bool = False  # it has said that there is nothing more

    def over(self) -> bool:
        """Whether a loop over it has come to its end; a range that is used up has yet to say so."""
        return self.ended or exhausted(self.copy) and not isinstance(self.copy, RANGE)


def reduced(iterator: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """What makes an iterator like this one: a callable, its arguments, and a position of its own."""
    make, args, *state = iterator.__reduce__()
    return make, args, tuple(part for part in state if part is not None)


def position(iterator: Any) -> tuple[Any, ...]:
    """Where an iterator over a container stands; empty when its pickle protocol does not say."""
    return reduced(iterator)[2]


def part(index: int) -> Any:
    return lambda iterator: iterator.__reduce__()[1][index]


PARTS = tuple(part(i) for i in range(8))


def read_iterator(world: World, value: Any, source: Source) -> Any:
    """The program's view of an iterator: one of the same kind over the program's view of what it walks."""
    make, args, state = reduced(value)
    moving = any(text.startswith(f"{source}.<") for text in world.unstable)
    if moving or len(args) > len(PARTS) or not copyable(args):
        return world.thing(value, source)
    world.guard(TypeIs(source, type(value)))
    world.guard(Equals(Derived(source, position, "position"), state))
    parts = [
        world.touch(world.outside(a, Derived(source, PARTS[i], f"part {i}"))) for i, a in enumerate(args)
    ]
    copy = make(*parts)
    if state:
        copy.__setstate__(*state)
    inner = tuple(p for p in parts if id(p) in world.streams)
    for p in inner:
        world.owned_streams.add(id(p))
    world.streams[id(copy)] = Stream(value, copy, place(copy), inner)
    return world.stands_for(copy, value, source)


def copyable(parts: Any) -> bool:
    """Whether the iterators among the parts of an iterator can be copied themselves."""
    inner = [p for p in parts if isinstance(p, Iterator)]
    return all(type(p) in REDUCIBLE and copyable(p.__reduce__()[1]) for p in inner)


def place(copy: Any) -> int:
    """How far an iterator has come, as a number that grows by one an item."""
    _, args, state = reduced(copy)
    if state:
        return int(state[0]) if not isinstance(copy, BACKWARD) else -int(state[0])
    if isinstance(copy, enumerate):
        return int(args[1])
    if isinstance(copy, zip):
        return place(args[0]) if args else 0
    return -len(args[0]) if args else 0


RANGE = type(iter(range(0)))
BACKWARD: tuple[type, ...] = (reversed, type(reversed([])))


def exhausted(copy: Any) -> bool:
    """Whether an iterator has nothing more to give, and has said so."""
    _, args, state = reduced(copy)
    if isinstance(copy, (enumerate, zip)):
        return any(exhausted(inner) for inner in args if isinstance(inner, Iterator))
    return not state and not (args and len(args[0]))


def move(iterator: Any, count: int) -> None:
    """Take `count` items from an iterator, or all of them when it is negative."""
    if count < 0:
        collections.deque(iterator, maxlen=0)
    else:
        next(itertools.islice(iterator, count, count), None)


def stream_writes(world: World) -> list[tuple[Any, tuple[Any, ...]]]:
    """The calls that move the real iterators to where their copies are."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for key, stream in world.streams.items():
        if key not in world.owned_streams:
            count = -1 if exhausted(stream.copy) else place(stream.copy) - stream.start
            if count:
                calls.append((move, (stream.copy, count)))
    return calls


READERS.update(dict.fromkeys(REDUCIBLE, read_iterator))
