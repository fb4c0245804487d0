"""Training steps at each level: eager's loss, gradients and running statistics."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln import ahead
from kiln.base import options
from kiln.base.graph import CONSTANT
from kiln.differentiate.trace import trace
from kiln.expand.expand import expand
from kiln.ops.levels import CORE, KERNELS, PRIMITIVES, name_of


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8)
        self.last = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.hardswish(self.groups(self.second(x))) + x
        return self.last(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, activation="gelu", batch_first=True)
        self.table, self.layers = nn.Embedding(50, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(16, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        return self.last(self.layers(self.table(x), mask=hidden))


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cell(x)[0][:, -1])


MODELS = {
    "vision": (Vision, lambda: (torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,)))),
    "text": (Text, lambda: (torch.randint(0, 50, (2, 7)), torch.randint(0, 50, (14,)))),
    "sequence": (Sequence, lambda: (torch.randn(3, 4, 8), torch.randint(0, 5, (3,)))),
}
ADMITTED = {"core": CORE, "prims": PRIMITIVES | KERNELS}


def step(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return F.cross_entropy(out.view(-1, out.shape[-1]), target)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("level", ["core", "prims"])
@pytest.mark.parametrize("name", MODELS)
def test_step(name: str, level: str, training: bool) -> None:
    foreign: list[str] = []

    def backend(module: Any, examples: list[Any]) -> Any:
        for node in expand(trace(module, list(examples)).graph, level).nodes:
            if node.op is not CONSTANT and node.op is not operator.getitem and name_of(node.op) not in ADMITTED[level]:
                foreign.append(str(node.op))
        return ahead.compiled(module, examples, ahead.runner, ahead.runner, ahead.runner, level=level)

    torch.manual_seed(0)
    kind, data = MODELS[name]
    model = kind().train(training)
    x, target = data()
    other = copy.deepcopy(model)
    with options.config.patch(strict=True):
        found = kiln.compile(step, backend=backend, fullgraph=True)(other, x, target)
        found.backward()
    wanted = step(model, x, target)
    wanted.backward()
    assert foreign == []
    torch.testing.assert_close(found, wanted)
    for a, b in zip(other.parameters(), model.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    for a, b in zip(other.buffers(), model.buffers()):
        torch.testing.assert_close(a, b)
