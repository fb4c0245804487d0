"""Graphs at the door: as a torch.fx.GraphModule, for compilers, and as one Python function, for running."""

from __future__ import annotations

import linecache
import math
import operator
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import fx

from kiln.base import profiling
from kiln.base.computed import build
from kiln.base.errors import Bug
from kiln.base.expressions import Expr, Symbol
from kiln.base.graph import CONSTANT, Graph, Node, TensorSpec, expressions_in, label, mapped, nodes_in, show
from kiln.base.tracebacks import retold

aten = torch.ops.aten

_numbers = count()


def bindings(graph: Graph) -> dict[Symbol, tuple[Node, str, int]]:
    """For each symbol its input, and "size" or "stride" with the dimension, or "" for the number itself."""
    found: dict[Symbol, tuple[Node, str, int]] = {}
    for node in graph.inputs:
        if isinstance(node.spec, Symbol):
            found[node.spec] = (node, "", 0)
    tensors = [node for node in graph.inputs if isinstance(node.spec, TensorSpec)]
    for what, field in (("size", "shape"), ("stride", "stride")):
        for node in tensors:
            for dim, size in enumerate(getattr(node.spec, field)):
                if isinstance(size, Symbol):
                    found.setdefault(size, (node, what, dim))
    return found


def expressions(graph: Graph) -> list[Expr]:
    """The symbolic expressions in arguments and outputs, with repetitions."""
    calls = [(node.args, node.kwargs) for node in graph.nodes if node.op is not CONSTANT]
    return expressions_in([*calls, graph.outputs])


# As an fx graph


def to_fx(graph: Graph, value_of: Callable[[Any], Any] | None = None) -> fx.GraphModule:
    """A graph module that computes what the graph does; sizes are nodes, each expression once.

    Each node's meta holds its type as "spec"; with `value_of`, what that makes of the type as "val".
    """
    made = _Module(graph, value_of)
    for node in graph.nodes:
        made.call(node)
    made.graph.output(tuple(made.argument(out) for out in graph.outputs))
    return fx.GraphModule(made.attributes, made.graph)


class _Module:
    """An fx graph in the making."""

    def __init__(self, graph: Graph, value_of: Callable[[Any], Any] | None) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.value_of = value_of
        self.nodes: dict[Node, fx.Node] = {}
        self.sizes: dict[Any, Any] = {}
        for node in graph.inputs:
            self._done(node, self.graph.placeholder(node.name))
        self.bound = bindings(graph)

    def call(self, node: Node) -> None:
        """Add a node of the graph."""
        if node.op is CONSTANT:
            self.attributes[node.name] = node.args[0]
            self._done(node, self.graph.get_attr(node.name))
            return
        args = tuple(self.argument(a) for a in node.args)
        kwargs = {k: self.argument(v) for k, v in node.kwargs.items()}
        self._done(node, self.graph.create_node("call_function", node.op, args, kwargs, node.name))

    def _done(self, node: Node, made: fx.Node) -> None:
        self.nodes[node] = made
        made.meta["spec"] = node.spec
        if self.value_of is not None:
            made.meta["val"] = self.value_of(node.spec)
        if node.where:
            made.meta["stack_trace"] = node.where

    def argument(self, value: Any) -> Any:
        """A nest in a node's arguments as fx has it."""
        return mapped(value, self._leaf)

    def _leaf(self, value: Any) -> Any:
        return self.nodes[value] if type(value) is Node else self._size(value)

    def _size(self, value: Any) -> Any:
        """The node that computes an expression, made at its first use."""
        if not isinstance(value, Expr):
            return value
        known = self.sizes.get(value)
        if known is None:
            known = self.sizes[value] = self._computed(value)
            if isinstance(known, fx.Node):
                known.meta.setdefault("spec", value)
                if self.value_of is not None:
                    known.meta.setdefault("val", self.value_of(value))
        return known

    def _computed(self, value: Expr) -> Any:
        if not isinstance(value, Symbol):
            return build(value, self._size, lambda function, *args: self.graph.call_function(function, args))
        if value not in self.bound:
            raise Bug(f"no input of the graph has the size {value}")
        node, what, dim = self.bound[value]
        read = aten.sym_stride.int if what == "stride" else aten.sym_size.int
        return self.graph.call_function(read, (self.nodes[node], dim)) if what else self.nodes[node]


# As a Python function


def runner(graph: Graph, title: str = "") -> Callable[[list[Any]], tuple[Any, ...]]:
    """A function of a list with the inputs' values that gives the outputs; it empties the list.

    Every value, inputs included, is let go after its last use: what the caller does not hold is freed.
    `title` is what the graph is called in profiles.
    """
    made: list[Callable[[list[Any]], tuple[Any, ...]]] = []

    def marked(values: list[Any]) -> tuple[Any, ...]:
        if not made:
            made.append(_function(graph, mark=profiling.record_function))
        with profiling.record_function(f"kiln.graph {title}".rstrip()):
            return made[0](values)

    return _function(graph, marked=marked, active=profiling.active)


def _function(graph: Graph, **given: Any) -> FunctionType:
    """The function of a graph; with `mark`, a range around each call."""
    text = _Text(graph, given)
    source = text.source()
    filename = f"<kiln graph {next(_numbers)}>"
    space: dict[str, Any] = {"math": math, "_told": partial(retold, text.places), **text.constants}
    exec(compile(source, filename, "exec"), space)
    function: FunctionType = space["run"]
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    weakref.finalize(function, linecache.cache.pop, filename, None)
    return function


UNMARKED = frozenset({CONSTANT, operator.getitem})


def title_of(node: Node) -> str:
    """What a call is named in a profile."""
    ours = type(node.op).__module__.startswith("kiln.")
    return f"{'kiln.kernel' if ours else 'kiln.call'} {label(node.op)}"


class _Text:
    """The text of a graph's function, and the objects it names."""

    def __init__(self, graph: Graph, given: dict[str, Any]) -> None:
        self.graph = graph
        self.constants: dict[str, Any] = {f"_{name}": value for name, value in given.items()}
        self.places: dict[int, str] = {}
        """For lines of the text the place of their node in the program."""
        self.names: dict[Node, str] = {}
        self._known: dict[Any, str] = {}
        self._sizes: dict[Expr, str] = {}

    def source(self) -> str:
        graph = self.graph
        names = self.names
        for i, node in enumerate((*graph.inputs, *graph.nodes)):
            names[node] = f"_v{i}"
        lines = ["def run(values):"]
        marks = "_mark" in self.constants
        if not marks:
            lines += ["    if _active:", "        return _marked(values)"]
        if graph.inputs:
            lines.append(f"    {', '.join(names[n] for n in graph.inputs)}, = values")
        lines.append("    values.clear()")
        lines += self._sizes_bound()
        last = self._last_uses()
        dead = [names[n] for n in graph.inputs if n not in last]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
        for node in graph.nodes:
            mark = f"with _mark({title_of(node)!r}): " if marks and node.op not in UNMARKED else ""
            lines.append(f"    {mark}{names[node]} = {self._call(node)}")
            self.places[len(lines) + 1] = node.where
            done = [names[read] for read in dict.fromkeys(node.inputs()) if last[read] is node]
            if node not in last:
                done.append(names[node])
            if done:
                lines.append(f"    del {', '.join(done)}")
        results = "".join(f"{self._argument(out)}, " for out in graph.outputs)
        lines.append(f"    return ({results})")
        body = [f"    {line}" for line in lines[1:]]
        ending = ["    except BaseException as error:", "        _told(error)", "        raise"]
        return "\n".join([lines[0], "    try:", *body, *ending]) + "\n"

    def _last_uses(self) -> dict[Node, Any]:
        last: dict[Node, Any] = {}
        for node in self.graph.nodes:
            for read in node.inputs():
                last[read] = node
        for out in nodes_in(self.graph.outputs):
            last[out] = self.graph
        return last

    def _sizes_bound(self) -> Iterator[str]:
        """Assignments of the symbols in use, then of each expression."""
        used = dict.fromkeys(expressions(self.graph))
        bound = bindings(self.graph)
        symbols = dict.fromkeys(s for value in used for s in sorted(value.symbols(), key=str))
        for symbol in symbols:
            if symbol not in bound:
                raise Bug(f"no input of the graph has the size {symbol}")
            node, what, dim = bound[symbol]
            yield f"    {symbol} = {self.names[node]}" + (f".{what}({dim})" if what else "")
        for i, value in enumerate(v for v in used if not isinstance(v, Symbol)):
            self._sizes[value] = f"_e{i}"
            yield f"    _e{i} = {value}"

    def _call(self, node: Node) -> str:
        if node.op is CONSTANT:
            return self._constant(node.args[0])
        if node.op is operator.getitem:
            return f"{self._argument(node.args[0])}[{self._argument(node.args[1])}]"
        op = node.op._op if isinstance(node.op, torch._ops.OpOverload) else node.op
        arguments = [self._argument(a) for a in node.args]
        arguments += [f"{k}={self._argument(v)}" for k, v in node.kwargs.items()]
        return f"{self._constant(op, '_f')}({', '.join(arguments)})"

    def _argument(self, value: Any) -> str:
        kind = type(value)
        if kind is Node:
            return self.names[value]
        if kind is int or kind is bool or kind is str or value is None:
            return repr(value)
        if kind is float and math.isfinite(value):
            return repr(value)
        if kind is list:
            return f"[{', '.join(map(self._argument, value))}]"
        if kind is tuple:
            return f"({''.join(f'{self._argument(v)}, ' for v in value)})"
        if kind is dict:
            return f"{{{', '.join(f'{k!r}: {self._argument(v)}' for k, v in value.items())}}}"
        if kind is slice:
            parts = map(self._argument, (value.start, value.stop, value.step))
            return f"slice({', '.join(parts)})"
        if isinstance(value, Symbol):
            return show(value)
        if isinstance(value, Expr):
            return self._sizes[value]
        return self._constant(value)

    def _constant(self, value: Any, prefix: str = "_c") -> str:
        """The name of an object that the function holds."""
        key = (type(value), id(value))
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = f"{prefix}{len(self.constants)}"
            self.constants[name] = value
        return name
