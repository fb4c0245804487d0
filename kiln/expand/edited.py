"""Graphs from their own text: a dumped graph, edited, becomes a graph again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from kiln.base.dump import Dump, Revision
from kiln.base.errors import KilnError
from kiln.base.expressions import Expr, Symbol
from kiln.base.fx import expressions
from kiln.base.graph import CONSTANT, Graph, Node, TensorSpec, label, show_spec
from kiln.expand.exact import Eager
from kiln.ops.record import Recording, fake_of, leaf_of
from kiln.ops.symint import wrap


class EditedFile(KilnError):
    """An edited file cannot stand for the stage's own result; the message names the file and says why."""


def revisable(graph: Graph, dump: Dump, stage: str = "") -> Graph:
    """The graph, shown as a stage's result, or the one of the edited file in its place."""
    revision = dump.show("graph", stage, "py", lambda: str(graph))
    return graph if revision is None else read(revision, graph)


def read(revision: Revision, graph: Graph) -> Graph:
    """The graph of an edited text; it has the inputs of the stage's own and outputs of the same types."""
    try:
        made = _recorded(revision.text, revision.path, graph)
    except Exception as error:
        raise EditedFile(f"{revision.path}: {type(error).__name__}: {error}") from error
    if len(made.outputs) != len(graph.outputs):
        raise EditedFile(f"{revision.path}: gives {len(made.outputs)} values, not {len(graph.outputs)}")
    for i, (mine, wanted) in enumerate(zip(made.outputs, graph.outputs, strict=True)):
        here, there = _type(mine), _type(wanted)
        if here != there:
            raise EditedFile(f"{revision.path}: value {i} that it gives is {here}, not {there}")
    return made


def _type(output: Any) -> str:
    return show_spec(output.spec) if isinstance(output, Node) else str(output)


def _recorded(text: str, path: Path, graph: Graph) -> Graph:
    constants = {node.name: node.args[0] for node in graph.nodes if node.op is CONSTANT}
    space: dict[str, Any] = {"torch": torch, "math": math, "inf": math.inf, "nan": math.nan}
    space["constant"] = constants.__getitem__
    for node in graph.nodes:
        if not isinstance(node.op, (str, Eager, torch._ops.OpOverload)):
            space.setdefault(label(node.op), node.op)
    for symbol in _symbols(graph):
        space[str(symbol)] = wrap(symbol)
    exec(compile(text, str(path), "exec"), space)
    recording, values = Recording(), []
    for node in graph.inputs:
        if isinstance(node.spec, TensorSpec):
            fake = fake_of(node.spec)
            recording.input(node.name, fake)
            values.append(fake)
        else:
            recording.graph.input(node.name, node.spec, node.backward)
            values.append(wrap(node.spec) if isinstance(node.spec, Expr) else node.spec)
    with torch.no_grad(), torch._C._DisableAutocast(), recording:
        outputs = space["graph"](*values)
    recording.graph.outputs = tuple([
        recording.node(out) if isinstance(out, torch.Tensor) else leaf_of(out) for out in outputs
    ])  # fmt: skip
    return recording.graph


def _symbols(graph: Graph) -> set[Symbol]:
    found: set[Symbol] = set()
    for value in expressions(graph):
        found.update(value.symbols())
    for node in graph.inputs:
        parts = node.spec.shape if isinstance(node.spec, TensorSpec) else (node.spec,)
        for part in parts:
            found.update(part.symbols() if isinstance(part, Expr) else ())
    return found
