"""Expansions of tensors made from numbers, and of random ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kiln.ops.expansions.support import HALF, widened
from kiln.ops.layout import formatted
from kiln.ops.table import aten, expansion

KEEPING = frozenset({None, torch.preserve_format, torch.contiguous_format})


def laid_out(x: Tensor, memory_format: Any, make: Any) -> Tensor:
    """A tensor with the size of `x` and the strides of its copy: `make(size)`, its dimensions reordered."""
    size = tuple(x.shape)
    if memory_format in KEEPING and x.is_contiguous():
        plain: Tensor = make(list(size))
        return plain
    strides = formatted(size, x.stride(), memory_format)
    order = sorted(range(len(size)), key=lambda d: (-strides[d], -size[d], d))
    if order == list(range(len(size))):
        out: Tensor = make(list(size))
        return out
    back = sorted(range(len(order)), key=order.__getitem__)
    moved: Tensor = make([size[d] for d in order]).permute(back)
    return moved


def _like(value: Any, x: Tensor, dtype: Any, device: Any, memory_format: Any) -> Tensor:
    dtype, device = dtype or x.dtype, device or x.device
    return laid_out(x, memory_format, lambda size: torch.full(size, value, dtype=dtype, device=device))


@expansion(aten._to_copy.default, complex_too=True)
def converted(
    x: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> Any:  # fmt: skip
    """At level prims: a change of dtype or of device, else a clone."""
    if layout not in (None, x.layout) or (device is not None and torch.device(device) != x.device):
        return NotImplemented
    if dtype is None or dtype is x.dtype:
        return x.clone(memory_format=memory_format or torch.preserve_format)
    if layout is None and device is None and pin_memory is None and not non_blocking:
        return NotImplemented
    return aten._to_copy(x, dtype=dtype, memory_format=memory_format)


@expansion(aten.full_like.default, complex_too=True)
def full_like(
    x: Tensor, value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None, memory_format: Any = None,
) -> Tensor:  # fmt: skip
    return _like(value, x, dtype, device, memory_format)


@expansion(aten.zeros_like.default, complex_too=True)
def zeros_like(
    x: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:  # fmt: skip
    return _like(0, x, dtype, device, memory_format) if layout in (None, torch.strided) else NotImplemented


@expansion(aten.ones_like.default, complex_too=True)
def ones_like(
    x: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:  # fmt: skip
    return _like(1, x, dtype, device, memory_format)


@expansion(aten.zeros.default, complex_too=True)
def zeros(
    size: list[int], *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    return torch.full(size, 0, dtype=dtype or torch.get_default_dtype(), device=device)


@expansion(aten.ones.default, complex_too=True)
def ones(
    size: list[int], *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    return torch.full(size, 1, dtype=dtype or torch.get_default_dtype(), device=device)


@expansion(aten.scalar_tensor.default, complex_too=True)
def scalar_tensor(
    value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    return torch.full((), value, dtype=dtype or torch.get_default_dtype(), device=device)


@expansion(aten.new_zeros.default, complex_too=True)
def new_zeros(
    x: Tensor, size: list[int], *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    return torch.full(size, 0, dtype=dtype or x.dtype, device=device or x.device)


@expansion(aten.new_ones.default, complex_too=True)
def new_ones(
    x: Tensor, size: list[int], *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    return torch.full(size, 1, dtype=dtype or x.dtype, device=device or x.device)


@expansion(aten.new_full.default, complex_too=True)
def new_full(
    x: Tensor, size: list[int], value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    return torch.full(size, value, dtype=dtype or x.dtype, device=device or x.device)


@expansion(aten.fill.Scalar, aten.fill.Tensor, complex_too=True)
def fill(x: Tensor, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.device != x.device:
            return NotImplemented
        return laid_out(x, None, lambda size: value.to(x.dtype).expand(size).clone(
            memory_format=torch.contiguous_format))  # fmt: skip
    return _like(value, x, None, None, None)


@expansion(aten.copy.default, complex_too=True)
def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if source.device != x.device:
        return NotImplemented
    return source.to(x.dtype).expand(x.shape)


@expansion(aten.empty_like.default, complex_too=True)
def empty_like(
    x: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:  # fmt: skip
    dtype, device = dtype or x.dtype, device or x.device
    return laid_out(x, memory_format, lambda size: torch.empty(size, dtype=dtype, device=device))


@expansion(aten.new_empty.default, complex_too=True)
def new_empty(
    x: Tensor, size: list[int], *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    return torch.empty(size, dtype=dtype or x.dtype, device=device or x.device)


@expansion(aten.new_empty_strided.default, complex_too=True)
def new_empty_strided(
    x: Tensor, size: list[int], stride: list[int], *, dtype: Any = None, layout: Any = None,
    device: Any = None, pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    return torch.empty_strided(size, stride, dtype=dtype or x.dtype, device=device or x.device)


@expansion(aten.eye.default, aten.eye.m)
def eye(
    n: int, m: int | None = None, *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    rows = torch.arange(n, device=device).unsqueeze(1)
    columns = rows.view(-1) if m is None else torch.arange(m, device=device)
    return (rows == columns).to(dtype or torch.get_default_dtype())


@expansion(aten.linspace.default)
def linspace(
    start: Any, end: Any, steps: int, *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Any:  # fmt: skip
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_floating_point or dtype in HALF or isinstance(start, complex):
        return NotImplemented
    if steps < 2:
        return torch.full((steps,), start, dtype=dtype, device=device)
    # From both ends to the middle, so that both ends are exact.
    step, half = (end - start) / (steps - 1), steps // 2
    places = torch.arange(steps, device=device).to(dtype)
    return torch.where(places < half, places * step + start, (places - (steps - 1)) * step + end)


# Random numbers


@expansion(aten.rand_like.default)
def rand_like(
    x: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:  # fmt: skip
    dtype, device = dtype or x.dtype, device or x.device
    return laid_out(x, memory_format, lambda size: torch.rand(size, dtype=dtype, device=device))


@expansion(aten.randn_like.default)
def randn_like(
    x: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:  # fmt: skip
    dtype, device = dtype or x.dtype, device or x.device
    return laid_out(x, memory_format, lambda size: torch.randn(size, dtype=dtype, device=device))


def _uniform(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return laid_out(x, None, lambda size: torch.rand(size, dtype=dtype, device=x.device))


@expansion(aten.bernoulli.p)
def bernoulli_p(x: Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    return NotImplemented if generator is not None else (_uniform(x) < p).to(x.dtype)


@expansion(aten.bernoulli.default)
def bernoulli(x: Tensor, *, generator: Any = None) -> Any:
    if generator is not None or not x.dtype.is_floating_point:
        return NotImplemented
    return (_uniform(x) < widened(x)).to(x.dtype)


@expansion(aten.uniform.default)
def uniform(x: Tensor, low: float = 0, high: float = 1, *, generator: Any = None) -> Any:
    if generator is not None or x.dtype in HALF:
        return NotImplemented
    return _uniform(x, x.dtype) * (high - low) + low


@expansion(aten.normal_functional.default)
def normal(x: Tensor, mean: float = 0, std: float = 1, *, generator: Any = None) -> Any:
    if generator is not None or x.dtype in HALF:
        return NotImplemented
    return laid_out(x, None, lambda size: torch.randn(size, dtype=x.dtype, device=x.device)) * std + mean


@expansion(aten.native_dropout.default)
def dropout(x: Tensor, p: float, train: bool | None) -> Any:
    if train is False:
        return x.clone(), torch.full_like(x, True, dtype=torch.bool)
    mask = _uniform(x) < 1 - p
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return (widened(x) * mask.to(torch.float32 if x.dtype in HALF else x.dtype) * scale).to(x.dtype), mask


@expansion(aten.native_dropout_backward.default)
def dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Any:
    if not grad.dtype.is_floating_point:
        return NotImplemented
    wider = widened(grad)
    return (wider * mask.to(wider.dtype) * scale).to(grad.dtype)
