"""torch's associative_scan: a recurrence is one op, whatever order it is written in; other scans are trees of ops."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan, wrap_combine_fn_flat

from tests.support import EAGER, one_graph, t


def steps(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def turned(left, right):
    return torch.add(right[0], torch.mul(left[0], right[1])), right[1] * left[1]


def clamped(left, right):
    return left[0] * right[0], (right[0] * left[1] + right[1]).clamp(max=1.0)


def swapped(left, right):
    return left[0] * right[0], left[0] * left[1] + right[1]


def scanned(combine, dim=1, reverse=False):
    return lambda x, y: associative_scan(combine, (x, y), dim=dim, reverse=reverse, combine_mode="generic")


def recurrences(result):
    """How many recurrences there are in the graphs of a program."""
    return sum(n.target is torch.ops.kiln.recurrence.default for gm in result.modules[:1] for n in gm.graph.nodes)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("combine", [steps, turned])
def test_recurrences(combine, dim, reverse):
    x, y = (t(4, 9, 3).requires_grad_() for _ in range(2))
    assert recurrences(one_graph(scanned(combine, dim, reverse), x, y)) == (not EAGER)


def elements(combine):
    """The op of scans by functions of elements, as torch calls it on a GPU."""
    spec = torch.utils._pytree.tree_structure((0, 0))
    flat = partial(wrap_combine_fn_flat, combine_fn=combine, spec=spec, num_leaves=2)
    return lambda x, y: tuple(torch.ops.higher_order.associative_scan(flat, (x, y), additional_inputs=()))


@pytest.mark.parametrize("combine", [steps, turned, clamped])
def test_scans_of_elements(combine):
    expected = combine is not clamped and not EAGER
    assert recurrences(one_graph(elements(combine), t(9, 4, 3), t(9, 4, 3))) == expected


WEIGHT = t(3)
OTHERS = [clamped, swapped, lambda left, right: (left[0] + right[0], left[1] * right[1]),
          lambda left, right: (left[0] * right[0] * WEIGHT, right[0] * left[1] + right[1])]  # fmt: skip


@pytest.mark.parametrize("combine", OTHERS)
def test_other_scans_are_trees(combine):
    assert not recurrences(one_graph(scanned(combine), t(4, 9, 3), t(4, 9, 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_other_types_are_trees(dtype):
    assert not recurrences(one_graph(scanned(steps), t(4, 9, 3).to(dtype), t(4, 9, 3).to(dtype)))


def test_a_scan_of_one_element_is_that_element():
    assert not recurrences(one_graph(scanned(steps), t(4, 1, 3), t(4, 1, 3)))
