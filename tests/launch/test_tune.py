"""Modes: max-autotune times variants once, remembers the winners on disk, and changes results by rounding alone."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.base import records
from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.program import WAYS, fuse
from kiln.generate.code import generate
from kiln.generate.schedule import USUAL, Schedule, alternatives
from kiln.launch import tune
from kiln.launch.cache import Cache, folder
from kiln.launch.plan import plan_for
from kiln.ops.record import recorded


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """A cache of its own, and as few timings as there can be."""
    monkeypatch.setenv("KILN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KILN_CACHE", "1")
    monkeypatch.setattr(tune, "ROUNDS", 1)
    monkeypatch.setattr(tune, "TURN", 0.0)
    kiln.reset()
    with kiln.config.patch(strict=True):
        yield


def mixed(x, y):
    return F.softmax(x * y, -1), (x * y).sum(0), F.gelu(x) + y, (x + 1).t().contiguous(), x.mean(), x.argmax(1)


INPUTS = torch.randn(70, 33, generator=torch.Generator().manual_seed(0)), torch.rand(70, 33) + 1


def close(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", [*alternatives(), Schedule(1, 1024, 4, 2, 4, 256, 16, 1)], ids=str)
def test_any_schedule_gives_the_same(schedule):
    program = fuse(expand(recorded(mixed, *INPUTS), "prims", FOR_LOOPS))
    compiled = generate(program.kernels, None, schedules=dict.fromkeys(program.kernels, schedule))
    close(plan_for(program, compiled)(list(INPUTS)), mixed(*INPUTS))


@pytest.mark.parametrize("way", WAYS)
def test_any_way_to_fuse_gives_the_same(way):
    x, y = torch.linspace(-3, 3, 210000).sin().view(700, 300), torch.linspace(0, 1, 210000).view(700, 300)
    program = fuse(expand(recorded(mixed, x, y), "prims", FOR_LOOPS), False, WAYS[way])
    close(plan_for(program, generate(program.kernels))([x, y]), mixed(x, y))


def test_variants_are_timed_once_and_winners_remembered(monkeypatch):
    def tuned():
        kiln.reset()
        with records.collect() as log:
            close(kiln.compile(mixed, mode="max-autotune")(*INPUTS), mixed(*INPUTS))
        return log.tuned

    first = tuned()
    assert first and all(r.variants > 1 for r in first)
    monkeypatch.setattr(tune, "timed", lambda runs: pytest.fail("timed again"))
    assert not tuned()


def test_graphs_are_timed_in_ways_that_differ(monkeypatch):
    made, times = [], {"usual": 2.0, "other": 1.0, "third": 3.0}
    monkeypatch.setattr(tune, "timed", lambda runs: {name: times[name] for name in runs})

    def way(name, text):
        return lambda: (text, lambda: made.append(name) or list)

    ways = {"usual": way("usual", "a"), "same": way("same", "a"), "other": way("other", "b"), "third": way("third", "c")}
    store = Cache(folder(), 1 << 30, create=True)
    for _ in range(2):
        assert tune.choice("graph", ways, [], store) == "other"
    assert made == ["usual", "other", "third"]
    times["other"] = 1.99
    assert tune.choice("another graph", ways, [], store) == "usual"


def test_a_remembered_winner_is_the_one_that_runs(monkeypatch):
    chosen = replace(USUAL, narrower=1, stretch=2)
    used = []
    monkeypatch.setattr(tune, "fastest", lambda launch: used.append(launch) or chosen)
    for _ in range(2):
        kiln.reset()
        with records.collect() as log:
            close(kiln.compile(lambda x, y: (x * y).sin(), mode="max-autotune")(*INPUTS)[None], (INPUTS[0] * INPUTS[1]).sin()[None])
        assert len(log.codes) == 1
    assert len(used) == 1
    kept = Cache(folder(), 1 << 30)
    assert chosen in [tune.read(kept.get(entry.key)) for entry in kept.entries()]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"chunk": 1}', json.dumps({**USUAL.data(), "chunk": 0}).encode(),
                                  json.dumps({**USUAL.data(), "chunk": "4"}).encode()])  # fmt: skip
def test_what_is_no_winner_counts_as_none(data):
    assert tune.read(data) is None


def test_sizes_that_vary_are_not_timed():
    with records.collect() as log:
        compiled = kiln.compile(lambda x: F.softmax(x, -1), mode="max-autotune", dynamic=True)
        for n in (5, 9):
            torch.testing.assert_close(compiled(torch.ones(n, 4)), torch.full((n, 4), 0.25))
    assert not log.tuned


def test_kernels_with_indices_and_divisions():
    def f(table, index, n):
        return table[index] * 2, n // (n + 1), (n + 1) % 3

    inputs = torch.randn(5, 4), torch.tensor([4, 0, 2]), torch.arange(6)
    close(kiln.compile(f, mode="max-autotune")(*inputs), f(*inputs))


def test_weights_are_packed_where_it_pays():
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval()
    x = torch.randn(3, 16)
    with torch.no_grad():
        close([kiln.compile(model, mode="max-autotune")(x)], [model(x)])


def test_training_under_every_mode():
    for mode in ("default", "reduce-overhead", "max-autotune"):
        x, y = (torch.randn(20, 30, requires_grad=True) for _ in range(2))
        found = kiln.compile(lambda x, y: F.layer_norm(x * y, (30,)).tanh(), mode=mode)(x, y)
        expected = F.layer_norm(x * y, (30,)).tanh()
        mine, theirs = (torch.autograd.grad((out * x.detach()).sum(), (x, y)) for out in (found, expected))
        close([found, *mine], [expected, *theirs])
