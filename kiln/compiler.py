"""The compiler as a backend: graphs are differentiated, expanded, fused and run as native kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from kiln.ahead import compiled
from kiln.base import log
from kiln.base.begun import Begun
from kiln.base.dataclass import dataclass
from kiln.base.dump import NOWHERE, Dump, dump_for
from kiln.base.errors import Uneven
from kiln.base.fx import runner
from kiln.base.graph import Graph, Own
from kiln.base.options import Settings, config
from kiln.base.reports import fell_back
from kiln.differentiate.run import Run
from kiln.expand.channels import side_by_side
from kiln.expand.edited import EditedFile
from kiln.expand.padding import padded
from kiln.expand.rows import along_rows
from kiln.expand.steps import by_results, in_steps, without_statistics
from kiln.launch.held import compile_held, compile_layers
from kiln.launch.program import begin_graph, is_watched


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
            Native(settings, dump.of(half)) for half in ("forward", "backward", "inference")
        )
        held = partial(native_held, settings=settings, dump=dump.of("inference"))
        tries = not settings.exact and dump.folder is None  # an edited graph may give what it likes
        seen = log.wants("graph") or is_watched(dump)
        return compiled(
            module, examples, forward, backward, inference,
            random=settings.draws, held=held, tries=tries, dump=dump,
            short=settings.freeze and not settings.exact and not settings.tunes and not seen,
            arrange=(lambda graph: graph) if settings.exact else partial(arranged, records=settings.records),
        )


def arranged(graph: Graph, records: bool = False) -> Graph:
    """A graph of forward and backward ops as it is parted; `records`: its calls may be recorded."""
    return in_steps(padded(side_by_side(along_rows(by_results(without_statistics(graph))), records)))


# It needs no code of the graph module.
kiln.reads_graph = True  # type: ignore[attr-defined]
kiln.writes_last = True  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Native:
    """Compiles graphs of aten ops to native code; where a stage of ours fails a graph runs op by op."""

    settings: Settings
    dump: Dump = NOWHERE

    def __call__(self, graph: Graph) -> Run:
        run: Run = self.begin(graph).finish()
        return run

    def begin(self, graph: Graph) -> Begun:
        """The native code in the making: what LLVM does is done by other threads."""
        settings, dump = self.settings, self.dump
        made = _or_op_by_op(graph, settings, partial(begin_graph, graph, settings, dump), dump.title)
        if not isinstance(made, Begun):
            return Begun(lambda: made)
        return Begun(partial(_or_op_by_op, graph, settings, made.finish, dump.title), made.is_done)


def native_held(
    graph: Graph, held: Mapping[int, torch.Tensor], owns: Sequence[Own], settings: Settings,
    dump: Dump = NOWHERE,
) -> Run:  # fmt: skip
    """Native code for a graph without gradients over held tensors, by position.

    `owns` are what layers have that the graph leaves out; Uneven where they must be in it.
    """
    if owns:
        try:
            return compile_layers(graph, settings, held, owns, dump)
        except Exception:
            if settings.strict:
                raise
            raise Uneven from None
    run: Run = _or_op_by_op(graph, settings, partial(compile_held, graph, settings, held, dump), dump.title)
    return run


def _or_op_by_op(graph: Graph, settings: Settings, make: Callable[[], Any], title: str) -> Any:
    try:
        return make()
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        if settings.strict or isinstance(error, EditedFile):
            raise
        fell_back(title or "a graph", error, "is not compiled and runs op by op", str(graph))
        return runner(graph, title)
