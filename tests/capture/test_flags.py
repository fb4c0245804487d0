"""Short buffers of modules that decide what a program does: the graph is for what they hold, which is guarded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kiln
from tests.support import one_graph, t


class Once(nn.Module):
    """Sets its scale by the first input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor(0, dtype=torch.uint8))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if self.ready.item() == 0:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 1))
                self.ready.fill_(1)
        return x * self.scale


class Written(nn.Module):
    """Writes to its flag in many ways before it reads it."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("on", torch.tensor([False, True]))
        self.view = self.on[:1]
        self.write = write

    def forward(self, x):
        self.write(self)
        return x * 2 if self.on[0] else x * 3


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in (("stride", 1), ("kernel", 3)):
            self.register_buffer(name, torch.tensor(value))
        self.fold = nn.Conv1d(4, 4, 3)

    def forward(self, x):
        both = self.kernel - self.stride
        left = both // 2
        if x.shape[-1] <= max(left, both - left):
            return x
        return self.fold(nn.functional.pad(x, (int(left), both - left)))


class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("on", torch.tensor([1], dtype=torch.uint8))

    def forward(self, x):
        return (x * 8).round() / 8 if self.on[0] == 1 else x


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("which", torch.tensor(1))
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        return self.layers[self.which](x)


def run(module, x, change=lambda module: None, calls=4, backend="eager"):
    """The numbers of graphs and breaks over calls like eager's, after the second of which something changes."""
    plain = copy.deepcopy(module)
    compiled = kiln.compile(module, backend=backend)
    with kiln.records() as seen:
        for call in range(calls):
            if call == 2:
                change(module), change(plain)
            torch.testing.assert_close(compiled(x), plain(x))
            for ours, theirs in zip(module.buffers(), plain.buffers(), strict=True):
                assert ours.equal(theirs)
    return len(seen.graphs), len(seen.breaks), len(seen.fallbacks)


X = torch.linspace(-1, 1, 20).reshape(5, 4)


@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_flags_are_guarded(backend):
    assert run(Once(), X, backend=backend) == (2, 0, 0)
    assert run(Rounded(), X, lambda m: m.on.zero_(), backend=backend) == (2, 0, 0)
    assert run(Chosen(), X, lambda m: m.which.add_(1), backend=backend) == (2, 0, 0)
    assert run(Padded(), X.T[None], backend=backend) == (1, 0, 0)
    layers = nn.Sequential(*(Rounded() for _ in range(8)))
    assert run(layers, X, lambda m: m[6].on.zero_(), backend=backend) == (2, 0, 0)


WRITES = {
    "itself": lambda m: m.on.fill_(True),
    "data": lambda m: m.on.data.fill_(True),
    "detached": lambda m: m.on.detach().fill_(True),
    "item": lambda m: m.on.__setitem__(0, True),
    "view": lambda m: m.view.fill_(True),
    "view's data": lambda m: m.view.data.fill_(True),
    "new": lambda m: setattr(m, "on", ~m.on),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_flag_that_the_graph_writes_is_read_after_it(write):
    run(Written(write), X)


def over(module, values):
    compiled = kiln.compile(module, backend="eager")
    with kiln.records() as seen:
        for value in values:
            for buffer in module.buffers():
                buffer.fill_(value)
            torch.testing.assert_close(compiled(X), module(X))
    return len(seen.graphs), len(seen.breaks)


class Late(nn.Module):
    def __init__(self, *counts):
        super().__init__()
        for i, count in enumerate(counts):
            self.register_buffer(f"count{i}", torch.tensor(count))

    def forward(self, x):
        return x * 2 if sum(self.buffers()) > 5 else x


def test_a_buffer_may_vary_where_the_answer_does_not():
    assert over(Late(0), range(12)) == (2, 0)
    assert over(Late(0.0), range(12)) == (2, 0)
    assert over(Chosen(), [0, 1, 2, 0, 1, 2]) == (3, 0)


def test_buffers_that_always_vary_break():
    assert over(Late(0, 0), range(12)) == (2, 0)  # a branch that goes one way from then on
    graphs, breaks = over(Late(0, 0), [*range(12)] * 4)
    assert breaks == 1 and graphs <= 11


def test_blocks_that_share_a_graph_have_flags():
    blocks = [Rounded() for _ in range(3)]
    made = [kiln.compile(block, backend="eager") for block in blocks]
    with kiln.records() as seen:
        for _ in range(2):
            for block, compiled in zip(blocks, made, strict=True):
                assert compiled(X).equal(block(X))
            blocks[1].on.zero_()
    assert (len(seen.graphs), len(seen.breaks)) == (2, 0)


def test_what_a_gpu_is_does_not_end_a_graph():
    def f(x):
        try:
            major = torch.cuda.get_device_capability(0)[0]
        except (AssertionError, RuntimeError):  # none is here
            major = 0
        return x + major + torch.cuda.is_initialized()

    one_graph(f, t(3))
