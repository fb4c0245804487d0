"""Options: what one `compile` call asked for, the process-wide configuration and the stance."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from kiln.base.errors import KilnError

Backend = Callable[[Any, list[Any]], Callable[..., Any]]
"""A backend takes (torch.fx.GraphModule, example inputs) and gives the callable that runs in its place."""

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: Stances under which the first call of a function runs its graphs as they are, without the backend.
FIRST_AS_IS = ("eager_then_compile", "aot_eager_then_compile")
STANCES = ("default", "force_eager", "eager_on_recompile", "fail_on_recompile", *FIRST_AS_IS)


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
    backend_name: str = "eager"
    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    name: str | None = None
    """What to call the region in records and logs where the function's own name says little."""

    def setting(self, option: str) -> Any:
        """An option of the configuration for this compile call: its own value, else the one in force."""
        return self.options[option] if option in self.options else getattr(config, option)


def _flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration: immutable; a changed one is put in force with `config.patch`."""

    cache_limit: int = 64
    """Entries a function may have before it runs eagerly."""

    strict: bool = field(default_factory=lambda: _flag("KILN_STRICT"))
    """Raise internal errors and refusals instead of running the frame eagerly."""

    memory_budget: float = 1.0
    """The share of what a training step would save for its backward that it may save."""


OPTION_NAMES = tuple(f.name for f in fields(Config))


class Settings:
    """The configuration in force: reads come from a frozen `Config`; `patch` puts another in force."""

    __slots__ = ("_default", "_patched")

    def __init__(self) -> None:
        object.__setattr__(self, "_default", Config())
        object.__setattr__(self, "_patched", ContextVar("kiln_config", default=None))

    @property
    def now(self) -> Config:
        """The frozen configuration of the running context."""
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
    def patch(self, **changes: Any) -> Iterator[Config]:
        """Put the configuration with these changes in force in this context; also serves as a decorator."""
        patched: ContextVar[Config | None] = self._patched  # type: ignore[attr-defined]
        token = patched.set(with_changes(self.now, changes))
        try:
            yield self.now
        finally:
            patched.reset(token)


def with_changes(base: Config, changes: Mapping[str, Any]) -> Config:
    """`base` with these options changed; unknown names and wrong types raise."""
    for name, value in changes.items():
        if name not in OPTION_NAMES:
            raise unknown("option", name, OPTION_NAMES)
        kind = type(getattr(base, name))
        if type(value) is not kind:
            raise TypeError(f"option {name!r} is of type {kind.__name__}, got {value!r}")
    return replace(base, **changes)


config = Settings()


@dataclass(slots=True)
class _Stance:
    """The stance in force; `kiln.base.live.set_stance` is its one owner."""

    name: str = "default"


_stance = _Stance()


def stance() -> str:
    """The stance in force, one of STANCES."""
    return _stance.name


def put_stance(name: str) -> str:
    """Put a stance in force and give the one before; callers go through `kiln.base.live.set_stance`."""
    if name not in STANCES:
        raise unknown("stance", name, STANCES)
    before, _stance.name = _stance.name, name
    return before
