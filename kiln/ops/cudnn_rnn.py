"""Recurrent networks by cuDNN, as one op each and one for all of its gradients.

Torch's own op looks at where weights lie, which the fakes of a graph cannot say, and moves them where they
are not side by side. These look when they run: weights that lie as cuDNN wants them are read where they are,
others are copied together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kiln.ops.fake import FakeTensor, make, similar
from kiln.ops.lift import is_symbolic
from kiln.ops.reductions import library
from kiln.ops.table import RULES, aten

#: What cuDNN calls the functions of torch.
MODES = {torch.rnn_relu: 0, torch.rnn_tanh: 1, torch.lstm: 2, torch.gru: 3}


def of_packed(args: Sequence[Any]) -> bool:
    """Whether a recurrent network is given packed sequences: the weights come fourth."""
    return len(args) > 3 and isinstance(args[3], (list, tuple))


def of_any_length(function: Any, args: Sequence[Any]) -> bool:
    """Whether sizes vary that torch's own form of a recurrent network takes for numbers."""
    sizes = list(args[0].shape[:-1])
    if function in (torch.rnn_tanh, torch.rnn_relu):  # of these, the number of steps alone
        del sizes[0 if args[-1] else 1 :: 2]
    return is_symbolic(sizes)


class Kind(NamedTuple):
    """What a network is beside its tensors, as the ops take it."""

    mode: int
    hidden: int
    layers: int
    batch_first: bool
    train: bool
    two_way: bool

    def laid(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[int, tuple[int, ...]]:
        """The length of what all weights lie in, and where each of them does."""
        shapes = tuple([tuple(w.shape) for w in weights])
        return _laid(shapes, self.each(weights), x.shape[-1], x.dtype, x.device, self._replace(train=False))

    def together(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The memory that all weights lie in as cuDNN wants it: theirs, or a copy."""
        length, places = self.laid(x, weights)
        memory = weights[0].untyped_storage()
        if memory.nbytes() == length * x.dtype.itemsize and all(
            w.storage_offset() == place and w.is_contiguous() and w.untyped_storage()._cdata == memory._cdata
            for w, place in zip(weights, places, strict=True)
        ):
            return x.new_empty(0).set_(memory, 0, (length,), (1,))
        copy = x.new_zeros(length)
        for w, place in zip(weights, places, strict=True):
            copy[place : place + w.numel()].copy_(w.reshape(-1))
        return copy

    def each(self, weights: Sequence[Tensor]) -> int:
        """How many weights a layer has in each direction."""
        return len(weights) // (self.layers * (1 + self.two_way))

    @property
    def after(self) -> tuple[Any, ...]:
        """Those after the tensors: no projection, nothing dropped, no packed sequences."""
        sizes = self.mode, self.hidden, 0, self.layers
        return *sizes, self.batch_first, 0.0, self.train, self.two_way, [], None


@functools.cache
def _laid(
    shapes: tuple[tuple[int, ...], ...], each: int, inputs: int, dtype: torch.dtype, device: torch.device,
    kind: Kind,
) -> tuple[int, tuple[int, ...]]:  # fmt: skip
    weights = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    given = each, inputs, kind.mode, kind.hidden, 0, kind.layers, kind.batch_first, kind.two_way
    memory = torch._cudnn_rnn_flatten_weight(weights, *given)
    return memory.numel(), tuple([w.storage_offset() for w in weights])


def _forward(x: Tensor, weights: list[Tensor], state: Tensor, cell: Tensor | None, *kind: Any) -> Any:
    how = Kind(*kind)
    given = weights, how.each(weights), how.together(x, weights), state, cell, *how.after
    return tuple(aten._cudnn_rnn.default(x, *given)[:4])


def _backward(
    x: Tensor, weights: list[Tensor], state: Tensor, cell: Tensor | None, out: Tensor, reserve: Tensor,
    grads: list[Tensor | None], *kind: Any,
) -> list[Tensor]:  # fmt: skip
    """The gradients of the input, the states and the weights."""
    how = Kind(*kind)
    given = weights, how.each(weights), how.together(x, weights), state, cell, out, *grads, *how.after
    # The kernel writes into what the forward pass reserved, which a second backward pass may read.
    of_x, of_state, of_cell, of_weights = aten._cudnn_rnn_backward.default(
        x, *given, reserve.clone(), [True, True, cell is not None, True]
    )
    return [of_x, of_state, *([of_cell] if cell is not None else []), *of_weights]


def _forward_types(x: Tensor, weights: list[Tensor], state: Tensor, cell: Tensor | None, *kind: Any) -> Any:
    how = Kind(*kind)
    *around, _ = x.shape
    width = how.hidden * (1 + how.two_way)
    stride = (width, around[0] * width, 1) if how.batch_first else None
    out = make((*around, width), stride, x.dtype, x.device)
    after = similar(state), similar(state) if cell is not None else make((0,), None, x.dtype, x.device)
    return out, *after, make((0,), None, torch.uint8, x.device)


def _backward_types(
    x: Tensor, weights: list[Tensor], state: Tensor, cell: Tensor | None, *rest: Any
) -> list[FakeTensor]:
    given = [x, state, *([cell] if cell is not None else []), *weights]
    return [similar(one) for one in given]


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    x, weights, state, cell, *kind = inputs
    ctx.kind = kind
    ctx.save_for_backward(x, state, cell, output[0], output[3], *weights)
    ctx.mark_non_differentiable(output[3])


def _gradients(ctx: Any, out: Tensor, state_after: Tensor, cell_after: Tensor, reserved: Any) -> Any:
    x, state, cell, result, reserve, *weights = ctx.saved_tensors
    grads = [out, state_after, cell_after if cell is not None else None]
    backward = torch.ops.kiln.cudnn_rnn_backward.default
    found = backward(x, weights, state, cell, result, reserve, grads, *ctx.kind)
    of_x, of_state, *rest = found
    of_cell = rest.pop(0) if cell is not None else None
    return of_x, rest, of_state, of_cell, *[None] * len(Kind._fields)


GIVEN = "Tensor x, Tensor[] weights, Tensor state, Tensor? cell"
KIND = "int mode, int hidden, int layers, bool batch_first, bool train, bool two_way"
BETWEEN = "Tensor out, Tensor reserve, Tensor?[] grads"


@functools.cache
def differentiable() -> Any:
    """The op with its gradients: all is declared, which takes time, when there is one."""
    tags = (torch.Tag.pt2_compliant_tag,)
    library.define(f"cudnn_rnn({GIVEN}, {KIND}) -> (Tensor, Tensor, Tensor, Tensor)", tags=tags)
    library.define(f"cudnn_rnn_backward({GIVEN}, {BETWEEN}, {KIND}) -> Tensor[]", tags=tags)
    library.impl("cudnn_rnn", _forward, "CUDA")
    library.impl("cudnn_rnn_backward", _backward, "CUDA")
    op, gradients = torch.ops.kiln.cudnn_rnn.default, torch.ops.kiln.cudnn_rnn_backward.default
    RULES[op], RULES[gradients] = _forward_types, _backward_types
    torch.library.register_autograd("kiln::cudnn_rnn", _gradients, setup_context=_saved, lib=library)
    return op
