"""Plans on disk: a graph that was compiled before, by whichever process, is not fused and generated again.

A plan is kept under a key of all that it follows from: the graph with its types and its lines, what is known
of symbolic sizes, the settings, the versions of Kiln, Python, torch and LLVM, the processor. It is data in
Python's own form for that: numbers and texts, ops by name, functions of Kiln's by module and name; addresses
are found anew. What has no such form is not kept, and what cannot be read is a miss. A file that was not
written by Kiln is as dangerous as the machine code beside it, and kept out by the same checks.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import operator
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kiln._launch import Plan
from kiln.base import records
from kiln.base.dataclass import dataclass
from kiln.base.expressions import Expr
from kiln.base.graph import CONSTANT, INPUT, Graph, Node, TensorSpec, mapped
from kiln.base.options import Settings
from kiln.generate.code import Store, kept_code
from kiln.generate.cpu import depends_on
from kiln.launch.events import FORGETFUL
from kiln.launch.memory import Lodging
from kiln.launch.numbers import Settled
from kiln.launch.plan import Flattened, Given, linked
from kiln.launch.sources import Sources
from kiln.launch.text import Description

FORMAT = "plan 2"
#: Namespaces of ops that are what their names say; others belong to the program and may change with it.
NAMESPACES = FORGETFUL | {"kiln"}
LARGEST = 1 << 16
"""Bytes of a constant that becomes part of a key or of a plan."""


class NotKept(Exception):
    """A graph or a plan with something that has no form on disk."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where the plan of one graph is kept."""

    store: Store
    key: str
    given: tuple[Any, ...]
    """The constants of the graph: a plan refers to them by their places."""
    facts: Callable[[], Any]
    """What is known beside the graph: sizes, and switches of torch's."""
    known: Any

    def find(self) -> Plan | None:
        """The plan, where it is there with its code."""
        started = perf_counter()
        data = self.store.get(self.key)
        if data is None:
            return None
        try:
            fields, constants, key = marshal.loads(data)
            made = replace(_description(fields), constants=tuple(map(self._constant, constants)))
            code, source = kept_code(key, self.store) if key else (None, "")
            if key and code is None:
                return None
            plan = linked(made, code)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, NotKept):
            return None
        if key:
            names = {stage[0] for step in made.steps if step[0] == "launch" for stage in step[1]}
            counts = len(made.kernels), len(names), len(names)
            records.emit(records.CodeRecord(*counts, source, perf_counter() - started))
        return plan

    def keep(self, finish: Callable[[], Plan]) -> Plan:
        """The plan that is made now, kept where it has a form on disk and nothing was decided on the way."""
        plan = finish()
        made: Description = plan.owner
        if self.known != self.facts():
            return plan
        try:
            key = made.code.key if made.code is not None else ""
            data = marshal.dumps((_fields(made), tuple(map(self._place, made.constants)), key))
        except (NotKept, ValueError):
            return plan
        self.store.put(self.key, data)
        return plan

    def _place(self, constant: Any) -> Any:
        for i, one in enumerate(self.given):
            if one is constant:
                return i
        return _tensor(constant)

    def _constant(self, place: Any) -> Any:
        if type(place) is int:
            return self.given[place]
        dtype, shape, data = place
        flat = torch.frombuffer(bytearray.fromhex(data), dtype=getattr(torch, dtype))
        return flat.reshape(shape)


def keeping(graph: Graph, settings: Settings, store: Store | None, left: int = 0) -> Keeping | None:
    """Where the plan of a graph that leaves so many bytes more is kept, if it can be."""
    if store is None or settings.tunes:
        return None
    constants = tuple([node.args[0] for node in graph.nodes if node.op is CONSTANT])
    known = replace(settings, dump="", cache_bytes=0, arena_bytes=0)
    shown = _Shown()
    try:
        text = "\n".join(shown.lines(graph))
    except NotKept:
        return None
    scopes = shown.scopes.values()

    def facts() -> Any:
        sizes = [(s.name, s.hint, s.low, s.high) for scope in scopes for s in scope.symbols]
        state = torch.get_num_threads(), torch.get_default_dtype(), torch._C._get_mkldnn_enabled()
        return [*map(str, state), str(sizes), *[str(scope.knowledge()) for scope in scopes]]

    now = facts()
    parts = FORMAT, _versions(), depends_on(), text, repr(known), str(left), *now
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Keeping(store, key, constants, facts, now)


@functools.cache
def _versions() -> str:
    """What the stages themselves are: the files of this package as they are now, Python and torch."""
    folder = str(Path(__file__).parents[1])
    files = []
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith((".py", ".so")):
                state = os.stat(path := os.path.join(place, name))
                files.append((path[len(folder) :], state.st_size, state.st_mtime_ns))
    return f"{sorted(files)} {sys.version} torch {torch.__version__} {torch.version.git_version}"


# Graphs as keys


class _Shown:
    """All that a graph is, without the addresses of what it holds, as text that differs where graphs do."""

    def __init__(self) -> None:
        self.scopes: dict[int, Any] = {}
        """Where the symbols in the text are from."""
        self._specs: dict[int, str] = {}
        self._places: dict[str, int] = {}

    def lines(self, graph: Graph) -> Iterator[str]:
        for node in graph.inputs:
            yield f"{node.name}: {self.spec(node.spec)}"
        for node in graph.nodes:
            given = _tensor(node.args[0]) if node.op is CONSTANT else self.value(node.args)
            more = self.value(node.kwargs) if node.kwargs else ""
            flags = f"{self.spec(node.spec)} {node.backward:d} {node.region}"
            where = self._places.setdefault(node.where, len(self._places))
            yield f"{node.name} = {_function(node.op)}{given}{more}: {flags} {where}"
        yield from self._places
        yield f"return {self.value(graph.outputs)} {sorted(graph.overwrites.items())}"

    def spec(self, spec: Any) -> str:
        """A type; `spec` is alive as long as this object is in use."""
        text = self._specs.get(id(spec))
        if text is None:
            text = self._specs[id(spec)] = self._spec(spec)
        return text

    def _spec(self, spec: Any) -> str:
        if isinstance(spec, TensorSpec):
            sizes = [n if type(n) is int else self.value(n) for n in (*spec.shape, *spec.stride, spec.offset)]
            return f"{spec.dtype}{spec.device}[{len(spec.shape)}: {', '.join(map(str, sizes))}]"
        if isinstance(spec, (tuple, list)):
            return f"({', '.join(map(self._spec, spec))})"
        return self.value(spec) if isinstance(spec, Expr) else str(spec)

    def value(self, value: Any) -> str:
        """An argument of a node."""
        return repr(mapped(value, self._leaf))

    def _leaf(self, value: Any) -> Any:
        if type(value) is Node:
            return {"node": value.name}
        if isinstance(value, Expr):
            self.scopes[id(value.scope)] = value.scope
            return {"size": str(value)}
        return _encoded(value)


def _tensor(value: Any) -> tuple[str, list[int], str]:
    """The contents of a constant."""
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
        raise NotKept
    if not value.is_contiguous() or value.nbytes > LARGEST or value.is_conj() or value.is_neg():
        raise NotKept
    data = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return str(value.dtype).removeprefix("torch."), list(value.shape), data.hex()


# Plans as data: an object of one entry stands for anything that has no form of its own


def _fields(made: Description) -> tuple[Any, ...]:
    lodgings = [(one.name, _number(one.size), one.first, one.last, one.offset) for one in made.lodgings]
    settled = made.settled
    # Only calls have arguments of other types than numbers, texts and tuples of them.
    steps = tuple([_encoded(step) if step[0] == "call" else step for step in made.steps])
    return (
        steps, made.lodged, _encoded(made.outputs), made.names, tuple(lodgings),
        (settled.symbols, settled.fixed, settled.text), tuple(map(_number, made.numbers)), made.kernels,
        made.labels, made.inputs, (made.sources.names, made.sources.places),
    )  # fmt: skip


def _description(fields: tuple[Any, ...]) -> Description:
    steps, lodged, outputs, names, lodgings, settled, numbers, kernels, labels, inputs, told = fields
    steps = tuple([_decoded(step) if step[0] == "call" else step for step in steps])
    places = [Lodging(name, size, first, last, offset=at) for name, size, first, last, at in lodgings]
    sources = Sources((), ())
    sources.names, sources.places = told
    return Description(
        steps, lodged, _decoded(outputs), names, tuple(places), Settled(*settled), numbers, kernels,
        labels, inputs, sources,
    )  # fmt: skip


def _number(value: Any) -> Any:
    """A number of a plan as it is shown."""
    return value if value is None or type(value) is int else str(value)


@functools.lru_cache(1024)
def _function(op: Any) -> str:
    """What finds an op, or a function of ours, again."""
    if op is INPUT or op is CONSTANT:
        return str(op)
    if isinstance(op, torch._ops.OpOverload):
        if op.namespace not in NAMESPACES:
            raise NotKept
        return str(op.name())
    name = f"{getattr(op, '__module__', '')}:{getattr(op, '__qualname__', '')}"
    try:
        found = _found(name)
    except (AttributeError, KeyError, ValueError, NotKept):
        raise NotKept from None
    if found is not op:
        raise NotKept
    return name


@functools.cache
def _found(name: str) -> Any:
    """The op, or the function of a module of ours, that has this name."""
    if "::" in name:
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    module, _, path = name.partition(":")
    if module == "_operator":
        return getattr(operator, path)
    if not module.startswith("kiln.") or "<" in path:
        raise NotKept
    return operator.attrgetter(path)(sys.modules[module])


PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is tuple:
        return tuple([_encoded(item) if type(item) not in PLAIN else item for item in value])
    encode = ENCODED.get(kind)
    if encode is not None:
        return encode(value)
    if callable(value):
        return {"function": _function(value)}
    raise NotKept


ENCODED: dict[type, Callable[[Any], Any]] = {
    list: lambda value: [_encoded(item) for item in value],
    dict: lambda value: {"dict": [[_encoded(k), _encoded(v)] for k, v in value.items()]},
    slice: lambda value: {"slice": [_encoded(part) for part in (value.start, value.stop, value.step)]},
    torch.dtype: lambda value: {"torch": str(value).removeprefix("torch.")},
    torch.layout: lambda value: {"torch": str(value).removeprefix("torch.")},
    torch.memory_format: lambda value: {"torch": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
    Given: lambda value: {"given": value.index},
    Flattened: lambda value: {"flattened": [_encoded(part) for part in (value.op, value.args, value.kwargs)]},
}


def _decoded(value: Any) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_decoded(item) if type(item) not in PLAIN else item for item in value])
    if kind is dict:
        ((name, inner),) = value.items()
        return DECODED[name](inner)
    return value


DECODED: dict[str, Callable[[Any], Any]] = {
    "dict": lambda value: {_decoded(k): _decoded(v) for k, v in value},
    "slice": lambda value: slice(*map(_decoded, value)),
    "torch": lambda value: getattr(torch, value),
    "device": torch.device,
    "given": Given,
    "flattened": lambda value: Flattened(*map(_decoded, value)),
    "function": _found,
}
