"""What records cost while nobody listens: a share of a compile, and nothing on a call.

    python benchmarks/records.py [--turns 10] [--layers 8] [--json]

The time within what makes and keeps records, times stages and asks for progress is added up over a compile, and
what it takes to note the place of each guard; both as a share of the fastest compile. It is this thread's time.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack
from time import thread_time
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

os.environ["KILN_CACHE"] = "0"  # a compile, not what was kept of one

import kiln
from kiln import telling
from kiln.base import progress, records
from kiln.capture.world import World


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


class Clock:
    """The seconds that go by within some functions, the outermost ones; reading the clock counts too."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._within = 0.0, 0, False

    def around(self, function):
        def timed(*args, **kwargs):
            if self._within:
                return function(*args, **kwargs)
            self._within = True
            begin = thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += thread_time() - begin
                self.calls += 1
                self._within = False

        return timed


def compiled_in(layers: int) -> float:
    """Seconds of one compile of a model, forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(16) for _ in range(layers)])
    x = torch.randn(4, 16)
    kiln.reset()
    begin = thread_time()
    kiln.compile(model)(x).sum().backward()
    return thread_time() - begin


def recorded_in(layers: int) -> tuple[float, float, int, int]:
    """Seconds of one compile, those spent on records, how many records it leaves, and its guards."""
    clock, empty = Clock(), reading()
    targets = (
        (records, "emit"), (records.timed, "__enter__"), (records.timed, "__exit__"), (telling, "captured_frame"),
        (progress, "wanted"),
    )  # fmt: skip
    with ExitStack() as stack:
        for owner, name in targets:
            stack.enter_context(mock.patch.object(owner, name, clock.around(getattr(owner, name))))
        guards = stack.enter_context(mock.patch.object(World, "guard", autospec=True, side_effect=World.guard))
        seconds = compiled_in(layers)
    return seconds, clock.seconds - clock.calls * empty, sum(records.log.totals.values()), guards.call_count


def reading() -> float:
    """Seconds that a clock adds to a call."""
    clock = Clock()
    nothing = clock.around(lambda: None)
    for _ in range(1000):
        nothing()
    return clock.seconds / clock.calls


def guard_place() -> float:
    """Seconds that it takes to note where a guard was asked for, the fastest of some turns."""
    frames, count = [SimpleNamespace(code=object(), index=1)], 10_000
    turns = []
    for _ in range(10):
        places, begin = {}, thread_time()
        for i in range(count):
            places[i] = (frames[-1].code, frames[-1].index) if frames else None
        turns.append((thread_time() - begin) / count)
    return min(turns)


def on_calls() -> int:
    """How many records a thousand calls of compiled code leave."""
    compiled = kiln.compile(lambda x: x * 2 + 1)
    x = torch.ones(8)
    compiled(x)
    with records.Records() as seen:
        for _ in range(1000):
            compiled(x)
    return sum(seen.totals.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    compiled_in(asked.layers)
    plain = min(compiled_in(asked.layers) for _ in range(asked.turns))
    turns = [recorded_in(asked.layers) for _ in range(asked.turns)]
    spent, count, guards = min(t[1] for t in turns), turns[0][2], turns[0][3]
    spent += guards * guard_place()
    found = {"compile": plain, "records": count, "guards": guards, "spent": spent, "share": spent / plain,
             "records of 1000 calls": on_calls()}  # fmt: skip
    if asked.json:
        print(json.dumps(found))
        return
    print(f"compile of {asked.layers} layers, forward and backward: {plain * 1000:.1f} ms")
    print(f"{count} records and the places of {guards} guards: {spent * 1e6:.0f} µs, {found['share']:.2%} of it")
    print(f"records of 1000 calls: {found['records of 1000 calls']}")


if __name__ == "__main__":
    main()
