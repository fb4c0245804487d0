"""Few blocks of a graph: forward and backward of many layers by the plans of four or five of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import kiln
from kiln.base.errors import Uneven
from kiln.generate import cpu
from kiln.launch import layers, program
from tests.launch.test_layers import Plain, Random, noting


class Wide(Plain):
    """The bias of its norm is kept for the backward, which does not read it."""

    def __init__(self, width=8):
        super().__init__(width)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x, table):
        return x + self.out(torch.relu(super().forward(self.norm(x), table)))


class Stack(nn.Module):
    """Layers of which the results may all be given; `tied` has the first weight used behind them, too."""

    def __init__(self, blocks, table=None, tied=False, shows=False):
        super().__init__()
        self.blocks, self.first = nn.ModuleList(blocks), nn.Linear(8, 8)
        self.register_parameter("table", table)
        self.tied, self.shows = tied, shows
        self.register_buffer("fixed", torch.rand(1, 8))

    def forward(self, x):
        x, seen = self.first(x), []
        for block in self.blocks:
            x = block(x, self.fixed if self.table is None else self.table)
            seen.append(x.mean(-1))
        if self.tied:
            x = x @ self.first.weight
        return (x, *seen) if self.shows else (x,)


@pytest.fixture
def made(monkeypatch):
    """What each graph that was shortened became: its plan, or None where the steps do not repeat."""
    return noting(monkeypatch, program, "begin_few", lambda whole: whole and whole.made)


def compare(model, compiled, x):
    """Results and gradients of a step; each result has weights of its own in the loss."""
    seen = []
    for function in (model, compiled):
        model.zero_grad()
        given = x.clone().requires_grad_()
        out = function(given)
        torch.manual_seed(1)
        sum((one * torch.randn_like(one)).sum() for one in out).backward()
        seen.append((out, given.grad, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(seen[1], seen[0], atol=1e-5, rtol=1e-4, equal_nan=True)


def trained(model, x=None):
    compiled = kiln.compile(model, fullgraph=True)
    for _ in range(2):
        compare(model, compiled, torch.randn(2, 6, 8) if x is None else x)


@pytest.mark.parametrize("count", [8, 9, 14])
@pytest.mark.parametrize("shows", [False, True])
def test_forward_and_backward_of_few_layers_stand_for_many(made, count, shows):
    trained(Stack([Wide() for _ in range(count)], shows=shows))
    assert made[0] is not None and (shows or len(made) == 2 and made[1] is not None)


def test_each_input_is_let_go_of_once_and_each_gradient_has_a_slot_of_its_own(made):
    trained(Stack([Wide() for _ in range(12)]))
    forward, backward = made
    freed = Counter(slot for step in backward.steps for slot in step[-1])
    kept = {slot for _, slot in backward.outputs}
    assert set(freed.values()) == {1} and kept.isdisjoint(freed)
    assert freed.keys() | kept >= set(range(backward.inputs))
    assert len(kept) == len(backward.outputs)
    given = [slot for kind, slot in forward.outputs]
    assert max(given) < len(forward.names) and len(forward.names) > forward.inputs


def test_a_value_may_pass_the_layers_by(made):
    trained(Stack([Wide() for _ in range(9)], tied=True))
    assert len(made) == 2 and None not in made


def test_a_sum_over_all_layers_is_left_whole(made):
    trained(Stack([Wide() for _ in range(9)], table=nn.Parameter(torch.rand(1, 8))))
    assert len(made) == 1  # the forward


class Attending(nn.Module):
    """A layer of attention over heads, whose gradient is one kernel that holds several values for itself."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x):
        q, k, v = (y.view(2, 128, 8, 32).transpose(1, 2) for y in self.into(x).chunk(3, -1))
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_layers_with_attention_as_loops_have_one_kernel(made, monkeypatch):
    monkeypatch.setattr(cpu.Host, "is_called_slowly", True)
    model = nn.Sequential(*[Attending() for _ in range(12)])
    x = torch.randn(2, 128, 256)
    compiled = kiln.compile(model, fullgraph=True)
    for _ in range(2):
        expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        found = torch.autograd.grad(compiled(x).square().sum(), [*model.parameters()])
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert len(made) == 2 and None not in made


def test_one_layer_unlike_the_others(made):
    blocks = [Wide() for _ in range(12)]
    blocks[7].norm.eps = 0.5
    blocks[3].gain = blocks[2].gain
    trained(Stack(blocks))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_weights_change(made, kind):
    model = Stack([Wide() for _ in range(10)]).to(kind)
    compiled, x = kiln.compile(model, fullgraph=True), torch.randn(2, 6, 8, dtype=kind)
    for number in (0, 1, 2, 5, 8, 9):
        compare(model, compiled, x)
        with torch.no_grad():
            for parameter in model.blocks[number].parameters():
                parameter.mul_(1.5).add_(0.1)
    compare(model, compiled, x)
    assert len(made) == 2


def test_random_numbers_are_drawn_for_each_layer(made):
    class Dropping(Wide):
        def forward(self, x, table):
            return super().forward(nn.functional.dropout(x, 0.5), table)

    model = Stack([Dropping() for _ in range(10)])
    compiled, x = kiln.compile(model, fullgraph=True), torch.randn(2, 6, 8)
    for seed in range(2):
        found = []
        for function in (model, compiled):
            model.zero_grad()
            torch.manual_seed(seed)
            function(x)[0].square().sum().backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
        torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


def test_a_plan_from_disk_serves_any_number_of_layers(made, monkeypatch):
    files, fused = {}, []
    fuse = program.fuse
    store = type("Store", (), {"get": lambda self, key: files.get(key), "put": lambda self, k, data: files.update({k: data})})()
    monkeypatch.setattr(program, "disk", lambda limit: store)
    monkeypatch.setattr(program, "fuse", lambda *given: fused.append(given) or fuse(*given))
    trained(Stack([Wide() for _ in range(12)]))
    before = len(fused)
    trained(Stack([Wide() for _ in range(12)]))
    assert before and len(fused) == before and len(made) == 4


def test_steps_that_make_what_is_given_elsewhere_are_refused(made, monkeypatch):
    seen, real = [], layers.repeated
    monkeypatch.setattr("kiln.launch.few.repeated", lambda *args: seen.append(args) or real(*args))
    trained(Stack([Wide() for _ in range(10)], shows=True))
    plan, owns, count, inputs, outputs = seen[0]
    own = next(output for output in outputs if output.layer > 0 and plan.outputs[output.places[0]][1] >= plan.inputs)
    mixed = layers.Output((own.places[1], own.places[0], *own.places[2:]), own.layer)
    with pytest.raises(Uneven):
        real(plan, owns, count, inputs, [mixed])


class Carrying(nn.Module):
    def __init__(self, seed, count):
        super().__init__()
        self.blocks = nn.ModuleList([Random(seed) for _ in range(count)])
        self.first, self.shows = nn.Linear(12, 12), bool(seed % 2)
        self.register_buffer("table", torch.rand(12))

    def forward(self, x):
        x, y, seen = self.first(x), x * 2, []
        for block in self.blocks:
            x, y = block(x, y, self.table)
            seen.append(x.mean(1))
        return x, y.sum(1), *(seen if self.shows else ())


@pytest.mark.parametrize("seed", range(8))
def test_random_layers(made, seed):
    torch.manual_seed(seed)
    model = Carrying(seed, 8 + seed % 5).double().eval()
    trained(model, torch.randn(2, 4, 12, dtype=torch.float64))
