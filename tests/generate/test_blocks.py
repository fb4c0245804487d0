"""Nests in blocks: rows of products that share columns, neighbours that share weights."""

import pytest
import torch
import torch.nn.functional as F

from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.nest import Load
from kiln.fuse.program import fuse
from kiln.generate.blocks import blocked
from kiln.ops.record import recorded
from tests.fuse.test_kernels import check


def nests(function, *inputs):
    """The nests of the kernels that a function becomes."""
    return [n for k in fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS)).kernels for n in k.nests]


def product(x, weight):
    """Rows times a matrix in panels of columns."""
    return (x[:, None, :, None] * weight).sum(2).relu()


def loads(nest):
    return len([term for term in nest.terms() if isinstance(term, Load)])


#: For nests: sums at once, and the rows that they do.
@pytest.mark.parametrize(("rows", "shape", "lanes", "block"), [
    (28, (3, 40, 32), 16, [(14, 28)]), (49, (2, 40, 32), 16, [(14, 42), (7, 7)]), (31, (2, 40, 32), 16, [(14, 28), (3, 3)]),
    (30, (3, 64, 8), 16, [(6 * 3, 30)]), (48, (2, 40, 32), 8, [(3, 48)]), (28, (2, 40, 32), 4, [(1, 28)]),
])  # fmt: skip
def test_blocks_of_a_product(rows, shape, lanes, block):
    x, weight = torch.randn(rows, shape[1]), torch.randn(shape)
    (nest,) = nests(product, x, weight)
    parts = blocked(nest, lanes)
    whole = shape[0] * shape[1] * shape[2]
    sums = [len(part.folds()) for part in parts]
    assert [(n, part.volume() * n // whole) for n, part in zip(sums, parts, strict=True)] == block
    check(product, x, weight)


def test_factors_of_a_product_are_made_before_it():
    x, weight = torch.randn(28, 40), torch.randn(3, 40, 32)
    found = nests(lambda x, w: product(x.relu() + 1, w), x, weight)
    assert len(found) == 2 and len(blocked(found[1], 16)[0].folds()) == 14
    check(lambda x, w: product(x.relu() + 1, w), x, weight)


def test_products_of_rows_with_themselves_are_no_blocks():
    def lengths(x, y):
        return (x * y).sum(1) / ((x * x).sum(1) * (y * y).sum(1)).sqrt()

    x, y = torch.randn(40, 300), torch.randn(40, 300)
    assert not any(part.several for nest in nests(lengths, x, y) for part in blocked(nest, 16))
    check(lengths, x, y)


def inside(x, weight):
    """A convolution of one channel each without padding."""
    height, width = x.shape[2] - 2, x.shape[3] - 2
    parts = [x[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return sum(part * weight[k].view(1, -1, 1, 1) for k, part in enumerate(parts))


def taps(x, weight):
    return inside(F.pad(x, (1, 1, 1, 1)), weight)


def test_neighbours_share_weights():
    x = torch.randn(1, 64, 22, 22).to(memory_format=torch.channels_last)
    weight = torch.randn(9, 64)
    (whole,) = nests(taps, x, weight)
    several, rest = blocked(whole, 16)
    assert len(several.stores) == 5 and len(rest.stores) == 2
    assert loads(several) == 9 + 3 * 7  # of 5 times 18
    check(taps, x, weight)


def test_neighbours_share_what_both_read():
    x = torch.randn(1, 64, 22, 22).to(memory_format=torch.channels_last)
    weight = torch.randn(9, 64)
    (whole,) = nests(inside, x, weight)
    (several,) = blocked(whole, 16)
    assert len(several.stores) == 5 and loads(several) == 9 + 3 * 7
    check(inside, x, weight)
