"""Elementary functions in generated code against float64: at most 4 units in the last place, edges as in eager."""

import ctypes
import math

import pytest
import torch

from kiln.generate import avx512, cpu, functions
from kiln.generate.llvm import F32, F64, I64, PTR, Module

TWO = {"pow", "atan2", "fmod"}
NAMES = sorted(functions.FUNCTIONS | {"sigmoid"})
EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, -0.5, 2.0, 88.72284, 88.72283, -87.4, -103.97,
         128.0, -149.0, 1e-45, -1e-45, 3.4e38, 2.0**30, 1e10]  # fmt: skip


def compiled(name, kind, width, own=None, base=None, power=None):
    """The function as a loop over arrays, with one argument where the other is a constant."""
    count = 2 if name in TWO and base is power is None else 1
    module = Module()
    module.own.update(own or {})
    fn = module.function("run", [*((f"a{i}", PTR) for i in range(count)), ("out", PTR), ("n", I64)])

    def body(i, _):
        given = [fn.load(fn.at(fn.parameters[f"a{k}"], i, kind), kind.wide(width)) for k in range(count)]
        given = [given[0].like(base), *given] if base is not None else given
        given = [*given, given[0].like(power)] if power is not None else given
        value = functions.sigmoid(*given) if name == "sigmoid" else functions.apply(name, *given)
        fn.store(value, fn.at(fn.parameters["out"], i, kind))
        return []

    fn.loop(0, fn.parameters["n"], width, [], body)
    fn.do("ret void")
    code = cpu.compile_text(module.text())
    entry = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (count + 1), ctypes.c_int64)(code.address("run"))

    def run(*tensors):
        out = torch.empty_like(tensors[0])
        entry(*(t.data_ptr() for t in (*tensors, out)), len(out))
        return out

    run.code = code
    return run


def arguments(name):
    """Bit patterns from the whole range, dense pieces where functions bend, and the edges."""
    bits = torch.arange(-(2**31), 2**31, 2**17 + 1, dtype=torch.int64).to(torch.int32)
    dense = [torch.linspace(-r, r, 20_001) for r in (1e-3, 1.5, 10.0, 110.0)]
    turns = torch.arange(-66_000, 66_000, 3).double() * (math.pi / 2)  # where little is left of sines
    x = torch.cat([bits.view(torch.float32), *dense, turns.float(), torch.tensor(EDGES)])
    x = x[: len(x) // 16 * 16] if name not in TWO else x
    if name not in TWO:
        return (torch.cat([x[:-32], torch.tensor(EDGES), torch.zeros(11)]),)
    generator = torch.Generator().manual_seed(0)
    y = x[torch.randperm(len(x), generator=generator)]
    y = torch.where(
        torch.rand(len(x), generator=generator) < 0.4, torch.randn(len(x), generator=generator) * 3, y
    )
    y = torch.where(torch.rand(len(x), generator=generator) < 0.3, y.round(), y)
    corners = torch.cartesian_prod(torch.tensor(EDGES), torch.tensor(EDGES))
    pair = torch.cat([torch.stack([x, y], 1), corners])
    pair = pair[len(pair) % 16 :]
    return pair[:, 0].contiguous(), pair[:, 1].contiguous()


def exact(name, *tensors):
    function = getattr(torch, name, None) or getattr(torch.special, name)
    return function(*[t.double() for t in tensors])


def ulps(got, reference):
    """The error in units of the last place of the float32 nearest to the reference; 0 where both are the same."""
    rounded = reference.float()
    unit = torch.exp2(torch.floor(torch.log2(rounded.abs().double().clamp(min=2.0**-126))) - 23)
    error = (got.double() - reference).abs() / unit
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    wrong = (got.isnan() != rounded.isnan()) | ((got.isinf() | rounded.isinf()) & ~same)
    return torch.where(
        wrong, torch.full_like(error, math.inf), torch.where(same, torch.zeros_like(error), error)
    )


@pytest.mark.parametrize("name", NAMES)
def test_float32(name):
    given = arguments(name)
    got, reference = compiled(name, F32, 16)(*given), exact(name, *given)
    error = ulps(got, reference)
    worst = int(error.argmax())
    assert error[worst] <= 4, [t[worst].item() for t in given] + [got[worst].item(), reference[worst].item()]
    zeros = (got == 0) & (reference == 0)
    assert torch.equal(torch.signbit(got[zeros]), torch.signbit(reference[zeros]))


wide = pytest.mark.skipif(cpu.host().vector_bytes != 64, reason="the processor has no AVX-512")


@wide
@pytest.mark.parametrize("name", ["exp", "exp2", "log", "log1p", "tanh", "erf", "sigmoid", "pow", "expm1"])
def test_what_avx512_does_better_is_as_good(name):
    given = arguments(name)
    got, reference = compiled(name, F32, 16, avx512.OWN)(*given), exact(name, *given)
    assert ulps(got, reference).max() <= 4
    zeros = (got == 0) & (reference == 0)
    assert torch.equal(torch.signbit(got[zeros]), torch.signbit(reference[zeros]))


def around_one():
    """Numbers of the whole range, and densely those whose powers by large exponents are neither 0 nor infinite."""
    x = torch.cat([arguments("exp")[0], torch.linspace(0.5, 2, 100_001), torch.linspace(0.999, 1.001, 20_001)])
    return x[len(x) % 16 :].contiguous()


@wide
@pytest.mark.parametrize(
    "power", [2.3, -1.7, 0.7, 1.5, -0.5, 1 / 3, 3.0, -3.0, 4.0, 5.0, 0.01, 1e-4, 7.5, -16.0, 60.0, -200.5, 1e5, 1e30,
              math.inf, -math.inf, math.nan]
)  # fmt: skip
def test_constant_exponents(power):
    x = around_one()
    got, reference = compiled("pow", F32, 16, avx512.OWN, power=power)(x), exact("pow", x, torch.tensor(power))
    assert ulps(got, reference).max() <= 2
    zeros = (got == 0) & (reference == 0)
    assert torch.equal(torch.signbit(got[zeros]), torch.signbit(reference[zeros]))


@wide
@pytest.mark.parametrize("base", [1.5, 2.0, 10.0, 0.1, 1.0000001, 1e-30, 3e38, 1.0, -1.5, 0.0, math.inf])
def test_constant_bases(base):
    x = around_one()
    got, reference = compiled("pow", F32, 16, avx512.OWN, base=base)(x), exact("pow", torch.tensor(base), x)
    assert ulps(got, reference).max() <= 2


@pytest.mark.parametrize("name", ["exp", "log1p", "pow", "sin"])
def test_one_lane_gives_what_vectors_give(name):
    given = [t[: len(t) // 16 * 16].contiguous() for t in arguments(name)]
    got, wide = compiled(name, F32, 1)(*given), compiled(name, F32, 16)(*given)
    assert torch.equal(got.view(torch.int32), wide.view(torch.int32))


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_the_c_library(name):
    given = [t[: len(t) // 64 * 64 : 64].double().contiguous() for t in arguments(name)]
    given = [t[: len(t) // 8 * 8].contiguous() for t in given]
    torch.testing.assert_close(
        compiled(name, F64, 8)(*given), exact(name, *given), rtol=1e-13, atol=0, equal_nan=True
    )
