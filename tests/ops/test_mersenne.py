"""Masks drawn many at once: eager's numbers, eager's state afterwards, and eager's own draw where that is another."""

import pytest
import torch

from kiln.ops import mersenne


def drawn(f, seed, before):
    """What a draw gives after some numbers were drawn, and the state that it leaves."""
    torch.manual_seed(seed)
    torch.rand(before)
    return f(), torch.get_rng_state()


@pytest.mark.parametrize("before", [0, 1, 311, 623, 624, 5000])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1 / 3, 0.999, 1.0])
@pytest.mark.parametrize("count", [0, 1, 5, 624, 3000])
def test_masks_are_eagers(before, p, count):
    mine, left = drawn(lambda: mersenne.bernoulli((count,), (1,), p), 7, before)
    theirs, state = drawn(lambda: torch.empty(count).bernoulli_(p), 7, before)
    assert mine.dtype is torch.bool and torch.equal(mine, theirs.bool())
    torch.set_rng_state(left)
    following = torch.rand(700)
    torch.set_rng_state(state)
    assert torch.equal(following, torch.rand(700))


def test_looking_draws_nothing(monkeypatch):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    mersenne.draws_as_eager.cache_clear()
    mersenne.draws_as_eager()
    assert torch.equal(state, torch.get_rng_state())


def test_where_eager_draws_otherwise_eager_draws(monkeypatch):
    monkeypatch.setattr(mersenne, "draws_as_eager", lambda: False)
    monkeypatch.setattr(mersenne._mersenne, "bernoulli", lambda *args: pytest.fail("not this one"))
    mine, left = drawn(lambda: mersenne.bernoulli((100,), (1,), 0.5), 1, 0)
    theirs, state = drawn(lambda: torch.empty(100).bernoulli_(0.5), 1, 0)
    assert torch.equal(mine, theirs.bool()) and torch.equal(left, state)
