"""Failures: which guard of an entry does not hold, what the value was and is, and what would end that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kiln.base.errors import Place
from kiln.base.records import Failure
from kiln.base.source import Arg, Source, readable
from kiln.check.guards import Equals, FunctionState, Guard, Is, Keys, Length, SetEquals, TypeIs
from kiln.check.shapes import Conditions, ShapedMatch
from kiln.check.torch_guards import GlobalState, TensorMatch

#: How a guard's sentence goes on after what it is about.
VERBS = (" was of type ", " was ", " had length ", " had keys ", " had ", " lacked ", " ran ")


#: How the sentence of a condition goes on after the values.
COMPILED = ": compiled for "


def failure(guard: Guard, argv: Sequence[Any], place: Place | None = None) -> Failure:
    """Why a guard does not hold on these arguments."""
    text = readable(guard.why(argv))
    if isinstance(guard, Conditions):
        place = guard.place(argv) or place
    then, _, now = text.partition(COMPILED)[0].partition(", now ")
    verb = next((verb for verb in VERBS if verb in then), "")
    about, old = then.split(verb, 1) if verb else (readable(str(guard.source)), "")
    with torch._C.DisableTorchFunctionSubclass():  # looks at a tensor are nothing to its class
        return Failure(text, about, old, now, place, remedy(guard, argv))


def remedy(guard: Guard, argv: Sequence[Any]) -> str:
    """What ends recompiles for a guard: a mark, or a change of the program."""
    try:
        value = guard.source.fetch(argv)
    except Exception:
        value = None
    advise = next((a for kind, a in REMEDIES.items() if isinstance(guard, kind)), _as_it_is)
    return readable(advise(guard, value))


def _tensor(guard: Any, value: Any) -> str:
    source = guard.source
    if type(value) is not guard.type:
        return f"pass {source} as one type in every call"
    before = getattr(guard, "seen", guard.shape)
    if len(before) != len(value.shape):
        return f"pass {source} with one number of dimensions: reshape it before the call"
    dims = [i for i, (a, b) in enumerate(zip(before, value.shape, strict=True)) if a != b]
    if dims:
        index = dims[0] if len(dims) == 1 else dims
        return f"call kiln.mark_dynamic({source}, {index}) on the first one, or compile with dynamic=True"
    for name in ("dtype", "device", "requires_grad"):
        if getattr(guard, name) != getattr(value, name):
            return f"pass {source} with one {name} in every call"
    return f"call {source}.contiguous() before the call, so that its strides stay the same"


def _number(guard: Any, value: Any) -> str:
    source: Source = guard.source
    if type(guard.value) not in (int, float) or type(value) not in (int, float):
        return _as_it_is(guard, value)
    if isinstance(source, Arg):
        return f"pass {source} as a tensor, torch.tensor({guard.value!r}), or keep it the same in every call"
    held = f"torch.tensor({guard.value!r})"
    return f"hold {source} in a tensor, {held}, and change what is in it; or keep it constant"


def _as_it_is(guard: Any, value: Any) -> str:
    return f"keep {guard.source} the same in every call, or read it outside of what is compiled"


REMEDIES: dict[type, Callable[[Any, Any], str]] = {
    TensorMatch: _tensor, ShapedMatch: _tensor, Equals: _number, TypeIs: _as_it_is,
    **dict.fromkeys((Length, Keys, SetEquals), lambda guard, value: (
        f"make {guard.source} once, outside of what is compiled, with one length and the same keys, and "
        "change its elements; numbers in it belong in one tensor")),
    **dict.fromkeys((Is, FunctionState), lambda guard, value: (
        f"make {guard.source} once and use that object in every call")),
    Conditions: lambda guard, value: (
        f"let this line work for any {', '.join(map(str, guard.reads))} (use torch ops in place of "
        "Python's), or keep it the same"),
    GlobalState: lambda guard, value: "call it under the same modes and defaults every time",
}  # fmt: skip
