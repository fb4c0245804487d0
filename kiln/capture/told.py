"""What a capture tells: its graph op by op, with lines of the program and paths of modules."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from kiln.base import records
from kiln.base.places import places_of
from kiln.base.records import Op
from kiln.base.source import Source, readable
from kiln.capture.frame import Machine
from kiln.ops.symint import expr_of

KINDS = {"placeholder": "input", "get_attr": "attribute", "output": "output"}


def operations(graph: fx.GraphModule) -> tuple[Op, ...]:
    """The nodes of a captured graph, in order."""
    return tuple([_op(node) for node in graph.graph.nodes])


def _op(node: fx.Node) -> Op:
    meta, inputs = node.meta, tuple([one.name for one in node.all_input_nodes])
    spec, places = spec_text(meta.get("example_value")), places_of(meta.get("stack_trace") or "")
    kind = KINDS.get(node.op, "call")
    return Op(node.name, _label(node), kind, inputs, spec, places, meta.get("module", ""))


def _label(node: fx.Node) -> str:
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    if node.op != "call_function":
        return str(node.target)
    target: Any = node.target
    name = str(getattr(target, "__name__", target))
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    home = str(getattr(target, "__module__", "") or "")
    if home.startswith("torch.nn.functional"):
        return f"F.{name}"
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    own = home.startswith(("torch", "_torch")) or getattr(torch, name, None) is target
    return f"torch.{name}" if own else name


def spec_text(value: Any) -> str:
    """Dtype and shape of a value, or its type."""
    if isinstance(value, torch.Tensor):
        # The text of a symbolic size is asked of its expression: that of the number would make it constant.
        sizes = ", ".join([str(expr_of(n)) for n in value.shape])
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(spec_text, value))})"
    return "" if value is None else type(value).__name__


def listener(machine: Machine) -> Callable[[], str] | None:
    """What tells in which module the program is; None where nobody listens."""
    return partial(module_of, machine) if records.listening() else None


def module_of(machine: Machine) -> str:
    """The path of the module whose method the program is in; "" outside of modules."""
    for frame in reversed(machine.frames):
        code = frame.code.code
        if not code.co_argcount:
            continue
        name = code.co_varnames[0]
        value = frame.locals.get(name, frame.lazy.get(name, (None,))[0])
        if name in frame.cells:  # an inner function reads it too
            value = getattr(frame.cells[name], "cell_contents", None)
        if isinstance(value, torch.nn.Module):
            return path_of(machine.world.source(value))
    return ""


def path_of(source: Source | None) -> str:
    """The names of a module and of those above it, as `named_modules` writes them."""
    _, _, path = readable(str(source)).partition(".") if source is not None else ("", "", "")
    return path
