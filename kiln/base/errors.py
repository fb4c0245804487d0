"""The three refusals: Break (split the graph here), Skip (leave this frame alone), Bug (a fault of ours)."""

from __future__ import annotations

from kiln.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the user's source something happened; `column` and `width` say which part of `text` it is."""

    file: str
    line: int
    function: str
    text: str = ""
    column: int = 0
    width: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")


class KilnError(Exception):
    """Base of every error that Kiln raises on purpose."""


class Break(KilnError, RuntimeError):
    """The graph ends here: kind (a stable id), place, reason and remedy."""

    read: object = None  # the tensor whose only number was asked for

    def __init__(self, kind: str, why: str, hint: str = "", at: Place | None = None) -> None:
        self.kind, self.why, self.hint, self.at = kind, why, hint, at
        super().__init__(kind, why, hint, at)

    def __str__(self) -> str:
        where = f" at {self.at}" if self.at else ""
        remedy = f"; {self.hint}" if self.hint else ""
        return f"graph break [{self.kind}]{where}: {self.why}{remedy}"


class Skip(KilnError):
    """This frame is left to Python, unchanged; `broke` is the break that left no place to split it."""

    def __init__(self, why: str, broke: Break | None = None) -> None:
        self.why, self.broke = why, broke
        super().__init__(why)


class Specialised(KilnError):
    """A dimension that was marked dynamic can have one size only: place, reason and remedy."""

    kind = "specialised"

    def __init__(self, why: str, hint: str = "", at: Place | None = None) -> None:
        self.why, self.hint, self.at = why, hint, at
        super().__init__(why, hint, at)

    def __str__(self) -> str:
        where = f" at {self.at}" if self.at else ""
        return f"[{self.kind}]{where}: {self.why}; {self.hint}"


class Bug(KilnError):
    """An internal fault: the frame runs eagerly, or the error is raised under fullgraph and KILN_STRICT=1."""


class Uneven(KilnError):
    """Layers that look alike are not: all of them must be gone through."""


class RecompileError(KilnError, RuntimeError):
    """A recompile was needed while the stance forbids it."""


def untouched(error: BaseException) -> None:
    """Note on an exception that the graph that raised it had not written anything yet."""
    error._untouched = True  # type: ignore[attr-defined]


def is_untouched(error: BaseException) -> bool:
    """Whether that was noted."""
    return getattr(error, "_untouched", False)
