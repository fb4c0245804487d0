"""The compiler as a backend: graphs are differentiated, expanded, fused and run as native kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from kiln.ahead import compiled
from kiln.base.dump import NOWHERE, Dump, dump_for
from kiln.base.fx import runner
from kiln.base.graph import Graph
from kiln.base.options import Settings, config
from kiln.base.reports import fell_back
from kiln.differentiate.run import Run
from kiln.expand.edited import EditedFile
from kiln.launch.held import compile_held
from kiln.launch.program import compile_graph


def kiln(
    module: fx.GraphModule,
    examples: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Differentiate the graph ahead of time and run its halves as native kernels.

    `mode` and `options` are for those that call this as a backend of another capture; `kiln.compile` puts its
    own in force.
    """
    with config.patch(**dict(options or {}), **({} if mode is None else {"mode": mode})) as settings:
        dump = dump_for(str(module.meta.get("name", "")), settings.dump)
        dump.show("", "captured", "py", lambda: str(module.code).strip())
        # A tensor that stands for its negative (part of a conjugate) is not what its memory says.
        plain = not any(isinstance(x, torch.Tensor) and x.is_neg() for x in examples)
        if not plain:
            return compiled(module, examples, runner, runner, runner, dump=dump)
        forward, backward, inference = (
            partial(native, settings=settings, dump=dump.of(half))
            for half in ("forward", "backward", "inference")
        )
        held = partial(native_held, settings=settings, dump=dump.of("inference"))
        return compiled(
            module, examples, forward, backward, inference,
            random=settings.draws, held=held, tries=not settings.exact, dump=dump,
        )


# It needs no code of the graph module.
kiln.reads_graph = True  # type: ignore[attr-defined]


def native(graph: Graph, settings: Settings, dump: Dump = NOWHERE) -> Run:
    """Native code for a graph of aten ops; where a stage of ours fails the graph runs op by op."""
    return _or_op_by_op(graph, settings, partial(compile_graph, graph, settings, dump), dump.title)


def native_held(
    graph: Graph, held: Mapping[int, torch.Tensor], settings: Settings, dump: Dump = NOWHERE
) -> Run:
    """Native code for a graph without gradients over held tensors, by position."""
    return _or_op_by_op(graph, settings, partial(compile_held, graph, settings, held, dump), dump.title)


def _or_op_by_op(graph: Graph, settings: Settings, compile_it: Callable[[], Run], title: str) -> Run:
    try:
        return compile_it()
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        if settings.strict or isinstance(error, EditedFile):
            raise
        fell_back(title or "a graph", error, "is not compiled and runs op by op", str(graph))
        return runner(graph, title)
