"""Kernels on a GPU give what eager gives: values as near to float64 as eager's, strides, gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kiln
from kiln.expand import channels as convolutions
from kiln.fuse.neighbours import results_at_once
from kiln.generate import device
from kiln.launch import device as launching

from .programs import FOLDS, INTEGERS, POINTWISE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = "cuda:0"


@pytest.fixture
def started(monkeypatch):
    """How many functions the kernels start that a test makes; each is ours."""
    counts = []
    made = launching.DevicePlanner.started

    def counted(self, compiled, buffers):
        counts.append(len(compiled.starts))
        return made(self, compiled, buffers)

    monkeypatch.setattr(launching.DevicePlanner, "started", counted)
    monkeypatch.setenv("KILN_STRICT", "1")
    with kiln.config.patch(strict=True):
        yield counts


def leaves(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def near(got, eager, exact, name):
    """As near to the true values as twice what eager is, and the same kind of tensor."""
    assert got.dtype == eager.dtype and got.shape == eager.shape and got.device == eager.device, name
    if not eager.dtype.is_floating_point:
        assert torch.equal(got, eager), f"{name}: {(got != eager).sum().item()} of {got.numel()} differ"
        return
    assert got.stride() == eager.stride(), (name, got.stride(), eager.stride())
    unit = torch.finfo(eager.dtype).eps
    scale = exact.abs().max().item()
    mine, theirs = ((x.double() - exact).abs().max().item() for x in (got, eager))
    bound = 2 * theirs + 4 * unit * scale
    assert mine <= bound or theirs != theirs, (
        f"{name}: error {mine:.3g}, eager's {theirs:.3g}, scale {scale:.3g}"
    )


def in_double(inputs):
    return [x.double() if x.is_floating_point() else x for x in inputs]


def compare(f, inputs, name, dynamic=None):
    kiln.reset()
    got = kiln.compile(f, fullgraph=True, dynamic=dynamic)(*inputs)
    eager, exact = f(*inputs), f(*in_double(inputs))
    torch.cuda.synchronize()
    for g, e, x in zip(leaves(got), leaves(eager), leaves(exact), strict=True):
        near(g, e, x, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*POINTWISE, *FOLDS])
def test_values(name, dtype, started):
    torch.manual_seed(0)
    f, *makers = {**POINTWISE, **FOLDS}[name]
    compare(f, [make(GPU, dtype) for make in makers], name)
    assert sum(started)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name, started):
    torch.manual_seed(0)
    f, *makers = INTEGERS[name]
    compare(f, [make(GPU, torch.float32) for make in makers], name)
    assert sum(started)


DOUBLE = (
    "add",
    "broadcast",
    "odd rows",
    "choices",
    "sum of 1000",
    "columns",
    "statistics",
    "layer norm",
    "middle",
)


@pytest.mark.parametrize("name", DOUBLE)
def test_doubles(name, started):
    f, *makers = {**POINTWISE, **FOLDS}[name]
    compare(f, [make(GPU, torch.float64) for make in makers], name)


GRADIENTS = ("add", "broadcast", "silu", "gelu", "functions", "rotary", "softmax of 1000", "softmax of 4096",
             "layer norm", "rms norm", "log softmax", "joined", "group norm", "outer and inner",
             "mean loss of 167 rows of 50304", "mean loss of 40 rows of 128256")  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, dtype, started):
    torch.manual_seed(0)
    f, *makers = {**POINTWISE, **FOLDS}[name]
    inputs = [make(GPU, dtype) for make in makers]
    weights = [torch.randn_like(y.float()) for y in leaves(f(*inputs))]

    def gradients(g, values):
        values = [v.detach().requires_grad_(v.is_floating_point()) for v in values]
        results = leaves(g(*values))
        total = sum((y * w.to(y.dtype)).sum() for y, w in zip(results, weights, strict=True))
        return torch.autograd.grad(total, [v for v in values if v.requires_grad])

    kiln.reset()
    got = gradients(kiln.compile(f, fullgraph=True), inputs)
    eager, exact = gradients(f, inputs), gradients(f, in_double(inputs))
    assert sum(started)
    for g, e, x in zip(got, eager, exact, strict=True):
        near(g, e, x, name)


@pytest.mark.parametrize("name", ["softmax", "layer norm", "columns", "chain"])
def test_sizes_that_vary(name, started):
    programs = {
        "softmax": lambda x: x.softmax(-1),
        "layer norm": lambda x: F.layer_norm(x, (x.shape[-1],)) * 2,
        "columns": lambda x: x.sum(0) + 1,
        "chain": lambda x: F.gelu(x) * x + x.shape[0],
    }
    f = programs[name]
    kiln.reset()
    g = kiln.compile(f, fullgraph=True, dynamic=True)
    for rows, width in ((7, 64), (33, 100), (1000, 333), (2, 4096), (513, 2049)):
        x = torch.randn(rows, width, device=GPU)
        near(g(x), f(x), f(x.double()), (name, rows, width))
    assert sum(started)


def test_streams(started):
    f = kiln.compile(lambda x: (x * 2).softmax(-1), fullgraph=True)
    x = torch.randn(512, 1000, device=GPU)
    expected = f(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = f(x)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(got, expected)


class Block(nn.Module):
    def __init__(self, width=128, heads=4):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.joint(self.first(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Language(nn.Module):
    def __init__(self, words=500, width=128):
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, i):
        x = self.embed(i) + self.place(torch.arange(i.shape[1], device=i.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), i[:, 1:].flatten())


def images():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.GroupNorm(4, 32),
        nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


MODELS = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10)),
                   lambda dtype: torch.randn(32, 64, device=GPU, dtype=dtype)),
    "images": (images, lambda dtype: torch.randn(4, 3, 32, 32, device=GPU, dtype=dtype)),
    "language": (Language, lambda dtype: torch.randint(0, 500, (4, 64), device=GPU)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, dtype, started):
    torch.manual_seed(0)
    make, data = MODELS[name]
    model, x = make().to(GPU, dtype), data(dtype)
    kiln.reset()
    compiled = kiln.compile(model, fullgraph=True)

    def step(f):
        model.zero_grad()
        loss = f(x).float().square().mean()
        loss.backward()
        return [loss.detach(), *[p.grad.clone() for p in model.parameters()]]

    got, eager = step(compiled), step(model)
    assert sum(started)
    for g, e in zip(got, eager, strict=True):
        assert (g - e).norm() <= (1e-4 if dtype is torch.float32 else 0.05) * e.norm() + 1e-6, (
            g - e
        ).norm() / e.norm()


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("wide", "size", "channels"), [(3, 28, 64), (5, 28, 64), (5, 15, 72), (7, 28, 96), (7, 5, 64)])
def test_convolutions_of_one_channel_each(wide, size, channels, bias, step, started, monkeypatch):
    """Rows of wide filters are a loop of each thread; images, results and their gradients."""
    written = []
    monkeypatch.setattr(device, "results_at_once", lambda nest: written.append(results_at_once(nest)) or written[-1])
    monkeypatch.setattr(convolutions, "FEWEST", 1)  # a single one is the library's otherwise
    torch.manual_seed(0)
    x = torch.randn(32, channels, size, size, device=GPU, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    conv = nn.Conv2d(channels, channels, wide, step, wide // 2, groups=channels, bias=bias)
    model = nn.Sequential(conv, nn.ReLU()).to(GPU, torch.bfloat16)
    eager, exact = (copy.deepcopy(model) for _ in range(2))
    exact.double()
    kiln.reset()

    def results(model, x):
        x = x.detach().requires_grad_()
        out = model(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]

    got = results(kiln.compile(model, fullgraph=True), x)
    for mine, theirs, true in zip(got, results(eager, x), results(exact, x.double()), strict=True):
        near(mine.contiguous(), theirs.contiguous(), true, "convolution")
    assert started and any(nest.several for nest in written)
