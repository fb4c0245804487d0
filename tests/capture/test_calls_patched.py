"""Functions that PyTorch's compiler has put others around, as it does when it is first used in a process."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.support import EAGER, kiln

AROUND = """
def patched(function):
    @wraps(function)
    def around(*args, **kwargs):
        return function(*args, **kwargs)
    return around
"""


@pytest.mark.skipif(EAGER, reason="without Kiln there are no graphs")
def test_steps_of_optimizers_that_were_patched_are_one_graph(monkeypatch):
    space = {"__name__": "torch._dynamo.eval_frame", "wraps": functools.wraps}
    exec(AROUND, space)
    monkeypatch.setattr(torch.optim.SGD, "_init_group", space["patched"](torch.optim.SGD._init_group))
    mine, theirs = ([torch.ones(3, requires_grad=True)] for _ in range(2))
    own, eager = (torch.optim.SGD(p, lr=0.1, momentum=0.9) for p in (mine, theirs))
    step = kiln.compile(own.step, backend="eager", fullgraph=True)
    for grad in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.0, -1.0])):
        for p, run in ((mine[0], step), (theirs[0], eager.step)):
            p.grad = grad.clone()
            run()
    assert torch.equal(mine[0], theirs[0])
