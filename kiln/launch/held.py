"""Graphs over tensors that a module holds: what follows from those alone is computed when they change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch

from kiln._held import Watch
from kiln._launch import Plan
from kiln.base import log
from kiln.base.closeness import close, worth
from kiln.base.dump import NOWHERE, Dump
from kiln.base.errors import Uneven
from kiln.base.fx import runner
from kiln.base.graph import CONSTANT, Graph, Node, Own, argument
from kiln.base.options import Settings
from kiln.expand.freeze import Frozen, can_watch, freeze
from kiln.expand.onednn import packed_linear, packing
from kiln.expand.packed import PURE
from kiln.launch.cache import disk
from kiln.launch.layers import more_held, repeated
from kiln.launch.native import set_up
from kiln.launch.plan import linked
from kiln.launch.program import Run, choice, compile_graph
from kiln.ops.meta import reach


def compile_held(
    graph: Graph, settings: Settings, held: Mapping[int, torch.Tensor], dump: Dump = NOWHERE
) -> Run:
    """A graph that needs no gradients, as native code; `held` inputs are the same tensors in every call."""
    frozen = None
    if settings.freeze and not settings.exact:
        frozen = freeze(graph, {i for i, tensor in held.items() if can_watch(tensor)})
    if frozen is None:
        return compile_graph(graph, settings, dump)
    if settings.tunes and not gains(graph, settings, held, frozen):
        return compile_graph(graph, settings, dump)
    tries = repeatable(graph) and any(node.op in PURE for node in frozen.once.nodes)
    if not tries:  # what is tried runs twice on the same values
        places = {k: i for i, k in enumerate(frozen.given)}
        frozen.rest.overwrites = {i: places[k] for i, k in graph.overwrites.items() if k in places}
    if not tries and len(frozen.given) == len(graph.inputs) and is_constant(frozen):
        return compile_graph(with_constants(frozen), settings, dump)
    made = Held(frozen, compile_graph(frozen.rest, settings, dump), [held[i] for i in frozen.held])
    if tries:
        made.trial = graph, lambda: compile_graph(graph, settings, dump)
    return made.run


def is_constant(frozen: Frozen) -> bool:
    """Whether what is computed once follows from no tensor."""
    return not frozen.once.inputs and all(node.op is not CONSTANT for node in frozen.once.nodes)


def with_constants(frozen: Frozen) -> Graph:
    """The rest of a graph that holds what is computed once, whatever comes: nothing has to be watched."""
    graph, first = frozen.rest, len(frozen.given)
    for node, tensor in zip(graph.inputs[first:], computed_once(frozen)([]), strict=True):
        node.op, node.args = CONSTANT, (tensor,)
    graph.nodes[:0] = graph.inputs[first:]
    graph.inputs = graph.inputs[:first]
    return graph.check()


def computed_once(frozen: Frozen) -> Run:
    """What follows from held tensors, whatever mode the program is in; linear layers' weights as they are."""
    run = runner(frozen.once)

    def values(tensors: list[Any]) -> Sequence[Any]:
        with torch.inference_mode(False), torch.no_grad(), packing(leaves=True):
            return run(tensors)

    return values


def compile_layers(
    graph: Graph, settings: Settings, held: Mapping[int, torch.Tensor], owns: Sequence[Own],
    dump: Dump = NOWHERE,
) -> Run:  # fmt: skip
    """A graph that leaves layers out, as native code for all of them; Uneven where that is not to be had.

    Its plan is made, and the steps of one layer are repeated over what `owns` says of those left out.
    """
    watched = {i for i, tensor in held.items() if can_watch(tensor)}
    between = [tensor for own in owns for tensor in own.between]
    if not all(map(can_watch, between)) or not all(own.inputs[2] in watched for own in owns):
        raise Uneven
    if not all(map(is_alike, graph.nodes)):
        raise Uneven
    frozen = freeze(graph, watched)
    if frozen is None:
        frozen = Frozen(Graph(), graph, (), tuple(range(len(graph.inputs))))
    elif repeatable(graph) and any(node.op in PURE for node in frozen.once.nodes):
        raise Uneven  # what eager gives for the whole is looked at
    more, tensors, inputs = more_held(frozen, owns)
    plan = compile_graph(frozen.rest, settings, dump)
    if not isinstance(plan, Plan):
        raise Uneven
    made = repeated(plan.owner, inputs, len(owns[0].between))
    whole = linked(made, made.code)
    whole.title = plan.title
    return Held(more, whole, [*(held[i] for i in frozen.held), *tensors]).run


def is_alike(node: Node) -> bool:
    """Whether a node does the same wherever it stands: an op of torch's that draws no random numbers."""
    op = node.op
    if op is CONSTANT or op is getitem:
        return True
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return False
    return torch.Tag.nondeterministic_seeded not in op.tags or op in ATTENTION and not argument(
        node, 3, "dropout_p", 0.0
    )


#: Ops that draw random numbers only where a probability, their fourth argument, is not zero.
ATTENTION = frozenset({torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default})


def repeatable(graph: Graph) -> bool:
    """Whether a graph may run a second time on the same values without effect, and gives the same."""
    ops = {node.op for node in graph.nodes} - {CONSTANT, getitem}
    aten = all(isinstance(op, torch._ops.OpOverload) and op.namespace == "aten" for op in ops)
    return aten and not any(torch.Tag.nondeterministic_seeded in op.tags for op in ops) and worth(graph.nodes)


def gains(graph: Graph, settings: Settings, held: Mapping[int, torch.Tensor], frozen: Frozen) -> bool:
    """Whether the frozen form of a graph is the faster one, by the clock."""
    untuned = replace(settings, mode="default")
    tensors = [held[i] for i in frozen.held]
    ways = {
        "frozen": lambda: ("frozen", lambda: Held(frozen, compile_graph(frozen.rest, untuned), tensors).run),
        "plain": lambda: ("plain", lambda: compile_graph(graph, untuned)),
    }
    store, specs = disk(settings.cache_bytes), [node.spec for node in graph.inputs]
    return bool(choice(str(graph), ways, specs, store, held) == "frozen")


#: Calls with the same weights of linear layers before these are packed. A copy of all of them is as much new
#: memory, which takes up to a second, and gains some percent of a call.
PLAIN = 2


class Held:
    """Runs a frozen graph; what follows from held tensors is computed anew when one of them has changed."""

    def __init__(self, frozen: Frozen, rest: Run, tensors: list[torch.Tensor]) -> None:
        self.rest, self.tensors, self.given = rest, tensors, frozen.given
        self.once = computed_once(frozen)
        self.lock = threading.Lock()
        set_up()
        constants = [node.args[0] for node in frozen.once.nodes if node.op is CONSTANT]
        read = frozen.once.read()  # what is handed on as it is shows its changes itself
        used = [tensor for node, tensor in zip(frozen.once.inputs, tensors, strict=True) if node in read]
        watched = (*used, *constants)
        self.stamp = Watch(watched, tuple(map(extent, watched))).stamp
        self.state: tuple[int, tuple[Any, ...]] = -1, ()
        outputs = enumerate(frozen.once.outputs)
        self.packs = {i: node.args[1] for i, node in outputs if node.op is packed_linear}
        """Which values are weights of linear layers, with the rows that these are given."""
        self.left = 0
        """Calls until they are packed; 0 when they are."""
        self.trial: tuple[Graph, Callable[[], Run]] | None = None
        """The graph as it was, and its compiler: until the first call has shown that layers may be packed."""

    def run(self, values: list[Any]) -> Sequence[Any]:
        """The outputs on these values of the inputs; empties the list."""
        if self.trial is not None:
            return self.tried(values, *self.trial)
        now = self.stamp()
        state = self.state if self.state[0] == now and not self.left else self.computed(now)
        given = [values[i] for i in self.given]
        values.clear()
        given += state[1]
        return self.rest(given)

    def tried(self, values: list[Any], graph: Graph, compiler: Callable[[], Run]) -> Sequence[Any]:
        """The outputs of the first call, and eager's beside them.

        Packed layers add in another order than eager's. Where activations are large and cancel, that shows in
        leading digits: then the graph is compiled with its layers as they are.
        """
        self.trial = None
        given = list(values)
        mine = self.run(values)
        eager = runner(graph)(given)
        if close(mine, eager):
            return mine
        log.say("plan", "packed layers differ from eager's by more than usual rounding and stay as they were")
        self.rest, self.given, self.tensors = compiler(), tuple(range(len(graph.inputs))), []
        self.stamp, self.state, self.left = lambda: 0, (0, ()), 0
        return eager

    def computed(self, now: int) -> tuple[int, tuple[Any, ...]]:
        """The values that follow from the held tensors as they are now."""
        with self.lock:
            if self.state[0] != now:
                self.state = -1, ()  # what was computed before goes before new memory is taken
                self.state = now, tuple(self.once(list(self.tensors)))
                self.left = PLAIN if self.packs else 0
            elif self.left:
                self.left -= 1
                if not self.left:
                    self.state = now, tuple(self.packed(self.state[1]))
            return self.state

    def packed(self, values: Sequence[Any]) -> Iterator[Any]:
        """The values with the weights of linear layers packed."""
        with torch.inference_mode(False), torch.no_grad(), packing():
            for i, value in enumerate(values):
                as_it_is = i in self.packs and not value.is_mkldnn
                yield packed_linear(value, self.packs[i]) if as_it_is else value


def extent(tensor: torch.Tensor) -> int:
    """The bytes of memory from a tensor's first element to its last."""
    seen = tensor.numel() and tensor.device.type == "cpu"  # other memory cannot be looked at
    return (reach(tensor) - tensor.storage_offset()) * tensor.element_size() if seen else 0
