"""`kiln.profile`: names in traces of torch.profiler, and nothing while it is off."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import kiln

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events")


def step(x, w):
    y = (x @ w).relu() * 2
    kiln.graph_break()
    return (y.sin() + 1).sum()


def ranges(trace):
    """The ranges of ours in a trace, each with the ranges that it lies in, in the order in which they began."""
    found = []
    for event in sorted(trace.events(), key=lambda e: e.time_range.start):
        names, at = [], event
        while at is not None:
            if at.name.startswith("kiln."):
                names.insert(0, at.name)
            at = at.cpu_parent
        if event.name.startswith("kiln."):
            found.append(names)
    return found


def traced(run, inside=True):
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        if inside:
            with kiln.profile():
                run()
        else:
            run()
    return ranges(trace)


def arguments():
    return torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)


def test_functions_graphs_kernels_and_calls_are_named():
    compiled = kiln.compile(step)
    x, w = arguments()
    compiled(x, w).backward()
    found = traced(lambda: compiled(x, w).backward())
    outer = [names[0] for names in found if len(names) == 1]
    first = step.__code__.co_firstlineno
    assert outer[0] == f"kiln.function step (test_profile.py:{first})"
    assert sum(name.startswith("kiln.graph step") and name.endswith("backward") for name in outer) == 2
    inner = ["/".join(names) for names in found if len(names) > 2]
    assert any("forward/kiln.call mm" in path or "forward/kiln.call addmm" in path for path in inner)
    assert any("forward/kiln.kernel" in path and "sin" in path for path in inner)
    resumed = [names[1] for names in found if len(names) == 2]
    assert f"kiln.function step (test_profile.py:{first + 2})" in resumed
    assert any("backward" in names[0] and "kiln.kernel" in names[1] for names in found if len(names) == 2)


@pytest.mark.parametrize("backend", ["aot_eager", "kiln"])
def test_values_are_the_same_and_marks_end_with_the_block(backend):
    compiled = kiln.compile(step, backend=backend)
    x, w = arguments()
    expected = compiled(x, w)
    with kiln.profile():
        with kiln.profile():
            torch.testing.assert_close(compiled(x, w), expected)
        assert traced(lambda: compiled(x, w), inside=False)  # the outer block is still on
    assert traced(lambda: compiled(x, w).backward(), inside=False) == []


def test_op_by_op_graphs_name_their_ops():
    compiled = kiln.compile(step, backend="aot_eager")
    x, w = arguments()
    compiled(x, w)
    names = {names[-1] for names in traced(lambda: compiled(x, w))}
    assert {"kiln.call mm", "kiln.call relu", "kiln.call sin"} <= names
    assert any(name.startswith("kiln.graph") for name in names)


def fails(table, i):
    return torch.nn.functional.embedding(i, table * 2)


def test_exceptions_end_their_ranges():
    compiled = kiln.compile(fails)
    table, good, bad = torch.ones(4, 3), torch.tensor([1]), torch.tensor([9])
    with torch.no_grad():
        compiled(table, good)

        def run():
            with pytest.raises(IndexError, match="out of range"):
                compiled(table, bad)
            compiled(table, good)

        found = traced(run)
    assert [names[0] for names in found if len(names) == 1] == [found[0][0]] * 2


def test_a_decorator():
    @kiln.profile()
    def run(f, *args):
        return f(*args)

    compiled = kiln.compile(step)
    x, w = arguments()
    compiled(x, w)
    assert traced(lambda: run(compiled, x, w), inside=False)
