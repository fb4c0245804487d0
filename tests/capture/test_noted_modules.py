"""Torch's own compiler, used in the same process, has new modules noted: capture is none the worse for it."""

import weakref

import torch
from torch import nn

import kiln

SPACE = {"__name__": "torch._dynamo.mutation_guard", "weakref": weakref, "noted": {}}
exec("def tag(made):\n    noted[id(made)] = weakref.ref(made, lambda ref: noted.pop(id(made), None))", SPACE)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        return x


def test_modules_made_in_a_call_are_noted_as_before(monkeypatch):
    before = nn.Module.__init__

    def patched_init(self, *args, **kwargs):
        before(self, *args, **kwargs)
        SPACE["tag"](self)

    monkeypatch.setattr(nn.Module, "__init__", patched_init)
    net, x = Stack(), torch.randn(2, 4)
    compiled = kiln.compile(net, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(x), net(x))
