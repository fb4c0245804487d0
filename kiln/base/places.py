"""Places in text: the stack that a node of a graph carries, as lines of a traceback, and what they say.

While somebody listens to records, the name of the captured graph's node follows the stack in its own line.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from functools import lru_cache

from kiln.base.errors import Place

FILE = '  File "'
ORIGIN = "  of "


def marked(where: str, origin: str) -> str:
    """A stack with the name of the node it belongs to."""
    return f"{where}\n{ORIGIN}{origin}"


def origin_of(where: str) -> str:
    """The name of the captured graph's node; "" where it was not noted."""
    last = where.rpartition("\n")[2]
    return last.removeprefix(ORIGIN) if last.startswith(ORIGIN) else ""


def places_of(where: str) -> tuple[Place, ...]:
    """The lines of the program in a stack, outermost first."""
    return tuple([_place(line) for line in where.split("\n") if line.startswith(FILE)])


def is_library(file: str) -> bool:
    """Whether a file is part of torch."""
    return file.startswith(str(getattr(sys.modules.get("torch"), "__path__", ["\0"])[0]))


def user_place(places: Sequence[Place]) -> Place | None:
    """The innermost line that is not in torch's own code; the innermost one where all are."""
    outside = [place for place in places if not is_library(place.file)]
    return outside[-1] if outside else places[-1] if places else None


@lru_cache(4096)
def _place(line: str) -> Place:
    file, _, rest = line.removeprefix(FILE).rpartition('", line ')
    number, _, function = rest.partition(", in ")
    text = linecache.getline(file, int(number)).strip()
    return Place(file, int(number), function, text)
