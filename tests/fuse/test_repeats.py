"""Repeated blocks: fused once, generated once, and right; what does not repeat is fused as a whole."""

import pytest
import torch
from torch import nn

import kiln
from kiln.base import records
from kiln.base.graph import Graph, TensorSpec
from kiln.expand.expand import expand
from kiln.fuse import program, reading, repeats
from kiln.fuse.repeats import Run, blocks_of, marks_of, runs
from kiln.ops.record import recorded


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, scale):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)) * scale))


class Net(nn.Module):
    def __init__(self, layers, width=16, odd=None):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 5)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.odd = odd

    def forward(self, x, keep=False):
        scale = torch.sigmoid(x.mean())  # all layers read it
        x = self.first(x)
        kept = []
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x, scale)) if i == self.odd else layer(x, scale)
            kept.append(x)
        x = self.last(x)
        return (x, *kept) if keep else x


@pytest.fixture
def fused(monkeypatch):
    """How many nodes each graph that the fuser got had."""
    found = []
    Fuser = program.Fuser

    def spying(graph, *rest):
        found.append(len(graph.nodes))
        return Fuser(graph, *rest)

    monkeypatch.setattr(program, "Fuser", spying)
    return found


def compared(net, x, **arguments):
    """The records of code for a net whose results, and gradients where there are, are eager's."""
    with records.collect() as seen:
        compiled = kiln.compile(net, fullgraph=True)
        out = compiled(x, **arguments)
        expected = net(x, **arguments)
        torch.testing.assert_close(out, expected)
        if torch.is_grad_enabled():
            inputs = [x, *net.parameters()]
            loss = [sum(part.sin().sum() for part in (o if isinstance(o, tuple) else (o,))) for o in (out, expected)]
            mine, wanted = (torch.autograd.grad(one, inputs) for one in loss)
            torch.testing.assert_close(mine, wanted)
    assert not seen.fallbacks
    return seen.codes


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_twelve_layers_have_the_code_of_four(training):
    x = torch.randn(3, 16, requires_grad=training)
    with torch.set_grad_enabled(training):
        few, many = (compared(Net(count), x) for count in (4, 12))
    assert len(few) == len(many) == 1 + training
    for a, b in zip(few, many):
        assert (a.distinct, a.nests) == (b.distinct, b.nests)
        assert b.kernels > a.kernels


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_many_layers_are_fused_as_few(training, fused):
    x = torch.randn(3, 16, requires_grad=training)
    with torch.set_grad_enabled(training):
        compared(Net(12), x)
        many = fused.copy()
        fused.clear()
        compared(Net(24), x)
    assert fused == many and len(fused) == 1 + training


class Shared(nn.Module):
    """One layer for all turns: what the turns add to its gradients is summed up when all of it is there."""

    def __init__(self, turns, width=16):
        super().__init__()
        self.layer, self.turns = Layer(width), turns

    def forward(self, x):
        scale = torch.sigmoid(x.mean())
        for _ in range(self.turns):
            x = self.layer(x, scale)
        return x


def test_turns_of_one_layer_are_fused_at_the_first_try(fused):
    compared(Shared(12), torch.randn(3, 16, requires_grad=True))
    assert len(fused) == 2


def test_repeats_of_a_small_part_are_not_tried(fused):
    def f(x, *counters):
        for i in range(2, 42):
            x = torch.sin(x) * i if i & (i - 1) else torch.cos(x).sum(-1, keepdim=True) + x
        return (x, *[c + 1 for c in counters])

    x, counters = torch.randn(8, 8), [torch.randn(()) for _ in range(12)]
    program.fuse(expand(recorded(f, x, *counters), "prims"))
    assert len(fused) == 1


def test_what_is_made_anew_is_found_in_one_walk(monkeypatch):
    """On a GPU loops make values of other loops anew: what those follow from is not looked up for each."""
    visits = []
    sources = reading.Groups.sources
    monkeypatch.setattr(reading.Groups, "sources", lambda self, node: visits.append(node) or sources(self, node))

    def f(x, a, w):
        for _ in range(60):
            x = x + torch.mm(a, w)
            a = a.t()
        return x

    graph = expand(recorded(f, *[torch.randn(8, 8) for _ in range(3)]), "prims")
    program.Fuser(graph, False, 200, False, 1000).run()
    assert 0 < len(visits) < 10 * len(graph.nodes)


def test_outputs_of_every_layer_repeat_too(fused):
    with torch.no_grad():
        compared(Net(12), torch.randn(3, 16), keep=True)
        many = fused.copy()
        fused.clear()
        compared(Net(24), torch.randn(3, 16), keep=True)
    assert fused == many


def test_a_layer_that_differs_ends_the_run(fused):
    with torch.no_grad():
        compared(Net(20, odd=9), torch.randn(3, 16))
        assert len(fused) == 1


def test_repeats_of_pure_arithmetic_are_fused_as_a_whole():
    def f(x, y):
        for _ in range(30):
            x = torch.sin(x) * y + 0.5
        return x

    x, y = torch.randn(4, 5), torch.rand(4, 5)  # below 1: no error grows
    with records.collect() as seen:
        torch.testing.assert_close(kiln.compile(f, fullgraph=True)(x, y), f(x, y))
    assert [code.kernels for code in seen.codes] == [1] and not seen.fallbacks


def test_an_optimizer_step_stays_one_kernel():
    def step(parameters, gradients):
        return [p - 0.1 * g / (g * g).add(1.0).sqrt() for p, g in zip(parameters, gradients)]

    ps, gs = ([torch.randn(7, 3) for _ in range(40)] for _ in range(2))
    with records.collect() as seen:
        torch.testing.assert_close(kiln.compile(step, fullgraph=True)(ps, gs), step(ps, gs))
    assert [code.kernels for code in seen.codes] == [1] and not seen.fallbacks


def test_a_value_that_the_end_reads_from_every_layer():
    class Stacked(Net):
        def forward(self, x):
            out, *kept = super().forward(x, keep=True)
            return out.sum() + torch.stack(kept).pow(2).mean()

    with torch.no_grad():
        compared(Stacked(12), torch.randn(3, 16))


def test_shared_and_swapped_weights():
    class Tied(Net):
        def __init__(self, layers):
            super().__init__(layers)
            for i, layer in enumerate(self.layers):
                layer.up.weight = self.layers[0].up.weight
                if i % 2:
                    layer.norm.weight = self.layers[i - 1].norm.weight

    with torch.no_grad():
        compared(Tied(12), torch.randn(3, 16))


def test_runs_are_found_by_what_nodes_do():
    layer = list(range(10, 22))
    marks = [1, 2, 3, *layer * 9, 4, 5]
    assert runs(marks)[0] == Run(15, 12, 8)
    assert runs(list(range(40))) == []
    assert runs([1, 2] * (repeats.FEWEST + 2) + [3] * 2)[0].period == 2


def test_blocks_begin_where_no_weight_is_read_on_both_sides():
    """The first layer lacks its first op: what repeats begins in the midst of a layer."""
    aten, spec = torch.ops.aten, TensorSpec((4,), (1,), torch.float32, torch.device("cpu"))
    graph = Graph()
    x = graph.input("x", spec)
    for layer in range(9):
        weight = graph.input("weight", spec)
        x = graph.call(aten.mul.Tensor, (x, weight), spec=spec) if layer else x
        for op in (aten.sin, aten.cos, aten.exp, aten.neg, aten.abs, aten.tanh, aten.relu, aten.sigmoid):
            x = graph.call(op.default, (x,), spec=spec)
        x = graph.call(aten.add.Tensor, (x, weight), spec=spec)
    graph.outputs = (x,)
    assert runs(marks_of(graph))[0] == Run(10, 10, 7)
    found = blocks_of(graph)
    assert found is not None and found.run == Run(19, 10, 6) and graph.nodes[19].op is aten.mul.Tensor


def test_of_few_layers_three_are_fused(fused):
    with torch.no_grad():
        for layers in (5, 9):
            compared(Net(layers), torch.randn(3, 16))
    assert len(fused) == 2 and fused[0] == fused[1]


def test_steps_that_lack_something_are_refused(monkeypatch, fused):
    monkeypatch.setattr(repeats, "complete", lambda graph, steps: False)
    with torch.no_grad():
        compared(Net(12), torch.randn(3, 16))
    assert len(fused) == 3  # two short graphs, then the whole one
