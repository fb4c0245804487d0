"""A module called again: what an earlier call read is compared, and what it recorded is copied.

The guards of a capture cover all that it read, and so do those that came while one call of a module was
interpreted. Where each of them holds for another module of that class, with the paths that lead through the
one leading through the other instead, tensors of the same facts where its parameters were and arguments of
the same types, interpreting the call would record the same nodes over the other's parameters. A call that
did more than that, wrote something or gave more than tensors and constants, is always interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from kiln.base import state
from kiln.base.source import Const
from kiln.capture import runtime
from kiln.capture.frame import Differs, Machine
from kiln.capture.nodes import Args, Kwargs
from kiln.capture.recipes import Call, Match, Recipe, made_like, read, replaced, same_again
from kiln.capture.recorder import Bound, Recorder, whole
from kiln.capture.world import CONSTANTS, World
from kiln.check import layout
from kiln.ops.fake import FakeTensor
from kiln.ops.record import spec_of
from kiln.ops.symint import SYMBOLIC, expr_of

#: How many different calls of one shape are remembered.
MOST = 4
#: Constants that compare otherwise than programs see them, or cannot be keys.
BY_TEXT = frozenset({float, complex, slice, torch.finfo, torch.iinfo, torch.Size})
#: What a fake may carry and still be no more than its layout.
NOTES = frozenset({"real_type", "value", "value_version"})


def call(m: Machine, module: torch.nn.Module, args: Args, kwargs: Kwargs, run: Callable[[], Any]) -> Any:
    """What the module gives: a copy of an earlier call that was the same, or else that of `run`."""
    tensors: list[FakeTensor] = []
    key = shape_of(m, module, args, kwargs, tensors)
    known = m.calls.setdefault(key, []) if key is not None else None
    if known is None or not m.copying or not unchanged(m.world):
        return run()
    switches = switches_of(m)
    for earlier in known:
        if earlier.switches == switches and earlier.writes == m.world.writes:
            try:
                return copied(m, earlier, module, tensors)
            except Differs:
                continue
    before, versions, where = effects_of(m), versions_of(tensors), m.where()
    recorder, events = m.recorder, len(m.world.events)
    mark = recorder.count()
    result = run()
    made: list[Bound] = []
    nodes, given = recorder.since(mark), {id(fake) for fake in tensors}
    computed = effects_of(m) == before and versions_of(tensors) == versions
    computed = computed and switches_of(m) == switches and unchanged(m.world)  # and did nothing else
    if nodes is None or not computed or not portable(m, result, given, set(nodes), made):
        m.calls[key] = None
    elif len(known) < MOST:
        rebound = recorder.rebound(mark, lambda fake: id(fake) in given or m.source(fake) is not None)
        span, models = (events, len(m.world.events)), [made_like(fake) for fake, _ in made]
        kept = replaced(result, {})
        known.append(
            Call(module, tensors, switches, before[0], span, nodes, where, kept, made, models, rebound)
        )
    return result


def copied(m: Machine, earlier: Call, module: torch.nn.Module, tensors: list[FakeTensor]) -> Any:
    """The result of a copy; Differs, with nothing done, where the call is another one."""
    if module is earlier.module:
        return same_again(m, earlier, tensors)
    if earlier.recipe is None:
        earlier.recipe = read(m, earlier)
    if earlier.recipe is Recipe.NONE:
        raise Differs
    return Match(m, earlier.recipe, module).copy(earlier, tensors)


def shape_of(
    m: Machine, module: torch.nn.Module, args: Args, kwargs: Kwargs, tensors: list[FakeTensor]
) -> Any:
    """What must be equal in two calls for one to be copied; None for a call that is always interpreted."""
    if m.modes or type(m.recorder) is not Recorder or not isinstance(m.world.source(module), Const):
        return None
    parts: list[Any] = [type(module), len(args), *kwargs]
    for value in (*args, *kwargs.values()):
        if not describe(m.world, value, tensors, parts):
            return None
    return tuple(parts)


def describe(world: World, value: Any, tensors: list[FakeTensor], parts: list[Any]) -> bool:
    """Append what must be equal in a value; False for one that a call may change, or depend on otherwise."""
    kind = type(value)
    if kind is FakeTensor:
        parts.append(next((i for i, fake in enumerate(tensors) if fake is value), -1))
        if parts[-1] < 0:
            tensors.append(value)
            parts += (
                spec_of(value), value.requires_grad, value.is_leaf, value._is_view(), layout.keys_of(value),
                value.real_type,
                id(value) if value.value is not None or world.source(value) is not None else 0,
            )  # fmt: skip
        return value.memory is None and id(value) not in world.instance
    if kind is tuple:
        parts.append(len(value))
        return all(describe(world, item, tensors, parts) for item in value)
    if kind in SYMBOLIC:
        parts += (kind, expr_of(value))
        return True
    if kind in CONSTANTS:
        parts += (kind, repr(value) if kind in BY_TEXT else value)
        return True
    parts.append(id(value))
    strange = isinstance(value, (list, dict, set)) or id(value) in world.streams or id(value) in world.frozen
    return world.source(value) is not None and not strange


def switches_of(m: Machine) -> tuple[Any, ...]:
    """The state that torch functions depend on."""
    modes = torch.is_inference_mode_enabled(), torch._C._len_torch_function_stack()
    return *state.snapshot(), *modes, *m.devices, len(m.entered)


def effects_of(m: Machine) -> tuple[Any, ...]:
    """What grows when the program does more than compute; tensors of inference mode tell of no write."""
    world, silent = m.world, torch.is_inference_mode_enabled()
    return (
        world.writes, len(world.streams), len(world.entered), len(world.memories), len(world.frozen),
        len(m.expected), m.advanced, m.recorder.region_count, m.recorder.dispatch.writes if silent else 0,
    )  # fmt: skip


def versions_of(tensors: list[FakeTensor]) -> list[int]:
    """How often each tensor was written."""
    return [-1 if fake.is_inference() else fake._version for fake in tensors]


def unchanged(world: World) -> bool:
    """Whether every container from outside holds what it held."""
    for shadow in world.shadows.values():
        if shadow.changed() or runtime.attribute_writes(shadow):
            return False
    return True


def portable(m: Machine, value: Any, given: set[int], nodes: set[Node], made: list[Bound]) -> bool:
    """Whether a result can be made again for another call: tensors and constants in new containers."""
    kind = type(value)
    if kind is FakeTensor:
        if id(value) in given or m.source(value) is not None:
            return True
        binding = m.recorder.binding(value)
        bare = value.value is None and vars(value).keys() <= NOTES and id(value) not in m.world.instance
        if value._is_view() or value.is_leaf and value.requires_grad or not bare:
            return False
        if binding is None or whole(binding) not in nodes:
            return False
        made.append((value, binding))
        return True
    if kind is dict:
        return m.source(value) is None and all(
            type(k) in CONSTANTS and portable(m, v, given, nodes, made) for k, v in value.items()
        )
    if kind is tuple or kind is list:
        return m.source(value) is None and all(portable(m, item, given, nodes, made) for item in value)
    return kind in CONSTANTS
