"""Random numbers of our own: Philox, a function of a seed and a place: any kernel can draw any element.

`kiln::uniform` gives the numbers; `draw` writes the draws of a graph with it. The seeds come from torch's
generator, one for each draw of a graph and all of them at once when the graph starts: `torch.manual_seed` is
obeyed, and every call has others.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from kiln.base.fx import runner
from kiln.base.graph import Graph, Made, Node, TensorSpec, argument, substituted
from kiln.ops.fake import Mode, make
from kiln.ops.mersenne import quicken
from kiln.ops.table import RULES, aten

MULTIPLIER, KEY_STEP, ROUNDS = 0xD256D193, 0x9E3779B9, 10  # of Philox 2x32
LOW32 = 0xFFFFFFFF
CPU = torch.device("cpu")
SEEDS = (-(1 << 63), (1 << 63) - 1)
"""The range of the seeds that torch's generator is asked for."""

library = torch.library.Library("kiln", "DEF")
library.define(
    "seeds(int count, *, Device? device=None) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
library.define(
    "uniform(Tensor seed, SymInt[] size, SymInt[] stride, int word) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def seeds(count: int, *, device: Any = None) -> list[Tensor]:
    """So many numbers of 64 bits from torch's default generator."""
    return list(torch.randint(*SEEDS, (count,)).unbind())


def uniform(seed: Tensor, size: Any, stride: Any, word: int) -> Tensor:
    """Numbers in [0, 1), multiples of 2 ** -24.

    The element at place n, counted row by row, is one half of Philox 2x32-10 with the counter n and this key.
    """
    bits = int(seed) & (1 << 64) - 1
    place = torch.arange(math.prod(size))
    left, right = place & LOW32, (place >> 32) ^ (bits >> 32)
    key = bits & LOW32
    for _ in range(ROUNDS):
        # The product of 32 bits by 32 bits, its halves by parts: 64 bits hold it without a sign alone.
        low, high = left * (MULTIPLIER & 0xFFFF), left * (MULTIPLIER >> 16)
        high = high + (low >> 16)
        left, right = (high >> 16) ^ key ^ right, (high & 0xFFFF) << 16 | low & 0xFFFF
        key = (key + KEY_STEP) & LOW32
    drawn = ((left, right)[word] >> 8).to(torch.float32) * 2.0**-24
    return torch.empty_strided(size, stride).copy_(drawn.view(size))


library.impl("seeds", seeds, "CompositeExplicitAutograd")
library.impl("uniform", uniform, "CPU")
own_seeds, own_uniform = torch.ops.kiln.seeds.default, torch.ops.kiln.uniform.default


RULES[own_seeds] = lambda count, *, device=None: [make((), (), torch.int64, CPU) for _ in range(count)]
RULES[own_uniform] = lambda seed, size, stride, word: make(size, stride, torch.float32, seed.device)


class Drawing(Made):
    """One draw of a graph on its way to numbers of our own."""

    def __init__(self, graph: Graph, seed: Node, node: Node) -> None:
        super().__init__(graph, node)
        self.seed, self.node = seed, node
        self.spec: TensorSpec = node.spec

    def of(self, gives: torch.dtype, op: Any, *args: Any, **kwargs: Any) -> Node:
        """A call that gives the draw's shape in another dtype."""
        return self.call(op, replace(self.spec, dtype=gives, offset=0), *args, **kwargs)

    def float(self, op: Any, *args: Any) -> Node:
        return self.of(torch.float32, op, *args)

    def uniform(self, word: int = 0) -> Node:
        size, stride = list(self.spec.shape), list(self.spec.stride)
        return self.float(own_uniform, self.seed, size, stride, word)

    def bounds(self) -> tuple[Any, Any]:
        """The two numbers that a draw takes, by default 0 and 1."""
        args = self.node.args
        return args[1] if len(args) > 1 else 0.0, args[2] if len(args) > 2 else 1.0

    def as_dtype(self, node: Node) -> Node:
        dtype = self.spec.dtype
        if node.spec.dtype is dtype:
            return node
        return self.of(dtype, aten._to_copy.default, node, dtype=dtype)


def _rand(at: Drawing) -> Node:
    return at.as_dtype(at.uniform())


def _uniform(at: Drawing) -> Node:
    low, high = at.bounds()
    scaled = at.float(aten.mul.Tensor, at.uniform(), high - low)
    return at.as_dtype(at.float(aten.add.Tensor, scaled, low))


def _randn(at: Drawing) -> Node:
    """Box and Muller: a radius from one half of the bits, an angle from the other."""
    above = at.float(aten.rsub.Scalar, at.uniform(0), 1.0)
    squared = at.float(aten.mul.Tensor, at.float(aten.log.default, above), -2.0)
    angle = at.float(aten.mul.Tensor, at.uniform(1), 2 * math.pi)
    radius, cosine = at.float(aten.sqrt.default, squared), at.float(aten.cos.default, angle)
    return at.as_dtype(at.float(aten.mul.Tensor, radius, cosine))


def _normal(at: Drawing) -> Node:
    mean, std = at.bounds()
    wanted = at.spec
    at.spec = replace(wanted, dtype=torch.float32)
    moved = at.float(aten.add.Tensor, at.float(aten.mul.Tensor, _randn(at), std), mean)
    at.spec = wanted
    return at.as_dtype(moved)


#: Draws of zeros and ones, as dropout's: what a program does with them does not depend on which they are.
MASKS: dict[Any, Callable[[Drawing], Node]] = {
    aten.bernoulli.p: lambda at: at.as_dtype(
        at.of(torch.bool, aten.lt.Scalar, at.uniform(), argument(at.node, 1, "p", 0.5))),
    aten.bernoulli.default: lambda at: at.as_dtype(
        at.of(torch.bool, aten.lt.Tensor, at.uniform(), at.node.args[0])),
}  # fmt: skip
#: Draws of numbers that a program may show.
SAMPLES: dict[Any, Callable[[Drawing], Node]] = {
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn,
    aten.uniform.default: _uniform,
    aten.normal_functional.default: _normal,
}
#: What is drawn by our own generator, by the value of the option `random`.
CHOSEN = {"": {}, "eager": {}, "masks": MASKS, "own": {**MASKS, **SAMPLES}}


def draw(graph: Graph, which: str) -> Graph:
    """The graph with draws from torch's default generator written with numbers of our own, in place.

    Those of a backward half stay torch's, and those of dtypes other than float32 and the half types: masks
    may be of any.
    """
    if which == "eager":
        return quicken(graph)
    table = CHOSEN[which]
    drawn = [node for node in graph.nodes if node.op in table and _ours(node)]
    if not drawn:
        return graph
    # All at the start, each a value of its own: blocks that repeat differ in what they read alone.
    spec = TensorSpec((), (), torch.int64, CPU)
    every = Node(own_seeds, (len(drawn),), {}, [spec] * len(drawn), graph.name("seeds"))
    seed_of = {
        node: Node(operator.getitem, (every, i), {}, spec, graph.name("seed")) for i, node in enumerate(drawn)
    }

    def instead(node: Node) -> tuple[list[Node], Any] | None:
        if node not in seed_of:
            return None
        drawing = Drawing(graph, seed_of[node], node)
        result = table[node.op](drawing)
        return drawing.nodes, result

    substituted(graph, instead)
    used = {read for node in graph.nodes for read in node.inputs()}
    seeds = [seed for seed in seed_of.values() if seed in used]
    graph.nodes = [*([every] if seeds else ()), *seeds, *graph.nodes]
    return graph


def _ours(node: Node) -> bool:
    spec = node.spec
    if node.backward or spec.device.type != "cpu" or node.kwargs.get("generator") is not None:
        return False
    if node.op in MASKS:
        return node.op is aten.bernoulli.p or spec.dtype.is_floating_point
    return spec.dtype in (torch.float32, torch.float16, torch.bfloat16)


#: Draws in place as what they are in a graph.
IN_PLACE = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.uniform_.default: aten.uniform.default,
    aten.normal_.default: aten.normal_functional.default,
}


class Again(Mode):
    """While it is entered, a program run op by op draws what the graph that `draw` made of it drew.

    `count` is how many draws the graph has: another number cannot be the same program, and raises at the end.
    """

    def __init__(self, which: str, count: int) -> None:
        super().__init__()
        self.table, self.count, self.drawn = CHOSEN[which], count, 0
        self.seeds: list[Tensor] = []

    def __enter__(self) -> Self:
        self.seeds = seeds(self.count)
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__()
        if error is None and self.drawn != self.count:
            raise RuntimeError(
                "second derivatives of this graph need its random numbers again, and it draws others now; "
                "compile it with options={'random': 'eager'}"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        op = IN_PLACE.get(func, func)
        if op not in self.table:
            return out
        spec = TensorSpec(tuple(out.shape), out.stride(), out.dtype, out.device)
        graph = Graph()
        seed = graph.input("seed", None)
        given = [a.clone() if isinstance(a, Tensor) else a for a in args]
        node = Node(op, tuple(given), dict(kwargs or {}), spec, "draw")
        if not _ours(node):
            return out
        drawing = Drawing(graph, seed, node)
        graph.outputs = (self.table[op](drawing),)
        graph.nodes = drawing.nodes
        self.drawn += 1
        if self.drawn > self.count:
            return out
        (made,) = runner(graph)([self.seeds[self.drawn - 1]])
        return out.copy_(made)
