"""Arguments that begin elsewhere in their memory than in the first call: what counts from there is eager's."""

import pytest
import torch

import kiln
from kiln.base import records

STARTS = 1, 2, 3


def shown(x):
    return x.as_strided((2,), (1,))


def shown_of_a_view(x):
    return torch.as_strided(x[1:], (2,), (1,)), x * 2


def read(x):
    return x.as_strided((2,), (1,)) + 1


def written(x):
    x.as_strided((2,), (1,)).add_(1)
    return x * 2


def shown_by_place(x):
    return x.as_strided((2,), (1,), 35), x * 2


def written_by_place(x):
    x.as_strided((2,), (1,), 32).add_(1)
    return x * 2


def written_by_op(x):
    torch.ops.aten.as_strided.default(x, (2,), (1,), 32).add_(1)
    return x * 2


def number(x):
    return x * x.storage_offset()


def number_of_a_view(x):
    return x * x[1:, 2:].storage_offset()


def number_where_no_base_shows(x):
    return x * x.detach()[1:].storage_offset()


def ran(f, start, grad):
    memory = torch.arange(100.0).view(10, 10).requires_grad_(grad)
    if grad:
        memory = memory * 1
    with torch.no_grad() if grad is None else torch.enable_grad():
        found = f(memory[start : start + 3])
    results = found if isinstance(found, tuple) else (found,)
    return [(y.tolist(), y.stride(), y.storage_offset()) for y in results], memory.tolist()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "kiln"])
@pytest.mark.parametrize("f", [
    shown, shown_of_a_view, read, written, shown_by_place, written_by_place, written_by_op, number, number_of_a_view,
    number_where_no_base_shows,
], ids=lambda f: f.__name__)  # fmt: skip
def test_what_counts_from_the_start_of_memory(f, backend, dynamic):
    compiled = kiln.compile(f, backend=backend, dynamic=dynamic)
    for start in STARTS:
        assert ran(compiled, start, False) == ran(f, start, False)


def test_other_starts_are_no_recompile_where_nothing_counts_from_them():
    with records.collect() as log:
        compiled = kiln.compile(shown_of_a_view, fullgraph=True)
        for start in STARTS:
            assert ran(compiled, start, False) == ran(shown_of_a_view, start, False)
        by_place = kiln.compile(number, fullgraph=True)
        for start in STARTS[:2]:
            assert ran(by_place, start, False) == ran(number, start, False)
    assert [r.reasons for r in log.recompiles] == [("x.<storage_offset> was 10, now 20",)]


def test_views_with_gradients_begin_where_they_do():
    compiled = kiln.compile(shown)
    for start in STARTS:
        assert ran(compiled, start, True) == ran(shown, start, True)
