"""Masks and repeats in one graph: how much they select is a number that the graph reads."""

from __future__ import annotations

import pytest
import torch

from kiln.base import records
from tests.same import Same
from tests.support import EAGER, Counting, Watch, kiln, same_as_eager, t

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
        both_ways(program, compiled, x, mask)
    assert len(counting.modules) == 1


def given(share, seed=0):
    torch.manual_seed(seed)
    return torch.randn(12, 16), torch.randn(12, 16) > share


def both_ways(program, compiled, x, mask):
    """The program in eager and compiled: results, strides, gradients, and what was written."""
    runs = []
    for call in (program, compiled):
        mine = x.clone().requires_grad_()
        found = call(mine, mask)
        parts = [part for part in (found if isinstance(found, tuple) else (found,)) if part.requires_grad]
        torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])
        runs.append((found, mine.grad, found[0].stride() if isinstance(found, tuple) else found.stride()))
    torch.testing.assert_close(*runs, equal_nan=True)


@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_where_breaks_are_allowed(name, backend):
    """What was selected is taken to be two items or more; where it is not, the graph breaks from then on."""
    program, counting = PROGRAMS[name], Counting(backend)
    compiled = kiln.compile(program, backend=counting)
    for seed, share in enumerate((0.0, 0.5, -0.5)):
        both_ways(program, compiled, *given(share, seed))
    assert len(counting.modules) == 1
    for share in (9.0, 0.0, -9.0, 9.0, 0.5):  # none, some, all
        both_ways(program, compiled, *given(share))
    x, mask = given(9.0)
    mask[0, 0] = True
    both_ways(program, compiled, x, mask)


def test_a_break_where_the_program_looks_at_how_much_was_selected():
    def program(x, mask):
        y = x[mask]
        return y * 2 if len(y) > 20 else y * 3

    counting = Counting("kiln")
    compiled = kiln.compile(program, backend=counting)
    for share in (0.0, 0.5, -0.5, 9.0):
        both_ways(program, compiled, *given(share))
    assert "nonzero" not in "".join(module.code for module in counting.modules)


def test_whether_anything_was_selected_is_taken_to_be_so():
    def program(x, mask):
        y = x[mask]
        return x.sum() * 0 if y.shape[0] == 0 else y.mean()

    counting = Counting("kiln")
    compiled = kiln.compile(program, backend=counting)
    for seed, share in enumerate((0.0, 0.5, -0.5)):
        both_ways(program, compiled, *given(share, seed))
    assert len(counting.modules) == 1
    both_ways(program, compiled, *given(9.0))


def added_to(x, seen):
    x[x < 0] += 1
    seen.append("added")
    return x * 2


def normed(x, seen, norm):
    return norm(x[x[:, 0] > 0, :1].sum(0) + torch.arange(3.0)[:, None])


def written_before(x, seen):
    x.add_(1)
    return x[x < 0].sum()


def between_writes(x, seen):
    below = x[x < 0]
    x.sub_(below.sum())
    seen.append(below)
    return x[x > 0.5].sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "kiln"])
@pytest.mark.parametrize("program", [added_to, normed, written_before, between_writes])
def test_what_lasts_may_be_written_after_what_was_selected(program, backend):
    """What was written before could not be written again, should too little be selected."""
    norms = [torch.nn.BatchNorm1d(1) for _ in range(2)]
    programs = [lambda *a, n=n: program(*a, n) for n in norms] if program is normed else [program] * 2
    counting, graphs, seen = Counting(backend), [], ([], [])
    compiled = kiln.compile(programs[1], backend=counting)
    for seed, share in enumerate((0, 0, 5, -0.5, -5, 0)):  # some, none, few, all
        x = given(0, seed)[0] + share
        mine, mine_too = x.clone(), x.clone()
        found = [programs[0](mine, seen[0]), compiled(mine_too, seen[1])]
        torch.testing.assert_close(*found, equal_nan=True, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine, mine_too, equal_nan=True)
        graphs.append(len(counting.modules))
    Same()(*seen)
    torch.testing.assert_close(*[norm.running_mean for norm in norms], equal_nan=True)
    if program in (added_to, normed):
        assert graphs[:2] == [1, 1]
    else:
        assert graphs[0] == 2


@pytest.mark.parametrize("name", ["loss", "both sides"])
def test_both_directions_are_compiled_after_what_is_selected(name):
    """Python computes with how much it is: that is no plan; what is written has a gradient as long."""
    x, mask = given(0.0)
    with records.collect() as seen:
        both_ways(PROGRAMS[name], kiln.compile(PROGRAMS[name]), x, mask)
    assert (len(seen.graphs), len(seen.breaks), len(seen.fallbacks)) == (1, 0, 0)
    assert len(seen.plans) == {"loss": 2, "both sides": 5}[name]


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


def moved(a, b, mask):
    a = a.clone()
    a[mask] = b[mask]
    return a


def moved_here(a, b, mask):
    a[mask] = b[mask]
    return a.sum()


def moved_rows(a, b, mask):
    a, mask = a * 2, mask[:, 0]
    a[mask] = b[mask]
    return a


def moved_twice(a, b, mask):
    a, c = a * 2, b.flip(0)
    a[mask] = a[mask]
    a[mask] = c[mask]
    return a.t()


@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("f", [moved, moved_here, moved_rows, moved_twice])
def test_items_that_go_under_one_mask_are_a_choice(f, learns, backend):
    counting = Counting(backend)
    compiled = kiln.compile(f, backend=counting, fullgraph=True)

    def call(function, seed, least):
        torch.manual_seed(seed)
        a, b = torch.randn(6, 4, requires_grad=learns), torch.randn(6, 4, requires_grad=learns)
        held = (a * 1, b * 1)
        found = function(*held, a.detach() > least)
        if learns:
            (found * torch.arange(found.numel()).view(found.shape)).sum().backward()
        return found, held, a.grad, b.grad, found.stride()

    for seed, least in enumerate((0, 9, -9, 1)):  # some, none, all and few
        torch.testing.assert_close(call(compiled, seed, least), call(f, seed, least))
    assert len(counting.modules) == 1
    assert not counting.modules[0].graph.find_nodes(op="call_function", target=torch.nonzero)


def test_items_under_two_masks_or_of_two_kinds_are_selected():
    def crossed(a, b, mask):
        a, other = a.clone(), ~mask
        a[other] = b[mask]
        return a

    def converted(a, b, mask):
        a, b = a.clone(), b.double()
        a[mask] = b[mask]
        return a

    def widened(a, b, mask):
        a, b, mask = a.clone(), b[:, :1], mask[:, 0]
        a[mask] = b[mask]
        return a

    a, b = torch.randn(6, 4), torch.randn(6, 4)
    mask = (torch.arange(6) % 2 == 0)[:, None].expand(6, 4).contiguous()
    for f in (crossed, widened):
        torch.testing.assert_close(kiln.compile(f)(a, b, mask), f(a, b, mask))
    for f in (converted, kiln.compile(converted)):
        with pytest.raises(RuntimeError, match="dtypes match"):
            f(a, b, mask)


def counts(x, n):
    found = x.to(torch.int32).bincount(minlength=5) * 2, torch.bincount(x, minlength=len(n))
    return n.add_(found[1][:5]), *found


@pytest.mark.parametrize("backend", ["eager", "kiln"])
def test_counts_are_as_many_as_are_asked_for(backend):
    compiled, breaks = kiln.compile(counts, backend=backend), []
    for row in ([0, 2, 2], [1, 1, 3], [3, 4, 0], [2, 7, 1], [1, 1, 3], [2, 7, 1], [2, -1, 0], [0, 0, 1], [1, 2, 3]):
        found = []
        for f in (counts, compiled):
            n = torch.zeros(5, dtype=torch.long)
            with records.collect() as log:
                try:
                    found.append((f(torch.tensor(row), n), n))
                except RuntimeError as error:
                    found.append((str(error), n))
        Same()(*found)
        breaks.append(len(log.breaks))
    assert not any(breaks[:6])
    assert breaks[6] > 0  # after two calls with more of them


# ---------------------------------------------------------------- custom ops that say how much they give


@torch.library.custom_op("kiln_masks::above", mutates_args=())
def above(x: torch.Tensor, low: float = 0.0) -> torch.Tensor:
    return x[x > low].clone()


@above.register_fake
def _(x, low=0.0):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(min=0, max=x.numel()))


@torch.library.custom_op("kiln_masks::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x[x > 0].clone()
    return y, torch.stack([y, y * 2])


@pair.register_fake
def _(x):
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(size), x.new_empty(2, size)


def sized_by_custom_ops(x):
    y = torch.ops.kiln_masks.above(x + 1, low=1.0)
    one, both = pair(x)
    return y * 2, len(y), (one + both).sum(0), both.shape, above(x).view(-1, 1) + 1


@pytest.mark.parametrize("backend", ["", "aot_eager", "kiln"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_custom_ops_give_as_much_as_they_say(fullgraph, backend):
    w = Watch(sized_by_custom_ops, fullgraph=fullgraph)
    w.backend.backend = backend
    for x in (t(9), t(9) + 1, t(9) - 3, t(9) + 0.5):  # nothing is above 0 in the third
        w(x)
    assert EAGER or len(w.backend.modules) <= 2 and not w.breaks


def test_gradients_of_custom_ops_that_select_are_the_programs():
    r = same_as_eager(lambda x: (above(x * 2).detach() * x.sum(), x + 1), t(9, grad=True))
    assert EAGER or r.graphs >= 1
