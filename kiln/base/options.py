"""Options: what one `compile` call asked for, and the process-wide configuration."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field, fields, replace
from types import MappingProxyType
from typing import Any

from kiln.base.dataclass import dataclass
from kiln.base.errors import KilnError
from kiln.base.log import logger

Backend = Callable[[Any, list[Any]], Callable[..., Any]]
"""A backend takes (torch.fx.GraphModule, example inputs) and gives the callable that runs in its place."""

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
NUMERICS = ("fast", "eager")
RANDOM = ("eager", "masks", "own")


class UnknownOption(KilnError, TypeError, ValueError):
    """A name that does not exist where it was used; the message lists what does."""


def unknown(what: str, name: object, known: Iterable[str]) -> UnknownOption:
    """The error for an unknown name: says what it is, the nearest known name, and all known names."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return UnknownOption(f"unknown {what} {name!r}: {guess}known are {', '.join(names) or 'none'}")


@dataclass(frozen=True, eq=False, slots=True)
class Compile:
    """What one `kiln.compile` call asked for, shared by all regions that come of it, resume functions too."""

    backend: Backend
    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    name: str | None = None
    """What to call the region in records and logs where the function's own name says little."""

    def like(self, other: Compile) -> bool:
        """Whether the other call asked for the same."""
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))

    def setting(self, option: str) -> Any:
        """An option of the configuration for this compile call: its own value, else the one in force."""
        return self.options[option] if option in self.options else getattr(config, option)


def _flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "false", "no")


def _chosen(name: str, known: tuple[str, ...]) -> str:
    """What an environment variable chooses, the first by default; what does not exist is told and ignored."""
    value = os.environ.get(name, known[0])
    if value not in known:
        logger.warning("%s: %s", name, unknown("value", value, known))
        return known[0]
    return value


@dataclass(frozen=True, slots=True)
class Settings:
    """What a compilation asks for: immutable, taken when the backend is called and handed down.

    `config.patch` puts changed ones in force. A backward that is compiled later has those of its forward.
    """

    cache_limit: int = 64
    """Entries a function may have before it runs eagerly."""

    strict: bool = field(default_factory=lambda: _flag("KILN_STRICT"))
    """Raise internal errors and refusals instead of running the frame eagerly."""

    memory_budget: float = 1.0
    """The share of what a training step would save for its backward that it may save."""

    numerics: str = field(default_factory=lambda: _chosen("KILN_NUMERICS", NUMERICS))
    """"fast" lets kernels keep half types in float32 between ops and sum in an order of their own; "eager"
    gives eager's results, random numbers too."""

    random: str = field(default_factory=lambda: _chosen("KILN_RANDOM", RANDOM))
    """Which random numbers kernels draw themselves: "eager" none, so that all are eager's, "masks" those of
    dropout and `bernoulli`, "own" all that they can."""

    mode: str = "default"
    """One of MODES."""

    dump: str = field(default_factory=lambda: os.environ.get("KILN_DUMP", ""))
    """The folder to which each stage writes its result, and from which it takes edited ones; "" for none."""

    freeze: bool = True
    """Whether graphs without gradients keep what follows from weights alone: packed and folded copies."""

    cache_bytes: int = 1 << 30
    """What machine code on disk may take, in bytes; the least lately used goes first. 0 keeps none."""

    arena_bytes: int = 1 << 32
    """How much memory for intermediate values stays mapped between calls, in the whole process."""

    @property
    def exact(self) -> bool:
        """Whether results have eager's rounding, order and random numbers."""
        return self.numerics == "eager"

    @property
    def draws(self) -> str:
        """Which random numbers are Kiln's own, one of RANDOM."""
        return "eager" if self.exact else self.random

    @property
    def records(self) -> bool:
        """Whether programs on a GPU are replayed as CUDA graphs."""
        return self.mode in ("reduce-overhead", "max-autotune")

    @property
    def tunes(self) -> bool:
        """Whether variants of kernels are timed."""
        return self.mode.startswith("max-autotune")


OPTION_NAMES = tuple(f.name for f in fields(Settings))
#: The options that take one of some names.
CHOICES = {"numerics": NUMERICS, "random": RANDOM, "mode": MODES}
#: The options that are numbers between two.
BETWEEN = {
    "memory_budget": (0.0, 1.0),
    **dict.fromkeys(("cache_limit", "cache_bytes", "arena_bytes"), (0, math.inf)),
}


class Configuration:
    """The settings in force: reads come from frozen `Settings`; `patch` puts others in force."""

    __slots__ = ("_default", "_patched")

    def __init__(self) -> None:
        object.__setattr__(self, "_default", Settings())
        object.__setattr__(self, "_patched", ContextVar("kiln_config", default=None))

    @property
    def now(self) -> Settings:
        """The frozen settings of the running context."""
        return self._patched.get() or self._default  # type: ignore[attr-defined, no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in OPTION_NAMES:
            raise AttributeError(str(unknown("option", name, OPTION_NAMES)))
        return getattr(self.now, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in OPTION_NAMES:
            raise AttributeError(str(unknown("option", name, OPTION_NAMES)))
        raise AttributeError(f"kiln.config is frozen; write `with kiln.config.patch({name}={value!r}):`")

    def __dir__(self) -> list[str]:
        return ["now", "patch", *OPTION_NAMES]

    def __repr__(self) -> str:
        return repr(self.now)

    @contextmanager
    def patch(self, **changes: Any) -> Iterator[Settings]:
        """Put the settings with these changes in force in this context; also serves as a decorator."""
        with self.use(with_changes(self.now, changes)) as settings:
            yield settings

    @contextmanager
    def use(self, settings: Settings) -> Iterator[Settings]:
        """Put these settings in force in this context."""
        patched: ContextVar[Settings | None] = self._patched  # type: ignore[attr-defined]
        token = patched.set(settings)
        try:
            yield self.now
        finally:
            patched.reset(token)


def with_changes(base: Settings, changes: Mapping[str, Any]) -> Settings:
    """`base` with these options changed; unknown names and wrong values raise."""
    made = dict(changes)
    for name, value in changes.items():
        if name not in OPTION_NAMES:
            raise unknown("option", name, OPTION_NAMES)
        if name in CHOICES and value not in CHOICES[name]:
            raise unknown(f"value of option {name!r}:", value, CHOICES[name])
        kind = type(getattr(base, name))
        if kind is float and type(value) is int:
            value = made[name] = float(value)
        if type(value) is not kind:
            raise TypeError(f"option {name!r} is of type {kind.__name__}, got {value!r}")
        low, high = BETWEEN.get(name, (-math.inf, math.inf))
        if kind is not str and not low <= value <= high:
            raise ValueError(f"option {name!r} is between {low} and {high}, got {value!r}")
    return replace(base, **made)


config = Configuration()
