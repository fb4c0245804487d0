"""Of many equal layers four are traced; the joint graph is the one that tracing them all gives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import kiln
from kiln.base.graph import label
from kiln.differentiate import trace as tracing
from tests.support import t

COUNT = 7


class Layer(nn.Module):
    """Views, ops of several results, writes, and a tensor that all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.norm = nn.Linear(4, 8), nn.Linear(4, 4, bias=False), nn.LayerNorm(4)
        self.register_buffer("scale", torch.rand(4))
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x, mask, table):
        a, b = self.into(self.norm(x)).chunk(2, dim=-1)
        a = (a * 3).relu_() + table
        best = (a + b).max(dim=0)
        y = self.out(a.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4).masked_fill(mask, 0.5))
        return y.sigmoid() * self.scale + best.values + x


class Model(nn.Module):
    def __init__(self, layers=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or [Layer() for _ in range(COUNT)])
        self.table = nn.Parameter(torch.rand(4))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        mask = x > 1
        x = x * self.table
        for layer in self.layers:
            x = layer(x, mask, self.table)
        return self.last(x).square().mean(), x


def traced(model, grad=True, dynamic=False, size=3):
    """The joint graph by four layers, or None, and the one by all of them; what the layers were."""
    graphs, found = [], []

    def backend(module, examples):
        found.append(real(module))
        for of in (real, lambda module: None):
            tracing.layers_of = of
            graphs.append(tracing.trace(module, examples))
        return module.forward

    def noted(*args):
        made = unrolled(*args)
        found.append(made is not None)
        return made

    real, unrolled = tracing.layers_of, tracing.unrolled
    tracing.unrolled = noted
    try:
        with torch.set_grad_enabled(grad):
            kiln.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(t(size, 4))
    finally:
        tracing.layers_of, tracing.unrolled = real, unrolled
    return *graphs, found


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_joint_graph_is_that_of_all_layers(grad, dynamic):
    torch.manual_seed(0)
    short, whole, found = traced(Model(), grad, dynamic)
    assert found[0].count == COUNT - 5 and len(found[0].names) == len(found[0].firsts) == 6 and found[1]
    short.graph.check()
    assert ops(short.graph) == ops(whole.graph)
    assert Counter(short.primals) == Counter(whole.primals)
    assert len(short.gradients()) == len(whole.gradients()) == (len(short.primals) if grad else 0)
    for i, primal in enumerate(short.primals):
        other = whole.primals.index(primal)
        if grad:
            mine, all_of_them = short.gradients()[i], whole.gradients()[other]
            assert (mine is None) == (all_of_them is None) and (mine is None or mine.spec == all_of_them.spec)


def ops(graph):
    return [(label(node.op), node.spec, node.backward) for node in graph.nodes]


class Dropping(Layer):
    def forward(self, x, mask, table):
        return super().forward(nn.functional.dropout(x, 0.25), mask, table)


class Counting(Layer):
    """Writes to what it holds: such layers are all traced."""

    def forward(self, x, mask, table):
        self.seen.add_(0.01)
        return super().forward(x, mask, table) * self.seen.clone()


def gradients(model, run, x):
    x = x.clone().requires_grad_()
    loss, out = run(x)
    (loss + out.sum()).backward()
    found = {"x": x.grad, "loss": loss, "out": out}
    found |= {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("layers", [
    [Layer() for _ in range(COUNT)], [Layer()] * COUNT, [Layer(), *[Layer()] * COUNT],
    [*(Layer().requires_grad_(False) for _ in range(4)), *(Layer() for _ in range(COUNT))],
    [Counting() for _ in range(COUNT)], [Dropping() for _ in range(COUNT)],
], ids=["apart", "shared", "first apart", "some frozen", "written", "random"])  # fmt: skip
@pytest.mark.parametrize("backend", ["aot_eager", "kiln"])
def test_gradients(layers, backend):
    torch.manual_seed(0)
    model = Model(layers).double()  # values grow from layer to layer, and so does what rounding does
    state = {name: value.clone() for name, value in model.state_dict().items()}
    compiled = kiln.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        model.load_state_dict(state)
        torch.manual_seed(1)
        mine = gradients(model, compiled, t(3, 4, dtype=torch.float64))
        model.load_state_dict(state)
        torch.manual_seed(1)
        torch.testing.assert_close(mine, gradients(model, model, t(3, 4, dtype=torch.float64)), atol=1e-10, rtol=1e-10)


def test_layers_that_others_look_at_are_all_traced():
    class Listing(Model):
        def forward(self, x):
            mask, found = x > 1, []
            for layer in self.layers:
                x = layer(x, mask, self.table)
                found.append(x)
            return tuple(found)

    short, whole, found = traced(Listing())
    assert found == [None] and str(short.graph) == str(whole.graph)
