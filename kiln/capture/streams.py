"""Iterators from outside: a copy stands for each, and the real one is moved on after the graph.

A loop that was interrupted by a break hands its iterator to the resume function. Its position is guarded;
where the position keeps changing, the iterator is left alone and advanced in Python, so that one entry serves
every turn. A generator that was suspended at a break, such as that of a context manager whose block holds
the break, is interpreted from where it stands, and ended after the graph; one that does not come to its end
is left to Python.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

from kiln import _hook
from kiln.base.dataclass import dataclass
from kiln.base.source import Derived, Source
from kiln.bytecode.decode import decode
from kiln.capture.frame import Frame, Unread
from kiln.capture.iterators import Generator
from kiln.capture.rebuild import REBUILT, REDUCIBLE
from kiln.capture.world import READERS, World
from kiln.check.guards import Equals, Is, TypeIs


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
    for generator in world.generators:
        if generator.moved >= 0 and not generator.done:
            raise generator.left()
        if generator.moved >= 0:
            calls.append((_hook.finish, (generator,)))
    return calls


@functools.cache
def suspended(part: int) -> Callable[[Any], Any]:
    """What gives the code or the place of a generator."""
    return lambda generator: (_hook.suspended(generator) or (None, None))[part]


@functools.cache
def held(slot: int) -> Callable[[Any], Any]:
    """What gives a variable of a generator, or a value of its stack."""

    def read(generator: Any) -> Any:
        _, _, slots = _hook.suspended(generator) or (None, 0, ())
        return slots[slot] if slot < len(slots) else _hook.UNBOUND

    return read


def read_generator(world: World, value: Any, source: Source) -> Any:
    """The program's view of a generator that a break suspended: one of the interpreter's at its place."""
    code, offset, slots = _hook.suspended(value) or (None, 0, ())
    if code is None or code not in REBUILT:
        return world.thing(value, source)
    decoded = decode(code)
    names, stack = decoded.locals, range(len(decoded.locals), len(slots))
    at = next(i for i in decoded.instructions if i.offset == offset)
    if at.name not in SUSPENDING:
        at = decoded.instructions[at.index - 1]
    if at.name not in SUSPENDING or any(slots[i] is _hook.UNBOUND for i in stack):
        return world.thing(value, source)
    paths = [Derived(source, held(i), f"slot {i}") for i in range(len(slots))]
    cells = {name: slots[i] for i, name in enumerate(names) if type(slots[i]) is types.CellType
             and (name in code.co_cellvars or name in code.co_freevars)}  # fmt: skip
    closure = tuple(cells[name] for name in code.co_freevars)
    frame = Frame(types.FunctionType(code, value.gi_frame.f_globals, None, None, closure), {}, cells)
    for i, name in enumerate(names):
        if name in cells:
            world.remember(cells[name], paths[i])
        elif slots[i] is not _hook.UNBOUND:
            frame.lazy[name] = (slots[i], paths[i])
    frame.stack += [Unread(slots[i], paths[i]) for i in stack]
    frame.unread = bool(stack)
    frame.index = at.index + SUSPENDING[at.name]
    made = Generator(world.machine, frame)
    made.started = bool(SUSPENDING[at.name])

    def settle() -> None:
        world.writes += 1
        world.guard(Is(Derived(source, suspended(0), "code"), code))
        world.guard(Equals(Derived(source, suspended(1), "place"), offset))

    made.settle = settle
    world.guard(TypeIs(source, types.GeneratorType))
    world.generators.append(made)
    return world.stands_for(made, value, source)


#: Instructions at which generators stand, and whether they go on behind them.
SUSPENDING = {"RETURN_GENERATOR": 0, "YIELD_VALUE": 1}
READERS.update(dict.fromkeys(REDUCIBLE, read_iterator))
READERS[types.GeneratorType] = read_generator
