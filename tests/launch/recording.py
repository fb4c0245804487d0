"""Graphs of functions, and their plans."""

import torch

from kiln.launch.program import compile_graph
from kiln.ops.record import recorded


def planned(function, *inputs):
    """The plan of a function of tensors."""
    return compile_graph(recorded(function, *inputs))


def check(function, *inputs, times=3):
    """The plan of the function, which gave what eager gives, each time in memory that it shares with nothing."""
    plan = planned(function, *inputs)
    expected = function(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    kept = []
    for _ in range(times):
        got = plan(list(inputs))
        kept += got
        for mine, theirs in zip(got, expected, strict=True):
            assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
            torch.testing.assert_close(mine, theirs, equal_nan=True)
    for i in range(times):
        for mine, theirs in zip(kept[i * len(expected) :], expected, strict=False):
            torch.testing.assert_close(mine, theirs, equal_nan=True)
    return plan
