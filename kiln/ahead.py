"""Training backends: a captured graph is differentiated ahead of time and its halves are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, fx
from torch._ops import OpOverloadPacket

from kiln import _hook
from kiln.base import log, records
from kiln.base.begun import Begun, begin
from kiln.base.collecting import uncollected
from kiln.base.dump import NOWHERE, Dump
from kiln.base.errors import Break, Uneven
from kiln.base.expressions import Condition, Expr
from kiln.base.fx import runner, to_fx
from kiln.base.graph import Graph, TensorSpec
from kiln.base.options import Backend, config, unknown
from kiln.base.outside import computes
from kiln.base.reports import fell_back
from kiln.capture.nested import hide
from kiln.capture.runtime import watch_gradient
from kiln.capture.sequences import RECURRENT
from kiln.capture.torch_calls import Named
from kiln.differentiate import blocks, finish, parts, results, run, training
from kiln.differentiate.blocks import in_blocks
from kiln.differentiate.halves import Halves
from kiln.differentiate.joint import Joint
from kiln.differentiate.partition import partition, with_values_again
from kiln.differentiate.parts import Make, in_parts
from kiln.differentiate.places import has_places
from kiln.differentiate.run import HeldCompiler, callable_for
from kiln.differentiate.switches import switched
from kiln.differentiate.trace import trace
from kiln.differentiate.training import Compiler, Run
from kiln.expand.expand import expand
from kiln.ops.cudnn_rnn import of_packed
from kiln.ops.levels import LEVELS
from kiln.ops.lift import is_symbolic
from kiln.ops.random import draw
from kiln.ops.record import fake_of
from kiln.ops.symint import expr_of, wrap

# What stands between the program and its compiled graphs.
hide(blocks, finish, parts, results, run, training)

T = TypeVar("T")

LOST = frozenset({
    "_enter_inference_mode", "_set_default_dtype", "set_default_dtype", "manual_seed", "seed",
    "set_rng_state", "Generator", "seed_generator",
})  # fmt: skip
"""Calls without tensors whose effect a graph of aten ops does not show, by name."""

GraphCompiler: TypeAlias = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
"""What a backend author writes: takes an fx graph of aten ops and example inputs, gives a callable."""

Partition: TypeAlias = Callable[[Joint], Halves]


def aot(
    fw_compiler: GraphCompiler,
    bw_compiler: GraphCompiler | None = None,
    partition: Partition | None = None,
    level: str = "aten",
    inference_compiler: GraphCompiler | None = None,
) -> Backend:
    """Make a backend for `compile` out of functions that take fx graphs.

    `fw_compiler` gets the forward graph, `bw_compiler` the backward graph when it first runs,
    `inference_compiler` the graph of calls that need no gradients; `fw_compiler` serves where one is None.
    The graphs are functional, parameters are inputs, and they consist of aten ops, core ops or primitives, as
    `level` says. Example inputs are fake tensors. `partition` takes the joint graph and gives its halves.
    """
    if level not in LEVELS:
        raise unknown("level", level, LEVELS)
    for compiler in (fw_compiler, bw_compiler or fw_compiler, inference_compiler or fw_compiler):
        if not callable(compiler):
            raise TypeError(
                f"a compiler is a callable (GraphModule, example inputs) -> callable, got {compiler!r}"
            )
    forward = partial(through_fx, fw_compiler)
    backward = partial(through_fx, bw_compiler or fw_compiler)
    inference = partial(through_fx, inference_compiler or fw_compiler)

    def backend(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        return compiled(module, examples, forward, backward, inference, partition, level)

    backend.__name__ = getattr(fw_compiler, "__name__", "aot")
    return backend


def aot_eager(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """Differentiate the graph ahead of time and run the halves op by op."""
    return compiled(module, examples, runner, runner, runner)


# It needs no code of the graph module.
aot_eager.reads_graph = True  # type: ignore[attr-defined]


@uncollected()
def compiled(
    module: fx.GraphModule,
    examples: Sequence[Any],
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
    parted: Partition | None = None,
    level: str = "aten",
    random: str = "",
    held: HeldCompiler | None = None,
    tries: bool = False,
    dump: Dump = NOWHERE,
    arrange: Callable[[Graph], Graph] = lambda graph: graph,
    short: bool = False,
) -> Callable[..., Any]:
    """The callable of a captured graph whose halves these compilers compile.

    `random` says which random numbers are Kiln's own, as the option of that name does. `held`, where given,
    compiles graphs without gradients in the place of `inference`, and learns which tensors the module holds.
    `tries` has gradients that may cancel compared with eager's once. `arrange` chooses layouts. `short` lets
    `held` compile a graph of few layers in the place of many.

    A graph that cannot be differentiated ahead of time runs as it is, with one line in the log.
    """
    again = partial(
        compiled, forward=forward, backward=backward, inference=inference, parted=parted, level=level,
        random=random, held=held, tries=tries, dump=dump, arrange=arrange,
    )  # fmt: skip
    try:
        refuse_effects(module)
        refuse_hooks(module)
        refuse_wrappers(module, examples)
        name = str(module.meta.get("name", ""))
        with records.timed("differentiate", name):
            joint = trace(module, list(examples), short)
        joint = replace(joint, graph=draw(joint.graph, random), random=random)
        joint = replace(joint, graph=arrange(joint.graph))
        if joint.differentiates:
            dump.show("graph", "joint", "py", lambda: str(joint.graph))
        if level != "aten":
            joint = replace(joint, graph=expand(joint.graph, level))
        halves = None
        if joint.differentiates:
            with records.timed("partition", name):
                halves = partition(joint, config.memory_budget) if parted is None else parted(joint)
        elif any(node.backward for node in joint.graph.nodes):
            with records.timed("partition", name):
                joint = with_values_again(joint, config.memory_budget)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        return _otherwise(module, examples, error, partial(again, short=short)) or _as_captured(module, error)
    ahead = forward if halves else inference
    try:
        return callable_for(module, joint, halves, ahead, Unseen(backward), held, tries)
    except Uneven:
        return again(module, examples)


class Unseen:
    """A compiler whose own code is not captured: the backward is compiled while the program runs."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        # Op by op, a gradient may come with other strides than were traced: the kernels look at them.
        self.any_strides = compiler is runner

    def __call__(self, graph: Graph) -> Run:
        return self.aside(partial(self.compiler, graph))

    def begin(self, graph: Graph) -> Begun:
        begun = self.aside(partial(begin, self.compiler, graph))
        return replace(begun, finish=partial(self.aside, begun.finish))

    @staticmethod
    def aside(make: Callable[[], T]) -> T:
        _hook.pause()
        try:
            with uncollected():
                return make()
        finally:
            _hook.resume()


def refuse_effects(module: fx.GraphModule) -> None:
    """Raise Break where the graph changes a state of torch's that a graph of aten ops does not carry."""
    for node in module.graph.nodes:
        if node.op == "call_function" and "example_value" not in node.meta:
            name = getattr(node.target, "__name__", "")
            stays = name == "_enter_inference_mode" and node.args == (torch.is_inference_mode_enabled(),)
            if name in LOST and not stays:
                raise Break("global-state", f"the graph calls {name}", "call it outside the graph")


def refuse_hooks(module: fx.GraphModule) -> None:
    """Raise Break for hooks on gradients that may do more than compute: a trace alone would run them."""
    if any(is_hook(node) for node in module.graph.nodes):
        raise Break("tensor-hook", "a hook on gradients may do more than compute", "let it use torch alone")


def is_hook(node: fx.Node) -> bool:
    """Whether a call makes autograd call a function of the program's that is not known to compute alone."""
    if node.target is not watch_gradient:
        return node.target is torch.utils.hooks.BackwardHook
    held: Any = node.args[1]
    hook = getattr(held.graph.owning_module, held.target, None) if isinstance(held, fx.Node) else held
    return not computes(hook)


def refuse_wrappers(module: fx.GraphModule, examples: Sequence[Any]) -> None:
    """Raise Break for a graph over tensors made of others: what their classes do is not in it."""
    held = [getattr(module, str(node.target), None) for node in module.graph.find_nodes(op="get_attr")]
    made = [getattr(node.meta.get("example_value"), "wrapped", None) for node in module.graph.nodes]
    for value in (*examples, *held, *made):
        if hasattr(value, "__tensor_flatten__"):
            raise Break("tensor-subclass", f"the graph computes with a {type(value).__name__}", "")


def _otherwise(
    module: fx.GraphModule, examples: Sequence[Any], error: Exception, make: Make
) -> Callable[..., Any] | None:
    """What can be done with a graph that is not differentiated as it is; None where it runs as captured."""
    if not isinstance(error, Break):
        return None
    if error.kind == "requires-grad":
        return switched(module, examples, make)
    if error.kind == "global-state":
        return in_blocks(module, examples, make)
    if error.kind in ("backward", "data-dependent", "tensor-hook"):
        return _in_parts(module, error, make)
    return None


def _in_parts(module: fx.GraphModule, error: Break, make: Make) -> Callable[..., Any] | None:
    """The graph in parts, where it or a backward in Python looks at numbers: what may do so runs in eager."""
    own = any(map(looks_at_numbers, module.graph.nodes))
    aside: Make = lambda *given: Unseen.aside(partial(make, *given))  # noqa: E731
    run = in_parts(module, aside, lambda n: looks_at_numbers(n) or is_switch(n)) if own else None
    if run is not None and error.kind != "data-dependent":
        name = str(module.meta.get("name", "")) or "a graph"
        log.warn_once(("parts", error.why), f"{name} is differentiated in parts: {error.kind}: {error.why}")
    return run


def has_own_backward(node: fx.Node) -> bool:
    """Whether a call may have a backward written in Python: custom functions and custom ops."""
    example = node.meta.get("example_value")
    made = example if isinstance(example, (tuple, list)) else [example]
    written = is_custom(node) or isinstance(node.target, Named)
    return written and any(isinstance(v, Tensor) and v.requires_grad for v in made)


def is_custom(node: fx.Node) -> bool:
    """Whether a node calls an op that others than torch have made."""
    op = getattr(node.target, "overloadpacket", node.target)
    return isinstance(op, OpOverloadPacket) and not op._qualified_op_name.startswith("aten::")


def selects(node: fx.Node) -> bool:
    """Whether what a call gives is as long as the numbers in tensors say."""
    if not is_custom(node):
        return node.target in SELECTING
    given = [n.meta.get("example_value") for n in node.all_input_nodes]
    return bool(symbols_in(node.meta.get("example_value")) - symbols_in(given))


def symbols_in(value: Any) -> frozenset[Any]:
    """The symbols of the numbers and sizes in a nest."""
    if isinstance(value, (list, tuple)):
        return frozenset[Any]().union(*map(symbols_in, value))
    if isinstance(value, Tensor):
        return symbols_in((*value.shape, *value.stride())) if is_symbolic(value) else frozenset()
    expr = expr_of(value)
    return expr.symbols() if isinstance(expr, (Expr, Condition)) else frozenset()


#: What gives as much as the numbers in tensors say.
SELECTING = (torch.nonzero, torch._pack_padded_sequence, torch._pad_packed_sequence)


def looks_at_numbers(node: fx.Node) -> bool:
    """Whether a call, or its backward, may look at numbers in tensors, or checks one that was read."""
    checks = isinstance(node.target, Named) and "example_value" not in node.meta
    item = node.op == "call_method" and node.target == "item"
    packed = node.target in RECURRENT and of_packed(node.args)
    varies = node.target in RECURRENT and is_symbolic(node.meta.get("example_value"))
    reads = item or packed or varies or selects(node) or has_places(node)
    return checks or reads or has_own_backward(node) or is_hook(node)


def is_switch(node: fx.Node) -> bool:
    """Whether a call changes a state of torch's: parts are compiled for what it is when they first run."""
    made = node.all_input_nodes or "example_value" in node.meta
    return node.op == "call_function" and not made and node.target is not torch._C._set_grad_enabled


def _as_captured(module: fx.GraphModule, error: Exception) -> Callable[..., Any]:
    """The captured graph itself, where it cannot be differentiated; faults of ours raise where asked to."""
    if config.strict and not isinstance(error, Break):
        raise error
    name = str(module.meta.get("name", "")) or "a graph"
    what = "is not differentiated ahead of time and runs as captured"
    if isinstance(error, Break):
        why, remedy = f"{error.kind}: {error.why}", f"; {error.hint}" if error.hint else ""
        records.emit(records.FallbackRecord(name, why))
        log.warn_once(("differentiate", why), f"{name} {what}: {why}{remedy}")
    else:
        fell_back(name, error, what, str(module.code).strip())
    module.meta["as captured"] = True
    return module.forward  # type: ignore[no-any-return]


def through_fx(compiler: GraphCompiler, graph: Graph) -> Run:
    """A graph compiled by what takes fx graphs."""
    built = compiler(to_fx(graph, example), [example(node.spec) for node in graph.inputs])
    if getattr(built, "_boxed_call", False):
        return built

    def run(values: list[Any]) -> Any:
        arguments = tuple(values)
        values.clear()
        return built(*arguments)

    return run


def example(spec: Any) -> Any:
    """A value of a type, without data."""
    if isinstance(spec, TensorSpec):
        return fake_of(spec)
    if isinstance(spec, (tuple, list)):
        return type(spec)(map(example, spec))
    return wrap(spec) if isinstance(spec, Expr) else None
