"""What follows products on a GPU: the library that multiplies applies activations before it stores.

The one that convolves adds biases in kernels of their own: loops add them, with what comes after.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

from kiln.base.graph import Graph, Made, Node, nodes_in, substituted
from kiln.ops.levels import name_of
from kiln.ops.table import aten

DEVICES = frozenset({"cuda"})
#: Ops that show the same elements in the same order.
VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
X = "x"
#: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
CUBE = ("mul", ("mul", ("mul", X, X), X), 0.044715)
GELU = ("mul", ("mul", X, 0.5), ("add", ("tanh", ("mul", ("add", X, CUBE), 0.7978845608)), 1.0))
#: What the library knows, by the argument that asks for it.
ACTIVATIONS: dict[bool, Any] = {False: ("relu", X), True: GELU}
STEPS = 16  # of an activation at most
DIGITS = 1e-6  # to which numbers are alike


def with_epilogues(graph: Graph) -> Graph:
    """The graph of primitives, changed in place: products with a bias take the activation after them."""
    anchors = [node for node in graph.nodes if node.op is aten.addmm.default and fits(node)]
    if not anchors:
        return graph
    users, shown = graph.users(), set(nodes_in(graph.outputs))
    ends: dict[Node, Node] = {}
    products: dict[Node, bool] = {}
    for node in anchors:
        found = next(activations(node, users, shown), None)
        if found is not None:
            products[node], seen, end = found
            ends[end] = seen

    def instead(node: Node) -> tuple[list[Node], Node] | None:
        if node in products:
            made = node.over(node.args, {**node.kwargs, "use_gelu": products[node]})
            made.op = aten._addmm_activation.default
            replaced[node] = made
            return [made], made
        return ([], replaced.get(ends[node], ends[node])) if node in ends else None

    replaced: dict[Node, Node] = {}
    return substituted(graph, instead) if ends else graph


def with_biases_apart(graph: Graph) -> Graph:
    """The graph of primitives, changed in place: biases are added after convolutions."""

    def instead(node: Node) -> tuple[list[Node], Node] | None:
        if node not in found:
            return None
        image, filters, bias, *how = node.args
        plain = node.over((image, filters, None, *how), node.kwargs)
        around = (1,) * (len(node.spec.shape) - 2)
        spec = replace(bias.spec, shape=bias.spec.shape + around, stride=bias.spec.stride + around)
        made = Made(graph, node)
        shown = made.call(aten.view.default, spec, bias, list(spec.shape))
        added = made.call(aten.add.Tensor, node.spec, plain, shown)
        return [plain, *made.nodes], added

    found = {node for node in graph.nodes if node.op is aten.convolution.default and adds_bias(node)}
    return substituted(graph, instead) if found else graph


def adds_bias(node: Node) -> bool:
    bias, spec = node.args[2], node.spec
    here = bias is not None and spec.device.type in DEVICES
    return here and bias.spec.dtype is spec.dtype and bias.spec.shape == spec.shape[1:2]


def fits(node: Node) -> bool:
    """Whether a product of half types adds a bias to all rows."""
    bias, spec = node.args[0].spec, node.spec
    half = spec.dtype.itemsize == 2 and spec.dtype.is_floating_point and bias.dtype is spec.dtype
    here = spec.device.type in DEVICES and not node.kwargs and not node.args[3:]
    return half and here and len(bias.shape) == 1 and bias.stride == (1,) and bias.shape[0] == spec.shape[1]


def activations(
    product: Node, users: dict[Node, list[Node]], shown: set[Node]
) -> Iterator[tuple[bool, Node, Node]]:
    """The activation that is all that is made of a product: its kind, what it is of, and its result."""
    x = product
    while x not in shown and len(users[x]) == 1 and name_of(users[x][0].op) in VIEWS:
        x = users[x][0]
    for kind, pattern in ACTIVATIONS.items():
        for end in followers(x, users):
            inside: set[Node] = {x}
            if not matches(end, pattern, x, inside):
                continue
            inside.discard(end)
            if inside.isdisjoint(shown) and all(inside.issuperset({*users[n]} - {end}) for n in inside):
                result = end
                if end.spec.dtype is not x.spec.dtype and end not in shown and len(users[end]) == 1:
                    (result,) = users[end]
                if result.spec == x.spec and (result is end or name_of(result.op) == "_to_copy"):
                    yield kind, x, result


def followers(x: Node, users: dict[Node, list[Node]]) -> list[Node]:
    """The values that may be steps of an activation of x: those that are made of it next."""
    found = [x]
    for node in found:
        if len(found) > STEPS:
            break
        found += [user for user in users[node] if user not in found]
    return found[1:]


def matches(value: Any, pattern: Any, x: Node, inside: set[Node]) -> bool:
    """Whether a value is computed so from x, whatever it is rounded to on the way; what it is made of."""
    if isinstance(pattern, float):
        return isinstance(value, (int, float)) and abs(value - pattern) <= DIGITS * abs(pattern)
    if type(value) is not Node:
        return False
    passed = []
    while value is not x and name_of(value.op) == "_to_copy" and value.spec.dtype.is_floating_point:
        passed.append(value)
        value = value.args[0]
    if pattern is X:
        inside.update(passed)
        return value is x
    name, *parts = pattern
    if name_of(value.op) != name or value.kwargs or len(value.args) != len(parts):
        return False
    for order in permutations(value.args):
        found = set(inside)
        if all(matches(part, wanted, x, found) for part, wanted in zip(order, parts, strict=True)):
            inside |= found | {*passed, value}
            return True
    return False
