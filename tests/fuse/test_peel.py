"""Loops cut where conditions on places change: how many nests there are, and that they give what eager gives."""

import pytest
import torch
import torch.nn.functional as F

from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.nest import Load, terms
from kiln.fuse.peel import in_line
from kiln.fuse.program import fuse
from kiln.generate.pieces import borders
from kiln.ops.record import recorded
from tests.fuse.test_kernels import check


def last(*shape):
    return torch.randn(*shape).to(memory_format=torch.channels_last)


def nests(function, *inputs):
    """The nests of the one kernel that a function becomes."""
    (kernel,) = fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS)).kernels
    return kernel.nests


def masked(nest):
    return any(isinstance(t, Load) and t.valid is not None for t in terms(s.value for s in nest.stores))


def taps(x):
    """Neighbours added up, as depthwise convolutions do."""
    padded = F.pad(x, (1, 1, 1, 1))
    parts = [padded[:, :, i : i + x.shape[2], j : j + x.shape[3]] * (i + 2 * j) for i in range(3) for j in range(3)]
    return sum(parts[1:], parts[0]).relu()


def test_borders_of_padding_are_apart():
    x = last(2, 32, 20, 21)
    found = nests(taps, x)
    assert len(found) == 9 and not any(map(masked, found))
    check(taps, x)


def test_a_short_border_in_line_stays_masked():
    x = torch.randn(2, 4, 40, 41)
    found = nests(taps, x)
    assert len(found) == 3 and all(map(masked, found))
    check(taps, x)


def test_seams_of_joined_tensors():
    parts = last(1, 32, 17, 19), last(1, 48, 17, 19), last(1, 16, 17, 19)
    (whole,) = nests(lambda *p: torch.cat(p, 1).relu() + 1, *parts)  # lines are written in their order
    assert borders(whole, in_line(whole), 16) == [32, 80]
    check(lambda *p: torch.cat(p, 1).relu() + 1, *parts)
    rows = [x.contiguous() for x in parts]
    found = nests(lambda *p: torch.cat(p, 1).relu() + 1, *rows)
    assert len(found) == 3 and not any(map(masked, found))
    check(lambda *p: torch.cat(p, 1).relu() + 1, *rows)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_borders_that_repeat_the_inside(mode):
    x = torch.randn(2, 16, 37, 41)
    for pad in ((1, 1, 1, 1), (3, 0, 2, 5), (-2, 3, 1, -4)):
        assert len(nests(lambda x, pad=pad: F.pad(x, pad, mode=mode) * 2, x)) <= 3
        check(lambda x, pad=pad: F.pad(x, pad, mode=mode) * 2, x)


def test_small_nests_stay_whole():
    x = last(1, 16, 5, 5)
    assert len(nests(taps, x)) == 1
    check(taps, x)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("pad", [(1, 0, 0, 2), (3, 3, 3, 3), (-1, 2, 2, -3)])
def test_strided_windows(step, pad):
    x = last(1, 32, 31, 33)
    check(lambda x: F.pad(x, pad, value=2.0)[:, :, ::step, 1::step] * 3, x)
    check(lambda x: F.pad(x, pad, value=2.0)[:, :, ::step, 1::step].flip(2) * 3, x)
    check(lambda x: torch.cat([x, x * 2, x[:, :, :7]], 2)[:, :, ::step], x)


def test_many_joined_tensors_are_eagers():
    parts = [last(1, 16, 10, 10) for _ in range(12)]
    check(lambda *p: torch.cat(p, 1) * 2, *parts, kernels=1, calls=["cat"])
    few = [torch.randn(3) for _ in range(12)]
    check(lambda *p: torch.cat(p, 0) * 2, *few, kernels=1)
