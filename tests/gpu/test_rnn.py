"""Recurrent networks by cuDNN are captured whole: results, gradients and layouts are eager's."""

import copy

import pytest
import torch
from torch import nn

import kiln
from kiln.ops.cudnn_rnn import differentiable
from kiln.ops.fake import make
from kiln.ops.record import recorded

# Weights of bfloat16 are not laid together by modules, and those of copies are no longer.
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("batch_first", [False, True])
def test_types(batch_first):
    device = torch.device("cuda", 0)
    sizes = [(5, 7, 12), (2, 7 - 2 * batch_first, 16), (2, 7 - 2 * batch_first, 16)]
    sizes += [(64, 12), (64, 16), (64,), (64,)] * 2
    inputs = [make(size, None, torch.float32, device) for size in sizes]

    def run(x, state, cell, *weights):
        return differentiable()(x, list(weights), state, cell, 2, 16, 1, batch_first, True, True)

    graph = recorded(run, *inputs)
    out, state, cell, _ = (node.spec for node in graph.outputs)
    assert out.shape == (5, 7, 32) and out.stride == ((32, 160, 1) if batch_first else (224, 32, 1))
    assert state.shape == cell.shape == sizes[1]


class Net(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn, self.head = getattr(nn, kind)(12, 16, **options), nn.Linear(16 * (2 if options.get("bidirectional") else 1), 5)

    def forward(self, x, state=None):
        out, after = self.rnn(x.relu(), state)
        return self.head(out).tanh(), out * 1, after


def near(a, b):
    """Of bfloat16 what is around a network is rounded once by one and often by the other."""
    torch.testing.assert_close(a, b, **({"rtol": 0.05, "atol": 2e-3} if a.dtype is torch.bfloat16 else {}))


def leaves(found):
    out, more, after = found
    return [out, more, *(after if isinstance(after, tuple) else (after,))]


OPTIONS = [{}, {"batch_first": True, "num_layers": 2}, {"bidirectional": True, "batch_first": True}, {"bias": False},
           {"bidirectional": True, "num_layers": 2}]  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_networks(kind, options, dtype):
    torch.manual_seed(0)
    net = Net(kind, **options).to("cuda", dtype)
    net.rnn.flatten_parameters()
    mine, x = copy.deepcopy(net), torch.randn(6, 9, 12, device="cuda", dtype=dtype)
    kiln.reset()
    compiled = kiln.compile(mine, fullgraph=True)
    for _ in range(2):
        given = [x.clone().requires_grad_() for _ in range(2)]
        results = [leaves(f(one)) for f, one in zip((net, compiled), given, strict=True)]
        for a, b in zip(*results, strict=True):
            assert a.stride() == b.stride()
            near(a, b)
        for found in results:
            sum(part.float().square().mean() for part in found).backward()
        near(given[0].grad, given[1].grad)
        for a, b in zip(net.parameters(), mine.parameters(), strict=True):
            near(a.grad, b.grad)
    for net_or in (net, mine):
        net_or.eval()
    with torch.no_grad():
        for a, b in zip(leaves(net(x)), leaves(compiled(x)), strict=True):
            near(a, b)


def trained(net, x):
    """What a network gives, and its gradients."""
    for weight in net.parameters():
        weight.grad = None
    out = net(x)[0]
    out.square().mean().backward()
    return [out.detach(), *[weight.grad for weight in net.parameters()]]


@needs_gpu
def test_weights_lie_together_apart_or_in_another_order():
    torch.manual_seed(0)
    net, x = Net("LSTM", num_layers=2).cuda(), torch.randn(6, 9, 12, device="cuda")
    expected = trained(net, x)
    net.rnn.flatten_parameters()
    kiln.reset()
    compiled = kiln.compile(net, fullgraph=True)
    torch.testing.assert_close(trained(compiled, x), expected)
    weights = list(net.rnn.parameters())
    for weight in weights:
        weight.data = weight.data.clone()
    torch.testing.assert_close(trained(compiled, x), expected)
    memory, place = torch.empty(sum(w.numel() for w in weights), device="cuda"), 0
    for weight in reversed(weights):
        part = memory[place : place + weight.numel()].view(weight.shape).copy_(weight.data)
        weight.data, place = part, place + weight.numel()
    torch.testing.assert_close(trained(compiled, x), expected)


@needs_gpu
def test_what_is_dropped_between_layers_stays_eagers():
    net = Net("LSTM", num_layers=2, dropout=0.5).cuda()
    x = torch.randn(6, 9, 12, device="cuda")
    results = []
    for f in (net, kiln.compile(net)):
        torch.manual_seed(3)
        results.append(f(x)[0])
    torch.testing.assert_close(*results)
