"""Numbers that `Tensor.item` gives: left open while the program only keeps them; the graph goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kiln.base.errors import Break
from kiln.capture import attributes
from kiln.capture.calls import HANDLERS, Args, Kwargs, handles
from kiln.capture.fake_arrays import OpenNumber
from kiln.capture.rebuild import MAKERS
from kiln.ops.fake import FakeTensor

if TYPE_CHECKING:
    from kiln.capture.machine import Machine


@handles(torch.Tensor.item)
def item(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """The number where it is known, or what eager raises; else one that is read after the graph."""
    try:
        return m.torch_call(torch.Tensor.item, args, kwargs)
    except Break as reason:
        if reason.kind == "data-dependent" and all(type(n) is int and n == 1 for n in args[0].shape):
            return left_open(m, args[0], reason)
        raise


def left_open(m: Machine, tensor: FakeTensor, reason: Break) -> OpenNumber:
    """The only number of a tensor, as it is now; `reason` is that of the break where the value is needed."""
    reason.at = m.frames[-1].place()
    kept = m.torch_call(torch.clone, (m.torch_call(torch.Tensor.detach, (tensor,), {}),), {})
    return OpenNumber(kind_of(tensor), kept, m.frames[-1].step, reason)


def kind_of(tensor: FakeTensor) -> type:
    """The type of the tensor's numbers in Python."""
    if tensor.dtype is torch.bool:
        return bool
    return complex if tensor.is_complex() else float if tensor.is_floating_point() else int


def load(m: Machine, number: OpenNumber, name: str) -> Any:
    """An attribute of a number: a method of it would look at the value."""
    if name == "__class__":
        return m.world.constant(number.kind)
    raise number.needed()


attributes.LOADERS[OpenNumber] = load
MAKERS[OpenNumber] = lambda r, value: r.call(torch.Tensor.item, value.tensor)


def converted(kind: type) -> Any:
    """How `float(x)` and `int(x)` are captured: of a tensor of that kind of numbers as `x.item()`."""
    before = HANDLERS[id(kind)]

    def handler(m: Machine, args: Args, kwargs: Kwargs) -> Any:
        same = len(args) == 1 and type(args[0]) is FakeTensor and kind_of(args[0]) is kind
        return (item if same else before)(m, args, kwargs)

    return handler


for _kind in (float, int):
    handles(_kind)(converted(_kind))
