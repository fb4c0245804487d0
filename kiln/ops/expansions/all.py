"""All expansions: importing this module fills the table."""

from __future__ import annotations

from kiln.ops.expansions import (
    activations,
    arithmetic,
    factories,
    indexing,
    losses,
    norms,
    optimizers,
    pointwise,
    reductions,
    special,
    views,
)
from kiln.ops.table import EXPANSIONS

FAMILIES = (
    activations, arithmetic, factories, indexing, losses, norms, optimizers, pointwise, reductions, special,
    views,
)  # fmt: skip

__all__ = ["EXPANSIONS", "FAMILIES"]
