"""Views as strides: how a view lies in the memory of what it shows, where that follows from the sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.graph import Node, TensorSpec, argument
from kiln.ops.levels import name_of


@dataclass(frozen=True, slots=True)
class Strided:
    """Sizes and strides of a view, and how many elements after those of its base it starts."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    ahead: Any = 0


def strided(node: Node) -> Strided | None:
    """How a node lies in the memory of its first argument; None where only its op knows."""
    rule = RULES.get(name_of(node.op))
    if rule is None or not isinstance(node.spec, TensorSpec):
        return None
    base = node.args[0].spec
    if not isinstance(base, TensorSpec) or base.dtype != node.spec.dtype:
        return None
    return rule(node, base, node.spec.shape)


def _same(node: Node, base: TensorSpec, shape: tuple[Any, ...]) -> Strided | None:
    return Strided(base.shape, base.stride)


def _permute(node: Node, base: TensorSpec, shape: tuple[Any, ...]) -> Strided | None:
    return Strided(shape, tuple([base.stride[d] for d in node.args[1]]))


def _expand(node: Node, base: TensorSpec, shape: tuple[Any, ...]) -> Strided | None:
    new = len(shape) - len(base.shape)
    stride: list[Any] = [0] * new
    for n, m, s in zip(base.shape, shape[new:], base.stride, strict=True):
        if n != m and n != 1:
            return None
        stride.append(s if n == m else 0)
    return Strided(shape, tuple(stride))


def _slice(node: Node, base: TensorSpec, shape: tuple[Any, ...]) -> Strided | None:
    dim, step = argument(node, 1, "dim", 0) % len(base.shape), argument(node, 4, "step", 1)
    start = argument(node, 2, "start")
    start = 0 if start is None else start
    size = base.shape[dim]
    if type(start) is not int or type(step) is not int or (start != 0 and type(size) is not int):
        return None
    if start:
        start = min(max(start + size if start < 0 else start, 0), size)
    stride = (*base.stride[:dim], base.stride[dim] * step, *base.stride[dim + 1 :])
    return Strided(shape, stride, start * base.stride[dim])


def _select(node: Node, base: TensorSpec, shape: tuple[Any, ...]) -> Strided | None:
    dim, place = node.args[1] % len(base.shape), node.args[2]
    if type(place) is not int or place < 0 and type(base.shape[dim]) is not int:
        return None
    place = place + base.shape[dim] if place < 0 else place
    return Strided(shape, (*base.stride[:dim], *base.stride[dim + 1 :]), place * base.stride[dim])


def _view(node: Node, base: TensorSpec, shape: tuple[Any, ...]) -> Strided | None:
    if 0 in base.shape:
        return None
    if in_order(base):
        return Strided(shape, ordered(shape))
    numbers = (*base.shape, *base.stride, *shape)
    stride = _regrouped(base, shape) if all(type(n) is int for n in numbers) else None
    return None if stride is None else Strided(shape, stride)


def _regrouped(base: TensorSpec, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of another shape over the same memory: dimensions that lie as one are split anew."""
    runs: list[tuple[int, int]] = []
    for n, s in zip(reversed(base.shape), reversed(base.stride), strict=True):
        if n == 1:
            continue
        if runs and s == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * n, runs[-1][1])
        else:
            runs.append((n, s))
    stride: list[int] = []
    left, step = runs.pop(0) if runs else (1, 1)
    for n in reversed(shape):
        if n != 1 and left == 1 and runs:
            left, step = runs.pop(0)
        if left % n:
            return None
        stride.append(step)
        left, step = left // n, step * n
    return tuple(reversed(stride)) if left == 1 and not runs else None


def in_order(spec: TensorSpec) -> bool:
    """Whether elements lie one after the other."""
    return all(n == 1 or a == b for n, a, b in zip(spec.shape, spec.stride, ordered(spec.shape), strict=True))


def ordered(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of elements that lie one after the other."""
    stride: list[Any] = []
    step: Any = 1
    for n in reversed(shape):
        stride.append(step)
        step = step * n
    return tuple(reversed(stride))


RULES: dict[str, Callable[[Node, TensorSpec, tuple[Any, ...]], Strided | None]] = {
    "permute": _permute, "expand": _expand, "slice": _slice, "select": _select, "view": _view,
    "_unsafe_view": _view, "alias": _same, "detach": _same,
}  # fmt: skip
