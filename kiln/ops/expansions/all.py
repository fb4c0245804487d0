"""All expansions: importing this module fills the table."""

from __future__ import annotations

from kiln.ops.expansions import (  # noqa: F401  (each fills the table)
    activations,
    arithmetic,
    factories,
    indexing,
    losses,
    norms,
    optimizers,
    pointwise,
    reductions,
    views,
)
from kiln.ops.table import EXPANSIONS

__all__ = ["EXPANSIONS"]
