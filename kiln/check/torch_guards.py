"""Guard kinds about tensors and torch's global state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kiln import _hook
from kiln.base.dataclass import dataclass
from kiln.base.source import Const, Source
from kiln.check import layout, state
from kiln.check.guards import Guard, Paths
from kiln.check.state import State, read_state
from kiln.check.values import show


@dataclass(frozen=True, slots=True, eq=False)
class TensorMatch(Guard):
    """What compiled code assumes of a tensor: type, dtype, device, sizes, requires_grad, dispatch keys."""

    type: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    strides: tuple[Any, ...] | None
    requires_grad: bool
    dispatch_keys: int

    @staticmethod
    def of(source: Source, tensor: torch.Tensor) -> TensorMatch:
        return TensorMatch(source, type(tensor), *facts(tensor))

    def __str__(self) -> str:
        return f"{self.looks()}, strides {self.strides}"

    def looks(self) -> str:
        """What it is but for its strides."""
        kind = "" if self.type.__name__ == "Tensor" else f" ({self.type.__name__})"
        grad = ", with gradients" if self.requires_grad else ""
        shape = f"({', '.join(map(str, self.shape))}{',' * (len(self.shape) == 1)})"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.source} is a {dtype} tensor{kind} of shape {shape} on {self.device}{grad}"

    def test(self, value: Any) -> bool:
        return type(value) is self.type and self._differs(facts(value)) is None

    def _expected(self) -> tuple[Any, ...]:
        return self.dtype, self.device, self.shape, self.strides, self.requires_grad, self.dispatch_keys

    def _differs(self, now: tuple[Any, ...]) -> str | None:
        """The first fact that is not as it was, in words."""
        names = ("dtype", "device", "shape", "strides", "requires_grad", "dispatch keys")
        pairs = zip(names, self._expected(), now, strict=True)
        return next((f".{name} was {old}, now {new}" for name, old, new in pairs if old != new), None)

    def describe(self, value: Any) -> str:
        if type(value) is not self.type:
            return f" was of type {show(self.type)}, now {show(type(value))}"
        return self._differs(facts(value)) or " matches"

    def emit(self) -> tuple[int, Any]:
        if self.strides is None or not layout.is_plain(self.dispatch_keys):
            return _hook.CHECK_TEST, self.test
        kind = layout.kind_word(self.dtype, self.device)
        facts = self.type, kind, self.dispatch_keys, self.requires_grad, self.shape, self.strides
        return _hook.CHECK_TENSOR, facts

    def key(self) -> object:
        return type(self), self.source, self.type, *self._expected()


_DTYPE, _DEVICE, _SHAPE = (torch._C.TensorBase.__dict__[n].__get__ for n in ("dtype", "device", "shape"))
_LAYOUT, _REQUIRES_GRAD = (torch._C.TensorBase.__dict__[n].__get__ for n in ("layout", "requires_grad"))


def facts(t: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is: dtype, device, sizes, strides (None without), requires_grad, dispatch keys."""
    with torch._C.DisableTorchFunctionSubclass():
        strides = tuple(torch._C.TensorBase.stride(t)) if _LAYOUT(t) is torch.strided else None
        return _DTYPE(t), _DEVICE(t), tuple(_SHAPE(t)), strides, _REQUIRES_GRAD(t), layout.keys_of(t)


class GlobalState(Guard):
    """A snapshot of the switches that change what torch functions do."""

    __slots__ = ("state",)
    state: State

    def __init__(self, state: State) -> None:
        Guard.__init__(self, Const(None, "global state"))
        object.__setattr__(self, "state", state)

    def __str__(self) -> str:
        return "torch's modes and defaults stay as they were"

    @staticmethod
    def now() -> GlobalState:
        state.ready()  # found out while no mode of a capture is on
        return GlobalState(read_state())

    def test(self, value: Any) -> bool:
        return read_state() == self.state

    def why(self, argv: Sequence[Any]) -> str:
        now = read_state()
        for name, old in self.state.items():
            if now[name] != old:
                return f"{name} was {old}, now {now[name]}"
        return "global state matches"

    def nodes(self, paths: Paths) -> tuple[int, ...]:
        return ()

    def emit(self) -> tuple[int, Any]:
        operand = state.operand(self.state) if state.ready() else None
        return (_hook.CHECK_CALL, self.holds) if operand is None else (_hook.CHECK_STATE, operand)

    def key(self) -> object:
        return GlobalState, tuple(self.state.items())


@dataclass(frozen=True, slots=True, eq=False)
class Holds(Guard):
    """The numbers in a short tensor that decides what a program does, or those that `of` computes of it."""

    patience = 4
    value: torch.Tensor
    of: Callable[[torch.Tensor], torch.Tensor] = lambda value: value

    @staticmethod
    def named(source: Source) -> str:
        return f"what {source} holds"

    def about(self) -> str:
        return Holds.named(self.source)

    def __str__(self) -> str:
        return f"{self.source} leads to {self.value.tolist()}"

    def test(self, value: Any) -> bool:
        found = self.of(value)
        alike = torch.equal(found, self.value)
        return alike and (not found.is_floating_point() or found.signbit().equal(self.value.signbit()))

    def describe(self, value: Any) -> str:
        return f" led to {self.value.tolist()}, now to {self.of(value).tolist()}"

    def key(self) -> object:
        return Holds, self.source, str(self.value), id(self.of)
