"""Where intermediate values lie: apart while they live, tightly, and in memory that is lent for the call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch

import kiln
from kiln import _launch
from kiln.launch.memory import Lodging, arrange, rounded


def drawn(seed: int) -> list[Lodging]:
    random, made = Random(seed), []
    for i in range(random.randint(1, 60)):
        first = random.randint(0, 40)
        made.append(Lodging(str(i), random.choice((10, 64, 100, 1000, 4096)), first, first + random.randint(0, 8)))
        if random.random() < 0.2:
            heir = Lodging(f"{i}'", made[-1].size, made[-1].last, made[-1].last + random.randint(0, 5))
            heir.inherited, made[-1].heir = True, heir
            made.append(heir)
    random.shuffle(made)
    return made


@pytest.mark.parametrize("seed", range(30))
def test_what_lives_at_once_lies_apart(seed):
    lodgings = drawn(seed)
    total = arrange(lodgings)
    for a in lodgings:
        assert 0 <= a.offset <= total - rounded(a.size)
        for b in lodgings:
            if a is b or a.heir is b or b.heir is a or a.first > b.last or b.first > a.last:
                continue
            assert a.offset + rounded(a.size) <= b.offset or b.offset + rounded(b.size) <= a.offset
    for a in lodgings:
        assert a.heir is None or a.heir.offset == a.offset


def test_the_largest_go_first_where_that_takes_less():
    """In the order of time small ones lie where the large one would fit: that takes 320."""
    given = [(64, 0, 0), (64, 1, 1), (64, 1, 3), (64, 0, 2), (128, 2, 4)]
    lodgings = [Lodging(str(i), *one) for i, one in enumerate(given)]
    assert arrange(lodgings) == 256


@pytest.mark.parametrize(("rows", "kept"), [(32, True), (512, False), (2048, True)])
def test_memory_of_middle_size_goes_back_after_a_call(rows, kept):
    """Small blocks are not worth it; large ones take long to map; the others serve other tensors meanwhile."""

    def program(x):
        return torch.relu(x @ x.t()) @ x

    kiln.reset()
    x = torch.randn(rows, 8)
    compiled = kiln.compile(program, fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), program(x), rtol=1e-3, atol=1e-3)
    size = rows * rows * 4
    assert _launch.memory() == (size if kept else 0, 0)


LARGE = """
import re
from pathlib import Path

import torch
import kiln

def in_huge_pages(tensor):
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(place, 16) for place in found.groups())
            inside = low <= middle < high
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the tensor has no memory")

compiled = kiln.compile(lambda a: a * 2 + 1, fullgraph=True)
large = torch.ones(12 << 20)
assert not in_huge_pages(compiled(torch.ones(1 << 14)))
assert not in_huge_pages(compiled(large)), "in the first call for such sizes"
assert in_huge_pages(compiled(large)) and not in_huge_pages(large)
assert torch.equal(compiled(large), large * 2 + 1)
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_large_results_are_mapped_in_huge_pages():
    """The system takes as long for a page of 2 MB as for one of 4 KB, and large results are new memory each time.

    Not those of a plan's first call: huge pages that were free for long may have gone to the machine's host.

    In a process of its own: what a program has given back may serve again, with what was said of it.
    """
    subprocess.run([sys.executable, "-c", LARGE], check=True)
