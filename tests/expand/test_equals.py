"""Equal borders and copies that several expansions made are one node; outputs stay apart."""

from dataclasses import replace

import torch
import torch.nn.functional as F

import kiln
from kiln.expand.equals import merged
from kiln.expand.expand import expand
from kiln.expand.fit import filled
from kiln.fuse.loops import FOR_LOOPS
from kiln.ops.record import recorded
from kiln.ops.table import aten


def names(graph):
    return [node.op._opname for node in graph.nodes]


def test_a_border_that_several_ops_read_is_one():
    def pads(x):
        a, b = F.pad(x, (1, 1)), F.pad(x, (1, 1))
        return a.sin().sum(), b.view(-1).cos().sum(), F.pad(x, (1, 1), value=-0.0).sum(), F.pad(x, (1, 2)).sum()

    graph = merged(expand(recorded(pads, torch.randn(4, 8)), "prims"))
    assert names(graph).count("constant_pad_nd") == 3, graph


def test_outputs_stay_apart():
    def twice(x):
        a = F.pad(x, (1, 1))
        return a, torch.constant_pad_nd(x, [1, 1]), x.new_zeros(3), torch.zeros(3), x[1:], x[1:]

    x = torch.randn(4, 8)
    graph = recorded(twice, x)
    before = len(set(graph.outputs))
    assert len(set(merged(graph).outputs)) == before
    a, b, zeros, more, *views = kiln.compile(twice, fullgraph=True)(x)
    a.add_(1)
    zeros.add_(1)
    assert not torch.equal(a, b) and torch.equal(b, F.pad(x, (1, 1))) and not more.any()
    assert views[0] is not views[1]


def test_new_values_of_parts_are_packed_unless_a_view_shows_them():
    def scattered(x, part):
        return torch.slice_scatter(x, part, 1, 0, 2) + 1, torch.slice_scatter(x, part, 1, 2, 4)[0] + 1

    graph = recorded(scattered, torch.randn(4, 8), torch.randn(4, 2))
    written = [node for node in graph.nodes if node.op is aten.slice_scatter.default]
    for node in written:
        node.spec = replace(node.spec, stride=(16, 1))
    filled(graph)
    assert [node.spec.stride for node in written] == [(8, 1), (16, 1)]


def test_a_band_that_is_written_part_by_part():
    def band(x):
        wide = x @ x.transpose(-1, -2)
        whole = wide.new_zeros(8, 2, 64, 129)
        whole[:, :-1, :, 64:] = F.pad(wide, (0, 1))[:, None, :64, :65]
        whole[:, -1, :, 64:] = F.pad(wide, (0, 1))[:, 64:, 64:]
        whole[:, 1:, :, :64] = wide[:, None, 64:, :64]
        whole[:, 0, 1:, 1:64] = wide[:, :63, 65:]
        return whole.view(8, 128, 129).softmax(-1).sum(1)

    x = torch.randn(8, 128, 16)
    run = kiln.compile(band, fullgraph=True)
    torch.testing.assert_close(run(x), band(x), rtol=1e-4, atol=1e-4)


def test_gradients_of_filters_over_one_image_share_its_border():
    torch.manual_seed(0)

    def branches(x, *filters):
        return sum(F.conv2d(x, f, padding=2, groups=64) for f in filters)

    x, *filters = torch.randn(2, 64, 4, 4), *[torch.randn(64, 1, 5, 5, requires_grad=True) for _ in range(3)]
    kiln.compile(branches, fullgraph=True)(x, *filters).square().sum().backward()
    mine = [f.grad.clone() for f in filters]
    for f in filters:
        f.grad = None
    branches(x, *filters).square().sum().backward()
    torch.testing.assert_close(mine, [f.grad for f in filters], rtol=1e-4, atol=1e-3)

    def backward(grad, x, *filters):
        rest = None, [1, 1], [2, 2], [1, 1], False, [0, 0], 64, [False, True, False]
        return tuple([aten.convolution_backward(grad * i, x, f, *rest)[1] for i, f in enumerate(filters, 1)])

    with torch.no_grad():
        traced = recorded(backward, torch.randn(2, 64, 4, 4), x, *filters)
    graph = merged(expand(traced, "prims", FOR_LOOPS))
    borders = [node for node in graph.nodes if node.op is aten.constant_pad_nd.default]
    assert [node.args[0] is graph.inputs[1] for node in borders].count(True) == 1, graph
