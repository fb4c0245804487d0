"""What records cost while nobody listens: a share of a compile, and nothing on a call.

    python benchmarks/records.py [--turns 20] [--layers 8] [--json]

The compile is measured in turns with and without records, stages' times and places of guards, the fastest of
each; as a check, the records of one compile are counted and timed one by one. Time is the process's own.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack, contextmanager, nullcontext
from time import process_time
from unittest import mock

import torch
from torch import nn

import kiln
from kiln import telling
from kiln.base import records
from kiln.base.progress import working
from kiln.capture.world import World


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


class Silent:
    """Stands in for `records.timed`."""

    graph = ""

    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None: ...


def plain_guard(world: World, guard: object) -> None:
    world.guards.add(guard)


@contextmanager
def unrecorded():
    """Stages that leave no records and no places, and show no progress."""
    with ExitStack() as stack:
        for target, name, instead in (
            (records, "emit", lambda record: None),
            (records, "timed", Silent),
            (World, "guard", plain_guard),
            (telling, "captured_frame", lambda *_: None),
            (kiln.pipeline, "working", lambda *_: nullcontext()),
        ):
            stack.enter_context(mock.patch.object(target, name, instead))
        yield


def compiled_in(layers: int) -> float:
    """Seconds of the process for one compile of a model, forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(16) for _ in range(layers)])
    x = torch.randn(4, 16)
    kiln.reset()
    begin = process_time()
    kiln.compile(model)(x).sum().backward()
    return process_time() - begin


def counted(layers: int) -> dict[str, float]:
    """How many records one compile leaves, and the seconds that making and keeping that many takes."""
    with records.Records(light=True) as seen:
        compiled_in(layers)
    count = sum(seen.totals.values())
    begin = process_time()
    for _ in range(count):
        records.emit(records.StageRecord("f", "fuse", "forward", 0.0, 0.0))
        with working("fuse"):
            pass
    return {"records": count, "seconds": process_time() - begin}


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
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    compiled_in(asked.layers)
    with_them, without = [], []
    for _ in range(asked.turns):
        with_them.append(compiled_in(asked.layers))
        with unrecorded():
            without.append(compiled_in(asked.layers))
    made = counted(asked.layers)
    found = {
        "compile": min(with_them),
        "without records": min(without),
        "share measured": min(with_them) / min(without) - 1,
        "records": made["records"],
        "share counted": made["seconds"] / min(with_them),
        "records of 1000 calls": on_calls(),
    }
    if asked.json:
        print(json.dumps(found))
        return
    print(f"compile of {asked.layers} layers, forward and backward: {found['compile'] * 1000:.1f} ms")
    print(f"without records: {found['without records'] * 1000:.1f} ms, so they cost {found['share measured']:.2%}")
    print(f"{found['records']} records, made and kept one by one: {found['share counted']:.2%} of the compile")
    print(f"records of 1000 calls: {found['records of 1000 calls']}")


if __name__ == "__main__":
    main()
