"""Convolutions of one channel each, of half types, as elements: sums of neighbours times those of a filter.

Filters lie by their places, channels side by side, as images do: `by_place` says where loops make them.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from kiln.base.graph import Node
from kiln.base.symbols import Expr
from kiln.fuse.lower import CONDITIONS, HALVES, Read, Terms, both, dtype_of, lowering
from kiln.fuse.nest import Term
from kiln.fuse.views import Coords, shape_of

WIDE = torch.float32


def by_place(node: Node) -> bool:
    """Whether the channels of an image, of filters of one channel each and of the result are side by side."""
    image, filters = node.args[0].spec, node.args[1].spec
    dilation, groups = node.args[5], node.args[8]
    known = len(image.shape) == 4 and all(type(n) is int for n in (*image.shape, *filters.shape))
    if not known or image.dtype not in HALVES or any(n != 1 for n in dilation):
        return False
    alone = groups == image.shape[1] == filters.shape[0] > 1 == filters.shape[1] < max(filters.shape[2:])
    return bool(alone and image.stride[1] == filters.stride[0] == node.spec.stride[1] == 1)


CONDITIONS["convolution"] = by_place


@lowering("convolution")
def _convolution(terms: Terms, node: Node, coords: Coords, valid: Term | None, read: Read) -> Term:
    x, filters, bias, steps, around, _, spread = node.args[:7]
    image, channel, *here = coords
    zero = terms.const(0, torch.int64)

    def wide(term: Term) -> Term:
        return terms.apply("convert", WIDE, term)

    def each(*conditions: Term | None) -> Term | None:
        """All of some conditions."""
        found: Term | None = None
        for one in conditions:
            found = found if one is None else both(terms, found, one)
        return found

    def seen(dim: int, place: int) -> tuple[Any, Term | None, Term | None]:
        """Where a place of a filter is in the image, whether it is at one at all, whether that is inside."""
        step, before, size = steps[dim % len(steps)], around[dim % len(around)], shape_of(x)[dim + 2]
        exists: Term | None = None
        inside: Term | None = None
        at = here[dim] * step + place - before
        if spread:
            far = shape_of(filters)[dim + 2]
            ahead = here[dim] + before - place + far * step
            at = ahead // step - far
            if step > 1:
                exists = terms.apply("eq", torch.bool, terms.place(ahead % step), zero)
        low, high = terms.scope.bounds(at) if isinstance(at, Expr) else (at, at)
        if low < 0:
            inside = terms.apply("ge", torch.bool, terms.place(at), zero)
        if high >= size:
            inside = both(terms, inside, terms.apply("lt", torch.bool, terms.place(at), terms.place(size)))
        return at, exists, inside

    total = None if bias is None else wide(read(bias, (channel,), valid))
    rows, columns = ([seen(dim, place) for place in range(shape_of(filters)[dim + 2])] for dim in range(2))
    for (row, down), (column, along) in itertools.product(enumerate(rows), enumerate(columns)):
        exists, inside = (each(down[i], along[i]) for i in (1, 2))
        value = wide(read(x, (image, channel, down[0], along[0]), each(valid, inside)))
        if inside is not None:
            value = terms.apply("where", WIDE, inside, value, terms.const(0.0, WIDE))
        factors = value, wide(read(filters, (channel, 0, row, column), valid))
        before, more = total, (total, *factors) if total is not None else factors
        total = terms.apply("addcmul" if len(more) > 2 else "mul", WIDE, *more)
        if exists is not None:
            total = terms.apply("where", WIDE, exists, total, before or terms.const(0.0, WIDE))
    assert total is not None
    return terms.apply("convert", dtype_of(node), total)
