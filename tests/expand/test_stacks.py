"""Elements of stacked numbers are read where they come from; what is joined again and again is joined once."""

import pytest
import torch

import kiln
from kiln.expand import stacks
from kiln.expand.expand import expand
from kiln.expand.stacks import joined_once, unstacked
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded

NUMBERS = [torch.tensor(float(i)) for i in range(4)]


def stacked(x, *numbers):
    rows = torch.stack([n + 1 for n in numbers])
    return tuple([x * rows.select(0, i) for i in range(len(numbers))])


def ops_of(f, *inputs):
    graph = unstacked(expand(recorded(f, *inputs), "prims"))
    return {node.op for node in graph.nodes}


def test_numbers_are_read_without_the_stack():
    x = torch.randn(5)
    assert torch.ops.aten.cat.default not in ops_of(stacked, x, *NUMBERS)
    got = compile_graph(recorded(stacked, x, *NUMBERS))([x, *NUMBERS])
    torch.testing.assert_close(tuple(got), stacked(x, *NUMBERS))


def test_what_is_shown_stays_in_the_stack():
    """A view that the caller gets shares the memory of the stack."""

    def f(a, b):
        rows = torch.stack([a, b])
        return rows, rows.select(0, 1)

    assert torch.ops.aten.cat.default in ops_of(f, *NUMBERS[:2])
    rows, one = compile_graph(recorded(f, *NUMBERS[:2]))(NUMBERS[:2])
    assert one.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr() and one == 1


def test_rows_and_longer_pieces_stay():
    def rows(a, b):
        return torch.stack([a, b]).select(1, 0) + 1

    def pieces(a, b):
        return torch.cat([a, b]).select(0, 3) + 1

    vectors = (torch.arange(3.0), torch.arange(3.0) + 10)
    for f in (rows, pieces):
        assert torch.ops.aten.cat.default in ops_of(f, *vectors)
        (got,) = compile_graph(recorded(lambda a, b, f=f: (f(a, b),), *vectors))(list(vectors))
        torch.testing.assert_close(got, f(*vectors))


def dense(*images):
    """Layers that read all that was made before them."""
    made = list(images[:1])
    for image in images[1:]:
        made.append(torch.cat(made, 1).sum(1, keepdim=True) * image)
    return torch.cat(made, 1), torch.cat(images, 1)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_what_many_layers_join_is_joined_once(form, monkeypatch):
    monkeypatch.setattr(stacks, "DEVICES", frozenset({"cpu"}))
    images = [torch.randn(2, 3, 4, 5).to(memory_format=form) for _ in range(20)]
    graph = joined_once(expand(recorded(dense, *images), "prims"))
    joins = [n for n in graph.nodes if n.op is torch.ops.aten.cat.default]
    # Of the first eight and of those with seven more; the one that shares its beginning with none stays whole.
    assert [len(n.args[0]) for n in joins if len(n.spec.shape) == 4 and n.name.startswith("cat")].count(20) == 1
    assert max(len(n.args[0]) for n in joins[:-1]) == 8 and len(joins) == 20 + 1 + 2
    for n in joins:
        assert n.spec.stride == torch.empty(n.spec.shape).to(memory_format=form).stride()
    got = compile_graph(recorded(dense, *images))(list(images))
    for mine, theirs in zip(got, dense(*images), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
        assert mine.stride() == theirs.stride()


def test_views_of_a_stack_that_are_returned_are_its_own():
    def f(x):
        first = torch.stack(x.unbind(-1), -1).select(0, 0)
        return first.flatten(), first * 2

    x = torch.arange(4.0)[::2]
    got = kiln.compile(f, fullgraph=True)(x)
    assert torch.equal(got[0], f(x)[0])
    got[0].fill_(7)
    assert x[0] == 0
