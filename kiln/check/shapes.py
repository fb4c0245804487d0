"""Guard kinds of entries whose sizes and numbers vary: bounds, any number, and conditions between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Generator

from kiln import _hook
from kiln.base.dataclass import dataclass
from kiln.base.source import Attr, Source
from kiln.check import layout
from kiln.check.guards import ClassAttr, Equals, Guard, Is, Paths
from kiln.check.torch_guards import TensorMatch, facts
from kiln.check.values import mro_lookup, show

MOST = 2**63 - 1
"""The greatest size there is: an upper bound that excludes nothing."""


@dataclass(frozen=True, slots=True)
class Free:
    """A size, or a stride, that may be any number between two bounds."""

    low: int = 0
    high: int = MOST

    def admits(self, value: int) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low}…" if self.high == MOST else f"{self.low}…{self.high}"


@dataclass(frozen=True, slots=True)
class Follows:
    """A stride that is the stride of another dimension times its size."""

    dim: int


Extent = int | Free
Stride = int | Free | Follows


@dataclass(frozen=True, slots=True)
class Read:
    """Where a number is read: the size or stride of a tensor in a dimension, or a Python number itself."""

    source: Source
    what: str = "value"
    dim: int = 0

    def fetch(self, argv: Sequence[Any]) -> Any:
        value = self.source.fetch(argv)
        if self.what == "value":
            return value
        return (value.shape if self.what == "size" else value.stride())[self.dim]

    def __str__(self) -> str:
        return str(self.source) if self.what == "value" else f"{self.source}.{self.what}({self.dim})"


READS = {"size": _hook.READ_SIZE, "stride": _hook.READ_STRIDE, "value": _hook.READ_VALUE}


def plan(
    shape: Sequence[int], strides: Sequence[int], free: dict[int, Free], loose: frozenset[int]
) -> tuple[tuple[Extent, ...], tuple[Stride, ...]]:
    """What to ask of sizes and strides when the dimensions `free` vary.

    A stride that a dense layout gives follows another dimension; of the others those in `loose` vary.
    """
    order = sorted(range(len(shape)), key=lambda i: (strides[i], -i))
    wanted: dict[int, Stride] = {}
    varies: set[int] = set()
    for at, i in enumerate(order):
        inner = next((j for j in reversed(order[:at]) if shape[j] * strides[j] == strides[i]), None)
        if inner is not None and strides[i] and (inner in free or inner in varies):
            wanted[i] = Follows(inner)
            varies.add(i)
        elif i in loose:
            wanted[i] = Free()
            varies.add(i)
        else:
            wanted[i] = strides[i]
    sizes = tuple(free.get(i, n) for i, n in enumerate(shape))
    return sizes, tuple(wanted[i] for i in range(len(shape)))


@dataclass(frozen=True, slots=True, eq=False)
class ShapedMatch(TensorMatch):
    """What compiled code assumes of a tensor some of whose sizes and strides are an Extent or a Stride."""

    seen: tuple[int, ...]
    """The sizes while capturing, for the text of a failure."""

    @staticmethod
    def of(  # type: ignore[override]
        source: Source, tensor: torch.Tensor, shape: tuple[Extent, ...], strides: tuple[Stride, ...]
    ) -> ShapedMatch:
        dtype, device, seen, _, requires_grad, keys = facts(tensor)
        return ShapedMatch(source, type(tensor), dtype, device, shape, strides, requires_grad, keys, seen)

    def __str__(self) -> str:
        return self.looks()

    def _differs(self, now: tuple[Any, ...]) -> str | None:
        dtype, device, shape, strides, requires_grad, keys = now
        pairs = (
            ("dtype", self.dtype, dtype), ("device", self.device, device),
            ("rank", len(self.shape), len(shape)), ("requires_grad", self.requires_grad, requires_grad),
            ("dispatch keys", self.dispatch_keys, keys),
        )  # fmt: skip
        for name, old, new in pairs:
            if old != new:
                return f".{name} was {old}, now {new}"
        for i, (want, size) in enumerate(zip(self.shape, shape, strict=True)):
            if not (want.admits(size) if isinstance(want, Free) else want == size):
                bounds = f" (compiled for {want})" if isinstance(want, Free) else ""
                return f".size({i}) was {self.seen[i]}, now {size}{bounds}"
        if strides is None:
            return ".layout was strided, now another"
        for i, (extent, stride) in enumerate(zip(self.strides or (), strides, strict=True)):
            expected = shape[extent.dim] * strides[extent.dim] if isinstance(extent, Follows) else extent
            if not (expected.admits(stride) if isinstance(expected, Free) else expected == stride):
                return f".stride({i}) is {stride}, and {expected} in the layout compiled for"
        return None

    def emit(self) -> tuple[int, Any]:
        if not layout.is_plain(self.dispatch_keys):
            return _hook.CHECK_TEST, self.test
        lows = tuple(n.low if isinstance(n, Free) else n for n in self.shape)
        highs = tuple(n.high if isinstance(n, Free) else n for n in self.shape)
        strides = tuple(
            -1 - n.dim if isinstance(n, Follows) else _hook.FREE_STRIDE if isinstance(n, Free) else n
            for n in self.strides or ()
        )
        kind = layout.kind_word(self.dtype, self.device)
        operand = self.type, kind, self.dispatch_keys, self.requires_grad, lows, highs, strides
        return _hook.CHECK_SHAPED, operand


@dataclass(frozen=True, slots=True, eq=False)
class AnyNumber(Guard):
    """A Python number of an exact type, whatever its value; an int is no greater than `most`, nor less."""

    type: type
    seen: int | float
    most: int = MOST

    def __str__(self) -> str:
        return f"{self.source} is any {self.type.__name__}"

    def test(self, value: Any) -> bool:
        number: Any = value
        return type(value) is self.type and (self.type is float or -self.most <= number <= self.most)

    def describe(self, value: Any) -> str:
        if type(value) is self.type:
            holder = "no machine word holds" if self.most == MOST else "is too great"
            return f" was {self.seen}, now {value}, which {holder}"
        return f" was of type {show(self.type)}, now {show(type(value))}"

    def emit(self) -> tuple[int, Any]:
        if self.most != MOST:
            return _hook.CHECK_TEST, self.test
        return (_hook.CHECK_INT, None) if self.type is int else (_hook.CHECK_TYPE, self.type)

    def key(self) -> object:
        return AnyNumber, self.source, self.type, self.most


@dataclass(frozen=True, slots=True, eq=False)
class Conditions(Guard):
    """What was decided about varying sizes and numbers while capturing; all of it is asked in one call."""

    source: Source = field(init=False)
    reads: tuple[Read, ...]
    function: Callable[..., bool]
    statements: tuple[tuple[str, Callable[..., bool]], ...]
    seen: tuple[Any, ...]
    plain: bool = True
    """Whether the sizes of all tensors among them may be read as memory."""
    places: tuple[Any, ...] = ()
    """For each statement the line that asked it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", self.reads[0].source)

    def __str__(self) -> str:
        return " and ".join(text for text, _ in self.statements)

    def fetch(self, argv: Sequence[Any]) -> list[Any]:
        return [read.fetch(argv) for read in self.reads]

    def test(self, value: Any) -> bool:
        return bool(self.function(*value))

    def why(self, argv: Sequence[Any]) -> str:
        try:
            now = self.fetch(argv)
        except Exception as error:
            return f"the sizes can no longer be read ({type(error).__name__}: {error})"
        failed = [text for text, test in self.statements if not _passes(test, now)]
        changes = [
            f"{read} was {old}, now {new}"
            for read, old, new in zip(self.reads, self.seen, now, strict=True)
            if (type(old) is not type(new) or old != new)
            and (not failed or any(str(read) in text for text in failed))
        ]
        return f"{', '.join(changes)}: compiled for {failed[0] if failed else self}"

    def place(self, argv: Sequence[Any]) -> Any:
        """The line that asked what does not hold now."""
        try:
            now = self.fetch(argv)
        except Exception:  # a tensor of fewer dimensions, or none
            return None
        tests = [test for _, test in self.statements]
        return next((p for p, test in zip(self.places, tests, strict=False) if not _passes(test, now)), None)

    def nodes(self, paths: Paths) -> tuple[int, ...]:
        return tuple(map(paths.node, self._sources()))

    def _sources(self) -> tuple[Source, ...]:
        return tuple(dict.fromkeys(read.source for read in self.reads))

    def emit(self) -> tuple[int, Any]:
        sources = self._sources()
        if not self.plain or any(read.what != "value" for read in self.reads) and not layout.ready():
            return _hook.CHECK_CALL, self.holds
        reads = ((sources.index(read.source), READS[read.what], read.dim) for read in self.reads)
        return _hook.CHECK_SYMBOLS, (self.function, *reads)

    def key(self) -> object:
        return Conditions, tuple(text for text, _ in self.statements)


def _passes(test: Callable[..., bool], numbers: Sequence[Any]) -> bool:
    try:
        return bool(test(*numbers))
    except Exception:
        return False


def varying(guards: Sequence[Guard], argv: Sequence[Any]) -> set[Read]:
    """The sizes, strides and numbers that an entry leaves open, or that are not what it was compiled for."""
    found: set[Read] = set()
    for guard in guards:
        compare = _COMPARED.get(type(guard))
        if compare is not None and (compare is not _compare_generator or type(guard.value) is Generator):  # type: ignore[attr-defined]
            try:
                compare(guard, guard.source.fetch(argv), found)
            except Exception:  # the path ends somewhere else in this call
                continue
    return found


def _compare_tensor(guard: Any, now: Any, found: set[Read]) -> None:
    """Note the dimensions in which a tensor differs from a guard's, or may."""
    extents, strides = guard.shape, guard.strides
    found.update(Read(guard.source, "size", i) for i, n in enumerate(extents) if isinstance(n, Free))
    found.update(Read(guard.source, "stride", i) for i, n in enumerate(strides or ()) if isinstance(n, Free))
    if type(now) in (int, float):
        found.add(Read(guard.source))  # where tensors and numbers come, the next number will be another one
    if not isinstance(now, torch.Tensor) or now.layout is not torch.strided or now.dim() != len(extents):
        return
    for i, (n, size) in enumerate(zip(extents, now.shape, strict=True)):
        if isinstance(n, int) and n != size:
            found.add(Read(guard.source, "size", i))
    for i, (n, stride) in enumerate(zip(strides or (), now.stride(), strict=False)):
        if isinstance(n, int) and n != stride:
            found.add(Read(guard.source, "stride", i))


def _compare_number(guard: Any, now: Any, found: set[Read]) -> None:
    if type(guard.value) in (int, float) and type(now) in (int, float) and not guard.test(now):
        found.add(Read(guard.source))


def _compare_attribute(guard: Any, now: Any, found: set[Read]) -> None:
    """Note a number that an attribute of a class is, where it is another one."""
    if type(guard.value) in (int, float) and type(mro_lookup(now, guard.name)) in (int, float):
        if not guard.test(now):
            found.add(Read(Attr(guard.source, guard.name)))


def _compare_generator(guard: Any, now: Any, found: set[Read]) -> None:
    if type(now) is Generator and now is not guard.value:
        found.add(Read(guard.source))


_COMPARED: dict[type, Callable[[Any, Any, set[Read]], None]] = {
    TensorMatch: _compare_tensor,
    ShapedMatch: _compare_tensor,
    Equals: _compare_number,
    ClassAttr: _compare_attribute,
    Is: _compare_generator,
    AnyNumber: lambda guard, now, found: found.add(Read(guard.source)),
}
