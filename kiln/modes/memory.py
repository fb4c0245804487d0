"""Which bytes are alive while a program runs on fakes: each memory once, whatever looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kiln.ops.aliases import base_of
from kiln.ops.fake import FakeTensor
from kiln.ops.meta import reach


class Memory:
    """The memory of a tensor and its views; it is counted until the last of them is gone."""

    __slots__ = ("bytes", "ledger", "number", "state")

    def __init__(self, ledger: Ledger, count: int, state: bool = False) -> None:
        self.ledger, self.bytes, self.state = ledger, count, state
        ledger.made += 1
        self.number = ledger.made
        ledger.live += count

    def __del__(self) -> None:
        self.ledger.live -= self.bytes


class Ledger:
    """The bytes alive, counted up and down as memories come and go."""

    def __init__(self) -> None:
        self.live = 0
        self.made = 0

    def hold(self, fake: torch.Tensor, state: bool = False) -> Memory:
        """A memory of its own for a fake."""
        memory = Memory(self, extent(fake), state)
        fake.memory = memory  # type: ignore[attr-defined]
        return memory

    def of(self, fake: torch.Tensor) -> Memory:
        """The memory of a fake; one that was never seen gets its own."""
        return getattr(fake, "memory", None) or self.hold(fake)

    def enter(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count what a call made: new memories, and views of those there are."""
        for place, fake in results(out):
            if getattr(fake, "memory", None) is not None:
                continue
            base = base_of(func, args, kwargs, place)
            if isinstance(base, FakeTensor):
                fake.memory = self.of(base)
            else:
                self.hold(fake)


def extent(tensor: torch.Tensor) -> int:
    """The bytes of the memory that a tensor with memory of its own has."""
    return reach(tensor) * tensor.element_size() if tensor.numel() else 0


def results(out: Any) -> Iterator[tuple[int, FakeTensor]]:
    """The fakes in what a call returned, each with the place of the result that it belongs to."""
    if isinstance(out, FakeTensor):
        yield 0, out
    elif type(out) is tuple:
        for i, item in enumerate(out):
            yield from ((i, fake) for _, fake in results(item))
    elif type(out) is list:
        for item in out:
            yield from results(item)
