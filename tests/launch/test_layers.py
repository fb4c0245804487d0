"""Layers in a plan: of many, four are compiled, and the steps of one are repeated for those between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln import compiler
from kiln.base.errors import Uneven
from kiln.launch import held, layers, program

WIDTH = 384  # of which weights are large enough to be packed


class Block(nn.Module):
    """Attention and products: weights that are packed, weights that are not, and a table that all share."""

    def __init__(self, width=WIDTH, eps=1e-5):
        super().__init__()
        self.norm, self.into = nn.LayerNorm(width, eps=eps), nn.Linear(width, 3 * width)
        self.out, self.gain = nn.Linear(width, width, bias=False), nn.Parameter(torch.rand(width))

    def forward(self, x, table):
        q, k, v = (self.into(self.norm(x)) + table).chunk(3, dim=-1)
        q, k, v = [part.unflatten(-1, (2, -1)).transpose(-2, -3) for part in (q, k, v)]
        y = F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
        return x + F.gelu(self.out(y)) * self.gain


class Plain(nn.Module):
    """Nothing that is packed or follows from weights alone."""

    def __init__(self, width=8):
        super().__init__()
        self.line, self.gain = nn.Linear(width, width), nn.Parameter(torch.rand(width))

    def forward(self, x, table):
        return x + (self.line(x).tanh() * self.gain).softmax(-1) + table[:, : x.shape[-1]]


class Model(nn.Module):
    def __init__(self, blocks, width=WIDTH):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 5)
        self.register_buffer("table", torch.rand(1, 3 * width))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, self.table)
        return self.last(x), x


def noting(monkeypatch, place, name, note):
    """What `note` says of each result of a function there; of None where the steps do not repeat."""
    found, real = [], getattr(place, name)

    def noted(*args):
        try:
            result = real(*args)
        except Uneven:
            found.append(note(None))
            raise
        found.append(note(result))
        return result

    monkeypatch.setattr(place, name, noted)
    kiln.reset()
    torch.manual_seed(0)
    return found


@pytest.fixture
def made(monkeypatch):
    """For each graph of layers whether those left out came from one of them."""
    return noting(monkeypatch, compiler, "compile_layers", lambda run: run is not None)


def compare(model, compiled, x):
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=3e-5, rtol=1e-4)


def inputs(rows=6, width=WIDTH):
    return torch.randn(2, rows, width)


@pytest.mark.parametrize("count", [7, 9, 13])
def test_the_steps_of_one_layer_stand_for_others(made, count):
    model = Model([Block() for _ in range(count)]).eval()
    compiled = kiln.compile(model, fullgraph=True)
    for _ in range(3):
        compare(model, compiled, inputs())
    assert made == [True]
    compare(model, compiled, inputs(9))
    compare(model, compiled, inputs(11))


def test_nothing_is_held(made):
    model = Model([Plain() for _ in range(9)], 8).eval()
    compiled = kiln.compile(model, fullgraph=True)
    for _ in range(2):
        compare(model, compiled, inputs(width=8))
    assert made == [True]


@pytest.mark.parametrize("kind", [Block, Plain])
def test_weights_change(made, kind):
    width = {Block: WIDTH, Plain: 8}[kind]
    model = Model([kind() for _ in range(9)], width).eval()
    compiled, x = kiln.compile(model, fullgraph=True), inputs(width=width)
    compare(model, compiled, x)
    for number in (0, 1, 2, 4, 7, 8):  # each of the compiled ones, and of those between
        with torch.no_grad():
            for parameter in model.blocks[number].parameters():
                parameter.mul_(1.25).add_(0.01)
        compare(model, compiled, x)
        for parameter in model.blocks[number].parameters():
            parameter.data = torch.randn_like(parameter) * 0.1
        compare(model, compiled, x)
    state = {name: value.flip(0) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    compare(model, compiled, x)
    assert made == [True]
    model.blocks[3].gain = nn.Parameter(torch.rand(width))  # another tensor: compiled anew
    compare(model, compiled, x)


class Counting(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x, table):
        self.seen += 0.5
        return super().forward(x, table) * self.seen


def blocks(case):
    """Layers of which one is unlike the others, or which are not told apart."""
    made = [Plain() for _ in range(9)]
    if case == "one twice":
        made[4] = made[5]
    elif case == "all one":
        made = made[:1] * 9
    elif case == "a shared weight":
        for block in made[2:]:
            block.gain = made[2].gain
    elif case == "two share a weight":
        made[4].gain = made[6].gain
    elif case == "a hook":
        made[4].register_forward_hook(lambda module, args, out: out * 2)
    elif case == "one of them another":
        made[5].forward = lambda x, table: x.sin()
    elif case == "written":
        made = [Counting() for _ in range(9)]
    elif case == "first apart":
        made[:2] = [nn.Bilinear(8, 24, 8), nn.Bilinear(8, 24, 8)]
        for block in made[:2]:
            block.forward = lambda x, table, own=block: x * own.bias + table[:, :8]
    return made


CASES = ("one twice", "all one", "a shared weight", "two share a weight", "a hook", "one of them another", "written",
         "first apart")  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_layers_that_are_not_all_alike(made, case):
    model = Model(blocks(case), 8).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    compiled = kiln.compile(model)
    for _ in range(2):
        x = inputs(width=8)
        with torch.no_grad():
            got, after = compiled(x), {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state)
            torch.testing.assert_close(got, model(x))
        torch.testing.assert_close(after, dict(model.state_dict()))
        model.load_state_dict(state)


def test_another_epsilon_in_the_middle(made):
    model = Model([Block(eps=0.5 if i == 5 else 1e-5) for i in range(9)]).eval()
    compare(model, kiln.compile(model, fullgraph=True), inputs())


def test_random_numbers_are_drawn_for_each_layer(made):
    class Dropping(Plain):
        def forward(self, x, table):
            return super().forward(F.dropout(x, 0.5), table)

    model = Model([Dropping() for _ in range(9)], 8)
    compiled, x = kiln.compile(model, fullgraph=True), inputs(width=8)
    for seed in range(2):
        with torch.no_grad():
            torch.manual_seed(seed)
            got = compiled(x)
            torch.manual_seed(seed)
            torch.testing.assert_close(got, model(x))
    assert made == [False]


def test_sizes_that_vary_and_gradients_take_the_whole(made):
    model = Model([Plain() for _ in range(9)], 8).eval()
    compiled = kiln.compile(model, fullgraph=True, dynamic=True)
    compare(model, compiled, inputs(width=8))
    compare(model, compiled, inputs(7, width=8))
    x = inputs(width=8)
    torch.testing.assert_close(kiln.compile(model, fullgraph=True)(x), model(x))
    assert made == []


def test_a_plan_from_disk_serves_any_number_of_layers(made, monkeypatch):
    files, fused = {}, []
    fuse = program.fuse
    store = type("Store", (), {"get": lambda self, key: files.get(key), "put": lambda self, k, data: files.update({k: data})})()
    monkeypatch.setattr(program, "disk", lambda limit: store)
    monkeypatch.setattr(program, "fuse", lambda *given: fused.append(given) or fuse(*given))
    for count in (8, 8, 12):
        model = Model([Plain() for _ in range(count)], 8).eval()
        compare(model, kiln.compile(model, fullgraph=True), inputs(width=8))
    assert made == [True] * 3 and len(fused) <= 2  # the names of the last layers' weights are in a key


def test_steps_that_do_not_repeat_are_refused(made, monkeypatch):
    seen = []
    real = layers.repeated
    monkeypatch.setattr(held, "repeated", lambda *args: seen.append(args) or real(*args))
    model = Model([Plain() for _ in range(8)], 8).eval()
    compare(model, kiln.compile(model, fullgraph=True), inputs(width=8))
    ((plan, pairs, count),) = seen
    whole = real(plan, pairs, count)
    period = (len(whole.steps) - len(plan.steps)) // count
    assert period > 0 and whole.inputs == plan.inputs + count * len(pairs)
    assert len(whole.names) == len(plan.names) + count * len(pairs) + (len(whole.names) - whole.inputs - len(plan.names) + plan.inputs)
    with pytest.raises(Uneven):
        real(plan, pairs[:-1], count)  # what one layer has is not known to be its own
    with pytest.raises(Uneven):
        real(plan, [(a, c, b) for a, b, c in pairs], count)
    for number, step in enumerate(plan.steps):
        if step[0] == "launch":
            stages = tuple((name, tasks, work + 1) for name, tasks, work in step[1])
            other = replace(plan, steps=(*plan.steps[:number], (step[0], stages, *step[2:]), *plan.steps[number + 1 :]))
            first = next(i for i, one in enumerate(plan.steps) if used_by(one) & {a for _, a, _ in pairs})
            if first <= number < first + 2 * period:
                with pytest.raises(Uneven):
                    real(other, pairs, count)


def used_by(step):
    slots = []
    layers._moved(step, lambda slot: slots.append(slot) or slot)
    return set(slots)


@pytest.mark.parametrize("count", [6, 8, 10])
def test_what_layers_hand_on_may_lie_at_two_places_in_turn(made, count):
    model = Model([Block() for _ in range(count)]).eval()
    compiled = kiln.compile(model, fullgraph=True)
    for _ in range(2):
        compare(model, compiled, inputs())


class Random(nn.Module):
    """A few ops drawn by a seed, over what the layer before it gave and weights of its own."""

    def __init__(self, seed, width=12):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.steps = torch.randint(len(OPS), (5,), generator=draw).tolist()
        self.line, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.gain, self.other = nn.Parameter(torch.rand(width)), nn.Linear(width, width, bias=False)
        self.register_buffer("shift", torch.rand(width))
        self.turn = nn.BatchNorm1d(4)

    def forward(self, x, y, table):
        for number in self.steps:
            x, y = OPS[number](self, x, y, table)
        return x, y


OPS = [
    lambda m, x, y, table: (x + m.line(y).relu(), x),
    lambda m, x, y, table: (m.norm(x) * m.gain, y),
    lambda m, x, y, table: (x.softmax(-1) + table, y + m.shift),
    lambda m, x, y, table: (x.transpose(0, 1).contiguous().transpose(0, 1) - y.mean(-1, keepdim=True), y),
    lambda m, x, y, table: (torch.cat([x[..., 6:], y[..., :6]], -1), m.other(x)),
    lambda m, x, y, table: (m.turn(x), x * (m.gain.exp() - m.shift)),
    lambda m, x, y, table: (x, F.scaled_dot_product_attention(x, y, y)),
    lambda m, x, y, table: (x.sin() * y.amax(1, keepdim=True), y.tanh()),
    lambda m, x, y, table: (y, x @ m.line.weight.t() + table),
    lambda m, x, y, table: (x.clone().mul_(0.5) + 0.1, (y * m.shift).sigmoid().cumsum(-1) / 12),
]  # fmt: skip


class Carrying(nn.Module):
    def __init__(self, seed, count):
        super().__init__()
        self.blocks = nn.ModuleList([Random(seed) for _ in range(count)])
        self.first, self.table = nn.Linear(12, 12), nn.Parameter(torch.rand(12))

    def forward(self, x):
        x, y = self.first(x), x * 2
        for block in self.blocks:
            x, y = block(x, y, self.table)
        return x, y.sum(1)


@pytest.mark.parametrize("seed", range(8))
def test_random_layers(made, seed):
    run_random(seed)


def run_random(seed):
    torch.manual_seed(seed)
    model = Carrying(seed, 7 + seed % 4).double().eval()
    compiled = kiln.compile(model, fullgraph=True)
    for _ in range(2):
        x = torch.randn(2, 4, 12, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), equal_nan=True)
            for parameter in model.parameters():
                parameter.mul_(0.9)
