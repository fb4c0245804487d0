"""The maker and the kind of the processor, by which libraries choose their code."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

#: AMD's families from this one on multiply vectors of 64 bytes at once.
WIDE = 26


@functools.cache
def told() -> Mapping[str, str]:
    """What the processor tells first; nothing where the system does not pass it on."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            pairs = [lines.readline().partition(":") for _ in range(4)]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in pairs}


def maker() -> str:
    """As the processor itself tells it; an empty text where that is not known."""
    return told().get("vendor_id", "")


def is_multiplied_narrowly() -> bool:
    """Whether the library behind `mm` multiplies half of the vectors that the processor does."""
    family = told().get("cpu family", "")
    return maker() == "AuthenticAMD" and family.isdigit() and int(family) >= WIDE
