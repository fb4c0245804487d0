"""Both halves as one node of autograd's graph: what it saves, which gradients it computes, what it frees."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from kiln.base.begun import Begun, begin
from kiln.base.expressions import Expr, Symbol
from kiln.base.fx import bindings, runner
from kiln.base.graph import Graph, Node, TensorSpec
from kiln.base.keys import below
from kiln.differentiate.again import Replay
from kiln.differentiate.finish import resolved
from kiln.differentiate.halves import Halves
from kiln.differentiate.joint import Fresh, Joint, View
from kiln.differentiate.leaves import Leaves
from kiln.differentiate.prune import pruned, uses
from kiln.differentiate.trial import Trial
from kiln.differentiate.watched import Watched, Watchers, called, within
from kiln.ops.table import aten

Run: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph: takes a list with the values of its inputs, which it may empty, and gives its outputs."""

Compiler: TypeAlias = Callable[[Graph], Run]

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
_grad_enabled = torch.is_grad_enabled
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_is_batch = torch._C._functorch.is_legacy_batchedtensor
BOXED = hasattr(torch.autograd.Function, "boxed_grads_call")


def training(
    replay: Replay,
    joint: Joint,
    unreached: frozenset[int],
    halves: Halves,
    compile_forward: Compiler,
    compile_backward: Compiler,
    trial: Trial | None = None,
) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    """A function from the primals to the results that records itself as one node of autograd's graph.

    `unreached` are the primals that are given without their history (`without_gradient`).
    """
    results, count = joint.results, halves.tensors
    quiet = _quiet(joint)
    shown = [i for i in range(results) if i not in quiet]
    twice, aside = _unusual_results(joint, quiet)
    leaves = Leaves(joint, halves)
    backward = Backward(halves, len(joint.tangents), compile_backward)
    begun = begin(compile_forward, halves.forward)
    values_of = symbol_values(joint)
    if values_of is not None:
        # What compiling the backward decides about sizes must be among the guards, made after this.
        backward.begin(backward.everything)
    elif not begun.is_done:
        backward.begin(likely(joint))
    forward: Run = begun.finish()
    saving = Saving(joint, halves)
    tangents = Tangents(joint, getattr(compile_backward, "any_strides", False))
    otherwise = Otherwise(joint, halves, saving, tangents, replay)
    run = entered(forward)
    if hasattr(forward, "shows"):
        forward.shows(results)

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, found: list[Any], *primals: Any) -> Any:  # type: ignore[override]
            replay.remember(ctx, primals)
            out = run(list(primals))
            for i, first in twice:
                with below():
                    out = (*out[:i], out[first].detach(), *out[i + 1 :])
            saving.save(ctx, out[results : results + count])
            ctx.set_materialize_grads(False)
            ctx.numbers = out[results + count :]
            if values_of is not None:
                ctx.sizes = values_of(primals)
            if aside:
                ctx.mark_non_differentiable(*[out[i] for i in aside])
            found += out[:results]
            watched.remember(ctx, found)
            return tuple([found[i] for i in shown])

        boxed_grads_call = True

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            grads = placed(unboxed(given), shown, [None] * results)
            watchers = watched.watchers(ctx, grads)
            unusual = otherwise(ctx, grads) if watchers is None else otherwise.told(ctx, grads, watchers)
            if unusual is not None:
                return None, *unusual
            present, values = tangents(grads, ctx)
            values[:0] = [*saving.load(ctx, present), *ctx.numbers]
            free = not _keeps_graph() and saving.release(ctx, present)
            plain = [grads[i] for i in joint.tangents if grads[i] is not None]
            del grads
            if trial is None or replay.lost or not trial.wanted(plain):
                plain.clear()
                if free:
                    replay.forget(ctx)
                return None, *leaves.settled(ctx, backward.run(values, present))
            found = tuple(backward.run(values, present))
            found = trial.settle(found, lambda: replay.gradients(ctx, present, plain, False))
            if free:
                replay.forget(ctx)
            return None, *leaves.settled(ctx, found)

    watched = Watched(Compiled, joint, shown)
    # Without the layer that looks for functorch's transforms, under which nothing is compiled.
    apply = super(torch.autograd.Function, Compiled).apply
    if not _grad_enabled():  # the program turns gradients on within the graph
        apply = torch.enable_grad()(apply)

    def call(primals: tuple[Any, ...]) -> Sequence[Any]:
        found: list[Any] = []
        return placed(apply(found, *cut_off(primals, unreached)), shown, found)

    return call


def cut_off(primals: tuple[Any, ...], unreached: frozenset[int]) -> Sequence[Any]:
    """The primals, some of them without their history."""
    if not unreached:
        return primals
    return placed([primals[i].detach() for i in unreached], [*unreached], [*primals])


def without_gradient(joint: Joint, gradients: Sequence[Any]) -> tuple[Joint, frozenset[int]]:
    """The primals that no gradient flows to, where one does to others: the node would go back behind them."""
    pairs = enumerate(zip(joint.primals, gradients, strict=True))
    unreached = frozenset(i for i, (p, gradient) in pairs if p.requires_grad and gradient is None)
    if all(gradient is None for gradient in gradients):
        return joint, frozenset()
    primals = [replace(p, requires_grad=p.requires_grad and i not in unreached)
               for i, p in enumerate(joint.primals)]  # fmt: skip
    return replace(joint, primals=tuple(primals)), unreached


class Otherwise:
    """Gradients that are not to be had from the compiled half: with a history, or within a transform."""

    def __init__(
        self, joint: Joint, halves: Halves, saving: Saving, tangents: Tangents, replay: Replay
    ) -> None:
        self.places, self.saving, self.tangents, self.replay = joint.tangents, saving, tangents, replay
        self.op_by_op = Backward(halves, len(joint.tangents), runner)
        self.within = within(joint)

    def __call__(self, ctx: Any, grads: list[Any]) -> Sequence[Any] | None:
        """The gradients of the primals; None for usual ones."""
        if _grad_enabled():
            present, values = self.tangents(grads, ctx)
            self.saving.check(ctx, present)
            return self.replay.gradients(ctx, present, values)
        # A gradient that is one of torch.func's tensors, or of a batch of gradients, has no memory.
        if not any(grad is not None and (_is_transformed(grad) or _is_batch(grad)) for grad in grads):
            return None
        there = [(k, grads[i]) for k, i in enumerate(self.places) if grads[i] is not None]
        present = sum(1 << k for k, _ in there)
        saved = [*self.saving.load(ctx, present), *ctx.numbers]
        return self.op_by_op.run([*saved, *[grad for _, grad in there]], present)

    def told(self, ctx: Any, grads: list[Any], watchers: Watchers) -> Sequence[Any] | None:
        """The same where somebody looks at gradients of results: tells them, or has the replay do so."""
        present = sum(1 << k for k, i in enumerate(self.places) if grads[i] is not None)
        plain = not any(grad is not None and (_is_transformed(grad) or _is_batch(grad)) for grad in grads)
        if plain and not self.replay.lost and any(self.within[k] & present for k in watchers):
            present, values = self.tangents(grads, ctx)
            self.saving.check(ctx, present)
            found = self.replay.gradients(ctx, present, values, _grad_enabled(), watchers)
            if not _keeps_graph() and self.saving.release(ctx, present):
                self.replay.forget(ctx)
            return found
        for k, hooks in watchers.items():
            grads[self.places[k]] = called(hooks, grads[self.places[k]])
        return self(ctx, grads)


def placed(values: Sequence[Any], places: Sequence[int], among: list[Any]) -> list[Any]:
    """A list in which some places have new values."""
    for place, value in zip(places, values, strict=True):
        among[place] = value
    return among


def unboxed(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients that autograd hands over, in a list where it can: it is emptied, so that they may go."""
    if not BOXED:
        return given
    grads = tuple(given[0])
    given[0].clear()
    return grads


def entered(run: Run) -> Run:
    """A compiled graph without autograd's and autocast's keys; one that calls no op does not ask for them."""
    if getattr(run, "pure", False):
        return run

    def guarded(values: list[Any]) -> Sequence[Any]:
        with below():
            return run(values)

    return guarded


def _quiet(joint: Joint) -> set[int]:
    """The results that are only written to inputs, without a history: autograd need not see them."""
    seen = {*joint.tangents, *[m.index for m in joint.mutated if m.with_grad]}
    seen |= {o.index for o in joint.outputs if isinstance(o, Fresh)}
    seen |= {o.base for o in joint.outputs if isinstance(o, View) and type(o.base) is int}
    return {m.index for m in joint.mutated} - seen


def _unusual_results(joint: Joint, quiet: set[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Results that repeat an earlier one, with it, and those not differentiable, quiet ones aside."""
    first: dict[Any, int] = {}
    twice = []
    aside = []
    for i, node in enumerate(joint.forward_outputs()):
        if type(node) is not Node or i in quiet:
            continue
        if node in first:
            twice.append((i, first[node]))
        first.setdefault(node, i)
        if i not in joint.tangents and isinstance(node.spec, TensorSpec):
            aside.append(i)
    return twice, aside


class Backward:
    """The backward half, compiled when it first runs, for each set of tangents that occurs."""

    def __init__(self, halves: Halves, tangents: int, compiler: Compiler) -> None:
        self.graph, self.compiler, self.tangents = halves.backward, compiler, tangents
        self.saved = halves.tensors + halves.numbers
        self.everything = (1 << tangents) - 1
        self._begun: dict[int, tuple[Begun, tuple[int, ...] | None]] = {}
        self._built: dict[int, tuple[Run, tuple[int, ...] | None]] = {}
        self._lock = threading.Lock()

    def begin(self, present: int) -> None:
        """Let the backward for these tangents be compiled by other threads, as far as they can."""
        with suppress(Exception):  # it is seen when the backward runs
            self._begun[present] = self._start(present)

    def run(self, values: list[Any], present: int) -> Sequence[Any]:
        """The gradients; `values` are the saved ones, None where not needed, and the tangents given."""
        found = self._built.get(present)
        if found is None:
            with self._lock:
                found = self._built.get(present)
                if found is None:
                    found = self._built[present] = self._build(present)
        run, inputs = found
        if inputs is not None:
            places = [self.saved + k for k in range(self.tangents) if present >> k & 1]
            every = placed(values, [*range(self.saved), *places], [None] * len(self.graph.inputs))
            values[:] = [every[i] for i in inputs]
            del every
        return run(values)

    def _build(self, present: int) -> tuple[Run, tuple[int, ...] | None]:
        begun, inputs = self._begun.pop(present) if present in self._begun else self._start(present)
        made = begun.finish()
        if hasattr(made, "shows"):
            made.shows(0)  # gradients are held, and let go of, together
        return entered(made), inputs

    def _start(self, present: int) -> tuple[Begun, tuple[int, ...] | None]:
        if present == self.everything:
            return begin(self.compiler, self.graph), None
        graph, inputs = pruned(self.graph, self.tangents, present)
        return begin(self.compiler, graph), inputs


def likely(joint: Joint) -> int:
    """The tangents that a program probably gives, as bits: where a loss is among the results, its alone."""
    nodes = joint.graph.inputs[len(joint.primals) :]
    losses = sum(1 << k for k, node in enumerate(nodes) if not node.spec.shape)
    return losses or (1 << len(nodes)) - 1


class _Holder(torch.autograd.Function):
    """A node that nobody runs: it keeps tensors as autograd keeps them, with their versions and hooks."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


_ANCHOR = torch.empty(0, requires_grad=True)
_hold = super(torch.autograd.Function, _Holder).apply


class Saving:
    """What a call saves, in groups by the results for whose gradients it is read.

    In eager, a backward pass from one result frees what it used and leaves the rest to the others; autograd
    frees all that one node saved. So the node itself saves what is read for all results, and nodes beside it
    the rest.
    """

    def __init__(self, joint: Joint, halves: Halves) -> None:
        self.count = halves.tensors
        everything = self.everything = (1 << len(joint.tangents)) - 1
        groups: dict[int, list[int]] = {everything: []}
        if len(joint.tangents) == 1:
            groups[everything] += range(self.count)
        else:
            for i, masks in enumerate(uses(halves.backward, len(joint.tangents))[: self.count]):
                for mask in masks:
                    groups.setdefault(mask, []).append(i)
        self.shared = groups.pop(everything)
        self.groups = list(groups.items())
        # A result saved beside its own node would keep that node alive for ever.
        results = set(halves.forward.outputs[: joint.results])
        saved = halves.forward.outputs[joint.results :][: self.count]
        self.results = {i for i, node in enumerate(saved) if node in results}

    def save(self, ctx: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the tensors."""
        if not self.groups:
            ctx.save_for_backward(*tensors)
            return
        ctx.save_for_backward(*[tensors[i] for i in self.shared])
        ctx.left = self.everything
        with torch.enable_grad():
            ctx.beside = [
                _hold(_ANCHOR, [tensors[i].detach() if i in self.results else tensors[i] for i in places])
                for _, places in self.groups
            ]

    def _nodes(self, ctx: Any, present: int) -> list[tuple[Any, list[int]]]:
        """The nodes that hold what these gradients need, and which tensors each holds."""
        found: list[tuple[Any, list[int]]] = [(ctx, self.shared)] if self.shared else []
        if self.groups:
            beside = zip(self.groups, ctx.beside, strict=True)
            # A node frees what it saved when its result goes, whoever else holds the node: so that is kept.
            found += [(held.grad_fn, places) for (mask, places), held in beside if mask & present]
        return found

    def check(self, ctx: Any, present: int) -> None:
        """Raise what eager raises where what these gradients need is freed or was written to."""
        for node, _ in self._nodes(ctx, present):
            node.saved_tensors  # noqa: B018

    def load(self, ctx: Any, present: int) -> list[Any]:
        """The saved tensors, None for those that these gradients do not need."""
        if not self.groups:
            return list(ctx.saved_tensors) if self.count else []
        values: list[Any] = [None] * self.count
        for node, places in self._nodes(ctx, present):
            for i, tensor in zip(places, node.saved_tensors, strict=True):
                values[i] = tensor
        return values

    def release(self, ctx: Any, present: int) -> bool:
        """Let go of what these gradients needed before the backward pass ends; whether none is left.

        With it goes what only results need whose gradients are not to be had any more without it.
        """
        nodes = self._nodes(ctx, present)
        for node, _ in nodes:
            node.maybe_clear_saved_tensors()
        if not self.groups:
            return bool(nodes)
        lost = self.everything if self.shared else present
        for mask, _ in self.groups:
            lost |= mask if mask & present else 0
        ctx.left &= ~lost
        for (mask, _), held in zip(self.groups, ctx.beside, strict=True):
            if not mask & (ctx.left | present):
                held.grad_fn.maybe_clear_saved_tensors()
        return not ctx.left


def symbol_values(joint: Joint) -> Callable[[tuple[Any, ...]], dict[Symbol, Any]] | None:
    """A function from the primals to the values of all symbols; None when there are no symbols."""
    bound = bindings(joint.graph)
    order = {node: i for i, node in enumerate(joint.graph.inputs)}
    places = [
        (s, order[n], what, dim) for s, (n, what, dim) in bound.items() if order[n] < len(joint.primals)
    ]
    if not places:
        return None

    def values(primals: tuple[Any, ...]) -> dict[Symbol, Any]:
        return {s: getattr(primals[i], what)(dim) if what else primals[i] for s, i, what, dim in places}

    return values


class Tangents:
    """Makes of the gradients that autograd hands over what the backward graph expects."""

    def __init__(self, joint: Joint, any_strides: bool = False) -> None:
        nodes = joint.graph.inputs[len(joint.primals) :]
        specs = [node.spec for node in nodes]
        users = joint.graph.users() if any_strides else {}
        pairs = zip(joint.tangents, nodes, strict=True)
        self.normal = {i for i, node in pairs if any_strides and normalised(node, users)}
        self.expected = [
            (1 << k, i, spec) for k, (i, spec) in enumerate(zip(joint.tangents, specs, strict=True))
        ]
        self.symbolic = any(isinstance(n, Expr) for s in specs for n in (*s.shape, *s.stride))

    def __call__(self, grads: Sequence[Any], ctx: Any) -> tuple[int, list[torch.Tensor]]:
        """The set of tangents that are there, as bits, and those, with the strides that were traced."""
        present = 0
        made = []
        for bit, index, spec in self.expected:
            grad = grads[index]
            if grad is None:
                continue
            present |= bit
            shape, stride = spec.shape, spec.stride
            if self.symbolic:
                shape, stride = (resolved(sizes, ctx.sizes) for sizes in (shape, stride))
            if index in self.normal and not any(grad.stride()):
                made.append(grad)
                continue
            if grad.stride() != stride and not same_places(shape, grad.stride(), stride):
                grad = torch.empty_strided(shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
            if grad.is_conj() or grad.is_neg():
                grad = grad.resolve_conj().resolve_neg()
            made.append(grad)
        return present, made


#: The backward passes of normalisations, which add up what cancels: in another order another rest is left.
NORMALISING = frozenset({
    aten.native_batch_norm_backward.default, aten.native_layer_norm_backward.default,
})  # fmt: skip
#: Views that a tensor with one place for all its elements has, whatever its sizes.
VIEWS = frozenset({aten.view.default, aten.permute.default, aten.transpose.int, aten.unsqueeze.default})


def normalised(node: Node, users: dict[Node, list[Node]]) -> bool:
    """Whether a gradient goes, as it is or in views, to backward passes of normalisations and to sums."""
    return all(
        user.op in NORMALISING
        or user.op in VIEWS
        and normalised(user, users)
        or user.op is aten.add.Tensor
        and all(isinstance(a, Node) and a.spec == user.spec for a in user.args)
        for user in users.get(node, ())
    )


def same_places(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two strides put each element of a tensor of this shape into the same place."""
    return all(n == 1 or x == y for n, x, y in zip(shape, a, b, strict=True)) or 0 in shape
