"""Few numbers side by side, one of each vector in turn: whole vectors are stored."""

import pytest
import torch
import torch.nn.functional as F

from kiln.generate.kernel import Emitter
from tests.fuse.test_kernels import check, rand
from tests.generate.test_loops import nest_of


def turned(a):
    return torch.stack((-a[..., 1::2], a[..., ::2]), -1).flatten(-2) * a


def test_what_is_woven():
    def form(function, *inputs):
        emitted = Emitter(nest_of(function, *inputs), 16)
        whole = emitted.fn.text().split("llvm.masked.scatter")[0]
        return emitted.weaves and emitted.weaves.size, whole.count("store <16 x float>")

    x, image = rand(64, 100), rand(2, 16, 16, 32)
    assert form(lambda a, b: torch.stack([a, b], -1), x, x + 1) == (2, 2)
    assert form(lambda a, b: torch.stack([a, b, a * b], -1), x, x + 1) == (3, 3)
    assert form(lambda a: F.pixel_shuffle(a, 2), image) == (2, 2)
    assert form(lambda a: F.pixel_shuffle(a, 4), image) == (4, 4)
    assert form(lambda a: a.t() * 2, x)[0] is None
    assert form(lambda a, b: torch.stack([a, b], -1), x.bfloat16(), x.bfloat16() + 1)[0] is None


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("shape", [(3, 1), (5, 7), (4, 100), (3, 1041)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.bool])
def test_joined_last_dimensions(count, shape, dtype):
    given = [(rand(*shape) * 10 + i).to(dtype) for i in range(count)]
    check(lambda *a: torch.stack(a, -1), *given)
    check(lambda *a: torch.stack([a[0] * 2, *a[1:]], -1).flatten(-2), *given)


@pytest.mark.parametrize("shape", [(2, 144, 16, 32), (1, 144, 3, 5), (2, 144, 7, 20)])
def test_shuffled_pixels_and_channels(shape):
    x = rand(*shape)
    for factor in (2, 3, 4):
        check(lambda a, f=factor: F.pixel_shuffle(a * 2, f) + 1, x)
        check(lambda a, f=factor: a[0, :f].permute(1, 2, 0).contiguous() * 255, x)


@pytest.mark.parametrize("width", [16, 64, 94])
def test_other_values_that_lie_so(width):
    x, y = rand(9, width), rand(9, width) + 1
    check(turned, x)
    check(lambda a: a.unsqueeze(-1).expand(*a.shape, 4) * torch.arange(4.0), x)
    check(lambda a, b: (torch.stack([a, b], -1), torch.stack([b, a], -1) * 2), x, y)
    check(lambda a, b: (torch.stack([a, b], -1), a + b), x, y)
