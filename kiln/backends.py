"""Backends: the registry from a name to a callable `(GraphModule, example inputs) -> callable`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, overload

from torch.fx import GraphModule

from kiln.base.collecting import uncollected
from kiln.base.options import MODES, OPTION_NAMES, Backend, config, unknown, with_changes

ENTRY_POINTS = ("kiln.backends", "torch_dynamo_backends")

DEFAULT = "kiln"

#: Backends of Kiln that take long to import: loaded when first asked for.
OWN = {
    name: EntryPoint(name, place, "kiln.backends")
    for name, place in (("aot_eager", "kiln.ahead:aot_eager"), ("kiln", "kiln.compiler:kiln"))
}

_registered: dict[str, Backend] = {}
_native: set[str] = {*OWN}


@overload
def register_backend(backend: Backend, name: str | None = None) -> Backend: ...
@overload
def register_backend(backend: None = None, name: str | None = None) -> Callable[[Backend], Backend]: ...
def register_backend(backend: Backend | None = None, name: str | None = None) -> Any:
    """Make a backend known by a name, its own if none is given; a decorator with or without arguments."""
    if backend is None:
        return partial(register_backend, name=name)
    if not callable(backend):
        raise TypeError(f"a backend is a callable (GraphModule, example inputs) -> callable, got {backend!r}")
    label = name or getattr(backend, "__name__", None)
    if not label:
        raise ValueError("this backend has no name of its own: give one, register_backend(backend, name=...)")
    if label in _native:
        raise ValueError(f"backend name {label!r} is Kiln's own: choose another")
    _registered[label] = backend
    return backend


def list_backends() -> list[str]:
    """The names that `compile(backend=...)` accepts: registered ones and those of installed packages."""
    return sorted({*_registered, *_installed()})


def lookup_backend(backend: str | Backend) -> Backend:
    """The backend of a name; a callable is one already."""
    if not isinstance(backend, str):
        if not callable(backend):
            raise TypeError(f"backend is a name or a callable, got {backend!r}. Known names: {_names()}")
        return backend
    if backend not in _registered:
        found = OWN.get(backend) or _installed().get(backend)
        if found is None:
            raise unknown("backend", backend, list_backends())
        with uncollected():
            _registered[backend] = found.load()
    return _registered[backend]


def resolve(backend: str | Backend, mode: str | None, options: Mapping[str, Any]) -> Backend:
    """The backend for one compile call, with its mode and options checked and bound."""
    if mode is not None and mode not in MODES:
        raise unknown("mode", mode, MODES)
    found = lookup_backend(backend)
    if isinstance(backend, str) and backend in _native:
        for name in options:
            if name not in OPTION_NAMES:
                raise unknown(f"option of backend {backend!r}:", name, OPTION_NAMES)
        with_changes(config.now, options)
        return found
    # Another backend takes mode and options as keywords, where they were given.
    given: dict[str, Any] = {}
    if mode not in (None, "default"):
        given["mode"] = mode
    if options:
        given["options"] = dict(options)
    return partial(found, **given) if given else found


def _names() -> str:
    return ", ".join(list_backends())


def _installed() -> dict[str, EntryPoint]:
    """Backends of installed packages, not loaded; where two groups share a name, Kiln's own group wins."""
    found: dict[str, EntryPoint] = dict(OWN)
    for group in ENTRY_POINTS:
        for point in entry_points(group=group):
            found.setdefault(point.name, point)
    return found


def eager(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Run the graph op by op, as eager PyTorch would."""
    forward = inspect.getattr_static(type(graph), "forward", None)
    if type(forward) is not FunctionType or "forward" in vars(graph):
        return graph.forward  # type: ignore[no-any-return]
    # The generated function reads parameters as attributes of its first argument and uses nothing else of it.
    # A plain namespace answers in a fraction of the time of nn.Module.__getattr__.
    names = {
        str(node.target).partition(".")[0]
        for node in graph.graph.nodes
        if node.op in ("get_attr", "call_module")
    }
    return MethodType(forward, SimpleNamespace(**{name: getattr(graph, name) for name in names}))


# It runs each op as it comes: it builds on nothing that the example inputs happen to be.
eager.specialises = False  # type: ignore[attr-defined]
_registered["eager"] = eager
_native.add("eager")
