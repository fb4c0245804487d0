"""Values whose rows are folded lie along these rows, in training too; what leaves a graph lies as in eager."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kiln
from kiln.expand import rows
from kiln.ops.record import recorded

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.linear = norm(64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Heard(nn.Module):
    """A convolution over time, and blocks over what it gives at each time."""

    def __init__(self, norm=nn.LayerNorm, blocks=3):
        super().__init__()
        self.first, self.places = nn.Conv1d(8, 64, 3, padding=1), nn.Parameter(torch.randn(300, 64))
        self.blocks = nn.Sequential(*[Block(norm) for _ in range(blocks)])

    def forward(self, x):
        return self.blocks(F.gelu(self.first(x)).permute(0, 2, 1) + self.places)


def strides(graph):
    return [n.spec.stride[-1] for n in graph.nodes if n.op is aten.add.Tensor and n.spec.shape == (2, 300, 64)]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_what_is_normed_lies_along_its_rows(norm):
    model, x = Heard(norm), torch.randn(2, 8, 300)
    graph = recorded(lambda x: model(x) * 2, x)
    assert strides(graph) == [300] * 4
    # The first sum is made as it was, then copied: loops that make it store the copy alone.
    made = rows.along_rows(graph)
    assert strides(made) == [300, 1, 1, 1]
    copies = [n.spec.stride[-1] for n in made.nodes if n.op is aten.clone.default]
    assert copies[0] == 1 and 300 not in copies[:-1] and copies[-1] == 300  # eager's layout, as it leaves


def test_what_leaves_the_graph_or_is_small_stays():
    model, x = Heard(), torch.randn(2, 8, 300)

    def shows(x):
        h = F.gelu(model.first(x)).permute(0, 2, 1) + model.places
        return h, model.blocks(h)

    for graph in (recorded(shows, x), recorded(lambda x: Heard.forward(model, x)[:, :0], x[:1, :, :300])):
        before = strides(graph)
        assert strides(rows.along_rows(graph)) == before
    across = recorded(lambda x: F.layer_norm(x.transpose(1, 2) + 1, (300,)), torch.randn(2, 300, 64))
    assert rows.along_rows(across) is across  # read once: it is not kept


@pytest.mark.parametrize("training", [False, True])
def test_models(training):
    torch.manual_seed(1)
    model, x = Heard(), torch.randn(2, 8, 300)
    kiln.reset()
    found = []
    for run in (kiln.compile(model, fullgraph=True), model):
        model.zero_grad()
        with torch.set_grad_enabled(training):
            out = run(x)
        if training:
            out.square().mean().backward()
        found.append([out.detach(), *[p.grad.clone() for p in model.parameters() if training]])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert got.stride() == expected.stride()
