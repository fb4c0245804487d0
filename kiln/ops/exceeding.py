"""Numbers that no element of a tensor can be: some of eager's kernels raise for them, others do not."""

from __future__ import annotations

from math import inf, isinf
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

from kiln.base.graph import name_of
from kiln.ops.layout import FLOATS, INTEGERS
from kiln.ops.meta import Facts
from kiln.ops.symint import is_open

#: Where an overload takes numbers that become elements: the places and names of arguments.
NUMBERED = Facts(lambda func: [(i, argument.name) for i, argument in enumerate(func._schema.arguments)
                               if str(argument.type) in ("number", "Optional[number]")])  # fmt: skip
#: Ops that raise for one of these, of which it is asked where a number varies.
RAISING = frozenset((
    "masked_fill masked_fill_ fill fill_ full clamp clamp_ clamp_min clamp_max scalar_tensor threshold "
    "index_fill add add_ sub sub_ rsub addcmul addcmul_ addcdiv addcdiv_ lerp leaky_relu elu softplus"
).split())  # fmt: skip
#: What every dtype holds: most numbers are of these.
SMALL = 127


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """The least and largest number of a dtype; negative ones wrap where it has none."""
    if dtype in FLOATS:
        return -torch.finfo(dtype).max, torch.finfo(dtype).max
    if dtype not in INTEGERS:
        return -inf, inf
    limits = torch.iinfo(dtype)
    return limits.min or -limits.max, limits.max


RANGES = Facts(_range)


def exceeds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a number is beyond what the dtype holds in which an op may take it."""
    for place, name in NUMBERED[func]:
        value: Any = args[place] if place < len(args) else kwargs.get(name)
        kind = type(value)
        if kind is int or kind is float:
            if -SMALL <= value <= SMALL:
                continue
        elif kind is not SymInt and kind is not SymFloat or name_of(func) not in RAISING or is_open(value):
            continue
        dtype = next((x.dtype for x in args if isinstance(x, Tensor)), kwargs.get("dtype"))
        if dtype is None or dtype is torch.float64 and kind is not int:
            continue
        low, high = RANGES[dtype]
        if kind is float and dtype in FLOATS and (isinf(value) or value != value):
            continue
        if not (low <= value and value <= high):
            return True
    return False
