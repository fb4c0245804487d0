"""Closeness: whether results of ours differ from eager's by no more than rounding does as a rule."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from kiln.base.graph import Node, TensorSpec, tensors

#: Relative to an element, and absolute. Rounding in networks whose values are of the order of one stays a
#: hundred times below; where values in the thousands cancel, it does not.
TOLERANCE = 3e-4
#: Bytes of values up to which a graph is computed a second time: half of the machine's memory.
WORTH = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
PRECISE = (torch.float32, torch.float64)


def close(mine: Sequence[Any], eager: Sequence[Any]) -> bool:
    """Whether all tensors of single or double precision are near those of eager."""
    pairs = [(a, b) for a, b in zip(mine, eager, strict=True) if isinstance(a, torch.Tensor)]
    pairs = [(a, b) for a, b in pairs if isinstance(b, torch.Tensor) and a.dtype in PRECISE]
    return all(torch.allclose(a, b, TOLERANCE, TOLERANCE, equal_nan=True) for a, b in pairs)


def worth(nodes: Iterable[Node]) -> bool:
    """Whether the values of these nodes are on the CPU, of known size, and take little enough memory."""
    specs: list[TensorSpec] = list(tensors([node.spec for node in nodes]))
    shapes = {spec.shape for spec in specs}
    if {spec.device.type for spec in specs} - {"cpu"} or any(type(n) is not int for s in shapes for n in s):
        return False
    return bool(sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs) <= WORTH)
