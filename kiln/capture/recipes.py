"""What one call of a module read and recorded, and the same for another module."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version
from torch.fx import Node

from kiln.base.dataclass import dataclass
from kiln.base.graph import mapped
from kiln.base.source import Const, DictAttr, Source, Step
from kiln.capture.frame import Differs, Machine
from kiln.capture.recorder import Bound, moved
from kiln.capture.told import path_of
from kiln.capture.world import CONSTANTS
from kiln.check.guards import (
    Absent,
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
from kiln.check.torch_guards import Holds, facts
from kiln.check.tree import STEPS, Moved, Pattern
from kiln.ops.fake import FakeTensor, fake_like

#: Guards that say the same of another path.
MOVABLE = frozenset({
    TypeIs, Is, Equals, Length, Keys, Contains, Absent, SetEquals, FunctionState, Custom, Holds,
})  # fmt: skip
#: What a module may hold that decides, unguarded, how it is called.
CALLED_OTHERWISE = ("_compiled_call_impl", "_initialize_hook")


@dataclass(slots=True, eq=False)
class Call:
    """One call of a module as it was interpreted."""

    module: torch.nn.Module
    tensors: list[FakeTensor]  # those among the arguments, each once
    switches: tuple[Any, ...]
    writes: int
    events: tuple[int, int]
    nodes: list[Node]
    where: str
    result: Any
    made: list[Bound]  # the new tensors in the result, and what they are in the graph
    models: list[FakeTensor]  # what those were like when they were given
    rebound: list[Bound]  # other tensors that nodes of this call stand for since
    recipe: Recipe | None = None


@dataclass(slots=True, eq=False)
class Place:
    """A path that leads through the module, and what was there."""

    source: Source
    base: int  # the place that the path goes on from; of a module inside, that of the path to it
    value: Any


@dataclass(eq=False)
class Recipe:
    """What a call read through its module, parents first, and what it read besides."""

    NONE: ClassVar[Recipe]

    places: list[Place] = field(default_factory=list)
    checks: list[tuple[Guard, tuple[int, ...]]] = field(default_factory=list)
    tensors: dict[int, FakeTensor] = field(default_factory=dict)  # by place
    facts: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)  # ids of modules that it did not reach through its own
    shared: list[Guard | Moved | Source] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    pattern: Pattern = Pattern((), ())
    moving: frozenset[int] = frozenset()  # the checks that a copy has in its pattern


Recipe.NONE = Recipe()


def read(m: Machine, call: Call) -> Recipe:
    """The recipe of a call; NONE where it cannot be another module's."""
    try:
        return _Reader(m, call).recipe
    except Exception:
        return Recipe.NONE


class _Reader:
    """Sorts the events of a call by whether they lead through its module."""

    def __init__(self, m: Machine, call: Call) -> None:
        self.m, self.world, self.recipe = m, m.world, Recipe()
        self._index: dict[Source, int] = {}
        self._met: set[int] = set()  # places of objects that this call met first
        #: Places of objects that were known by other paths, and are read by those.
        self._fixed: set[int] = set()
        self._module(call.module, -1)
        seen: set[object] = set()
        for event in self.world.events[slice(*call.events)]:
            if isinstance(event, Source):
                self._known(event)
                continue
            for guard in event.guards() if isinstance(event, Moved) else (event,):
                if (key := guard.key()) not in seen:
                    seen.add(key)
                    self._guard(guard)
        self._confirm(call)
        self._write_pattern()

    def _module(self, module: torch.nn.Module, found: int) -> None:
        source = Const(module)
        if source not in self._index:
            self._index[source] = len(self.recipe.places)
            self.recipe.places.append(Place(source, found, module))

    def _place(self, source: Source) -> int:
        """The place of a path that leads through the module; -1 for another path."""
        known = self._index.get(source, -1)
        if known >= 0 or not isinstance(source, Step):
            return known
        base = self._place(source.base)
        if base >= 0:
            known = self._index[source] = len(self.recipe.places)
            self.recipe.places.append(Place(source, base, source.of(self.recipe.places[base].value)))
        return known

    def _known(self, source: Source) -> None:
        """Something was read of which guards spoke before: of what is the module's, in this very call."""
        place = self._place(source)
        if place < 0:
            self.recipe.shared.append(source)
        elif place not in self._met:
            raise Differs

    def _guard(self, guard: Guard) -> None:
        related = type(guard) is SameObject or type(guard) is Distinct
        sources = guard.sources if related else (guard.source,)  # type: ignore[attr-defined]
        places = tuple([self._place(source) for source in sources])
        if max(places) < 0:
            values = [source.value for source in sources if isinstance(source, Const)]
            values.append(getattr(guard, "value", None))
            self.recipe.others.update([id(v) for v in values if isinstance(v, torch.nn.Module)])
            self.recipe.shared.append(guard)
            return
        if not (related or type(guard) in MOVABLE) or type(guard) is Distinct and min(places) < 0:
            raise Differs
        self.recipe.checks.append((guard, places))
        if type(guard) is SameObject and min(places) < 0:
            self._fixed.add(max(places))
        if type(guard) is TypeIs or type(guard) is Is:
            self._met.update(places)
        if type(guard) is Is:
            if isinstance(guard.value, torch.nn.Module):
                self._module(guard.value, places[0])
            elif isinstance(guard.value, torch.Tensor):
                self._tensor(guard.value, places[0])

    def _tensor(self, real: torch.Tensor, place: int) -> None:
        known = self.world.tensors.get(id(real))
        if known is None or not self.world.owned(known[1]) or str(known[1]) in self.world.unstable:
            raise Differs
        self.recipe.tensors[place] = known[0]
        self.recipe.facts[place] = tensor_facts(real)

    def _confirm(self, call: Call) -> None:
        """Everything of the module's must have been read here, by guards, and be no part of the arguments."""
        recipe, world = self.recipe, self.world
        given = {id(fake) for fake in call.tensors}
        if not given.isdisjoint([id(fake) for fake in recipe.tensors.values()]):
            raise Differs
        for place in [p for i, p in enumerate(recipe.places) if i not in self._fixed]:
            if id(place.value) in world.instance or id(place.value) in recipe.others:
                raise Differs
            space = getattr(place.value, "__dict__", None)
            if id(space) in world.shadow_of:
                raise Differs
            if isinstance(place.source, Const):
                for name in ("_parameters", "_buffers", "_modules"):
                    known = self._index.get(DictAttr(place.source, name), -1)
                    if id(space.get(name)) in world.shadow_of and known not in self._met:  # type: ignore[union-attr]
                        raise Differs
        own = {id(fake) for fake in recipe.tensors.values()} | given
        nodes = self.m.recorder.copyable(call.nodes, own, world.sources)
        if nodes is None:
            raise Differs
        recipe.nodes = nodes

    def _write_pattern(self) -> None:
        """Note which checks a copy has by their numbers alone: those of one path that C walks by itself."""
        recipe, walked = self.recipe, list[bool]()
        steps: list[tuple[Step | None, int]] = []
        for place in recipe.places:
            step = None if isinstance(place.source, Const) else place.source
            assert step is None or isinstance(step, Step)
            walked.append(step is None or type(step) in STEPS and walked[place.base])
            steps.append((step, place.base))
        recipe.pattern = Pattern(steps, [(guard, at[0], guard.emit()) for guard, at in recipe.checks])
        recipe.moving = frozenset(
            [i for i, (_, at) in enumerate(recipe.checks) if len(at) == 1 and walked[at[0]]]
        )


def tensor_facts(real: torch.Tensor) -> tuple[Any, ...]:
    """All that a fake of a parameter or buffer shows of it."""
    return type(real), *facts(real), real.storage_offset(), real.is_leaf


class Match:
    """Another module where the module of a recipe was: what it holds at all places, compared.

    What it shares with that module, a configuration or a module, is the same to both.
    """

    def __init__(self, m: Machine, recipe: Recipe, module: torch.nn.Module) -> None:
        self.m, self.world, self.recipe = m, m.world, recipe
        self.module = module
        self.values: list[Any] = []
        self.shared: list[bool] = []
        self.roots: dict[int, Source] = {}  # where paths begin: at modules
        self.new: dict[int, int] = {}  # id of what stands in the place of something -> id of that
        self.old: dict[int, int] = {}
        self._sources: dict[int, Source] = {}
        try:
            for number, place in enumerate(recipe.places):
                value, shared = self._find(number, place)
                self.values.append(value)
                self.shared.append(shared)
            #: Which checks speak of nothing that this module has of its own; -1 is no place.
            known = [*self.shared, True]
            self.same = [
                known[places[0]] if len(places) == 1 else all(map(known.__getitem__, places))
                for _, places in recipe.checks
            ]
            for same, (guard, places) in zip(self.same, recipe.checks, strict=True):
                if not same:
                    self._compare(guard, places)
        except Exception:
            raise Differs from None

    def _find(self, number: int, place: Place) -> tuple[Any, bool]:
        """What is at a place of this module, and whether it is what the other has there."""
        base, world = place.base, self.world
        step: Any = place.source
        if type(step) is Const:
            value = self.module if base < 0 else self.values[base]
            source = self.roots[number] = world.source(value) or Const(value, str(self.source(base)))
            if value is place.value:
                return value, True
            space = value.__dict__
            alike = type(value) is type(place.value) and type(source) is Const
            if not alike or id(value) in self.recipe.others:
                raise Differs
            if any(space.get(name) is not None for name in CALLED_OTHERWISE):
                raise Differs
            self._paired(place.value, value)
            return value, False
        if self.shared[base]:
            return place.value, True
        value = step.of(self.values[base])
        if world.unstable and str(self.source(number)) in world.unstable:
            raise Differs
        return value, (
            value is place.value and type(value) not in CONSTANTS and world.source(value) is not None
        )

    def source(self, place: int) -> Source:
        """The path to what is at a place."""
        found = self.roots.get(place) or self._sources.get(place)
        if found is None:
            known = self.recipe.places[place]
            step: Any = known.source
            shared = known.base < len(self.shared) and self.shared[known.base]
            found = self._sources[place] = step if shared else step.after(self.source(known.base))
        return found

    def _paired(self, old: Any, new: Any) -> None:
        """Objects are told apart by identity: two of one are two of the other."""
        was, now = id(old), id(new)
        if self.old.setdefault(was, now) != now or self.new.setdefault(now, was) != was:
            raise Differs
        if id(new) in self.world.instance or id(getattr(new, "__dict__", None)) in self.world.shadow_of:
            raise Differs

    def _compare(self, guard: Guard, places: tuple[int, ...]) -> None:
        place = places[0]
        if type(guard) is SameObject and min(places) < 0:
            at = max(places)
            if self.values[at] is not self.recipe.places[at].value:
                raise Differs
        elif type(guard) is SameObject or type(guard) is Distinct:
            if not guard.test([self.values[at] for at in places]):
                raise Differs
        elif type(guard) is Is and isinstance(guard.value, torch.nn.Module):
            self._paired(guard.value, self.values[place])
        elif type(guard) is Is and place in self.recipe.tensors:
            self._paired(self.recipe.places[place].value, self.values[place])
            real = self.values[place]
            if tensor_facts(real) != self.recipe.facts[place] or self.world.source(real) is not None:
                raise Differs
        elif not guard.test(self.values[place]):
            raise Differs
        elif type(guard) is TypeIs and not isinstance(guard.source, Const):
            self._paired(self.recipe.places[place].value, self.values[place])

    def copy(self, call: Call, tensors: list[FakeTensor]) -> Any:
        """Add the guards and nodes that this call leads to; its result."""
        world, recipe = self.world, self.recipe
        for place, shared in enumerate(self.shared):
            base = recipe.places[place].base
            if shared and base >= 0 and not self.shared[base]:
                world.outside(self.values[place], self.source(place))
        others = dict(zip(map(id, call.tensors), tensors, strict=True))
        for source in self.roots.values():
            if type(source) is Const and world.source(source.value) is None:
                world.pinned.add(id(source.value))
                world.remember(source.value, source)
        chosen: list[int] = []
        values: dict[int, Any] = {}
        for number, (guard, places) in enumerate(recipe.checks):
            place = places[0]
            if self.same[number]:
                world.events.append(guard)
                continue
            if len(places) > 1:
                sources = [
                    self.source(at) if at >= 0 else guard.sources[i]  # type: ignore[attr-defined]
                    for i, at in enumerate(places)
                ]
                world.guard(SameObject(*sources) if type(guard) is SameObject else Distinct(sources))
                continue
            if type(guard) is Is and place in recipe.tensors:
                facts = recipe.facts[place][:-2]
                values[number] = self.values[place]
                fake = world.parameter(values[number], self.source(place), facts)
                others[id(recipe.tensors[place])] = fake
            elif type(guard) is Is and isinstance(guard.value, torch.nn.Module):
                values[number] = self.values[place]
            if number in recipe.moving:
                chosen.append(number)
            elif number in values:
                world.guard(Is(self.source(place), values[number]))
            else:
                world.guard(guard.at(self.source(place)))
        world.guard(Moved(recipe.pattern, self.roots, chosen, values))
        world.events += recipe.shared
        paths = {}
        if self.m.recorder.within is not None:
            for old, new in zip(recipe.places, self.values, strict=True):
                if isinstance(old.source, Const):
                    paths[path_of(world.source(old.value))] = path_of(world.source(new))
        return recorded_again(self.m, call, recipe.nodes, others, paths)


def recorded_again(
    m: Machine, call: Call, nodes: list[Node], others: dict[int, FakeTensor], paths: dict[str, str]
) -> Any:
    """The result of a call whose nodes are recorded once more, with other tensors in place of some."""
    m.copies += 1
    for (fake, _), model in zip(call.made, call.models, strict=True):
        others[id(fake)] = made_like(model)
    copies = m.recorder.copy(nodes, others, (call.where, m.where()), paths)
    for fake, binding in (*call.made, *call.rebound):
        m.recorder.bind(others.get(id(fake), fake), moved(binding, copies))
    return replaced(call.result, others)


def same_again(m: Machine, call: Call, tensors: list[FakeTensor]) -> Any:
    """The result of the same call of the same module, of which everything is known but the tensors given."""
    others = dict(zip(map(id, call.tensors), tensors, strict=True))
    nodes = m.recorder.copyable(call.nodes, set(others), m.world.sources)
    if nodes is None:
        raise Differs
    m.world.events += m.world.events[slice(*call.events)]
    return recorded_again(m, call, nodes, others, {})


def made_like(fake: FakeTensor) -> FakeTensor:
    """A new tensor that shows the same as one that was made before."""
    made = fake_like(fake)
    for _ in range(0 if fake.is_inference() else fake._version):
        increment_version(made)
    return made


def replaced(value: Any, fakes: dict[int, Any]) -> Any:
    """The nest with other tensors, in new containers."""
    return mapped(value, lambda item: fakes.get(id(item), item) if type(item) is FakeTensor else item)
