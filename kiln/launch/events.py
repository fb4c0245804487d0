"""What happens in a program, in order: which values each step reads and makes, and which share memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import field
from itertools import accumulate
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.expressions import Symbol, hinted
from kiln.base.fx import bindings
from kiln.base.graph import CONSTANT, INPUT, Node, TensorSpec, gathered, nodes_in
from kiln.fuse.program import Program
from kiln.fuse.steps import Launch
from kiln.launch.memory import Lodging, least, size_of
from kiln.launch.shims import Shim, shim_of
from kiln.launch.shown import ahead_of
from kiln.ops.aliases import base_of, bases_in

APART = 16 << 10  # bytes of a value that is worth memory of its own
SMALL = APART, APART >> 2, APART >> 4  # bytes from which on values may have it
LITTLE = 128  # times that something is less than what a program needs at once, so that it counts for little
SPARE = 8 << 10  # bytes of an arena that count for nothing
MUCH = 16 << 20  # bytes that take so long to make that the time for memory is nothing
LONG = 1 << 20  # bytes from which on a program runs so long that small values may have memory of their own

#: The namespaces whose ops keep nothing of what they are given.
FORGETFUL = frozenset({"aten", "prims", "mkl", "mkldnn", "onednn", "quantized"})

#: Ops that are given strides for the memory of their first argument.
STRIDES = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default})


@dataclass(eq=False, slots=True)
class Event:
    """One step of a program: a kernel, a view, or a call."""

    reads: tuple[Node, ...]
    makes: tuple[Node, ...]
    launch: Launch | None = None
    node: Node | None = None
    shim: Shim | None = None
    ahead: Any = None
    """Of a view: how many elements after those of what it shows it starts."""


@dataclass(slots=True)
class Events:
    """The events of a program, and what is known of its values."""

    program: Program
    listed: list[Event] = field(default_factory=list)
    items: dict[Node, dict[int, Node]] = field(default_factory=dict)
    """For a call of several results that only its items are read of: the node of each item."""
    same: dict[Node, Node] = field(default_factory=dict)
    """Items that are asked for more than once: the first."""
    owners: dict[Node, Node] = field(default_factory=dict)
    """For a value in the memory of another: that one."""
    numbers: dict[Symbol, Node] = field(default_factory=dict)
    """The inputs that are numbers."""
    kept: set[Node] = field(default_factory=set)
    """The owners of memory that is not the plan's: of inputs, of outputs, of what other code may hold."""

    def owner(self, node: Node) -> Node:
        """The value in whose memory a value lies."""
        while node in self.owners:
            node = self.owners[node]
        return node

    def value(self, node: Node) -> Node:
        return self.same.get(node, node)


def events_of(program: Program) -> Events:
    """The events of a program in order."""
    made = Events(program)
    made.numbers = {s: node for s, (node, what, _) in bindings(program.graph).items() if not what}
    _find_items(made)
    _list_steps(made)
    made.listed = outputs_early(made)
    _find_kept(made)
    return made


def _list_steps(made: Events) -> None:
    for step in made.program.steps:
        if isinstance(step, Launch):
            reads = [made.value(n) for n in step.reads.values()]
            made.listed.append(Event(tuple(dict.fromkeys(reads)), tuple(step.writes.values()), launch=step))
        elif not (step.node.op is operator.getitem and step.node.args[0] in made.items):
            made.listed.append(_call(made, step.node))


def outputs_early(events: Events) -> list[Event]:
    """The events with products that the caller alone reads as soon as they can be made.

    The gradient of a weight goes before that of its layer's input, which then may take the memory of what was
    saved for the former; but it waits for what needs much memory for a while. What other code may do is done
    when it was to be.
    """
    listed, levels = events.listed, Levels(events)
    read = {node for event in listed for node in event.reads}
    order: list[Event] = []
    places: dict[Node, int] = {}
    fixed = 0
    for event in listed:
        start = len(order)
        if event.shim is not None and event.shim.writes and event.node not in read:
            start, views, todo = fixed, set[int](), list(event.reads)
            while todo:
                at = places.get(todo.pop(), -1)
                if at >= 0 and order[at].ahead is not None:
                    views.add(at)
                    todo += order[at].reads
                else:
                    start = max(start, at + 1)
            start += levels.lowest(order[start:], event)
            tail = range(start, len(order))
            moved = [i for i in tail if i in views]
            order[start:] = [order[i] for i in (*moved, *[i for i in tail if i not in views])]
            order.insert(start + len(moved), event)
        else:
            order.append(event)
            if event.launch is None and event.ahead is None and event.shim is None:
                fixed = len(order)
        for i in range(start, len(order)):
            places.update(dict.fromkeys(order[i].makes, i))
    return order


class Levels:
    """How many bytes are in use while the events of a program run."""

    def __init__(self, events: Events) -> None:
        def owner(node: Node) -> Node:
            return events.owner(events.value(node))

        self.owner, self.owners = owner, events.owners
        leaving = set(map(owner, nodes_in(events.program.graph.outputs)))
        self.ends: dict[Event, list[Node]] = {}
        for node, last in {owner(n): e for e in events.listed for n in (*e.reads, *e.makes)}.items():
            if node not in leaving and node.op is not CONSTANT:
                self.ends.setdefault(last, []).append(node)

    def lowest(self, others: list[Event], event: Event) -> int:
        """Before which of the others, or after all, an event comes so that the least is in use at most.

        The first such place. Of inputs, weights among them, those alone go that the event reads.
        """
        made, used = self.bytes(event.makes), dict[Node, int]()
        tops, before = list[int](), [0]  # what is in use within each of the others, and before it
        for i, other in enumerate(others):
            used.update(dict.fromkeys(map(self.owner, other.reads), i))
            gone = [n for n in self.ends.get(other, ()) if n.op is not INPUT]
            # What a kernel reads last becomes what it makes, where they are alike.
            specs = [n.spec for n in gone] if other.launch is not None else []
            kept = [n for n in other.makes if n.spec in specs]
            tops.append(before[-1] + self.bytes(other.makes) - self.bytes(kept))
            before.append(before[-1] + self.bytes(other.makes) - self.bytes(gone))
        ends = [(used.get(n, -1), self.bytes([n])) for n in self.ends.get(event, ())]
        until, since = [0, *accumulate(tops, max)], [*accumulate([before[-1], *reversed(tops)], max)][::-1]
        most = []
        for i in range(len(before)):
            more = made - sum([size for last, size in ends if last < i])
            most.append(max(until[i], before[i] + made, since[i] + more))
        return most.index(min(most))

    def bytes(self, nodes: Iterable[Node]) -> int:
        own = [n.spec for n in nodes if n not in self.owners and isinstance(n.spec, TensorSpec)]
        return sum([hinted(size_of(spec)) for spec in own])


def _find_items(events: Events) -> None:
    """Find the calls whose results are taken apart at once."""
    items: dict[Node, dict[int, Node]] = {}
    whole: set[Node] = set(nodes_in(events.program.graph.outputs))
    for step in events.program.steps:
        if isinstance(step, Launch):
            continue
        node = step.node
        if node.op is operator.getitem and type(node.args[0]) is Node and type(node.args[1]) is int:
            first = items.setdefault(node.args[0], {}).setdefault(node.args[1], node)
            if first is not node:
                events.same[node] = first
        else:
            whole.update(node.inputs())
    events.items = {
        node: found
        for node, found in items.items()
        if node not in whole and isinstance(node.spec, (tuple, list)) and min(found) >= 0
        if node.op is not operator.getitem  # a list among the results is an object, taken apart like others
    }
    events.same = {a: b for a, b in events.same.items() if a.args[0] in events.items}


def _call(events: Events, node: Node) -> Event:
    reads = dict.fromkeys(events.value(n) for n in node.inputs())
    for leaf in gathered(Symbol, node.args, node.kwargs) if events.numbers else ():
        if leaf in events.numbers:
            reads[events.numbers[leaf]] = None
    makes = tuple(events.items[node].values()) if node in events.items else (node,)
    if node.op is operator.getitem:
        events.owners[node] = node.args[0]
        return Event(tuple(reads), makes, node=node)
    for made in makes:
        base = _base(node, made)
        if base is not None:
            events.owners[made] = events.value(base)
    ahead = ahead_of(node) if node in events.owners else None
    return Event(tuple(reads), makes, None, node, shim_of(node) if ahead is None else None, ahead)


def _base(node: Node, made: Node) -> Node | None:
    """The argument in whose memory a result of a call lies."""
    if not isinstance(node.op, torch._ops.OpOverload):
        return None
    place = made.args[1] if made is not node and len(bases_in(node.op)) > 1 else 0
    base = base_of(node.op, node.args, node.kwargs, place)
    return base if type(base) is Node else next(iter(nodes_in(base)), None)


def lodgers(events: Events) -> set[Node]:
    """The values that may lie in the arena: made by kernels, or by calls that write where they are told."""
    made: set[Node] = set()
    for event in events.listed:
        if event.launch is not None or event.shim is not None and event.shim.writes:
            made.update(n for n in event.makes if n not in events.kept and n not in events.owners)
    return made


def apart_from(events: Events, lodged: set[Node], memory: dict[Node, int]) -> float:
    """The bytes from which on values have memory of their own, which goes when they do.

    An arena stays beside what a program leaves: gradients, values that wait for a backward pass, a large
    result; and beside what its calls take for themselves. So only values are in it that are so small together
    that it counts for little beside what the program needs at once.
    """
    owners = {events.owner(events.value(node)) for node in nodes_in(events.program.graph.outputs)}
    inside, outside, end = list[Lodging](), list[Lodging](), len(events.listed)
    for i, event in enumerate(events.listed):
        for node in event.makes:
            if node not in events.owners and isinstance(node.spec, TensorSpec):
                last = end if node in owners else memory[node]
                one = Lodging("", hinted(size_of(node.spec)), i, last)
                (inside if node in lodged else outside).append(one)
    more = events.program.left
    left, most = more + sum([o.size for o in outside if o.last == end]), more + least([*inside, *outside])
    if left >= MUCH:
        return 0
    graph = events.program.graph
    backward = any(node.backward for node in graph.nodes)
    if not backward and not any(map(_takes, events.listed)) and left * LITTLE <= most:
        return math.inf
    given = [node.spec for node in graph.inputs if isinstance(node.spec, TensorSpec)]
    if most + sum([hinted(size_of(spec)) for spec in given]) >= LONG:
        return 0
    little = max(SPARE, most // LITTLE)
    return next((apart for apart in SMALL if least([o for o in inside if o.size < apart]) <= little), 0)


def _takes(event: Event) -> bool:
    """Whether a step is a call that takes memory for what it gives, and maybe for a while."""
    if event.node is None or event.ahead is not None or event.node.op is operator.getitem:
        return False
    return event.shim is None or not event.shim.writes


def _find_kept(events: Events) -> None:
    graph = events.program.graph
    leaving = nodes_in(graph.outputs)
    for event in events.listed:
        if event.node is not None and event.node.op is not operator.getitem and not forgetful(event.node.op):
            leaving += event.reads
    events.kept = {events.owner(events.value(n)) for n in leaving}
    events.kept.update(graph.inputs)
    events.kept.update(n for n in graph.nodes if n.op is CONSTANT)


def forgetful(op: Any) -> bool:
    """Whether an op keeps nothing of what it is given."""
    return isinstance(op, torch._ops.OpOverload) and op.namespace in FORGETFUL


def last_uses(events: Events) -> tuple[dict[Node, int], dict[Node, int]]:
    """The last event that reads a value, or makes it; and the last that needs the memory it owns."""
    last: dict[Node, int] = {}
    for i, event in enumerate(events.listed):
        last.update(dict.fromkeys((*event.makes, *event.reads), i))
    memory: dict[Node, int] = {}
    for node, i in last.items():
        owner = events.owner(node)
        memory[owner] = max(memory.get(owner, i), i)
    outputs = events.program.graph.outputs
    symbols = gathered(Symbol, outputs) if events.numbers else []
    numbers = [events.numbers[s] for s in symbols if s in events.numbers]
    for node in (*nodes_in(outputs), *numbers):
        last[events.value(node)] = len(events.listed)
    return last, memory


def native_reads(events: Events) -> set[Node]:
    """The values whose layout is taken for granted: kernels and views read them, or as_strided."""
    found: set[Node] = set()
    for event in events.listed:
        if event.launch is not None:
            found.update(event.reads)
        elif event.node is not None and (event.ahead is not None or event.node.op in STRIDES):
            found.add(events.value(event.node.args[0]))
    return found
