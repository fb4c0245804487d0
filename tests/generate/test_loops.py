"""Loops in vectors: rests, wide turns, columns, tiles, pieces and strides give what eager gives."""

import pytest
import torch
import torch.nn.functional as F

from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.program import fuse
from kiln.generate.kernel import Emitter
from kiln.generate.pieces import borders
from kiln.generate.tiles import crossing
from kiln.ops.record import recorded
from tests.fuse.test_kernels import check, rand

LENGTHS = [1, 3, 15, 16, 17, 63, 64, 65, 100, 1003]


def nest_of(function, *inputs):
    (kernel,) = fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS)).kernels
    ((nest,), *_) = kernel.stages
    return nest


@pytest.mark.parametrize("length", LENGTHS)
def test_rests_of_rows(length):
    x, y = rand(5, length), rand(5, length) + 1
    check(lambda a, b: torch.where(a > b, a.exp(), b) + a[0], x, y, kernels=1)
    check(lambda a, b: (a * b > 0, (a * 3).to(torch.int32), (a + b).to(torch.bfloat16)), x, y, kernels=1)
    check(lambda a: (a.sum(-1), a.amax(-1), a.argmin(-1)), x, kernels=1)
    check(lambda a: F.softmax(a, -1) * 2, x, kernels=1)
    check(lambda a, b: (a.sum(0), (a * b).amin(0)), x, y)
    check(lambda a, i: a[i] + 1, x, torch.tensor([4, 0, -1]), kernels=1)


def test_a_rest_reads_and_writes_nothing_else():
    x, places = rand(40), torch.arange(19)
    out = torch.full((64,), 7.0)
    check(lambda a: a[3:22] * 2, x, kernels=1)
    check(lambda a, o: torch.slice_scatter(o, a[:19] + 1, 0, 5, 24), x, out)
    check(lambda a, i: a.to(torch.float64)[i] * 2, x, places, kernels=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_long_folds_take_several_vectors_at_once(dtype):
    x = (rand(3, 700) * 3).to(dtype)
    check(lambda a: (a.sum(-1), a.to(torch.float32).amax(-1)), x, rtol=1e-2 if dtype.itemsize == 2 else 1e-5)
    check(lambda a: (a.sum(0), a.any(0)), (rand(40, 300) * 3).to(dtype), rtol=1e-2, atol=1e-1)


def test_nan_wins_in_wide_folds():
    x = rand(4, 1000)
    x[1, 999], x[2, 0] = float("nan"), float("nan")
    check(lambda a: (a.amax(-1), a.amin(-1)), x, kernels=1)


@pytest.mark.parametrize("shape", [(16, 16), (17, 33), (40, 300), (5, 100), (300, 270), (600, 513)])
def test_transposes_go_through_tiles(shape):
    x, y = rand(*shape), rand(*shape[::-1])
    found = crossing(nest_of(lambda a, b: a.t() * 2 + b, x, y), 16)
    assert (found is not None) == (min(shape) >= 16)
    check(lambda a, b: (a.t() * 2 + b, a + 1), x, y)
    check(lambda a: a.permute(1, 0).contiguous(), x, kernels=1)
    check(lambda a: a.permute(2, 0, 1).double().contiguous() + 1, rand(3, *shape), kernels=1)
    check(lambda a: a.permute(0, 2, 1).contiguous() > 0, rand(2, *shape), kernels=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16, torch.uint8, torch.bool])
def test_transposes_of_short_types(dtype):
    x = (rand(40, 300) * 50).to(dtype)
    found = crossing(nest_of(lambda a: a.t().contiguous(), x), 16)
    assert (found is not None) == (dtype is not torch.bool)
    check(lambda a: a.t().contiguous(), x, kernels=1, rtol=0, atol=0)


def test_what_lies_along_one_axis_has_no_tiles():
    assert crossing(nest_of(lambda a, b: a * 2 + b, rand(64, 64), rand(64)), 16) is None
    assert crossing(nest_of(lambda a: a.t().sum(1), rand(64, 64)), 16) is None


def test_concatenations_go_in_pieces():
    def rotated(x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    for n in (32, 64, 100):
        x, cos, sin = rand(3, 5, n), rand(5, n), rand(5, n)
        check(rotated, x, cos, sin, kernels=1)
        check(lambda a, b: torch.cat([a, b * 2, a], -1) + 1, rand(4, n), rand(4, 3 * n))
        check(lambda a: F.pad(a, (20, 40), value=2.0) * 2, rand(4, n), kernels=1)
        check(lambda a, b: torch.cat([a.exp(), b], -1).sum(0), rand(4, n), rand(4, n))


def test_borders_are_where_conditions_change():
    nest = nest_of(lambda a, b: torch.cat([a, b], -1) + 1, rand(4, 32), rand(4, 48))
    found = {border for axis in nest.axes for border in borders(nest, axis, 16)}
    assert found <= {32}
    assert not any(borders(nest, axis, 64) for axis in nest.axes)  # pieces shorter than a vector


def test_strides_of_two_to_four_and_backwards():
    x = rand(3, 400)
    for step in (2, 3, 4, 5):
        check(lambda a, step=step: a[:, ::step] * 2, x, kernels=1)
        check(lambda a, step=step: a[:, 1::step].exp() + 1, x.double(), kernels=1)
    check(lambda a: torch.flip(a, [1]) - a, x, kernels=1)
    check(lambda a: torch.flip(a[:, :37], [1]) * 2, x.long(), kernels=1)


def test_vectors_run_along_long_axes():
    nest = nest_of(lambda a: F.avg_pool2d(a, 3, 1, 1), rand(2, 3, 20, 40))
    emitter = Emitter(nest, 16)
    assert emitter.vector is not None
    assert not emitter.vector.reduced


def test_short_rows_share_a_task():
    nest = nest_of(lambda a: a.transpose(1, 2).contiguous() + 1, rand(2, 30, 4, 16))
    tasks = Emitter(nest, 16).tasks()
    assert tasks <= 2 * 30 * 4 // 8
    check(lambda a: a.transpose(1, 2).contiguous() + 1, rand(2, 30, 4, 16), kernels=1)
