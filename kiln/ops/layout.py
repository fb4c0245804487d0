"""Sizes, strides and dtypes of results: the arithmetic that shape rules share, without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kiln.base.expressions import hinted
from kiln.ops.remember import remembered, same

Size = tuple[int, ...]
CHANNELS_LAST_ORDER = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}

FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
INEXACT = FLOATS | COMPLEX
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
NUMBERS = frozenset({int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool})
PLAIN_DTYPES = INEXACT | INTEGERS | {torch.bool}


class Mismatch(Exception):
    """Eager raises on these arguments: its own error is the one to show."""


@remembered
def contiguous(size: Size) -> Size:
    """The strides of a contiguous tensor of this size."""
    return _dense(range(len(size) - 1, -1, -1), [n or 1 for n in size])


@remembered
def row_major(size: Size, stride: Size) -> bool:
    """Whether these are the strides that a new contiguous tensor of this size has."""
    return same(stride, contiguous(size))


def channels_last(size: Size) -> Size:
    """The strides of a channels-last tensor of this size, which has four or five dimensions."""
    return _dense(CHANNELS_LAST_ORDER[len(size)], size)


def fits(size: Size, stride: Size, order: Sequence[int]) -> bool:
    """Whether the tensor is packed with its dimensions in this order, innermost first; extents of 1 aside."""
    step = 1
    found, packed = [], []
    for d in order:
        if size[d] != 1:
            found.append(stride[d])
            packed.append(step)
            step *= size[d]
    return same(found, packed)


def is_contiguous(size: Size, stride: Size) -> bool:
    """Whether a tensor of this layout is contiguous, as `Tensor.is_contiguous` sees it."""
    return 0 in size or fits(size, stride, range(len(size) - 1, -1, -1))


def is_channels_last(size: Size, stride: Size) -> bool:
    """Whether a tensor of this layout is contiguous in the channels-last order."""
    order = CHANNELS_LAST_ORDER.get(len(size))
    return order is not None and fits(size, stride, order)


def suggests_channels_last(size: Size, stride: Size) -> bool:
    """Whether kernels take a tensor of this layout for channels-last; ambiguous layouts are not."""
    order = CHANNELS_LAST_ORDER.get(len(size))
    if order is None or stride[1] == 0:
        return False
    least = 0
    for d in order:
        if size[d] == 0 or stride[d] < least or (d == 0 and least == stride[1]):
            return False
        least = stride[d] * max(size[d], 1)
    return True


def alike(a: Size, b: Size) -> bool:
    """Whether two sizes are equal; those of another rank are not, whatever their first extents are."""
    return len(a) == len(b) and a == b


@remembered
def is_dense(size: Size, stride: Size) -> bool:
    """Whether the elements fill one block of memory without overlap."""
    step = 1
    for n, s in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n >= 2), key=lambda p: p[1]):
        if s != step:
            return 0 in size
        step *= n
    return True


def fills_memory(spec: Any) -> bool:
    """Whether it is known that the elements of a type fill one block of memory: sizes may vary."""
    known = all(type(n) is int for n in (*spec.shape, *spec.stride))
    return known and is_dense(spec.shape, spec.stride)


def overlaps(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Whether elements share a place in memory, by the sizes when traced."""
    reach = 1
    for s, n in sorted(zip(map(hinted, stride), map(hinted, size), strict=True)):
        if n > 1 and s < reach:
            return True
        reach += max(n - 1, 0) * s
    return False


@remembered
def pointwise(shape: Size, *operands: tuple[Size, Size]) -> Size:
    """The strides of an elementwise op's result, from its operands' (size, stride) in order."""
    if not shape:
        return ()
    if all(alike(size, shape) for size, _ in operands):
        if all(is_contiguous(*o) for o in operands):
            return contiguous(shape)
        if len(shape) == 4 and all(is_channels_last(*o) for o in operands):
            return channels_last(shape)
        first = operands[0][1]
        if all(is_dense(*o) and o[1] == first for o in operands):
            return first
    return packed(shape, [spread(shape, size, stride) for size, stride in operands])


def spread(shape: Size, size: Size, stride: Size) -> Size:
    """The strides with which an operand is read when it is broadcast to `shape`."""
    lead = len(shape) - len(size)
    own = [
        0 if n == 1 and shape[lead + i] != 1 else s for i, (n, s) in enumerate(zip(size, stride, strict=True))
    ]
    return (0,) * lead + tuple(own)


def _ordered(shape: Size, operands: Sequence[Size]) -> list[int]:
    """The dimensions, innermost first, in the order of the operands' strides."""
    rank = len(shape)

    def order(inner: int, outer: int) -> int:
        for stride in operands:
            a, b = stride[inner], stride[outer]
            if a == 0 or b == 0:
                continue
            if a != b:
                return -1 if a < b else 1
            if shape[inner] > shape[outer]:
                return 1
        return 0

    perm = list(range(rank - 1, -1, -1))
    for i in range(1, rank):
        here = i
        for j in range(i - 1, -1, -1):
            verdict = order(perm[j], perm[here])
            if verdict > 0:
                perm[j], perm[here] = perm[here], perm[j]
                here = j
            elif verdict < 0:
                break
    return perm


def _dense(perm: Sequence[int], extents: Sequence[int]) -> Size:
    """The strides of a tensor without gaps whose dimensions follow each other in this order."""
    strides = [0] * len(perm)
    step = 1
    for d in perm:
        strides[d] = step
        step *= extents[d]
    return tuple(strides)


def packed(shape: Size, operands: Sequence[Size]) -> Size:
    """The strides of a dense result whose dimensions are ordered as the operands' strides are."""
    perm = _ordered(shape, operands)
    return contiguous(shape) if perm == list(range(len(shape) - 1, -1, -1)) else _dense(perm, shape)


@remembered
def preserved(size: Size, stride: Size) -> Size:
    """The strides of a copy that preserves the memory format."""
    return stride if is_dense(size, stride) else inferred(size, stride)


def inferred(size: Size, stride: Size) -> Size:
    """Dense strides that keep the order of the dimensions of a tensor with gaps or overlaps."""
    return _dense(_ordered(size, (stride,)), [max(n, 1) for n in size])


@remembered
def formatted(size: Size, stride: Size, memory_format: torch.memory_format | None) -> Size:
    """The strides of a copy in this memory format; None and preserve_format keep the dimensions' order."""
    if memory_format is None or memory_format is torch.preserve_format:
        return preserved(size, stride)
    if memory_format is torch.contiguous_format:
        return contiguous(size)
    wanted = 4 if memory_format is torch.channels_last else 5
    if len(size) != wanted:
        raise Mismatch(f"required rank {wanted} tensor to use {memory_format} format")
    return channels_last(size)


def followed(size: Sequence[Any], extent: Size, stride: Size) -> tuple[Any, ...]:
    """The strides of a tensor of other sizes that lies in memory as one of this extent and stride does."""
    strides: list[Any] = list(stride)
    # Innermost first; of dimensions with one stride, those that hold more than one element are outside.
    order = sorted(range(len(stride)), key=lambda d: (stride[d], extent[d] > 1, -d))
    span: Any = 1
    reached = 1
    for d in order:
        if stride[d] == reached:
            strides[d] = span
        span, reached = strides[d] * (size[d] if extent[d] else 1), stride[d] * max(extent[d], 1)
    return tuple(strides)


@remembered
def broadcast(a: Size, b: Size) -> Size:
    """The common shape of two operands."""
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    shape = list(a)
    for i, n in enumerate(b, lead):
        m = shape[i]
        if m != n:
            if m == 1:
                shape[i] = n
            elif n != 1:
                raise Mismatch(f"{a} and {b} do not broadcast")
    return tuple(shape)


def wrap_dim(dim: int, rank: int) -> int:
    """`dim` counted from the front; scalars have one dimension here, as in torch."""
    low = rank if rank > 0 else 1
    if not -low <= dim < low:
        raise Mismatch(f"dimension {dim} is out of range for rank {rank}")
    return dim + low if dim < 0 else dim


@remembered
def reduced(size: Size, dims: tuple[int, ...] | None, keepdim: bool) -> Size:
    """The shape after reducing `dims`; None means all."""
    rank = len(size)
    gone = {wrap_dim(d, rank) for d in dims} if dims else set(range(rank))
    if dims and len(gone) != len(dims):
        raise Mismatch("a dimension appears twice")
    if keepdim:
        return tuple([1 if i in gone else n for i, n in enumerate(size)])
    return tuple([n for i, n in enumerate(size) if i not in gone])


COMPLEX_OF = {torch.float16: torch.complex32, torch.bfloat16: torch.complex64,
              torch.float32: torch.complex64, torch.float64: torch.complex128}  # fmt: skip
REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def of_number(kind: type) -> torch.dtype:
    """The dtype that a Python number of this type has in an expression."""
    if kind is int or kind is torch.SymInt:
        return torch.int64
    if kind is bool or kind is torch.SymBool:
        return torch.bool
    default = torch.get_default_dtype()
    return COMPLEX_OF[default] if kind is complex else default


def is_place(part: Any) -> bool:
    """Whether a part of an index is a tensor of which torch takes the number; of bytes it would be a mask."""
    return isinstance(part, torch.Tensor) and not part.dim() and part.dtype in INTEGERS - {torch.uint8}
