"""The last resort: the op itself, on real tensors of zeros, for its error or the layout of its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kiln.ops.meta import describe, flagged, reach, with_twins
from kiln.ops.table import overload

CPU = torch.device("cpu")
LARGEST = 1 << 26
LARGEST_LAYOUT = 1 << 16

#: Ops whose meta kernels give other strides than their kernels for the CPU.
OWN_LAYOUT = frozenset(map(overload, (
    "_fft_r2c _fft_c2r _fft_c2c _linalg_svd linalg_eig index_put _unsafe_index_put max_unpool2d max_unpool3d"
).split()))  # fmt: skip


def too_large(tensors: list[Tensor]) -> bool:
    """Whether the arguments hold too many elements for the op to be run for real."""
    return bool(sum(t.numel() for t in tensors) > LARGEST)


def lays_out_itself(func: Any, x: Any) -> bool:
    """Whether only the op itself, run on zeros like `x`, knows its result's strides, and that is cheap."""
    return bool(func in OWN_LAYOUT and x.device.type == "cpu" and x.numel() <= LARGEST_LAYOUT)


def consult(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """What `func` returns on zeros of these layouts, described; eager's error comes out when there is one."""
    twins = [zeros_of(t) for t in tensors]
    args, kwargs = with_twins((args, kwargs), tensors, twins)
    if kwargs.get("generator") is not None:
        kwargs = {**kwargs, "generator": None}
    state = torch.get_rng_state()
    try:
        out = func(*args, **kwargs)
    finally:
        torch.set_rng_state(state)
    return describe(out, twins, tensors[0].device if tensors else None)


def zeros_of(value: Tensor) -> Tensor:
    """A real tensor of zeros on the CPU with the layout of `value`."""
    memory = torch.zeros(reach(value), dtype=value.dtype, device=CPU)
    twin = memory.as_strided(value.shape, value.stride(), value.storage_offset())
    return flagged(twin, value.is_conj(), value.is_neg())
