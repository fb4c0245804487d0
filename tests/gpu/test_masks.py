"""Masks that hide nothing, or what comes later, are found in a trace."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import kiln
from kiln.differentiate import masks

Q = torch.randn(2, 4, 16, 8)


def ones(q):
    return q.new_ones((2, 1, 16, 16), dtype=torch.bool)


def compared(q):
    place = torch.arange(16, device=q.device)
    return (place[:, None] >= 0).expand(2, 1, 16, 16) & torch.ones(16, dtype=torch.bool, device=q.device)


def zeros(q):
    return torch.zeros(16, 16, dtype=q.dtype, device=q.device)


def added(q):
    return torch.full((16, 16), torch.finfo(q.dtype).min, device=q.device).triu(1).expand(2, 1, 16, 16)


def less(q):
    return torch.full((16, 16), -5.0, device=q.device).triu(1)


def packed(q):
    place = torch.arange(16, device=q.device)
    part = (place.diff(prepend=place[:1]) > 1).cumsum(0)
    return ((place[:, None] >= place) & (part[:, None] == part)).expand(2, 1, 16, 16)


def causal(q):
    return torch.ones(16, 16, dtype=torch.bool, device=q.device).tril()


def given(q):
    return q[0, 0, :, :1] < 100


def written(q):
    mask = torch.ones(16, 16, dtype=torch.bool, device=q.device)
    mask[0, 1] = False
    return mask


@pytest.mark.parametrize(
    ("make", "hidden"),
    [(ones, "nothing"), (compared, "nothing"), (zeros, "nothing"), (causal, "later"), (added, "later"),
     (packed, "later"), (less, None), (given, None), (written, None)],
)  # fmt: skip
def test_masks(make, hidden, monkeypatch):
    found = []

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
        found.append((attn_mask is None, is_causal))
        return plain(q, k, v, attn_mask, dropout_p, is_causal, **rest)

    plain = F.scaled_dot_product_attention
    expected = plain(Q, Q, Q, attn_mask=make(Q))
    monkeypatch.setattr(masks, "DEVICES", {"cpu"})
    monkeypatch.setattr(masks, "functional", SimpleNamespace(scaled_dot_product_attention=attention))
    kiln.reset()
    got = kiln.compile(lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=make(q)), fullgraph=True)(
        Q
    )
    assert found == [(hidden is not None, hidden == "later")]
    torch.testing.assert_close(got, expected)
