"""Masks and repeats in one graph: how much they select is a number that the graph reads."""

from __future__ import annotations

import pytest
import torch

from tests.same import Same
from tests.support import EAGER, Counting, kiln

pytestmark = pytest.mark.skipif(EAGER, reason="asks Kiln itself")


def both_sides(x, mask):
    y = x.clone()
    y[mask] = x[mask] * 2 + 1
    return y.relu()


def written_between(x, mask):
    mask = mask.clone()
    first = x.detach()[mask].sum()
    mask[0] = True
    return first + x[mask].mean()


PROGRAMS = {
    "read": lambda x, mask: x[mask].sin(),
    "loss": lambda x, mask: (x[mask] - 1).square().mean(),
    "rows": lambda x, mask: x[mask[:, 0]] @ x.t(),
    "rows, some columns": lambda x, mask: x[mask[:, 0], 1:].mean(0),
    "columns": lambda x, mask: x[:, mask[0]] - x[:, mask[0]].mean(),
    "both sides": both_sides,
    "written between": written_between,
    "nonzero": lambda x, mask: mask.nonzero() + 1,
    "places": lambda x, mask: (x[mask.nonzero(as_tuple=True)] * 2, torch.argwhere(mask)),
    "by their methods": lambda x, mask: (y := x * 1, y.__setitem__(mask, x.__getitem__(mask) * 2))[0],
    "a dimension more": lambda x, mask: x[None, mask[:, 0], None].sum(1),
    "where": lambda x, mask: x[torch.where(mask)] * 2,
    "masked_select": lambda x, mask: torch.masked_select(x, mask[:, :1]).cos(),
    "repeats": lambda x, mask: x.repeat_interleave(mask.sum(1), 0) * 2,
    "repeats of elements": lambda x, mask: torch.repeat_interleave(mask.sum(1)) + 1,
}
SHARES = (0.0, 0.5, -0.5, 9.0, -9.0)  # above which elements are selected: some, few, many, none, all


@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph(name, backend):
    torch.manual_seed(0)
    program, counting = PROGRAMS[name], Counting(backend)
    compiled = kiln.compile(program, backend=counting, fullgraph=True)
    for share in SHARES:
        x, mask = torch.randn(4, 5), torch.randn(4, 5) > share
        runs = []
        for call in (program, compiled):
            given = x.clone().requires_grad_()
            found = call(given, mask)
            parts = [part for part in (found if isinstance(found, tuple) else (found,)) if part.requires_grad]
            torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])
            runs.append((found, given.grad))
        torch.testing.assert_close(*runs, equal_nan=True)
    assert len(counting.modules) == 1


@pytest.mark.parametrize("key", ["mask[:3]", "(slice(None), mask[:, 0])", "(None, mask[:, :2])"])
def test_masks_of_another_shape(key):
    """Eager refuses them, and so does a graph that would take the places of what is true."""
    program = eval(f"lambda x, mask: x[{key}].sum()")
    x = torch.randn(4, 5)
    for call in (program, kiln.compile(program), kiln.compile(program, fullgraph=True)):
        with pytest.raises((IndexError, kiln.Break)):
            call(x, x > 0)


def test_a_size_that_is_told():
    """With `output_size` nothing depends on the numbers of the repeats."""

    def program(x, times):
        return x.repeat_interleave(times, 0, output_size=6) * 2

    counting, x = Counting(), torch.randn(3, 2)
    compiled = kiln.compile(program, backend=counting, fullgraph=True)
    for times in ([1, 2, 3], [6, 0, 0]):
        Same()(program(x, torch.tensor(times)), compiled(x, torch.tensor(times)))
    assert len(counting.modules) == 1
