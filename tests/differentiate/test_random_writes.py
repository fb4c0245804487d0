"""Random programs of views and writes do the same as eager."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.differentiate.joined import check_graph

VIEWS = ["view", "transpose", "select", "narrow", "unsqueeze", "detach", "diagonal", "as_strided", "squeeze"]
WRITES = ["add", "mul", "fill", "copy", "scaled", "clamp", "index"]


def viewed(kind: str, x: Any, rng: random.Random) -> Any:
    """A random view of a node, or None where this kind does not fit its shape."""
    like = x.meta["like"]
    shape = tuple(like.shape)
    dim = rng.randrange(len(shape)) if shape else 0
    args: Any = None
    if kind == "view" and like.is_contiguous():
        args = (-1,) if rng.random() < 0.5 else (*shape, 1)
    elif kind == "transpose" and len(shape) >= 2:
        args = (0, rng.randrange(1, len(shape)))
    elif kind == "select" and len(shape) >= 2:
        args = (dim, rng.randrange(shape[dim]))
    elif kind == "narrow" and shape and shape[dim] > 1:
        args = (dim, rng.randrange(shape[dim]), 1)
    elif kind == "unsqueeze":
        args = (rng.randrange(len(shape) + 1),)
    elif kind in ("detach", "squeeze") or kind == "diagonal" and len(shape) >= 2:
        args = ()
    elif kind == "as_strided" and shape and like.is_contiguous() and like.storage_offset() == 0:
        args = ((max(1, like.numel() // 2),), (2,))
    return None if args is None else made(x.graph.call_method(kind, (x, *args)), getattr(like, kind)(*args))


def made(node: Any, like: torch.Tensor) -> Any:
    """A node that remembers a tensor of its shape."""
    node.meta["like"] = like
    return node


def program(seed: int) -> torch.fx.GraphModule:
    """A graph that takes views of an intermediate and of an input and writes to them."""
    rng = random.Random(seed)
    graph = torch.fx.Graph()
    x, buffer = graph.placeholder("x"), graph.placeholder("buffer")
    base = made(graph.call_function(torch.mul, (x, 2)), torch.zeros(3, 4))
    live = [base, made(buffer, torch.zeros(3, 4))]
    results = []
    for _ in range(rng.randrange(3, 9)):
        target = rng.choice(live)
        if rng.random() < 0.5:
            view = viewed(rng.choice(VIEWS), target, rng)
            if view is not None:
                live.append(view)
            continue
        write(graph, rng.choice(WRITES), target, rng)
        if rng.random() < 0.3:
            results.append(graph.call_method("sum", (rng.choice(live),)))
    results += [node for node in live if rng.random() < 0.5]
    graph.output((*results, graph.call_method("sum", (base,))))
    return torch.fx.GraphModule({}, graph)


def write(graph: torch.fx.Graph, kind: str, target: Any, rng: random.Random) -> None:
    """A write to a node's tensor whose derivative does not need what was there."""
    if kind in ("add", "mul"):
        graph.call_method(f"{kind}_", (target, rng.choice([2, 0.5, -1])))
    elif kind == "fill":
        graph.call_method("fill_", (target, 1.5))
    elif kind == "copy":
        graph.call_method("copy_", (target, graph.call_method("sin", (target,)) if rng.random() < 0.5 else 0.25))
    elif kind == "scaled":
        graph.call_method("add_", (target, target), {"alpha": 0.5})
    elif kind == "clamp":
        graph.call_method("clamp_", (target,), {"min": -0.5})
    elif kind == "index" and target.meta["like"].dim():
        graph.call_method("index_fill_", (target, 0, graph.call_function(torch.tensor, ([0],)), 2.0))


@pytest.mark.parametrize("seed", range(80))
def test_random_writes(seed):
    module = program(seed)
    x = torch.linspace(-1, 1, 12).view(3, 4)
    if seed % 2:
        x.requires_grad_()
    try:
        copies = [x.detach().clone().requires_grad_(x.requires_grad), torch.ones(3, 4)]
        outs = [out for out in module(*copies) if out.grad_fn is not None]
        if outs:
            torch.autograd.grad(outs, copies[:1], [torch.ones_like(out) for out in outs], allow_unused=True)
    except RuntimeError:
        pytest.skip("eager refuses this program")
    check_graph(module, [x, torch.ones(3, 4)])
