"""All shape rules: importing this module fills the table."""

from __future__ import annotations

from kiln.ops import factories, linear, network, pointwise, reductions, views
from kiln.ops.table import RULES

FAMILIES = (factories, linear, network, pointwise, reductions, views)

__all__ = ["FAMILIES", "RULES"]
