"""Convolutions over one small volume go over its halves, and give what eager gives."""

import pytest
import torch

from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.program import fuse
from kiln.fuse.steps import Call
from kiln.ops.levels import name_of
from kiln.ops.record import recorded
from tests.fuse.test_kernels import check, rand

aten = torch.ops.aten


def volumes(function, *inputs):
    """The sizes of what convolutions and their gradients read."""
    program = fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS))
    nodes = [step.node for step in program.steps if isinstance(step, Call)]
    found = [(n, name_of(n.op)) for n in nodes]
    return [tuple(n.args["backward" in name].spec.shape) for n, name in found if name.startswith("convolution")]


def both(stride=1, padding=1, dilation=1, bias=True):
    """A convolution's function, and its gradients'."""
    how = [stride] * 3, [padding] * 3, [dilation] * 3, False, [0] * 3, 1

    def forward(x, weight, added):
        return aten.convolution(x, weight, added if bias else None, *how).sin()

    def backward(grad, x, weight):
        out = aten.convolution_backward(grad.sin(), x, weight, [weight.shape[0]], *how, [True, True, bias])
        return tuple(part for part in out if part is not None)

    return forward, backward


@pytest.mark.parametrize(("how", "size", "cut"), [
    ({}, (6, 8, 8), (5, 8, 8)), ({}, (7, 8, 8), (7, 6, 8)), (dict(stride=2), (15, 15, 15), (9, 15, 15)),
    (dict(stride=2, padding=0), (18, 12, 12), (9, 12, 12)), (dict(padding=2, dilation=2, bias=False), (6, 7, 9), (7, 7, 9)),
])  # fmt: skip
def test_a_volume_goes_in_halves(how, size, cut):
    forward, backward = both(**how)
    x, weight, bias = rand(1, 4, *size), rand(8, 4, 3, 3, 3), rand(8)
    grad = torch.rand_like(forward(x, weight, bias))
    assert volumes(forward, x, weight, bias) == volumes(backward, grad, x, weight) == [(2, 4, *cut)]
    check(forward, x, weight, bias, rtol=1e-4, atol=1e-4)
    check(backward, grad, x, weight, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shapes", [
    ((2, 4, 6, 8, 8), (8, 4, 3, 3, 3)), ((1, 4, 7, 7, 7), (8, 4, 3, 3, 3)), ((1, 4, 4, 4, 4), (8, 4, 3, 3, 3)),
    ((1, 4, 6, 9, 9), (8, 4, 3, 5, 5)), ((1, 4, 8, 8, 8), (8, 4, 3, 1, 1)), ((1, 80, 16, 17, 17), (8, 80, 3, 3, 3)),
], ids=["a batch", "odd", "few places", "large filters", "rows", "large"])  # fmt: skip
def test_others_stay(shapes):
    x, weight = (rand(*shape) for shape in shapes)
    assert volumes(both()[0], x, weight, rand(8)) == [shapes[0]]
