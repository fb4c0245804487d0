"""The callable of a differentiated graph: runs its halves, writes inputs back, makes eager's outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx

from kiln.base.errors import untouched
from kiln.base.graph import Graph, Own, TensorSpec
from kiln.differentiate.again import Replay
from kiln.differentiate.alias import lies_as, overlapping
from kiln.differentiate.finish import finisher, gives_results, origin_of
from kiln.differentiate.halves import Halves
from kiln.differentiate.interpret import fetch
from kiln.differentiate.joint import Attribute, Given, Joint, Placeholder, Storage, View
from kiln.differentiate.kinds import kind
from kiln.differentiate.training import Compiler as Compiler
from kiln.differentiate.training import Run as Run
from kiln.differentiate.training import entered, symbol_values, training, without_gradient
from kiln.differentiate.trial import Trial

HeldCompiler: TypeAlias = Callable[[Graph, Mapping[int, torch.Tensor], Sequence[Own]], Run]
"""A compiler that is told which inputs, by position, are the same tensors in every call, and what the layers
that the graph leaves out have."""


def callable_for(
    module: fx.GraphModule,
    joint: Joint,
    halves: Halves | None,
    compile_forward: Compiler,
    compile_backward: Compiler,
    compile_held: HeldCompiler | None = None,
    tries: bool = False,
) -> Callable[..., Any]:
    """The function that stands for the captured graph `module`: takes its inputs and gives its outputs.

    The forward is compiled now, the backward when it first runs; it is begun now where other threads are
    at work on the forward. Where there is none, `compile_held` compiles
    the graph, if given: it learns which inputs are tensors that the module holds and the graph leaves alone.
    `tries` has gradients compared with eager's, as `kiln.differentiate.trial` says.
    """
    attributes = _attributes(module, joint)
    primals = _picker(joint, attributes, len([n for n in module.graph.nodes if n.op == "placeholder"]))
    values_of = symbol_values(joint)
    overwrites = _overwrites(joint, halves is not None)
    sizes = (lambda args: values_of(primals(args))) if values_of else (lambda args: {})
    finish = finisher(joint, attributes, sizes, overwrites)
    compiles = True

    def leave() -> None:
        nonlocal compiles
        compiles = False

    if halves is None:
        joint.graph.overwrites = overwrites
        if compile_held is None:
            forward = compile_forward(joint.graph)
        else:
            owns = [replace(own, between=tuple([fetch(module, name) for name in own.between]))
                    for own in joint.layers]  # fmt: skip
            forward = compile_held(joint.graph, _held(joint, attributes), owns)
        if getattr(forward, "pure", False) and gives_results(joint) and not joint.apart:
            return _direct(forward, primals)
        run = _inference(joint, forward)
    else:
        trial = Trial(joint.graph, leave) if tries else None
        halves.forward.overwrites = overwrites
        reached, unreached = without_gradient(joint, halves.backward.outputs)
        replay = Replay(module, reached, leave)
        run = training(replay, reached, unreached, halves, compile_forward, compile_backward, trial)
    apart = _apart(joint, attributes)
    writes_last = all(joint.primals[i].spec.device.type == "cpu" for i in overwrites.values())

    def call(*args: Any) -> Any:
        if not compiles:
            return module.forward(*args)
        try:
            results = run(primals(args))
        except Exception as error:
            if writes_last:
                untouched(error)
            raise
        return finish(results, args)

    if apart is None:
        return call
    holds = apart

    def checked(*args: Any) -> Any:
        return call(*args) if holds(args) else module.forward(*args)

    return checked


def _overwrites(joint: Joint, trains: bool) -> dict[int, int]:
    """The results that may be written where the inputs lie whose new values they are, with these inputs.

    Where gradients are computed, what the module holds on a GPU.
    """
    primals = joint.primals
    return {
        m.index: m.primal for m in joint.mutated
        if not m.with_grad and (not trains or isinstance(primals[m.primal].origin, Attribute)
                                and primals[m.primal].spec.device.type == "cuda")
    }  # fmt: skip


def _direct(forward: Callable[..., Any], primals: Pick) -> Callable[..., Any]:
    """Native code that gives the outputs of the captured graph: nothing stands between it and the caller."""
    if primals is _as_given:
        return forward
    return lambda *args: forward(*primals(args))


def _held(joint: Joint, attributes: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """The tensors that are inputs of the graph in every call, by position; those that it writes are not."""
    written = {mutation.primal for mutation in joint.mutated}
    return {
        i: attributes[primal.origin.name]
        for i, primal in enumerate(joint.primals)
        if isinstance(primal.origin, Attribute) and i not in written
    }


def _attributes(module: fx.GraphModule, joint: Joint) -> dict[str, Any]:
    """The tensors that the joint graph takes from the module."""
    origins: list[Any] = [primal.origin for primal in joint.primals]
    for output in joint.outputs:
        if isinstance(output, Given):
            origins.append(output.origin)
        elif isinstance(output, View):
            origins.append(output.base)
    names = [origin.name for origin in origins if isinstance(origin, Attribute)]
    return {name: fetch(module, name) for name in names}


Pick: TypeAlias = Callable[[tuple[Any, ...]], tuple[Any, ...]]


def _as_given(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args


def _picker(joint: Joint, attributes: Mapping[str, Any], count: int) -> Pick:
    """A function from the arguments to the values of the primals."""
    held: list[Any] = []
    places = []
    for primal in joint.primals:
        if isinstance(primal.origin, Placeholder):
            places.append(primal.origin.index)
        elif isinstance(primal.origin, Attribute):
            places.append(count + len(held))
            held.append(attributes[primal.origin.name])
        else:
            return lambda args: tuple(origin_of(p.origin, attributes)(args) for p in joint.primals)
    if places == list(range(count)):
        return _as_given
    rest = tuple(held)
    if len(places) < 2:
        return lambda args: tuple([(*args, *rest)[i] for i in places])
    pick = operator.itemgetter(*places)
    return lambda args: pick((*args, *rest))


def _apart(joint: Joint, attributes: Mapping[str, Any]) -> Callable[[tuple[Any, ...]], bool] | None:
    """Whether no written primal overlaps another in memory; None where no call can make them overlap.

    Attributes are the same tensors in each call: they are compared once.
    """
    written = set(joint.apart)
    origins = [primal.origin for primal in joint.primals]
    arguments = [i for i, o in enumerate(origins) if not isinstance(o, Attribute)]
    shared = [(p.origin, p.spec.shape[0]) for p in joint.primals if isinstance(p.origin, Storage)]
    held = [i for i, o in enumerate(origins) if isinstance(o, Attribute)]
    if not written:
        return None
    tensors = {i: attributes[o.name] for i, o in enumerate(origins) if isinstance(o, Attribute)}
    groups = overlapping([tensors[i] for i in held])
    if any(written & {held[i] for i in group} for group in groups):
        return lambda args: False
    # Where arguments are written, everything may collide with them; else they may with written attributes.
    others = held if written & set(arguments) else [i for i in held if i in written]
    if len(arguments) + len(others) < 2 and not shared:
        return None
    around = [tensors[i] for i in others]
    marked = [i in written for i in (*arguments, *others)]
    takes = [origin_of(origins[i], attributes) for i in arguments]
    lengths = [bytes_of(joint.primals[i].spec) for i in (*arguments, *others)]
    if len(lengths) <= FEW and not shared and None not in lengths:
        return _few_apart([i for i, is_written in enumerate(marked) if is_written], lengths, takes, around)

    def apart(args: tuple[Any, ...]) -> bool:
        if not all(lies_as(origin, length, args) for origin, length in shared):
            return False
        found = overlapping([*(take(args) for take in takes), *around])
        return not any(marked[i] for group in found for i in group)

    return apart


#: Tensors of which each is compared with each.
FEW = 8


def bytes_of(spec: Any) -> int | None:
    """How many bytes a tensor on the CPU reaches over; None where that varies, 0 for what is no tensor."""
    if not isinstance(spec, TensorSpec):
        return 0
    if spec.device.type != "cpu" or not all(type(n) is int for n in (*spec.shape, *spec.stride)):
        return None
    last = sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    return 0 if 0 in spec.shape else (1 + last) * spec.dtype.itemsize


def _few_apart(
    written: list[int], lengths: list[Any], takes: list[Any], around: list[torch.Tensor]
) -> Callable[[tuple[Any, ...]], bool]:
    """The same for a few tensors whose sizes are known."""
    tensors = [i for i, length in enumerate(lengths) if length]
    pairs = [(i, lengths[i], j, lengths[j]) for i in tensors for j in tensors
             if i in written and (j > i or j not in written)]  # fmt: skip

    def apart(args: tuple[Any, ...]) -> bool:
        values = [*[take(args) for take in takes], *around]
        starts = [value.data_ptr() if length else 0 for value, length in zip(values, lengths, strict=True)]
        for i, mine, j, other in pairs:
            if starts[i] < starts[j] + other and starts[j] < starts[i] + mine:
                return False
        return True

    return apart


def _inference(joint: Joint, forward: Run) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    """Runs a graph without a backward half; what it calls that is no torch op may want autograd's keys."""
    if not joint.graph.nodes and not joint.graph.outputs:
        return lambda primals: ()
    acting = [node.op for node in joint.graph.nodes if kind(node.op).acts]
    opaque = not all(isinstance(op, torch._ops.OpOverload) for op in acting)
    run = torch.no_grad()(forward) if opaque else entered(forward)
    return lambda primals: run(list(primals))
