"""Inputs of which a graph switches, before or after all else, whether they require grad: done around it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx

from kiln.base.errors import is_untouched
from kiln.differentiate.interpret import fetch
from kiln.differentiate.parts import Make

Of = Callable[[Sequence[Any]], Any]
Switch = tuple[Of, bool]


def switched(module: fx.GraphModule, examples: Sequence[Any], make: Make) -> Callable[..., Any] | None:
    """The graph as `make` compiles it without such switches; None where it has none.

    Autograd knows the same of all that is computed: nothing was of these inputs before, or nothing is after.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    first, last = list[Switch](), list[Switch]()
    for of, users in inputs(module):
        for call, switches in ((users[0], first), (users[-1], last)) if users else ():
            if call.target == "requires_grad_" and changes(of(examples), call):
                copies[call].replace_all_uses_with(copies[call.all_input_nodes[0]])
                graph.erase_node(copies[call])
                switches.append((of, asked(call)))
                break
    if not first and not last:
        return None
    made = fx.GraphModule(module, graph)
    made.meta = module.meta
    with switching(first, examples, stays=False):
        run = make(made, list(examples))

    def call_switched(*args: Any) -> Any:
        with switching(first, args):
            results = run(*args)
        for of, flag in last:
            of(args).requires_grad_(flag)
        return results

    return call_switched


def inputs(module: fx.GraphModule) -> Iterator[tuple[Of, list[fx.Node]]]:
    """The tensors that a graph is given or its module holds, and the calls that use them, in order."""
    users: dict[int, list[fx.Node]] = {}
    for node in module.graph.nodes:
        for given in node.all_input_nodes if node.op != "output" else ():
            users.setdefault(tensor_of(given), []).append(node)
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        yield operator.itemgetter(i), users.pop(tensor_of(node), [])
    for node in module.graph.find_nodes(op="get_attr"):
        yield partial(held, fetch(module, str(node.target))), users.pop(tensor_of(node), [])


def held(value: Any, args: Sequence[Any]) -> Any:
    """A tensor of the module's, whatever the arguments."""
    return value


def tensor_of(node: fx.Node) -> int:
    """One number for all nodes of a tensor: ops in place give what they were given."""
    return id(node.meta.get("example_value", node))


def asked(call: fx.Node) -> bool:
    """What a call of `requires_grad_` asks for."""
    return bool(call.args[1] if len(call.args) > 1 else call.kwargs.get("requires_grad", True))


def changes(real: Any, call: fx.Node) -> bool:
    """Whether the call switches a leaf of autograd's."""
    return isinstance(real, torch.Tensor) and real.is_leaf and real.requires_grad != asked(call)


@contextmanager
def switching(first: Sequence[Switch], args: Sequence[Any], stays: bool = True) -> Iterator[None]:
    """Switch tensors, for good unless the graph is to run again from its beginning."""
    for of, flag in first:
        of(args).requires_grad_(flag)
    try:
        yield
    except BaseException as error:
        stays = stays and not is_untouched(error)
        raise
    finally:
        if not stays:
            for of, flag in first:
                of(args).requires_grad_(not flag)
