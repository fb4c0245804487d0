"""Gradients of results that other results are computed from: hooks on them and retained gradients see all of them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import kiln
from kiln.differentiate import again
from tests.differentiate.test_run import ahead
from tests.support import t


def loss_and_hidden(x, w):
    h = (x @ w).tanh()
    return (h * h).sum(), h


def outcomes(f, watch, backward=lambda loss, h: loss.backward(), calls=2):
    """What `watch(h)` notes, the gradients of the hidden value, of the weights and of the inputs."""
    w, x, found = t(4, 4, grad=True), t(3, 4, grad=True), []
    for _ in range(calls):
        loss, h = f(x, w)
        watch(h, found)
        backward(loss, h)
        found.append(h.grad if h.retains_grad else None)
    return [w.grad, x.grad, *[one.detach().clone() for one in found if one is not None]], len(found)


def noting(h, found):
    h.register_hook(lambda grad: found.append(grad * 2))


def changing(h, found):
    h.register_hook(lambda grad: grad * 2)
    h.register_hook(lambda grad: found.append(grad.clone()))
    h.register_hook(lambda grad: grad.clamp(min=0))


def retaining(h, found):
    h.retain_grad()


def all_of_it(h, found):
    h.retain_grad()
    changing(h, found)
    h.register_hook(lambda grad: found.append("removed")).remove()


BACKWARD = {
    "loss": lambda loss, h: loss.backward(),
    "both": lambda loss, h: (loss + h.sum()).backward(),
    "hidden": lambda loss, h: h.sum().backward(),
    "twice": lambda loss, h: (loss.backward(retain_graph=True), loss.backward()),
    "in turn": lambda loss, h: (h.sum().backward(retain_graph=True), loss.backward()),
}


@pytest.mark.parametrize("backward", BACKWARD.values(), ids=BACKWARD)
@pytest.mark.parametrize("watch", [noting, changing, retaining, all_of_it])
def test_gradients_of_inner_results_are_seen_whole(watch, backward):
    expected = outcomes(loss_and_hidden, watch, backward)
    torch.testing.assert_close(outcomes(ahead(loss_and_hidden), watch, backward), expected)


@pytest.mark.parametrize("watch", [noting, changing, retaining, all_of_it])
def test_with_a_history(watch):
    def backward(loss, h):
        x, w = h_inputs
        gx, gw = torch.autograd.grad(loss, (x, w), create_graph=True)
        (gx.square().sum() + gw.sum()).backward()

    results = []
    for f in (loss_and_hidden, ahead(loss_and_hidden)):
        found, h_inputs = [], (t(3, 4, grad=True), t(4, 4, grad=True))
        loss, h = f(*h_inputs)
        watch(h, found)
        backward(loss, h)
        results.append([*[x.grad for x in h_inputs], *[x for x in found if x is not None]])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("watch", [noting, changing, retaining, all_of_it])
def test_after_hooks_that_the_graph_registers(watch):
    def f(x, w):
        h = x @ w
        h.register_hook(lambda grad: grad * 3)
        return (h * h).sum(), h

    for g in (f, lambda x, w: (f(x, w)[1].sum(), f(x, w)[1])):
        torch.testing.assert_close(outcomes(ahead(g), watch), outcomes(g, watch))

    def one(x, w):
        return f(x, w)[1]

    def alone(made):
        x, w, found = t(3, 4, grad=True), t(4, 4, grad=True), []
        h = made(x, w)
        watch(h, found)
        (h * h).sum().backward()
        return [x.grad, w.grad, h.grad if h.retains_grad else None, *found]

    torch.testing.assert_close(alone(ahead(one)), alone(one))


def test_random_numbers_are_those_of_the_call():
    def f(x, w):
        h = torch.dropout(x @ w, 0.5, True)
        return torch.dropout(h * h, 0.5, True).sum(), h

    found = []
    for g in (f, ahead(f)):
        torch.manual_seed(3)
        found.append((outcomes(g, all_of_it), torch.rand(2)))
    torch.testing.assert_close(found[1], found[0])


def test_results_that_nothing_is_computed_from_are_told_by_the_compiled_half(monkeypatch):
    monkeypatch.setattr(again.Replay, "gradients", None)
    seen = []
    for f in (loss_and_hidden, ahead(loss_and_hidden)):
        x, w = t(3, 4, grad=True), t(4, 4, grad=True)
        loss, h = f(x, w)
        loss.register_hook(lambda grad: grad * 2)
        loss.retain_grad()
        loss.backward()
        seen.append((x.grad, w.grad, loss.grad))
    torch.testing.assert_close(seen[1], seen[0])


def test_freed_graphs_raise_as_in_eager():
    loss, h = ahead(loss_and_hidden)(t(3, 4), t(4, 4, grad=True))
    h.retain_grad()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_results_go_when_the_program_lets_go_of_them():
    loss, h = ahead(loss_and_hidden)(t(3, 4), t(4, 4, grad=True))
    gone, seen = weakref.ref(h), []
    h.register_hook(lambda grad: seen.append(grad))
    del h
    loss.backward()
    del loss
    gc.collect()
    assert gone() is None and len(seen) == 1


def test_they_are_seen_after_a_break():
    def f(x, w, seen):
        h = (x @ w).tanh()
        loss = (h * h).sum()
        h.register_hook(lambda grad: grad * 0.5)
        h.register_hook(lambda grad: seen.append(float(grad.sum())))
        h.retain_grad()
        loss.backward()
        return h.grad

    found = []
    for made in (f, kiln.compile(f, backend="aot_eager")):
        seen = []
        found.append((made(t(3, 4), t(4, 4, grad=True), seen), seen))
    torch.testing.assert_close(found[1], found[0])
