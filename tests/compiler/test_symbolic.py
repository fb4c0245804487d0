"""Symbolic sizes: one compiled function for all sizes, forward and backward."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln.base import records
from kiln.fuse.program import fuse
from kiln.fuse.steps import Call
from kiln.launch import program
from kiln.ops.table import aten

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = (5, 2, 3, 4, 6, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 64, 65, 100, 257, 1001)
#: Those that stand for themselves: what is empty and what is broadcast.
SPECIAL = (0, 1)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


class Block(nn.Module):
    """A small transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.last(x))))


class Convolutional(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.head(F.adaptive_avg_pool2d(F.relu(self.second(x)), 1).flatten(1))


Case = tuple[Callable[..., Any], Callable[[int], tuple[torch.Tensor, ...]]]
CASES: dict[str, Case] = {
    "pointwise": (lambda x, y: F.gelu(x * 2 + y.sin()) / 3, lambda n: (randn(n, 7), randn(n, 7))),
    "broadcast": (lambda x, y: x * y + y[:, :1], lambda n: (randn(n, 1, 5), randn(3, n, 1).transpose(0, 1))),
    "row sums": (lambda x: (x.sum(1), x.amax(-1), x.var(-1)), lambda n: (randn(9, n),)),
    "column sums": (lambda x: (x.sum(0), x.mean(0) * 2, x.prod(0)), lambda n: (randn(n, 9),)),
    "split sums": (lambda x: (x.sum(), (x * x).mean(), x.sum((0, 2))), lambda n: (randn(n, 40, 33),)),
    "softmax": (lambda x: x.softmax(-1) * x.log_softmax(0), lambda n: (randn(6, n),)),
    "norms": (lambda x, w: F.layer_norm(x, (x.shape[-1],), w) + F.rms_norm(x, (x.shape[-1],), w),
              lambda n: (randn(4, n + 6), randn(n + 6) + 3)),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t), lambda n: (randn(n, 11), torch.arange(n) % 11)),
    "cat": (lambda x, y: torch.cat([x, y * 2, x[:2]]).relu(), lambda n: (randn(n, 3), randn(n + 1, 3))),
    "pad": (lambda x: F.pad(x, (1, x.shape[1] // 2)) * 2, lambda n: (randn(3, n),)),
    "slice": (lambda x: x[x.shape[0] // 2 :, 1:-1] + x[0, 2:], lambda n: (randn(n + 2, 8),)),
    "view": (lambda x: (x.view(-1, 4) + 1).t().reshape(4, -1, 3), lambda n: (randn(n, 6, 2),)),
    "embedding": (lambda i, w: F.embedding(i, w) * 2, lambda n: (torch.arange(2 * n).view(2, n) % 7, randn(7, 5))),
    "pooling": (lambda x: F.avg_pool2d(F.max_pool2d(x, 2, 1), 2, 1), lambda n: (randn(2, 3, n + 3, 5),)),
    "matmul": (lambda x, y: F.relu(x @ y) + 1, lambda n: (randn(n, 6), randn(6, n))),
    "number": (lambda x: F.mse_loss(x, x.detach() * 0.5) * (1 / x.shape[0]), lambda n: (randn(n, 3),)),
    "stepped": (lambda x: x.flatten() * 2, lambda n: (randn(2 * n, 5)[::2],)),
    "halves": (lambda x: F.glu(x), lambda n: (randn(3, 2 * n),)),
    "rounded": (lambda x: x[: max(2, int(x.shape[0] * 0.7))] * round(x.shape[0] / 2) + math.ceil(x.shape[1] / 3),
                lambda n: (randn(n, n + 1),)),
    "rounded sizes": (lambda x: F.pad(x, (0, int(x.shape[1] * 1.5))).sum(0) * x.new_ones(int(x.shape[1] * 1.5) + x.shape[1]),
                      lambda n: (randn(3, n),)),
    "replicate": (lambda x: F.pad(x, (1, 1), mode="replicate") * 2, lambda n: (randn(1, 3, n),)),
}  # fmt: skip


def symmetric(x: torch.Tensor) -> torch.Tensor:
    return x @ x.t() + 5 * torch.eye(len(x))


def warped(x: torch.Tensor) -> torch.Tensor:
    rows, columns = (torch.linspace(-1, 1, n) for n in x.shape[2:])
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], -1)
    return F.grid_sample(x, grid.expand(len(x), -1, -1, -1) * 0.9, align_corners=False)


def turned(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Pairs of numbers turned by angles, as positions are told."""
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(places), places)[:, None]).flatten(1)


#: Ops that keep sizes as they are: one graph for all of them.
CASES |= {
    "classes of pixels": (lambda x, t: F.cross_entropy(x, t), lambda n: (randn(2, 5, n, n + 1), torch.arange(2 * n * n + 2 * n).view(2, n, n + 1) % 5)),
    "elu": (lambda x: F.elu(x) + F.prelu(x, torch.tensor([0.25])), lambda n: (randn(n, 3),)),
    "spectrum": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1]) + torch.fft.fft(x).abs(), lambda n: (randn(3, n + 5),)),
    "pairs": (turned, lambda n: (randn(n, 6), randn(n))),
    "conjugate": (lambda x: (torch.complex(x, x + 1).conj() * torch.complex(x, x)).imag, lambda n: (randn(n, 3),)),
    "warped": (warped, lambda n: (randn(2, 3, n % 20 + 2, n % 20 + 3),)),
    "columns": (lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1), lambda n: (randn(2, 3, n, n + 1),)),
    "unpooled": (lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), lambda n: (randn(2, 3, 2 * n),)),
    "in volumes": (lambda x: F.adaptive_avg_pool3d(x, 2), lambda n: (randn(2, 3, 4, 5, n),)),
    "without NaN": (lambda x: x.nanmean(0) + x.kthvalue(1, 0)[0], lambda n: (randn(n, 3),)),
    "extremes": (lambda x: x.aminmax(dim=0), lambda n: (randn(n, 3),)),
    "on a diagonal": (lambda x: x.diag_embed(1) * 2, lambda n: (randn(2, n),)),
    "products of vectors": (lambda x, y: torch.linalg.cross(x, y), lambda n: (randn(n, 3), randn(n, 3) + 1)),
    "matrices": (lambda x: torch.linalg.solve(symmetric(x), x) + torch.linalg.inv(symmetric(x)) @ x, lambda n: (randn(min(n, 9), 4),)),
    "distances": (lambda x, y: torch.cdist(x, y), lambda n: (randn(n % 20 + 30, 3), randn(n % 20 + 31, 3) + 9)),
    "angles": (lambda x: (torch.arange(x.shape[0], dtype=torch.float32)[:, None] * x).cos(), lambda n: (randn(n, 3),)),
    "blocks": (lambda x, y: torch.kron(x, y) * 2, lambda n: (randn(3, n), randn(min(n, 9), 2, 2))),
    "covariance": (lambda x: (torch.cov(x), torch.cov(x, correction=0)), lambda n: (randn(min(n, 20), n + 3),)),
    "correlation": (lambda x: torch.corrcoef(x * x.shape[1]).exp(), lambda n: (randn(min(n, 20), n + 9),)),
    "windows": (lambda x: x * torch.hann_window(x.shape[0]) + torch.hamming_window(len(x), False, dtype=torch.float64), lambda n: (randn(n),)),
    "frames": (lambda x: torch.stft(x, 16, window=torch.hann_window(16), return_complex=True).abs(), lambda n: (randn(2, n + 17),)),
    "frames apart": (lambda x: torch.view_as_real(torch.stft(x, 16, 5, window=torch.hamming_window(16), center=False, normalized=True, onesided=False,
                                                             return_complex=True)), lambda n: (randn(n + 29),)),
}  # fmt: skip


def leaves(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def check(eager: Callable[..., Any], compiled: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> None:
    """Results, layouts and gradients are eager's."""
    runs = []
    for function in (eager, compiled):
        args = [x.detach().requires_grad_() if x.is_floating_point() else x for x in given]
        held = list(getattr(function, "parameters", list)())
        outs = leaves(function(*args))
        wanted = [x for x in (*args, *held) if x.requires_grad]
        grads = torch.autograd.grad(outs, wanted, [torch.ones_like(o) for o in outs], allow_unused=True)
        runs.append((outs, grads))
    for theirs, mine in zip(*[[*outs, *grads] for outs, grads in runs], strict=True):
        assert (theirs is None) == (mine is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5, equal_nan=True)
            assert mine.stride() == theirs.stride() or not mine.numel()


#: Loops where sizes vary: no kernel of eager's is called.
LOOPS: dict[str, Case] = {
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), lambda n: (randn(2, 3, n + 2, n + 3),)),
    "max pool without borders": (lambda x: F.max_pool2d(x, 2) * 2, lambda n: (randn(n, 3, 6, n + 3),)),
    "mean pool": (lambda x: F.avg_pool2d(x, 2, padding=1), lambda n: (randn(n, 3, n + 2, 5),)),
    "rows of a table": (lambda i, w: F.embedding(i, w).sum(1), lambda n: (torch.arange(6 * n).view(n, 6) % 5, randn(5, 20))),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), lambda n: (randn(n, 3, n, n + 1),)),
    "group norm": (lambda x: F.group_norm(x, 2), lambda n: (randn(2, 4, n, n + 1),)),
    "variance": (lambda x: x.var((0, 2)) + x.std((0, 2), correction=0), lambda n: (randn(n, 3, n + 2),)),
    "reflected": (lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"), lambda n: (randn(9, 40, n + 3, n + 4),)),
    "borders": (lambda x: F.pad(x, (2, 1, 1, 0)) + 1, lambda n: (randn(9, 20, n + 3, n + 4),)),
    "rolled": (lambda x: x.roll((1, 3), (-1, -2)) * 2, lambda n: (randn(9, 20, n + 3, n + 4),)),
    "turned": (lambda x: x.transpose(1, 3).contiguous(), lambda n: (randn(2, 40, n + 3, n + 14),)),
}


#: The same for gradients.
LOOPS_BACK: dict[str, Case] = {
    "means of pairs": (lambda x: F.avg_pool2d(x, 2), lambda n: (randn(2, 3, n + 2, n + 3),)),
    "means of sevens": (lambda x: F.avg_pool2d(x, 7), lambda n: (randn(2, 3, n + 12, n + 17),)),
    "means that overlap": (lambda x: F.avg_pool2d(x, 3, 2, 1), lambda n: (randn(n, 3, n + 1, n + 2),)),
    "means of what is there": (lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), lambda n: (randn(2, 3, n, 2 * n),)),
    "means of larger windows": (lambda x: F.avg_pool2d(x, (5, 4), (3, 2), (2, 1)), lambda n: (randn(2, 3, n + 3, n + 4),)),
    "means with gaps": (lambda x: F.avg_pool2d(x, 2, 3, divisor_override=3), lambda n: (randn(3, n + 3, n + 4),)),
    "means along rows": (lambda x: F.avg_pool1d(x, 3, 2, 1), lambda n: (randn(2, n, n + 2),)),
    "means of cubes": (lambda x: F.avg_pool3d(x, 3, 2, 1), lambda n: (randn(1, 2, n % 9 + 3, n + 1, 5),)),
    "mean of all": (lambda x: F.adaptive_avg_pool3d(x, 1), lambda n: (randn(1, 2, n % 9 + 3, n + 1, 5),)),
}  # fmt: skip


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that are fused."""
    found: list[Any] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(fuse(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(program, "fuse", noted)
    monkeypatch.setattr(program, "keeping", lambda *_: None)
    kiln.reset()
    return found


def called(programs: list[Any]) -> list[str]:
    """The kernels of eager's in programs."""
    steps = [s.node.op for made in programs for s in made.steps if isinstance(s, Call) and not s.node.op.is_view]
    return [str(op) for op in steps if op is not aten.empty.memory_format]


@pytest.mark.parametrize("name", LOOPS)
def test_loops_where_sizes_vary(name: str, made: list[Any]) -> None:
    function, make = LOOPS[name]
    compiled = kiln.compile(function, dynamic=True, fullgraph=True)
    with records.collect() as log, kiln.config.patch(strict=True), torch.no_grad():
        for n in (5, 2, 3, 4, 13, 16, 17, 31, 33, 64):
            args = make(n)
            torch.testing.assert_close(compiled(*args), function(*args), rtol=2e-5, atol=2e-5)
    assert len(log.graphs) == len(made) == 1 and not log.fallbacks
    assert called(made) == []


@pytest.mark.parametrize("name", LOOPS_BACK)
def test_gradients_are_loops_where_sizes_vary(name: str, made: list[Any]) -> None:
    function, make = LOOPS_BACK[name]
    compiled = kiln.compile(function, dynamic=True, fullgraph=True)
    with records.collect() as log, kiln.config.patch(strict=True):
        for n in (5, 2, 3, 4, 13, 16, 17, 31, 33):
            check(function, compiled, make(n))
    assert len(log.graphs) == 1 and len(made) == 2 and not log.fallbacks
    assert called(made) == []


def serves(function: Any, make: Any, sizes: Iterable[int]) -> None:
    """One graph gives for all sizes what eager gives, gradients too."""
    kiln.reset()
    compiled = kiln.compile(function, dynamic=True, fullgraph=True)
    with records.collect() as log, kiln.config.patch(strict=True):
        for n in sizes:
            check(function, compiled, make(n))
    assert len(log.graphs) == 1 and not log.fallbacks


@pytest.mark.parametrize("name", CASES)
def test_one_function_for_all_sizes(name: str) -> None:
    serves(*CASES[name], SIZES)


@pytest.mark.parametrize("name", ["pointwise", "row sums", "column sums", "softmax", "cat", "pad", "matmul", "embedding"])
def test_sizes_that_turn_out_to_vary(name: str) -> None:
    function, make = CASES[name]
    kiln.reset()
    compiled = kiln.compile(function, fullgraph=True)
    with records.collect() as log, kiln.config.patch(strict=True):
        for n in SIZES[:8]:
            check(function, compiled, make(n))
    assert len(log.graphs) == 2 and not log.fallbacks


@pytest.mark.parametrize("name", ["pointwise", "broadcast", "column sums", "matmul", "embedding"])
def test_nothing_and_one(name: str) -> None:
    function, make = CASES[name]
    kiln.reset()
    compiled = kiln.compile(function, dynamic=True, fullgraph=True)
    with kiln.config.patch(strict=True):
        for n in (7, *SPECIAL, 9):
            check(function, compiled, make(n))


@pytest.mark.parametrize("model,shape", [(Block(), lambda n: (2, n, 16)), (Convolutional(), lambda n: (2, 3, n + 5, n + 4))],
                         ids=["transformer", "convolutions"])  # fmt: skip
def test_models(model: nn.Module, shape: Callable[[int], tuple[int, ...]]) -> None:
    twin = copy.deepcopy(model)
    kiln.reset()
    compiled = kiln.compile(twin, dynamic=True, fullgraph=True)
    with records.collect() as log, kiln.config.patch(strict=True):
        for n in SIZES[:12]:
            check(model, compiled, (randn(*shape(n)),))
    assert len(log.graphs) <= 2 and not log.fallbacks


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_a_size_that_is_given(mode: str) -> None:
    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        return F.interpolate(x, size=(n, n + 1), mode=mode) * 2

    kiln.reset()
    compiled = kiln.compile(function, fullgraph=True)
    with records.collect() as log, kiln.config.patch(strict=True):
        for n in (16, 17, 5, 31):
            runs = []
            for f in (function, compiled):
                x = randn(1, 3, 8, 8).requires_grad_()
                out = f(x, n)
                runs.append((out, *torch.autograd.grad(out.square().sum(), x)))
            torch.testing.assert_close(runs[1], runs[0], rtol=2e-5, atol=2e-5)
    assert len(log.graphs) == 2 and not log.fallbacks


@pytest.mark.parametrize("function", [lambda x: F.interpolate(x, scale_factor=2) + 1, lambda x: F.max_pool1d(x, 2) * 2])
def test_sizes_that_an_op_asks_for(function: Callable[..., Any]) -> None:
    """Torch's own composite asks for the numbers: each size is compiled, and right."""
    kiln.reset()
    compiled = kiln.compile(function, dynamic=True, fullgraph=True)
    with kiln.config.patch(strict=True):
        for n in (5, 2, 9):
            check(function, compiled, (randn(2, 3, n),))


def sized(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.long)


#: Arguments that a function takes, and others that eager refuses, or takes in another way.
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "gather": (lambda x, i: torch.gather(x, 0, i) + 1, (randn(5, 6), sized(12).view(3, 4)), (randn(5, 3), sized(27).view(3, 9))),
    "scatter": (lambda x, i, s: x.scatter(0, i, s) + 1, (randn(5, 6), sized(12).view(3, 4), randn(3, 5)),
                (randn(5, 3), sized(27).view(3, 9), randn(3, 9))),
    "scatter from less": (lambda x, i, s: x.scatter_add(0, i, s) + 1, (randn(5, 6), sized(12).view(3, 4), randn(3, 5)),
                          (randn(5, 6), sized(12).view(3, 4), randn(3, 2))),
    "index_add": (lambda x, i, s: x.index_add(0, i, s) + 1, (randn(5, 6), sized(3), randn(3, 6)), (randn(5, 6), sized(4), randn(3, 6))),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s) + 1, (randn(5, 6), sized(3), randn(3, 6)), (randn(5, 6), sized(4), randn(3, 6))),
    "index_put": (lambda x, i, s: torch.index_put(x, (i,), s), (randn(5, 6), sized(4), randn(4, 6)), (randn(5, 6), sized(4), randn(3, 6))),
    "two indices": (lambda x, i, j: x[i, j] + 1, (randn(5, 6), sized(4), sized(4)), (randn(5, 6), sized(4), sized(3))),
    "slice_scatter": (lambda x, s: torch.slice_scatter(x, s, 0, 1, 4) + 1, (randn(5, 6), randn(3, 6)), (randn(3, 6), randn(3, 6))),
    "where": (lambda b, x, y: torch.where(b > 0, x, y), (randn(5, 6), randn(5, 6), randn(6)), (randn(5, 6), randn(5, 6), randn(7))),
    "cat": (lambda x, y: torch.cat([x, y]) + 1, (randn(5, 6), randn(3, 6)), (randn(5, 3), randn(3, 9))),
    "matmul": (lambda x, y: x @ y + 1, (randn(5, 6), randn(6, 3)), (randn(5, 3), randn(9, 3))),
    "cross entropy": (F.cross_entropy, (randn(5, 6), sized(5)), (randn(5, 3), sized(7))),
    "layer norm": (lambda x, w: F.layer_norm(x, (x.shape[-1],), w), (randn(5, 6), randn(6)), (randn(5, 3), randn(9))),
    "select": (lambda x: x[3] + 1, (randn(5, 6),), (randn(3, 6),)),
    "view": (lambda x: x.view(3, -1) + 1, (randn(6, 6),), (randn(5, 5),)),
    "halves": (F.glu, (randn(6, 6),), (randn(5, 5),)),
    "chunk": (lambda x: x.chunk(3)[2] + 1, (randn(6, 6),), (randn(2, 5),)),
    "diagonal": (lambda x: x.diagonal(2) + 1, (randn(6, 6),), (randn(9, 3),)),
    "unfold": (lambda x: x.unfold(0, 4, 1) + 1, (randn(6, 6),), (randn(3, 3),)),
    "group norm": (lambda x: F.group_norm(x, 4), (randn(2, 8, 6),), (randn(2, 6, 3),)),
    "means of cubes": (lambda x: F.avg_pool3d(x, 3, 2, 1), (randn(2, 4, 4, 5, 6),), (randn(2, 4, 4, 2, 6),)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_eager_refuses(name: str) -> None:
    """A kernel for all sizes is not called with those that do not fit each other."""
    function, fitting, others = REFUSED[name]
    kiln.reset()
    compiled = kiln.compile(function, dynamic=True)
    torch.testing.assert_close(compiled(*fitting), function(*fitting))
    outcomes = []
    for call in (function, compiled):
        try:
            outcomes.append(call(*others))
        except Exception as error:
            outcomes.append(type(error))
    if isinstance(outcomes[0], torch.Tensor):
        torch.testing.assert_close(outcomes[1], outcomes[0])
    else:
        assert outcomes[1] is outcomes[0]


def test_a_computed_size_that_is_one() -> None:
    """A size that follows from others and is 1 is broadcast, also where loops take sizes as they come."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 80, 1).bool() + x

    kiln.reset()
    compiled = kiln.compile(function, dynamic=True, fullgraph=True)
    for rows, columns in ((5, 16), (4, 20), (10, 8)):
        x = torch.randint(0, 2, (rows, 1, columns)) * torch.rand(rows, 1, columns)
        torch.testing.assert_close(compiled(x), function(x))
    x = torch.rand(2, 1, 80)
    torch.testing.assert_close(compiled(x), function(x))


def in_pieces(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [piece.clone() for piece in x.split([len(y), len(x) - len(y)])]


#: Backward passes that know sizes by numbers alone: one follows from others that they lack, two are equal.
HANDED: dict[str, Case] = {
    "a number of all elements": (lambda x, y: torch.cat([x.detach().flatten(), y.exp()]).view(1, 44),
                                 lambda n: (randn(4, 10), randn(4))),
    "two sizes that are equal": (lambda x, y: (y.detach() - x).view(1, 5, 3).exp(), lambda n: (randn(5, 3), randn(3))),
}  # fmt: skip


@pytest.mark.parametrize("name", HANDED)
def test_sizes_that_no_tensor_of_a_backward_has(name: str) -> None:
    serves(*HANDED[name], (4, 7))


@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nobody_differentiates(used: int) -> None:
    kiln.reset()
    compiled = kiln.compile(in_pieces, dynamic=True, fullgraph=True)
    with records.collect() as log, kiln.config.patch(strict=True):
        for n in (4, 7):
            check(lambda x, y: in_pieces(x, y)[used], lambda x, y: compiled(x, y)[used], (randn(n + 3), randn(n)))
    assert len(log.graphs) == 1 and not log.fallbacks


def written(x: torch.Tensor, place: int) -> torch.Tensor:
    y = x.clone()
    y[:, place] = x[0, 0] * 2
    y[1, place, place % 3] += 1
    return y


#: Elements at numbers that vary, read and written, and functions of the numbers themselves.
PLACES: dict[str, Callable[..., Any]] = {
    "an element": lambda x, n: x[:, n] * n + x[0, n - 1, None],
    "from the end": lambda x, n: x[:, -n, ..., 1],
    "the middle": lambda x, n: x[:, x.shape[1] // 2 - n % 2],
    "written": written,
    "functions": lambda x, n: x * math.log(n + 1) + math.exp(-n) * math.sin(n),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_that_vary(name: str) -> None:
    function = PLACES[name]
    kiln.reset()
    compiled = kiln.compile(function, fullgraph=True)
    with records.collect() as log, kiln.config.patch(strict=True):
        for n in (5, 3, 8, 6, 1, 9):
            check(lambda x, n=n: function(x, n), lambda x, n=n: compiled(x, n), (randn(3, 11, 4),))
    assert len(log.graphs) == 2 and not log.fallbacks
    if name in ("an element", "from the end", "written"):
        for call in (function, compiled):
            with pytest.raises(IndexError):
                call(randn(3, 11, 4), 15)


def test_a_number_in_a_cache() -> None:
    """A cache that is written at a position which grows is one graph, not one for each."""

    def step(cache: torch.Tensor, new: torch.Tensor, place: int) -> torch.Tensor:
        cache[:, place] = new
        return cache[:, : place + 1].sum(1)

    kiln.reset()
    compiled = kiln.compile(step, fullgraph=True)
    with records.collect() as log, kiln.config.patch(strict=True):
        caches = torch.zeros(2, 16, 4), torch.zeros(2, 16, 4)
        for place in range(1, 12):
            new = randn(2, 4) + place
            torch.testing.assert_close(compiled(caches[1], new, place), step(caches[0], new, place))
            torch.testing.assert_close(caches[1], caches[0])
    assert len(log.graphs) == 2 and not log.fallbacks


#: Tensors that are made of a number that varies, in old ways.
MADE: dict[str, Callable[..., Any]] = {
    "like another": lambda x, n: x * x.new_tensor(n) + x.new_tensor([n, 1.0, n + 1]),
    "rows": lambda x, n: x.new_tensor([[0, n], [n * 2, 4]], dtype=torch.float64, requires_grad=True) * x[0],
    "of integers": lambda x, n: torch.arange(3).new_tensor([n, 2, 3]) * x,
    "by its class": lambda x, n: torch.Tensor([n, 2, 3]) * torch.DoubleTensor((1, n, n)) * x,
    "nested": lambda x, n: torch.FloatTensor([[n, 2, 3], (1, n, n)]) @ x,
}


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("name", MADE)
def test_tensors_of_numbers_that_vary(name: str, kind: Any) -> None:
    kiln.reset()
    f = MADE[name]
    compiled = kiln.compile(f, fullgraph=True)
    with records.collect() as log:
        for n in (2, 3, 5, 4) if kind is int else (1.5, 2.25, 0.5, 3.0):
            check(lambda x, n=n: f(x, n), lambda x, n=n: compiled(x, n), (randn(3),))
    assert not log.fallbacks and len(log.graphs) == 2


#: Ops whose derivatives ask what a number is, over tensors and a number that varies.
NUMBERS: dict[str, Callable[..., Any]] = {
    "power": lambda x, n: (1 - x) ** n * x.log(),
    "power of a number": lambda x, n: torch.pow(n + 0.5, x) + x.pow(n - 2),
    "of a negative base": lambda x, n: torch.pow(-x, 2 * n),
    "in place": lambda x, n: (x * 1).pow_(n).mul_(2),
    "assigned": lambda x, n: (y := x * 1, y.__ipow__(n), y)[-1],
    "two sizes": lambda x, n: x[:, None].expand(-1, n if type(n) is int else 2) ** (n + 1),
    "between": lambda x, n: torch.lerp(x.sin(), x, n / 8) + x.lerp(x.exp(), n),
    "between in place": lambda x, n: (x * 1).lerp_(x.exp(), n),
    "a scalar": lambda x, n: x.sum() ** n,
    "written afterwards": lambda x, n: (x**n).mul_(2),
}


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "kiln"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_derivatives_ask_for(name: str, backend: str, kind: Any) -> None:
    f = NUMBERS[name]
    if name == "of a negative base" and kind is float:
        pytest.skip("it has no power")
    kiln.reset()
    compiled = kiln.compile(f, backend=backend, fullgraph=True)
    with records.collect() as log:
        for n in (2, 3, 5, 4) if kind is int else (1.5, 2.25, 0.5, 3.0):
            grads = []
            for call in (f, compiled):
                x = torch.linspace(0.125, 0.875, 6).requires_grad_()
                result = call(x, n)
                result.sum().backward()
                grads.append((result.detach(), x.grad))
            torch.testing.assert_close(grads[1], grads[0])
    assert not log.fallbacks and len(log.graphs) == 2
