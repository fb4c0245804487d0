"""Resampling, windows of several sizes and their gradients are weighted sums of neighbours."""

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.program import fuse
from kiln.ops.record import recorded
from tests.fuse.test_kernels import calls_of, check, rand

aten = torch.ops.aten


@pytest.mark.parametrize("factor", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 4, 16, 33), (2, 2, 40, 8)])
def test_nearest_neighbours_and_their_gradients(factor, shape):
    x = rand(*shape)
    for mode in ("nearest", "nearest-exact"):
        check(lambda a, m=mode: F.interpolate(a, scale_factor=factor, mode=m) + 1, x, kernels=1)
    sizes = [n * factor for n in shape[2:]]
    check(lambda g: aten.upsample_nearest2d_backward(g, sizes, shape), rand(*shape[:2], *sizes), kernels=1)


SIZES = [(10, 14), (20, 28), (13, 20), (3, 4), (1, 1), (5, 7)]


@pytest.mark.parametrize("size", SIZES)
def test_gradients_at_other_factors(size):
    for name in ("upsample_nearest2d_backward", "_upsample_nearest_exact2d_backward"):
        check(lambda g, op=getattr(aten, name): op(g, size, [2, 3, 5, 7]), rand(2, 3, *size), calls=())
    assert not calls_of(fused(lambda g: aten.upsample_nearest2d_backward(g, [13, 20], [2, 3, 5, 7]), rand(2, 3, 13, 20)))


def fused(function, *inputs):
    return fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS))


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolation_and_its_gradient(mode, size, corners):
    x, g = rand(2, 3, 5, 7), rand(2, 3, *size)
    backward = getattr(aten, f"upsample_{mode}2d_backward")
    for f, given in (
        (lambda a: F.interpolate(a.relu(), size=size, mode=mode, align_corners=corners) + 1, x),
        (lambda a: backward(a * 2, size, [2, 3, 5, 7], corners, None, None).relu(), g),
    ):
        assert not calls_of(fused(f, given)) and len(fused(f, given).kernels) == 1
        check(f, given)
        check(f, given.double())
        check(f, given.bfloat16(), rtol=2e-2, atol=2e-2)


def test_interpolation_of_other_ranks_and_layouts():
    for mode, x in (("linear", rand(2, 3, 9)), ("trilinear", rand(1, 2, 4, 5, 6))):
        f = lambda a, m=mode: F.interpolate(a, scale_factor=2, mode=m)  # noqa: E731
        assert not calls_of(fused(f, x))
        check(f, x)
    x = rand(2, 20, 9, 11).contiguous(memory_format=torch.channels_last)
    check(lambda a: F.interpolate(a, scale_factor=2.5, mode="bilinear"), x)
    check(lambda a: F.interpolate(a, scale_factor=4, mode="bilinear"), rand(1, 2, 40, 50), kernels=2)


def test_infinite_neighbours_stay_outside():
    x = rand(1, 1, 8, 8)
    x[0, 0, 3, 3] = torch.inf
    check(lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), x)
    check(lambda g: aten.upsample_bilinear2d_backward(g, [8, 8], [1, 1, 5, 5], False, None, None), x)


@pytest.mark.parametrize("place", [0, 1, 2, 4])
@pytest.mark.parametrize(("mode", "corners"), [("bilinear", True), ("bicubic", True), ("bicubic", False)])
def test_infinite_gradients_are_added_as_often_as_eager_adds_them(mode, corners, place):
    g = rand(1, 2, 5, 5)
    g[0, 0, place, place] = torch.inf
    backward = getattr(aten, f"upsample_{mode}2d_backward")
    for n in (1, 2, 5):
        check(lambda g: backward(g * 2, [5, 5], [1, 2, n, n], corners, None, None), g)


def test_shares_of_double_precision_are_rounded_once():
    x = torch.full((1, 1, 1, 1), torch.inf, dtype=torch.float64)
    check(lambda a: F.interpolate(a, size=(5, 5), mode="bilinear"), x)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_images_of_one_channel_or_one_place_stay_channels_last(mode):
    weight = rand(4, 1, 3, 3)
    for shape, size, f in (
        ((2, 1, 8, 8), (4, 5), lambda a: a),
        ((2, 3, 1, 1), (1, 1), lambda a: a),
        ((2, 1, 8, 8), (4, 5), lambda a: F.conv2d(a, weight).relu()),
        ((2, 1, 8, 8), (4, 5), lambda a: torch.cat([a, a], 1)),
    ):
        x = rand(*shape).to(memory_format=torch.channels_last)
        resized = lambda a, f=f, size=size: f(F.interpolate(a * 2, size=size, mode=mode))  # noqa: E731
        kiln.reset()
        got, expected = kiln.compile(resized, fullgraph=True)(x), resized(x)
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()


def test_interpolation_in_training_and_with_symbolic_sizes():
    def f(x):
        return F.interpolate(x.tanh(), scale_factor=2, mode="bilinear").sin()

    for compiled in (kiln.compile(f, fullgraph=True), kiln.compile(f, fullgraph=True, dynamic=True)):
        for n in (6, 9):
            x, g = rand(1, 2, n, n + 1).requires_grad_(), rand(1, 2, 2 * n, 2 * n + 2)
            got, expected = compiled(x), f(x)
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(*(torch.autograd.grad(y, x, g)[0] for y in (got, expected)))


def test_eagers_numerics_are_eagers_kernels():
    x = rand(1, 2, 9, 9)
    f = lambda a: F.interpolate(a, size=(13, 14), mode="bilinear")  # noqa: E731
    assert torch.equal(kiln.compile(f, options={"numerics": "eager"})(x), f(x))


@pytest.mark.parametrize("size", [(5, 7), (8, 10), (3, 20), (1, 1)])
def test_windows_of_several_sizes(size):
    x = rand(2, 3, 16, 20)
    for f, given in (
        (lambda a: F.adaptive_avg_pool2d(a, size), (x,)),
        (lambda g, a: aten._adaptive_avg_pool2d_backward(g, a), (rand(2, 3, *size), x)),
    ):
        assert not calls_of(fused(f, *given))
        check(f, *given)


def pooled(x, k, s, p=0, d=1):
    values, places = aten.max_pool2d_with_indices(x, [k, k], [s, s], [p, p], [d, d])
    gradient = rand(*values.shape)
    return gradient, places, lambda g, a, i: aten.max_pool2d_with_indices_backward(
        g, a, [k, k], [s, s], [p, p], [d, d], False, i
    )


@pytest.mark.parametrize("k", [2, 4])
def test_gradients_of_windows_that_do_not_overlap(k):
    x = rand(2, 3, 16, 20)
    gradient, places, backward = pooled(x, k, k)
    check(backward, gradient, x, places, kernels=1)
    for divisor in (None, 7):
        check(
            lambda g, a, d=divisor: aten.avg_pool2d_backward(g, a, [k, k], [], [0, 0], False, True, d).relu(),
            gradient, x, kernels=1,
        )  # fmt: skip


@pytest.mark.parametrize(("k", "s", "p"), [(3, 2, 1), (2, 1, 0), (3, 2, 0), (5, 4, 2)])
def test_gradients_of_windows_that_overlap(k, s, p):
    x = rand(2, 3, 17, 21)
    gradient, places, backward = pooled(x, k, s, p)
    check(lambda g, a, i: backward(g * 2, a, i).relu(), gradient, x, places, kernels=1)
    for padded, divisor in ((True, None), (False, None), (True, 5)):
        f = lambda g, a: aten.avg_pool2d_backward(g, a, [k, k], [s, s], [p, p], False, padded, divisor)  # noqa: E731
        assert not calls_of(fused(f, gradient, x))
        check(f, gradient, x)


@pytest.mark.parametrize("window", [(5, 1, 2), (3, 1, 1), (3, 2, 1, 2)])
def test_windows_that_cover_a_place_too_often_or_with_gaps_are_eagers(window):
    x = rand(2, 3, 17, 21)
    gradient, places, backward = pooled(x, *window)
    check(backward, gradient, x, places, kernels=0, calls=["max_pool2d_with_indices_backward"])
