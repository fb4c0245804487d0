"""Shape rules of ops that make tensors: factories, copies and casts."""

from __future__ import annotations

from math import ceil, isfinite
from typing import Any

import torch

from kiln.ops.fake import FakeTensor, make
from kiln.ops.layout import (
    NUMBERS,
    channels_last,
    formatted,
    is_dense,
    of_number,
    preserved,
    row_major,
    wrap_dim,
)
from kiln.ops.meta import full_device
from kiln.ops.table import RULES, aten, rule

CPU = torch.device("cpu")
REAL = frozenset({float, torch.SymFloat})


def _new(
    size: Any, dtype: torch.dtype | None, device: Any, layout: Any, pin_memory: Any, stride: Any = None
) -> Any:
    if layout not in (None, torch.strided) or pin_memory or any(n < 0 for n in size):
        return NotImplemented
    place = CPU if device is None else full_device(device)
    return make(size, stride, dtype or torch.get_default_dtype(), place)


@rule(aten.empty.memory_format)
def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    stride = None
    if memory_format is not None and memory_format is not torch.contiguous_format:
        if memory_format is torch.preserve_format or len(size) != (
            4 if memory_format is torch.channels_last else 5
        ):
            return NotImplemented
        stride = channels_last(tuple(size))
    return _new(size, dtype, device, layout, pin_memory, stride)


@rule(aten.zeros.default, aten.ones.default, aten.rand.default, aten.randn.default)
def _filled(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    return _new(size, dtype, device, layout, pin_memory)


@rule(aten.full.default)
def _full(
    size: Any,
    value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    if type(value) not in NUMBERS:
        return NotImplemented
    return _new(size, dtype or of_number(type(value)), device, layout, pin_memory)


@rule(aten.scalar_tensor.default)
def _scalar(
    value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    return _new((), dtype, device, layout, pin_memory)


@rule(aten.empty_strided.default)
def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    return (
        _new(size, dtype, device, layout, pin_memory, stride) if len(size) == len(stride) else NotImplemented
    )


def _range(start: Any, end: Any, step: Any, dtype: Any, layout: Any, device: Any, pin_memory: Any) -> Any:
    bounds = (start, end, step)
    if (
        any(type(v) not in NUMBERS or type(v) is complex for v in bounds)
        or step == 0
        or any(type(v) is float and not isfinite(v) for v in bounds)
        or (end - start) * step < 0
    ):
        return NotImplemented
    if dtype is None:
        dtype = torch.get_default_dtype() if any(type(v) in REAL for v in bounds) else torch.int64
    elif not dtype.is_floating_point and any(type(v) in REAL for v in bounds):
        return NotImplemented
    length = -(-(end - start) // step) if dtype is torch.int64 else ceil((end - start) / step)
    return _new((length,), dtype, device, layout, pin_memory)


@rule(aten.arange.default)
def _arange(
    end: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    return _range(0, end, 1, dtype, layout, device, pin_memory)


@rule(aten.arange.start, aten.arange.start_step)
def _arange_start(
    start: Any,
    end: Any,
    step: Any = 1,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    return _range(start, end, step, dtype, layout, device, pin_memory)


def _like(x: torch.Tensor, dtype: Any, device: Any, layout: Any, pin_memory: Any, memory_format: Any) -> Any:
    if layout not in (None, torch.strided) or pin_memory:
        return NotImplemented
    size, stride = x.shape, x.stride()
    strides = formatted(size, stride, memory_format)
    return make(size, strides, dtype or x.dtype, x.device if device is None else full_device(device))


def _empty_like(
    x: torch.Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    return _like(x, dtype, device, layout, pin_memory, memory_format)


for _name in "empty_like zeros_like ones_like rand_like randn_like".split():
    RULES[getattr(aten, _name).default] = _empty_like


@rule(aten.full_like.default)
def _full_like(x: torch.Tensor, value: Any, **options: Any) -> Any:
    return _empty_like(x, **options)


@rule(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default)
def _new_empty(
    x: torch.Tensor,
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    return _new(size, dtype or x.dtype, x.device if device is None else device, layout, pin_memory)


@rule(aten.new_full.default)
def _new_full(x: torch.Tensor, size: Any, value: Any, **options: Any) -> Any:
    return _new_empty(x, size, **options)


@rule(aten.new_empty_strided.default)
def _new_empty_strided(
    x: torch.Tensor,
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    return _new(size, dtype or x.dtype, x.device if device is None else device, layout, pin_memory, stride)


@rule(aten.clone.default)
def _clone(x: torch.Tensor, *, memory_format: Any = None) -> FakeTensor:
    size, stride = x.shape, x.stride()
    plain = memory_format is torch.contiguous_format or row_major(size, stride)
    if plain and (memory_format is None or memory_format is torch.contiguous_format):
        fake = make(size, None, x.dtype, x.device)
    else:
        fake = make(size, formatted(size, stride, memory_format), x.dtype, x.device)
    return fake


@rule(aten.flip.default)
def _flip(x: torch.Tensor, dims: Any) -> Any:
    if len({wrap_dim(dim, x.dim()) for dim in dims}) != len(dims) or any(type(n) is not int for n in x.shape):
        return NotImplemented  # the meta kernel asks less of sizes that vary
    return make(x.shape, preserved(x.shape, x.stride()), x.dtype, x.device)


@rule(aten._to_copy.default)
def _to_copy(
    x: torch.Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Any:
    if not isinstance(
        x, torch.Tensor
    ):  # the dispatcher hands a tensor that stands for a number as the number
        return make((), None, dtype or torch.tensor(x).dtype, torch.device(device or "cpu"))
    if not is_dense(x.shape, x.stride()):
        return NotImplemented
    return _like(x, dtype, device, layout, pin_memory, memory_format)
