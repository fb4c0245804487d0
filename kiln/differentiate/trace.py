"""trace: from a captured fx graph to the joint graph of its forward and backward."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from kiln.base import records, state
from kiln.base.collecting import uncollected
from kiln.base.errors import Break, Uneven
from kiln.base.expressions import Expr
from kiln.base.graph import Node, mapped
from kiln.base.outside import going_back
from kiln.base.places import marked
from kiln.differentiate.alias import layout_of, overlapping
from kiln.differentiate.clean import clean
from kiln.differentiate.engine import gradients
from kiln.differentiate.finish import whole
from kiln.differentiate.functionalise import Functionaliser
from kiln.differentiate.interpret import fetch, interpret
from kiln.differentiate.joint import Attribute, Joint, Origin, Placeholder, Primal, Storage, turned
from kiln.differentiate.layers import Layers, layers_of, unrolled
from kiln.differentiate.results import Results
from kiln.differentiate.writes import LOOKS_AT_GRAD_MODE, InGradMode
from kiln.ops.fake import FakeTensor, crosses, fake_like, make, tensors_in
from kiln.ops.layout import is_dense
from kiln.ops.meta import MUTATING, written
from kiln.ops.record import Recording, fake_of
from kiln.ops.symint import expr_of


def trace(module: fx.GraphModule, examples: Sequence[Any], short: bool = False) -> Joint:
    """The joint graph of a captured graph, for inputs like `examples`.

    The graph runs on fake tensors while every aten call is recorded; then autograd's engine differentiates
    all differentiable results for fake tangents, recorded as well. Without a result that requires grad there
    is only a forward. Raises Break where the graph can only run as it is. `short` asks for the joint graph of
    few layers in the place of many, where that is one on the CPU of known sizes without gradients.
    """
    layers, groups = None if records.listening() else layers_of(module), None
    with uncollected():
        while True:
            with switches():
                try:
                    return Tracer(module, examples, groups, layers, short).run()
                except Uneven:
                    layers = None
                except Overlap as found:
                    layers, groups = None, found.groups


@contextmanager
def switches() -> Iterator[None]:
    """Put torch's switches back that a graph flips, also when it raises in between."""
    before = state.snapshot()
    try:
        with state.unhooked():
            yield
    finally:
        state.restore(before)


def differentiated(
    module: fx.GraphModule, outs: list[Any], inputs: list[Any], tangents: list[Any]
) -> Sequence[torch.Tensor | None]:
    """The gradients; a refusal of autograd's is a Break, so that eager raises it where it does.

    A backward of the program's that changes what is not its own is one, too: it must do so in every call.
    """
    owners = {getattr(node.target, "owner", None) for node in module.graph.nodes}
    functions = [cls for cls in owners if isinstance(cls, type) and issubclass(cls, torch.autograd.Function)]
    try:
        with going_back(functions) as changed:
            found = gradients(outs, inputs, tangents)
    except (RuntimeError, NotImplementedError) as error:
        raise Break("backward", str(error), "the graph runs as it is, and its backward raises") from error
    if changed:
        raise Break("backward", "a backward changes an object that others have", "return what is new")
    return found


class Overlap(Exception):
    """Arguments of the graph overlap in memory, and one of them is written: they must be traced as one."""

    def __init__(self, groups: list[list[int]]) -> None:
        self.groups = groups
        super().__init__(groups)


class Tracer:
    """One trace: the recording, the fakes of its inputs, and where they come from.

    `groups` are the positions of arguments that are views of one memory; of `layers` four are traced.
    """

    def __init__(
        self, module: fx.GraphModule, examples: Sequence[Any], groups: list[list[int]] | None = None,
        layers: Layers | None = None, short: bool = False,
    ) -> None:  # fmt: skip
        self.module, self.examples = module, list(examples)
        self.layers, self.short = layers, short
        self.cuts: list[int] = []
        """Up to which node of the recording each of the four goes, forward and then backward."""
        self.sequence: list[int] = []
        """The numbers of autograd's nodes from which on they are of the second of the four, the third, …"""
        self.groups = groups or []
        self.members: dict[Node, Origin] = {}
        """The arguments that are views of one memory, by the nodes that take them of it."""
        self.recording = Recording()
        self.primals: list[Primal] = []
        self.fakes: list[Any] = []
        """What stands for each primal: a fake, or a number."""
        self.edges: list[Any] = []
        """Where the gradient of each primal that requires grad arrives."""
        self.before: list[Any] = []
        self.layer_number: dict[Node, int] = {}
        """Which of the four layers nodes of the functional graph belong to."""
        self._attributes: dict[int, FakeTensor] = {}
        self._alive: list[Any] = []
        self._origins: list[tuple[int, str]] = []
        """Where the program stood when autograd's nodes of a number and later ones were made."""

    def run(self) -> Joint:
        """The whole."""
        recording = self.recording
        names = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        inputs: list[Any] = [None] * len(names)
        for group in self.groups:
            for i, member in zip(group, self.shared(group, names[group[0]].name), strict=True):
                inputs[i] = member
        for i, (node, example) in enumerate(zip(names, self.examples, strict=True)):
            if not any(i in group for group in self.groups):
                inputs[i] = self.primal(Placeholder(i), node.name, example, node.meta.get("example_value"))
        grad = torch.is_grad_enabled()
        instead = self.layers.instead if self.layers is not None else {}
        for node in self.module.graph.nodes:
            if node.op == "get_attr" and node not in instead:
                self.owned(node.target, fetch(self.module, node.target))
        with recording:
            nest = interpret(self.module, inputs, self.owned, self.entering, instead)
        effects = () if torch.is_grad_enabled() == grad else ((torch._C._set_grad_enabled, (not grad,)),)
        recording.where, recording.region, recording.backward = "", None, False
        forward = len(recording.graph.nodes)
        if grad:
            for called in recording.graph.nodes:
                if called.op in LOOKS_AT_GRAD_MODE:
                    called.op = InGradMode(called.op)
        functional = Functionaliser(recording, any(primal.requires_grad for primal in self.primals))
        self.read(functional, 0, range(4))
        self.refuse_overlap(functional)
        if self.groups:
            self.refuse_crossing(functional)
        results = Results(self, functional, nest)
        gradients = self.backward(results, functional, forward) if results.tangents else ()
        graph = functional.graph
        graph.outputs = (*results.values, *gradients)
        graph.inputs = list(recording.graph.inputs)
        clean(graph, results)
        joint = Joint(
            graph.check(), tuple(self.primals), tuple(results.outputs), results.nest, tuple(results.mutated),
            tuple(results.tangents), len(results.values), effects,
            tuple([m.primal for m in results.mutated]), turned=results.turns(),
            hooked=results.hooked(),
        )  # fmt: skip
        if self.layers is None:
            return joint
        whole = unrolled(joint, self.layer_number, self.layers, self.short)
        if whole is None:
            raise Uneven
        return whole

    def read(self, functional: Functionaliser, begin: int, order: Iterable[int]) -> None:
        """Make functional what was recorded from a place on: the four layers in this order."""
        nodes, made = self.recording.graph.nodes, functional.graph.nodes
        if self.layers is None:
            functional.read(nodes[begin:])
            return
        ends = [*self.cuts, len(nodes)]
        self.cuts = []
        for number, end in zip(order, ends, strict=True):
            known = len(made)
            functional.read(nodes[begin:end])
            begin = end
            self.layer_number.update(dict.fromkeys(made[known:], number))

    # Inputs

    def primal(self, origin: Origin, name: str, real: Any, shown: Any = None) -> Any:
        """Register an input; what stands for it in the trace."""
        if not isinstance(real, torch.Tensor):
            return self.number(origin, name, real, shown)
        sized = isinstance(shown, FakeTensor) and shown._has_symbolic_sizes_strides  # type: ignore[attr-defined]
        fake = fake_like(real, shown.shape, shown.stride()) if sized else fake_like(real)
        node = self.recording.input(name, fake)
        edge = None
        if real.requires_grad:
            edge = fake if real.is_leaf else get_gradient_edge(fake)
        primal = Primal(origin, node.spec, real.requires_grad, real.is_leaf)
        self._registered(primal, fake, fake.grad_fn, edge)
        return fake

    def _registered(self, primal: Primal, fake: Any, before: Any = None, edge: Any = None) -> None:
        self.primals.append(primal)
        self.fakes.append(fake)
        self.before.append(before)
        self.edges.append(edge)

    def shared(self, group: list[int], name: str) -> list[FakeTensor]:
        """Register the memory in which some arguments overlap; what stands for each of them."""
        reals = [self.examples[i] for i in group]
        layouts = tuple([layout_of(real) for real in reals])
        flat = make(tuple(whole(reals[0]).shape), (1,), reals[0].dtype, reals[0].device)
        node = self.recording.input(f"{name}_memory", flat)
        self._registered(Primal(Storage(group[0], tuple(group), layouts), node.spec), flat)
        with self.recording:
            members = [flat.as_strided(*layout) for layout in layouts]
        for i, member in zip(group, members, strict=True):
            self.members[self.recording.node(member)] = Placeholder(i)
        return members

    def number(self, origin: Origin, name: str, value: Any, shown: Any) -> Any:
        """Register an input that is no tensor: a symbol, or a number that the trace builds on as it is."""
        symbol = expr_of(shown)
        spec = symbol if isinstance(symbol, Expr) else type(value)
        self.recording.graph.input(name, spec)
        self._registered(Primal(origin, spec), value)
        return value if spec is type(value) else shown

    def owned(self, name: str, value: Any) -> Any:
        """What stands for something that the module holds; one tensor is one input, whatever its names."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        known = self._attributes.get(id(value))
        if known is None:
            known = self._attributes[id(value)] = self.primal(Attribute(name), name, value)
            self._alive.append(value)
        return known

    def real(self, primal: int) -> Any:
        """The real value of a primal."""
        origin = self.primals[primal].origin
        if isinstance(origin, Attribute):
            return fetch(self.module, origin.name)
        real = self.examples[origin.index]
        return whole(real) if isinstance(origin, Storage) else real

    def entering(self, node: fx.Node) -> None:
        """Mark what follows as belonging to a node of the captured graph."""
        meta = node.meta
        self.recording.where = meta.get("stack_trace") or ""
        if records.listening():
            self.recording.where = marked(self.recording.where, node.name)
            self._origins.append((torch._C._autograd._get_sequence_nr(), self.recording.where))  # type: ignore[attr-defined]
        self.recording.region = meta.get("checkpoint")
        self.recording.backward = node.target is torch.autograd.grad
        if self.layers is not None and node in self.layers.starts:
            self.cuts.append(len(self.recording.graph.nodes))
            self.sequence.append(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]

    def refuse_overlap(self, functional: Functionaliser) -> None:
        """Overlap, or Break, where an input that is written overlaps another in memory."""
        inputs = self.recording.graph.inputs
        written = {i for i, node in enumerate(inputs) if functional.written(node)}
        if not written:
            return
        groups = overlapping([self.real(i) for i in range(len(self.primals))])
        groups = [group for group in groups if not written.isdisjoint(group)]
        if groups and not self.groups and all(map(self.can_share, groups)):
            raise Overlap([[self.primals[i].origin.index for i in group] for group in groups])  # type: ignore[union-attr]
        for group in groups:
            names = " and ".join(inputs[i].name for i in group)
            why = f"{names} overlap in memory, and one of them is written"
            raise Break("overlapping-inputs", why, "pass tensors that do not share memory")

    def refuse_crossing(self, functional: Functionaliser) -> None:
        """Break where an op writes to a part of what it reads: eager refuses that, in its own words."""
        fake = self.recording.fake
        for node in self.recording.graph.nodes:
            if isinstance(node.op, torch._ops.OpOverload) and MUTATING[node.op]:
                args, kwargs = mapped((node.args, node.kwargs), lambda v: fake(v) if type(v) is Node else v)
                for target in written(node.op, args, kwargs):
                    memory = functional.place(self.recording.node(target)).memory
                    others = [t for t in tensors_in((args, kwargs)) if t is not target]
                    others = [t for t in others if functional.place(self.recording.node(t)).memory is memory]
                    if any(crosses(target, other) for other in others):
                        why = "an op reads a part of what it writes"
                        raise Break("overlapping-inputs", why, "pass tensors that do not share memory")

    def can_share(self, group: list[int]) -> bool:
        """Whether these primals can be traced as views of one memory: plain arguments of one dtype."""
        primals = [self.primals[i] for i in group]
        if any(not isinstance(p.origin, Placeholder) or p.requires_grad for p in primals):
            return False
        specs = [p.spec for p in primals]
        numbers = [n for spec in specs for n in (*spec.shape, *spec.stride)]
        same = all(spec.dtype is specs[0].dtype for spec in specs) and all(type(n) is int for n in numbers)
        whole = self.real(group[0]).untyped_storage().nbytes() % self.real(group[0]).element_size() == 0
        plain = not any(self.real(i).is_conj() or self.real(i).is_neg() for i in group)
        one = len({self.real(i).untyped_storage()._cdata for i in group}) == 1
        return same and whole and plain and one

    # The second half

    def backward(self, results: Results, functional: Functionaliser, forward: int) -> tuple[Any, ...]:
        """Record the gradients of all primals for tangents of all differentiable results."""
        recording = self.recording
        for node in functional.graph.nodes:
            node.backward = False  # also of gradients that the program asks for itself
        recording.backward = True
        outs = [results.fakes[i] for i in results.tangents]
        turns = results.turns()
        tangents: list[Any] = [
            self.tangent(k, fake_of(results.values[i].spec) if turns[k] else results.fakes[i])
            for k, i in enumerate(results.tangents)
        ]
        wanted = [i for i, edge in enumerate(self.edges) if edge is not None]
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(recording)
            tangents = [turned(tangent, steps) for tangent, steps in zip(tangents, turns, strict=True)]
            recording.origin = self.origin if self._origins else self.layer if self.layers else None
            found = differentiated(self.module, outs, [self.edges[i] for i in wanted], tangents)
            recording.origin = None
        gradients: list[Node | None] = [None] * len(self.primals)
        if self.layers is not None:
            self.cuts += [len(recording.graph.nodes)] * (3 - len(self.cuts))
        self.read(functional, forward, (3, 2, 1, 0))
        for i, gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                gradients[i] = functional.value(recording.node(gradient))
        return tuple(gradients)

    def origin(self) -> str:
        """Where the op stands whose gradient is being computed."""
        node = torch._C._current_autograd_node()
        at = bisect_right(self._origins, node._sequence_nr(), key=itemgetter(0)) if node is not None else 0
        return self._origins[at - 1][1] if at else ""

    def layer(self) -> str:
        """Note where the gradients of a layer begin; autograd's engine runs its nodes from last to first."""
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else self.sequence[-1]
        while len(self.cuts) < 3 and number < self.sequence[2 - len(self.cuts)]:
            self.cuts.append(len(self.recording.graph.nodes))
        return ""

    def tangent(self, index: int, out: torch.Tensor) -> FakeTensor:
        """A fake gradient of a result: laid out as it where that leaves no holes."""
        size, stride = tuple(out.shape), out.stride()
        fake = make(size, stride if is_dense(size, stride) else None, out.dtype, out.device)
        self.recording.input(f"tangent_{index}", fake)
        return fake
