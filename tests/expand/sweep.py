"""Calls with their gradients as graphs of aten ops, expanded and compared with eager."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from kiln.base.graph import Graph
from kiln.expand.expand import Expander, check
from kiln.ops.fake import fake_like
from kiln.ops.record import Recording
from kiln.ops.table import EXPANSIONS
from tests.graphs import run_graph

OPS = {op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in op_db}
#: OpInfo runs ops that draw random numbers after this seed.
SEED = 42


def leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return leaves(list(value.values())) if isinstance(value, dict) else [value]


def tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in leaves(value) if isinstance(t, torch.Tensor)]


def swapped(value: Any, by_id: dict[int, Any]) -> Any:
    """The nest with other tensors in place of those that it holds."""
    if isinstance(value, torch.Tensor):
        return by_id[id(value)]
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)([swapped(v, by_id) for v in value])
    return {k: swapped(v, by_id) for k, v in value.items()} if isinstance(value, dict) else value


def gradients(outs: list[torch.Tensor], inputs: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[Any]:
    wanted = [t for t in inputs if t.requires_grad]
    pairs = [(o, t) for o, t in zip(outs, tangents) if o.requires_grad]
    if not wanted or not pairs:
        return []
    grads = torch.autograd.grad([o for o, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True)
    return [g for g in grads if g is not None]


@dataclass
class Program:
    """One call with its gradient, to run in eager, or as a graph."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    inputs: list[torch.Tensor] = field(default_factory=list)
    tangents: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs = self.inputs or list({id(t): t for t in tensors((self.args, self.kwargs))}.values())

    def eager(self) -> list[torch.Tensor]:
        """Results and gradients."""
        torch.manual_seed(SEED)
        outs = tensors(self.function(*self.args, **self.kwargs))
        if not self.tangents:
            self.tangents = [torch.rand_like(o) + 0.5 if o.dtype.is_floating_point else torch.ones_like(o) for o in outs]
        return [*[o.detach() for o in outs], *gradients(outs, self.inputs, self.tangents)]

    def cast(self, dtype: torch.dtype) -> Program:
        """The same call in another floating dtype."""
        made = {id(t): t.detach().to(dtype).requires_grad_(t.requires_grad) if t.dtype.is_floating_point else t
                for t in self.inputs}  # fmt: skip
        tangents = [t.to(dtype) if t.dtype.is_floating_point else t for t in self.tangents]
        return Program(self.function, swapped(self.args, made), swapped(self.kwargs, made), list(made.values()), tangents)

    def graph(self, grad: bool = True) -> Graph:
        """Results, and gradients if asked, as a graph of aten ops over inputs and tangents."""
        recording = Recording()
        fakes = {id(t): fake_like(t) for t in self.inputs}
        tangents = [fake_like(t) for t in self.tangents]
        for i, fake in enumerate([*fakes.values(), *tangents]):
            recording.input(f"x{i}", fake)
        with recording, torch.set_grad_enabled(grad):
            outs = tensors(self.function(*swapped(self.args, fakes), **swapped(self.kwargs, fakes)))
            grads = gradients(outs, list(fakes.values()), tangents)
        recording.graph.outputs = tuple([recording.node(t) for t in (*outs, *grads)])
        return recording.graph.check()

    def run(self, graph: Graph) -> list[torch.Tensor]:
        """The outputs of a graph on the inputs of this call."""
        torch.manual_seed(SEED)
        with torch.no_grad():
            return list(run_graph(graph, *[t.detach().clone() for t in self.inputs], *self.tangents))

    def differentiated(self, graph: Graph) -> list[torch.Tensor]:
        """The gradients of a forward graph by autograd."""
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in self.inputs]
        with torch.enable_grad():
            outs = tensors(run_graph(graph, *inputs, *self.tangents))
            return gradients(outs, inputs, self.tangents)


def programs(name: str, dtype: torch.dtype, count: int) -> list[Program]:
    """The first samples of an op."""
    op = OPS[name]
    if dtype not in op.dtypes:
        return []
    grad = op.supports_autograd and dtype.is_floating_point
    samples = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), count)
    return [Program(op.op, (s.input, *s.args), s.kwargs) for s in samples]


def expandable(graph: Graph) -> set[Any]:
    """The ops of a graph that have an expansion."""
    return {n.op for n in graph.nodes if n.op in EXPANSIONS}


def expanded(graph: Graph, level: str) -> Graph:
    """The graph at a level, which keeps its promises and expands no further."""
    expander = Expander(level)
    result = check(expander.run(graph), level)
    again = expander.run(result)
    assert [n.op for n in again.nodes] == [n.op for n in result.nodes]
    return result


def same(found: list[torch.Tensor], wanted: list[torch.Tensor], rtol: float = 1e-7, atol: float = 1e-9) -> None:
    """Assert equal values, dtypes, sizes and, where they matter, strides."""
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        if b.numel():
            assert [s for n, s in zip(a.shape, a.stride()) if n > 1] == [s for n, s in zip(b.shape, b.stride()) if n > 1]


def as_accurate(found: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """Assert an error of at most twice eager's, up to two roundings of the largest element."""
    for a, b, c in zip(found, eager, exact, strict=True):
        if not a.dtype.is_floating_point or not a.numel():
            continue
        assert torch.equal(a.isnan(), b.isnan()) or torch.equal(a.isnan(), c.isnan())
        finite = torch.isfinite(b) & torch.isfinite(c)
        if finite.any():
            error, own = ((t.double() - c)[finite].abs().max() for t in (a, b))
            floor = 2 * torch.finfo(a.dtype).eps * c[finite].abs().max()
            assert error <= 2 * own + floor, f"error {error}, eager's {own}"
