"""Graphs over a GPU and the CPU: what is on the CPU runs there, and numbers go over together."""

import operator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn, optim

import kiln
from kiln.base.graph import CONSTANT, Graph, TensorSpec, mapped
from kiln.base.symbols import Scope
from kiln.launch import program as programs
from kiln.launch import sides
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded

from .driver import pretended

aten = torch.ops.aten
GPU = torch.device("cuda:0")
SHAPES = [(64, 32), (64,), (10, 64), (10,), (33, 3)] * 4


def of(*shape, device=sides.CPU):
    stride = torch.empty(shape).stride()
    return TensorSpec(shape, stride, torch.float32, device)


def elsewhere(graph):
    """The graph with what has dimensions, and what follows from it, on a GPU."""

    def moved(spec):
        return mapped(spec, lambda one: replace(one, device=GPU) if isinstance(one, TensorSpec) else one)

    on_gpu = set()
    for node in (*graph.inputs, *graph.nodes):
        large = node in graph.inputs and isinstance(node.spec, TensorSpec) and node.spec.shape
        if large or node.op is not CONSTANT and on_gpu.intersection(node.inputs()):
            on_gpu.add(node)
            node.spec = moved(node.spec)
    return graph


@contextmanager
def two_sides(monkeypatch, moved=elsewhere):
    """A GPU without one: its memory is the CPU's, and a driver runs the loops."""
    with pretended() as driver, monkeypatch.context() as patch:
        patch.setitem(programs.TARGETS, "cuda", programs.TARGETS["cpu"])
        patch.setitem(programs.TARGETS, "cpu", (programs.WAYS["usual"], programs.on_cpu))
        patch.setattr(programs, "determined", moved)
        patch.setattr(sides, "brought", lambda values, numbers, device: list(values))
        yield driver


OPTIMIZERS = {
    "adam": lambda p: optim.Adam(p, 0.01, foreach=True),
    "adam one by one": lambda p: optim.Adam(p, 0.01, foreach=False),
    "adamw": lambda p: optim.AdamW(p, 0.01, foreach=True),
    "amsgrad": lambda p: optim.AdamW(p, 0.01, weight_decay=0.1, amsgrad=True, foreach=True),
    "decay": lambda p: optim.Adam(p, 0.01, weight_decay=0.1, maximize=True, foreach=True),
    "a tensor's rate": lambda p: optim.AdamW(p, torch.tensor(0.01), foreach=False),
    "nadam": lambda p: optim.NAdam(p, 0.01, foreach=True),
    "nadam one by one": lambda p: optim.NAdam(p, 0.01, foreach=False),
    "radam": lambda p: optim.RAdam(p, 0.01, foreach=True),
    "radam one by one": lambda p: optim.RAdam(p, 0.01, weight_decay=0.1, foreach=False),
    "adamax": lambda p: optim.Adamax(p, 0.01, foreach=True),
}


def parameters(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, dtype=dtype, device=device)) for shape in SHAPES]
    for each in made:
        each.grad = torch.randn_like(each)
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_counted_on_the_cpu(name, monkeypatch):
    mine, theirs = parameters(), parameters()
    kiln.reset()
    optimizer, eager = OPTIMIZERS[name](mine), OPTIMIZERS[name](theirs)
    optimizer.step(), eager.step()  # their state is made without a GPU
    with two_sides(monkeypatch) as driver:
        step = kiln.compile(optimizer.step, fullgraph=True)
        for _ in range(3):
            driver.starts.clear()
            before = [p.data_ptr() for p in mine]
            step()
            assert [p.data_ptr() for p in mine] == before
            eager.step()
            torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)
    print(name, len(driver.starts))
    assert 1 <= len(driver.starts) <= 3
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(dict(optimizer.state[p]), dict(eager.state[q]), rtol=2e-6, atol=1e-7)


def test_more_than_numbers_goes_over_where_it_is_asked_to(monkeypatch):
    """Data of the CPU, a maximum on the GPU, and what comes back, as three parts."""
    graph = Graph()
    x, n = graph.input("x", of(6, 5)), graph.input("n", of())
    w = graph.input("w", of(6, 5, device=GPU))
    moved = graph.call(aten._to_copy.default, (x,), {"device": GPU}, of(6, 5, device=GPU))
    made = graph.call(aten.maximum.default, (moved, w), spec=w.spec)
    made = graph.call(aten.mul.Tensor, (made, n), spec=made.spec)
    back = graph.call(aten._to_copy.default, (made,), {"device": sides.CPU}, of(6, 5))
    graph.outputs = (graph.call(aten.add.Tensor, (back, n), spec=back.spec), x, None)
    _, parts = sides.parted(graph)
    assert [part.device.type for part in parts] == ["cuda", "cpu"]
    assert [[node.name for node in part.moved] for part in parts] == [["n", "x"], [made.name]]
    given = [torch.randn(6, 5), torch.tensor(2.0), torch.randn(6, 5)]
    with two_sides(monkeypatch, lambda graph: graph) as driver:
        got = compile_graph(graph)(list(given))
    assert driver.starts and got[1] is given[0] and got[2] is None
    torch.testing.assert_close(got[0], torch.maximum(given[0], given[2]) * 2 + 2)


def test_half_types_take_numbers_as_they_are(monkeypatch):
    """A number of the CPU is not rounded to the type of what it is multiplied with."""
    x, n = torch.randn(100).bfloat16(), torch.tensor(1.001)

    def f(x, n):
        return (x / (n * n + 1), x.float() / (n * n + 1))

    with two_sides(monkeypatch):
        half, whole = compile_graph(recorded(f, x, n))([x, n])
    assert half.dtype is torch.bfloat16 and torch.equal(half, whole.bfloat16())


def test_graphs_that_cannot_be_parted_run_op_by_op(monkeypatch):
    x, index = torch.randn(4, 3), torch.tensor(2)

    def f(x, n):
        return torch.take(x, n.reshape(1)) + 1, n + 1  # eager refuses more than a number of another device

    with two_sides(monkeypatch) as driver:
        got = compile_graph(recorded(f, x, index))([x, index])
    assert not driver.starts
    torch.testing.assert_close(tuple(got), f(x, index))


def test_data_of_sizes_that_vary_is_not_known_to_fill_memory():
    """As in `x[1:] = 0.5` over other sizes: the number comes spread over them, without memory of its own."""
    graph, n = Graph(), Scope().symbol(6, "x.size(0)")
    x = graph.input("x", TensorSpec((n, 5), (5, 1), torch.float32, GPU))
    number = graph.input("number", of())
    spread = TensorSpec((n, 5), (0, 0), torch.float32, sides.CPU)
    wide = graph.call(aten.expand.default, (number, (n, 5)), spec=spread)
    graph.outputs = (graph.call(aten.copy.default, (x, wide), spec=x.spec),)
    assert sides.parted(graph) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(name, kind):
    mine, theirs = parameters("cuda", kind), parameters("cuda", kind)
    kiln.reset()
    optimizer, eager = OPTIMIZERS[name](mine), OPTIMIZERS[name](theirs)
    step = kiln.compile(optimizer.step, fullgraph=True)
    if kind is torch.bfloat16:  # eager rounds on the way, kernels at the end
        whole = [nn.Parameter(p.detach().float()) for p in mine]
        for p, q in zip(mine, whole, strict=True):
            q.grad = p.grad.float()
        exact = OPTIMIZERS[name](whole)
        for each in (step, eager.step, exact.step) * 5:
            each()
        for p, q, r in zip(mine, theirs, whole, strict=True):
            assert (p - r).norm() <= 1.2 * (q - r).norm() + 1e-3 * r.norm()
        return
    for _ in range(5):
        step()
        eager.step()
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)
    for p, q in zip(mine, theirs, strict=True):
        state = dict(optimizer.state[p]), dict(eager.state[q])
        torch.testing.assert_close(*state, rtol=2e-6, atol=1e-7)


def test_numbers_go_over_in_places_that_kernels_take():
    given = [torch.tensor(float(i)) for i in range(5)] + [torch.tensor(7), torch.arange(6.0)]
    made = sides.brought(given, [5, 1], sides.CPU)
    torch.testing.assert_close(made, given)
    assert len({x.untyped_storage().data_ptr() for x in made[:5]}) == 1
    assert [x.data_ptr() - made[0].data_ptr() for x in made[:5]] == [0, 16, 32, 48, 64]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_data_of_the_cpu_on_a_gpu(mode):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()

    def f(x, n):
        return (model((x * 2).cuda()) * n).cpu() + n

    step = kiln.compile(f, mode=mode)
    for i in range(6):
        x, n = torch.randn(9, 16), torch.tensor(float(i))
        torch.testing.assert_close(step(x, n), f(x, n), rtol=1e-5, atol=1e-5)
        step(x, n).sum().backward()


def attention(of_q):
    """A graph with attention on a GPU, which gives numbers beside tensors, and what is made on the CPU."""
    graph = Graph()
    q, mask = graph.input("q", of_q), graph.input("mask", replace(of_q, dtype=torch.bool))
    rows, seed = of(2, 2, 4, device=GPU), replace(of(device=GPU), dtype=torch.int64)
    spec = (of_q, rows, None, None, 4, 4, seed, seed, None)
    op = aten._scaled_dot_product_cudnn_attention.default
    found = graph.call(op, (q, q, q, None, True), {}, spec=spec)
    out, length = (graph.call(operator.getitem, (found, i), spec=spec[i]) for i in (0, 4))
    graph.call(aten.rand.default, ([],), {}, spec=of())
    least = graph.call(aten.scalar_tensor.default, (-1.0,), {}, spec=of())
    known = graph.constant(torch.tensor(3.0), of(), "literal")
    many = graph.call(aten.expand.default, (known, [2]), {}, spec=replace(of(2), stride=(0,)))
    there = graph.call(aten._to_copy.default, (many,), {"device": GPU}, spec=of(2, device=GPU))
    graph.outputs = (graph.call(aten.where.self, (mask, out, least), {}, spec=of_q), length, there)
    return graph


def test_attention_on_one_side_gives_numbers_too():
    whole, parts = sides.parted(attention(of(2, 2, 4, 8, device=GPU)))
    names = [[str(node.op) for node in part.graph.nodes] for part in parts]
    assert [part.device for part in parts] == [sides.CPU, GPU]
    assert names[0] == ["aten.rand.default"] and names[1].count("aten.full.default") == 2
    assert not parts[1].moved and [node.spec for node in parts[1].makes if type(node.spec) is int] == [4]


def test_a_number_of_the_program_is_written_to_many_places(monkeypatch, caplog):
    def f(x):
        y = torch.select_scatter(x, torch.tensor(3.0).expand(5), 1, 0)
        return torch.where(y > 2, y, torch.scalar_tensor(-1.0)) * 2

    x = torch.randn(5, 4)
    kiln.reset()
    with two_sides(monkeypatch):
        run = compile_graph(recorded(f, x))
        torch.testing.assert_close(run([x])[0], f(x))
    assert not caplog.records


def test_what_may_raise_and_nobody_reads_runs_where_it_is():
    """A check of what is on a GPU gives no tensor of its own to say where it runs."""
    graph = attention(of(2, 2, 4, 8, device=GPU))
    graph.call(aten._assert_tensor_metadata.default, (graph.inputs[0],), {}, None)
    _, parts = sides.parted(graph)
    assert [part.device for part in parts] == [sides.CPU, GPU]
    assert [str(node.op) for node in parts[1].graph.nodes].count("aten._assert_tensor_metadata.default") == 1
