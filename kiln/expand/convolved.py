"""Convolutions that loops do at least as well as a library: of one place, and of one channel each.

Of one place: a product of matrices, whose weight lies in panels of columns. Of one channel each: a sum of
shifted images. What follows of each element is part of the loops, and nothing is called.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from kiln.base.graph import Node, TensorSpec, mapped
from kiln.expand.chains import Chain
from kiln.expand.onednn import Window
from kiln.expand.pools import Window as Pooling
from kiln.expand.relayout import Relayout, call
from kiln.ops.layout import channels_last, contiguous
from kiln.ops.table import aten

#: What is part of the weight.
NORMS = (aten.native_batch_norm.default, operator.getitem)

#: Columns of a panel: the most that the outputs are a multiple of.
PANELS = (32, 16, 8)
#: Places from which on a product of matrices has rows enough.
PLACES = 7
#: Channels of an image whose windows are read where they lie.
CHANNELS = 4
#: Places of a window of one channel at most, and channels at least.
TAPS, LANES = 25, 16


def in_panels(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """The weight of a product, outputs first, as panels of columns that lie side by side."""
    outputs = weight.shape[0]
    return weight.reshape(outputs // columns, columns, -1).transpose(1, 2).contiguous()


def by_tap(weight: torch.Tensor) -> torch.Tensor:
    """The weight of a convolution of one channel each, with the channels side by side."""
    return weight.reshape(weight.shape[0], -1).t().contiguous()


#: Functions of ours that only compute.
PACKS = frozenset({in_panels, by_tap})


def wide_vectors() -> bool:
    """Whether this processor has the vectors for which loops were measured."""
    return bool(torch.backends.cpu.get_cpu_capability().startswith("AVX512"))


def of_one_place(weight: Node, window: Window) -> bool:
    """Whether a convolution looks at one place alone."""
    return window.is_point and set(weight.spec.shape[2:]) == {1}


def is_product(node: Node, window: Window) -> bool:
    """Whether a convolution is a product that goes well in panels: of one place, or of few channels."""
    weight = node.args[1]
    outputs, inputs = weight.spec.shape[:2]
    count, _, height, width = node.spec.shape
    few = window.groups == 1 and inputs <= CHANNELS
    fits = count * height * width >= PLACES and outputs % PANELS[-1] == 0
    return bool(fits and (few or of_one_place(weight, window)))


def is_of_channels(node: Node, window: Window) -> bool:
    """Whether each channel of a convolution is one of its input's alone."""
    outputs, inputs, *kernel = node.args[1].spec.shape
    return bool(inputs == 1 and window.groups == outputs >= LANES and math.prod(kernel) <= TAPS)


def product(
    new: Relayout, chain: Chain, x: Node, weight: Node, bias: Node | None, window: Window
) -> Node:  # fmt: skip
    """A convolution whose windows are the rows of a matrix, and what follows of its elements."""
    count, outputs, height, width = chain.anchor.spec.shape
    columns = next(n for n in PANELS if outputs % n == 0)
    many, panels = count * height * width, (outputs // columns, columns)
    one = of_one_place(weight, window)
    places = weight.spec.shape[1 : 2 if one else 4]
    if one:
        x = new.with_strides(x, channels_last(x.spec.shape))
    packed = new.fake(held(new, chain, in_panels, (panels[0], math.prod(places), columns), weight, columns))

    def placed(node: Node) -> Any:
        return new.fake(node).permute(0, 2, 3, 1).reshape(many, *panels)

    with new.recording:
        if one:
            rows = new.fake(x).permute(0, 2, 3, 1).reshape(many, 1, *places, 1)
            out = (rows * packed).sum(2)
        else:
            rows = windows_of(new.fake(x), window, places[1:]).unsqueeze(3).unsqueeze(-1)
            out = (rows * packed.view(panels[0], *places, columns)).sum([4, 5, 6]).view(many, *panels)
        if bias is not None:
            out = out + new.fake(bias).view(panels)
        out = followed(new, chain, out, placed)
        image = out.view(count, height, width, outputs).permute(0, 3, 1, 2)
    return new.recording.node(image)


def windows_of(x: Any, window: Window, kernel: tuple[int, ...]) -> Any:
    """The windows of an image: for each place the channels, rows and columns that are seen from there."""
    if any(window.padding):
        x = aten.constant_pad_nd.default(x, [n for n in reversed(window.padding) for _ in range(2)], 0.0)
    for dim, (size, step, apart) in enumerate(zip(kernel, window.stride, window.dilation, strict=True), 2):
        x = aten.slice.Tensor(aten.unfold.default(x, dim, apart * (size - 1) + 1, step), -1, 0, None, apart)
    return x.permute(0, 2, 3, 1, 4, 5)


def of_channels(
    new: Relayout, chain: Chain, x: Node, weight: Node, bias: Node | None, window: Window
) -> Node:
    """A convolution of one channel each, and what follows of its elements."""
    channels, _, *kernel = weight.spec.shape
    steps = Pooling((kernel[0], kernel[1]), window.stride, window.padding, window.dilation)  # type: ignore[arg-type]
    packed = new.fake(held(new, chain, by_tap, (math.prod(kernel), channels), weight))
    with new.recording:
        first, *others = steps.shifted(new.fake(x), chain.anchor.spec.shape[2:], 0.0)
        weights = [packed[place].view(1, channels, 1, 1) for place in range(len(others) + 1)]
        out = first * weights[0]
        if bias is not None:
            out = torch.addcmul(new.fake(bias).view(1, channels, 1, 1), first, weights[0])
        for part, by in zip(others, weights[1:], strict=True):
            out = torch.addcmul(out, part, by)
        out = followed(new, chain, out, new.fake)
    return new.recording.node(out)


def row(new: Relayout, chain: Chain, x: Node, weight: Node, bias: Node | None) -> Node:
    """A row times a matrix, which is given outputs first, and what follows of its elements."""
    with new.recording:
        out = (new.fake(x) * new.fake(weight)).sum(1)
        if bias is not None:
            out = out + new.fake(bias)
        out = followed(new, chain, out.view(1, weight.spec.shape[0]), new.fake)
    return new.recording.node(out)


def held(new: Relayout, chain: Chain, pack: Any, shape: tuple[int, ...], weight: Node, *more: Any) -> Node:
    """A weight in another order."""
    spec = TensorSpec(shape, contiguous(shape), weight.spec.dtype, weight.spec.device)
    return new.graph.call(pack, (weight, *more), spec=spec, like=chain.anchor)


def followed(new: Relayout, chain: Chain, out: Any, placed: Callable[[Node], Any]) -> Any:
    """What the nodes after a convolution make of its elements; `placed` gives others as they lie."""
    before = chain.anchor
    for node in chain.after:

        def value(leaf: Any, out: Any = out, before: Node = before) -> Any:
            if type(leaf) is not Node or leaf is before:
                return out if leaf is before else leaf
            other = new.values[leaf]
            return placed(new.with_strides(other, channels_last(other.spec.shape)))

        if node.op not in NORMS:
            out = call(node.op, mapped(node.args, value), mapped(node.kwargs, value))
        before = node
    return out
