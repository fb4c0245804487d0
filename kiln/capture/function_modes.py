"""Torch function modes that the program enters: their `__torch_function__` is interpreted in place of calls.

What torch tells a mode is found out by making the call under a mode that only listens. The graph holds what
the modes make of the program. A break within such a block is moved to where the block is entered.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from kiln.base.errors import Break
from kiln.capture import attributes, purity
from kiln.capture.calls import Args, Kwargs, call, handles, refuses
from kiln.capture.frame import Machine, Restart
from kiln.capture.torch_calls import entered_before
from kiln.capture.world import MISSING
from kiln.ops.fake import FakeTensor

NATIVE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
HOMES = (torch._C._nn, torch._C._fft, torch._C._linalg, torch._C._special, torch._C._sparse)  # type: ignore[attr-defined]


def refusal() -> Break:
    why = "a torch function mode is entered or left"
    return Break("foreign-context", why, "enter it outside the compiled function")


@handles(_push_mode, TorchFunctionMode.__enter__)
def push(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Enter a mode; one around the whole program runs as it is, and none is interpreted within."""
    (mode,) = args
    if torch._C._len_torch_function_stack():
        raise refusal()
    m.modes.append((mode, m.safe_step()))
    return mode


@handles(_pop_mode, TorchFunctionMode.__exit__)
def pop(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    if not m.modes:
        raise entered_before("a torch function mode")
    m.modes.pop()


def unseen(what: str) -> Break:
    return Break("foreign-context", f"{what} of a tensor within a torch function mode", "compute it before")


refuses("foreign-context", "a torch function mode is left for a while", "use the mode in a with statement",
        torch.overrides._pop_mode_temporarily)  # fmt: skip


def left(m: Machine) -> None:
    """See that the program has left the modes that it entered."""
    if m.modes:
        raise refusal()


def move_out(m: Machine, fullgraph: bool) -> None:
    """Where the program breaks within a mode, begin again and break where the outermost is entered."""
    if m.modes and not fullgraph:
        raise Restart(m.modes[0][1], refusal())


class Told(Exception):
    """What torch has told a mode."""


class Listening(TorchFunctionMode):
    """Learns what torch tells modes of a call, and has the call not made."""

    def __torch_function__(self, *told: Any, **named: Any) -> Any:
        raise Told(*told, *named.values())


def told(function: Any, args: Args, kwargs: Kwargs) -> Any:
    """What torch tells modes of a call; None where it tells nothing."""
    try:
        with Listening():
            function(*args, **kwargs) if kwargs else function(*args)  # a mode sees whether there are none
    except Told as heard:
        return heard.args
    except Exception:
        return None
    return None


def overridable(function: Any) -> bool:
    """Whether torch itself asks modes before it runs a native function."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    if type(function) is types.FunctionType:
        return purity.python_policy(function) == "leaf"
    if type(function) not in NATIVE:
        return False
    owner = getattr(function, "__self__", None)
    if owner is None:
        name = function.__name__
        return getattr(function, "__objclass__", None) is torch._C.TensorBase or \
            getattr(torch._C._VariableFunctions, name, None) is function  # type: ignore[attr-defined]
    return type(owner) is FakeTensor or any(owner is home for home in HOMES)


def intercept(m: Machine, function: Any, args: Args, kwargs: Kwargs, asked: bool = False) -> Any:
    """What the innermost mode makes of a call; MISSING where torch does not ask it."""
    if not asked and not overridable(function):
        return MISSING
    for value in (*args, *kwargs.values()):
        m.world.touch_deep(value)
    heard = told(function, args, kwargs)
    return MISSING if heard is None else by_mode(m, *heard)


def by_mode(m: Machine, function: Any, kinds: Any, *rest: Any) -> Any:
    """The answer of the innermost mode, which the call in it does not see."""
    kinds = tuple([torch.Tensor if kind is FakeTensor else kind for kind in kinds])
    if not kinds and type(function) is types.FunctionType:
        kinds = (torch.Tensor,)
    (mode, _), outer = m.modes[-1], m.modes
    m.modes = outer[:-1]
    try:
        result = call(m, m.getattr(mode, "__torch_function__"), (function, kinds, *rest), {})
    finally:
        m.modes = outer
    if result is NotImplemented:
        raise Break("foreign-context", "a torch function mode gives NotImplemented", "let it make the call")
    return result


attributes.MODES.update(intercept=intercept, by_mode=by_mode)
