"""torch's associative_scan: a recurrence is one op, whatever order it is written in; other scans are trees of ops."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan

import kiln
from tests.support import one_graph, same_as_eager, t


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


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("combine", [steps, turned])
def test_recurrences(combine, dim, reverse):
    x, y = (t(4, 9, 3).requires_grad_() for _ in range(2))
    f = scanned(combine, dim, reverse)
    same_as_eager(f, x, y)
    ops = [n.target for n in kiln.capture(f, x, y).graph.nodes if n.op == "call_function"]
    assert torch.ops.kiln.recurrence.default in ops


@pytest.mark.parametrize("combine", [clamped, swapped, lambda left, right: (left[0] + right[0], left[1] * right[1])])
def test_other_scans_are_trees(combine):
    x, y = t(4, 9, 3), t(4, 9, 3)
    one_graph(scanned(combine), x, y)
    ops = [n.target for n in kiln.capture(scanned(combine), x, y).graph.nodes if n.op == "call_function"]
    assert torch.ops.kiln.recurrence.default not in ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_other_types_are_trees(dtype):
    x, y = t(4, 9, 3).to(dtype), t(4, 9, 3).to(dtype)
    ops = [n.target for n in kiln.capture(scanned(steps), x, y).graph.nodes if n.op == "call_function"]
    assert torch.ops.kiln.recurrence.default not in ops


def test_a_function_that_reads_more_is_a_tree():
    weight = t(3)
    x, y = t(4, 9, 3), t(4, 9, 3)
    f = scanned(lambda left, right: (left[0] * right[0] * weight, right[0] * left[1] + right[1]))
    one_graph(f, x, y)
