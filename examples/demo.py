"""Compile a small language model, and a function with a branch on data, and show what Kiln did with them.

python examples/demo.py            # beside eager
python examples/demo.py --torch    # beside torch.compile(backend="eager") as well
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import kiln


class Block(nn.Module):
    """Attention and a gated feed-forward part, each around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        y = self.before_mlp(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """Embeddings, blocks and a head."""

    def __init__(self, words: int = 512, width: int = 64, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x), "last": x[:, -1]}


def branch(a: Tensor, b: Tensor) -> Tensor:
    """A branch on data: the graph ends at the condition and goes on in either arm."""
    x = (a + b) / 2.0
    if x.sum() < 0:
        return x * -1.0
    return x


def median_microseconds(call: Callable[[], object], rounds: int = 50) -> float:
    """The median time of one call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def race(model: nn.Module, tokens: Tensor, with_torch: bool) -> None:
    """First call and steady time of each way to run the model, results compared with eager's."""
    ways: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {"eager": model}
    ways["kiln"] = kiln.compile(model)
    if with_torch:
        ways["torch.compile(backend='eager')"] = torch.compile(model, backend="eager")
    expected = model(tokens)
    print(f"{'':32}{'first call':>14}{'steady call':>14}")
    for name, way in ways.items():
        start = time.perf_counter()
        result = way(tokens)
        first = time.perf_counter() - start
        torch.testing.assert_close(result, expected)
        steady = median_microseconds(lambda way=way: way(tokens))  # type: ignore[misc]
        print(f"{name:32}{first * 1e3:>11.1f} ms{steady:>11.0f} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile a small model and show what Kiln did with it.")
    parser.add_argument("--torch", action="store_true", help="time torch.compile(backend='eager') too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, tokens = LanguageModel().eval(), torch.randint(0, 512, (1, 16))

    with torch.no_grad():
        told = kiln.explain(model)(tokens)
        size = sum(p.numel() for p in model.parameters())
        print(f"A language model with {size:,} parameters: {told.summary()}\n")
        race(model, tokens, arguments.torch)

    print("\nA branch on data, explained:\n")
    print(kiln.explain(branch)(-torch.ones(3), torch.zeros(3)))


if __name__ == "__main__":
    main()
