"""Functions of one number of bf16, rounded to one: all numbers are tried."""

import math

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.generate import cpu, shorts
from kiln.generate.kernel import Emitter
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded
from tests.fuse.test_kernels import check, rand
from tests.generate.test_loops import nest_of

NEEDED = "+avx512bf16", "+avx512vbmi2"
able = pytest.mark.skipif(
    not all(feature in cpu.host().features for feature in NEEDED), reason="the processor has no such words"
)

FUNCTIONS = {
    "softplus": F.softplus, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "elu": F.elu, "expm1": torch.expm1, "gelu by tanh": lambda a: F.gelu(a, approximate="tanh"),
    "a chain": lambda a: torch.tanh(a) * 0.5 + 0.5,
}  # fmt: skip


def every_number():
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def short_of(function, x):
    value = nest_of(function, x).stores[0].value
    while value.op == "convert":
        (value,) = value.args
    given = shorts.expression(value)
    return given, None if given is None else shorts.fitted(given)


def units(got, exact):
    """How far off, in units of the last place."""
    return (got.double() - exact).abs() / 2.0 ** (exact.abs().clamp(min=2.0**-126).log2().floor() - 7)


@able
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_number(name):
    function, x = FUNCTIONS[name], every_number()
    given, short = short_of(function, x)
    assert "pmul.hr.sw" in Emitter(nest_of(function, x), 16).fn.text()
    (got,), eager = compile_graph(recorded(function, x))([x]), function(x)
    finite = x.abs() < 1e38  # eager's products overflow above
    assert torch.equal(got.isinf()[finite], eager.isinf()[finite]) and not got[finite].isnan().any()
    assert torch.equal(torch.signbit(got)[finite & (eager != 0)], torch.signbit(eager)[finite & (eager != 0)])
    bits = x.view(torch.int16).int() & 0x7FFF
    inside = bits <= torch.where(torch.signbit(x), short.last[1], short.last[0])
    exact = shorts.evaluated(given, x.double())
    inside &= exact.abs() >= 2.0**-126
    assert inside.sum() > 30_000
    off = units(got, exact)[inside]
    assert off.max() <= 1.0 and off.mean() <= 2 * units(exact.bfloat16(), exact)[inside].mean()
    assert got[x == 0].tolist() == eager[x == 0].tolist()


@able
@pytest.mark.parametrize("exponent", [2.3, -0.7, 1.5, 7.3, -12.3])
def test_powers_of_every_number(exponent):
    def power(a):
        return a.pow(exponent)

    x = every_number()
    given, short = short_of(power, x)
    assert isinstance(short, shorts.Power) and "pmul.hr.sw" in Emitter(nest_of(power, x), 16).fn.text()
    (got,), eager = compile_graph(recorded(power, x))([x]), power(x)
    assert torch.equal(got.isnan(), eager.isnan()) and torch.equal(got.isinf(), eager.isinf())
    exact = shorts.evaluated(given, x.double())
    inside = (exact.abs() >= 2.0**-126) & (exact.abs() < 3e38)
    assert inside.sum() > 2000 and units(got, exact)[inside].max() <= 1.0
    assert got[x == 1].tolist() == [1.0]


@able
def test_numbers_beyond_and_no_numbers_take_the_usual_way():
    x = rand(3, 1000).bfloat16() * 3
    x[0, ::7], x[1, 5], x[1, 40], x[2, 900], x[2, 77] = -30.0, math.nan, 100.0, -1e30, 1e30
    for name, function in FUNCTIONS.items():
        check(function, x, kernels=1, rtol=2.0**-7, atol=2.0**-9 if name == "a chain" else 1e-5)
    (alone,) = compile_graph(recorded(F.gelu, x[1].clone()))([x[1].clone()])
    (beside,) = compile_graph(recorded(F.gelu, x))([x])
    ends = 1000 // 32 * 32 - 32
    assert torch.equal(alone[64:ends], beside[1][64:ends]), "whatever is beside them"


def test_which_functions_are_computed_so():
    x = rand(64).bfloat16()
    others = {
        "an exponential": torch.exp, "more than one sign": torch.sin, "neither": torch.log1p,
        "nothing costly": lambda a: a * 2 + 1, "a number and another": lambda a: torch.tanh(a) * a.flip(0),
        "slopes that are no powers of two": torch.erf, "rounded on the way": lambda a: torch.tanh(a).float() * 2.1,
    }  # fmt: skip
    for why, function in others.items():
        assert short_of(function, x)[1] is None, why
    if cpu.host().vector_bytes == 64:
        text = Emitter(nest_of(lambda a, b: torch.tanh(a + b), x, x.flip(0)), 16).fn.text()
        assert "pmul.hr.sw" not in text
        assert "pmul.hr.sw" not in Emitter(nest_of(torch.tanh, x.float()), 16).fn.text()


def test_terms_that_are_used_again_and_again():
    def chain(a):
        for _ in range(25):
            a = torch.tanh(a) * a
        return a

    assert short_of(chain, rand(64).bfloat16()) == (None, None)


@able
def test_processors_without_such_words_do_without(monkeypatch):
    host = cpu.host()
    fewer = host.features.replace("+avx512vbmi2", "-avx512vbmi2")
    monkeypatch.setattr("kiln.generate.kernel.host", lambda: cpu.Host(host.name, fewer, host.vector_bytes))
    assert "pmul.hr.sw" not in Emitter(nest_of(torch.tanh, rand(64).bfloat16()), 16).fn.text()


@able
def test_words_are_read_once_whatever_is_stored_first():
    """The first result may lie where the numbers do: machine code may read again after it is stored."""

    def two(a):
        first = torch.sigmoid(a)
        return first, torch.tanh(first) + 1, first.clamp(min=0.25)

    x = every_number()
    text = Emitter(nest_of(two, x), 16).fn.text()
    assert "pmul.hr.sw" in text and text.count("load <32 x i16>") == 1


def test_what_is_the_same_everywhere_is_rounded_as_often_as_it_is_stored():
    """A gradient's sum alone, stored beside no number that varies: LLVM ended the process."""
    def f(x):
        return torch.add(x.mean(), x.sign(), alpha=2) * 0.5

    x, g = torch.randn(64, 64).bfloat16().requires_grad_(), torch.randn(64, 64).bfloat16()
    got, expected = (torch.autograd.grad(each(x), x, g)[0] for each in (kiln.compile(f, fullgraph=True), f))
    torch.testing.assert_close(got, expected)
