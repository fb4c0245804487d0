"""Calls of oneDNN that torch offers beside aten: layers with packed weights and epilogues, as nodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.base.graph import Graph, Node, TensorSpec
from kiln.ops.layout import channels_last, suggests_channels_last
from kiln.ops.table import aten


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to each element before it is stored: a function of oneDNN's, by torch's name for it."""

    name: str = "none"
    numbers: tuple[float, ...] = ()
    algorithm: str = ""

    def arguments(self) -> tuple[Any, ...]:
        return self.name, list(self.numbers), self.algorithm


NONE = Epilogue()


def available() -> bool:
    """Whether this build of torch has the calls, and its user has not switched them off."""
    enabled = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    return bool(enabled) and hasattr(torch.ops.mkldnn, "_convolution_pointwise")


def packed_convolution(weight: torch.Tensor, *window_and_size: Any) -> torch.Tensor:
    """The weight in the order that oneDNN wants for inputs of this size, as an opaque tensor."""
    opaque = aten.to_mkldnn.default(weight.contiguous())
    volumes = weight.dim() == 5
    reorder = aten.mkldnn_reorder_conv3d_weight if volumes else aten.mkldnn_reorder_conv2d_weight
    packed: torch.Tensor = reorder.default(opaque, *window_and_size)
    return packed


def packed_transposed(weight: torch.Tensor, *window_and_size: Any) -> torch.Tensor:
    """The weight of a transposed convolution, outputs first, in the order that oneDNN wants."""
    plain = weight.transpose(0, 1).contiguous()
    reorder = torch.ops.mkldnn._reorder_convolution_transpose_weight.default
    packed: torch.Tensor = reorder(plain, *window_and_size)
    return packed


def packed_linear(weight: torch.Tensor, rows: int | None) -> torch.Tensor:
    """The weight of a linear layer, outputs first, in the order that oneDNN wants for so many rows."""
    matrix = weight.flatten(1)
    if scratch.leaves and (matrix.is_contiguous() or matrix.t().is_contiguous()):
        return matrix.detach()
    plain = laid_out(matrix)
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight.default(plain, rows)
    return packed


class Scratch(threading.local):
    """Where weights that are packed one after another are laid out, each in the place of the one before."""

    memory: torch.Tensor | None = None
    leaves = False
    """Whether weights of linear layers stay as they are: the calls take those too."""


scratch = Scratch()


@contextmanager
def packing(leaves: bool = False) -> Iterator[None]:
    """Several weights are packed meanwhile: memory new to the process takes longer than writing to it."""
    scratch.memory, scratch.leaves = torch.empty(0), leaves
    try:
        yield
    finally:
        scratch.memory, scratch.leaves = None, False


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """A weight row by row; valid until the next one is, while several are packed."""
    memory = scratch.memory
    if memory is None or weight.is_contiguous():
        return weight.contiguous()
    if memory.dtype is not weight.dtype or memory.numel() < weight.numel():
        memory = scratch.memory = weight.new_empty(weight.numel())
    return memory[: weight.numel()].view(weight.shape).copy_(weight)


#: Functions of ours that only compute.
PACKS = frozenset({packed_convolution, packed_transposed, packed_linear})


@dataclass(frozen=True, slots=True)
class Window:
    """How a convolution walks over its input; over its output, which has places `more`, if transposed."""

    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    more: tuple[int, ...] | None = None

    def arguments(self) -> tuple[Any, ...]:
        around = [list(self.padding)] if self.more is None else [list(self.padding), list(self.more)]
        return *around, list(self.stride), list(self.dilation), self.groups

    @property
    def is_point(self) -> bool:
        """Whether a convolution looks at one place alone, if its kernel does."""
        steps = {*self.stride, *self.dilation, self.groups}
        return self.more is None and not any(self.padding) and steps == {1}


def convolution(
    graph: Graph,
    like: Node,
    x: Node,
    weight: Node,
    bias: Node | None,
    window: Window,
    epilogue: Epilogue = NONE,
    other: Node | None = None,
) -> Node:
    """A convolution with a packed weight, `other` added before the epilogue; `x` is channels-last.

    Weights are given outputs first. It has the places of `like`; one dimension less is one of a single place.
    """
    spec: TensorSpec = x.spec
    kernel: TensorSpec = weight.spec
    count, outputs, *places = like.spec.shape
    size = (count, outputs, *[1] * (len(spec.shape) - 2 - len(places)), *places)
    assert suggests_channels_last(spec.shape, spec.stride), "a packed convolution reads channels-last"
    given = [n if type(n) is int else int(n.hint) for n in spec.shape]
    pack = packed_convolution if window.more is None else packed_transposed
    packed = graph.call(pack, (weight, *window.arguments(), given), spec=kernel, like=like)
    made = TensorSpec(size, channels_last(size), spec.dtype, spec.device)
    if other is None:
        args = (x, packed, bias, *window.arguments(), *epilogue.arguments())
        ops = torch.ops.mkldnn
        op = ops._convolution_pointwise if window.more is None else ops._convolution_transpose_pointwise
        return graph.call(op.default, args, spec=made, like=like)
    name: str | None = None if epilogue == NONE else epilogue.name
    rest = ("add", 1.0, name, list(epilogue.numbers), epilogue.algorithm or None)
    args = (x, other, packed, bias, *window.arguments(), *rest)
    return graph.call(torch.ops.mkldnn._convolution_pointwise.binary, args, spec=made, like=like)


def linear(
    graph: Graph,
    like: Node,
    x: Node,
    weight: Node,
    bias: Node | None,
    epilogue: Epilogue = NONE,
    other: Node | None = None,
) -> Node:
    """A linear layer with a packed weight, which is given outputs first; `x` is contiguous.

    An epilogue, or another tensor added: oneDNN's call has no room for both.
    """
    spec: TensorSpec = x.spec
    *before, inputs = spec.shape
    outputs = weight.spec.shape[0]
    rows: Any = prod(before)
    known = rows if type(rows) is int else None
    matrix = replace(weight.spec, shape=(outputs, inputs), stride=(inputs, 1), offset=0)
    packed = graph.call(packed_linear, (weight, known), spec=matrix, like=like)
    stride = tuple([s // inputs * outputs for s in spec.stride[:-1]])
    made = TensorSpec((*before, outputs), (*stride, 1), spec.dtype, spec.device)
    if other is None:
        args = (x, packed, bias, *epilogue.arguments())
        return graph.call(torch.ops.mkldnn._linear_pointwise.default, args, spec=made, like=like)
    assert epilogue == NONE, "an epilogue or another tensor"
    return graph.call(
        torch.ops.mkldnn._linear_pointwise.binary, (x, other, packed, bias, "add"), spec=made, like=like
    )
