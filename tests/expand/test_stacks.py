"""Elements of stacked numbers are read where they come from."""

import torch

from kiln.expand.expand import expand
from kiln.expand.stacks import unstacked
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
