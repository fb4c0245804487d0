"""bf16 on processors that have no instructions for it: numbers are words, rounded by integers."""

import pytest
import torch
from torch.nn import functional as F

from kiln.generate import cpu
from kiln.generate.kernel import Emitter
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded
from tests.generate.test_loops import nest_of

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def without_bf16(monkeypatch):
    known = cpu.host()
    fewer = known.features.replace("+avx512bf16", "-avx512bf16")
    monkeypatch.setattr("kiln.generate.kernel.host", lambda: cpu.Host(known.name, fewer, known.vector_bytes))


def ties_and_others(count):
    """Numbers of all kinds: any bits, halfway between two numbers of bf16, subnormal, infinite, none."""
    bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32)
    bits[::3] = (bits[::3] & -0x10000) | 0x8000
    bits[1::7] &= -0x7F800001
    bits[2::11] |= 0x7F800000
    bits[:4] = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, 0x7F7FFFFF])
    return bits.view(torch.float32)


@pytest.mark.parametrize("length", [1, 15, 16, 31, 33, 64, 4099, 1 << 21])
def test_every_kind_of_number_is_rounded_as_in_eager(length):
    x = ties_and_others(max(length, 16))[:length]
    for f in (lambda a: a.to(BF16), lambda a: a.double().to(BF16), lambda a: (a.to(BF16), a.to(BF16).float())):
        text = Emitter(nest_of(f, x), 16).fn.text()
        assert "bfloat" not in text
        got, eager = compile_graph(recorded(f, x))([x]), f(x)
        for mine, theirs in zip(got, eager if isinstance(eager, tuple) else (eager,), strict=True):
            assert torch.equal(mine.isnan(), theirs.isnan())
            kind = torch.int16 if mine.dtype is BF16 else torch.int32
            assert torch.equal(mine[~mine.isnan()].view(kind), theirs[~theirs.isnan()].view(kind))


@pytest.mark.parametrize("width", [4, 8, 16])
def test_no_vector_of_bf16_is_named(width):
    x, i = torch.randn(33, 70).to(BF16), torch.randint(0, 70, (33, 70))
    for f in (
        F.silu, lambda a: a * 2 + 1, lambda a: a.t() + 1, lambda a: (a * 2).cumsum(-1), lambda a: a.softmax(-1),
        lambda a: a.gather(1, i) * 2, lambda a: F.pad(a, (3, 5), value=1.5) * a[:, :1], lambda a: a[:, ::3] * 2,
    ):  # fmt: skip
        assert "bfloat>" not in Emitter(nest_of(f, x), width).fn.text()


@pytest.mark.parametrize("length", [31, 32, 47, 80, 4099])
def test_values(length):
    x, y = (torch.randn(3, length).to(BF16) for _ in range(2))
    i = torch.randint(0, length, (3, length))

    def f(a, b):
        sums = b.cumsum(-1) * a, a.softmax(-1).cumsum(-1), a.sum(-1), b.var(-1)
        moved = a.gather(1, i), a.flip(1) * 2, a.t() + b.t(), torch.cat([a, b], 1) * 2, a.clone()
        return F.silu(a) * b, F.log_softmax(a * b, -1), F.layer_norm(a, a.shape[-1:]), *sums, *moved

    for got, eager in zip(compile_graph(recorded(f, x, y))([x, y]), f(x, y), strict=True):
        torch.testing.assert_close(got, eager, rtol=2.0**-5, atol=2.0**-5)
