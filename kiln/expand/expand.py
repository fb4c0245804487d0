"""Expand: a graph at a lower level, each op that is above it written in smaller ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from math import copysign
from types import MappingProxyType
from typing import Any

import torch

from kiln.base import log, options
from kiln.base.errors import Break, Bug
from kiln.base.graph import CONSTANT, Graph, Node, Spec, TensorSpec, mapped, nodes_in, retarget
from kiln.expand.fit import fit
from kiln.ops.aliases import shows
from kiln.ops.expansions.all import EXPANSIONS
from kiln.ops.layout import COMPLEX, FLOATS
from kiln.ops.levels import BINARY, CHOICE, CORE, LEVELS, TERNARY, UNARY, name_of
from kiln.ops.meta import draws
from kiln.ops.record import Recording, fake_of
from kiln.ops.symint import wrap
from kiln.ops.table import COMPLEX_TOO

Expansion = Callable[..., Any]


def expand(graph: Graph, level: str, also: Mapping[Any, Expansion] = MappingProxyType({})) -> Graph:
    """The graph at level "aten" (itself), "core" or "prims": the same inputs and outputs, and types of them.

    `also` are expansions of ops that belong to the level, for a compiler that has no use for them.
    """
    if level not in LEVELS:
        raise ValueError(f"the level of a graph is one of {', '.join(LEVELS)}, not {level!r}")
    if level == "aten":
        return graph
    expanded = Expander(level, also).run(graph)
    return check(expanded, level) if options.config.strict else expanded


class Expander:
    """Expands graphs to one level; the expansion of an op is worked out once for arguments of one type."""

    def __init__(self, level: str, also: Mapping[Any, Expansion] = MappingProxyType({})) -> None:
        self.level, self.also = level, also
        self._expansions: dict[Any, Expansion | None] = {}
        #: For an op and the types of its arguments: what stands in its place, or None.
        self._templates: dict[Any, Graph | None] = {}

    def run(self, graph: Graph) -> Graph:
        """The expanded graph, a new one."""
        out = Graph()
        values: dict[Node, Any] = {}
        kept: set[Node] = set()
        read = graph.read() | set(nodes_in(graph.outputs))
        for node in graph.inputs:
            values[node] = made = out.input(node.name, node.spec, node.backward)
            made.where, made.region = node.where, node.region
        for node in graph.nodes:
            if node.op is operator.getitem and type(values[node.args[0]]) is not Node:
                values[node] = values[node.args[0]][node.args[1]]
                continue
            template = self.template(node) if node.op is not CONSTANT else None
            if template is None:
                values[node] = copied = out.copy(node, values)
                if node not in read:
                    kept.add(copied)
            else:
                values[node] = _inline(out, template, node, values)
        out.outputs = retarget(graph.outputs, values)
        # What nobody read before stays: whether it matters is not ours to say.
        out.drop_unused(keep=lambda node: node in kept or draws(node))
        return out

    def template(self, node: Node) -> Graph | None:
        """What stands in the place of `node`, as a graph over the nodes that it reads; None if it stays."""
        op = node.op
        try:
            function = self._expansions[op]
        except KeyError:
            function = self._expansions[op] = self._expansion(op)
        if function is None:
            return None
        try:
            given = _key(tuple(node.kwargs.items())) if node.kwargs else ()
            key = id(op), _key(node.args), given, _key(node.spec)
            return self._templates[key]
        except KeyError:
            pass
        except TypeError:
            key = None
        # While it is worked out, the op itself stands for it: an expansion may call its own op.
        if key is not None:
            self._templates[key] = None
        made = self._make(function, node)
        if key is not None:
            self._templates[key] = made
        return made

    def _expansion(self, op: Any) -> Expansion | None:
        if op in self.also:
            return self.also[op]
        if self.level == "core" and name_of(op) in CORE:
            return None
        return EXPANSIONS.get(op)

    def _make(self, function: Expansion, node: Node) -> Graph | None:
        if node.op not in COMPLEX_TOO and any(_is_complex(n.spec) for n in node.inputs()):
            return None
        try:
            recorded = _record(function, node)
        except Break:
            return None  # it asks for a number that the graph alone will have
        except Exception as error:
            if options.config.strict:
                raise Bug(f"the expansion of {node.op} fails: {error}") from error
            log.warn_once(
                ("expand", node.op), f"the expansion of {node.op} fails, its kernel is called: {error}"
            )
            return None
        return None if recorded is None else self.run(recorded)


def _record(function: Expansion, node: Node) -> Graph | None:
    """The expansion of `node`, one level down, as a graph over the nodes that it reads."""
    recording = Recording()

    def enter(leaf: Any) -> Any:
        if type(leaf) is not Node:
            return wrap(leaf) if hasattr(leaf, "scope") else leaf
        if not isinstance(leaf.spec, TensorSpec):
            raise TypeError(f"{leaf.name} is no tensor")
        fake = fake_of(leaf.spec)
        recording.input(leaf.name, fake)
        return fake

    args = mapped(node.args, enter)
    kwargs = mapped(node.kwargs, enter)
    # Whatever surrounds the compilation has had its effect on the graph when it was traced.
    with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction(), recording:
        out = function(*args, **kwargs)
        if out is NotImplemented:
            return None
        fitted = fit(out, node.spec, () if shows(node.op) else recording.graph.inputs, recording)
    recording.graph.outputs = (fitted,)
    recording.graph.drop_unused()
    return recording.graph


def _inline(graph: Graph, template: Graph, node: Node, values: dict[Node, Any]) -> Any:
    """Add the nodes of `template` in the place of `node`; what they give."""
    reads = nodes_in((node.args, node.kwargs))
    known: dict[Node, Any] = {
        inner: values[outer] for inner, outer in zip(template.inputs, reads, strict=True)
    }

    for inner in template.nodes:
        args = inner.args if inner.op is CONSTANT else retarget(inner.args, known)
        kwargs = retarget(inner.kwargs, known) if inner.kwargs else {}
        known[inner] = graph.call(inner.op, args, kwargs, inner.spec, like=node)
    return retarget(template.outputs[0], known)


def _is_complex(spec: Spec) -> bool:
    return isinstance(spec, TensorSpec) and spec.dtype in COMPLEX


def _key(value: Any) -> Any:
    """A hashable stand-in for arguments: equal only if an expansion of both is the same."""
    kind = type(value)
    if kind is Node:
        return value.spec
    if kind is tuple or kind is list:
        return tuple([_key(item) for item in value])
    if kind is float:
        return kind, value, copysign(1, value)
    return (kind, value) if kind is int or kind is bool else value


#: Overloads that a graph at level prims does not hold: another one says the same.
SUPERSEDED = frozenset({"aten.add.Scalar", "aten.sub.Scalar", "aten.mul.Scalar", "aten.div.Scalar"})
ELEMENTWISE = UNARY | BINARY | TERNARY | CHOICE


def check(graph: Graph, level: str) -> Graph:
    """The graph; Bug where a node breaks a promise of the level, as `kiln.ops.levels` states them."""
    graph.check()
    if level == "prims":
        for node in graph.nodes:
            reason = broken(node) if node.op is not CONSTANT else ""
            if reason:
                raise Bug(f"{node.name} = {node.op} {reason}, which level prims does not allow")
    return graph


def broken(node: Node) -> str:
    """The promise about elementwise primitives that a node breaks, in words; empty if it keeps all."""
    name = name_of(node.op)
    if name not in ELEMENTWISE:
        return ""
    if str(node.op) in SUPERSEDED:
        return "is a superseded form"
    operands: tuple[Any, ...] = node.args[1:] if name == "where" else node.args[: 3 if name in TERNARY else 2]
    dtypes = {a.spec.dtype for a in operands if isinstance(a, Node) and isinstance(a.spec, TensorSpec)}
    if len(dtypes) > 1:
        return f"mixes {' and '.join(sorted(map(str, dtypes)))}"
    if node.kwargs.get("alpha", 1) != 1:
        return "has an alpha"
    if name in BINARY and dtypes & FLOATS and any(type(a) in (int, bool) for a in operands):
        return "has an integer beside floating numbers"
    return ""
