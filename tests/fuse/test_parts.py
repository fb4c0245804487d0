"""Graphs of parts that have nothing to do with each other: equal parts are fused and written once."""

import copy

import pytest
import torch

import kiln
from kiln.base import records
from kiln.fuse import program as fusing
from kiln.generate import code
from tests.gpu.driver import pretended

SHAPES = [(7,), (4, 8), (8, 4), (32,)]


@pytest.fixture
def counted(monkeypatch):
    """The nodes of the graphs that were fused, and the nests that were written."""
    graphs, nests = [], []
    run, emitted = fusing.Fuser.run, code.Emitter.emit
    monkeypatch.setattr(fusing.Fuser, "run", lambda fuser: graphs.append(len(fuser.graph.nodes)) or run(fuser))
    monkeypatch.setattr(code.Emitter, "emit", lambda emitter: nests.append(emitter.nest) or emitted(emitter))
    return graphs, nests


def parameters(count):
    made = [torch.nn.Parameter(torch.randn(SHAPES[i % len(SHAPES)])) for i in range(count)]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def stepped(make, count, calls=3):
    """Compare steps with eager's; what compiling the last one left."""
    compiled = parameters(count)
    eager = copy.deepcopy(compiled)
    for p, q in zip(compiled, eager, strict=True):
        q.grad = p.grad.clone()
    ours, theirs = make(compiled), make(eager)
    step = kiln.compile(lambda: ours.step())
    for _ in range(calls):
        with records.collect() as seen:
            step()
        theirs.step()
        if seen.codes:
            last = seen
    assert not last.fallbacks
    for p, q in zip(compiled, eager, strict=True):
        torch.testing.assert_close(p, q)
    return last


MAKERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "op after op": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_over_more_tensors_fuses_and_writes_no_more(name, counted):
    graphs, nests = counted
    found = []
    for count in (16, 40):
        graphs.clear(), nests.clear()
        last = stepped(MAKERS[name], count)
        assert [made.kernels for made in last.codes] == [1]
        found.append((list(graphs), len(nests)))
    assert found[0] == found[1]


def test_many_nests_of_one_body_are_one_start_of_a_gpu():
    ps = [torch.randn(SHAPES[i % len(SHAPES)]) for i in range(12)]
    with pretended() as driver:
        out = kiln.compile(lambda xs: [x * 2 + x.sin() for x in xs])(ps)
    assert len(driver.starts) == 1
    torch.testing.assert_close(out, [x * 2 + x.sin() for x in ps])


def test_parts_share_numbers_and_results_may_be_views():
    def f(xs, rate):
        return [(x - rate * x.cos()).t() for x in xs], [x + rate for x in xs]

    xs, rate = [torch.randn(3, 5) for _ in range(9)], torch.tensor(0.25)
    with records.collect() as seen:
        got = kiln.compile(f, fullgraph=True)(xs, rate)
    torch.testing.assert_close(got, f(xs, rate))
    assert [one.stride() for one in got[0]] == [(1, 5)] * 9
    assert [made.kernels for made in seen.codes] == [1] and not seen.fallbacks


def test_parts_of_several_loops_over_a_gpu_are_started_apart():
    xs = [torch.randn(6, 5).t() for _ in range(8)]
    others = [torch.randn(5, 6) for _ in range(8)]
    with pretended() as driver:
        out = kiln.compile(lambda a, b: [x + y for x, y in zip(a, b)])(xs, others)
    torch.testing.assert_close(out, [x + y for x, y in zip(xs, others)])
    assert driver.starts


@pytest.mark.parametrize("made", (
    lambda i: torch.full((), 2.0 + i), lambda i: torch.arange(i, i + 4), lambda i: torch.tensor(1.0 + i),
    lambda i: torch.full((4,), 1.0) if i % 2 else torch.tensor([3.0, 1.0, 4.0, 2.0]),
))  # fmt: skip
def test_parts_that_read_other_constants_differ(made):
    def f(*xs):
        return tuple([x * made(i) for i, x in enumerate(xs)])

    xs = [torch.randn(4, requires_grad=True) for _ in range(12)]
    torch.testing.assert_close(kiln.compile(f, fullgraph=True)(*xs), f(*xs))


def test_constants_that_leave_the_graph_beside_copies_of_them():
    def f(x):
        one, others = torch.ones(()), [torch.tensor(0.5 + i) for i in range(4)]
        return (*[other.clone() for other in others], one, one.clone(), one.clone(), x + 1)

    with records.collect() as seen:
        got = kiln.compile(f, fullgraph=True)(torch.zeros(3))
    torch.testing.assert_close(got, f(torch.zeros(3)))
    assert not seen.fallbacks
