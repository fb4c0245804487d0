"""Convolutions on a GPU with what follows: the library adds a bias, an image, and takes relu as it stores.

A batch norm by running statistics is a factor for each filter, and a number to add. They are put into the
filters, which are copied anyway, and into the bias, in each call: statistics and weights may change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import cache
from operator import getitem

import torch

from kiln.base.dataclass import dataclass
from kiln.base.graph import Graph, Node, nodes_in
from kiln.expand.relayout import Relayout
from kiln.ops.fake import FakeTensor
from kiln.ops.table import aten

RELU, ADD_RELU = aten.cudnn_convolution_relu.default, aten.cudnn_convolution_add_relu.default
#: Batch norms, and where they say whether statistics are those of the batch.
NORMS = {
    aten.native_batch_norm.default: 5, aten.cudnn_batch_norm.default: 5,
    aten._native_batch_norm_legit_no_training.default: None,
}  # fmt: skip
STEP = 8  # channels of 16 bytes
LARGE = 20 << 20  # bytes of a result, on average, that take the GPU longer than their calls take the host


@dataclass(frozen=True, slots=True)
class Chain:
    """A convolution, a norm of it, an image that is added, and the nodes between it and the last one."""

    convolution: Node
    norm: Node | None
    added: Node | None
    between: tuple[Node, ...]


def chains(graph: Graph, convolutions: Iterable[Node]) -> dict[Node, Chain]:
    """What may be one call each, by the relu at the end; nothing where gradients are asked for."""
    if any(node.backward for node in graph.nodes):
        return {}
    users, shown = graph.users(), set(nodes_in(graph.outputs))

    def follower(node: Node) -> Node | None:
        return users[node][0] if len(users[node]) == 1 and node not in shown else None

    found: dict[Node, Chain] = {}
    for node in convolutions:
        spec, norm, added, between = node.spec, None, None, [node]
        if isinstance(spec, tuple):  # gradients that the program asks for itself
            continue
        if spec.dtype is not torch.bfloat16 or spec.shape[1] % STEP or node.args[-1] != 1 or node.kwargs:
            continue
        user = follower(node)
        if user is not None and is_norm(user) and user.args[0] is node:
            norm, items = user, follower(user)
            if items is None or items.op is not getitem or items.args[1]:
                continue
            between += [norm, items]
            user = follower(items)
        if user is not None and user.op is aten.add.Tensor and not user.kwargs and len(user.args) == 2:
            others = [one for one in user.args if one is not between[-1]]
            if len(others) != 1 or type(others[0]) is not Node or others[0].spec.shape != spec.shape:
                continue
            added = others[0]
            between.append(user)
            user = follower(user)
        alike = [n.spec.dtype is spec.dtype for n in (*between[-1:], *([added] if added else []))]
        if user is not None and user.op is aten.relu.default and all(alike):
            found[user] = Chain(node, norm, added, tuple(between))
    return found


def are_large(chains: Collection[Node]) -> bool:
    """Whether calls for these results are worth it where the host makes each of them."""
    sizes = [math.prod(end.spec.shape) * end.spec.dtype.itemsize for end in chains]
    return bool(sizes) and sum(sizes) >= LARGE * len(sizes)


def is_norm(node: Node) -> bool:
    """Whether a node is a batch norm by running statistics, with weights."""
    if node.op not in NORMS or not all(type(one) is Node for one in node.args[1:5]):
        return False
    place = NORMS[node.op]
    return place is None or node.args[place] is False


def can_fuse(device: torch.device) -> bool:
    """Whether such calls may be made."""
    plain = torch.backends.cudnn.enabled and not torch.backends.cudnn.deterministic
    return plain and has_calls(device)


@cache
def has_calls(device: torch.device) -> bool:
    """Whether the library has such calls, whose relu hands NaN on as torch's does."""
    given = torch.full((1, STEP, STEP, STEP), torch.nan, device=device, dtype=torch.bfloat16)
    given = given.to(memory_format=torch.channels_last)
    filters, bias = given[:, :, :1, :1].expand(STEP, -1, -1, -1).contiguous(), given[0, 0, 0]
    rest = bias, [1, 1], [0, 0], [1, 1], 1
    try:
        with torch.no_grad():
            out = [RELU(given, filters, *rest), ADD_RELU(given, filters, given, 1.0, *rest)]
        return all(bool(one.isnan().all()) for one in out)
    except (RuntimeError, NotImplementedError):
        return False


def folded(chain: Chain, walk: Relayout) -> tuple[Node, Node | None]:
    """The filters and the bias with the norm in them."""
    node = chain.convolution
    filters, bias = walk.values[node.args[1]], walk.value(node.args[2])
    if chain.norm is None:
        return filters, bias

    def wide(one: Node) -> FakeTensor:
        made: FakeTensor = aten._to_copy.default(walk.fake(one), dtype=torch.float32)
        return made

    with walk.recording:
        weight, added, mean, var = (wide(walk.values[read]) for read in chain.norm.args[1:5])
        factor = aten.mul.Tensor(weight, aten.rsqrt.default(aten.add.Tensor(var, chain.norm.args[-1])))
        mean = mean if bias is None else aten.sub.Tensor(mean, wide(bias))
        sums = aten.sub.Tensor(added, aten.mul.Tensor(mean, factor))
        scaled = aten.mul.Tensor(wide(filters), aten.view.default(factor, [-1, 1, 1, 1]))
        made = [aten._to_copy.default(one, dtype=node.spec.dtype) for one in (scaled, sums)]
    return walk.recording.node(made[0]), walk.recording.node(made[1])
