"""Elements repeated a whole number of times are reads at quotients; their gradients are sums of windows."""

import re

import pytest
import torch
import torch.nn.functional as F

import kiln
from tests.fuse.test_kernels import check, rand

aten = torch.ops.aten


@pytest.mark.parametrize("factor", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 4, 16, 33), (2, 2, 40, 8)])
def test_nearest_neighbours_and_their_gradients(factor, shape):
    x = rand(*shape)
    for mode in ("nearest", "nearest-exact"):
        check(lambda a, m=mode: F.interpolate(a, scale_factor=factor, mode=m) + 1, x, kernels=1)
    sizes = [n * factor for n in shape[2:]]
    check(lambda g: aten.upsample_nearest2d_backward(g, sizes, shape), rand(*shape[:2], *sizes), kernels=1)


def test_factors_that_are_no_whole_numbers_stay_as_they_are():
    check(lambda a: F.interpolate(a, size=(13, 20)), rand(2, 3, 5, 7), kernels=1)
    g = rand(1, 2, 13, 20)
    check(lambda a: aten.upsample_nearest2d_backward(a, [13, 20], [1, 2, 5, 7]), g, kernels=0, calls=["upsample_nearest2d_backward"])


def pooled(x, k, s, p=0):
    values, places = aten.max_pool2d_with_indices(x, [k, k], [s, s], [p, p])
    gradient = rand(*values.shape)
    return gradient, places, lambda g, a, i: aten.max_pool2d_with_indices_backward(
        g, a, [k, k], [s, s], [p, p], [1, 1], False, i
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


def test_windows_that_overlap_are_eagers():
    x = rand(2, 3, 17, 21)
    gradient, places, backward = pooled(x, 3, 2, 1)
    check(backward, gradient, x, places, kernels=0, calls=["max_pool2d_with_indices_backward"])


def test_gradients_of_a_table_add_rows():
    table, places = rand(50, 24).requires_grad_(), torch.randint(0, 50, (6, 40))
    gradient = rand(6, 40, 24)
    got, expected = (
        torch.autograd.grad(f(table, places), table, gradient)[0]
        for f in (kiln.compile(lambda t, i: F.embedding(i, t) * 2, fullgraph=True), lambda t, i: F.embedding(i, t) * 2)
    )
    assert torch.equal(got, expected)
    check(lambda x, i, y: x.index_add(0, i, y, alpha=2), rand(9, 5), torch.tensor([3, 3, 0]), rand(3, 5),
          kernels=0, calls=["index_add"])  # fmt: skip


@pytest.mark.parametrize("wrong", [-1, 9])
def test_rows_that_do_not_exist_raise_what_eager_raises(wrong):
    def add(x, i, y):
        return x.index_add(0, i, y)

    args = rand(9, 5), torch.tensor([3, wrong, 0]), rand(3, 5)
    with pytest.raises(Exception) as eager:
        add(*args)
    with pytest.raises(type(eager.value), match=re.escape(str(eager.value))):
        kiln.compile(add, fullgraph=True)(*args)
