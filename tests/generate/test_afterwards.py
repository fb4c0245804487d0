"""What comes once for each row waits for the other rows of a task, and is computed of many at once."""

import pytest
import torch
import torch.nn.functional as F

from kiln.generate.cpu import host
from kiln.generate.kernel import Emitter
from tests.fuse.test_kernels import check, rand
from tests.generate.test_loops import nest_of

ROWS = 1500


def test_what_waits():
    def waits(function, *inputs):
        return len(Emitter(nest_of(function, *inputs), 16).waiting_folds)

    x = rand(ROWS, 200)
    assert waits(lambda a: a.logsumexp(-1), x) == 2
    assert waits(lambda a: a.logsumexp(-1), x.bfloat16()) == 2
    assert waits(lambda a: (a * a).sum(-1).log(), x) == 1
    assert waits(lambda a: a.logsumexp(-1), x[:90]) == 0, "there are too few rows for several tasks"
    assert waits(lambda a: a.sum(-1), x) == 0, "there is nothing to compute"
    assert waits(lambda a: a.log_softmax(-1), x) == 0, "the row is stored"


@pytest.mark.skipif(host().vector_bytes != 64, reason="the processor has no AVX-512")
def test_the_logarithm_of_sixteen_rows_is_one():
    text = Emitter(nest_of(lambda a: (a * a).sum(-1).log(), rand(ROWS, 200)), 16).fn.text()
    assert text.count("getmant.ps.512(<16") == 2, "one for whole vectors of rows, one for the rows that are left"


@pytest.mark.parametrize("rows", [1024, ROWS, 1041])
@pytest.mark.parametrize("width", [1, 17, 1024, 3000])
def test_of_any_number_of_rows(rows, width):
    x, y = rand(rows, width) * 4, rand(rows)
    for dtype, off in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)):
        near = {"rtol": off, "atol": off}
        check(lambda a: a.logsumexp(-1), x.to(dtype), **near)
        check(lambda a: (a.logsumexp(-1), a.amax(-1), a.argmax(-1)), x.to(dtype), **near)
        check(lambda a, b: (a * a).mean(-1).log() * b + b.flip(0), x.to(dtype), y.to(dtype), **near)


def test_with_what_else_rows_have():
    x, y = rand(4, 1100, 60), rand(4, 1)
    places = torch.randint(0, 60, (4 * 1100,))
    check(lambda a, b: (a * a).sum(-1).log1p() / b, x, y)
    check(lambda a: (a * a).sum(-1).log1p().t().contiguous(), x)
    check(lambda a, i: F.cross_entropy(a.view(-1, 60), i, reduction="none"), x, places)
    check(lambda a: (a.amax(-1) - a.amin(-1)).exp(), (x * 100).int().float())
    check(lambda a: torch.stack([a.logsumexp(-1), a.exp().mean(-1).tanh()], -1), x)
    infinite = x.clone()
    infinite[0, 3], infinite[1, 7, 5], infinite[2, 9, 1] = -torch.inf, torch.inf, torch.nan
    check(lambda a: a.logsumexp(-1), infinite)
    check(lambda a: a.logsumexp(-1), infinite.bfloat16(), rtol=1e-2)
