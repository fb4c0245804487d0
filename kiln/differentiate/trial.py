"""A trial: the gradients of a compiled graph beside eager's, once, where rounding alone may decide them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kiln.base import log, records
from kiln.base.closeness import close, worth
from kiln.base.graph import Graph

WHY = "gradients that nearly cancel differ from eager's by more than usual rounding"


class Trial:
    """Looks at the first gradients of a graph whose results all get one number as their gradient.

    That is what `out.sum().backward()` sends back. Normalisations make of it sums that cancel, and what is
    left are the rounding errors of each op before: it is eager's only where all of them are eager's. So where
    ours differ, eager's are given, and from then on the graph runs as it was captured.
    """

    def __init__(self, graph: Graph, leave: Callable[[], None]) -> None:
        self.due, self.leave = worth(graph.nodes), leave

    def wanted(self, tangents: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients for these tangents are to be compared."""
        if not self.due or not any(t.dim() and not any(t.stride()) for t in tangents):
            return False
        return all(not any(t.stride()) or bool((t == t[(0,) * t.dim()]).all()) for t in tangents)

    def settle(self, mine: tuple[Any, ...], again: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Our gradients, or eager's where those are others; `again` computes them."""
        self.due = False
        try:
            eager = again()
        except RuntimeError:  # the inputs are not what they were, or memory is short
            return mine
        if close(mine, eager):
            return mine
        self.leave()
        records.emit(records.FallbackRecord("differentiate", WHY))
        log.warn_once(("trial", WHY), f"{WHY}: the graph runs as captured")
        return eager
