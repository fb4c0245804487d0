"""Graphs over a GPU and the CPU: what is on the CPU runs there, and numbers go over together."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn, optim

import kiln
from kiln.base.graph import CONSTANT, TensorSpec, mapped
from kiln.launch import program as programs
from kiln.launch import sides
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded

from .driver import pretended

GPU = torch.device("cuda:0")
SHAPES = [(64, 32), (64,), (10, 64), (10,), (33, 3)] * 24


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
def two_sides(monkeypatch):
    """A GPU without one: its memory is the CPU's, and a driver runs the loops."""
    with pretended() as driver, monkeypatch.context() as patch:
        patch.setitem(programs.TARGETS, "cuda", programs.TARGETS["cpu"])
        patch.setitem(programs.TARGETS, "cpu", (programs.WAYS["usual"], programs.on_cpu))
        patch.setattr(programs, "determined", elsewhere)
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
