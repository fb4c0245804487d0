"""Captured graphs as modules: their Python code is written when something first asks for it."""

from __future__ import annotations

import linecache
import weakref
from typing import Any

from torch.fx import Graph, GraphModule, Node, graph_module

from kiln import _hook


class CapturedGraph(Graph):
    """A graph that is recorded: its nodes are made without the checks that strangers' arguments need."""

    def __init__(self) -> None:
        super().__init__()
        self._labels: dict[Any, str] = {}  # of functions by their ids, of methods by their names

    def create_node(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        type_expr: Any = None,
    ) -> Node:
        """A new node at the place of insertion."""
        if self._owning_module is not None:
            return super().create_node(op, target, args, kwargs, name, type_expr)
        if name is None:
            key = target if op == "call_method" else id(target)
            name = self._labels.get(key)
            if name is None:
                name = self._target_to_str(target)
                if op == "call_function" or op == "call_method":  # which the node keeps alive
                    self._labels[key] = name
        name = self._graph_namespace.create_name(name, None)
        node = Node(self, name, op, target, args or (), kwargs or {}, type_expr)
        self._graph_namespace.associate_name_with_obj(name, node)
        self._insert(node)
        self._find_nodes_lookup_table.insert(node)
        self._len += 1
        return node


class CapturedModule(GraphModule):
    """A graph module whose `forward` is made at its first call: compilers of graphs never need it."""

    def __init__(self, root: dict[str, Any], graph: Graph) -> None:
        self.__dict__["_waits"] = True
        super().__init__(root, graph)

    def recompile(self) -> Any:
        """Write the code of the graph; when the module is made, it only comes to wait."""
        if self.__dict__.pop("_waits", False):
            type(self).forward = _written_first
            return None
        written = super().recompile()
        forward: Any = type(self).forward
        _hook.skip(forward.__code__)  # what runs a graph is not a frame of the program
        weakref.finalize(forward, forget_source, forward.__code__.co_filename)
        return written

    def write(self) -> None:
        """Have the code of the graph, as any graph module has."""
        if "_code" not in self.__dict__:
            self.recompile()

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        self.write()
        return str(self._code)


def _written_first(self: CapturedModule, *args: Any, **kwargs: Any) -> Any:
    self.write()
    return type(self).forward(self, *args, **kwargs)


def forget_source(filename: str) -> None:
    """Drop the text of a generated forward, which fx keeps for tracebacks, when nobody can run it now."""
    linecache.cache.pop(filename, None)
    loader: Any = getattr(graph_module, "_loader", None)
    getattr(loader, "eval_cache", {}).pop(filename, None)
