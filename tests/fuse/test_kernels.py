"""Graphs as kernels: what is fused into how many loops, and that the loops give what eager gives."""

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.lower import HERE
from kiln.fuse.program import Call, fuse
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded

aten = torch.ops.aten


def calls_of(program):
    """The names of the ops that stay calls of eager kernels and are no views."""
    called = [step.node.op for step in program.steps if isinstance(step, Call)]
    own = [op for op in called if isinstance(op, torch._ops.OpOverload) and not op.is_view]
    return [op._schema.name.removeprefix("aten::") for op in own]


def check(function, *inputs, kernels=None, nests=None, calls=(), rtol=1e-5, atol=1e-5):
    """The function compiled equals eager, in this many kernels (of one loop nest each) and eager calls."""
    graph = recorded(function, *inputs)
    program = fuse(expand(graph, "prims", FOR_LOOPS))
    named = [step.node.op._schema.name for step in program.steps
             if isinstance(step, Call) and isinstance(step.node.op, torch._ops.OpOverload)]  # fmt: skip
    if kernels is not None:
        assert (len(program.kernels), tuple(named)) == (kernels, tuple(f"aten::{c}" for c in calls))
        assert [len(stage) for kernel in program.kernels for stage in kernel.stages] == (nests or [1] * kernels)
    got, expected = compile_graph(graph)(list(inputs)), function(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


SIZES = [(1, 1), (3, 17), (8, 16), (5, 100), (2, 1000)]


@pytest.mark.smoke
@pytest.mark.parametrize("shape", SIZES)
def test_one_kernel_each(shape):
    x, y, row = rand(*shape), rand(*shape) + 1, rand(shape[-1])
    check(lambda a, b, r: F.gelu(a + r) + b, x, y, row, kernels=1)
    check(lambda a: F.softmax(a, -1), x, kernels=1)
    check(lambda a: F.log_softmax(a, -1), x, kernels=1)
    check(lambda a, b, r: F.layer_norm(a + b, shape[-1:], r, r), x, y, row, kernels=1)
    check(lambda a, r: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * r, x, row, kernels=1)
    check(lambda a: a.sum(0), x)
    check(lambda a: (a.amax(1), a.amin(1)), x)


@pytest.mark.smoke
def test_batch_norm_of_training_is_one_kernel_with_its_statistics():
    x, w, b = rand(4, 6, 5, 7), rand(6), rand(6)
    check(lambda a, w, b: F.batch_norm(a, None, None, w, b, True), x, w, b, calls=("empty",), kernels=1)
    check(lambda a, w, b: F.group_norm(a, 3, w, b), x, w, b, kernels=1)


@pytest.mark.smoke
def test_matmuls_stay_calls_and_what_is_around_them_fuses():
    x, w, b = rand(12, 20), rand(20, 24), rand(24)
    check(lambda a, w, b: torch.relu(torch.mm(a * 2 + 1, w) + b) * 3, x, w, b, kernels=2, calls=("mm",))


def test_computed_indices():
    table, places = rand(10, 6), torch.tensor([[0, 3, -1], [9, 2, 2]])
    check(lambda t, i: t[i] * 2, table, places, kernels=1)
    check(lambda t, i: F.embedding(i, t) + 1, table, places.abs(), kernels=1)
    check(lambda t, i: torch.gather(t + 1, 1, i), rand(2, 5), torch.tensor([[0, 4], [2, 2]]), kernels=1)


def test_an_index_out_of_range_raises():
    run = compile_graph(recorded(lambda t, i: t[i] * 2, rand(10, 6), torch.tensor([1])))
    with pytest.raises(IndexError, match="out of range"):
        run([rand(10, 6), torch.tensor([10])])


def test_views_are_index_maps():
    x = rand(4, 6, 10)
    check(lambda a: a.permute(2, 0, 1).contiguous() + 1, x)
    check(lambda a: (a.view(24, 10)[::2, 1:] * 2).reshape(-1) + 1, x)
    check(lambda a: torch.flip(a, [0, 2]) + a[:, :, :1], x, kernels=1)
    check(lambda a: a.select(1, -1).unsqueeze(-1).expand(4, 10, 3) * 2.0, x, kernels=1)
    check(lambda a: torch.cat([a, a * 2, a[:, :2]], 1) + 1, x)
    check(lambda a: F.pad(a, (1, 2, 0, 3), value=5.0) * 2, x, kernels=1)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
)
def test_dtypes(dtype):
    x = torch.arange(1, 38).to(dtype)
    y = torch.arange(37, 0, -1).to(dtype)
    if dtype is not torch.bool:
        check(lambda a, b: (a + b * 3, a - b, a > b), x, y, kernels=1)
        check(lambda a: (a.sum(), a.amax()), x)
    check(lambda a, b: (a & b, a | b, a == b) if not dtype.is_floating_point else (a < b,), x, y, kernels=1)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype):
    x, y = rand(5, 33).to(dtype), rand(5, 33).to(dtype)
    graph = recorded(lambda a, b: torch.sigmoid(a * b) + a, x, y)
    (got,) = compile_graph(graph)([x, y])
    exact = torch.sigmoid(x.double() * y.double()) + x.double()
    assert got.dtype is dtype
    assert torch.equal(got, exact.float().to(dtype)) or (got.double() - exact).abs().max() < 0.01


def test_nan_wins_in_extremes():
    x = rand(3, 20)
    x[1, 7] = float("nan")
    check(lambda a: (a.amax(1), a.amin(1), torch.maximum(a, a + 1), torch.relu(a)), x)


@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_places_of_extremes(dim):
    x = rand(3, 40, 17)
    x[1, 3, 4], x[1, 5, 4], x[2, 5:9], x[0, :2, 3] = float("nan"), float("nan"), 0.0, -float("inf")
    check(lambda a: (a.argmax(dim), (a * 2).argmin(dim)), x, kernels=1)
    check(lambda a: a.argmax(dim, keepdim=True) + 1, (x * 3).nan_to_num(1).long(), kernels=1)
    check(lambda a: (a.argmin(dim), a.to(torch.bfloat16).argmax(dim)), (x > 0).to(torch.uint8), kernels=1)


def test_places_of_extremes_at_the_edges():
    check(lambda a: a.argmax(-1), torch.full((3, 5), -float("inf")), kernels=1)
    check(lambda a: a.argmax(), torch.tensor(3.0), kernels=1)
    check(lambda a: a.max(-1), rand(4, 9), kernels=1)


def test_diagonals_strides_and_slices_that_are_replaced():
    x = rand(5, 7, 8)
    check(lambda a: a.diagonal(1, 0, 2) * 2, x, kernels=1)
    check(lambda a: a.diagonal(-1, 2, 1) * 2, x, kernels=1)
    check(lambda a: (a + 1).as_strided((3, 4), (9, 2), 5) * 2, x, kernels=1)
    check(lambda a: a.as_strided((3, 4), (9, 2), 5) * 2, x, kernels=1, calls=("as_strided",))
    check(lambda a: torch.slice_scatter(a * 2, a[:, 1:5:2] + 1, 1, 1, 5, 2) * 3, x, kernels=1)
    check(lambda a: torch.slice_scatter(a * 2, a[:, -3:] + 1, 1, -3) * 3, x, kernels=1)
    check(lambda a: torch.select_scatter(a * 2, a[:, 0] + 1, 1, -3) * 3, x, kernels=1)


@pytest.mark.parametrize(("shape", "dims"), [((40, 17), 1), ((40, 17), 0), ((6, 5, 7), (0, 2)), ((33,), 0)])
def test_an_infinity_last_in_its_row_is_its_mean(shape, dims):
    """Eager's running mean is NaN from the element after an infinity on."""
    ends = [n - 1 for n in shape]
    for places in ([ends], [ends, [0] * len(shape)], [[0] * len(shape)], [[max(n - 2, 0) for n in shape]]):
        for value in (torch.inf, -torch.inf, torch.nan):
            x = rand(*shape)
            for place in places:
                x[tuple(place)] = value
            check(lambda a: torch.var_mean(a, dims), x, kernels=1)
            check(lambda a: F.layer_norm(a, shape[-1:]), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_product_may_leave_the_range_of_the_whole(dtype):
    x = torch.tensor([3.0, 0.1, 1.0, 1.0]).repeat(200).to(dtype)  # every lane has the same factors
    graph = recorded(lambda a: (a.prod(), a.reshape(2, -1).prod(1)), x)
    assert len(fuse(expand(graph, "prims", FOR_LOOPS)).kernels) == 1
    whole, halves = kiln.compile(lambda a: (a.prod(), a.reshape(2, -1).prod(1)))(x)
    assert whole == 0 and halves.eq(0).all()  # eager's are NaN
    check(lambda a: a.prod(0, dtype=torch.int64), torch.tensor([1, 2, 3], dtype=torch.int32), kernels=1)


@pytest.mark.parametrize("name", sorted(HERE))
def test_hyperbolic_functions_are_loops_on_cpus_in_types_that_lose_nothing(name):
    function = getattr(torch, name)
    x = rand(3, 1001).abs() * 0.9 + (1.0 if name == "acosh" else 0.0)
    x[0, :4] = torch.tensor([0.0, 1.0, torch.inf, torch.nan])
    check(lambda a: function(a * 0.5 + 0.5) - a, x, kernels=1, rtol=1e-6, atol=1e-6)
    check(lambda a: function(a) * 2, x.bfloat16(), kernels=1, rtol=1e-2)
    assert calls_of(fuse(expand(recorded(lambda a: function(a) + 1, x.double()), "prims", FOR_LOOPS))) == [name]
    check(lambda a: function(a) + 1, x.double(), rtol=0, atol=0)
    check(lambda a: function(a) + 1, torch.ones(5, dtype=torch.int64))
