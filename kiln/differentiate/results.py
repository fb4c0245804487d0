"""What a traced forward gives: the results, and how outputs and written inputs come from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from kiln.base.errors import Break
from kiln.base.graph import Node, TensorSpec
from kiln.differentiate.functionalise import Functionaliser, Memory, Place
from kiln.differentiate.interpret import over_leaves
from kiln.differentiate.joint import Constant, Fresh, Given, Mutation, Origin, Output, Step, Storage, View
from kiln.ops.fake import FakeTensor
from kiln.ops.symint import expr_of
from kiln.ops.table import aten

if TYPE_CHECKING:
    from kiln.differentiate.trace import Tracer


class Results:
    """The results of a forward: fresh outputs, new values of written inputs, bases that outputs view.

    `values` are nodes of the functional graph, `fakes` the tensors of the trace that they stand for,
    `tangents` the positions of those that are differentiated.
    """

    def __init__(self, tracer: Tracer, functional: Functionaliser, nest: Any) -> None:
        self.tracer, self.functional = tracer, functional
        self.values: list[Node] = []
        self.fakes: list[FakeTensor] = []
        self.tangents: list[int] = []
        self.turned: dict[int, tuple[Step, ...]] = {}
        """The views that lead from a result to its tensor, where that changed its own shape later."""
        self.mutated: list[Mutation] = []
        self.outputs: list[Output] = []
        self.own: dict[Place, int] = {}
        """Results that nothing else may share memory with."""
        self._origins: dict[Memory, tuple[Origin, Place]] = {}
        self._bases: dict[Memory, Place] = {}
        """The tensors that outputs in a memory are views of, to autograd."""
        leaves: list[Any] = []
        self.nest = positions(nest, leaves)
        places = {id(t): functional.place(tracer.recording.node(t)) for t in leaves if is_fake(t)}
        self._sources()
        self._refuse_state(leaves)
        fresh = self._fresh(leaves, places)
        self._mutations()
        made: dict[int, Output] = {}
        for leaf in leaves:
            if not is_fake(leaf):
                self.outputs.append(Constant(expr_of(leaf)))
                continue
            if id(leaf) not in made:
                made[id(leaf)] = self._output(leaf, places[id(leaf)], fresh)
            self.outputs.append(made[id(leaf)])

    def hooked(self) -> frozenset[int]:
        """The tangents of results that have hooks on their gradients."""
        return frozenset(k for k, i in enumerate(self.tangents) if self.fakes[i]._backward_hooks)

    def add(self, place: Place, fake: FakeTensor, differentiable: bool) -> int:
        """A new result."""
        self.values.append(self.functional.exact(self.functional.current(place), place.spec))
        self.fakes.append(fake)
        if differentiable:
            self.tangents.append(len(self.values) - 1)
        return len(self.values) - 1

    def _sources(self) -> None:
        """Note the memories of the inputs."""
        tracer = self.tracer
        for primal, node in zip(tracer.primals, tracer.recording.graph.inputs, strict=False):
            if self.functional.known(node):
                place = self.functional.place(node)
                self._origins[place.memory] = primal.origin, place

    def _refuse_state(self, leaves: list[Any]) -> None:
        """Break where the graph changes what autograd knows of a tensor that is seen outside."""
        tracer = self.tracer
        for primal, fake, before in zip(tracer.primals, tracer.fakes, tracer.before, strict=True):
            if not is_fake(fake):
                continue
            if fake.grad_fn is before and fake.requires_grad != primal.requires_grad:
                why = "the graph switches whether an input requires grad"
                raise Break("requires-grad", why, "call requires_grad_ outside the compiled function")
            if fake._backward_hooks:
                why = "the graph registers a hook on an input"
                raise Break("tensor-hook", why, "register it outside the compiled function")
        if any(is_fake(t) and t.retains_grad for t in (*leaves, *tracer.fakes)):
            why = "retain_grad is called on a tensor that is seen outside"
            raise Break("retain-grad", why, "call it outside the compiled function")
        for leaf in leaves:
            try:
                _ = is_fake(leaf) and leaf.grad_fn
            except RuntimeError:
                # Eager raises that too, but not before somebody asks for a gradient.
                why = "an output is one of several views of a tensor that was written to afterwards"
                raise Break("write-to-view", why, "return a copy of it") from None
        if not any(primal.requires_grad for primal in tracer.primals):
            if any(is_fake(t) and t.requires_grad for t in leaves):
                raise inner_leaf()

    def _fresh(self, leaves: list[Any], places: dict[int, Place]) -> dict[int, int]:
        """The results for outputs that are alone in their memory, or its own tensor; by the output's id."""
        sharing: dict[Memory, set[int]] = {}
        for leaf in leaves:
            if is_fake(leaf):
                sharing.setdefault(places[id(leaf)].memory, set()).add(id(leaf))
        self._bases = {memory: base_of([places[key] for key in keys]) for memory, keys in sharing.items()}
        fresh: dict[int, int] = {}
        for leaf in leaves:
            if not is_fake(leaf) or id(leaf) in fresh:
                continue
            place = places[id(leaf)]
            if place.memory in self._origins:
                continue
            odd = leaf.requires_grad and leaf.grad_fn is None
            alone = len(sharing[place.memory]) == 1 and place not in self.functional.turned
            # One of several views that an op gives with a history refuses writes in place.
            alone = alone and (leaf.grad_fn is None or all(step.item is None for step in place.steps()))
            if place is self._bases[place.memory] or alone and not odd:
                if odd:
                    raise inner_leaf()
                fresh[id(leaf)] = self.own[place] = self.add(place, leaf, leaf.grad_fn is not None)
        return fresh

    def _mutations(self) -> None:
        tracer, functional = self.tracer, self.functional
        for i, node in enumerate(tracer.recording.graph.inputs):
            if not functional.written(node):
                continue
            fake = tracer.fakes[i]
            with_grad = bool(fake.requires_grad and fake.grad_fn is not tracer.before[i])
            if with_grad and isinstance(tracer.primals[i].origin, Storage):
                why = "inputs that overlap in memory are written with gradients"
                raise Break("overlapping-inputs", why, "pass tensors that do not share memory")
            place = functional.place(node).memory.root
            index = self.add(place, fake, with_grad)
            counted = 1 if fake.is_inference() else fake._version  # what is written through `data` is not
            self.mutated.append(Mutation(i, index, with_grad, counted if place.memory.seen else 0))

    def _refuse_history(self, leaf: FakeTensor, place: Place, base: Place) -> None:
        """Break for a view that was made a leaf, and for one that has another history than its base.

        A custom function that gives back its argument gives such a view: the derivative is the function's.
        A view taken without grad mode of a tensor that requires grad claims to require it as well, and will
        again when it is taken anew; one that was detached does not, unless it was written to since.
        """
        if not leaf.requires_grad:
            return
        detached = any(step.op is aten.detach.default for step in place.steps(base))
        if leaf.grad_fn is None:
            if detached or not self.functional.fake(base).requires_grad:
                raise inner_leaf()
        elif detached:
            why = "an output was detached from a tensor that is seen outside, and written with gradients"
            raise Break("output-view", why, "return a copy of it")
        elif not self.functional.beyond.isdisjoint(place.path()):
            why = "an output with gradients is as_strided of a view"
            raise Break("output-view", why, "return a copy of it")
        elif through_custom(leaf.grad_fn, self.functional.fake(base).grad_fn, len(place.steps(base))):
            why = "an output is what was given to a custom function, with the history that this gives it"
            raise Break("output-view", why, "have the function return a copy of it")

    def _output(self, leaf: FakeTensor, place: Place, fresh: dict[int, int]) -> Output:
        if id(leaf) in fresh:
            return Fresh(fresh[id(leaf)], leaf.grad_fn is not None)
        memory = place.memory
        source = self._origins.get(memory)
        if source is not None:
            origin, own = source
            member = self.tracer.members.get(leaf.node)
            if own is place or member is not None:
                return Given(member or origin)
            self._refuse_history(leaf, place, memory.root)
            return View(origin, self._steps(leaf, place, own), in_grad_mode(leaf), leaf.requires_grad)
        base = self._bases[memory]
        self._refuse_history(leaf, place, base)
        root = self.functional.fake(base)
        if leaf.requires_grad and root.grad_fn is None:
            why = "an output that requires grad views a tensor that does not"
            raise Break("output-view", why, "return a copy of it")
        index = self.own.get(base, -1)
        if index < 0:
            index = self.own[base] = self.add(base, root, False)
            self._turn(index, root, base)
        if leaf.requires_grad and index not in self.tangents:
            self.tangents.append(index)
        return View(index, self._steps(leaf, place, base), in_grad_mode(leaf), leaf.requires_grad)

    def _steps(self, leaf: FakeTensor, place: Place, base: Place) -> tuple[Step, ...]:
        """The views that lead from a base to an output; what was taken through `data` counts for itself."""
        steps = place.steps(base)
        seen = reversed(place.above()[1 : 1 + len(steps)])
        steps = tuple([relative(step, spec) for step, spec in zip(steps, seen, strict=True)])
        detached = any(step.op is aten.detach.default for step in steps)
        if not detached or count_together(leaf, self.functional.fake(base)):
            return steps
        return tuple([Step(data_of) if step.op is aten.detach.default else step for step in steps])

    def _turn(self, index: int, root: FakeTensor, base: Place) -> None:
        """Note what became of a base whose tensor changed its own shape: its gradient is of the first one."""
        steps = self.functional.place(self.tracer.recording.node(root)).steps(base)
        if any(step.op is aten.as_strided.default for step in steps):
            why = "several outputs view a tensor that as_strided_ changed"
            raise Break("output-view", why, "return a copy of it")
        self.turned[index] = steps

    def turns(self) -> tuple[tuple[Step, ...], ...]:
        """For each tangent, how its base changed its own shape."""
        return tuple([self.turned.get(index, ()) for index in self.tangents])


def base_of(places: list[Place]) -> Place:
    """What tensors in one memory are views of, to autograd: its own tensor, or one detached from that alone.

    What torch's factories give is such a one: they detach what they have made.
    """
    first = {path[-2] if len(path := place.path()) > 1 else None for place in places}
    alone = first.pop() if len(first) == 1 else None
    if alone is not None and alone.step is not None and alone.step.op is aten.detach.default:
        return alone
    return places[0].memory.root


def count_together(one: FakeTensor, other: FakeTensor) -> bool:
    """Whether a write to one of two tensors over the same memory counts for the other."""
    if one.is_inference() or other.is_inference():
        return True
    before, its = one._version, other._version
    increment_version(one)
    together = bool(other._version != its)
    torch._C._autograd._unsafe_set_version_counter((one,), (before,))
    return together


def relative(step: Step, seen: TensorSpec) -> Step:
    """A view as it is taken of a tensor that may start elsewhere in its memory than the one seen."""
    if step.op is not aten.as_strided.default:
        return step
    size, stride, offset = step.args
    return Step(strided_from, (size, stride, offset - seen.offset))


def strided_from(value: torch.Tensor, size: Any, stride: Any, ahead: int) -> torch.Tensor:
    """What as_strided shows, so many elements after the first."""
    return value.as_strided(size, stride, value.storage_offset() + ahead)


def data_of(value: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of another that knows nothing of its writes."""
    return value.data


def through_custom(view: Any, base: Any, steps: int) -> bool:
    """Whether a custom function is among the nodes that lead from a view back to its base."""
    while view is not None and view is not base and steps:
        if isinstance(view, torch.autograd.function.BackwardCFunction):
            return True
        following = view.next_functions
        view, steps = following[0][0] if following else None, steps - 1
    return False


def inner_leaf() -> Break:
    """The refusal of a graph that makes a leaf: nothing outside could give it a gradient."""
    why = "the graph makes a tensor that requires grad without computing it"
    return Break("inner-leaf", why, "make it outside the compiled function")


def in_grad_mode(view: FakeTensor) -> bool:
    """Whether a view was taken in grad mode: autograd lets others be written without gradients alone."""
    if view.requires_grad or not view._is_view():
        return view.grad_fn is not None
    return torch._C._autograd._get_creation_meta(view) not in _WITHOUT_GRADIENTS


_WITHOUT_GRADIENTS = [
    torch._C._autograd.CreationMeta.NO_GRAD_MODE, torch._C._autograd.CreationMeta.INFERENCE_MODE
]  # fmt: skip


def is_fake(value: Any) -> bool:
    """Whether a leaf of the output is a tensor of the trace."""
    return isinstance(value, torch.Tensor)


def positions(nest: Any, leaves: list[Any]) -> Any:
    """The nest with each leaf replaced by its position in `leaves`, to which it is added."""

    def place(leaf: Any) -> int:
        leaves.append(leaf)
        return len(leaves) - 1

    return over_leaves(nest, place)
