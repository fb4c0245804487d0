"""Threads: several that compile and call at once, and as many as torch is told to use."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F

import kiln


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(x @ w) + x, x.shape[-1:]).softmax(-1)


def test_threads_that_compile_and_call_at_once() -> None:
    kiln.reset()
    compiled = kiln.compile(step, dynamic=False)
    barrier = Barrier(2)
    shapes = [(n, 24) for n in (3, 8, 17, 3, 40, 8, 5, 17)]

    def work(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        barrier.wait()
        pairs = []
        for shape in shapes * 2:
            x = torch.randn(shape, generator=generator, requires_grad=True)
            w = torch.randn(24, 24, generator=generator, requires_grad=True)
            for function in (compiled, step):
                out = function(x, w)
                pairs.append((out.detach(), *torch.autograd.grad(out.square().sum(), [x, w])))
        return pairs

    with ThreadPoolExecutor(2) as pool:
        found = [future.result() for future in [pool.submit(work, seed) for seed in range(2)]]
    for results in found:
        for mine, theirs in zip(results[::2], results[1::2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_as_torch(threads: int) -> None:
    """The same number of threads gives the same bits, call after call and in a fresh compilation."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x = torch.randn(700_001, generator=torch.Generator().manual_seed(1)) + 3
    rows = x[:700_000].view(7, 100_000)

    def sums(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), rows.sum(1), rows.sum(0).sin(), (x * 2).exp().mean(), rows.softmax(1).amax(1)

    try:
        runs = []
        for _ in range(2):
            kiln.reset()
            compiled = kiln.compile(sums)
            runs += [compiled(x, rows) for _ in range(3)]
        for found in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], found, strict=True))
        for mine, theirs in zip(runs[0], sums(x, rows), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


TIMES = """
import os, torch, kiln
torch.set_num_threads({threads})
f = kiln.compile(lambda x: x.sin().exp().tanh() * x.cos() + x.atan())
x = torch.randn(1 << 21)
f(x)
def spent():
    return {{t: int(open(f"/proc/self/task/{{t}}/stat").read().rsplit(") ", 1)[1].split()[11]) for t in os.listdir("/proc/self/task")}}
before = spent()
for _ in range(60):
    f(x)
print(sum(time > before.get(t, 0) for t, time in spent().items()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the times of threads from /proc")
def test_one_thread_is_one_thread() -> None:
    """With one thread, no other takes part."""
    program = TIMES.format(threads=1)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "1", done.stdout
