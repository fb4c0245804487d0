"""Guards in words: each kind has a sentence, and they read as such."""

import pytest
import torch

import kiln
from kiln.base.records import Records
from kiln.check import guards, shapes, torch_guards
from kiln.check.guards import Guard
from kiln.check.values import show


def test_every_kind_has_a_sentence():
    found = [kind for module in (guards, shapes, torch_guards) for kind in vars(module).values()]
    own = {kind for kind in found if isinstance(kind, type) and issubclass(kind, Guard)} - {Guard}
    assert [kind for kind in own if "__str__" not in vars(kind)] == [guards.Relation]


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.scale, self.names = 2.0, ["a", "b"]

    def forward(self, x, n):
        return x * self.weight * self.scale * len(self.names) + n


@pytest.mark.parametrize(
    "sentence",
    [
        "x is a float32 tensor of shape (4, 3) on cpu, strides (3, 1)",
        "self.scale is 2.0",
        "self.names has 2 elements",
        "n is 5",
        "self.weight is the same Parameter as before",
        "torch's modes and defaults stay as they were",
    ],
)
def test_sentences(sentence):
    model = Scaled()

    def run(self, x, n):
        return self.forward(x, n)

    with Records() as records:
        x = torch.ones(4, 3)
        torch.testing.assert_close(kiln.compile(run, backend="eager")(model, x, 5), model(x, 5))
    assert sentence in [text for text, _ in records.graphs[0].guarded]


def test_values_are_shown_without_printing_what_is_not_shown(monkeypatch):
    """An optimizer's state has hundreds of tensors, each of which would be fetched from a GPU element by element."""
    printed = []
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda self, **_: printed.append(self) or "tensor")
    state = {
        torch.nn.Parameter(torch.ones(100)): {"step": torch.tensor(1.0), "mean": torch.ones(50, 2)}
        for _ in range(300)
    }
    text = show(state)
    assert text.startswith("{a tensor of shape (100,): {'step': tensor, 'mean': ") and len(text) == 60
    assert len(printed) <= 21 and all(one.numel() == 1 for one in printed)
    assert show([torch.ones(9)]) == "[a tensor of shape (9,)]" and show((1, "a", None)) == "(1, 'a', None)"
