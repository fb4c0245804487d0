"""Second derivatives: the captured graph runs again in eager, and autograd differentiates what that did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from kiln.base.graph import Graph, Node, TensorSpec, argument, nodes_in, reached
from kiln.differentiate import engine
from kiln.differentiate.interpret import fetch, interpret
from kiln.differentiate.joint import Attribute, Fresh, Joint, Placeholder, View, turned
from kiln.differentiate.kinds import kind
from kiln.differentiate.watched import Watchers
from kiln.ops.random import Again, own_uniform
from kiln.ops.table import aten

#: Batch norms that give new running statistics, with where they are told whether to train (-1: always).
BATCH_NORMS = {
    aten._native_batch_norm_legit_functional.default: 5,
    aten._batch_norm_with_update_functional.default: -1,
}


class Replay:
    """Runs the captured graph again on the inputs of one call, in eager, with that call's random numbers."""

    def __init__(self, module: fx.GraphModule, joint: Joint, leave: Callable[[], None]) -> None:
        self.module, self.joint, self.leave = module, joint, leave
        self.calls = self.seconds = 0
        self.random = any(kind(node.op).random for node in joint.graph.nodes if not node.backward)
        self.draws = len({node.args[0] for node in joint.graph.nodes if node.op is own_uniform})
        self.devices = _devices(joint.graph)
        self.autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in self.devices
        ]
        self.mutated = {m.primal for m in joint.mutated}
        self.leaking = {m.primal for m in joint.mutated if m.with_grad}
        self.lost = self._lost()
        self.outputs = self._outputs()

    def _lost(self) -> list[int]:
        """The primals whose old values matter for what is differentiated, and are gone after the forward."""
        graph = self.joint.graph
        needed = set(reached([graph.outputs[index] for index in self.joint.tangents], _read))
        return [m.primal for m in self.joint.mutated if m.with_grad or graph.inputs[m.primal] in needed]

    def _outputs(self) -> list[Callable[..., torch.Tensor]]:
        """For each tangent, its value of the replayed graph's outputs, or their bases, and mutated inputs."""
        found: list[Callable[..., torch.Tensor]] = []
        for index in self.joint.tangents:
            places = list(enumerate(self.joint.outputs))
            # Of a view that was detached the base is detached, too: those with a history come first.
            for at, output in sorted(places, key=lambda place: not getattr(place[1], "requires_grad", False)):
                if isinstance(output, Fresh) and output.index == index:
                    found.append(lambda outputs, inputs, at=at: outputs[at])
                    break
                if isinstance(output, View) and type(output.base) is int and output.base == index:
                    found.append(lambda outputs, inputs, at=at: _base(outputs[at]))
                    break
            else:
                at = next(m.primal for m in self.joint.mutated if m.index == index)
                found.append(lambda outputs, inputs, at=at: inputs[at])
        return found

    # What a call keeps

    def remember(self, ctx: Any, primals: tuple[Any, ...]) -> None:
        """Keep what a replay needs until the backward pass is over."""
        self.calls += 1
        if self.leaking:
            # These will have the call as their history: kept here, they would keep themselves alive.
            primals = tuple([None if i in self.leaking else p for i, p in enumerate(primals)])
        ctx.primals = primals
        ctx.versions = [
            p._version if isinstance(p, torch.Tensor) and not p.is_inference() else 0 for p in primals
        ]
        if self.random:
            ctx.random = [_home(device).get_rng_state() for device in self.devices]

    def forget(self, ctx: Any) -> None:
        """Let go of what was kept."""
        ctx.primals = ctx.random = None

    # Gradients with a history

    def gradients(
        self, ctx: Any, present: int, tangents: Sequence[torch.Tensor], history: bool = True,
        watchers: Watchers | None = None,
    ) -> tuple[Any, ...]:
        """The gradients of the primals, by default with a history, for the tangents in the set `present`.

        `watchers` are told the gradients of results.
        """
        if ctx.primals is None:
            raise RuntimeError(
                "second derivatives were asked for after the first backward pass freed the graph; "
                "call it with retain_graph=True or create_graph=True"
            )
        if self.lost:
            names = ", ".join(self.joint.graph.inputs[i].name for i in self.lost)
            raise RuntimeError(
                f"second derivatives of a compiled graph that writes to its inputs ({names}) are not "
                "supported; use the form that returns a new tensor, or kiln.disable"
            )
        self._check_versions(ctx)
        self.seconds += history or watchers is not None
        if 1 < self.seconds > self.calls // 2 and not self.random:  # eager draws other numbers
            self.leave()  # what most calls run again had better run as captured at once
        with torch.enable_grad(), self._state(ctx):
            stand_ins = self._stand_ins(ctx.primals)
            outputs = self._run(stand_ins)
            here = [k for k in range(len(self.outputs)) if present >> k & 1]
            results = [self.outputs[k](outputs, stand_ins) for k in here]
            for k, hooks in watchers.items() if watchers else ():
                result = self.outputs[k](outputs, stand_ins)
                for hook in hooks if result.requires_grad else ():
                    result.register_hook(hook)
            tangents = [turned(t, self.joint.turned[k]) for k, t in zip(here, tangents, strict=True)]
            wanted = [i for i, p in enumerate(self.joint.primals) if p.requires_grad]
            pairs = [(r, t) for r, t in zip(results, tangents, strict=True) if r.requires_grad]
            outs, given = [r for r, _ in pairs], [t for _, t in pairs]
            found = engine.gradients(outs, [stand_ins[i] for i in wanted], given, create_graph=history)
        gradients: list[Any] = [None] * len(self.joint.primals)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i] = gradient
        return tuple(gradients)

    def _check_versions(self, ctx: Any) -> None:
        for i, (primal, version) in enumerate(zip(ctx.primals, ctx.versions, strict=True)):
            known = isinstance(primal, torch.Tensor) and not primal.is_inference() and i not in self.mutated
            if known and primal._version != version and self.joint.primals[i].requires_grad:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: {self.joint.graph.inputs[i].name} is at version {primal._version}; "
                    f"expected version {version} instead"
                )

    def _stand_ins(self, primals: Sequence[Any]) -> list[Any]:
        """Tensors to replay on: gradients with respect to them do not pass from one primal to another."""
        made = []
        for i, (primal, info) in enumerate(zip(primals, self.joint.primals, strict=True)):
            if i in self.mutated and isinstance(primal, torch.Tensor):
                made.append(primal.detach().clone())
            else:
                made.append(primal.view_as(primal) if info.requires_grad else primal)
        return made

    def _run(self, stand_ins: Sequence[Any]) -> list[Any]:
        """The outputs of the captured graph, in the order of the joint's outputs."""
        places = len([node for node in self.module.graph.nodes if node.op == "placeholder"])
        arguments: list[Any] = [None] * places
        held: dict[int, Any] = {}
        for primal, value in zip(self.joint.primals, stand_ins, strict=True):
            if isinstance(primal.origin, Placeholder):
                arguments[primal.origin.index] = value
            elif isinstance(primal.origin, Attribute):
                held[id(fetch(self.module, primal.origin.name))] = value

        out = interpret(self.module, arguments, lambda name, value: held.get(id(value), value))
        flat: list[Any] = [None] * len(self.joint.outputs)
        _pair(self.joint.nest, out, flat)
        return flat

    @contextlib.contextmanager
    def _state(self, ctx: Any) -> Iterator[None]:
        """Torch's random numbers and autocast as they were in the forward, for a while."""
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            if self.random:
                for device, state in zip(self.devices, ctx.random, strict=True):
                    stack.callback(_home(device).set_rng_state, _home(device).get_rng_state())
                    _home(device).set_rng_state(state)
            if self.draws:
                stack.enter_context(Again(self.joint.random, self.draws))
            yield


def _read(node: Node) -> Iterable[Node]:
    """What a node's value follows from: a batch norm that trains does not look at its running statistics."""
    at = BATCH_NORMS.get(node.op)
    if at is None or at >= 0 and not argument(node, at, "training"):
        return node.inputs()
    statistics = argument(node, 3, "running_mean"), argument(node, 4, "running_var")
    return [read for read in node.inputs() if not any(read is one for one in statistics)]


def _pair(nest: Any, value: Any, flat: list[Any]) -> None:
    """Put the leaves of `value` to the positions that `nest` has in their places."""
    if type(nest) is int:
        flat[nest] = value
    elif isinstance(nest, (tuple, list)):
        for part, item in zip(nest, value, strict=True):
            _pair(part, item, flat)
    elif isinstance(nest, dict):
        for key, part in nest.items():
            _pair(part, value[key], flat)


def _devices(graph: Graph) -> list[str]:
    specs = [n.spec for n in (*graph.inputs, *nodes_in(graph.outputs)) if isinstance(n.spec, TensorSpec)]
    return sorted({"cpu", *(spec.device.type for spec in specs)} - {"meta"})


def _base(value: torch.Tensor) -> torch.Tensor:
    return value if value._base is None else value._base


def _home(device: str) -> Any:
    """Where torch has the state of a device's random numbers."""
    return torch if device == "cpu" else getattr(torch, device)
