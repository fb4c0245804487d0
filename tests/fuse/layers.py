"""Small modules, each with something that compilers may get wrong, and which of them may follow one another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: Layers and the kind of value they give, by the kind they take; N is its width, M another one.
LAYERS: dict[str, list[tuple[str, str]]] = {
    "rows": [
        ("nn.Linear({N}, {M})", "rows"), ("nn.Linear({N}, {M}, bias=False)", "rows"), ("nn.LayerNorm({N})", "rows"), ("nn.LayerNorm({N}, elementwise_affine=False)", "rows"),
        ("nn.RMSNorm({N})", "rows"), ("nn.BatchNorm1d({N})", "rows"), ("nn.BatchNorm1d({N}, momentum=None)", "rows"), ("nn.BatchNorm1d({N}, track_running_stats=False)", "rows"),
        ("nn.ReLU()", "rows"), ("nn.ReLU(inplace=True)", "rows"), ("nn.GELU()", "rows"), ("nn.SiLU(inplace=True)", "rows"), ("nn.Tanh()", "rows"), ("nn.PReLU()", "rows"),
        ("nn.Dropout(0.3)", "rows"), ("nn.Softmax(-1)", "rows"), ("Residual(nn.Linear({N}, {N}))", "rows"), ("nn.Dropout(0.2, inplace=True)", "rows"), ("Gated({N})", "rows"),
        ("nn.utils.parametrizations.weight_norm(nn.Linear({N}, {M}))", "rows"), ("Counted()", "rows"), ("Average({N})", "rows"), ("Tied({N})", "rows"), ("Scaled({N})", "rows"), ("Normal({N})", "rows"),
        ("nn.LeakyReLU(0.1)", "rows"), ("nn.Sequential(nn.Linear({N}, {M}), nn.ELU())", "rows"), ("Cached({N})", "rows"), ("Masked()", "rows"), ("nn.Identity()", "rows"), ("Straight()", "rows"), ("Experts({N})", "rows"), ("Chosen({N})", "rows"), ("Several({N})", "rows"), ("Checkpointed({N})", "rows"), ("Own()", "rows"), ("Quantised()", "rows"),
        ("nn.utils.parametrizations.spectral_norm(nn.Linear({N}, {M}))", "rows"), ("Lookup({N})", "rows"), ("Written()", "rows"), ("nn.Bilinear({N}, {N}, {M})", "twins"), ("Ranked()", "rows"), ("Spectrum()", "rows"), ("nn.AlphaDropout(0.2)", "rows"), ("nn.Unflatten(1, (1, {N}))", "tokens"),
    ],
    "tokens": [
        ("nn.Linear({N}, {M})", "tokens"), ("nn.LayerNorm({N})", "tokens"), ("nn.RMSNorm({N})", "tokens"), ("Attention({N}, 2)", "tokens"), ("Residual(nn.Sequential(nn.LayerNorm({N}), nn.Linear({N}, {N})))", "tokens"),
        ("nn.GELU()", "tokens"), ("nn.Dropout(0.25)", "tokens"), ("Pooled()", "rows"), ("nn.TransformerEncoderLayer({N}, 2, 8, dropout=0.0, batch_first=True)", "tokens"), ("Last()", "rows"), ("Causal({N})", "tokens"),
        ("Recurrent({N})", "tokens"), ("Turned(nn.Conv1d({N}, {N}, 3, padding=1))", "tokens"), ("Places({N})", "tokens"), ("nn.GRU({N}, {N}, batch_first=True)", "pair"), ("nn.LSTM({N}, {N}, batch_first=True)", "pair"), ("nn.MultiheadAttention({N}, 2, batch_first=True)", "self"), ("Rotary()", "tokens"), ("Stored({N})", "tokens"), ("Windows()", "tokens"),
        ("Einsum({N})", "tokens"), ("nn.Flatten(0, 1)", "rows"), ("Biased({N})", "tokens"), ("Running()", "tokens"), ("Complex()", "tokens"),
    ],
    "pair": [("First()", "tokens")],
    "images": [
        ("nn.Conv2d({N}, {M}, 3, padding=1)", "images"), ("nn.Conv2d({N}, {M}, 1, bias=False)", "images"), ("nn.Conv2d({N}, {N}, 3, padding=1, groups={N})", "images"), ("nn.Conv2d({N}, {M}, 2, stride=2)", "images"),
        ("nn.BatchNorm2d({N})", "images"), ("nn.BatchNorm2d({N}, affine=False)", "images"), ("nn.GroupNorm(2, {N})", "images"), ("nn.InstanceNorm2d({N}, affine=True)", "images"), ("nn.ReLU(inplace=True)", "images"),
        ("nn.MaxPool2d(2)", "images"), ("nn.AvgPool2d(3, 1, 1)", "images"), ("Spread()", "rows"), ("nn.ConvTranspose2d({N}, {M}, 2, stride=2)", "images"), ("nn.Upsample(scale_factor=2)", "images"), ("nn.Hardswish()", "images"),
        ("nn.Dropout2d(0.3)", "images"), ("Residual(nn.Conv2d({N}, {N}, 3, padding=1))", "images"), ("Sequence()", "tokens"), ("nn.Sequential(nn.Conv2d({N}, {M}, 3, padding=1), nn.BatchNorm2d({M}), nn.ReLU6(inplace=True))", "images"),
        ("Residual(nn.Sequential(nn.Conv2d({N}, {N}, 3, padding=1, bias=False), nn.BatchNorm2d({N})))", "images"), ("nn.PixelUnshuffle(2)", "more"), ("Squeeze({N})", "images"), ("nn.ZeroPad2d((1, 0, 0, 1))", "images"), ("nn.Softmax2d()", "images"),
    ],
}  # fmt: skip


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Turned(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Gated(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.both = nn.Linear(n, 2 * n)

    def forward(self, x):
        a, b = self.both(x).chunk(2, -1)
        return a * b.sigmoid_() if not self.training else F.glu(torch.cat([a, b], -1), -1)


class Counted(nn.Module):
    """State of Python's and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.calls = 0

    def forward(self, x):
        self.steps += 1
        self.calls += 1
        return x * (1.5 if self.calls % 2 else 0.75) + self.steps


class Average(nn.Module):
    """A running average that is kept without a history."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


class Cached(nn.Module):
    """A buffer that is replaced, and an attribute that holds the last result."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(n))

    def forward(self, x):
        y = x + 0.5 * self.last
        self.last = y.detach().mean(0)
        return y


class Tied(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(n, n), nn.Linear(n, n)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())


class Scaled(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(1))
        self.factor = 0.5

    def forward(self, x):
        y = x * self.scale
        y[..., :1] += self.shift
        y *= self.factor
        return y


class Normal(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        wide = x.double()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class Masked(nn.Module):
    def forward(self, x):
        mask = torch.arange(x.shape[-1]) % 2 == 0
        return x.masked_fill(mask & (torch.arange(x.shape[0]) > 0)[:, None], 0.25)


class Attention(nn.Module):
    def __init__(self, n: int, heads: int) -> None:
        super().__init__()
        self.heads, self.all, self.out = heads, nn.Linear(n, 3 * n), nn.Linear(n, n)

    def forward(self, x):
        b, t, n = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.all(x).split(n, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(b, t, n))


class Causal(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(n, n), nn.Linear(n, n)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).mT / math.sqrt(x.shape[-1])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ x


class Recurrent(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(n, n)

    def forward(self, x):
        h = torch.zeros_like(x[:, 0])
        rows = []
        for i in range(x.shape[1]):
            h = self.cell(x[:, i], h)
            rows.append(h)
        return torch.stack(rows, 1)


class Places(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.table = nn.Embedding(64, n)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]) % 64)


class Pooled(nn.Module):
    def forward(self, x):
        return x.mean(1)


class Last(nn.Module):
    def forward(self, x):
        return x[:, -1]


class First(nn.Module):
    def forward(self, x):
        return x[0]


class Spread(nn.Module):
    def forward(self, x):
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


class Sequence(nn.Module):
    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


class Squeeze(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(n, n, 1)

    def forward(self, x):
        return x * self.fc(x.mean((2, 3), keepdim=True)).sigmoid()


class Straight(nn.Module):
    def forward(self, x):
        return x + (x.tanh() - x).detach()


class Experts(nn.Module):
    """Rows weighted over several branches, the two best kept."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gate, self.all = nn.Linear(n, 3), nn.ModuleList([nn.Linear(n, n) for _ in range(3)])

    def forward(self, x):
        score = self.gate(x).softmax(-1)
        best, which = score.topk(2, -1)
        weights = torch.zeros_like(score).scatter(-1, which, best / best.sum(-1, keepdim=True))
        return sum(weights[..., i : i + 1] * one(x) for i, one in enumerate(self.all))


class Chosen(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 7 * n).view(7, n))

    def forward(self, x):
        places = (torch.arange(x.shape[0]) * 3) % 7
        y = x + self.table[places]
        y[::2] = y[::2] * 0.5
        return torch.where(y > 0, y, 0.1 * y)


class Several(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.full((n,), 0.1 * (i + 1))) for i in range(4)])

    def forward(self, x):
        total = torch.zeros_like(x)
        for i, p in enumerate(self.parts):
            total += (x * p).sin() * (i + 1)
        return total


class Checkpointed(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(n, n), nn.Tanh(), nn.Linear(n, n))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -grad * x.cos() * ctx.factor, None


class Own(nn.Module):
    def forward(self, x):
        return Reverse.apply(x, 0.5)


class Quantised(nn.Module):
    """Integers and back, as kernels for small types do."""

    def forward(self, x):
        scale = x.detach().abs().amax(-1, keepdim=True) / 31 + 0.5
        whole = (x.detach() / scale * 4).to(torch.int8).to(torch.int32) // 2 * 2
        return x + (whole * scale).to(x.dtype) * 0.1


class Lookup(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, n, mode="mean")

    def forward(self, x):
        places = torch.arange(x.shape[0] * 3).view(-1, 3) % 9
        return x + self.bag(places)


class Written(nn.Module):
    def forward(self, x):
        y = x.clone()
        y.t()[0].mul_(2)
        y[..., -1].add_(x[..., 0])
        y.view(-1)[::3] = 0.5
        return y


class Ranked(nn.Module):
    def forward(self, x):
        return x.sort(-1)[0] + x.cumsum(-1) * 0.1 - x.flip(-1).cummax(-1)[0]


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x.double(), dim=-1), n=x.shape[-1], dim=-1).to(x.dtype)


class Rotary(nn.Module):
    def forward(self, x):
        t, n = x.shape[1], x.shape[2]
        angles = torch.arange(t, dtype=x.dtype)[:, None] * (10.0 ** -(torch.arange(n, dtype=x.dtype) / n))
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()


class Complex(nn.Module):
    def forward(self, x):
        z = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
        turn = torch.polar(torch.ones(x.shape[1], dtype=x.dtype), torch.arange(x.shape[1], dtype=x.dtype))
        return torch.view_as_real(z * turn[:, None]).flatten(-2)


class Stored(nn.Module):
    """Keys of earlier calls, written in place."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(12, n), persistent=False)
        self.key = nn.Linear(n, n)

    def forward(self, x):
        keys = self.key(x)
        with torch.no_grad():
            self.cache[: x.shape[1]] = keys.mean(0)
        return keys + (x @ self.cache.T.clone()).softmax(-1) @ self.cache.clone()


class Windows(nn.Module):
    def forward(self, x):
        return F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1)


class Einsum(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-0.5, 0.5, n * n).view(n, n))

    def forward(self, x):
        return torch.einsum("btn,nm->btm", x, self.w) + torch.einsum("btn,bsn->bts", x, x).softmax(-1) @ x


class Biased(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.5, 0.25]))

    def forward(self, x):
        b, t, n = x.shape
        q = x.view(b, t, 2, n // 2).transpose(1, 2)
        apart = (torch.arange(t)[None] - torch.arange(t)[:, None]).abs()
        bias = -self.slope[:, None, None] * apart
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=bias.to(q.dtype).expand(b, 2, t, t))
        return y.transpose(1, 2).flatten(2)


class Running(nn.Module):
    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


class Net(nn.Module):
    """Layers one after the other, and what is made of the end: a value, several that share memory, a dict, or a loss."""

    def __init__(self, layers: list[nn.Module], end: str, table: nn.Module | None) -> None:
        super().__init__()
        self.table, self.layers, self.end = table, nn.ModuleList(layers), end

    def forward(self, x, target=None):
        if self.end == "written":
            x.mul_(0.5)
        y = x if self.table is None else self.table(x)
        for layer in self.layers:
            if isinstance(layer, nn.Bilinear):
                y = layer(y, y)
            else:
                y = layer(y, y, y) if isinstance(layer, nn.MultiheadAttention) else layer(y)
        return ENDS[self.end](x, y)


ENDS: dict[str, Callable[..., Any]] = {
    "value": lambda x, y: y,
    "loss": lambda x, y: y.pow(2).mean(),
    "views": lambda x, y: (y, y[..., :1], y.flatten()),
    "dict": lambda x, y: {"y": y, "mean": y.mean(), "n": y.shape[0]},
    "input": lambda x, y: (y, x),
    "view of input": lambda x, y: (x[:1], y * 2),
    "twice": lambda x, y: [y, y],
    "detached": lambda x, y: (y, y.detach(), y.argmax(-1)),
    "written": lambda x, y: (y.sum(0), x),
    "transposed": lambda x, y: y.transpose(0, -1),
}
