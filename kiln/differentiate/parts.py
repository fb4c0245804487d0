"""A captured graph in parts: between calls whose backward cannot be traced, which run in eager."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import fx

from kiln.base.symbols import Expr, Symbol
from kiln.differentiate.interpret import argument
from kiln.ops.lift import is_symbolic
from kiln.ops.symint import expr_of

NUMBERS = (torch.SymInt, torch.SymFloat)
Make = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


class Part:
    """Some nodes of a graph as a graph of its own; `make` compiles it for the values of the first call.

    `numbers` are the nodes that give symbols. A part is handed those that its sizes follow from. What is made
    `anew` is for this part alone.
    """

    def __init__(
        self, module: fx.GraphModule, nodes: list[fx.Node], make: Make, numbers: dict[Symbol, fx.Node],
        anew: Collection[fx.Node] = (),
    ) -> None:  # fmt: skip
        own = set(nodes)
        used = [i for node in nodes for i in node.all_input_nodes if i not in own]
        given = {size for node in used for size in sizes_of(node)}
        missing = {symbol for node in used for symbol in symbols_of(node)} - given
        used += [node for symbol, node in numbers.items() if symbol in missing and node not in own]
        self.inputs = [node for node in dict.fromkeys(used) if node.op != "get_attr"]
        read = set(numbers.values())
        left = [node for node in nodes if node.op != "get_attr" and node not in anew]
        self.outputs = [node for node in left if node in read or not own.issuperset(node.users)]
        graph, copies = fx.Graph(), {}
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in (*[node for node in dict.fromkeys(used) if node.op == "get_attr"], *nodes):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple([copies[node] for node in self.outputs]))
        self.module = fx.GraphModule(module, graph)
        self.module.meta = dict(module.meta)
        self.make = make
        self.run: Callable[..., Any] | None = None
        examples = [(i, node.meta.get("example_value")) for i, node in enumerate(self.inputs)]
        self.fixed = [i for i, v in examples if isinstance(v, torch.Tensor) and not is_symbolic(v)]
        self.strides: list[Any] = []

    def crossing(self) -> Iterator[Any]:
        """What is handed from part to part."""
        return (node.meta.get("example_value") for node in (*self.inputs, *self.outputs))

    def __call__(self, values: list[Any]) -> Any:
        strides = [values[i].stride() for i in self.fixed]
        if self.run is None:
            self.strides, self.run = strides, self.make(self.module, values)
        # What ran in eager may be laid out otherwise than in the first call.
        return (self.run if self.strides == strides else self.module.forward)(*values)


def symbols_of(node: fx.Node) -> Iterator[Symbol]:
    """What the sizes of a tensor, or a number, follow from."""
    for size in sizes_of(node):
        if isinstance(size, Expr):
            yield from size.symbols()


def sizes_of(node: fx.Node) -> list[Any]:
    """The sizes of a tensor, or the number that a node is."""
    value = node.meta.get("example_value")
    shape = value.shape if isinstance(value, torch.Tensor) else [value] if isinstance(value, NUMBERS) else ()
    return [expr_of(size) for size in shape]


def symbols_in(graph: fx.Graph) -> dict[Symbol, fx.Node]:
    """The nodes that give symbols: as a size of what is given, or as a number."""
    found: dict[Symbol, fx.Node] = {}
    for node in graph.nodes:
        tensor = isinstance(node.meta.get("example_value"), torch.Tensor)
        for size in sizes_of(node) if node.op == "placeholder" or not tensor else ():
            if isinstance(size, Symbol):
                found.setdefault(size, node)
    return found


def numbers_of(graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls that give numbers, also on the way to one."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        example, given = node.meta.get("example_value"), node.all_input_nodes
        if isinstance(example, NUMBERS) or example is None and given and found.issuperset(given):
            found.add(node)
            if node.op.startswith("call"):
                yield node


def made_of(nodes: list[fx.Node], computed: set[fx.Node]) -> set[fx.Node]:
    """The numbers that nodes read, and those that they are computed from.

    What is compiled builds on what is said of numbers, so a number that is checked is not taken from there.
    """
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        more = computed.intersection(waiting.pop().all_input_nodes) - found
        found |= more
        waiting += more
    return found.difference(nodes)


def in_parts(
    module: fx.GraphModule, make: Make, opaque: Callable[[fx.Node], bool]
) -> Callable[..., Any] | None:
    """The graph with calls that `opaque` names in eager and `make` for what is between; None where it cannot.

    Every second part is in eager. Only tensors and numbers go from one to another.
    """
    place: dict[fx.Node, int] = {}
    now = 0
    numbers = symbols_in(module.graph)
    computed = {node for node in numbers_of(module.graph) if not opaque(node)}
    apart: set[fx.Node] = set()  # numbers for calls in eager alone
    for node in reversed(module.graph.nodes):
        if node in computed and node.users and all(user in apart or opaque(user) for user in node.users):
            apart.add(node)
    unplaced = apart.difference(numbers.values())
    for node in module.graph.nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if node.op in ("placeholder", "output", "get_attr") or node in unplaced:
            continue
        if isinstance(source, fx.Node) and not isinstance(source.meta.get("example_value"), torch.Tensor):
            place[node] = place.get(source, now)  # an item of a tuple stays with it
        else:
            now += node not in apart and now % 2 != opaque(node)
            place[node] = now
    parts, order = [], {node: i for i, node in enumerate(module.graph.nodes)}
    for number, group in groupby(sorted(place, key=place.__getitem__), place.__getitem__):
        nodes = list(group)
        if number % 2:
            anew = made_of(nodes, computed)
            nodes = sorted((*nodes, *anew), key=order.__getitem__)
            parts.append(Part(module, nodes, lambda part, values: part.forward, numbers, anew))
        else:
            parts.append(Part(module, nodes, make, numbers))
    whole = len(parts) == 1 and parts[0].make is make
    return None if whole else joined(module, parts)


def joined(module: fx.GraphModule, parts: list[Part]) -> Callable[..., Any] | None:
    """A graph as its parts, one after the other; None where not only tensors and numbers cross."""
    kinds = (torch.Tensor, *NUMBERS)
    if not all(isinstance(v, kinds) for part in parts for v in part.crossing()):
        return None
    inputs, result = module.graph.find_nodes(op="placeholder"), module.graph.output_node().args[0]
    held = {node: getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")}
    last = {node: i for i, part in enumerate(parts) for node in part.inputs}
    kept = set(module.graph.output_node().all_input_nodes)

    def run(*args: Any) -> Any:
        known = {**held, **dict(zip(inputs, args, strict=True))}
        for i, part in enumerate(parts):
            known.update(zip(part.outputs, part([known[node] for node in part.inputs]), strict=True))
            for node in part.inputs:
                if last[node] == i and node not in kept:
                    del known[node]
        return argument(result, known)

    return run
