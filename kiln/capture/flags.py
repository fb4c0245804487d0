"""Numbers of short buffers that a program needs: the graph is for what follows from them, which is guarded.

A module holds flags and settings in buffers: whether it was initialised, the strides of a convolution. Where
a program branches on what it computes of such ones alone, that is computed while capturing. The guard of one
buffer computes it again, so that it may vary as long as the answer does not; several must stay as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from kiln.base.graph import mapped
from kiln.base.source import DictAttr, Item, Source
from kiln.capture.frame import Machine
from kiln.check.torch_guards import Holds
from kiln.ops.fake import FakeTensor, constant_of

SHORT = 16  # the numbers of a buffer at most
FEW = 32  # the ops that lead on from it at most
#: Ops that give the same for the same numbers.
PURE = frozenset("""add sub mul truediv floordiv mod neg invert and_ or_ xor eq ne lt le gt ge getitem index
    abs floor ceil any all sum prod max min amax amin minimum maximum logical_not logical_and logical_or bool
    int long float to item where squeeze unsqueeze view reshape flatten select clone detach""".split())


class At:
    """A value that a chain has computed, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


def made_again(calls: list[tuple[Any, Any, Any]], *buffers: torch.Tensor) -> Any:
    """What the last of the calls gives."""
    found: list[Any] = list(buffers)
    with torch.no_grad():
        for function, args, kwargs in calls:
            given = mapped((args, kwargs), lambda v: found[v.number] if type(v) is At else v)
            found.append(function(*given[0], **given[1]))
    return found[-1]


class Chain:
    """Calls over buffers, which can be made again; LookupError where more than that is needed."""

    def __init__(self, m: Machine) -> None:
        self.machine = m
        self.roots: list[tuple[Source, torch.Tensor]] = []
        self.calls: list[tuple[Any, Any, Any]] = []
        self._places: dict[Node, Any] = {}

    def read(self, node: Node) -> None:
        """The buffers that a node's value follows from, before the calls."""
        fake = node.meta.get("example_value")
        if node in self._places:
            return
        if type(fake) is not FakeTensor or changed(fake) or fake.numel() > SHORT:
            raise LookupError
        known = constant_of(fake)
        if known is not None:
            self._places[node] = known
        elif node.op in ("get_attr", "placeholder"):
            self._places[node] = At(len(self.roots))
            self.roots.append((self._path(fake), self._buffer(self.machine.recorder.outside(node))))
        else:
            for arg in node.all_input_nodes:
                self.read(arg)

    def add(self, node: Node) -> Any:
        """Where the value of a node is, with the calls that give it."""
        if node not in self._places:
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if name not in PURE or len(self.calls) > FEW:
                raise LookupError
            function = getattr(torch.Tensor, name) if node.op == "call_method" else node.target
            args, kwargs = map_arg((node.args, node.kwargs), self.add)
            self.calls.append((function, tuple(args), dict(kwargs)))
            self._places[node] = At(len(self.roots) + len(self.calls) - 1)
        return self._places[node]

    def _path(self, fake: FakeTensor) -> Source:
        """The path to a buffer of a module, what follows from which has not varied much."""
        source = self.machine.source(fake)
        tables = source.base if isinstance(source, Item) else None
        of_module = isinstance(tables, DictAttr) and tables.name == "_buffers"
        if source is None or not of_module or Holds.named(source) in self.machine.world.unstable:
            raise LookupError
        return source

    def _buffer(self, real: Any) -> torch.Tensor:
        """A buffer that the graph has not written, by whatever name."""
        if type(real) is not torch.Tensor or real.device.type != "cpu" or real.is_complex():
            raise LookupError
        given = self.machine.recorder.given()
        written = [r for f, r in given if changed(f) and type(r) is torch.Tensor]
        if any(r.untyped_storage().data_ptr() == real.untyped_storage().data_ptr() for r in written):
            raise LookupError
        return real


def changed(fake: FakeTensor) -> bool:
    """Whether the graph may have written to a tensor."""
    return fake.is_inference() or bool(fake._version) or fake.value_version < 0


def settled(m: Machine, fake: FakeTensor) -> torch.Tensor | None:
    """What a tensor holds where it follows from short buffers of modules, which are then guarded."""
    if not m.recorder.knows(fake):
        return None
    chain, node = Chain(m), m.recorder.node(fake)
    try:
        chain.read(node)
        chain.add(node)
    except LookupError:
        return None
    again = partial(made_again, chain.calls)
    found: torch.Tensor = again(*(real.clone() for _, real in chain.roots))
    if len(chain.roots) == 1:
        m.world.guard(Holds(chain.roots[0][0], found, again))
    else:
        for source, real in chain.roots:
            m.world.guard(Holds(source, real.clone()))
    return found
