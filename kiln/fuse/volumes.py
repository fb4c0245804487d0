"""Convolutions over one volume, and their gradients: over its two halves, as a batch.

For a single volume of few elements torch has a kernel of its own, which is two to ten times slower than
oneDNN's, the one that it calls for a batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kiln.base.dataclass import dataclass
from kiln.ops.table import aten

#: Elements of a volume, but for its last dimension, up to which torch's own kernel is called.
FEW = 20480
#: Places of the result from which on: weights are brought into oneDNN's order in each call.
PLACES = 128


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension whose results are parted: `half` of them see `reach` places, the others those `ahead`."""

    dim: int
    half: int
    reach: int
    ahead: int
    padding: int
    size: int

    @property
    def length(self) -> int:
        """The places with those around them that are seen."""
        return max(self.padding + self.size, self.ahead + self.reach)

    def around(self, before: int, after: int) -> list[int]:
        """What is added along the dimension, as padding takes it."""
        return [*[0, 0] * (4 - self.dim), before, after]

    def volumes(self, x: torch.Tensor) -> torch.Tensor:
        """What the halves of the result see."""
        after = self.length - self.padding - self.size
        x = aten.constant_pad_nd(x, self.around(self.padding, after), 0.0)
        return torch.cat([x.narrow(self.dim, start, self.reach) for start in (0, self.ahead)])

    def joined(self, seen: torch.Tensor) -> torch.Tensor:
        """The sum of what belongs to the places that the halves see."""
        starts = 0, self.ahead
        parts = [
            aten.constant_pad_nd(part, self.around(start, self.length - start - self.reach), 0.0)
            for part, start in zip(seen.split(1), starts, strict=True)
        ]
        return (parts[0] + parts[1]).narrow(self.dim, self.padding, self.size).contiguous()

    def without(self, padding: Any) -> list[int]:
        """The padding of the other dimensions."""
        return [0 if d + 2 == self.dim else n for d, n in enumerate(padding)]


def cut_of(
    x: torch.Tensor, weight: torch.Tensor, out: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, groups: int,
) -> Cut | None:  # fmt: skip
    """How a convolution with results of this size is parted; None where torch calls oneDNN as it is."""
    sizes = (*x.shape, *out, *weight.shape)
    if x.dim() != 5 or x.device.type != "cpu" or x.dtype is not torch.float32 or transposed or groups != 1:
        return None
    if not all(type(n) is int and n > 0 for n in sizes) or x.shape[0] != 1:
        return None
    large = math.prod(x.shape[:4]) > FEW or min(weight.shape[3:]) > 3
    if large or max(weight.shape[3:]) == 1 or math.prod(out[2:]) < PLACES:
        return None
    for d in range(3):
        half, odd = divmod(out[d + 2], 2)
        if not odd:
            reach = (half - 1) * stride[d] + dilation[d] * (weight.shape[d + 2] - 1) + 1
            return Cut(d + 2, half, reach, half * stride[d], padding[d], x.shape[d + 2])
    return None


def thrice(given: Any) -> list[int]:
    """What is given for each dimension, or for all at once."""
    return [given[d % len(given)] for d in range(3)]


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    """A convolution over a volume in halves; others stay as they are."""
    if x.dim() != 5:
        return NotImplemented
    stride, padding, dilation = map(thrice, (stride, padding, dilation))
    seen = [apart * (n - 1) + 1 for n, apart in zip(weight.shape[2:], dilation, strict=True)]
    steps = zip(x.shape[2:], seen, padding, stride, strict=True)
    out = 1, weight.shape[0], *[(size + 2 * around - n) // step + 1 for size, n, around, step in steps]
    cut = cut_of(x, weight, out, stride, padding, dilation, transposed, groups)
    if cut is None:
        return NotImplemented
    how = stride, cut.without(padding), dilation, False, output_padding, groups
    made = aten.convolution(cut.volumes(x), weight, bias, *how)
    return torch.cat(list(made.split(1)), cut.dim)


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: list[bool],
) -> Any:  # fmt: skip
    """The gradients of such a convolution."""
    stride, padding, dilation = map(thrice, (stride, padding, dilation))
    cut = cut_of(x, weight, grad.shape, stride, padding, dilation, transposed, groups)
    if cut is None:
        return NotImplemented
    given = torch.cat(list(grad.split(cut.half, cut.dim)))
    how = stride, cut.without(padding), dilation, False, output_padding, groups, mask
    image, *others = aten.convolution_backward(given, cut.volumes(x), weight, bias_sizes, *how)
    return cut.joined(image) if mask[0] else None, *others
