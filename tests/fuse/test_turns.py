"""Loops that follow each other plane by plane, with what comes between them on the stack."""

import pytest
import torch
import torch.nn.functional as F

from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.program import fuse
from kiln.fuse.turns import InTurns
from kiln.ops.record import recorded
from tests.fuse.test_kernels import check, rand


def enlarged(x, mode="bilinear", factor=4, **how):
    return F.interpolate(x, scale_factor=factor, mode=mode, **how)


def turns(function, *inputs):
    """How many kernels a function becomes, and how many of them are of loops in turns."""
    kernels = fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS)).kernels
    return len(kernels), sum(isinstance(kernel, InTurns) for kernel in kernels)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("factor", [2, 4, 5])
@pytest.mark.parametrize("shape", [(1, 21, 32, 32), (2, 9, 24, 40), (18, 1, 20, 33)])
def test_images_are_enlarged_plane_by_plane(mode, factor, shape):
    x = rand(*shape)
    for function in (lambda a: enlarged(a, mode, factor), lambda a: enlarged(a * 2, mode, factor).relu() + 1):
        assert turns(function, x)[1] == 1
        check(function, x)


def test_other_types_and_layouts():
    check(enlarged, rand(1, 16, 24, 24).double())
    check(lambda a: enlarged(a, align_corners=True), rand(1, 32, 24, 24))
    check(enlarged, rand(1, 32, 24, 24).bfloat16(), rtol=2e-2, atol=2e-2)
    check(enlarged, rand(2, 24, 24, 24).to(memory_format=torch.channels_last))
    check(lambda a: F.interpolate(a, scale_factor=2, mode="trilinear"), rand(2, 8, 12, 16, 16))


def test_several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(enlarged, rand(2, 40, 32, 32))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "function, shape",
    [
        (enlarged, (1, 7, 64, 64)),  # few planes
        (enlarged, (1, 16, 8, 8)),  # little memory
        (enlarged, (1, 16, 320, 320)),  # large planes
        (lambda a: F.interpolate(a, size=(128, 16), mode="bilinear"), (1, 64, 32, 128)),  # it is made of more
    ],
)
def test_what_stays_apart(function, shape):
    x = rand(*shape)
    assert turns(function, x)[1] == 0
    check(function, x)


def test_what_leaves_or_is_read_again_is_stored():
    def twice(x, leaves=False, again=False):
        wide = F.interpolate(x, size=(32, 128), mode="bilinear")
        both = F.interpolate(wide, size=(128, 128), mode="bilinear")
        found = (both, wide) if leaves else (both,)
        return (*found, wide.sum(-1)) if again else found

    x = rand(1, 21, 32, 32)
    assert turns(twice, x)[1] == 1
    for how in ({"leaves": True}, {"again": True}):
        check(lambda a, how=how: twice(a, **how), x)
    check(twice, x)


@pytest.mark.parametrize("shape", [(1, 64, 14, 14), (3, 64, 9, 11), (1, 480, 8, 8)])
@pytest.mark.parametrize("stride", [1, 2])
def test_images_with_borders_are_made_and_summed_up_channel_by_channel(shape, stride):
    """Several loops make what a fold reads; borders above and below are alike; a mask is of no channel."""
    channels = shape[1]
    how = [stride, stride], [2, 2], [1, 1], False, [0, 0], channels, [False, True, False]
    x, weight = rand(*shape), rand(channels, 1, 5, 5)
    grad = torch.randn_like(F.conv2d(x, weight, None, stride, 2, 1, channels))

    def filters(grad, x, weight):
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *how)[1]

    assert turns(filters, grad, x, weight) == (3, 1)
    check(filters, grad, x, weight, rtol=1e-4, atol=1e-4)
