"""Elementwise ops and reductions in every dtype that kernels have, forward: values and layouts are eager's.

By default each op gives its first sample in one dtype of each kind; KILN_ALL_SAMPLES=1 runs all samples in all dtypes.
"""

from __future__ import annotations

import warnings
from itertools import islice
from typing import Any

import pytest
import torch

import kiln
from kiln.base import records
from tests.compiler.nearness import flat
from tests.differentiate.samples import ALL, BREAKS, OPS, SOMETIMES, compare, outcome, unseeded

pytestmark = pytest.mark.filterwarnings("ignore")
infos = pytest.importorskip("torch.testing._internal.opinfo.core")
KINDS = (infos.UnaryUfuncInfo, infos.BinaryUfuncInfo, infos.ReductionOpInfo)
NAMES = [name for name, op in OPS.items() if isinstance(op, KINDS)]
DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
CHOSEN = DTYPES if ALL else [torch.bfloat16, torch.int32]
SAMPLES = None if ALL else 1

#: How much further from the exact result than eager's rounding a half result may be, in units of the last place.
ULPS = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 16, torch.float64: 16}


def near(expected: torch.Tensor, got: torch.Tensor, what: str) -> None:
    if not expected.is_floating_point():
        torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")
        return
    eps = torch.finfo(expected.dtype).eps
    a, b = expected.double(), got.double()
    assert torch.equal(a.isnan(), b.isnan()), f"{what}: {got}, eager {expected}"
    finite = a.isfinite() & b.isfinite()
    assert torch.equal(a[~finite].nan_to_num(3), b[~finite].nan_to_num(3)), f"{what}: {got}, eager {expected}"
    allowed = ULPS[expected.dtype] * eps * (a[finite].abs() + a[finite].abs().amax() / 8 if finite.any() else 0)
    wrong = (a[finite] - b[finite]).abs() > allowed
    assert not wrong.any(), f"{what}: {b[finite][wrong][:5]}, eager {a[finite][wrong][:5]}"


def check(name: str, dtype: torch.dtype) -> None:
    """Compare an op with eager on its samples of a dtype; an AssertionError where anything differs."""
    op = OPS[name]
    with warnings.catch_warnings(), unseeded(), torch.no_grad():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(islice(op.sample_inputs("cpu", dtype), SAMPLES)):
            where = f"{dtype}, sample {number}"
            expected = outcome(op.op, sample)
            kiln.reset()
            with records.collect() as log:
                got = outcome(kiln.compile(lambda *args, **kwargs: op.op(*args, **kwargs)), sample)
            assert not log.fallbacks, f"{where} fell back: {log.fallbacks}"
            assert expected.error == got.error, f"{where} raised {got.error}, eager {expected.error}"
            assert {b.kind for b in log.breaks} <= BREAKS.get(name, set()) | SOMETIMES.get(name, set())
            compare(expected.value, got.value, where, values=False)
            for a, b in zip(flat(expected.value), flat(got.value), strict=True):
                if isinstance(a, torch.Tensor) and a.numel() and a.layout is torch.strided and not a.is_complex():
                    near(a, b, where)


@pytest.mark.parametrize("name", NAMES)
def test_dtypes(name: str) -> None:
    op: Any = OPS[name]
    for dtype in CHOSEN:
        if op.supports_dtype(dtype, "cpu"):
            check(name, dtype)
