"""Recurrent networks; of packed sequences the graph reads how long all are, and the longest.

Where it varies how many sequences there are, or how long they are, a network is a call of eager's kernels:
those look at the sizes, and a graph of steps would be good for one length alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from kiln.base.conditions import le
from kiln.base.errors import Break
from kiln.capture import masks
from kiln.capture.calls import Args, Kwargs, handles, leaf
from kiln.capture.frame import Machine
from kiln.check.guards import MISSING
from kiln.ops.cudnn_rnn import MODES, differentiable, of_any_length, of_packed
from kiln.ops.fake import FakeTensor, make
from kiln.ops.symint import expr_of, wrap

RECURRENT = tuple(MODES)


@handles(*RECURRENT, told=True)
def recurrent(m: Machine, args: Args, kwargs: Kwargs, function: Any) -> Any:
    """A recurrent network: the kernel for packed sequences reads their lengths in memory."""
    if not of_packed(args):
        given = m.world.touch_deep(args) if len(args) == 9 and not kwargs else ()
        if given and is_by_cudnn(given):
            return by_cudnn(m, function, *args)
        if given and is_plain(given[0]) and given[0].dim() == 3 and of_any_length(function, given):
            return m.recorder.record(function, args, all_steps)
        return leaf(m, function, args, kwargs)
    found = through(m, function, args)
    if found is MISSING:
        raise Break("data-dependent", "the lengths of packed sequences are read", "pad the sequences")
    return found


def all_steps(x: Any, states: Any, weights: Any, _: bool, layers: int, drop: float, train: bool,
              both: bool, batch_first: bool) -> Any:  # fmt: skip
    """What a recurrent network makes of sequences of any length."""
    states = states if isinstance(states, (list, tuple)) else (states,)
    of, width = (x, *states, *weights), states[0].shape[2] * (2 if both else 1)
    steps, rows = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    out = made((steps, rows, width), x, of)
    return out.transpose(0, 1) if batch_first else out, *[made(state.shape, x, of) for state in states]


def is_by_cudnn(args: Args) -> bool:
    """Whether cuDNN runs a recurrent network, which drops nothing and has no projection, as eager does."""
    x, state, weights, biases, layers, drop, train, two_way, _ = args
    states = [state] if type(state) is FakeTensor else [*state]
    tensors = [x, *states, *weights]
    if not all(type(t) is FakeTensor and t.device.type == "cuda" and t.dtype == x.dtype for t in tensors):
        return False
    if not torch.backends.cudnn.enabled or torch.is_autocast_enabled("cuda") or drop and train:
        return False
    whole = len(weights) == layers * (1 + two_way) * (4 if biases else 2)
    return whole and x.dim() == 3 and all(type(n) is int and n > 0 for t in tensors for n in t.shape)


def by_cudnn(
    m: Machine, function: Any, x: Any, state: Any, weights: Any, _: bool, layers: int, drop: float,
    train: bool, two_way: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """A recurrent network as one op of the graph."""
    several = function is torch.lstm
    first, cell = state if several else (state, None)
    kind = MODES[function], first.shape[-1], layers, batch_first, train, two_way
    found = m.torch_call(differentiable(), (x, list(weights), first, cell, *kind), {})
    return tuple(found[: 2 + several])


@handles(torch._pad_packed_sequence)
def padded(m: Machine, args: Args, kwargs: Kwargs) -> Any:
    """Packed sequences one beside the other, as long as the longest, or as the program says."""
    found = pad(m, *args)
    return leaf(m, torch._pad_packed_sequence, args, kwargs) if found is MISSING else found


def made(size: Sequence[Any], like: torch.Tensor, of: Sequence[torch.Tensor]) -> torch.Tensor:
    """A dense tensor of this size that gradients go through where they are asked of one of these."""
    found = make(size, None, like.dtype, like.device)
    if any(x.requires_grad for x in of):
        return found + make((), None, like.dtype, like.device, requires_grad=True)
    return found


def is_plain(x: FakeTensor) -> bool:
    """Whether eager computes here as it does without modes."""
    return x.device.type == "cpu" and x.is_floating_point() and not torch.is_autocast_enabled("cpu")


def pack(m: Machine, x: FakeTensor, lengths: FakeTensor, batch_first: bool) -> Any:
    if not is_plain(x) or lengths.device.type != "cpu" or x.dim() < 2:
        return MISSING
    rows, columns = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    total, longest = masks.opened(m, low=2), masks.opened(m, low=2)
    shapes = (wrap(total), *x.shape[2:]), (wrap(longest),)

    def gives(x: Any, lengths: Any, _: bool) -> Any:
        return made(shapes[0], x, (x,)), made(shapes[1], lengths, ())

    data, sizes = m.recorder.record(torch._pack_padded_sequence, (x, lengths, batch_first), gives)
    for symbol, tensor in ((total, data), (longest, sizes)):
        masks.found_by(m, symbol, "size", torch.Tensor.size, tensor, 0)
        masks.expect_size(m, symbol)
    longest.scope.learn(le(longest, expr_of(columns)))
    m.batches[id(sizes)] = sizes, rows
    return data, sizes


def pad(m: Machine, data: FakeTensor, sizes: FakeTensor, batch_first: bool, value: Any, length: Any) -> Any:
    if id(sizes) not in m.batches or not is_plain(data):
        return MISSING
    rows = m.batches[id(sizes)][1]

    def gives(data: Any, sizes: Any, *_: Any) -> Any:
        padded = made((length, rows, *data.shape[1:]), data, (data,))
        return padded.transpose(0, 1) if batch_first else padded, made((rows,), sizes, ())

    return m.recorder.record(torch._pad_packed_sequence, (data, sizes, batch_first, value, length), gives)


def through(m: Machine, function: Any, args: Args) -> Any:
    """What a recurrent network makes of packed sequences."""
    data, sizes, _, _, _, layers, dropout, train, both = args
    if id(sizes) not in m.batches or not is_plain(data) or dropout and train and layers > 1:
        return MISSING

    def gives(data: Any, sizes: Any, states: Any, weights: Any, *_: Any) -> Any:
        states = states if isinstance(states, (list, tuple)) else (states,)
        of = (data, *states, *weights)
        width = states[0].shape[2] * (2 if both else 1)
        return made((data.shape[0], width), data, of), *[made(x.shape, data, of) for x in states]

    return m.recorder.record(function, args, gives)


def first(m: Machine, function: Any, args: Args) -> Any:
    """How many sequences there are, where that is asked of what they were packed into; else MISSING.

    Torch's own modules take it for a number.
    """
    known = function is operator.getitem and id(args[0]) in m.batches
    if not known or type(args[1]) is not int or args[1]:
        return MISSING
    rows = m.batches[id(args[0])][1]
    own = m.frames[-1].globals.get("__name__") == torch.nn.modules.rnn.__name__
    return rows if own else m.torch_call(torch.tensor, (rows,), {})


masks.RULES[torch._pack_padded_sequence] = pack
