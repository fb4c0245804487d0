"""Where formulas lose digits or overflow: large offsets, long rows, extreme and special values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kiln.base import options
from tests.expand.sweep import Program, as_accurate, expanded

SPECIAL = [0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 0.5, -0.5, 20.0, -20.0, 88.0, -88.0, 120.0, -120.0, 1e-8, -1e-8, 1e4, -1e4,
           float("inf"), float("-inf"), float("nan")]  # fmt: skip

ELEMENTWISE: dict[str, Any] = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.5),
    "leaky_relu": F.leaky_relu,
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 0.5, 20.0),
    "logsigmoid": F.logsigmoid,
    "relu6": F.relu6,
    "tanhshrink": F.tanhshrink,
    "softsign": F.softsign,
    "logit": lambda x: torch.logit(x, 1e-3),
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
    "sinc": torch.sinc,
    "nan_to_num": torch.nan_to_num,
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.3), reduction="none"),
    "smooth l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=3.0),
    "pow": lambda x: x**3 + x**2 + x**-1,
}

ROWS: dict[str, Any] = {
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[1],)),
    "group_norm": lambda x: F.group_norm(x[None], 4),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "rms_norm": lambda x: F.rms_norm(x, (x.shape[1],)),
    "softmax": lambda x: F.softmax(x, 1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "logsumexp": lambda x: x.logsumexp(1),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std(0),
    "mean": lambda x: x.mean(1),
    "norm": lambda x: x.norm(dim=1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0])),
    "mse": lambda x: F.mse_loss(x, x.flip(0).detach()),
}


def compare(function: Any, x: torch.Tensor) -> None:
    program = Program(function, (x.requires_grad_(),))
    eager = program.eager()
    exact = program.cast(torch.float64).eager()
    with options.config.patch(strict=True):
        as_accurate(program.run(expanded(program.graph(), "prims")), eager, exact)


BY_VECTORS = {"elu", "selu", "celu", "hardswish", "hardtanh", "softshrink", "hardshrink", "relu6"}  # whose gradients at NaN are those of eager's vectors, not of its leftovers


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_special_values(name: str) -> None:
    for value in SPECIAL:
        compare(ELEMENTWISE[name], torch.tensor([value, 0.25]).repeat(64 if name in BY_VECTORS else 1))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("name", ROWS)
def test_long_rows(name: str, offset: float) -> None:
    torch.manual_seed(0)
    compare(ROWS[name], torch.randn(8, 2000) * 3 + offset)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "cross_entropy"])
def test_rows_of_extreme_values(name: str) -> None:
    infinite = float("inf")
    compare(ROWS[name], torch.tensor([[1e30, -1e30, 3.0], [-infinite, 2.0, -infinite], [88.0, 89.0, -104.0]]))
    compare(ROWS[name], torch.full((3, 3), -infinite))
