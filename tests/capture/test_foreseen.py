"""Branches on tensors that go one way in most calls: one graph, which checks; the other way is eager's, too."""

from __future__ import annotations

import pytest
import torch

from kiln.base.errors import Break
from tests.support import EAGER, How, Watch, kiln, pin, same_as_eager, t

X = t(3, 4)
G = t(3, 4, grad=True)
HUGE = torch.full((3, 4), 3e38)


def kept_finite(h):
    h = h * 2
    if torch.isinf(h).any() or torch.isnan(h).any():
        limit = torch.finfo(h.dtype).max - 1000
        h = torch.clamp(h, min=-limit, max=limit)
    return h + 1


@pytest.mark.parametrize("x", [X, G])
def test_numbers_are_taken_to_be_finite(x):
    pin(same_as_eager(kept_finite, x), graphs=1)
    pin(same_as_eager(lambda h: h.nan_to_num() if not torch.isfinite(h).all() else h * 2, x), graphs=1)
    pin(same_as_eager(lambda h: h * 0 if torch.isnan(h).sum() > 0 else h * 2, x), graphs=1)


@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_branch_that_goes_another_way_twice_is_a_break_from_then_on(backend):
    compiled = kiln.compile(kept_finite, backend=backend)
    for x in (X, HUGE, X, HUGE, X, HUGE, X):
        torch.testing.assert_close(compiled(x), kept_finite(x))
    w = Watch(kept_finite)
    for graphs in (1, 2):
        w(X)
        w.pin(graphs=graphs, breaks=0)
        w(HUGE)
        w.pin(graphs=graphs, breaks=0)
    w(X)
    w.pin(graphs=4, breaks=1)
    w(HUGE)
    w(X)
    assert EAGER or w.graphs == 5


def test_branch_that_turns_once():
    w = Watch(lambda x, step: x * 2 if step > 3 else x)
    for step in range(8):
        w(X, torch.tensor(step))
    w.pin(graphs=2, breaks=0)


def masked(x, mask):
    if mask is not None and not mask.all():
        x = x.masked_fill(~mask, 0)
    return x * 2


def test_masks_are_taken_to_ask_the_same_again():
    full, some = torch.ones(3, 4, dtype=torch.bool), X > 0
    w = Watch(masked)
    w(X, full)
    w(X + 1, full.clone())
    w.pin(graphs=1, breaks=0)
    for _ in range(2):
        w(X, some)
        w(X, full)
    w(X, some)
    w.pin(breaks=1)
    other = Watch(masked)
    other(X, some)
    other(X, X > 0.5)
    other.pin(graphs=1, breaks=0)


def test_random_numbers_are_drawn_once_where_the_branch_goes_another_way():
    def f(x, mask):
        x = torch.nn.functional.dropout(x, 0.5)
        if mask.all():
            return x * 2
        return x - 1

    full = torch.ones(3, 4, dtype=torch.bool)
    compiled = kiln.compile(f)
    for mask in (full, ~full, full):
        torch.manual_seed(3)
        expected = f(X, mask), torch.rand(2)
        torch.manual_seed(3)
        torch.testing.assert_close((compiled(X, mask), torch.rand(2)), expected)


def test_graph_that_writes_breaks_at_the_branch():
    def f(x, mask):
        x.add_(1)
        if mask.all():
            return x * 2
        return x - 1

    pin(same_as_eager(f, X, torch.ones(3, dtype=torch.bool)), graphs=2, breaks=1)


def test_numbers_that_say_nothing_of_other_calls_break():
    pin(same_as_eager(lambda x: x * 2 if x.sum() > 0 else x - 1, X), graphs=2, breaks=1)
    pin(same_as_eager(lambda x: x * 2 if torch.rand([]) < 0.5 else x - 1, X, how=How(setup=lambda: torch.manual_seed(1))), graphs=2, breaks=1)


@pytest.mark.skipif(EAGER, reason="refusals are Kiln's")
def test_full_graph_refuses_such_a_branch():
    with pytest.raises(Break, match="branch-on-tensor"):
        kiln.compile(masked, fullgraph=True)(X, torch.ones(3, 4, dtype=torch.bool))


@pytest.mark.parametrize("said", [(), ("not all",)])
def test_check_that_the_program_asks_for_is_in_the_graph(said):
    def f(x, mask):
        torch._assert_async(mask.all(), *said)
        return x * 2

    w = Watch(f)
    w(X, torch.tensor(True))
    with pytest.raises(RuntimeError):
        w(X, torch.tensor(False))
    w.pin(graphs=1, breaks=0)


def test_branch_that_goes_another_way_is_a_break_for_other_sizes_too():
    w = Watch(kept_finite, dynamic=False)
    for size in range(2, 6):
        w(t(size, 4))
        w(torch.full((size, 4), 3e38))
    w.pin(breaks=2)
