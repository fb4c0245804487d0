"""Programs of random shape arithmetic, over random sizes: compiled results are those of eager, errors too."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import kiln
from kiln.base import records

STEPS = """
y = y.reshape(y.shape[0] * y.shape[1])[: y.shape[0] * y.shape[1] // m * m].view(-1, m)
y = torch.cat([y, y[: y.shape[0] // 2]])
y = y[1:] if y.shape[0] > 2 else y * 2
y = y.t().contiguous().t()
y = y + torch.arange(y.shape[0])[:, None]
y = y * n + m
y = y[:, : max(1, m // 2)].repeat(1, 2)[:, :m] if m > 1 else y
m = y.shape[1]
n = min(n + 1, y.shape[0])
y = F.pad(y, (0, n % 3)); m = y.shape[1]
y = y if n % 2 else y.flip(0)
y = y.unsqueeze(1).expand(-1, 2, -1).reshape(-1, m)
y = y.sum(0, keepdim=True).expand(n, -1)
y = y.roll(n % 3, 0)
y = y.chunk(2, 0)[0]
y = (y.unsqueeze(0) * torch.ones(3, 1, 1)).flatten(0, 1)
y = torch.stack([y, y], 1).view(-1, y.shape[1])
y = y.as_strided((y.shape[0], 1), (y.stride(0), 1)).expand(-1, m)
y = torch.where(y > 0, y, float(n))
n = int(n * 1.5)
n = round(n / 3) + 1
y = y.new_full((n, m), n) + y.sum()
y = y.narrow(0, 0, max(1, y.shape[0] - 1))
y = y.cumsum(0)
y = y.split(max(1, y.shape[0] // 2))[0]
y = y.transpose(0, 1).reshape(m, -1).t()
y = torch.ones(y.shape[0], y.shape[0]) @ y
y = y[::2]
y = y[-1:].expand(3, m)
""".strip().splitlines()


def program(rng: random.Random) -> tuple[Any, str]:
    lines = ["n, m, y = x.shape[0], x.shape[1], x", *rng.choices(STEPS, k=rng.randrange(3, 9)), "return y, n, m, y.shape"]
    text = "def f(x):\n  " + "\n  ".join(lines)
    scope = {"torch": torch, "F": torch.nn.functional}
    exec(text, scope)
    return scope["f"], text


def outcome(f: Any, x: torch.Tensor) -> Any:
    try:
        return f(x)
    except Exception as error:
        return type(error), str(error)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a[0], type) or isinstance(b[0], type):
        return bool(a == b)
    same_types = all(type(p) is type(q) for p, q in zip(a, b, strict=True))
    return torch.equal(a[0], b[0]) and a[1:] == b[1:] and same_types


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(seed, dynamic):
    rng = random.Random(seed)
    for _ in range(2):
        f, text = program(rng)
        compiled = kiln.compile(f, backend="eager", dynamic=dynamic)
        with records.collect() as seen:
            for _ in range(8):
                x = torch.randn(rng.randrange(1, 9), rng.randrange(1, 9))
                x = x.t() if rng.random() < 0.2 else x
                expected, got = outcome(f, x), outcome(compiled, x)
                assert alike(expected, got), f"{tuple(x.shape)}: {expected} became {got}\n{text}"
        assert seen.graphs and not seen.fallbacks, seen.fallbacks
