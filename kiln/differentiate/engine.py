"""Autograd's engine, called without the layer above it that imports PyTorch's symbolic shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kiln.ops.running_products import as_a_whole


def gradients(
    outs: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any], create_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """What `torch.autograd.grad` gives for tangents of the types of `outs`; None for inputs not reached."""
    run = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined]
    given, history = (tuple(outs), tuple(tangents)), (create_graph, create_graph)
    with as_a_whole():
        found: tuple[torch.Tensor | None, ...] = run(
            *given, *history, tuple(inputs), True, accumulate_grad=False
        )
    return found
