"""Graph and Node: straight-line programs of torch ops in which every value has a type."""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from typing import Any, TypeAlias, TypeVar

import torch

from kiln._nests import gathered as gathered
from kiln._nests import mapped as mapped
from kiln._nests import replaced as in_place_of
from kiln.base.dataclass import dataclass
from kiln.base.errors import Bug
from kiln.base.expressions import Expr, Symbol


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The type of a tensor: sizes and strides are ints, or symbolic expressions where they may vary."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    offset: Any = 0

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, self.shape))}]"


T = TypeVar("T")

Spec: TypeAlias = Any
"""A TensorSpec; a tuple or list of specs for an op of several results; the type of a number; None."""

INPUT = "input"
CONSTANT = "constant"


@dataclass(eq=False, slots=True)
class Node:
    """One value of a graph: what computes it, from which values, and its type.

    `op` is an OpOverload, `operator.getitem` for one result of an op of several, another callable that stays
    opaque, INPUT, or CONSTANT (then `args` holds the object). Nodes stand in `args` and `kwargs` themselves,
    in lists and tuples too; symbolic expressions stand there as they are.
    """

    op: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    spec: Spec = None
    name: str = ""
    where: str = ""
    """The user's source line, as captured."""
    backward: bool = False
    """Whether the value belongs to the backward half of a joint graph."""
    region: int | None = None
    """The checkpoint region whose values are recomputed and not saved."""

    def inputs(self) -> list[Node]:
        """The nodes that this one reads, with repetitions."""
        return gathered(Node, self.args, self.kwargs)

    def over(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "") -> Node:
        """The same op over other arguments."""
        return Node(
            self.op, args, kwargs, self.spec, name or self.name, self.where, self.backward, self.region
        )

    def __repr__(self) -> str:
        return self.name or f"<{label(self.op)}>"


def nodes_in(value: Any) -> list[Node]:
    """The nodes in a nest of tuples, lists, dicts and slices."""
    return gathered(Node, value)


def expressions_in(value: Any) -> list[Expr]:
    """The symbolic expressions in such a nest."""
    return [*gathered(Expr, value), *gathered(Symbol, value)]


def reached(roots: Iterable[T], onward: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """The roots and all that they lead to, once each, each after one that leads to it."""
    found, todo = dict[T, None](), list(roots)
    while todo:
        if (one := todo.pop()) not in found:
            found[one] = None
            todo += onward(one)
    return found


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and all that they are made of."""
    return set(reached(nodes, Node.inputs))


def argument(call: Any, place: int, name: str, default: Any = None) -> Any:
    """What a node or another call has at a place or by a name; `default` where it is not given."""
    return call.args[place] if len(call.args) > place else call.kwargs.get(name, default)


RESERVED = frozenset((*keyword.kwlist, *dir(builtins)))


def identifier(wanted: str) -> str:
    """`wanted` as the name of a variable that hides nothing of Python's."""
    if wanted.isidentifier() and wanted not in RESERVED:
        return wanted
    text = re.sub(r"\W", "_", wanted) or "value"
    return f"_{text}" if text[0].isdigit() or text in RESERVED else text


class Graph:
    """Inputs, nodes in the order in which they run, and outputs: nodes, numbers or None.

    `overwrites` says of outputs, by place, which input the caller gives their value to: who runs the graph
    may write them there at once.
    """

    __slots__ = ("_names", "inputs", "nodes", "outputs", "overwrites")

    def __init__(self) -> None:
        self.inputs: list[Node] = []
        self.nodes: list[Node] = []
        self.outputs: tuple[Any, ...] = ()
        self.overwrites: dict[int, int] = {}
        self._names: dict[str, int] = {}

    def input(self, name: str, spec: Spec, backward: bool = False) -> Node:
        """A new input, after those there are."""
        node = Node(INPUT, spec=spec, name=self.name(name), backward=backward)
        self.inputs.append(node)
        return node

    def constant(self, value: Any, spec: Spec, name: str = "constant") -> Node:
        """A node for an object that the graph holds: a tensor that is not an input, a generator, …"""
        return self.add(Node(CONSTANT, (value,), spec=spec, name=self.name(name)))

    def call(
        self,
        op: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        spec: Spec = None,
        like: Node | None = None,
    ) -> Node:
        """A new node at the end; `like` lends its place in the source, half and region."""
        node = Node(op, args, kwargs or {}, spec, self.name(label(op)))
        if like is not None:
            node.where, node.backward, node.region = like.where, like.backward, like.region
        return self.add(node)

    def add(self, node: Node) -> Node:
        """Put a node at the end; one without a name, or of another graph, is named by the caller."""
        self.nodes.append(node)
        return node

    def copy(self, node: Node, known: dict[Node, Any]) -> Node:
        """Add what a node of another graph does, over what stands here for the values that it reads."""
        args = node.args if node.op is CONSTANT else retarget(node.args, known)
        kwargs = retarget(node.kwargs, known) if node.kwargs else {}
        return self.add(node.over(args, kwargs, self.name(node.name)))

    def name(self, wanted: str) -> str:
        """A name not used in this graph, made of `wanted`."""
        text = identifier(wanted)
        names = self._names
        count = names.get(text)
        if count is None:
            names[text] = 0
            return text
        name = text
        while name in names:
            count += 1
            name = f"{text}_{count}"
        names[text] = count
        names[name] = 0
        return name

    def take_names(self, nodes: Iterable[Node]) -> None:
        """Let new names be others than these nodes have, which differ already."""
        self._names.update(dict.fromkeys([node.name for node in nodes], 0))

    def users(self) -> dict[Node, list[Node]]:
        """The nodes that read each node, once each, in order; what only outputs read has none."""
        users: dict[Node, list[Node]] = {node: [] for node in (*self.inputs, *self.nodes)}
        for node in self.nodes:
            reads = node.inputs()
            for read in dict.fromkeys(reads) if len(reads) > 1 else reads:
                users[read].append(node)
        return users

    def read(self) -> set[Node]:
        """What some node reads."""
        return set().union(*[node.inputs() for node in self.nodes])

    def drop_unused(self, keep: Callable[[Node], bool] = lambda node: False) -> None:
        """Remove the nodes that no output needs; `keep` saves those that matter for what they do."""
        needed = set(nodes_in(self.outputs))
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if node in needed or keep(node):
                kept.append(node)
                needed.update(node.inputs())
        self.nodes = kept[::-1]

    def check(self) -> Graph:
        """This graph; Bug if a value is read before it is made, or two nodes share a name."""
        made: set[Node] = set()
        names: set[str] = set()
        for node in (*self.inputs, *self.nodes):
            for read in node.inputs():
                if read not in made:
                    raise Bug(f"{node.name} reads {read.name}, which is not made before it")
            if not node.name or node.name in names:
                raise Bug(f"the name {node.name!r} stands for two values")
            made.add(node)
            names.add(node.name)
        for out in nodes_in(self.outputs):
            if out not in made:
                raise Bug(f"the output {out.name} is not made in the graph")
        return self

    def __str__(self) -> str:
        """The graph as a Python function."""
        inputs = ", ".join(f"{node.name}: {show_spec(node.spec)!r}" for node in self.inputs)
        lines = [f"def graph({inputs}):"]
        for node in self.nodes:
            lines.append(f"    {node.name} = {call_text(node)}  # {show_spec(node.spec)}")
        lines.append(f"    return ({', '.join(map(show, self.outputs))}{',' * (len(self.outputs) == 1)})")
        return "\n".join(lines)


_names: dict[int, tuple[Any, str]] = {}
"""The names of overloads, by the ids of these, which are held: their hashes take long."""


def name_of(overload: Any) -> str:
    """The name of the op that an overload belongs to, without aten's namespace; other callables have none."""
    known = _names.get(id(overload))
    if known is None:
        if not hasattr(overload, "_schema"):
            return ""
        known = _names[id(overload)] = overload, str(overload._schema.name.removeprefix("aten::"))
    return known[1]


def label(op: Any) -> str:
    """The short name of what a node calls."""
    if isinstance(op, torch._ops.OpOverload):
        return name_of(op).rpartition("::")[2]
    return op if isinstance(op, str) else str(getattr(op, "__name__", type(op).__name__))


def show(value: Any) -> str:
    """A value in a node's arguments as Python source."""
    if type(value) is Node:
        return value.name
    if type(value) is list:
        return f"[{', '.join(map(show, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(show, value))}{',' * (len(value) == 1)})"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    return str(value) if not isinstance(value, str) else repr(value)


def show_spec(spec: Spec) -> str:
    """A type for a person."""
    if isinstance(spec, (tuple, list)):
        return f"({', '.join(map(show_spec, spec))})"
    return getattr(spec, "__name__", None) or str(spec)


def call_text(node: Node) -> str:
    """The call of a node as Python source."""
    if node.op is operator.getitem:
        return f"{show(node.args[0])}[{show(node.args[1])}]"
    if node.op is CONSTANT:
        return f"constant({node.name!r})"
    target = f"torch.ops.{node.op}" if isinstance(node.op, torch._ops.OpOverload) else label(node.op)
    arguments = [*map(show, node.args), *(f"{k}={show(v)}" for k, v in node.kwargs.items())]
    return f"{target}({', '.join(arguments)})"


def call_key(node: Node) -> Any:
    """What two nodes have in common that call an op alike, within one region; None where it has no hash."""
    try:
        # An op is always the same object, and hashes slowly.
        more = _key(tuple(node.kwargs.items())) if node.kwargs else ()
        key = id(node.op), node.region, _key(node.args), more
        hash(key)
    except TypeError:
        return None
    return key


def _key(value: Any) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple([item if type(item) is int or type(item) is Node else _key(item) for item in value])
    # 1, 1.0 and True are equal and yet not the same argument; so are 0.0 and -0.0.
    return (kind, value or str(value)) if kind in _NUMBERS else value


_NUMBERS = (float, bool, complex)


def retarget(nest: Any, replaced: dict[Node, Any]) -> Any:
    """A nest with what stands in the place of nodes; others stay."""
    return in_place_of(Node, nest, replaced)


def copied(graph: Graph) -> Graph:
    """A graph of other nodes that does the same."""
    made, known = Graph(), dict[Node, Any]()
    for node in graph.inputs:
        known[node] = made.input(node.name, node.spec, node.backward)
    for node in graph.nodes:
        known[node] = made.copy(node, known)
    made.outputs, made.overwrites = retarget(graph.outputs, known), graph.overwrites
    return made


@dataclass(frozen=True, slots=True)
class Own:
    """What layers of a graph have of their own at one place: the inputs of three, one after the other, and
    what stands there in the layers between the second and the third, which the graph leaves out."""

    inputs: tuple[int, int, int]
    between: tuple[Any, ...]


class Made:
    """Nodes made in the place of one, which lends them its place in the source, half and region."""

    def __init__(self, graph: Graph, like: Node) -> None:
        self.graph, self.like = graph, like
        self.nodes: list[Node] = []

    def call(self, op: Any, spec: Spec, *args: Any, **kwargs: Any) -> Node:
        """One more node, after those there are."""
        name, like = self.graph.name(label(op)), self.like
        self.nodes.append(Node(op, args, kwargs, spec, name, like.where, like.backward, like.region))
        return self.nodes[-1]


def substituted(
    graph: Graph,
    instead: Callable[[Node], tuple[Sequence[Node], Any] | None],
    keep: Callable[[Node], bool] = lambda node: False,
) -> Graph:
    """The graph, changed in place, with other nodes where `instead` gives some and the value of theirs.

    What nobody needs after that goes, but what nobody read before, and what `keep` saves.
    """
    replaced: dict[Node, Any] = {}
    nodes: list[Node] = []
    unread: set[Node] = set()
    for node in graph.nodes:
        if replaced and not replaced.keys().isdisjoint(node.inputs()):
            node.args, node.kwargs = retarget(node.args, replaced), retarget(node.kwargs, replaced)
        found = instead(node)
        if found is None:
            nodes.append(node)
            continue
        if not replaced:
            unread = set(graph.nodes) - graph.read()
        nodes += found[0]
        replaced[node] = found[1]
    if not replaced:
        return graph
    graph.nodes = nodes
    graph.outputs = retarget(graph.outputs, replaced)
    # What was read by nobody was called for what it does.
    graph.drop_unused(keep=lambda node: node in unread or keep(node))
    return graph


def tensors(specs: Iterable[Spec]) -> Iterator[TensorSpec]:
    """The tensor types in a nest of types."""
    for spec in specs:
        if isinstance(spec, TensorSpec):
            yield spec
        elif isinstance(spec, (tuple, list)):
            yield from tensors(spec)
