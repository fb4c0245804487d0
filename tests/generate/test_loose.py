"""Values that need few places: which ones are such, and every argument of two bytes against float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from kiln.fuse.nest import Apply
from kiln.generate import cpu
from kiln.generate.kernel import Emitter
from kiln.generate.loose import loose
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded
from tests.fuse.test_kernels import rand
from tests.generate.test_loops import nest_of

aten = torch.ops.aten
wide = pytest.mark.skipif(cpu.host().vector_bytes != 64, reason="the processor has no AVX-512")


def loose_ops(function, x):
    nest = nest_of(function, x)
    found = loose(nest)
    return {t.op for t in nest.terms() if isinstance(t, Apply) and id(t) in found}


def test_what_is_rounded_at_once_needs_few_places():
    x = rand(8, 64).bfloat16()
    assert "sigmoid" in loose_ops(F.silu, x)
    assert "tanh" in loose_ops(torch.tanh, x)
    assert {"exp", "div"} <= loose_ops(lambda a: F.softmax(a, -1), x)
    assert {"exp", "log"} <= loose_ops(lambda a: F.log_softmax(a, -1), x)
    assert "exp" in loose_ops(lambda a: (a.float().exp() * 3).to(a.dtype), x)


def test_what_is_kept_or_subtracted_from_needs_all_places():
    x = rand(8, 64).bfloat16()
    assert not loose_ops(F.silu, x.float())
    assert "exp" not in loose_ops(lambda a: F.softmax(a.float(), -1), x)
    assert "exp" not in loose_ops(lambda a: (a.float().exp() - 1).to(a.dtype), x)
    assert "exp" not in loose_ops(lambda a: (F.softmax(a.float(), -1) - 0.25).to(a.dtype), x)
    assert "sigmoid" not in loose_ops(lambda a: (a.float().sigmoid().to(a.dtype), a.float().sigmoid()), x)
    assert "tanh" not in loose_ops(lambda a: a.float().tanh().sum(-1).to(a.dtype), x)
    assert "tanh" not in loose_ops(lambda a: F.softmax(a.float().tanh() * 30, -1).to(a.dtype), x)


def test_errors_of_what_is_given_do_not_grow_in_a_softplus():
    x = rand(8, 64).bfloat16()
    assert {"exp", "log1p"} <= loose_ops(F.softplus, x) and {"exp", "tanh"} <= loose_ops(F.mish, x)
    assert "exp" not in loose_ops(lambda a: torch.log1p(-a.float().exp()).to(a.dtype), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_softplus_needs_no_choices(dtype):
    x = torch.cat([rand(500) * 40, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 20.0, 20.1, 88.8, 3e38, -3e38])])
    x = x.to(dtype)
    assert "fcmp oge" not in Emitter(nest_of(F.softplus, x), 16).fn.text()
    for f in (F.softplus, lambda a: F.softplus(a, 2.0), lambda a: F.softplus(a, 1.0, 3.0), lambda a: a.exp().log1p()):
        (got,) = compile_graph(recorded(f, x))([x])
        torch.testing.assert_close(got, f(x), equal_nan=True, atol=1e-37, rtol=2.0 ** (-20 if dtype is torch.float32 else -7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_argument_of_gelu(dtype):
    """Eager's is 0 for what is far below 0, where it subtracts two numbers that are nearly the same."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    (got,), eager = compile_graph(recorded(F.gelu, x))([x]), F.gelu(x)
    assert not got.isnan().any() and torch.equal(got[x < -5.9].abs(), eager[x < -5.9].abs())
    torch.testing.assert_close(got, F.gelu(x.double()).to(dtype), rtol=2.0**-7, atol=1e-7)


@pytest.mark.skipif("+avx512bf16" not in cpu.host().features, reason="no instruction rounds to bf16")
@wide
def test_two_vectors_become_one_of_bf16():
    x = rand(8, 80).bfloat16()
    assert "cvtne2ps2bf16" in Emitter(nest_of(lambda a: a * 2 + 1, x), 16).fn.text()
    assert "cvtne2ps2bf16" not in Emitter(nest_of(lambda a: (a * 2, a.float()), x), 16).fn.text()
    for length in (31, 32, 47, 80, 4099):
        x = (rand(3, length) * 50).bfloat16()
        for f in (lambda a: a * 3, lambda a: F.silu(a).relu(), lambda a: a.t() * a.t()):
            torch.testing.assert_close(compile_graph(recorded(f, x))([x])[0], f(x), rtol=2.0**-7, atol=1e-6)


@pytest.mark.skipif("+avx512bf16" not in cpu.host().features, reason="no instruction rounds to bf16")
@wide
def test_even_and_odd_numbers_of_bf16_go_apart():
    x = rand(8, 80).bfloat16()
    for f in (lambda a: a * 2 + 1, lambda a: (F.silu(a) * a, F.silu(a)), lambda a: (a * 2).cumsum(-1) + a):
        text = Emitter(nest_of(f, x), 16).fn.text()
        assert "fpext <32 x bfloat>" not in text and "shl <16 x i32>" in text
    assert text.count("cvtne2ps2bf16") > 0
    assert "fpext <32 x bfloat>" in Emitter(nest_of(lambda a, b: (a * b).to(a.dtype), x, rand(80)), 16).fn.text()
    for length in (31, 32, 47, 80, 4099):
        x, y = (rand(3, length).bfloat16() for _ in range(2))

        def f(a, b):
            sums = b.cumsum(-1) * a, a.cumsum(-1).cumsum(-1) + b[:1], a.softmax(-1).cumsum(-1)
            return F.silu(a) * b, F.silu(a) + b[0], F.log_softmax(a * b, -1), F.layer_norm(a, a.shape[-1:]), *sums

        for got, eager in zip(compile_graph(recorded(f, x, y))([x, y]), f(x, y), strict=True):
            torch.testing.assert_close(got, eager, rtol=2.0**-5, atol=2.0**-5)


@wide
def test_loose_functions_are_taken():
    text = Emitter(nest_of(F.silu, rand(8, 64).bfloat16()), 16).fn.text()
    assert "rcp14" in text and "fdiv" not in text
    assert "rcp14" not in Emitter(nest_of(F.silu, rand(8, 64)), 16).fn.text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [torch.exp, torch.sigmoid, torch.tanh, F.silu, lambda a: F.gelu(a, approximate="tanh"), lambda a: a.exp() * 3,
     lambda a: a.pow(1.5), lambda a: 1.5**a, torch.log, torch.log1p, torch.sin, torch.cos, F.softplus, F.mish,
     torch.log2, torch.erf, torch.rsqrt],
    ids=["exp", "sigmoid", "tanh", "silu", "gelu", "product", "power", "base", "log", "log1p", "sin", "cos",
         "softplus", "mish", "log2", "erf", "rsqrt"],
)
def test_every_argument(function, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    (got,), eager, reference = compile_graph(recorded(function, x))([x]), function(x), function(x.double())
    assert torch.equal(got.isnan(), eager.isnan())
    finite = reference.to(dtype).isfinite() & eager.isfinite()
    assert torch.equal(got[~finite & ~got.isnan()], eager[~finite & ~got.isnan()])
    nearest = reference.to(dtype).abs()
    unit = (torch.nextafter(nearest, torch.full_like(nearest, math.inf)) - nearest).double()
    off, usual = ((t.double() - reference).abs() / unit for t in (got, eager))
    # Instructions that round to bf16 take numbers below the normal ones for 0.
    wrong = finite & (nearest > 2 * torch.finfo(dtype).smallest_normal) & (off > usual.clamp(min=0.5) * 2)
    assert not wrong.any(), x[wrong]


SLOPES = {
    "silu": aten.silu_backward,
    "gelu": aten.gelu_backward,
    "gelu by tanh": lambda g, a: aten.gelu_backward(g, a, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SLOPES)
def test_every_argument_of_a_slope(name, dtype):
    """Those of numbers far below 0 are next to 0, and are so in eager to some places of 1."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)

    def slope(a):
        return SLOPES[name](torch.ones_like(a), a)

    (got,), eager, reference = compile_graph(recorded(slope, x))([x]), slope(x), slope(x.double())
    assert torch.equal(got.isnan(), eager.isnan())
    known = ~eager.isnan() & (reference.abs() > 2e-6)
    nearest = reference.to(dtype).abs()
    unit = (torch.nextafter(nearest, torch.full_like(nearest, math.inf)) - nearest).double()
    off = (got.double() - reference).abs()
    assert (off[known] <= unit[known] * 2).all() and (off[~eager.isnan()] <= unit[~eager.isnan()] + 2e-7).all()


@wide
@pytest.mark.parametrize("name", SLOPES)
def test_slopes_take_no_quotients_and_one_exponential_at_most(name):
    g, x = rand(8, 64).bfloat16(), rand(8, 64).bfloat16()
    text = Emitter(nest_of(SLOPES[name], g, x), 16).fn.text()
    looked_up = ["permvar", "vpermi2var"][name == "gelu"]
    assert "fdiv" not in text and looked_up in text and text.count("scalef.ps.512(") <= 4 * (name != "gelu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exponent", [2.3, -1.7, 60.0, -0.01, 7.5, math.inf, math.nan])
def test_exponents_are_rounded_as_the_numbers_are(dtype, exponent):
    """Eager's are; all numbers of a half type whose powers are normal."""
    x = torch.arange(-32768, 32768, dtype=torch.int16).view(dtype)
    eager = torch.pow(x, exponent)
    (got,) = compile_graph(recorded(lambda a: torch.pow(a, exponent), x))([x])
    places = (eager.view(torch.int16).int() - got.view(torch.int16).int()).abs()
    normal = eager.abs() > torch.finfo(dtype).smallest_normal
    assert (places[normal] <= 1).all()
    assert torch.equal(eager.isnan(), got.isnan())


def test_the_cosine_of_zero_is_one_where_it_is_loose_too():
    x = torch.tensor([0.0, -0.0] * 40).bfloat16()
    (got,) = compile_graph(recorded(lambda a: a.cos() - 1, x))([x])
    assert not got.any()
