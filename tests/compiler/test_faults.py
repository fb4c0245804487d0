"""What eager raises for the contents of tensors, or for numbers that vary, is raised by compiled programs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.base import records

R, inf, nan = torch.randn, math.inf, math.nan


def whole(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def real(*values):
    return torch.tensor(values)


def unread(f):
    """A program that computes something and has no use for it."""
    return lambda x, *rest: (f(x, *rest), x + 1)[1]


def written(x, target):
    x.zero_()
    return F.cross_entropy(x, target)


#: Functions of tensors, arguments for which they give something, and arguments for which they may raise.
FAULTS = {
    "classes": (lambda i: F.one_hot(i, 5) * 2, (whole(0, 1, 4),), (whole(0, 1, 5),), (whole(0, -1, 2),)),
    "classes, unread": (unread(lambda i: F.one_hot(i, 5)), (whole(0, 1, 4),), (whole(0, 1, 5),)),
    "gather": (lambda x, i: x.gather(0, i) + 1, (R(3), whole(0, 2)), (R(3), whole(0, 3)), (R(3), whole(0, -1))),
    "index": (lambda x, i: x[i] + 1, (R(3), whole(0, -3)), (R(3), whole(0, 3)), (R(3), whole(0, -4))),
    "of zeros": (lambda x, i: x.new_zeros(3)[i] + 1, (R(3), whole(0, 2)), (R(3), whole(0, 3))),
    "target after a write": (written, (R(3, 4), whole(1, 2, 3)), (R(3, 4), whole(1, 4, 3))),
    "target": (F.cross_entropy, (R(3, 4), whole(1, 2, 3)), (R(3, 4), whole(1, 4, 3)), (R(3, 4), whole(1, -1, 3))),
    "copied rows": (lambda x, i, v: x.index_copy(0, i, v) + 1, (R(3), whole(0, 1), R(2)), (R(3), whole(0, 3), R(2)),
                    (R(3), whole(0, -1), R(2))),
    "shares": (F.binary_cross_entropy, (torch.rand(9), torch.rand(9)), (torch.rand(9) + 1, torch.rand(9)), (torch.rand(9) - 1, torch.rand(9)),
               (torch.rand(9), torch.rand(9) + 1), (real(0.5, nan), torch.rand(2))),
    "shares, each": (lambda x, y: F.binary_cross_entropy(x, y, reduction="none").exp(), (torch.rand(9, 7), torch.rand(9, 7)),
                     (torch.rand(9, 7) + 1, torch.rand(9, 7))),
    "shares, unread": (unread(F.binary_cross_entropy), (torch.rand(9), torch.rand(9)), (torch.rand(9) + 1, torch.rand(9))),
    "bags, unread": (unread(lambda w, i, o: F.embedding_bag(i, w, o)), (R(3, 4), whole(0, 1), whole(0, 1)), (R(3, 4), whole(0, 3), whole(0, 1))),
    "pools, unread": (unread(lambda x, i: F.max_unpool1d(x, i, 2)), (R(1, 1, 2), whole(0, 3).view(1, 1, 2)), (R(1, 1, 2), whole(0, 4).view(1, 1, 2))),
    "singular values, unread": (unread(torch.linalg.svd), (torch.eye(3),), (torch.full((3, 3), nan),)),
    "division": (lambda a, b: a // b + 1, (whole(1, 2), whole(1, 2)), (whole(1, 2), whole(1, 0))),
    "cholesky": (lambda x: torch.linalg.cholesky(x) + 1, (torch.eye(3),), (-torch.eye(3),)),
    "inverse": (lambda x: torch.linalg.inv(x) + 1, (torch.eye(3),), (torch.zeros(3, 3),)),
    "repeats": (lambda x, r: x.repeat_interleave(r) + 1, (R(3), whole(1, 2, 3)), (R(3), whole(1, -2, 3))),
    "draws": (lambda x: torch.multinomial(x, 2) * 0, (torch.rand(4),), (torch.rand(4) - 2,), (torch.zeros(4),), (torch.full((4,), inf),)),
    "remainder by no number": (lambda x: torch.fmod(x, nan), (whole(1, 2),), (whole(3, 4),)),
}  # fmt: skip

#: The same for programs of a tensor and a number.
NUMBERS = {
    "power": (lambda x, k: x**k + 1, whole(1, 2), 2, 3, -1),
    "product of ints": (lambda x, k: x * (k * k % 97), whole(1, 2), 2, 3, 1 << 40),
    "sum with a product": (lambda x, k: x + k * k, whole(1, 2), 2, 3, 1 << 40, -(1 << 31)),
    "classes": (lambda x, k: F.one_hot(x, k) + 1, whole(1, 2), 4, 3, 2, 0),
    "filled bytes": (lambda x, k: x.masked_fill(x > 1, k), whole(1, 2, dtype=torch.int8), 1, 2, 300, -300),
    "filled halves": (lambda x, k: x.masked_fill(x > 0, k), R(4).half(), 1.0, 2.0, -1e9, -inf, 6e4),
    "filled floats": (lambda x, k: x.masked_fill(x > 0, k), R(4), 1.0, 2.0, 1e300),
    "clamped bytes": (lambda x, k: x.clamp(max=k), whole(1, 2, dtype=torch.uint8), 1, 2, 300, -1),
    "clamped floats": (lambda x, k: x.clamp(min=k), R(4), 1.0, 2.0, -1e300, -inf),
    "chosen": (lambda x, k: torch.where(x > 1, x, k), whole(1, 2, dtype=torch.int8), 1, 2, 300),
    "listed": (lambda x, k: torch.tensor([k, k], dtype=torch.int8) + x, whole(1, 2), 1, 2, 300),
    "scaled": (lambda x, k: torch.add(x, x, alpha=k), whole(1, 2, dtype=torch.int8), 1, 2, 300),
    "wrapped": (lambda x, k: x + k, whole(1, 2, dtype=torch.uint8), 1, 2, 300, -3),
}  # fmt: skip


@pytest.fixture(autouse=True)
def afresh():
    kiln.reset()


def outcome(f, args):
    """What a call gives or raises, and what is in its arguments then."""
    args = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    torch.manual_seed(0)
    try:
        return f(*args), "", args
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", args


def agree(f, calls, **options):
    """One graph for the first call; all as eager has it, in any order."""
    for order in (calls, [calls[0], *calls[:0:-1]], calls[::-1]):
        compiled = kiln.compile(f, **options)
        with records.collect() as log:
            for i, args in enumerate(order):
                expected, found = outcome(f, args), outcome(compiled, args)
                assert found[1] == expected[1], args
                torch.testing.assert_close(found[::2], expected[::2], equal_nan=True, rtol=1e-5, atol=1e-5)
                if i == 0 and order is calls and not expected[1]:
                    assert (len(log.graphs), len(log.breaks), len(log.fallbacks)) == (1, 0, 0)
        kiln.reset()


@pytest.mark.parametrize("name", FAULTS)
def test_contents_that_eager_refuses(name):
    f, *calls = FAULTS[name]
    agree(f, calls)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_that_eager_refuses(name, dynamic):
    f, x, *numbers = NUMBERS[name]
    agree(f, [(x, number) for number in numbers], dynamic=dynamic)


#: Programs of ints that are read from a tensor, all in one graph.
READ = {
    "product": lambda t: t * (t[0].item() * t[1].item()),
    "remainder": lambda t: t * (t[0].item() * t[1].item() % 97),
    "quotient": lambda t: t * (t[0].item() * t[1].item() // (1 << 40)),
    "least": lambda t: t * min(t[0].item() * t[1].item(), 5),
    "sum": lambda t: t * (t[0].item() + t[1].item()),
    "size": lambda t: torch.zeros(t[2].item() * 2) + 1,
    "size and number": lambda t: torch.zeros(t[2].item() * 2) + t[2].item() * 3,
}


@pytest.mark.parametrize("name", READ)
def test_ints_that_a_graph_reads_are_pythons(name, caplog):
    small, large = [whole(3, 4, 5), whole(5, 3, 9)], [whole(1 << 40, 1 << 41, 7), whole(-(1 << 63), -(1 << 63), 9)]
    agree(READ[name], [(t,) for t in small], fullgraph=True)
    assert not caplog.records  # no call ran in Python
    agree(READ[name], [(t,) for t in (*small, *large)], fullgraph=True)
