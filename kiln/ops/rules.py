"""All shape rules: importing this module fills the table."""

from __future__ import annotations

from kiln.ops import (  # noqa: F401  (each fills the table)
    attention,
    checks,
    factories,
    indexing,
    lists,
    network,
    pointwise,
    random,
    reductions,
    views,
)
from kiln.ops.symint import specialised
from kiln.ops.table import RULES, aten

#: Native code that knows no symbolic sizes asks these: the sizes become constants.
RULES.setdefault(aten.size.default, lambda tensor: [specialised(n) for n in tensor.shape])
RULES.setdefault(aten.stride.default, lambda tensor: [specialised(n) for n in tensor.stride()])

__all__ = ["RULES"]
