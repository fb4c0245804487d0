"""All shape rules: importing this module fills the table."""

from __future__ import annotations

from kiln.ops import pointwise
from kiln.ops.table import RULES

FAMILIES = (pointwise,)

__all__ = ["FAMILIES", "RULES"]
