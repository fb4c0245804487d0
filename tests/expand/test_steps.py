"""Log-softmax in steps: what is kept for the backward pass, and that its gradients are eager's."""

import pytest
import torch
from torch.nn import functional as F

import kiln
from kiln import ahead

ROWS, WORDS = 48, 96


def step(f, *inputs):
    """Results and gradients of a training step."""
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    results = f(*inputs)
    loss = results[0] if isinstance(results, tuple) else results
    loss.sum().backward()
    return [loss.detach(), *[x.grad for x in inputs if x.is_floating_point()]]


def same(f, *inputs):
    kiln.reset()
    mine, eager = step(kiln.compile(f, fullgraph=True), *inputs), step(f, *inputs)
    for a, b in zip(mine, eager, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def places(ignored=0):
    found = torch.randint(0, WORDS, (ROWS,))
    found[:ignored] = -100
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(dtype, reduction):
    x = torch.randn(ROWS, WORDS).to(dtype)
    same(lambda a, i: F.cross_entropy(a.float(), i, reduction=reduction), x, places(5))


def test_weights_and_a_class_that_is_left_out():
    x, w = torch.randn(ROWS, WORDS), torch.rand(WORDS)
    same(lambda a, i: F.cross_entropy(a, i, w, ignore_index=3), x, places().clamp(max=8))
    same(lambda a, i: F.cross_entropy(a, i, label_smoothing=0.1), x, places(2))
    same(lambda a: F.log_softmax(a, 0).square(), x)


def test_a_row_of_infinities():
    x = torch.randn(ROWS, WORDS)
    x[3, 1:], x[4, 5] = -torch.inf, torch.inf
    same(lambda a, i: F.cross_entropy(a, i, reduction="none"), x, places() * 0)


@pytest.fixture
def halves(monkeypatch):
    """The halves of the graphs that are compiled."""
    found, partition = [], ahead.partition

    def noted(*args):
        found.append(partition(*args))
        return found[-1]

    monkeypatch.setattr(ahead, "partition", noted)
    return found


@pytest.mark.parametrize("shown", [True, False])
def test_logits_are_kept_as_they_are(halves, shown):
    def f(a, w, i):
        logits = a @ w
        loss = F.cross_entropy(logits.float().view(-1, WORDS), i)
        return (loss, logits) if shown else loss

    a, w = torch.randn(ROWS, 8).bfloat16(), torch.randn(8, WORDS).bfloat16()
    same(f, a, w, places(3))
    (made,) = halves
    kept = made.forward.outputs[-made.tensors :]
    (large,) = [node for node in kept if node.spec.shape == (ROWS, WORDS)]
    assert large.spec.dtype is torch.bfloat16
    assert (large.op is torch.ops.aten.clone.default) == shown  # the program may write to its own
    assert "_log_softmax" not in str(made.forward) and "sum" not in str(made.backward)


def test_eager_numbers_are_left_alone(halves):
    x = torch.randn(ROWS, WORDS)
    step(kiln.compile(F.cross_entropy, fullgraph=True, options={"numerics": "eager"}), x, places())
    (made,) = halves
    assert "_log_softmax" in str(made.forward) and "_log_softmax_backward_data" in str(made.backward)


@pytest.mark.parametrize("f", [F.relu6, F.hardtanh, lambda x: F.hardtanh(x, -0.5, 2)])
def test_what_was_clamped_is_kept_as_the_next_layer_reads_it(halves, f):
    x = torch.randn(ROWS, 8)
    x[0], x[1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.5, 0.0, 2.0, 6.0, -1.0]), -0.0
    w, v = torch.randn(8, WORDS), torch.randn(WORDS, 4)
    same(lambda x, w, v: f(x @ w) @ v, x, w, v)
    (made,) = halves
    kept = [node for node in made.forward.outputs[-made.tensors :] if node.spec.shape == (ROWS, WORDS)]
    assert len(kept) == 1 and kept[0].op is torch.ops.aten.hardtanh.default
