"""What is made anew and what is kept; updates in place; pooling and convolutions that are loops or products."""

import pytest
import torch
import torch.nn.functional as F

from kiln.expand.expand import expand
from kiln.fuse.calls import CALLED
from kiln.fuse.folds import FOLDS
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.lower import LOWER
from kiln.fuse.nest import Load
from kiln.fuse.program import fuse
from kiln.fuse.steps import Call, Launch
from kiln.fuse.views import VIEWS
from kiln.ops.levels import KERNELS, PRIMITIVES, name_of
from kiln.ops.record import recorded
from tests.fuse.test_kernels import calls_of, check, rand

aten = torch.ops.aten


def steps(function, *inputs):
    """The names of eager calls that are no views, and the shapes that kernels write beside their scratch."""
    program = fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS))
    written = [n.spec.shape for step in program.steps if isinstance(step, Launch) for n in step.writes.values()]
    return calls_of(program), sorted(map(tuple, written))


def test_a_normalised_value_is_made_anew_by_each_kernel_that_reads_it():
    def backward(grad, x, mean, scale, weight):
        return aten.native_layer_norm_backward(grad, x, [64], mean, scale, weight, weight, [True, True, True])

    inputs = rand(300, 64), rand(300, 64), rand(300, 1), rand(300, 1), rand(64)
    assert steps(backward, *inputs) == ([], [(64,), (64,), (300, 64)])
    check(backward, *inputs, rtol=1e-4, atol=1e-4)


def test_costly_values_are_kept():
    def twice(x, y):
        e = x.exp()
        return (e * y).sum(0), (e - y).sum(1)

    _, written = steps(twice, rand(300, 64), rand(300, 64))
    assert (300, 64) in written
    check(twice, rand(300, 64), rand(300, 64), rtol=1e-4, atol=1e-4)


def test_rows_are_added_to_a_gradient_in_place():
    def gradient(hidden, table_grad, places, rows):
        other = torch.mm(table_grad.t(), hidden)
        return aten.embedding_dense_backward(rows, places, 40, -1, False) + other

    inputs = rand(7, 8), rand(7, 40), torch.tensor([1, 5, 1, 39, 0, 0, 2]), rand(7, 8)
    calls, written = steps(gradient, *inputs)
    assert (calls, written) == (["mm", "index_add_"], [])
    check(gradient, *inputs)


def test_what_is_read_later_is_not_changed_in_place():
    def both(x, places, rows):
        base = torch.mm(x, x)
        changed = aten.index_put(base, [places], rows, True)
        return changed, base * 2

    calls, _ = steps(both, rand(8, 8), torch.tensor([1, 5, 1]), rand(3, 8))
    assert calls == ["mm", "index_put"]
    check(both, rand(8, 8), torch.tensor([1, 5, 1]), rand(3, 8))
    check(lambda x, i, r: aten.index_put(x, [i], r, True), rand(8, 8), torch.tensor([1, 5]), rand(2, 8))


POOLS = {
    "plain": dict(kernel_size=2),
    "padded": dict(kernel_size=3, stride=2, padding=1),
    "uneven": dict(kernel_size=(3, 2), stride=(1, 2), padding=(1, 0)),
    "rounded up": dict(kernel_size=3, stride=2, ceil_mode=True),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("shape", [(2, 3, 20, 31), (3, 17, 40)])
def test_pooling_is_one_kernel(name, shape):
    x = rand(*shape)
    check(lambda a: F.max_pool2d(a, **POOLS[name], return_indices=True), x, kernels=1)
    assert steps(lambda a: F.avg_pool2d(a, **POOLS[name]), x)[0] == []
    check(lambda a: F.avg_pool2d(a, **POOLS[name]), x)
    check(lambda a: F.avg_pool2d(a, **POOLS[name], count_include_pad=False), x)
    check(lambda a: F.avg_pool2d(a, **POOLS[name], divisor_override=5), x)


def test_windows_at_the_edges():
    x = rand(1, 2, 9, 9)
    x[0, 0, :3, :3], x[0, 1, 4, 4] = -float("inf"), float("nan")
    check(lambda a: F.max_pool2d(a, 3, 2, 1, return_indices=True), x, kernels=1)
    check(lambda a: F.max_pool2d(a, 3, 1, 1, 2, return_indices=True), x, kernels=1)
    calls, _ = steps(lambda a: F.max_pool2d(a, 2), x.to(memory_format=torch.channels_last))
    assert calls == ["max_pool2d_with_indices"]


def backward_of(stride, padding, groups, mask):
    def backward(grad, x, weight):
        sizes = [stride] * 2, [padding] * 2, [1, 1]
        out = aten.convolution_backward(grad, x, weight, [weight.shape[0]], *sizes, False, [0, 0], groups, mask)
        return tuple(part for part, wanted in zip(out, mask, strict=True) if wanted)

    return backward


def test_gradients_of_convolutions_of_one_place_are_products():
    backward = backward_of(1, 0, 1, [True, True, True])
    inputs = rand(1, 24, 9, 10), rand(1, 16, 9, 10), rand(24, 16, 1, 1)
    assert steps(backward, *inputs)[0] == ["mm", "mm"]
    check(backward, *inputs, rtol=1e-4, atol=1e-4)
    apart, strided = backward_of(2, 0, 1, [True, True, True]), (rand(1, 24, 5, 5), rand(1, 16, 9, 10), rand(24, 16, 1, 1))
    assert steps(apart, *strided)[0] == ["mm", "mm"]
    check(apart, *strided, rtol=1e-4, atol=1e-4)
    several = rand(2, 24, 9, 10), rand(2, 16, 9, 10), rand(24, 16, 1, 1)
    assert steps(backward, *several)[0] == ["convolution_backward"]


@pytest.mark.parametrize(("side", "step", "padding"), [(15, 1, 1), (15, 1, 0), (14, 1, 2), (520, 2, 1), (519, 2, 0)])
def test_gradients_of_convolutions_of_one_channel_are_loops(side, step, padding):
    backward = backward_of(step, padding, 3, [True, False, False])
    out = (side + 2 * padding - 3) // step + 1
    inputs = rand(1, 3, out, out), rand(1, 3, side, side), rand(3, 1, 3, 3)
    assert steps(backward, *inputs)[0] == []
    check(backward, *inputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("count", "side", "size", "step", "padding"), [
    (1, 28, (5, 5), 1, 2), (2, 27, (5, 5), 2, 2), (1, 14, (7, 7), 1, 3), (1, 30, (6, 4), 2, 0), (2, 16, (3, 11), 1, 4),
])  # fmt: skip
def test_gradients_of_large_kernels_of_one_channel_are_sums(count, side, size, step, padding, layout):
    backward = backward_of(step, padding, 24, [False, True, True])
    out = [(side + 2 * padding - n) // step + 1 for n in size]
    inputs = rand(count, 24, *out).to(memory_format=layout), rand(count, 24, side, side).to(memory_format=layout)
    given = (*inputs, rand(24, 1, *size))
    assert steps(backward, *given)[0] == []
    check(backward, *given, rtol=1e-4, atol=1e-4)
    with_image = backward_of(step, padding, 24, [True, True, False])
    assert steps(with_image, *given)[0] == ["convolution_backward"]
    check(with_image, *given, rtol=1e-4, atol=1e-4)


def test_infinities_are_in_the_sums_that_they_belong_to():
    backward = backward_of(1, 2, 4, [False, True, False])
    grad, x = rand(1, 4, 16, 16), rand(1, 4, 16, 16)
    x[0, 0, 5, 0], x[0, 1, 5, -1], x[0, 2, 0, 0], grad[0, 3, 0, 0] = torch.inf, -torch.inf, torch.nan, torch.inf
    check(backward, grad, x, rand(4, 1, 5, 5), rtol=1e-4, atol=1e-4)


def sums_of(function, *inputs):
    """The one nest with sums, and the elements that it reads."""
    program = fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS))
    (nest,) = [nest for kernel in program.kernels for nest in kernel.nests if nest.folds()]
    return nest, [term for term in nest.terms() if isinstance(term, Load)]


def test_an_image_with_borders_is_made_once_for_sums_over_its_rows():
    """Not for each element of each sum, at quotients of places: as elements that lie one after the other."""
    backward = backward_of(1, 2, 24, [False, True, False])
    nest, loads = sums_of(backward, rand(1, 24, 28, 28), rand(1, 24, 28, 28), rand(24, 1, 5, 5))
    assert len(nest.folds()) == 5
    assert not any(load.valid or "//" in str(load.index) for load in loads)
    backward = backward_of(2, 2, 256, [False, True, False])
    nest, loads = sums_of(backward, rand(2, 256, 4, 4), rand(2, 256, 8, 8), rand(256, 1, 5, 5))
    assert len(nest.folds()) == 3
    assert not any(load.valid or "//" in str(load.index) for load in loads)


def test_a_row_that_was_an_image_is_read_in_order():
    def row(image, weight):
        turned = torch.relu(image).permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
        return (turned.view(1, -1) * weight).sum(1)

    inputs = rand(1, 7, 7, 64), rand(40, 49 * 64)
    assert not any("//" in str(load.index) for load in sums_of(row, *inputs)[1])
    check(row, *inputs, rtol=1e-4, atol=1e-4)


def test_every_primitive_is_lowered_or_says_why_not():
    lowered = {*LOWER, *VIEWS, *FOLDS, *map(name_of, FOR_LOOPS)}
    assert PRIMITIVES - lowered <= CALLED.keys()
    assert CALLED.keys() <= PRIMITIVES | KERNELS


RUNNING = {
    "logarithms": lambda a: a.logcumsumexp(0),
}


@pytest.mark.parametrize("name", RUNNING)
def test_running_values_go_along_the_last_dimension(name):
    program = fuse(expand(recorded(RUNNING[name], rand(64, 100)), "prims", FOR_LOOPS))
    dims = [s.node.args[1] for s in program.steps if isinstance(s, Call) and "cum" in str(s.node.op)]
    assert dims == [1]
    check(RUNNING[name], rand(64, 100))
    check(RUNNING[name], rand(6, 5))


def test_a_long_chain_is_cut_into_loops_that_llvm_takes_little_time_for():
    def chain(x):
        for i in range(1_000):
            x = torch.where(x > i * 0.01, x - 0.001, x * 1.01)
        return x

    x = torch.randn(6)
    program = fuse(expand(recorded(chain, x), "prims", FOR_LOOPS))
    (kernel,) = program.kernels
    assert len(kernel.nests) > 3
    check(chain, x)
