"""Shape rules of ops that make tensors: factories, copies and casts."""

from __future__ import annotations

from math import ceil, isfinite
from typing import Any

import torch
from torch import Tensor

from kiln.ops.fake import FakeTensor, in_order, make
from kiln.ops.layout import NUMBERS, channels_last, formatted, is_dense, of_number, row_major, wrap_dim
from kiln.ops.meta import full_device
from kiln.ops.symint import below_zero
from kiln.ops.table import RULES, aten, declare, rule

CPU = torch.device("cpu")
REAL = frozenset({float, torch.SymFloat})


def _new(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
         stride: Any = None) -> Any:  # fmt: skip
    if layout not in (None, torch.strided) or pin_memory or any(below_zero(n) for n in size):
        return NotImplemented
    place = CPU if device is None else full_device(device)
    return make(size, stride, dtype or torch.get_default_dtype(), place)


@rule(aten.empty.memory_format)
def _empty(size: Any, *, memory_format: Any = None, **options: Any) -> Any:
    stride = None
    if memory_format is not None and memory_format is not torch.contiguous_format:
        rank = 4 if memory_format is torch.channels_last else 5
        if memory_format is torch.preserve_format or len(size) != rank:
            return NotImplemented
        stride = channels_last(tuple(size))
    return _new(size, stride=stride, **options)


@rule(aten.arange.start, aten.arange.start_step)
def _range(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, **options: Any) -> Any:
    bounds = (start, end, step)
    if any(type(v) not in NUMBERS or type(v) is complex for v in bounds) or step == 0:
        return NotImplemented
    if any(type(v) is float and not isfinite(v) for v in bounds) or below_zero((end - start) * step):
        return NotImplemented
    if dtype is None:
        dtype = torch.get_default_dtype() if any(type(v) in REAL for v in bounds) else torch.int64
    elif not dtype.is_floating_point and any(type(v) in REAL for v in bounds):
        return NotImplemented
    length = -(-(end - start) // step) if dtype is torch.int64 else ceil((end - start) / step)
    return _new((length,), dtype=dtype, **options)


@rule(*[getattr(aten, f"{name}_like").default for name in ("empty", "zeros", "ones", "rand", "randn")])
def _like(x: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None,
          pin_memory: Any = None, memory_format: Any = None) -> Any:  # fmt: skip
    if layout not in (None, torch.strided) or pin_memory:
        return NotImplemented
    strides = formatted(x.shape, x.stride(), memory_format)
    return make(x.shape, strides, dtype or x.dtype, x.device if device is None else full_device(device))


@rule(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default)
def _new_of(x: Tensor, size: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    return _new(size, dtype=dtype or x.dtype, device=x.device if device is None else device, **options)


@rule(aten.clone.default)
def _clone(x: Tensor, *, memory_format: Any = None) -> FakeTensor:
    size, stride = x.shape, x.stride()
    plain = memory_format is torch.contiguous_format or row_major(size, stride)
    plain = plain and (memory_format is None or memory_format is torch.contiguous_format)
    return make(size, None if plain else formatted(size, stride, memory_format), x.dtype, x.device)


@rule(aten.flip.default)
def _flip(x: Tensor, dims: Any) -> Any:
    if len({wrap_dim(dim, x.dim()) for dim in dims}) != len(dims) or any(type(n) is not int for n in x.shape):
        return NotImplemented  # the meta kernel asks less of sizes that vary
    return in_order(x)


@rule(aten._to_copy.default)
def _to_copy(x: Tensor, *, non_blocking: bool = False, **options: Any) -> Any:
    if not isinstance(x, Tensor):
        # The dispatcher hands a tensor that stands for a number as the number.
        dtype, device = options.get("dtype"), options.get("device")
        return make((), None, dtype or torch.tensor(x).dtype, torch.device(device or "cpu"))
    if not is_dense(x.shape, x.stride()):
        return NotImplemented
    return _like(x, **options)


def _full(size: Any, value: Any, *, dtype: Any = None, **options: Any) -> Any:
    if type(value) not in NUMBERS:
        return NotImplemented
    return _new(size, dtype=dtype or of_number(type(value)), **options)


declare(RULES, {
    "zeros ones rand randn": _new,
    "full": _full,
    "scalar_tensor": lambda value, **options: _new((), **options),
    "empty_strided": lambda size, stride, **options: (
        _new(size, stride=stride, **options) if len(size) == len(stride) else NotImplemented),
    "arange": lambda end, **options: _range(0, end, **options),
    "full_like": lambda x, value, **options: _like(x, **options),
    "new_full": lambda x, size, value, **options: _new_of(x, size, **options),
    "new_empty_strided": lambda x, size, stride, **options: _new_of(x, size, stride=stride, **options),
})  # fmt: skip
