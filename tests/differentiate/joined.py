"""Runs a traced joint graph on real tensors as its callable must, and compares all with eager."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

import kiln
from kiln.base.expressions import Expr, Symbol
from kiln.base.graph import CONSTANT, Node, TensorSpec, mapped
from kiln.differentiate.interpret import fetch
from kiln.differentiate.joint import Attribute, Constant, Fresh, Given, Joint, Placeholder, Step
from kiln.differentiate.trace import trace
from kiln.differentiate.writes import FORMS, HIDDEN
from tests.graphs import run_graph


def copied(value: Any, leaves: list[Any]) -> Any:
    """An equal tensor of the same layout and autograd state; `leaves` gets what its gradient arrives at."""
    if not isinstance(value, torch.Tensor):
        leaves.append(None)
        return value
    reach = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
    start = value.storage_offset()
    flat = torch.zeros(start + reach, dtype=value.dtype)
    new = flat.as_strided(value.shape, value.stride(), start)
    new.copy_(value.detach())
    if not value.requires_grad:
        leaves.append(None)
        return new
    new = new.detach().requires_grad_()
    leaves.append(new)
    return new if value.is_leaf else new.clone()


def attributes(module: GraphModule) -> list[str]:
    """The names of the tensors that a graph reads from its module."""
    names = dict.fromkeys(n.target for n in module.graph.nodes if n.op == "get_attr")
    return [name for name in names if isinstance(fetch(module, name), torch.Tensor)]


def resolver(joint: Joint, primals: Any) -> Any:
    """A function from expressions over the symbols of a joint graph to their values for these primals."""
    values: dict[Any, Any] = {}
    for primal, value in zip(joint.primals, primals, strict=True):
        if isinstance(primal.spec, Symbol):
            values[primal.spec] = value
        elif isinstance(primal.spec, TensorSpec):
            for exprs, numbers in ((primal.spec.shape, value.shape), (primal.spec.stride, value.stride())):
                values.update({e: n for e, n in zip(exprs, numbers, strict=True) if isinstance(e, Symbol)})
    return lambda leaf: leaf.evaluate(values) if isinstance(leaf, Expr) else leaf


class Joined(torch.autograd.Function):
    """The joint graph as one autograd function; the backward runs all of it again."""

    @staticmethod
    def forward(ctx: Any, joint: Joint, state: list[Any], *primals: Any) -> Any:
        ctx.joint, ctx.primals = joint, [p.detach().clone() if torch.is_tensor(p) else p for p in primals]
        ctx.rng, ctx.state = torch.get_rng_state(), state
        ctx.resolve = resolve = resolver(joint, primals)
        zeros = [torch.zeros(mapped(n.spec.shape, resolve), dtype=n.spec.dtype)
                 for n in joint.graph.inputs[len(primals) :]]  # fmt: skip
        results = run_graph(joint.graph, *primals, *zeros, resolve=resolve)[: joint.results]
        for value, node in zip(results, joint.forward_outputs(), strict=True):
            shape, stride = mapped((node.spec.shape, node.spec.stride), resolve)
            assert (tuple(value.shape), value.dtype, value.stride()) == (shape, node.spec.dtype, stride), node
        ctx.mark_non_differentiable(*[r for i, r in enumerate(results) if i not in joint.tangents])
        ctx.set_materialize_grads(True)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        joint = ctx.joint
        tangents = []
        for i, node in zip(joint.tangents, joint.graph.inputs[len(joint.primals) :], strict=True):
            shape, stride = mapped((node.spec.shape, node.spec.stride), ctx.resolve)
            laid = torch.empty_strided(shape, stride, dtype=node.spec.dtype)
            tangents.append(laid.copy_(grads[i]))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.rng)
            found = run_graph(joint.graph, *ctx.primals, *tangents, resolve=ctx.resolve)[joint.results :]
        return (None, None, *found)


def take(value: torch.Tensor, steps: tuple[Step, ...], resolve: Any) -> torch.Tensor:
    """The view that the steps lead to."""
    for step in steps:
        value = step.op(value, *mapped(step.args, resolve), **step.kwargs)
        value = value if step.item is None else value[step.item]
    return value


def run_joint(joint: Joint, module: GraphModule, args: list[Any]) -> Any:
    """The output of the captured graph, by its joint graph."""

    def given(origin: Any) -> Any:
        return args[origin.index] if isinstance(origin, Placeholder) else fetch(module, origin.name)

    primals = [given(p.origin) for p in joint.primals]
    grads = [(p.requires_grad, p.is_leaf) for p in primals if torch.is_tensor(p)]
    assert grads == [(p.requires_grad, p.leaf) for p in joint.primals if isinstance(p.origin, (Placeholder, Attribute))
                     and isinstance(p.spec, TensorSpec)]  # fmt: skip
    if joint.differentiates:
        results = Joined.apply(joint, [], *primals)
    else:
        with torch.no_grad():
            results = run_graph(joint.graph, *primals, resolve=resolver(joint, primals))
        assert len(results) == joint.results
    for m in joint.mutated:
        with torch.set_grad_enabled(m.with_grad):
            primals[m.primal].copy_(results[m.index])
    made: dict[int, Any] = {}
    for out in joint.outputs:
        if id(out) in made:
            continue
        if isinstance(out, Fresh):
            made[id(out)] = results[out.index]
            assert results[out.index].requires_grad == out.requires_grad
        elif isinstance(out, Given):
            made[id(out)] = given(out.origin)
        elif isinstance(out, Constant):
            made[id(out)] = resolver(joint, primals)(out.value)
        else:
            base = results[out.base] if isinstance(out.base, int) else given(out.base)
            with torch.set_grad_enabled(out.requires_grad):
                made[id(out)] = take(base, out.steps, resolver(joint, primals))
    for effect, arguments in joint.effects:
        effect(*arguments)
    return mapped(joint.nest, lambda i: made[id(joint.outputs[i])])


@dataclass
class Seen:
    """What one run showed."""

    outs: list[Any]
    args: list[Any]
    attributes: list[Any]
    gradients: list[Any]


def observe(run: Any, module: GraphModule, examples: list[Any]) -> Seen:
    """Run on copies and differentiate a weighted sum of all that is differentiable after."""
    leaves: list[Any] = []
    args = [copied(value, leaves) for value in examples]
    torch.manual_seed(7)
    grad = torch.is_grad_enabled()
    try:
        outs = run(module, args)
    finally:
        torch.set_grad_enabled(grad)
    held = [fetch(module, name) for name in attributes(module)]
    leaves += [t if t.requires_grad and t.is_leaf else None for t in held]
    outs = list(outs) if isinstance(outs, (list, tuple)) else [outs]
    seen: list[torch.Tensor] = []
    for t in (*outs, *args, *held):
        if torch.is_tensor(t) and t.grad_fn is not None and not any(t is s for s in seen):
            seen.append(t)
    wanted = [leaf for leaf in leaves if leaf is not None]
    gradients: list[Any] = []
    if seen and wanted:
        torch.manual_seed(11)
        weights = [torch.randn(t.shape).to(t.dtype) for t in seen]
        gradients = list(torch.autograd.grad(seen, wanted, weights, allow_unused=True))
    return Seen(outs, args, held, gradients)


def sharing(values: list[Any]) -> list[int]:
    """For each tensor the first that lies in the same memory."""
    found: dict[int, int] = {}
    return [found.setdefault(v.untyped_storage().data_ptr(), i) if torch.is_tensor(v) and v.numel() else -1
            for i, v in enumerate(values)]  # fmt: skip


def assert_same(eager: Seen, joint: Seen, tolerance: float = 1e-5) -> None:
    """Values, layouts, autograd state, identities and shared memory of two runs are the same."""
    for name in ("outs", "args", "attributes", "gradients"):
        ours, theirs = getattr(joint, name), getattr(eager, name)
        assert len(ours) == len(theirs), name
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            where = f"{name}[{i}]"
            if not torch.is_tensor(b):
                assert a == b, where
                continue
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{where}: {m}")
            if name != "gradients":
                shown = (a.stride(), a.requires_grad, a.grad_fn is None, a.storage_offset() if name != "outs" else 0)
                wanted = (b.stride(), b.requires_grad, b.grad_fn is None, b.storage_offset() if name != "outs" else 0)
                assert shown == wanted, where
    everything = [(s.outs + s.args + s.attributes) for s in (joint, eager)]
    assert sharing(everything[0]) == sharing(everything[1])
    first = [[next(j for j, w in enumerate(vs) if w is v) for v in vs if torch.is_tensor(v)] for vs in everything]
    assert first[0] == first[1]


def assert_functional(joint: Joint) -> None:
    """Nothing in the graph writes."""
    for node in joint.graph.nodes:
        if node.op is not CONSTANT:
            writes = FORMS[node.op].writes
            assert not writes or node.op in HIDDEN and not HIDDEN[node.op](node), node
    forward = [n for n in joint.graph.nodes if not n.backward]
    assert all(not read.backward for n in forward for read in n.inputs())
    assert all(not n.backward for n in joint.forward_outputs() if isinstance(n, Node))


def check(f: Any, *args: Any, tolerance: float = 1e-5) -> Joint:
    """Capture a call of `f` as one graph, trace it, run the joint graph, and compare with eager."""
    found: list[Joint] = []

    def backend(module: GraphModule, examples: list[Any]) -> Any:
        found.append(check_graph(module, examples, tolerance))
        return module.forward

    kiln.compile(f, backend=backend, fullgraph=True)(*args)
    return found[0]


def check_graph(module: GraphModule, examples: list[Any], tolerance: float = 1e-5) -> Joint:
    """Trace a graph, run the joint graph, and compare with eager."""
    joint = trace(module, examples)
    assert_functional(joint)
    compare(joint, module, examples, tolerance)
    return joint


def compare(joint: Joint, module: GraphModule, args: list[Any], tolerance: float = 1e-5) -> None:
    """Run the joint graph of a graph on other arguments, and compare with eager."""
    twin, other = copy.deepcopy(module), copy.deepcopy(module)
    eager = observe(lambda m, a: m(*a), twin, args)
    ours = observe(lambda m, a: run_joint(joint, m, a), other, args)
    assert_same(eager, ours, tolerance)
