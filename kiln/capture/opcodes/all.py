"""The whole dispatch table, checked against the opcodes of the running Python."""

from __future__ import annotations

from kiln.capture.opcodes import control, errors, objects, stack
from kiln.capture.opcodes.table import build

TABLE = build()

__all__ = ["TABLE", "control", "errors", "objects", "stack"]
