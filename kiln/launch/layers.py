"""Layers in a plan: the steps of one stand for more of them, each over weights of its own.

A graph of few equal layers is compiled, and what its plan does for one of them is done again for the others.
The steps from where a layer's own weights are first read to where those of the next are must be those that
follow them, to the place in the arena; then what one period leaves behind is what the next one starts with,
however many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, TypeAlias

from kiln.base.dataclass import dataclass
from kiln.base.errors import Uneven
from kiln.base.graph import CONSTANT, INPUT, Graph, Node, Own, ancestors, mapped
from kiln.expand.freeze import Frozen
from kiln.launch.sources import Sources
from kiln.launch.text import Description

#: The kinds of words of a native call that are tensors.
TENSORS = "hol"
#: What is done for a step before it.
AHEAD = ("make", "show")
#: Three layers: between the second and the third the new ones come.
FIRST, SECOND, THIRD = range(3)

Triple: TypeAlias = "tuple[int, int, int]"


# What follows from held tensors


def more_held(frozen: Frozen, owns: Sequence[Own]) -> tuple[Frozen, list[Any], list[Triple]]:
    """A frozen graph whose `once` gives what the layers between take, too, after all that it gave before.

    Also the tensors that `once` takes beside those at `held`, and for what layers have of their own among the
    inputs of `rest` those of the first three. What is given for the layers between is in this order.
    """
    once, given = frozen.once, len(frozen.given)
    family = {i: (layer, f) for f, own in enumerate(owns) for layer, i in enumerate(own.inputs) if i >= 0}
    triples = _triples(frozen, family)
    places = dict(zip(frozen.held, once.inputs, strict=True))
    made = Graph()
    made.take_names((*once.inputs, *once.nodes))
    made.inputs, made.nodes, outputs = list(once.inputs), list(once.nodes), list(once.outputs)
    tensors: list[Any] = []
    for turn in range(len(owns[0].between)):
        known: dict[Node, Any] = {}

        def taken(own: Own, like: Node, turn: int = turn) -> Node:
            tensors.append(own.between[turn])
            return made.input("layer", like.spec)

        for own in owns:
            if (like := places.get(own.inputs[THIRD])) is not None:
                known[like] = taken(own, like)
        for node in once.nodes:
            if node.op is not CONSTANT and not known.keys().isdisjoint(node.inputs()):
                known[node] = made.copy(node, known)
        for triple in triples:
            place = triple[THIRD]
            if place >= given:
                outputs.append(known[once.outputs[place - given]])
            else:
                own = owns[family[frozen.given[place]][1]]
                held = places.get(own.inputs[THIRD])
                outputs.append(known[held] if held is not None else taken(own, frozen.rest.inputs[place]))
    made.outputs = tuple(outputs)
    return replace(frozen, once=made.check()), tensors, triples


def _triples(frozen: Frozen, family: Mapping[int, tuple[int, int]]) -> list[Triple]:
    """The inputs of `rest` that three layers have each of its own; `family` says so of the graph's inputs."""
    once = frozen.once
    own = {node: family[i] for i, node in zip(frozen.held, once.inputs, strict=True) if i in family}
    number = _Numbers({node: f for node, (_, f) in own.items()})
    for node in once.nodes:
        number.add(node)
    found: tuple[dict[Any, list[int]], ...] = {}, {}, {}
    for place, i in enumerate(frozen.given):
        if i in family:
            found[family[i][0]].setdefault(("given", family[i][1]), []).append(place)
    for place, out in enumerate(once.outputs, len(frozen.given)):
        which = {own[node][0] for node in ancestors([out]) if node in own}
        if len(which) > 1:
            raise Uneven
        for layer in which:
            found[layer].setdefault(("once", number.of[out]), []).append(place)
    first, second, third = found
    if {key: len(places) for key, places in second.items()} != {key: len(p) for key, p in third.items()}:
        raise Uneven
    return [
        triple for key, places in second.items()
        for triple in zip_longest(first.get(key, ())[: len(places)], places, third[key], fillvalue=-1)
    ]  # fmt: skip


class _Numbers:
    """A number for each node, the same for those that compute the same of the same place of their layers."""

    def __init__(self, own: Mapping[Node, int]) -> None:
        self.own = own
        self.of: dict[Node, int] = {}
        self._known: dict[Any, int] = {}

    def add(self, node: Node) -> None:
        key: Any = id(node.op), repr(mapped((node.args, node.kwargs), self._shown))
        if node.op is CONSTANT:
            key = CONSTANT, id(node.args[0])
        self.of[node] = self._known.setdefault(key, len(self._known))

    def _shown(self, leaf: Any) -> Any:
        if type(leaf) is not Node:
            return leaf
        if leaf.op is INPUT:
            return ("own", self.own[leaf]) if leaf in self.own else ("input", id(leaf))
        return "node", self.of[leaf]


# Steps


@dataclass(frozen=True, slots=True)
class Output:
    """What a plan of all layers gives: the places where one of few gives it, layer by layer, and its layer.

    What is of no layer has one place, and -1.
    """

    places: tuple[int, ...]
    layer: int = -1


@dataclass(frozen=True, slots=True)
class _Seen:
    """A step without the slots and places that it names, those in order, and the slots that it frees."""

    form: tuple[Any, ...]
    slots: list[int]
    places: list[int]
    drops: tuple[int, ...]


def repeated(
    made: Description, owns: Sequence[Triple], count: int,
    inputs: Sequence[int] = (), outputs: Sequence[Output] = (),
) -> Description:  # fmt: skip
    """A plan with `count` layers more; Uneven where its steps do not repeat.

    `owns` are the inputs that three layers in a row have each of its own, -1 for none. The new layers come
    between the second and the third. `inputs` says where inputs are then, those there are and the new ones,
    layer by layer, in this order; without it that is their order. `outputs` says what is given, where it is
    more than was.
    """
    if made.settled.fixed is None or count < 1:
        raise Uneven
    return _Repeating(made, owns, count, inputs).run(outputs)


class _Repeating:
    """The second of three layers, whose steps, from `begin` to `end`, are repeated.

    Slots from `low` to `high` are those of values that it makes.
    """

    def __init__(self, made: Description, owns: Sequence[Triple], count: int, inputs: Sequence[int]) -> None:
        self.made, self.owns, self.count = made, owns, count
        self.more = len(owns) * count
        self.inputs = inputs or range(made.inputs + self.more)
        self.own = {
            slot: (f, layer) for f, three in enumerate(owns) for layer, slot in enumerate(three) if slot >= 0
        }
        self.seen = seen = [_seen(step, made) for step in made.steps]
        self.named = set().union(*[one.slots for one in seen])  # other inputs are freed at once
        self.used = [{*one.slots, *self.named.intersection(one.drops)} for one in seen]
        self.begin, self.end = begin, end = self._begin(SECOND), self._begin(THIRD)
        self.last = last = 2 * end - begin
        if not 0 <= begin < end < last <= len(seen):
            raise Uneven
        self.fixed = fixed = made.inputs + len(made.constants)
        low, high, top = (max([fixed - 1, *set().union(*self.used[:i])]) + 1 for i in (begin, end, last))
        self.low, self.high, self.period = low, high, high - low
        if top - high != high - low:
            raise Uneven
        self.same, self.handed = _same(seen[begin:end], seen[end:last], self.own, (fixed, low, high))

    def _begin(self, layer: int) -> int:
        """The first step that names what a layer has of its own, with what is done for it before, or -1."""
        slots = {slot for slot, (_, which) in self.own.items() if which == layer}
        begin = next((i for i, one in enumerate(self.used) if not slots.isdisjoint(one)), 0) - 1
        while begin >= 0 and self.seen[begin].form[0] in AHEAD:
            begin -= 1
        return begin + 1 if begin >= 0 else -1

    def refuse_rest(self, outputs: Sequence[int]) -> None:
        """Raise Uneven where what follows the third layer reads what others made or have of their own."""
        rest, first = set(outputs).union(*self.used[self.last :]), self._begin(FIRST)
        before = set().union(*self.used[:first]) if first >= 0 else set()
        before.difference_update(*self.used[first : self.last])
        if any(self.fixed <= slot < self.low and slot not in self.same | before for slot in rest):
            raise Uneven
        if any(layer != THIRD for slot, (_, layer) in self.own.items() if slot in rest):
            raise Uneven

    def turn(self, number: int) -> Slot:
        """Where the slots of the second layer are in turn `number`."""

        def moved(slot: int) -> int:
            if slot in self.own:
                f, layer = self.own[slot]
                on = layer + number
                if on <= SECOND or layer == THIRD:
                    return self.inputs[slot if layer == THIRD else self.owns[f][on]]
                return self.inputs[self.made.inputs + (on - THIRD) * len(self.owns) + f]
            if slot < self.made.inputs:
                return self.inputs[slot]
            if number and slot in self.handed:
                return self.handed[slot] + self.more + (number - 1) * self.period
            return slot + self.more + (number * self.period if slot >= self.low else 0)

        return moved

    def later(self, slot: int) -> int:
        """Where the slots of what follows the new layers are."""
        moves = slot >= self.low or self.own.get(slot, (0, THIRD))[1] == SECOND
        return self.turn(self.count if moves else 0)(slot)

    def given(self, output: Output) -> tuple[str, Any]:
        """An output of the whole."""
        made = [self.made.outputs[place] for place in output.places]
        if output.layer < 0:
            return _argument(made[0], self.later, _kept)
        slots, low, high, layer = [slot for _, slot in made], self.low, self.high, output.layer
        if any(kind != "s" for kind, _ in made):
            raise Uneven
        if slots[0] in self.own:
            early = layer < THIRD + self.count
            return "s", self.turn(layer)(slots[0]) if early else self.later(slots[layer - self.count])
        first = next((i for i, slot in enumerate(slots[: THIRD + 1]) if low <= slot < high), -1)
        if first < 0 or {b - a for a, b in pairwise(slots[first : THIRD + 1])} - {self.period}:
            raise Uneven
        if first <= layer <= first + self.count:
            return "s", self.turn(layer - first)(slots[first])
        slot = slots[layer if layer < first else layer - self.count]
        if low <= slot < high or (slot < low) != (layer < first):
            raise Uneven
        return "s", self.later(slot)

    def freed(self, step: tuple[Any, ...]) -> tuple[Any, ...]:
        """A step before the layers, which frees what new ones have of what no step reads, too."""
        unread = [self.own[slot][0] for slot in step[-1] if slot not in self.named
                  and self.own.get(slot, (0, -1))[1] == SECOND]  # fmt: skip
        first = self.made.inputs
        new = [self.inputs[first + k * len(self.owns) + f] for f in unread for k in range(self.count)]
        moved = _moved(step, self.turn(0))
        return (*moved[:-1], (*moved[-1], *new)) if new else moved

    def run(self, outputs: Sequence[Output]) -> Description:
        """The whole plan."""
        made, begin, end, count = self.made, self.begin, self.end, self.count
        shown: list[int] = []
        whole = _argument(("t", made.outputs), self.later, _kept)[1]
        if not outputs:
            _argument(("t", made.outputs), _noted(shown), _kept)
        self.refuse_rest(shown)
        lie = _lying(self.seen, begin, end, count)
        steps = [self.freed(step) for step in made.steps[:begin]]
        steps += [_moved(step, self.turn(0)) for step in made.steps[begin:end]]
        period = set().union(*[{*one.slots, *one.drops} for one in self.seen[begin:end]])
        for number in range(1, count + 1):
            turn = self.turn(number)
            place = {slot: turn(slot) for slot in period}.__getitem__
            for i in range(begin, end):
                slots = deque(map(place, (*self.seen[i].slots, *self.seen[i].drops)))
                there = made.steps[i + lie[number % len(lie)]]
                steps.append(_moved((*there[:-1], self.seen[i].drops), partial(_next, slots)))
        steps += [_moved(step, self.later) for step in made.steps[end:]]
        names, again = made.names, made.names[self.low : self.high] * count
        taken = ["layer"] * (made.inputs + self.more)
        for i, name in zip(self.inputs, names[: made.inputs], strict=False):
            taken[i] = name
        kinds = [step[0] for step in made.steps]
        told = Sources((), ())
        told.names = _again(made.sources.names, begin, end, count)
        told.places = _again(made.sources.places, begin, end, count)
        return replace(
            made,
            steps=tuple(steps),
            outputs=tuple(map(self.given, outputs)) if outputs else whole,
            names=(*taken, *names[made.inputs : self.high], *again, *names[self.high :]),
            kernels=_again(made.kernels, kinds[:begin].count("launch"), kinds[:end].count("launch"), count),
            labels=_again(made.labels, kinds[:begin].count("call"), kinds[:end].count("call"), count),
            inputs=made.inputs + self.more,
            sources=told,
        )


def _lying(seen: Sequence[_Seen], begin: int, end: int, count: int) -> tuple[int, ...]:
    """By how many steps later ones say where in the arena things lie, in even turns and in odd ones.

    What layers hand on may lie at two places in turn. Then it does so in the layer before these two, too, or
    in the one after them, and of an even number of layers the last one finds it where it did.
    """
    period = end - begin
    listed = [seen[i : i + period] for i in (begin - period, begin, end, end + period) if i >= 0]

    def lie_alike(a: Sequence[_Seen], b: Sequence[_Seen]) -> bool:
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(x.form == y.form and x.places == y.places for x, y in pairs)

    *_, first, second, third = listed
    if lie_alike(first, second):
        return (0,)
    if count % 2 or not (lie_alike(first, third) or len(listed) == 4 and lie_alike(listed[0], second)):
        raise Uneven
    return 0, period


def _again(listed: tuple[Any, ...], begin: int, end: int, count: int) -> tuple[Any, ...]:
    return (*listed[:end], *listed[begin:end] * count, *listed[end:])


def _same(
    first: Sequence[_Seen], second: Sequence[_Seen], own: Mapping[int, tuple[int, int]],
    bounds: tuple[int, int, int],
) -> tuple[set[int], dict[int, int]]:  # fmt: skip
    """The slots that both periods name, and for what the first is handed what it hands on.

    Uneven where what they name otherwise is not a period apart.
    """
    fixed, low, high = bounds
    same: set[int] = set()
    apart: dict[int, int] = {}
    for a, b in zip(first, second, strict=True):
        if a.form != b.form or len(a.slots) != len(b.slots):
            raise Uneven
        for x, y in zip(a.slots, b.slots, strict=True):
            if x in own or y in own:
                f, layer = own.get(x, (-1, THIRD))
                alike = layer < THIRD and own.get(y) == (f, layer + 1)
                apart[x] = y
            elif x == y:
                alike = x < low
                same.add(x)
            else:
                # What a layer makes, or is handed: for the next one that is what this one made.
                alike = y - x == high - low if x >= low else fixed <= x and low <= y < high
                alike = alike and x < high and apart.setdefault(x, y) == y
            if not alike:
                raise Uneven
    apart |= {slot: slot for slot in same if slot not in apart}
    for a, b in zip(first, second, strict=True):  # what a step frees is in no order
        if sorted([apart.get(slot, -1) for slot in a.drops]) != sorted(b.drops):
            raise Uneven
    if any(apart[slot] != slot for slot in same):
        raise Uneven
    return same, {x: y for x, y in apart.items() if fixed <= x < low and x != y}


def _seen(step: tuple[Any, ...], made: Description) -> _Seen:
    """A step as it is compared."""
    assert made.settled.fixed is not None
    numbers, slots, places = made.settled.fixed[0], list[int](), list[int]()

    def place(kind: str, index: int) -> Any:
        at, form = (index, None) if kind == "launch" else made.lodged[index]
        places.append(numbers[at])
        return form

    form = _moved((*step[:-1], ()), _noted(slots), place)
    return _Seen(form, slots, places, step[-1])


def _noted(slots: list[int]) -> Callable[[int], int]:
    def note(slot: int) -> int:
        slots.append(slot)
        return -1

    return note


def _next(slots: deque[int], slot: int) -> int:
    return slots.popleft()


def _kept(kind: str, index: int) -> Any:
    return index


Slot = Callable[[int], int]
Place = Callable[[str, int], Any]


def _moved(step: tuple[Any, ...], slot: Slot, place: Place = _kept) -> tuple[Any, ...]:
    """The step over other slots, and with what `place` gives for those in the arena."""
    return (*MOVED[step[0]](step[:-1], slot, place), tuple([slot(one) for one in step[-1]]))


def _refs(refs: Iterable[tuple[int, int]], kind: str, slot: Slot, place: Place) -> tuple[Any, ...]:
    return tuple([(where, place(kind, at) if where else slot(at)) for where, at in refs])


def _call(step: tuple[Any, ...], slot: Slot, place: Place) -> tuple[Any, ...]:
    kind, op, arguments, names, results, packed, native, words, work = step
    arguments = tuple([_argument(one, slot, place) for one in arguments])
    results = tuple([(slot(made) if made >= 0 else made, *rest) for made, *rest in results])
    words = tuple([
        (word, _refs(value, kind, slot, place)) if word in TENSORS else (word, value) for word, value in words
    ])  # fmt: skip
    return kind, op, arguments, names, results, packed, native, words, work


MOVED: dict[str, Callable[[tuple[Any, ...], Slot, Place], tuple[Any, ...]]] = {
    "launch": lambda step, slot, place: (*step[:2], _refs(step[2], step[0], slot, place), step[3]),
    "make": lambda step, slot, place: (step[0], slot(step[1]), step[2]),
    "show": lambda step, slot, place: (step[0], slot(step[1]), slot(step[2]), *step[3:]),
    "call": _call,
}


def _argument(argument: tuple[str, Any], slot: Slot, place: Place) -> tuple[str, Any]:
    kind, value = argument
    if kind == "s":
        return kind, slot(value)
    if kind == "p":
        return kind, place("call", value)
    if kind in "tl":
        return kind, tuple([_argument(one, slot, place) for one in value])
    return argument
