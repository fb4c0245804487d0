"""Log-softmax in steps before a graph is parted: its differences are cheap to compute again.

As one op its result would be kept for the backward pass, in the width of its sums: for a language model twice
the bytes of the logits. In steps two numbers a row are kept beside the logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kiln.base.graph import Graph, Made, Node, nodes_in, substituted
from kiln.ops.aliases import owner_of
from kiln.ops.expansions.support import HALF, rounded
from kiln.ops.layout import contiguous, reduced, wrap_dim
from kiln.ops.symint import expr_of, wrap
from kiln.ops.table import aten

WIDE = (torch.float32, torch.float64)


def in_steps(graph: Graph) -> Graph:
    """The graph, changed in place, with log-softmax in steps where gradients are computed from its result."""
    chosen = set(filter(is_log_softmax, graph.nodes))
    if chosen:
        chosen &= {read for node in graph.nodes if node.backward for read in node.inputs()}
    if not chosen:
        return graph
    shown = {*graph.inputs, *map(owner_of, nodes_in(graph.outputs))}
    sources = {wider(node.args[0]) for node in chosen}
    # The program may write to what it is given: a copy can be kept.
    copied = {node for node in sources if node is not None and owner_of(node.args[0]) in shown}

    def instead(node: Node) -> tuple[list[Node], Node] | None:
        if node in copied:
            held = Made(graph, node).call(aten.clone.default, node.args[0].spec, node.args[0])
            return [held, widened := node.over((held, *node.args[1:]), node.kwargs)], widened
        if is_gradient_of_loss(node):
            return gradient(graph, node)
        return steps(graph, node) if node in chosen else None

    return substituted(graph, instead)


#: Gradients of batch norms, which take running statistics: with those of the batch they do not look at them.
NORMS = {
    aten.native_batch_norm_backward.default: 7, aten.batch_norm_backward.default: 7,
    aten.cudnn_batch_norm_backward.default: None,
}  # fmt: skip


def without_statistics(graph: Graph) -> Graph:
    """The graph, changed in place, whose gradients on a GPU keep no running statistics that nobody reads."""
    for node in graph.nodes:
        trains = NORMS.get(node.op, -1)
        trains = trains != -1 and (trains is None or node.args[trains] is True)
        if trains and node.args[1].spec.device.type == "cuda":
            node.args = (*node.args[:3], None, None, *node.args[5:])
    return graph


def by_results(graph: Graph) -> Graph:
    """The graph, changed in place, whose gradients of clamped values look at what is kept, the results.

    A number within the bounds is its own result, those outside have a bound for it: in the result's dtype,
    while eager compares with the number as it was given.
    """
    clamped: dict[tuple[object, ...], Node] = {}
    for node in graph.nodes:
        if node.op is aten.hardtanh.default:
            dtype, bounds = node.spec.dtype, node.args[1:]
            if dtype in HALF and any(rounded(bound, dtype) != bound for bound in bounds):
                continue
            clamped[(*node.args, *(-1, 1)[len(node.args) - 1 :])] = node
        elif node.op is aten.hardtanh_backward.default:
            grad, *given = node.args
            node.args = grad, clamped.get(tuple(given), given[0]), *given[1:]
    return graph


def is_log_softmax(node: Node) -> bool:
    """Whether a node is one that can be taken in steps: its sums are as wide as its result."""
    if node.op is not aten._log_softmax.default or node.backward:
        return False
    given, made = node.args[0].spec, node.spec
    alike = bool(given.shape) and 0 not in given.shape and given.stride == made.stride
    return alike and given.dtype is made.dtype and given.dtype in WIDE


def is_gradient_of_loss(node: Node) -> bool:
    """Whether a node is the gradient of a log-softmax of which one element a row went into a loss."""
    if node.op is not aten._log_softmax_backward_data.default:
        return False
    loss, y, dim, dtype = node.args
    plain = loss.op is aten.nll_loss_backward.default and len(y.spec.shape) == 2 and dim in (1, -1)
    return plain and dtype is y.spec.dtype is loss.spec.dtype and dtype in WIDE


def steps(graph: Graph, node: Node) -> tuple[list[Node], Node]:
    """The steps of a log-softmax, as its expansion has them."""
    x, dim, _ = node.args
    spec = node.spec
    shape = reduced(spec.shape, (wrap_dim(dim, len(spec.shape)),), True)
    stride = tuple([expr_of(n) for n in contiguous(tuple([wrap(n) for n in shape]))])
    row = replace(spec, shape=shape, stride=stride)
    made = Made(graph, node)
    largest = made.call(aten.amax.default, row, x, [dim], True)
    less = made.call(aten.sub.Tensor, spec, x, largest)
    total = made.call(aten.sum.dim_IntList, row, made.call(aten.exp.default, spec, less), [dim], True)
    result = made.call(aten.sub.Tensor, spec, less, made.call(aten.log.default, row, total))
    return made.nodes, result


def gradient(graph: Graph, node: Node) -> tuple[list[Node], Node]:
    """The gradient of a log-softmax; a row of a loss's gradient sums up to its one element that is not 0."""
    loss, y, *_ = node.args
    target, ignored = loss.args[2], loss.args[5]
    spec, made = node.spec, Made(graph, node)
    mask = made.call(aten.eq.Scalar, replace(target.spec, dtype=torch.bool), target, ignored)
    index = made.call(aten.masked_fill.Scalar, target.spec, target, mask, 0)
    row = replace(target.spec, shape=(*target.spec.shape, 1), stride=(*target.spec.stride, 1))
    index = made.call(aten.unsqueeze.default, row, index, 1)
    total = made.call(aten.gather.default, replace(row, dtype=spec.dtype, stride=(1, 1)), loss, 1, index)
    powers = made.call(aten.exp.default, spec, y)
    return made.nodes, made.call(aten.sub.Tensor, spec, loss, made.call(aten.mul.Tensor, spec, powers, total))


def wider(node: Node) -> Node | None:
    """The conversion from a half type that a value is a view of."""
    found = owner_of(node)
    if found.op is not aten._to_copy.default or found.args[0].spec.dtype.itemsize != 2:
        return None
    return found
