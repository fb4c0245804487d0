"""Guards in words: for each kind the sentence that says what must hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kiln.base.source import readable
from kiln.check import guards, shapes, torch_guards
from kiln.check.values import MISSING, show


def sentence(guard: guards.Guard) -> str:
    """What must hold, for a person: "x is a float32 tensor of shape (8, 64) on cpu"."""
    say = SENTENCES.get(type(guard))
    return readable(" ".join(str(guard if say is None else say(guard)).split()))


def _object(guard: Any) -> str:
    value = guard.value
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if isinstance(name, str):
        return f"{guard.source} is {name}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{guard.source} is {show(value)}"
    return f"{guard.source} is the same {type(value).__name__} as before"


def _tensor(guard: Any) -> str:
    kind = "" if guard.type.__name__ == "Tensor" else f" ({guard.type.__name__})"
    grad = ", with gradients" if guard.requires_grad else ""
    shape = f"({', '.join(map(str, guard.shape))}{',' * (len(guard.shape) == 1)})"
    dtype = str(guard.dtype).removeprefix("torch.")
    return f"{guard.source} is a {dtype} tensor{kind} of shape {shape} on {guard.device}{grad}"


def _type(guard: Any) -> str:
    kind: type = guard.type
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{guard.source} is of type {home}{kind.__qualname__}"


def _length(guard: Any) -> str:
    if not guard.n:
        return f"{guard.source} is empty"
    return f"{guard.source} has {guard.n} element{'s' * (guard.n > 1)}"


def _keys(guard: Any) -> str:
    keys = ", ".join(map(show, guard.keys))
    return f"{guard.source} has the keys {keys}, in this order" if keys else f"{guard.source} is empty"


def _class_attribute(guard: Any) -> str:
    if guard.value is MISSING:
        return f"{guard.source} has no attribute {guard.name}"
    return f"{guard.source}.{guard.name} is as the class defines it"


SENTENCES: dict[type, Callable[[Any], str]] = {
    guards.TypeIs: _type,
    guards.Is: _object,
    guards.Equals: lambda guard: f"{guard.source} is {show(guard.value)}",
    guards.Length: _length,
    guards.Keys: _keys,
    guards.Contains: lambda guard: f"{guard.source} {'has' if guard.present else 'lacks'} {show(guard.item)}",
    guards.Absent: lambda guard: f"{guard.source} has no attribute {guard.name} of its own",
    guards.SetEquals: lambda guard: f"{guard.source} is {show(set(guard.elements))}",
    guards.FunctionState: lambda guard: f"{guard.source} has the code and the defaults it had",
    guards.ClassAttr: _class_attribute,
    guards.SameObject: lambda guard: f"{guard.sources[0]} and {guard.sources[1]} are one object",
    guards.Distinct: lambda guard: f"{', '.join(map(str, guard.sources))} are different objects",
    guards.Custom: lambda guard: f"{guard.source} {guard.text}",
    torch_guards.TensorMatch: lambda guard: f"{_tensor(guard)}, strides {guard.strides}",
    shapes.ShapedMatch: _tensor,
    shapes.AnyNumber: lambda guard: f"{guard.source} is any {guard.type.__name__}",
}
