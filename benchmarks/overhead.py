"""What a call of a compiled three-op function costs over eager, beside torch.compile(backend="eager").

python benchmarks/overhead.py
"""

from __future__ import annotations

import torch
from common import interleaved, verdict

import kiln


def three_ops(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(a + b) * 2.0


def main() -> None:
    torch.set_num_threads(1)
    a, b = torch.randn(64), torch.randn(64)
    ours = kiln.compile(three_ops, backend="eager", fullgraph=True)
    theirs = torch.compile(three_ops, backend="eager", fullgraph=True)
    seconds = interleaved(
        {
            "eager": lambda: three_ops(a, b),
            "kiln": lambda: ours(a, b),
            "torch.compile": lambda: theirs(a, b),
        }
    )
    eager = seconds["eager"]
    for name, value in seconds.items():
        print(f"{name:16}{value * 1e6:8.2f} µs{(value - eager) * 1e6:+8.2f} µs")
    print(
        verdict(
            "overhead / torch.compile's",
            (seconds["kiln"] - eager) / (seconds["torch.compile"] - eager),
            1 / 3,
        )
    )


if __name__ == "__main__":
    main()
