"""Sources as text."""

import torch

from kiln.base.source import Arg, Item


def test_tensors_that_are_keys_are_not_printed(monkeypatch):
    """An optimizer's state has its parameters for keys."""
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda self, **_: 1 / 0)
    assert str(Item(Arg(0, "state"), torch.nn.Parameter(torch.ones(3)))).endswith("[Parameter]")
    assert str(Item(Arg(0, "state"), "step")).endswith("['step']")
