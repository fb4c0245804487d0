"""Autograd functions of the program: nodes with forward and backward; inlined where no gradient is wanted.

Their forward runs on fakes while it is captured. Where it changes something that is not its own, what it
changed is put back, and the call is left to Python.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from kiln.base.errors import Break
from kiln.base.outside import HOLDING, Outside, parts_of, unheard
from kiln.capture.attributes import mro_lookup
from kiln.capture.calls import Args, Kwargs, handles, leaf
from kiln.capture.frame import Machine, Restart
from kiln.capture.torch_calls import Named, lasts
from kiln.capture.world import CONSTANTS
from kiln.ops.fake import FakeTensor


@handles(torch.autograd.Function.apply.__func__)  # type: ignore[attr-defined]
def apply_function(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A custom autograd function: one node with forward and backward; inlined without differentiation."""
    cls, *rest = args
    plain = mro_lookup(cls, "setup_context") is NO_SETUP and mro_lookup(cls, "vmap") is NO_VMAP
    if plain and not torch.is_grad_enabled():
        return apply_inline(m, cls, tuple(rest), kwargs)
    own = vars(cls).values() if m.source(cls) is None else ()
    if not all(lasts(m, getattr(part, "__func__", part)) for part in own if isinstance(part, staticmethod)):
        why = f"{cls.__name__}, which is made here, refers to objects that are made here, too"
        raise Break("foreign-object", why, "define it outside the compiled function")
    before = torch.get_rng_state()
    applied = Named(functools.partial(watched, m, cls), cls.__name__, cls)
    made = leaf(m, applied, tuple(rest), kwargs)
    applied.function = cls.apply
    if not torch.equal(before, torch.get_rng_state()):  # fakes draw nothing
        torch.set_rng_state(before)
        why = f"{cls.__name__} seeds the random generator"
        raise Break("random-state", why, "seed outside the compiled function")
    return made


def watched(m: Machine, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Apply an autograd function to fakes; where that changes an object capture begins again."""
    given, outside = contents(m, (*args, *kwargs.values())), Outside(cls, "forward", "setup_context")
    if watch(m, outside, (*args, *kwargs.values())):
        raise refused(m, f"{cls.__name__} is given a module, which its backward may run and differentiate")
    said: list[str] = []
    try:
        with unheard() as said:
            return cls.apply(*args, **kwargs)
    finally:
        changed = outside.put_back()
        if said:
            raise Restart(m.safe_step(), Break("io", f"{cls.__name__} prints", "print outside of it"))
        if changed or contents(m, (*args, *kwargs.values())) != given:
            whose = "others have" if changed else "it is given"
            raise refused(m, f"{cls.__name__} changes an object that {whose}")


def refused(m: Machine, why: str) -> Restart:
    return Restart(m.safe_step(), Break("side-effect", why, "give it tensors, and return what is new"))


def watch(m: Machine, outside: Outside, values: Any) -> bool:
    """Add what stands, to any depth, in objects from outside that it is given; whether modules do."""
    seen, left = set[int](), [(value, False) for value in values]
    while left:
        value, known = left.pop()
        if id(value) in seen or type(value) in UNCHANGED or isinstance(value, (torch.Tensor, type)):
            continue
        if isinstance(value, torch.nn.Module):
            return True
        seen.add(id(value))
        known = known or m.source(value) is not None and id(value) not in m.world.shadows
        parts: Any = value if isinstance(value, (tuple, frozenset)) else ()
        if type(value) in HOLDING or hasattr(value, "__dict__"):
            parts = parts_of(value)
            outside.held += [(value, parts)] if known else ()
        left += [(part, known) for part in (parts.values() if isinstance(parts, dict) else parts)]
    return False


def contents(m: Machine, values: Any) -> dict[int, Any]:
    """The objects that the program has made, to any depth, by id: each with the ids of what it holds."""
    found: dict[int, Any] = {}
    left = list(values)
    while left:
        value = left.pop()
        if id(value) in found or type(value) in UNCHANGED or m.source(value) is not None:
            continue
        parts = [*value] if isinstance(value, (list, tuple, set)) else []
        parts += (*value, *value.values()) if isinstance(value, dict) else ()
        parts += (value.__dict__,) if hasattr(value, "__dict__") else ()
        found[id(value)] = value, [id(part) for part in parts]
        left += parts
    return found


UNCHANGED = frozenset({*CONSTANTS, FakeTensor, type, types.ModuleType, types.FunctionType})


def apply_inline(m: Machine, cls: Any, args: Args, kwargs: Kwargs) -> Any:
    """Forward alone, with a context that nobody will read; an input that comes back comes back as a view."""
    context = Context()
    context.needs_input_grad = (False,) * len(args)
    m.world.constant(Context)
    out = m.call(m.getattr(cls, "forward"), (context, *args), kwargs)
    changed = {id(value) for value in context.dirty}
    given = {id(value) for value in args if type(value) is FakeTensor} - changed

    def fresh(value: Any) -> Any:
        return m.torch_call(torch.Tensor.view_as, (value, value), {}) if id(value) in given else value

    return tuple([fresh(value) for value in out]) if type(out) is tuple else fresh(out)


class Context:
    """What forward of an autograd function is given when nothing will be differentiated."""

    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()
    dirty: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    def ignored(self, *args: Any) -> None:
        """What matters for a backward alone."""

    save_for_forward = mark_non_differentiable = set_materialize_grads = ignored


NO_SETUP = mro_lookup(torch.autograd.Function, "setup_context")
NO_VMAP = mro_lookup(torch.autograd.Function, "vmap")
