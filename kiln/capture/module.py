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
        space = self._graph_namespace
        name = self._named(op, target) if name is None else space.create_name(name, None)
        node = Node(self, name, op, target, args or (), kwargs or {}, type_expr)
        space._obj_to_name[node] = name
        self._insert(node)
        self._find_nodes_lookup_table.insert(node)
        self._len += 1
        return node

    def _named(self, op: str, target: Any) -> str:
        """A name for a node of this target, as fx gives it: the target's, with the next free number."""
        space, key = self._graph_namespace, target if op == "call_method" else id(target)
        label = self._labels.get(key)
        if label is None:
            # What is small letters is as it stands, and most attributes are.
            small = op == "get_attr" and target.islower() and not target.startswith("__")
            label = target if small else self._target_to_str(target)
            first = str(space.create_name(label, None))
            if first.startswith(label) and op.startswith("call") and not label.rpartition("_")[2].isdigit():
                self._labels[key] = label  # which fx counts by; the node keeps the target alive
            return first
        used, number = space._used_names, space._base_count[label] + 1
        while (name := f"{label}_{number}") in used:
            number += 1
        used.add(name)
        space._base_count[label] = number
        return name


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
