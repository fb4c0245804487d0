"""Programs for GPUs: each a function, and how to make its inputs on a device in a dtype."""

import torch
from torch.nn import functional as F


def normal(*shape):
    return lambda device, dtype: torch.randn(shape, device=device).to(dtype)


def positive(*shape):
    return lambda device, dtype: (torch.rand(shape, device=device) + 0.1).to(dtype)


def whole(high, *shape, low=0):
    return lambda device, dtype: torch.randint(low, high, shape, device=device)


def narrow(kind, *shape):
    return lambda device, dtype: torch.randint(0, 100, shape, device=device).to(kind)


def shifted(*shape):
    """A tensor that does not start at a multiple of 16 bytes."""
    return lambda device, dtype: torch.randn((*shape[:-1], shape[-1] + 1), device=device).to(dtype)[..., 1:]


def flipped(*shape):
    return lambda device, dtype: torch.randn(shape, device=device).to(dtype).t()


def gather(x, i):
    return x[i] * 2


def rotary(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def rms_norm(x, w):
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * w


def statistics(x):
    return x.mean(-1), x.var(-1), x.amax(-1), x.amin(-1)


def softmax_gradient(grad, x):
    return torch.ops.aten._softmax_backward_data(grad, x.softmax(-1), -1, x.dtype)


def norm_gradients(grad, x, mean, scale, w):
    kind = torch.promote_types(x.dtype, torch.float32)
    mean, scale = mean.to(kind), scale.to(kind)
    return torch.ops.aten.native_layer_norm_backward(grad, x, [x.shape[-1]], mean, scale, w, w, [True] * 3)


POINTWISE = {
    "add": (lambda a, b: a + b * 2, normal(64, 96), normal(64, 96)),
    "broadcast": (lambda a, b, c: a * b + c, normal(33, 96), normal(96), normal(33, 1)),
    "odd": (lambda a: a * a + 1, normal(1001)),
    "odd rows": (lambda a, b: a.sigmoid() * b, normal(13, 77), normal(77)),
    "scalar": (lambda a: a * 2 + 1, normal()),
    "shifted": (lambda a, b: a + b, shifted(40, 64), normal(40, 64)),
    "shifted whole": (lambda a: a * 3, lambda d, t: torch.randn(1025, device=d).to(t)[1:]),
    "transposed": (lambda a, b: a + b, flipped(64, 48), normal(48, 64)),
    "copy of transposed": (lambda a: (a * 2).t().contiguous(), normal(70, 90)),
    "silu": (lambda a, b: F.silu(a) * b, normal(64, 256), normal(64, 256)),
    "gelu": (lambda a: F.gelu(a), normal(64, 256)),
    "gelu tanh": (lambda a: F.gelu(a, approximate="tanh"), normal(64, 256)),
    "functions": (lambda a: a.exp() + a.tanh() + a.sin() * a.cos() + a.erf(), normal(64, 256)),
    "logs": (lambda a: a.log() + a.log1p() + a.sqrt() + a.rsqrt() + a.reciprocal(), positive(64, 256)),
    "powers": (lambda a: a**3 + a**0.5 + torch.pow(a, 1.7), positive(64, 256)),
    "choices": (lambda a, b: torch.where(a > b, a.clamp(-1, 1), b.relu()), normal(64, 96), normal(64, 96)),
    "remainders": (lambda a: torch.remainder(a, 0.7) + torch.fmod(a, 0.3) + a.floor(), normal(64, 96)),
    "joined": (lambda a, b: torch.cat((a, b * 2), 1), normal(16, 24), normal(16, 40)),
    "padded": (lambda a: F.pad(a, (3, 5)) + 1, normal(16, 24)),
    "sliced": (lambda a: a[:, 3:67] + a[:, 64:], normal(16, 128)),
    "gathered": (gather, normal(50, 64), whole(50, 200, low=-50)),
    "embedded": (lambda i, w: F.embedding(i, w) + 1, whole(100, 8, 33), normal(100, 64)),
    "rotary": (rotary, normal(2, 4, 16, 64), normal(16, 64), normal(16, 64)),
    "halved": (lambda a: a.to(torch.bfloat16) * 2, normal(64, 96)),
    "one hot": (lambda i: F.one_hot(i, 100).float(), whole(100, 33)),
    "triangle": (lambda a: a.tril() + torch.arange(48, device=a.device), normal(48, 48)),
}

INTEGERS = {
    "int64": (lambda a, b: a * 3 + b // 2 - a % 7, whole(1000, 999), whole(1000, 999)),
    "int32": (lambda a: (a * a) >> 2, narrow(torch.int32, 64, 96)),
    "int16": (lambda a: a * a + 1, narrow(torch.int16, 64, 96)),
    "int8": (lambda a: a + a, narrow(torch.int8, 64, 96)),
    "uint8": (lambda a: a * 3, narrow(torch.uint8, 64, 96)),
    "bool": (lambda a, b: ~(a > 50) & (b < 30), whole(100, 64, 96), whole(100, 64, 96)),
    "mixed": (lambda a, b: a * 0.5 + b, whole(100, 64, 96), normal(64, 96)),
    "mean of nothing": (lambda a: a.mean(0).long(), normal(0, 64)),
    "sum of ints": (lambda a: a.sum(-1), whole(1000, 64, 999)),
    "sum of bools": (lambda a: (a > 50).sum(0), whole(100, 640, 33)),
    "any": (lambda a: ((a > 98).any(-1), (a < 98).all(0)), whole(100, 64, 96)),
    "argmax": (lambda a: (a.argmax(-1), a.argmin(0), a.argmax()), whole(10, 64, 96)),
}

def recurrence(x, factor):
    """States of a linear model, and what is read of them."""
    states = torch.ops.kiln.recurrence(x * 2, 1, factor)
    return states + 1, states.sum(-1)


def recurrence_backwards(x, factor):
    return torch.ops.kiln.recurrence(x.flip(0), 0, factor.roll(-1, 0).flip(0)).flip(0)


FOLDS = {
    "recurrence": (recurrence, normal(3, 37, 16), positive(3, 37, 16)),
    "recurrence of many columns": (recurrence_backwards, normal(50, 700), positive(50, 700)),
    "recurrence along rows": (lambda x, f: torch.ops.kiln.recurrence(x, 1, f), normal(5, 7), positive(5, 7)),
    **{f"sum of {n}": (lambda a: a.sum(-1), normal(37, n)) for n in (1, 3, 8, 33, 64, 1000, 4096, 50257)},
    **{
        f"softmax of {n}": (lambda a: a.softmax(-1), normal(37, n))
        for n in (2, 7, 64, 1000, 1024, 4096, 50304)
    },
    **{
        f"softmax of {rows} rows of {n}": (lambda a: a.softmax(-1), normal(rows, n))
        for rows, n in ((130, 50304), (166, 50304), (65, 128256), (140, 128256), (300, 20000))
    },
    "log softmax of longer rows": (lambda a: a.log_softmax(-1), normal(130, 128256)),
    "norm of long odd rows": (lambda a: F.layer_norm(a, (20001,)), normal(132, 20001)),
    "norm of long rows": (
        lambda a, w, b: F.layer_norm(a, (32768,), w, b),
        *(normal(20, 32768), normal(32768), normal(32768)),
    ),
    **{
        f"losses of {rows} rows of {n}": (
            lambda a, i: F.cross_entropy(a.float(), i, reduction="none"),
            *(normal(rows, n), whole(n, rows)),
        )
        for rows, n in ((150, 50304), (40, 128256), (65, 128256), (400, 20000))
    },
    **{
        f"mean loss of {rows} rows of {n}": (
            lambda a, i: F.cross_entropy(a.float(), i),
            *(normal(rows, n), whole(n, rows)),
        )
        for rows, n in ((167, 50304), (40, 128256), (400, 20000), (140, 24576))
    },
    "spread of few long rows": (lambda a: a.var(-1), normal(40, 128256)),
    "gradient of softmax": (softmax_gradient, normal(140, 50304), normal(140, 50304)),
    **{
        f"gradients of norms over {n}": (
            norm_gradients,
            *(normal(rows, n), normal(rows, n), normal(rows, 1), positive(rows, 1), normal(n)),
        )
        for rows, n in ((1100, 4096), (15000, 300), (6000, 768), (6000, 777), (10922, 768), (133, 4096), (1700, 3072), (1200, 8192))
    },
    "sum of all": (lambda a: a.sum(), normal(1234, 567)),
    "mean of all": (lambda a: a.mean(), normal(4096, 1024)),
    "columns": (lambda a: a.sum(0), normal(1000, 768)),
    "odd columns": (lambda a: a.sum(0), normal(1111, 77)),
    "few columns": (lambda a: a.sum(0), normal(100000, 3)),
    "middle": (lambda a: a.sum(1), normal(12, 300, 40)),
    "outer and inner": (lambda a: a.sum((0, 2)), normal(12, 30, 40)),
    "outer and inner, large": (lambda a: a.mean((0, 2, 3)), normal(16, 32, 56, 56)),
    "softmax of columns": (lambda a: a.softmax(0), normal(300, 96)),
    "log softmax": (lambda a: a.log_softmax(-1), normal(64, 1000)),
    "statistics": (statistics, normal(64, 777)),
    "product": (lambda a: a.prod(-1), positive(64, 20)),
    "arg": (lambda a: (a.argmax(-1), a.argmin(0)), normal(64, 777)),
    "layer norm": (lambda a, w, b: F.layer_norm(a, (768,), w, b), normal(100, 768), normal(768), normal(768)),
    "rms norm": (rms_norm, normal(100, 4096), normal(4096)),
    "group norm": (lambda a: F.group_norm(a, 4), normal(8, 16, 14, 14)),
    "cross entropy": (lambda a, i: F.cross_entropy(a.float(), i), normal(200, 5000), whole(5000, 200)),
    "cumulative": (lambda a: a.cumsum(-1) + 1, normal(20, 100)),
    "norm": (lambda a: a / a.norm(dim=-1, keepdim=True), normal(100, 64)),
}
