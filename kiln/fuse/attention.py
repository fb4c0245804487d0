"""Attention as loops: products in panels of columns, and softmax between them.

Eager's kernel calls small products of a library, which on some processors takes two to four times as long as
loops of ours. What lies between the products is there for one head at a time (`kiln.fuse.turns`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kiln.ops.table import aten

#: Columns of a panel: two vectors, or one.
PANELS = (32, 16)
#: Scores at most that keys which several heads share have, and extents at least.
LONGEST, SHORTEST = 1 << 16, 16
#: Heads of all rows together at least: they are the tasks.
HEADS = 8
#: Bytes that lie between the products of gradients at most.
ROOM = 32 << 20


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float = 0.0, causal: bool = False,
    *, attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    """The values that queries attend to, and the logarithms of the sums that softmax divides by."""
    if dropout or not _fits(query, key, value, attn_mask):
        return NotImplemented
    scores = _scores(query, key, causal, attn_mask, scale)
    most = scores.amax(3, True)
    # A row that sees nothing is zero.
    start = most if attn_mask is None else torch.where(most == -math.inf, 0.0, most)
    powers = (scores - start).exp()
    sums = powers.sum(3, True)
    shares = powers / (sums if attn_mask is None else torch.where(sums == 0, 1.0, sums))
    shares = shares.unflatten(1, (key.shape[1], query.shape[1] // key.shape[1]))
    made = (shares[..., None, None] * _columns(value)[:, :, None, None]).sum(4).flatten(4).flatten(1, 2)
    if query.stride(1) <= query.stride(2):
        # As eager's results lie, too: heads of a row side by side.
        parts = _columns(value)[:, None, :, None]
        made = (shares.permute(0, 3, 1, 2, 4)[..., None, None] * parts).sum(4).flatten(4).flatten(2, 3)
        made = made.transpose(1, 2)
    return made, (start + sums.log()).squeeze(3)


def attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logarithms: torch.Tensor, dropout: float, causal: bool, *,
    attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    """The gradients of attention for queries, keys and values."""
    if dropout or query.shape[1] != key.shape[1] or not _fits(query, key, value, attn_mask):
        return NotImplemented
    if 2 * math.prod(query.shape[:3]) * key.shape[2] * query.dtype.itemsize > ROOM:
        return NotImplemented
    start = logarithms if attn_mask is None else torch.where(logarithms == -math.inf, 0.0, logarithms)
    shares = (_scores(query, key, causal, attn_mask, scale) - start[..., None]).exp()
    own = (grad * out).sum(3, True)
    factor = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    slopes = (_scores(grad, value, False, None, 1.0) - own) * shares * factor
    of_query = (slopes.transpose(1, 2)[..., None, None] * _columns(key)[:, None]).sum(3).flatten(3)
    return of_query.transpose(1, 2), _by_column(slopes, query), _by_column(shares, grad)


def _by_column(factors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """For each column of some factors the sum of rows, each times its factor; heads of a row side by side."""
    parts = _columns(rows).transpose(1, 2)[:, :, None]
    return (factors.permute(0, 2, 3, 1)[..., None, None] * parts).sum(1).flatten(3).transpose(1, 2)


def _columns(rows: torch.Tensor) -> torch.Tensor:
    """Rows in pieces of whole vectors."""
    columns = next(n for n in PANELS if rows.shape[3] % n == 0)
    return rows.unflatten(3, (rows.shape[3] // columns, columns))


def _scores(
    query: torch.Tensor, key: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:  # fmt: skip
    """The products of all rows of two matrices, scaled and masked."""
    count, heads, rows, width = query.shape
    shared, length = key.shape[1:3]
    panels = -(-length // PANELS[0])
    keys = aten.constant_pad_nd(key, [0, 0, 0, panels * PANELS[0] - length], 0.0)
    keys = keys.unflatten(2, (panels, PANELS[0])).transpose(3, 4).contiguous()
    asked = query.unflatten(1, (shared, heads // shared))
    scores = (asked[:, :, :, :, None, :, None] * keys[:, :, None, None]).sum(5)
    scores = scores.view([count, heads, rows, panels * PANELS[0]])[..., :length]
    scores = scores * (1 / math.sqrt(width) if scale is None else scale)
    if causal:
        places = torch.arange(max(rows, length), device=query.device)
        scores = torch.where(places[:rows, None] >= places[None, :length], scores, -math.inf)
    return scores if mask is None else scores + mask


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether loops were seen to do it faster, and what lies between is there for a head at a time."""
    known = all(type(n) is int for x in (query, key, value) for n in x.shape)
    if not known or query.dtype is not torch.float32 or query.device.type != "cpu":
        return False
    if key.shape != value.shape or mask is not None and mask.dtype is not torch.float32:
        return False
    heads, rows, width = query.shape[1:]
    shared, length = key.shape[1:3]
    many = min(rows, length) >= SHORTEST and math.prod(key.shape[:2]) >= HEADS
    return bool(many and width % PANELS[-1] == 0 and heads // shared * rows * length <= LONGEST)


#: For processors on which a library does small products slowly.
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
}
