"""How kernels go through memory: rows once, columns in its order, results past the caches."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.nest import Apply
from kiln.fuse.program import fuse
from kiln.fuse.steps import Launch
from kiln.generate import columns, cpu, kernel, streams, tiles
from kiln.generate.kernel import Emitter
from kiln.generate.pieces import borders
from kiln.generate.softmax import forgetful, pair
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded
from tests.fuse.test_kernels import check, rand
from tests.generate.test_loops import nest_of

aten = torch.ops.aten
wide = pytest.mark.skipif(cpu.host().vector_bytes != 64, reason="the processor has no AVX-512")


def exact(function, *inputs):
    return function(*[x.double() if x.is_floating_point() else x for x in inputs])


def error(got, reference):
    return float((got.double() - reference).abs().max())


# The largest of a row and the sum of exponentials below it


@wide
def test_the_largest_and_the_sum_of_exponentials_are_one_pass():
    x = rand(5, 5000)
    nest = nest_of(lambda a: F.log_softmax(a, -1), x)
    assert pair(nest) is not None and Emitter(nest, 16).online() is not None
    assert Emitter(nest_of(lambda a: a.logsumexp(-1), x), 16).online() is not None, "in spite of its guard"
    assert Emitter(nest_of(lambda a: a.logsumexp(-1), x.bfloat16()), 16).online() is not None
    assert pair(nest_of(lambda a: (a.amax(-1), a.exp().sum(-1)), x)) is None
    short = nest_of(lambda a: F.softmax(a, -1), rand(5, 1500))
    assert Emitter(short, 16).online() is None, "its exponentials are kept beside the row"


@wide
def test_few_columns_are_folded_all_at_once():
    emitted = Emitter(nest_of(lambda a: a.sum((1, 2)), rand(9, 32, 16, 64)), 16)
    assert emitted.columns() == 4
    check(lambda a: a.sum((1, 2)), rand(9, 32, 16, 64), atol=1e-4)
    check(lambda a: a.amax((1, 2)), rand(9, 5, 3, 40))


def test_rows_of_half_types_that_three_phases_read_are_widened_once():
    def kept(function, length, dtype=torch.bfloat16):
        return len(Emitter(nest_of(function, rand(5, length).to(dtype)), 16).kept_rows)

    norm = lambda a: F.layer_norm(a, a.shape[-1:])  # noqa: E731
    assert (kept(norm, 1024), kept(norm, 1024, torch.float32), kept(norm, 20_000)) == (1, 0, 0)
    assert kept(lambda a: F.softmax(a, -1), 1024) == 1, "its exponentials alone"
    for length in (1000, 1024, 1031):
        check(norm, rand(7, length).bfloat16(), rtol=1e-2, atol=1e-2, kernels=1)
        check(lambda a: F.log_softmax(a, -1), rand(7, length).bfloat16(), rtol=1e-2, kernels=1)


@wide
def test_exponentials_that_are_kept_are_taken_over_a_power_of_two():
    def over_powers(function, length):
        return Emitter(nest_of(function, rand(5, length)), 16).over_powers()

    assert over_powers(lambda a: F.softmax(a * 2, -1) - 1, 1500) is not None
    assert over_powers(lambda a: F.softmax(a, -1), 100) is None
    assert over_powers(lambda a: F.softmax(a, -1), 100_000) is None
    assert over_powers(lambda a: (F.softmax(a, -1), a.amax(-1)), 1500) is None
    assert over_powers(lambda a: (F.softmax(a, -1), a.logsumexp(-1)), 1500) is None
    assert over_powers(lambda a: (F.softmax(a, -1), (a - a.amax(-1, True)).exp() * 2), 1500) is None


@pytest.mark.parametrize("length", [512, 1000, 1500, 8191, 32768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_whose_largest_is_not_among_the_first_ones_looked_at(length, dtype):
    x = rand(10, length) * 5
    x[0, 100], x[1, -1], x[2, 20] = 70, 200, 1e30  # far above the others
    x[3] += 1000
    x[4] -= 3000
    x[5], x[5, 99] = -math.inf, 3
    x[6, ::3] = -math.inf
    x[7, -2], x[8, 17] = math.nan, math.inf
    x[9] = torch.arange(length)
    check(lambda a: F.softmax(a, -1), x.to(dtype), kernels=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_and_the_sum_of_exponentials_of_columns_are_one_pass(dtype):
    x = rand(1001, 300) * 5
    x[:, 0], x[3, 1], x[:700, 2], x[9, 3], x[5, 4], x[6, 4] = -math.inf, math.inf, -math.inf, math.nan, math.inf, math.nan
    x[:, 5], x[:, 6], x[:, 7] = torch.arange(1001), -torch.arange(1001.0), -3.4028234663852886e38
    for column, masked in enumerate((-math.inf, -3.4e38, -1e9, -1e5, -100.0), 16):
        x[::3, column :: 16] = masked  # with others in a vector, some from the first row on
    x = x.to(dtype)
    for f in (lambda a: (F.softmax(a, 0), a.amax(0)), lambda a: F.log_softmax(a, 0)):
        found = compile_graph(recorded(f, x))([x])
        eager, reference = (f(t) if isinstance(f(t), tuple) else (f(t),) for t in (x, x.double()))
        for got, usual, exact in zip(found, eager, reference, strict=True):
            assert torch.equal(got.isnan(), usual.isnan()) and torch.equal(got.isinf(), usual.isinf())
            known = usual.isfinite()
            assert error(got[known], exact[known]) <= 2 * error(usual[known], exact[known])


@wide
def test_columns_go_row_by_row_for_powers_too():
    emitted = Emitter(nest_of(lambda a: (a - a.amax(0)).exp().sum(0), rand(64, 300)), 16)
    assert emitted.by_rows() and emitted.both is not None


def test_shares_of_columns_are_products_with_one_inverse():
    def ops(function, x):
        steps = fuse(expand(recorded(function, x), "prims", FOR_LOOPS)).steps
        stages = [stage for step in steps if isinstance(step, Launch) for stage in step.kernel.stages]
        return [{t.op for nest in stage for t in nest.terms() if isinstance(t, Apply)} for stage in stages]

    def shares_and_sums(a):
        powers = (a - a.amax(0)).exp()
        return powers / powers.sum(0) + powers.sum(0)

    x = rand(4096, 64) * 5
    *_, final, last = ops(lambda a: F.softmax(a, 0), x)
    assert "reciprocal" in final and {"exp_below", "mul"} <= last and "div" not in last
    assert "div" in ops(shares_and_sums, x)[-1]
    for f in (lambda a: F.softmax(a, 0), shares_and_sums):
        (got,), reference = compile_graph(recorded(f, x))([x]), exact(f, x)
        assert error(got, reference) <= error(f(x), reference)


@pytest.mark.parametrize("length", [1024, 1031, 2181, 4096 + 128, 30522])
def test_rows_with_edges(length):
    x = rand(11, length) * 5
    x[0] = -math.inf
    x[1, : length // 2] = -math.inf
    x[2, 5], x[3, -1] = math.inf, math.nan
    x[4], x[5], x[6] = 0.0, torch.arange(length), -3.4028234663852886e38
    x[8, 3], x[8, -1], x[9, 3], x[9, -1], x[10, 7], x[10, 9] = math.inf, math.nan, math.nan, math.inf, math.inf, -math.inf
    check(lambda a: a.logsumexp(-1), x, kernels=1)
    (got,) = compile_graph(recorded(lambda a: a.logsumexp(-1), x.bfloat16()))([x.bfloat16()])
    exact = x.bfloat16().double().logsumexp(-1).bfloat16()
    torch.testing.assert_close(got, exact, rtol=2.0**-7, atol=0, equal_nan=True)
    check(lambda a: F.log_softmax(a, -1), x, kernels=1)
    check(lambda a: F.softmax(a, -1), x, kernels=1)
    check(lambda a: (a.amax(-1), (a - a.amax(-1, True)).exp().sum(-1)), x)


@pytest.mark.parametrize("length", [100, 1000, 20_000])
def test_softmax_is_as_exact_as_eager(length):
    x = rand(6, length) * 8
    for f in (lambda a: F.softmax(a, -1), lambda a: F.log_softmax(a, -1)):
        (got,), reference = compile_graph(recorded(f, x))([x]), exact(f, x)
        assert error(got, reference) <= 2 * error(f(x), reference) + 1e-9


def places_off(got, reference):
    """The largest error in units of the last place, of what is a normal number.

    Next to the smallest of them an error makes one that instructions which round to bf16 take for 0.
    """
    nearest = reference.to(got.dtype)
    unit = (torch.nextafter(nearest, torch.full_like(nearest, math.inf)) - nearest).double()
    normal = reference > torch.finfo(got.dtype).smallest_normal * 1.01
    return float(((got.double() - reference).abs() / unit)[normal].max())


@pytest.mark.parametrize("length", [128, 600, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shares_are_as_exact_as_eager_s_at_any_offset_and_spread(length, dtype):
    torch.manual_seed(0)
    own = compile_graph(recorded(lambda a: F.softmax(a, -1), rand(64, length).to(dtype)))
    for spread in (0.01, 1, 5, 20, 100):
        for offset in (0, -3.3, 17, -50, 100, 300, -500, 900, -1000, 1020, 3000):
            x = (torch.randn(64, length) * spread + offset).to(dtype)
            (got,), reference = own([x]), F.softmax(x.double(), -1)
            off, usual = places_off(got, reference), places_off(F.softmax(x, -1), reference)
            assert off <= 2 * usual, (spread, offset, off, usual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1024, 1999, 5000])
def test_logarithms_of_sums_are_as_exact_as_eager_s(length, dtype):
    """Rows go word by word, in terms of their first number; far ones, and what is no number, another way."""
    own = compile_graph(recorded(lambda a: F.log_softmax(a, -1), rand(64, length).to(dtype)))
    for spread in (0.01, 1, 5, 20, 100):
        for offset in (0, -17, 50, -500, 3000, -40000):
            x = torch.randn(64, length) * spread + offset
            x[1, 5], x[2, 0], x[3, -1], x[4, 7] = offset + 12 * spread, offset + 80, offset + 90, -math.inf
            x[5, 0], x[6, 3], x[6, 4] = -math.inf, math.nan, math.inf
            x[8], x[8, 9] = offset - 9, offset  # one that stands out: its logarithm is near 0
            x = x.to(dtype)
            x.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[7, -1] = -1  # a NaN with a sign
            (got,), eager, reference = own([x]), F.log_softmax(x, -1), F.log_softmax(x.double(), -1)
            assert torch.equal(got.isnan(), eager.isnan()) and torch.equal(got.isinf(), eager.isinf())
            known = eager.isfinite() & (reference < -1e-5)
            off, usual = ((t.double() - reference)[known].abs() for t in (got, eager))
            half = dtype is torch.bfloat16
            least = reference[known].abs() * 2.0**-9 if half else usual.max()
            assert (off <= 2 * usual.maximum(least)).all(), (spread, offset, off.max(), usual.max())


@wide
def test_rows_go_word_by_word():
    def words(function, x):
        return "llvm.smax.v" in Emitter(nest_of(function, x), 16).fn.text()

    for function in (lambda a: a.logsumexp(-1), lambda a: F.log_softmax(a, -1)):
        assert words(function, rand(5, 2000).bfloat16()) and words(function, rand(5, 2000))
        assert not words(lambda a, f=function: f(a * 2), rand(5, 2000))


@wide
def test_shares_are_exact_to_a_few_places_however_small():
    x = torch.linspace(-110, 0, 8192).repeat(4, 1) + torch.tensor([0.0, 55.5, -500.0, 1000.0])[:, None]
    assert Emitter(nest_of(lambda a: F.softmax(a, -1), x), 16).over_powers() is not None
    (got,), exact_shares = compile_graph(recorded(lambda a: F.softmax(a, -1), x))([x]), F.softmax(x.double(), -1)
    nearest = exact_shares.float()
    place = (torch.nextafter(nearest, torch.tensor(math.inf)) - nearest).double()
    assert ((got.double() - exact_shares).abs() / place).max() < 4
    assert (got == 0).eq(nearest == 0).float().mean() > 0.999  # numbers below the normal ones too


@pytest.mark.parametrize("length", [100, 1024, 5000, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_masked_is_nothing_in_a_softmax(length, dtype):
    x, mask = rand(3, length).to(dtype), rand(3, length) > 0
    for least in (-torch.inf, -1e9, -1e4, -120.0, -95.0):
        for dim in (0, 1):
            check(lambda a, m, d=dim, n=least: F.softmax(a.masked_fill(m, n), d), x, mask, rtol=1e-5 if dtype is torch.float32 else 1e-2)
            (got,) = compile_graph(recorded(lambda a, m, n=least: F.softmax(a.masked_fill(m, n), 1), x, mask))([x, mask])
            assert not got[mask].any() or least > -110
    check(lambda a: F.softmax(a.masked_fill(a > -100, -torch.inf), 1), x, rtol=0, atol=0)


def test_many_values_far_above_those_looked_at_first():
    x = torch.full((2, 4096), 59.5)
    x.view(2, -1, 1024)[:, :, :16], x[1] = 0, x[1] / 2
    check(lambda a: F.softmax(a, -1), x, kernels=1)


def test_which_largest_values_need_not_know_of_nan():
    x, places = rand(4, 200), torch.randint(0, 200, (4,))
    for f in (lambda a: F.softmax(a, -1), lambda a: F.log_softmax(a, -1)):
        assert forgetful(nest_of(f, x)) is not None
    loss = nest_of(lambda a, i: F.nll_loss(F.log_softmax(a, -1), i, reduction="none"), x, places)
    assert forgetful(loss) is not None, "what is picked from a row is less the logarithm, too"
    assert forgetful(nest_of(lambda a: (F.softmax(a, -1), a.amax(-1)), x)) is None
    assert forgetful(nest_of(lambda a: (a - a.amax(-1, True)).exp().sum(-1) + a.amax(-1), x)) is None


def test_a_place_in_a_row_is_compared_in_few_bits():
    places = torch.tensor([0, 5, 16, 99, 100, -1, 2**40])

    def one_hot(a, i):
        return a - (torch.arange(100) == i[:, None]).float(), a * (torch.arange(100) != i[:, None])

    x = rand(7, 100)
    text = Emitter(nest_of(one_hot, x, places), 16).fn.text()
    assert "icmp eq <16 x i32>" in text and "icmp eq <16 x i64>" not in text
    check(one_hot, x, places, kernels=1)


# Sums and squares of long rows


@pytest.fixture(autouse=True)
def usual_processor(monkeypatch):
    """Forms do not depend on the processor at hand where a test does not say so."""
    for property in ("reads_in_steps", "foresees_little", "takes_lines_near", "finds_few_beside", "waits_for_lanes"):
        monkeypatch.setattr(cpu.Host, property, False)


@wide
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int16])
def test_processors_that_wait_for_lanes_read_each_by_itself(monkeypatch, dtype):
    """Also where some lanes are not wanted: what lies there may be no memory at all."""
    monkeypatch.setattr(cpu.Host, "waits_for_lanes", True)
    x, places = (rand(37, 70) * 99).to(dtype), torch.randint(0, 70, (37, 70))

    def some(a, i):
        return F.pad(a, (0, 9))[:, 5 : 5 + i.shape[1]] + a[:, i[0]]

    def turned(a, i):
        return torch.cat([a.flip(1)[:, ::5], a[:, i[0]]], 1) * 2

    for f in (lambda a, i: a.gather(1, i) * 2, some, turned):
        for length in (70, 64, 47, 16, 3):
            given = x, places[:, :length].contiguous()
            assert "@llvm.masked.gather" not in Emitter(nest_of(f, *given), 16).fn.text()
            check(f, *given)


def batch_norm(x):
    return F.batch_norm(x, None, None, None, None, True)


@pytest.mark.parametrize("shape", [(2, 40, 150, 151), (40_000, 3)])
def test_the_mean_and_squares_of_a_long_row_are_one_pass(shape):
    assert {f.phase for f in nest_of(batch_norm, rand(2, 40, 150, 151)).folds()} == {0}
    assert {f.phase for f in nest_of(batch_norm, rand(2, 3, 15, 15)).folds()} == {0, 1}, "caches hold it"
    for scale, shift in ((1, 0), (0.01, 1000), (0, 77)):
        x = rand(*shape) * scale + shift
        (got,), reference = compile_graph(recorded(batch_norm, x))([x]), exact(batch_norm, x)
        assert error(got, reference) <= 2 * error(batch_norm(x), reference) + 1e-6
    x[0, 0], x[1, 1], x[1, 2] = math.nan, math.inf, -math.inf
    check(lambda a: batch_norm(a), x)


def test_pieces_of_memory_that_do_not_follow_each_other_are_asked_for(monkeypatch):
    planes = rand(40, 3, 28, 28)
    near = Emitter(nest_of(batch_norm, planes), 16).fn.text()
    monkeypatch.setattr(streams, "FAR", 1 << 10)
    far = Emitter(nest_of(batch_norm, planes), 16).fn.text()
    assert "@llvm.prefetch" in far and "@llvm.prefetch" not in near
    assert "@llvm.prefetch" not in Emitter(nest_of(lambda a: a.sum((0, 2)), rand(9, 5, 9000)), 16).fn.text()
    check(lambda a: (batch_norm(a), a.sum((0, 2, 3))), planes, atol=1e-3)
    monkeypatch.setattr(streams.Streams, "rows_in_pieces", lambda self: False)
    less = Emitter(nest_of(batch_norm, planes), 16).fn.text()
    assert far.count("@llvm.prefetch") > less.count("@llvm.prefetch"), "the next row while this one is written"


@wide
def test_places_have_few_bits():
    for f in (lambda a: a.argmax(-1), lambda a: a.argmin(0), lambda a: a.argmax()):
        text = Emitter(nest_of(f, rand(70, 200)), 16).fn.text()
        chosen = [line for line in text.splitlines() if " = select <" in line]
        assert any("x i32>" in line for line in chosen) and not any("x i64>" in line for line in chosen)


# Columns


@pytest.mark.parametrize("shape", [(40, 300), (700, 257), (3, 90, 129), (9, 5000), (5000, 136)])
def test_columns_are_folded_row_by_row(shape):
    x = rand(*shape)
    check(lambda a: (a.sum(-2), a.amax(-2)), x, atol=1e-3)
    check(lambda a: (a * 2, (a * 2).sum(-2)), x, atol=1e-3)
    check(lambda a: (a.argmax(-2), a.to(torch.bfloat16).sum(-2)), x, rtol=1e-2, atol=1e-2)
    (got,), reference = compile_graph(recorded(lambda a: a.sum(-2), x))([x]), x.double().sum(-2)
    assert error(got, reference) <= 2 * error(x.sum(-2), reference)


def test_which_columns_wait_in_memory():
    assert Emitter(nest_of(lambda a: a.sum(0), rand(100, 300)), 16).by_rows()
    assert not Emitter(nest_of(lambda a: a.sum(0), rand(100, 64)), 16).by_rows(), "registers hold them"


# Rows and columns at once


def norm_backward(rows, columns, *more):
    args = rand(rows, columns), rand(rows, columns), rand(rows, 1), rand(rows, 1).abs(), rand(columns)

    def backward(g, x, m, s, w):
        dx, dw, db = aten.native_layer_norm_backward(g, x, [columns], m, s, w, w, [True, True, True])
        return (dx, dw, db, *[f(dx) for f in more])

    return backward, args


@pytest.mark.parametrize("shape", [(512, 768), (1000, 103), (2000, 64)])
def test_gradients_of_a_layer_norm_read_their_inputs_once(shape):
    for more in ((), (lambda d: d.sum(0),)):
        backward, args = norm_backward(*shape, *more)
        program = fuse(expand(recorded(backward, *args), "prims", FOR_LOOPS))
        (kernel,) = program.kernels
        first, *_ = kernel.stages
        assert len(first) == 1 and first[0].part is not None
        assert sum(s.adds for s in first[0].stores) == 2 + len(more)
        got, reference = compile_graph(recorded(backward, *args))(list(args)), exact(backward, *args)
        for mine, eager, right in zip(got, backward(*args), reference, strict=True):
            assert error(mine, right) <= 2 * error(eager, right) + 1e-6


def test_sums_of_other_rows_stay_apart():
    x, y = rand(600, 300), rand(300, 600)
    program = fuse(expand(recorded(lambda a, b: (F.softmax(a, -1), b.sum(0)), x, y), "prims", FOR_LOOPS))
    assert all(nest.part is None for kernel in program.kernels for nest in kernel.nests)


# Stores past the caches


@wide
def test_large_results_go_past_the_caches(monkeypatch):
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 16)
    x, row = rand(300, 256), rand(256)
    for f in (lambda a, r: a * 2 + r, lambda a, r: F.softmax(a + r, -1), lambda a, r: a.t() + 1,
              lambda a, r: torch.cat([a, a * 2], 1) + 1):  # fmt: skip
        emitter = Emitter(nest_of(f, x, row), 16)
        assert len(emitter.streamed()) == 1
        assert "!nontemporal" in emitter.fn.text() and "sfence" in emitter.fn.text()
        check(f, x, row)
        check(f, torch.cat([x.flatten(), row])[1:76801].view(300, 256), row)
    odd = nest_of(lambda a: a * 2 + a[0], rand(300, 257))
    assert not Emitter(odd, 16).streamed(), "its rows start within lines"


@wide
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_results_of_half_types_go_past_the_caches(dtype, monkeypatch):
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 16)
    x = rand(300, 512).to(dtype)
    for f in (lambda a: a * 2 + 1, lambda a: F.softmax(a, -1)):
        assert "vmovnt" in cpu.assembly(Emitter(nest_of(f, x), 16).module.text())
        check(f, x, kernels=1, rtol=1e-2)


@wide
@pytest.mark.parametrize("length", [513, 1000, 2050])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stores_of_uneven_rows_begin_at_lines(length, dtype, monkeypatch):
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 10)
    x, places = rand(40, length).to(dtype), torch.randint(0, length, (40,))

    def gradient(a, i):
        return (F.softmax(a, -1) - (torch.arange(length) == i[:, None]).to(a.dtype)) / 40

    functions = (lambda a, i: F.softmax(a, -1)), (lambda a, i: F.layer_norm(a, (length,))), gradient
    for f in functions:
        emitter = Emitter(nest_of(f, x, places), 16)
        assert emitter.streamed() == [emitter.uneven] and "!nontemporal" in emitter.fn.text()
        check(f, x, places, kernels=1, rtol=1e-5 if dtype is torch.float32 else 1e-2)
    two = Emitter(nest_of(lambda a: (F.softmax(a, -1), F.softmax(a, -1) * 2), x), 16)
    assert not two.streamed(), "one may begin at a line where the other does not"


@wide
def test_so_do_those_of_rows_whose_columns_are_summed_on_the_way(monkeypatch):
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 16)
    backward, args = norm_backward(400, 256)
    program = fuse(expand(recorded(backward, *args), "prims", FOR_LOOPS))
    (nest,) = [nest for kernel in program.kernels for nest in kernel.nests if nest.part is not None]
    emitter = Emitter(nest, 16)
    assert [s.adds for s in emitter.streamed()] == [False] and "!nontemporal" in emitter.fn.text()
    check(backward, *args, atol=1e-4)


@wide
def test_many_results_of_many_do_not_as_each_is_compared_with_all_that_is_read(monkeypatch):
    def steps(*rows):
        found = [rows[0]]
        for row in rows[1:]:
            found.append(found[-1] * 0.5 + row)
        return tuple(found[1:])

    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 16)
    few, many = [rand(300, 256) for _ in range(8)], [rand(300, 256) for _ in range(40)]
    assert len(Emitter(nest_of(steps, *few), 16).streamed()) == 7
    emitter = Emitter(nest_of(steps, *many), 16)
    assert not emitter.streamed() and emitter.fn.text().count("ptrtoint") == 0
    check(steps, *many)


def test_small_results_stay_in_the_caches():
    assert not Emitter(nest_of(lambda a: a + 1, rand(1000)), 16).streamed()


@wide
def test_the_next_row_is_asked_for(monkeypatch):
    monkeypatch.setattr(streams, "FAR", 1 << 16)
    cached = Emitter(nest_of(lambda a: F.softmax(a, -1), rand(40, 1024)), 16).fn.text()
    assert "llvm.prefetch" in cached and "!nontemporal" not in cached
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 16)
    x, places, rows = rand(40, 1024), torch.randint(0, 1024, (40, 1024)), torch.randint(0, 40, (60,))
    slow = (
        (lambda a: F.softmax(a, -1), rand(9, 4096)),
        (lambda a, i: a.gather(1, i), x, places),
        (lambda a, i: a[i], x, rows),
    )
    for f, *given in slow:
        assert "llvm.prefetch" in Emitter(nest_of(f, *given), 16).fn.text()
        check(f, *given, kernels=1)
    for f in (lambda a: a * 2 + 1, lambda a: F.layer_norm(a, (1024,)), lambda a: F.softmax(a[:, :128], -1)):
        assert "llvm.prefetch" not in Emitter(nest_of(f, x), 16).fn.text(), "processors do it themselves"
    assert "llvm.prefetch" not in Emitter(nest_of(slow[0][0], x), 16).fn.text().split("usual")[0]


@wide
def test_what_short_rows_read_is_asked_for(monkeypatch):
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 16)
    x, table = rand(40, 12, 64), rand(12, 64)

    def turned(a, t):
        return a * t + torch.cat([-a[..., 32:], a[..., :32]], -1) * t

    def heads(a, t):
        return a.transpose(0, 1) + 1

    for f in (turned, heads):
        fast, *_ = Emitter(nest_of(f, x, table), 16).fn.text().split("\nusual")
        assert "llvm.prefetch" in fast
        check(f, x, table, kernels=1)
        assert "llvm.prefetch" not in Emitter(nest_of(f, x.bfloat16(), table.bfloat16()), 16).fn.text()
    assert "llvm.prefetch" not in Emitter(nest_of(lambda a: a * 2 + 1, x), 16).fn.text(), "rows join"


def stored_beside(function, *inputs):
    """Whether a loop stores past the caches and computes powers."""
    blocks = re.split(r"\n\w+:\n", Emitter(nest_of(function, *inputs), 16).fn.text())
    return any("!nontemporal" in block and "512(<16 x i32>" in block for block in blocks)


@wide
@pytest.mark.parametrize("length", [512, 1000, 1041, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_softmax_are_stored_while_the_next_is_read(length, dtype, monkeypatch):
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 10)
    x, other = rand(2, 3, 7, length).to(dtype), rand(length).to(dtype)
    x[1, 2, 3, 5], x[0, 0, 0], x[1, 0, 2], x[0, 1, 6, 9] = 3e4, 0.0, -math.inf, math.nan

    def weighed(a, b):
        return F.softmax(a, -1) * b

    for function in (lambda a, b: F.softmax(a, -1), weighed):
        assert stored_beside(function, x, other)
        check(function, x, other, kernels=1, rtol=1e-5 if dtype is torch.float32 else 1e-2)
    ends = Emitter(nest_of(lambda a: F.softmax(a, -1).amax(-1), x), 16)
    assert not ends.late and "!nontemporal" not in ends.fn.text(), "what is folded does not wait"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("length", [512, 1000, 1041])
def test_elements_far_away_are_read_at_once(dtype, length, monkeypatch):
    x, places = (rand(30, length) * 9).to(dtype), torch.randint(0, length, (30, length))
    places[3], places[4] = length - 1, 0

    def gathered(a, i):
        return a.gather(1, i)

    def wrapped(a, i):
        return a[torch.arange(30)[:, None], i]

    near = Emitter(nest_of(gathered, x, places), 16).fn.text()
    monkeypatch.setattr(streams, "FAR", 1 << 10)
    text = Emitter(nest_of(gathered, x, places), 16).fn.text()
    lines = max(dtype.itemsize * 16 // 64, 1)
    assert text.count("@llvm.prefetch") == lines and "@llvm.prefetch" not in near
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 10)
    assert ("@llvm.masked.gather" in Emitter(nest_of(gathered, x, places), 16).fn.text()) >= (dtype.itemsize >= 4)
    check(gathered, x, places, kernels=1)
    check(wrapped, x, places - length, kernels=1)
    places[7, 5] = -length - 1
    with pytest.raises(IndexError, match="out of (range|bounds)"):
        kiln.compile(wrapped, fullgraph=True)(x, places)


# Other forms


def test_gelu_by_tanh_takes_one_exponential():
    x = torch.cat(
        [torch.linspace(-12, 12, 4001), torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e30, -1e30])]
    )

    def gelu(a):
        return F.gelu(a, approximate="tanh")

    assert "copysign" not in Emitter(nest_of(gelu, x), 16).fn.text(), "what tanh ends with"
    check(gelu, x, kernels=1)
    (got,), reference = compile_graph(recorded(gelu, x))([x]), exact(gelu, x)
    finite = slice(0, 4001)
    assert error(got[finite], reference[finite]) <= 2 * error(gelu(x)[finite], reference[finite])
    assert torch.equal(torch.signbit(got[:-5]), torch.signbit(gelu(x)[:-5]))


@wide
def test_gelu_and_its_slope_are_looked_up():
    edges = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e30, -1e30, 5.8, -6.05, 7.0, -7.0])
    x = torch.cat([torch.linspace(-9, 9, 40_005), edges])

    def slope(a):
        return aten.gelu_backward(torch.ones_like(a), a)

    for f in (F.gelu, slope):
        assert "permvar" in Emitter(nest_of(f, x), 16).fn.text()
        assert "scalef" not in Emitter(nest_of(f, x), 16).fn.text(), "no exponential is taken"
        (got,), reference = compile_graph(recorded(f, x))([x]), exact(f, x)
        finite = slice(0, 40_005)
        assert error(got[finite], reference[finite]) <= 2 * error(f(x)[finite], reference[finite])
        torch.testing.assert_close(got, reference.float(), rtol=1e-6, atol=5e-7, equal_nan=True)
        assert torch.equal(torch.signbit(got[-8:-6]), torch.signbit(f(x)[-8:-6]))


# Folds that do little but read


@wide
def test_rows_from_memory_are_read_in_half_lines(monkeypatch):
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 16)
    x = rand(50, 1000)
    for function in (lambda a: a.sum(-1), lambda a: a.amax(-1), lambda a: (a * a).sum(-1)):
        assert Emitter(nest_of(function, x), 16).width == 8
        check(function, x, kernels=1)
    assert Emitter(nest_of(lambda a: a.argmax(-1), x), 16).width == 16, "its places take longer"
    for other in (lambda a: a.exp().sum(-1), lambda a: a.softmax(-1), lambda a: a.cumsum(-1)):
        assert Emitter(nest_of(other, x), 16).width == 16
    assert Emitter(nest_of(lambda a: a.sum(-1), rand(5, 1000)), 16).width == 16


@wide
def test_few_columns_from_memory_are_read_in_half_lines(monkeypatch):
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 16)
    x = rand(9, 2001)
    for function in (lambda a: a.sum(0), lambda a: a.amax(0), lambda a: (a.double() * a).sum(0)):
        assert Emitter(nest_of(function, x), 16).width == 8
        check(function, x, kernels=1)
    assert Emitter(nest_of(lambda a: a.float().sum(0), x.bfloat16()), 16).width == 16


@wide
@pytest.mark.parametrize("shape", [(64, 1000), (71, 513), (131, 203), (600, 130)])
def test_columns_from_memory_are_read_in_rows_that_lie_apart(shape, monkeypatch):
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 16)
    x, near = rand(*shape), torch.randint(0, 3, shape).float()
    for function in (lambda a: a.sum(0), lambda a: a.amax(0), lambda a: a.var(0), lambda a: a.softmax(0)):
        check(function, x)
    emitted = Emitter(nest_of(lambda a: a.sum(0), x), 16)
    assert (emitted.width, emitted.together(), emitted.lie_apart()) == (16, columns.STREAMS, True)
    assert not Emitter(nest_of(lambda a: a.argmax(0), x), 16).lie_apart(), "the first of equal ones is sought"
    check(lambda a: a.argmax(0), near)
    short = x.bfloat16()
    short[3, 5], short[-1, 7], short[9, 11] = 1e25, torch.nan, 1e-30
    check(lambda a: a.var(0), short)


@wide
@pytest.mark.parametrize("shape", [(50, 1024), (9, 40, 512)])
def test_running_sums_of_columns_of_bf16_are_stored_past_the_caches(shape, monkeypatch):
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 12)
    x = rand(*shape).bfloat16()
    assert Emitter(nest_of(lambda a: a.cumsum(-2), x), 16).streamed()
    check(lambda a: a.cumsum(-2), x, kernels=1, rtol=1e-2)


@wide
@pytest.mark.parametrize("rows", [200, 256, 257, 1000, 5003])
def test_sums_of_columns_stay_near(rows, monkeypatch):
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 16)
    x = rand(rows, 200) + 3
    (got,) = compile_graph(recorded(lambda a: a.sum(0), x))([x])
    assert error(got, x.double().sum(0)) <= 4e-7 * 3 * rows


def variance(x):
    return x.var(-1, correction=0)


@pytest.mark.parametrize("length", [1, 15, 31, 32, 47, 49, 127, 1000, 9001])
def test_sums_in_double_take_two_vectors_a_turn(length):
    x = rand(5, length) + 100
    check(lambda a: (a.double() * a).sum(-1), x, rtol=1e-14)
    (got,), reference = compile_graph(recorded(variance, x))([x]), exact(variance, x)
    assert error(got, reference) <= 2 * error(variance(x), reference)


def test_products_are_summed_up_without_being_rounded():
    assert "llvm.fma" in Emitter(nest_of(lambda a: (a * a).sum(-1), rand(5, 4000)), 16).fn.text()
    x, y = rand(40, 4000), rand(40, 4000)
    for function in (lambda a, b: (a * b).sum(-1), lambda a, b: (a * b).sum(0), lambda a, b: (a * b).sum()):
        check(function, x, y, atol=1e-3)


@wide
@pytest.mark.parametrize("size", [1, 7, 16, 40, 1003])
def test_updates_go_in_half_lines_where_vectors_go_in_halves(monkeypatch, size):
    p, g = rand(3, size), rand(3, size)
    p[0, 0], g[-1, -1] = torch.inf, torch.nan

    def step(a, b):
        return a.add_(b, alpha=-0.5)

    for halves in (True, False):
        monkeypatch.setattr(cpu.Host, "halves_vectors", halves)
        if size == 1003:
            assert Emitter(nest_of(lambda a, b: a - b * 0.5, p, g), 16).width == (8 if halves else 16)
            assert Emitter(nest_of(lambda a: a * 0.5, p), 16).width == 16, "whole lines are written without reading"
        kiln.reset()
        got = p.clone()
        kiln.compile(step, fullgraph=True)(got, g)
        torch.testing.assert_close(got, step(p.clone(), g), rtol=0, atol=1e-6, equal_nan=True)


@wide
def test_processors_that_read_in_steps_are_asked_for_lines(monkeypatch):
    monkeypatch.setattr(streams, "FAR", 1 << 10)
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 10)
    x = rand(70, 1041)

    def asked(function, *inputs):
        return Emitter(nest_of(function, *inputs), 16).fn.text().count("@llvm.prefetch")

    reads = (
        lambda a: a.logsumexp(-1), lambda a: a.argmax(-1), lambda a: a.var(-1), lambda a: a.exp(),
        lambda a: F.layer_norm(a, a.shape[-1:]), lambda a: F.gelu(a + 1), lambda a: F.softmax(a, -1),
    )  # fmt: skip
    sums = (lambda a: a.sum(-1), lambda a: a.amax(-1), lambda a: a * 2 + 1, lambda a: a.cumsum(-1))
    columns = (lambda a: a.sum(0), lambda a: a.var(0), lambda a: F.softmax(a, 0))
    before = [asked(f, x) for f in (*reads, *sums)]
    monkeypatch.setattr(cpu.Host, "reads_in_steps", True)
    after = [asked(f, x) for f in (*reads, *sums)]
    assert all(new > old for new, old in zip(after, before, strict=True) if new) and after[len(reads):] == before[len(reads):]
    assert all(after[: len(reads)])
    assert not asked(lambda a: a.exp(), rand(8, 4)), "the caches hold it"
    summed = Emitter(nest_of(lambda a: a.sum(-1), x), 16)
    assert (summed.width, summed.fn.text().count("load <16 x float>") >= 4) == (16, True)
    assert Emitter(nest_of(lambda a: a.var(0), x), 16).together() == 1
    for function in (*reads, *sums, *columns):
        for given in (x, x.bfloat16(), rand(9, 4096)):
            check(function, given, rtol=1e-5 if given.dtype is torch.float32 else 1e-2, atol=1e-3)


@wide
@pytest.mark.parametrize("shape", [(100, 1024), (70, 1041), (40, 300)])
def test_columns_that_are_folded_row_by_row_are_strips_for_threads(monkeypatch, shape):
    monkeypatch.setattr(streams, "FAR", 1 << 10)
    emitted = Emitter(nest_of(lambda a: a.cumsum(0), rand(*shape)), 16)
    assert emitted.in_strips() and emitted.tasks() == -(-shape[1] // kernel.STRIP)
    assert "@llvm.prefetch" in emitted.fn.text(), "pieces of a thread are as long as rows, at the most"
    for function in (lambda a: a.cumsum(0), lambda a: a.cummax(0).values, lambda a: a.sum(0), lambda a: a.var(0)):
        check(function, rand(*shape), rtol=1e-5, atol=1e-4)


@wide
@pytest.mark.parametrize("length", [256, 300, 1041, 5000])
def test_elementary_functions_of_several_vectors_stand_side_by_side(monkeypatch, length):
    def columns(function, *inputs):
        return Emitter(nest_of(function, *inputs), 16).columns()

    def passed(a):
        return torch.sigmoid(a) * F.gelu(a)

    x = rand(3, length)
    for few, expected in ((True, kernel.BESIDE_SLOW), (False, 1)):
        monkeypatch.setattr(cpu.Host, "finds_few_beside", few)
        assert columns(passed, x) == expected
        assert columns(lambda a: a * 2 + 1, x) == columns(lambda a: a.abs() ** 2.5, x) == 1
        assert columns(passed, rand(3, 60)) == 1, "few turns"
        check(passed, x, kernels=1)


@wide
@pytest.mark.parametrize("near", [True, False])
def test_lines_come_to_the_nearest_cache_where_that_takes_them(monkeypatch, near):
    monkeypatch.setattr(streams, "FAR", 1 << 10)
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 10)
    monkeypatch.setattr(cpu.Host, "reads_in_steps", True)
    monkeypatch.setattr(cpu.Host, "takes_lines_near", near)

    def hints(function, *others):
        text = Emitter(nest_of(function, rand(70, 1041), *others), 16).fn.text()
        return set(re.findall(r"@llvm.prefetch.p0\(ptr [^,]+, i32 0, i32 (\d)", text))

    assert hints(lambda a: a * 2 + 1) == ({"3"} if near else set())
    assert not hints(lambda a, b: a + b, rand(70, 1041) + 1), "what goes at one pace comes faster unasked"
    assert hints(lambda a, b: a.masked_fill(b, 1.0), rand(70, 1041) > 0) == ({"3"} if near else set())
    assert hints(lambda a: a.amax(-1)) == ({"3"} if near else set()), "it asks of each number whether it is one"
    assert not hints(lambda a: (a * 100).int().amax(-1))
    assert hints(lambda a: a.sum(0)) == {"3" if near else "2"}
    assert hints(lambda a: a.var(0)) == {"2"}, "doubles that wait fill that cache"
    assert Emitter(nest_of(lambda a: a.var(0), rand(70, 1041)), 16).together() == 1
    for rows in (70, 71):
        check(lambda a: (a.var(0), a.double().sum(0), a.amax(-1)), rand(rows, 1041), rtol=1e-5)
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 30)
    assert hints(lambda a: a.logsumexp(-1)), "from the last cache reads alone"
    assert bool(hints(torch.exp)) is not near, "others go back there"


@wide
@pytest.mark.parametrize("shape", [(1400, 90), (333, 1203)])
def test_large_squares_are_turned_in_long_pieces_where_memory_comes_in_order(monkeypatch, shape):
    monkeypatch.setattr(streams, "FAR", 1 << 10)
    monkeypatch.setattr(streams, "last_cache", lambda: 1 << 10)
    x, y = rand(*shape), rand(*reversed(shape))

    def beside(a, b):
        return a.t().exp() + b

    for in_steps in (True, False):
        monkeypatch.setattr(cpu.Host, "reads_in_steps", in_steps)
        emitted = Emitter(nest_of(beside, x, y), 16)
        assert emitted.crossing.in_order is in_steps
        size = shape[0]
        assert emitted.tasks() >= (min(tiles.TASKS * cpu.cores(), size // tiles.FEW) if in_steps else 1)
        hints = re.findall(r"@llvm.prefetch.p0\(ptr [^,]+, i32 0, i32 (\d)", emitted.fn.text())
        assert set(hints) <= {"2"}, "the rows of squares are not read in one go"
        kiln.reset()
        check(beside, x, y, kernels=1, rtol=1e-5)


@wide
def test_single_elements_at_borders_are_taken_one_by_one():
    for width in (3, 15, 17, 18, 31, 32, 33, 56, 90):
        x = rand(3, 2, 4, width)
        x[0, 0, 0, -1], x[1, 1, 1, 0] = torch.inf, torch.nan
        for sides in ((1, 1, 1, 1), (2, 1, 0, 0), (0, 2, 2, 0)):
            for mode in ("reflect", "replicate", "circular"):
                check(lambda a, s=sides, m=mode: F.pad(a * 2, s, mode=m), x, rtol=0, atol=0)
    nest = nest_of(lambda a: F.pad(a, (1, 1, 0, 0), mode="reflect"), rand(2, 2, 4, 56))
    assert borders(nest, Emitter(nest, 16).vector, 16) == [1, 57]


def test_folds_of_few_long_rows_are_not_cut():
    x = rand(8, 20_000)
    for function in (lambda a: a.sum(0), lambda a: a.softmax(0), lambda a: a.amax(0)):
        (kernel,) = fuse(expand(recorded(function, x), "prims", FOR_LOOPS)).kernels
        assert len(kernel.stages) == 1
        check(function, x, kernels=1)


@pytest.mark.parametrize("rows", [1, 5, 31, 32, 200])
def test_columns_of_few_rows_and_of_many(rows):
    check(lambda a: (a.sum(0), a.amax(0)), rand(rows, 1003), rtol=1e-4, atol=1e-5)


def test_groups_of_channels_that_lie_side_by_side_are_read_in_lines():
    x = (rand(2, 16, 9, 11) * 3 + 5).to(memory_format=torch.channels_last)
    weight, bias = rand(16), rand(16)
    for groups in (1, 4, 16):
        check(lambda a, w, b, g=groups: F.group_norm(a, g, w, b), x, weight, bias, rtol=1e-4, atol=1e-5)
    program = fuse(expand(recorded(lambda a: F.group_norm(a, 4), x), "prims", FOR_LOOPS))
    lanes = [Emitter(nest, 16).vector for kernel in program.kernels for nest in kernel.nests if len(nest.axes) > 2]
    assert lanes and all(axis.size == 16 for axis in lanes)
