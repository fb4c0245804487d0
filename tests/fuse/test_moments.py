"""Variances: in one pass over memory, exact for equal numbers, good far from 0."""

import math

import pytest
import torch
import torch.nn.functional as F

from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.nest import Load
from kiln.fuse.program import fuse
from kiln.generate import cpu
from kiln.generate.kernel import Emitter
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded


def kernels_of(function, *inputs):
    return fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS)).kernels


def moments(x, dim=None):
    spread, mean = torch.var_mean(x, dim, correction=0)
    return x.var(dim), x.std(dim), spread, mean


@pytest.mark.parametrize("shape, dim", [((7,), 0), ((1000,), 0), ((1 << 20,), 0), ((3, 129), 1), ((5000, 40), 0)])
@pytest.mark.parametrize("number", [0.1, 1 / 3, -1e30, 3e38, 1e-40])
def test_equal_numbers_have_no_variance(shape, dim, number):
    x = torch.full(shape, number)
    var, std, spread, mean = compile_graph(recorded(lambda a: moments(a, dim), x))([x])
    assert not any(part.any() for part in (var, std, spread)) and (mean == number).all()


@pytest.mark.parametrize("shape, dim", [((1 << 18,), 0), ((6000, 96), 0), ((6000, 96), None), ((9, 700), 1)])
@pytest.mark.parametrize("shift, scale", [(0, 1), (1000, 0.1), (-3e4, 30), (1e15, 1e14)])
def test_variances_are_good_far_from_0(shape, dim, shift, scale):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * scale + shift
    for got, exact in zip(
        compile_graph(recorded(lambda a: moments(a, dim), x))([x]), moments(x.double(), dim), strict=True
    ):
        torch.testing.assert_close(got, exact.float(), rtol=2e-5, atol=0 if shift else 1e-6)
    x.view(-1)[5], x.view(-1)[-7] = math.inf, math.nan
    (got,) = compile_graph(recorded(lambda a: a.var(dim), x))([x])
    assert torch.equal(got.isnan(), x.var(dim).isnan())


def test_variances_of_half_types_are_not_from_a_rounded_mean():
    x = (torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) + 100.3).bfloat16()
    for f in (lambda a: (a.var(-1), a.var(0)), lambda a: torch.var_mean(a, -1)):
        for got, eager in zip(compile_graph(recorded(f, x))([x]), f(x), strict=True):
            torch.testing.assert_close(got, eager, rtol=2.0**-7, atol=0)


@pytest.mark.skipif(cpu.host().vector_bytes != 64, reason="the processor has no AVX-512")
def test_columns_of_bf16_are_summed_as_floats_some_rows_at_a_time():
    """Beside an element that is far away, far from 0, where all are alike, and with what is no number."""
    x = torch.randn(1001, 200, generator=torch.Generator().manual_seed(0))
    (kernel,) = kernels_of(lambda a: a.var(0), x.bfloat16())
    texts = [Emitter(nest, 16).fn.text() for nest in kernel.nests]
    by_pairs = {"+avx512bf16", "+avx512vbmi2"} <= set(cpu.host().features.split(","))
    added = "dpbf16ps" if by_pairs else "fadd <16 x float>"
    assert any(added in text and "load <32 x i16>" in text for text in texts), "in words"
    for y in (torch.cat([torch.full((1, 200), 1e4), x]), x * 1e-3 + 300, x.exp() ** 4, x * 1e-18, torch.ones_like(x) * 1e20, x * 0):
        y = y.bfloat16()
        torch.testing.assert_close(compile_graph(recorded(lambda a: a.var(0), y))([y])[0], y.var(0), rtol=2.0**-7, atol=0)
    y[3, 5], y[70, 7], y[71, 7] = math.nan, math.inf, -math.inf
    assert torch.equal(compile_graph(recorded(lambda a: a.var(0), y))([y])[0].isnan(), y.var(0).isnan())


@pytest.mark.parametrize("dim", [0, None])
def test_what_is_large_is_read_once(dim):
    x = torch.randn(4096, 512)
    (kernel,) = kernels_of(lambda a: a.var(dim), x)
    reading = [n for n in kernel.nests if any(isinstance(t, Load) and t.buffer.name == "x0" for t in n.terms())]
    assert len(kernel.stages) == 2 and len(reading) == 1
    assert {f.phase for f in reading[0].folds()} == {0}


def test_a_norm_is_one_kernel_with_what_is_before_it():
    x = torch.randn(64, 300)
    assert len(kernels_of(lambda a, b: F.layer_norm(a + b, (300,)), x, x)) == 1


def test_windows_choose_the_last_of_several_nan():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 3, (2, 3, 17, 41), generator=generator).float()
    x[torch.rand(x.shape, generator=generator) < 0.3] = math.nan
    for options in ((2,), (3, 2, 1)):
        def pooled(a, options=options):
            return F.max_pool2d(a, *options, return_indices=True)

        (values, places), (expected, chosen) = compile_graph(recorded(pooled, x))([x]), pooled(x)
        assert torch.equal(places, chosen)
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "shape, dim", [((1 << 18,), 0), ((6000, 96), 0), ((1001, 200), 0), ((64, 4096), 1), ((8, 4, 60, 50), (0, 2, 3))]
)
@pytest.mark.parametrize("scale", [1e19, 1e17, 1e-21, 1e-25])
@pytest.mark.parametrize("dtype, far", [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)])
def test_variances_whose_squares_leave_float32(shape, dim, scale, dtype, far):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    for got, eager in zip(compile_graph(recorded(lambda a: moments(a, dim), x))([x]), moments(x, dim), strict=True):
        torch.testing.assert_close(got, eager, rtol=far, atol=far * scale * min(scale, 1))


@pytest.mark.parametrize("rows", [64, 2])
def test_a_norm_of_numbers_whose_squares_overflow_is_0(rows):
    x = torch.randn(rows, 1 << 17, generator=torch.Generator().manual_seed(0)) * 1e18
    (got,) = compile_graph(recorded(lambda a: F.layer_norm(a, a.shape[-1:]), x))([x])
    assert not got.any() and not F.layer_norm(x, x.shape[-1:]).any()
