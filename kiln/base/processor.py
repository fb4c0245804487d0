"""The maker of the processor, by which libraries choose their code."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def maker() -> str:
    """As the processor itself tells it; an empty text where the system does not pass it on."""
    try:
        with Path("/proc/cpuinfo").open() as told:
            lines = [told.readline() for _ in range(4)]
    except OSError:
        return ""
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")]
    return found[0] if found else ""
