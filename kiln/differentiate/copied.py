"""Nodes of a captured graph that repeat others: what those recorded is added once more, and nothing runs."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from kiln.base.graph import Node, mapped
from kiln.ops.fake import FakeTensor
from kiln.ops.meta import MUTATING
from kiln.ops.record import Recording


class Span:
    """What one node of a captured graph recorded, and what that reads."""

    __slots__ = ("nodes", "reads")

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.reads = {read for node in nodes for read in node.inputs()}.difference(nodes)


class Copies:
    """The nodes that capture copied, each from another one that works on values of the same types.

    While none of them runs, a node of the recording stands for its value; its tensor is made when a node that
    does run reads it. That holds where no gradient is taken: autograd would have to see every op.
    """

    def __init__(self, recording: Recording, graph: fx.Graph) -> None:
        self.recording = recording
        self._spans: dict[fx.Node, Span | None] = {}
        self._images: dict[Any, dict[Node, Node]] = {}
        self._originals = {node.meta["copied"][1] for node in graph.nodes if "copied" in node.meta}
        self._start = 0

    @staticmethod
    def of(recording: Recording, graph: fx.Graph) -> Copies | None:
        """The copies in a graph; None where it has none."""
        return Copies(recording, graph) if any("copied" in node.meta for node in graph.nodes) else None

    def begin(self, node: fx.Node, known: dict[fx.Node, Any]) -> None:
        """A node is going to run: it reads tensors."""
        for read in node.all_input_nodes:
            known[read] = mapped(known[read], self._tensor)
        self._start = len(self.recording.graph.nodes)

    def _tensor(self, value: Any) -> Any:
        return self.recording.fake(value) if type(value) is Node else value

    def end(self, node: fx.Node, value: Any) -> None:
        """A node has run."""
        if node in self._originals:
            nodes = self.recording.graph.nodes[self._start :]
            plain = _plain(value) and all(
                made.op is getitem or isinstance(made.op, torch._ops.OpOverload) and not MUTATING[made.op]
                for made in nodes
            )
            self._spans[node] = Span(nodes) if plain else None

    def add(self, node: fx.Node, known: dict[fx.Node, Any]) -> bool:
        """Whether a node was added as a copy: then its value is known."""
        block, original = node.meta.get("copied", (None, None))
        span = self._spans.get(original) if block is not None else None
        if span is None or torch.is_grad_enabled() or node.meta.get("example_value") is None:
            return False
        images = self._images.setdefault(block, {})
        for old, new in zip(_inputs(original), _inputs(node), strict=True):
            if not _pair(known[old], known[new], images):
                return False
        if not span.reads <= images.keys():
            return False  # a value that the op came by otherwise: a cast that autocast has kept

        def image(leaf: Any) -> Any:
            return images.get(leaf, leaf) if type(leaf) is Node else leaf

        recording = self.recording
        made = []
        for one in span.nodes:
            args, kwargs = mapped(one.args, image), mapped(one.kwargs, image) if one.kwargs else {}
            images[one] = recording.add(one.op, args, kwargs, one.spec)
            made.append(images[one])
        if node in self._originals:
            self._spans[node] = Span(made)
        known[node] = mapped(known[original], lambda leaf: _value(leaf, images))
        return True


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, with repetitions."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), lambda read: (found.append(read), read)[1])  # type: ignore[func-returns-value]
    return found


def _plain(value: Any) -> bool:
    """Whether a value is known by its type: tensors of unknown contents, numbers, and nests of them."""
    if type(value) is tuple or type(value) is list:
        return all(map(_plain, value))
    return _node(value) is not None or type(value) in (int, bool, float, type(None))


def _node(value: Any) -> Node | None:
    """The recorded node that a value stands for, or is."""
    if type(value) is Node:
        return value
    node: Node | None = value.node if type(value) is FakeTensor and value.value is None else None
    return node


def _pair(old: Any, new: Any, images: dict[Node, Node]) -> bool:
    """Note what stands for a value in a copy; False where it is of another type."""
    if isinstance(old, (tuple, list)):
        same = type(old) is type(new) and len(old) == len(new)
        return same and all(_pair(a, b, images) for a, b in zip(old, new, strict=True))
    first, second = _node(old), _node(new)
    if first is None or second is None:
        return old is new
    if images.setdefault(first, second) is not second:
        return False
    return first is second or bool(first.spec == second.spec)


def _value(leaf: Any, images: dict[Node, Node]) -> Any:
    """The value of a copy where that of the original is `leaf`."""
    node = _node(leaf)
    image = images.get(node, node) if node is not None else None
    return leaf if image is node else image
