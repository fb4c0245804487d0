"""Running sums and products are loops that go in order: along rows in vectors, down columns row by row."""

import pytest
import torch

import kiln
from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.program import Fusing, fuse
from kiln.fuse.split import GRIDS
from kiln.generate import cpu
from kiln.generate.kernel import Emitter
from kiln.ops.record import recorded
from kiln.ops.reductions import differentiable
from tests.fuse.test_kernels import calls_of, check, rand
from tests.generate.test_loops import nest_of

SHAPES = [((1,), 0), ((2,), 0), ((3,), 0), ((17,), 0), ((5, 1), 1), ((5, 1), 0), ((33, 20), 0), ((33, 20), 1), ((2, 300, 3), 1), ((4, 5, 200), 2)]


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_sums_and_products_with_what_is_around_them(shape, dim):
    x = rand(*shape) * 0.5
    check(lambda a: (a * 2).cumsum(dim).exp() + a, x, kernels=1)
    check(lambda a: (a + 1).cumprod(dim) - 1, x.double(), kernels=1)
    check(lambda a: a.cumsum(dim), x.half(), kernels=1, rtol=1e-2, atol=1e-2)
    check(lambda a: a.cumsum(dim) * 2, (x * 8).int(), kernels=1)
    check(lambda a: a.gt(0).cumsum(dim), x, kernels=1)
    check(lambda a: a.cumsum(dim, dtype=torch.float64), x, kernels=1)


@pytest.mark.skipif(cpu.host().vector_bytes != 64, reason="the processor has no AVX-512")
@pytest.mark.parametrize("shape", [(128, 512), (133, 1024), (2, 131, 528), (500, 768)])
def test_many_rows_go_side_by_side(shape):
    x = rand(*shape)
    x.view(-1)[::9001] = torch.inf
    x.view(-1)[5::20011] = torch.nan
    assert Emitter(nest_of(lambda a: a.cumsum(-1), x), 16).beside()
    check(lambda a: a.cumsum(-1), x, kernels=1, rtol=0, atol=0)
    check(lambda a: (a * 2).cumsum(-1) * a + a.cumprod(-1), x, kernels=1)
    check(lambda a: a.cumsum(-1).exp().cumsum(-1), x / 100, kernels=1)
    check(lambda a: a.cumsum(-1, dtype=torch.float64), x, kernels=1)
    check(lambda a: a.flip(0).cumsum(-1) + a[..., :1], x, kernels=1)
    kept = x.clone()
    kiln.compile(lambda a: a.cumsum_(-1), fullgraph=True)(kept)
    torch.testing.assert_close(kept, x.cumsum(-1), rtol=0, atol=0, equal_nan=True)
    for other in (lambda a: a.cumsum(-1)[..., 1:], lambda a: a[..., :500].cumsum(-1), lambda a: a[..., :9, :].cumsum(-1)):
        check(other, x)
    assert not Emitter(nest_of(lambda a: a.cumsum(-1), x[..., :500]), 16).beside()


@pytest.mark.parametrize("size", [3, 16, 37])
def test_dimensions_of_several_loops(size):
    check(lambda a: (a * 3).tile(2).cumsum(-1), rand(size), kernels=1)
    check(lambda a: (a * 3).repeat(2, 3).cumsum(0), rand(4, size), kernels=1)


@pytest.mark.parametrize("dim", [0, 1])
def test_folds_of_the_same_rows(dim):
    x = rand(40, 50)
    check(lambda a: a.softmax(dim).cumsum(dim), x, kernels=1)
    check(lambda a: (a.cumsum(dim), a.cumsum(dim).amax(dim), a.sum(dim)), x, kernels=1)
    check(lambda a: a.cumsum(dim).cumsum(dim), x, kernels=1)
    check(lambda a: a.cumsum(dim).cumsum(1 - dim), x)
    check(lambda a: a.cumsum(dim).roll(1, dim) + a, x)
    check(lambda a: a.transpose(0, 1).cumsum(dim) + a.transpose(0, 1), x)


def test_what_comes_after_the_whole_row_reads_it_from_memory():
    x = rand(200, 400)
    check(lambda a: a.cumsum(-1).softmax(-1), x, kernels=2)
    check(lambda a: a.cumsum(-1)[:, -1] + 1, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_largest_and_smallest_so_far(dtype):
    x = rand(30, 40).mul(3).round()
    if dtype.is_floating_point:
        x[4, 7], x[9, 30], x[0, 0] = torch.nan, torch.nan, -torch.inf
    for dim in (0, 1):
        check(lambda a, d=dim: tuple(a.cummax(d)), x.to(dtype), kernels=1, rtol=0, atol=0)
        check(lambda a, d=dim: tuple(a.cummin(d)), x.to(dtype), kernels=1, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_lanes_know_those_before_them_alone(dtype):
    """Rows of all lengths around those of vectors, each with an infinity and a NaN further on than the last."""
    for length in (*range(1, 36), 63, 65):
        x = rand(length + 1, length).mul(5).round()
        if dtype.is_floating_point:
            x[range(length), range(length)] = torch.inf
            x[range(1, length), range(1, length)] = torch.nan
            x[-1] = -0.0
        check(lambda a: a.cumsum(-1), x.to(dtype), kernels=1, rtol=0, atol=0)
        check(lambda a: a.cumprod(-1), x.sign().to(dtype), kernels=1, rtol=0, atol=0)


def test_empty_tensors_and_numbers_are_eagers():
    check(lambda a: a.cumsum(0), torch.empty(0, 4), calls=("cumsum",))
    check(lambda a: a.cumsum(0) + 1, torch.tensor(2.0))


def test_sums_are_taken_in_a_wider_type():
    x = rand(1, 20000).abs()
    (got,) = kiln.compile(lambda a: (a.cumsum(-1),), fullgraph=True)(x)
    assert torch.equal(got, x.cumsum(-1))


def test_gradients_and_symbolic_sizes():
    def f(x):
        return x.sin().cumsum(-1) * x.cumprod(0)

    for compiled in (kiln.compile(f, fullgraph=True), kiln.compile(f, fullgraph=True, dynamic=True)):
        for n in (6, 40):
            x, g = rand(3, n).requires_grad_(), rand(3, n)
            got, expected = compiled(x), f(x)
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(*(torch.autograd.grad(y, x, g)[0] for y in (got, expected)))


def test_eagers_numerics():
    x = rand(30, 70)
    for f in (lambda a: (a * 3).cumsum(0) * 2, lambda a: (a * 8).int().cumsum(1) * 2):
        assert torch.equal(kiln.compile(f, options={"numerics": "eager"})(x), f(x))


def test_targets_that_run_no_loops_in_order_call_eagers_kernel():
    graph = expand(recorded(lambda a: (a * 2).cumsum(-1) + 1, rand(20, 30)), "prims", FOR_LOOPS)
    assert calls_of(fuse(graph, False, Fusing(GRIDS))) == ["cumsum"]


@pytest.mark.parametrize(("shape", "dim"), [*SHAPES, ((6, 8, 33, 16), 2), ((70, 300), 0)])
def test_recurrences_with_what_is_around_them(shape, dim):
    x, factor = rand(*shape), rand(*shape).sigmoid()
    check(lambda a, b: torch.ops.kiln.recurrence(a * 2, dim, b + 0.1) - a, x, factor, kernels=1)
    check(lambda a, b: torch.ops.kiln.recurrence(a, dim, b), x.double(), factor.double(), kernels=1)
    across = (len(shape) - 1 - dim) if dim in (0, len(shape) - 1) else dim
    check(lambda a, b: torch.ops.kiln.recurrence(a.transpose(0, -1), across, b.transpose(0, -1)), x, factor)


def test_the_first_factor_of_a_recurrence_counts_for_nothing():
    x, factor = rand(40, 20), rand(40, 20)
    factor[0] = torch.nan
    check(lambda a, b: torch.ops.kiln.recurrence(a, 0, b), x, factor, kernels=1)
    check(lambda a, b: torch.ops.kiln.recurrence(a, 0, b), torch.empty(3, 0), torch.empty(3, 0))


def test_a_recurrence_goes_step_by_step():
    x, factor = rand(50, 33), rand(50, 33)
    expected = [x[0]]
    for i in range(1, 50):
        expected.append(factor[i] * expected[-1] + x[i])
    got = kiln.compile(lambda a, b: torch.ops.kiln.recurrence(a, 0, b), fullgraph=True)(x, factor)
    assert torch.equal(got, torch.stack(expected))


def test_eagers_numerics_of_a_recurrence():
    def f(a, b):
        return torch.ops.kiln.recurrence(a * 2, 0, b)

    x, factor = rand(50, 33), rand(50, 33)
    assert torch.equal(kiln.compile(f, options={"numerics": "eager"})(x, factor), f(x, factor))


def test_gradients_of_a_recurrence():
    differentiable()
    x, factor = (rand(2, 5, 3).double().requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: torch.ops.kiln.recurrence(a, 1, b), (x, factor))
    assert torch.autograd.gradgradcheck(lambda a, b: torch.ops.kiln.recurrence(a, 1, b), (x, factor))
    compiled = kiln.compile(lambda a, b: torch.ops.kiln.recurrence(a, 1, b), fullgraph=True)
    assert torch.autograd.gradcheck(compiled, (x, factor))


@pytest.mark.parametrize("dtype, carried", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_sums_are_carried_in_the_type_that_eager_carries(dtype, carried):
    x = rand(5, 300).to(dtype)
    for function in (lambda a: a.cumsum(1), lambda a: a.cumprod(1), lambda a: a.cumsum(0)):
        (kernel,) = fuse(expand(recorded(function, x), "prims", FOR_LOOPS)).kernels
        assert [fold.dtype for nest in kernel.nests for fold in nest.folds()] == [carried]
        check(function, x, kernels=1, rtol=2.0**-7, atol=1e-2)
