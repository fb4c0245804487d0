"""Relayout: a graph made anew, some of its values in other layouts, and what reads them follows."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from kiln.base.graph import CONSTANT, Graph, Node, TensorSpec, mapped, nodes_in
from kiln.expand.fit import restride
from kiln.ops.fake import FakeTensor
from kiln.ops.layout import contiguous, is_contiguous, is_dense
from kiln.ops.levels import name_of
from kiln.ops.record import Recording
from kiln.ops.table import aten

Maker: TypeAlias = "Callable[[Relayout], Node]"
"""Adds nodes to the new graph, and gives the one that stands for a node of the old: where that stood."""

#: Ops that take a tensor in any layout as well as in the one that was traced. Elementwise ones that torch
#: calls so do, too.
FOLLOW = frozenset({
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d",
    "_batch_norm_with_update_functional", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "_prelu_kernel", "_prelu_kernel_backward", "_softmax", "_to_copy",
    "_unsafe_view", "alias", "amax", "amin", "argmax", "argmin", "avg_pool2d", "avg_pool2d_backward",
    "avg_pool3d", "batch_norm_backward", "cat", "clone", "constant_pad_nd", "convolution", "copy",
    "cudnn_batch_norm_backward", "detach", "elu_backward", "expand", "full_like", "getitem",
    "hardshrink_backward", "hardsigmoid_backward", "hardswish", "hardswish_backward", "hardtanh_backward",
    "leaky_relu_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices", "mean", "mish_backward", "native_batch_norm", "native_batch_norm_backward",
    "native_group_norm", "native_layer_norm", "ones_like", "permute", "reflection_pad1d", "reflection_pad2d",
    "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "select", "slice",
    "softplus_backward", "softshrink_backward", "split", "split_with_sizes", "squeeze", "stack", "sum", "t",
    "transpose", "unbind", "unsqueeze", "upsample_bicubic2d", "upsample_bilinear2d",
    "upsample_bilinear2d_backward", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest2d_backward", "upsample_nearest3d", "upsample_trilinear3d", "var", "var_mean", "view",
    "zeros_like",
})  # fmt: skip


class Relayout:
    """Walks a graph once. `made` says which nodes others stand for; `covered` ones are needed no more."""

    def __init__(self, graph: Graph, made: Mapping[Node, Maker], covered: Collection[Node]) -> None:
        self.old, self.made, self.covered = graph, made, covered
        self.recording = Recording()
        self.graph = self.recording.graph
        self.values: dict[Node, Any] = {}
        self._copies: dict[tuple[Node, Any], Node] = {}
        self.leaving: set[Node] = set()
        """Outputs alone that are larger than what they are made of: that is restored in their place."""

    def run(self) -> Graph:
        """The new graph: the same inputs, and outputs of the same types."""
        for node in self.old.inputs:
            self.values[node] = self.graph.input(node.name, node.spec, node.backward)
        kept: set[Any] = set()
        read = self.old.read()
        self.leaving = {n for n in nodes_in(self.old.outputs) if n not in read and is_larger(n)}
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            for node in self.old.nodes:
                if node in self.made:
                    self.recording.stands_at(node)
                    self.values[node] = self.made[node](self)
                elif node not in self.covered:
                    self.values[node] = made = self.follow(node)
                    if node not in read and type(made) is Node:
                        kept.add(made)
            self.graph.outputs = mapped(self.old.outputs, self.finished)
        # What nobody read before stays: whether it matters is not ours to say.
        self.graph.drop_unused(keep=kept.__contains__)
        return self.graph

    def finished(self, leaf: Any) -> Any:
        """An output in the layout that it had."""
        if type(leaf) is not Node:
            return leaf
        return self.restored(self.values[leaf], leaf.spec, strictly=True)

    def follow(self, node: Node) -> Any:
        """What stands for a node whose inputs may lie otherwise now."""
        if node.op is operator.getitem and type(self.values[node.args[0]]) is not Node:
            return self.values[node.args[0]][node.args[1]]
        if node.op is CONSTANT or all(map(self.same, node.inputs())):
            return self.graph.copy(node, self.values)
        if not follows(node) or node in self.leaving:

            def plain(leaf: Any) -> Any:
                if type(leaf) is not Node or self.contiguous(leaf):
                    return self.value(leaf)
                return self.restored(self.values[leaf], leaf.spec)

            if any(not self.same(read) and self.contiguous(read) for read in node.inputs()):
                return self.again(node, plain)
            return self.copy(node, plain)
        if node.op is aten.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format:
            read: Node = node.args[0]
            stride = places_first(read.spec, self.values[read].spec)
            if stride is not None:
                with self.recording:
                    copy = restride(self.fake(self.values[read]), node.spec.shape, stride)
                return self.recording.node(copy)
        return self.again(node, self.value)

    def same(self, read: Node) -> bool:
        """Whether a value is of the type that it had."""
        now = self.values[read]
        return type(now) is Node and (now.spec is read.spec or now.spec == read.spec)

    def contiguous(self, read: Node) -> bool:
        spec = self.values[read].spec
        return isinstance(spec, TensorSpec) and is_contiguous(spec.shape, spec.stride)

    def value(self, leaf: Any) -> Any:
        return self.values[leaf] if type(leaf) is Node else leaf

    def copy(self, node: Node, value: Callable[[Any], Any]) -> Node:
        """The node itself, over other values."""
        args, kwargs = mapped(node.args, value), mapped(node.kwargs, value)
        return self.graph.add(node.over(args, kwargs, self.graph.name(node.name)))

    def again(self, node: Node, value: Callable[[Any], Any]) -> Any:
        """The op called on what its inputs are now; where it does not take them so, on what they were."""

        def enter(leaf: Any) -> Any:
            return self.fake(value(leaf)) if type(leaf) is Node else leaf

        before = len(self.graph.nodes)
        recording = self.recording
        recording.stands_at(node)
        try:
            args, kwargs = mapped(node.args, enter), mapped(node.kwargs, enter)
            with recording:
                out = call(node.op, args, kwargs)
            return mapped(out, lambda leaf: recording.node(leaf) if type(leaf) is FakeTensor else leaf)
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            del self.graph.nodes[before:]
            return self.as_before(node)

    def as_before(self, node: Node) -> Node:
        """The node itself, over values in the layouts that they had."""
        return self.copy(node, lambda leaf: self.restored(self.value(leaf), getattr(leaf, "spec", None)))

    def fake(self, node: Node) -> FakeTensor:
        """A fake that stands for a node of the new graph."""
        if not isinstance(node.spec, TensorSpec):
            raise TypeError(f"{node.name} is no tensor")
        return self.recording.fake(node)

    def restored(self, node: Any, spec: Any, strictly: bool = False) -> Any:
        """A value with the strides of `spec`; strictly also where it has one place alone."""
        if type(node) is not Node or not isinstance(spec, TensorSpec) or node.spec.stride == spec.stride:
            return node
        moved = strictly or any(
            n != 1 and a != b for n, a, b in zip(spec.shape, node.spec.stride, spec.stride, strict=True)
        )
        # Outputs have gaps where they are parts of others; elements that share a place cannot be copied so.
        if not moved or not is_dense(spec.shape, spec.stride) and (not strictly or 0 in spec.stride):
            return node
        return self.with_strides(node, spec.stride)

    def with_strides(self, node: Node, stride: tuple[Any, ...]) -> Node:
        """A value with these strides: itself, or a copy."""
        if node.spec.stride == stride:
            return node
        spec = replace(node.spec, stride=stride, offset=0)
        return self.once(
            node, stride, lambda: self.graph.call(aten.clone.default, (node,), spec=spec, like=node)
        )

    def once(self, node: Node, form: Any, make: Callable[[], Node]) -> Node:
        """A value in another form, made when it is first asked for."""
        known = self._copies.get((node, form))
        if known is None:
            known = self._copies[node, form] = make()
        return known


def call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on fakes; a view of what cannot be viewed so is one of a contiguous copy."""
    if name_of(op) in ("view", "_unsafe_view"):
        return aten.reshape.default(*args)
    return op(*args, **kwargs)


def places_first(old: TensorSpec, new: TensorSpec) -> tuple[int, ...] | None:
    """The strides of a copy in order, where what lay in order inside of it lies around the rest now.

    So are the channels of images mixed: the places, which were innermost, stay outside where channels are
    now. None where values lie otherwise.
    """
    shape, rank = old.shape, len(old.shape)
    if not all(type(n) is int and n > 1 for n in shape[1:]) or not shape:
        return None
    ordered = contiguous(shape)
    split = next((d + 1 for d in reversed(range(rank)) if old.stride[d] != ordered[d]), 0)
    order = [0, *range(split, rank), *range(1, split)]
    inside, around = new.stride[1:split], new.stride[split:]
    if not 1 < split < rank or min(around) <= max(inside) or new.stride[0] < max(around):
        return None
    made = dict(zip(order, contiguous(tuple(shape[d] for d in order)), strict=True))
    return tuple(made[d] for d in range(rank))


def is_larger(node: Node) -> bool:
    """Whether a value has more elements than all that it is made of."""
    specs = [node.spec, *[read.spec for read in node.inputs()]]
    if not all(isinstance(spec, TensorSpec) and all(type(n) is int for n in spec.shape) for spec in specs):
        return False
    made, *read = [math.prod(spec.shape) for spec in specs]
    return bool(made > sum(read))


def follows(node: Node) -> bool:
    """Whether an op takes its inputs in other layouts too."""
    op = node.op
    if op is operator.getitem:
        return True
    if not isinstance(op, torch._ops.OpOverload) or op is aten.view.dtype:
        return False
    return torch.Tag.pointwise in op.tags or op.namespace == "aten" and name_of(op) in FOLLOW
