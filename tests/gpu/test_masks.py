"""Masks that hide nothing are found in a trace."""

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


def causal(q):
    return torch.ones(16, 16, dtype=torch.bool, device=q.device).tril()


def given(q):
    return q[0, 0, :, :1] < 100


def written(q):
    mask = torch.ones(16, 16, dtype=torch.bool, device=q.device)
    mask[0, 1] = False
    return mask


@pytest.mark.parametrize(
    ("make", "nothing"),
    [(ones, True), (compared, True), (zeros, True), (causal, False), (given, False), (written, False)],
)
def test_masks(make, nothing, monkeypatch):
    found = []

    def attention(q, k, v, attn_mask=None, **rest):
        found.append(masks.hides_nothing(attn_mask))
        return F.scaled_dot_product_attention(q, k, v, attn_mask, **rest)

    monkeypatch.setitem(masks_of(), F.scaled_dot_product_attention, attention)
    kiln.reset()
    got = kiln.compile(lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=make(q)), fullgraph=True)(
        Q
    )
    assert found == [nothing]
    torch.testing.assert_close(got, F.scaled_dot_product_attention(Q, Q, Q, attn_mask=make(Q)))


def masks_of():
    from kiln.differentiate.interpret import STAND_INS

    return STAND_INS
