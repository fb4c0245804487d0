"""Expansions of tensors made from numbers, and of random ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, full

from kiln.ops.expansions.support import HALF, wide, widened
from kiln.ops.layout import formatted
from kiln.ops.table import Rule, aten, expansion, expansions

KEEPING = frozenset({None, torch.preserve_format, torch.contiguous_format})


def laid_out(x: Tensor, memory_format: Any, make: Any) -> Tensor:
    """A tensor with the size of `x` and the strides of its copy: `make(size)`, its dimensions reordered."""
    size = tuple(x.shape)
    if memory_format in KEEPING and x.is_contiguous():
        return make(list(size))
    strides = formatted(size, x.stride(), memory_format)
    order = sorted(range(len(size)), key=lambda d: (-strides[d], -size[d], d))
    if order == list(range(len(size))):
        return make(list(size))
    back = sorted(range(len(order)), key=order.__getitem__)
    return make([size[d] for d in order]).permute(back)


def _kind(options: dict[str, Any], like: Tensor | None = None) -> dict[str, Any]:
    """The dtype and the device that options of a factory ask for; those of `like` where they do not."""
    dtype, device = options.get("dtype"), options.get("device")
    if like is None:
        return {"dtype": dtype or torch.get_default_dtype(), "device": device}
    return {"dtype": dtype or like.dtype, "device": device or like.device}


def _like(x: Tensor, options: dict[str, Any], make: Any) -> Tensor:
    return laid_out(x, options.get("memory_format"), partial(make, **_kind(options, x)))


def _filled(x: Tensor, value: Any, options: dict[str, Any]) -> Tensor:
    return _like(x, options, partial(full, fill_value=value))


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


def zeros_like(x: Tensor, *, layout: Any = None, **options: Any) -> Any:
    return _filled(x, 0, options) if layout in (None, torch.strided) else NotImplemented


@expansion(aten.fill.Scalar, aten.fill.Tensor, complex_too=True)
def fill(x: Tensor, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.device != x.device:
            return NotImplemented
        return laid_out(x, None, lambda size: value.to(x.dtype).expand(size).clone(
            memory_format=torch.contiguous_format))  # fmt: skip
    return _filled(x, value, {})


@expansion(aten.eye.default, aten.eye.m)
def eye(n: int, m: int | None = None, **options: Any) -> Tensor:
    kind = _kind(options)
    rows = torch.arange(n, device=kind["device"]).unsqueeze(1)
    columns = rows.view(-1) if m is None else torch.arange(m, device=kind["device"])
    return (rows == columns).to(kind["dtype"])


@expansion(aten.linspace.default)
def linspace(start: Any, end: Any, steps: int, **options: Any) -> Any:
    dtype, device = _kind(options).values()
    if not dtype.is_floating_point or dtype in HALF or isinstance(start, complex):
        return NotImplemented
    if steps < 2:
        return full((steps,), start, dtype=dtype, device=device)
    # From both ends to the middle, so that both ends are exact.
    step, half = (end - start) / (steps - 1), steps // 2
    places = torch.arange(steps, device=device).to(dtype)
    return torch.where(places < half, places * step + start, (places - (steps - 1)) * step + end)


FACTORIES: dict[str, Rule] = {
    "zeros": lambda size, **options: full(size, 0, **_kind(options)),
    "ones": lambda size, **options: full(size, 1, **_kind(options)),
    "scalar_tensor": lambda value, **options: full((), value, **_kind(options)),
    "new_zeros": lambda x, size, **options: full(size, 0, **_kind(options, x)),
    "new_ones": lambda x, size, **options: full(size, 1, **_kind(options, x)),
    "new_full": lambda x, size, value, **options: full(size, value, **_kind(options, x)),
    "new_empty": lambda x, size, **options: torch.empty(size, **_kind(options, x)),
    "new_empty_strided": lambda x, size, stride, **options: torch.empty_strided(
        size, stride, **_kind(options, x)
    ),
    "zeros_like": zeros_like,
    "ones_like": lambda x, **options: _filled(x, 1, options),
    "full_like": lambda x, value, **options: _filled(x, value, options),
    "empty_like": lambda x, **options: _like(x, options, torch.empty),
    "copy": lambda x, source, *_, **__: (
        source.to(x.dtype).expand(x.shape) if source.device == x.device else NotImplemented
    ),
}
expansions(FACTORIES, complex_too=True)
RANDOM: dict[str, Rule] = {
    "rand_like": lambda x, **options: _like(x, options, torch.rand),
    "randn_like": lambda x, **options: _like(x, options, torch.randn),
}
expansions(RANDOM)


def _uniform(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return _like(x, {"dtype": dtype}, torch.rand)


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
    return _like(x, {}, torch.randn) * std + mean


@expansion(aten.native_dropout.default)
def dropout(x: Tensor, p: float, train: bool | None) -> Any:
    if train is False:
        return x.clone(), torch.full_like(x, True, dtype=torch.bool)
    mask = _uniform(x) < 1 - p
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return (widened(x) * mask.to(wide(x.dtype)) * scale).to(x.dtype), mask


@expansion(aten.native_dropout_backward.default)
def dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Any:
    if not grad.dtype.is_floating_point:
        return NotImplemented
    wider = widened(grad)
    return (wider * mask.to(wider.dtype) * scale).to(grad.dtype)
