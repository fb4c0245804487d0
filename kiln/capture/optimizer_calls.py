"""How steps of torch's optimizers are captured whose counts are numbers to Python and tensors to a graph.

Python computes with counts in double precision, so graphs do. Steps that branch on what follows from a count
are captured in the form that they have for recordings of a GPU's work: it asks for no values.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim.adamax import adamax
from torch.optim.asgd import asgd
from torch.optim.optimizer import _get_value
from torch.optim.radam import radam

from kiln.capture.calls import Args, Kwargs, handles, leaf
from kiln.capture.frame import Machine
from kiln.ops.fake import FakeTensor


@handles(_get_value)
def value_of(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """A count as what is computed with."""
    count = args[0]
    if type(count) is FakeTensor and count.dtype is torch.float32 and count.device.type == "cpu":
        return leaf(m, torch.Tensor.double, args, {})
    return count


#: Lists of numbers among what steps take.
NUMBERS = frozenset({"state_steps", "etas", "mus"})


def without_branches(step: Any, places: list[int], *args: Any, **kwargs: Any) -> None:
    """A step that chooses by `torch.where`, tensor by tensor."""
    given = list(args)
    for place in places:
        given[place] = [number.double() for number in args[place]]
    step(*given, **{**kwargs, "capturable": True, "foreach": False})
    for place in places:
        for number, wide in zip(args[place], given[place], strict=True):
            number.copy_(wide)


@handles(radam, asgd, adamax, told=True)
def branching(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """A step that branches on counts unless it is `capturable`."""
    places = [i for i, name in enumerate(inspect.signature(function).parameters) if name in NUMBERS]
    # Gradients would go both ways too.
    if kwargs.get("capturable") is False and not kwargs.get("differentiable") and len(args) > places[-1]:
        return m.inline(without_branches, (function, places, *args), kwargs)  # type: ignore[arg-type]
    return m.inline(function, args, kwargs)
