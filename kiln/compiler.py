"""The compiler as a backend: graphs are differentiated, expanded, fused and run as native kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kiln.ahead import compiled
from kiln.base import log, records
from kiln.base.fx import runner
from kiln.base.graph import Graph
from kiln.base.options import config
from kiln.differentiate.run import Compiler, Run
from kiln.launch.program import compile_graph


def kiln(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """Differentiate the graph ahead of time and run its halves as native kernels."""
    # A tensor that stands for its negative (part of a conjugate) is not what its memory says.
    plain = not any(isinstance(x, torch.Tensor) and x.is_neg() for x in examples)
    stage: Compiler = native if plain else runner
    return compiled(module, examples, stage, stage, stage)


def native(graph: Graph) -> Run:
    """Native code for a graph of aten ops; where a stage of ours fails the graph runs op by op."""
    try:
        return compile_graph(graph)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        if config.strict:
            raise
        why = f"{type(error).__name__}: {error}"
        records.emit(records.FallbackRecord("generate", why))
        log.warn_once(
            ("generate", why),
            f"a graph is not compiled and runs op by op: {why}; set KILN_STRICT=1 to see faults raised",
        )
        return runner(graph)
