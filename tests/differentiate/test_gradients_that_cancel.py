"""Gradients of a normalisation under a sum: zero but for rounding, and the rounding is eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kiln


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(x) + x


MODELS = {
    "batch": nn.BatchNorm2d(4), "layer": nn.LayerNorm(6), "group": nn.GroupNorm(2, 4), "instance": nn.InstanceNorm2d(4, affine=True),
    "convolution": nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), "beside": Beside(),
}  # fmt: skip


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
@pytest.mark.parametrize("name", MODELS)
def test_the_rounding_is_eagers(name, reduce):
    torch.manual_seed(0)
    x, found = torch.randn(3, 4, 6, 6), []
    for backend in (None, "aot_eager"):
        model, given = copy.deepcopy(MODELS[name]), x.clone().requires_grad_()
        run = model if backend is None else kiln.compile(model, backend=backend, fullgraph=True)
        reduce(run(given)).backward()
        found.append([given.grad, *(p.grad for p in model.parameters())])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
