"""Random numbers of Kiln's own: seeds, statistics, masks of dropout in both halves, what stays eager's."""

import math

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln import compiler
from kiln.fuse.program import Launch
from kiln.launch import held
from kiln.launch import program as launched
from kiln.ops.random import SEEDS, uniform

KS = 1.95  # the bound of Kolmogorov and Smirnov for one error in a thousand, by the root of the count


@pytest.fixture(autouse=True)
def strict():
    kiln.reset()
    with kiln.config.patch(strict=True, random="masks"):
        yield


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were compiled."""
    found = []

    def watched(compile_it):
        return lambda graph, *rest, **named: found.append(graph) or compile_it(graph, *rest, **named)

    monkeypatch.setattr(compiler, "begin_graph", watched(compiler.begin_graph))
    monkeypatch.setattr(held, "compile_graph", watched(held.compile_graph))
    return found


def named(graph):
    return [str(node.op) for node in graph.nodes]


def seeded(f, *args, seed=0):
    torch.manual_seed(seed)
    return f(*args)


def far_from(values, distribution):
    """The largest distance of a sample from a distribution, in units of 1 / sqrt(count)."""
    ordered = distribution(values.double().flatten().sort().values)
    n = ordered.numel()
    steps = torch.arange(n, dtype=torch.float64)
    return float(torch.maximum(ordered - steps / n, (steps + 1) / n - ordered).max()) * math.sqrt(n)


def test_the_generator_is_philox():
    # The words of Philox 2x32-10 for counter and key 0, and for all bits set, as its authors publish them.
    zero = torch.zeros((), dtype=torch.int64)
    first = [uniform(zero, [1], [1], word).item() for word in (0, 1)]
    assert first == [(0xFF1DAE59 >> 8) / 2**24, (0x6CD10DF2 >> 8) / 2**24]


@pytest.mark.parametrize("shape", [(1,), (7, 5), (33, 64), (3, 1000)])
def test_kernels_draw_what_the_definition_says(shape):
    seed = torch.randint(*SEEDS, ())
    size, stride = list(shape), list(torch.empty(shape).stride())
    for word in (0, 1):
        compiled = kiln.compile(lambda s: torch.ops.kiln.uniform(s, size, stride, word) * 1.0)
        assert torch.equal(compiled(seed), uniform(seed, size, stride, word))


def test_dropout_obeys_the_seed_and_goes_on():
    x = torch.ones(1000)
    compiled = kiln.compile(lambda x: F.dropout(x, 0.25))
    first, then = seeded(compiled, x), compiled(x)
    again, then_again = seeded(compiled, x), compiled(x)
    other = seeded(compiled, x, seed=1)
    assert torch.equal(first, again) and torch.equal(then, then_again)
    assert not torch.equal(first, then) and not torch.equal(first, other)
    assert set(first.tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}


def test_dropout_is_one_kernel_and_keeps_a_byte_an_element(graphs, monkeypatch):
    monkeypatch.setenv("KILN_CACHE", "0")  # a plan from the disk is not fused
    kernels, linked = [], launched.fuse
    monkeypatch.setattr(launched, "fuse", lambda *a, **k: kernels.append(made := linked(*a, **k)) or made)
    x = torch.randn(64, 100, requires_grad=True)
    out = kiln.compile(lambda x: F.dropout((x * 2).relu(), 0.5) + x)(x)
    out.sum().backward()
    forward, backward = graphs
    assert sum("kiln.seeds" in name for name in named(forward)) == 1
    assert not [name for g in graphs for name in named(g) if "bernoulli" in name]
    mask = [node for node in forward.outputs[1:] if node.spec.dtype is torch.bool]
    assert len(mask) >= 1 and not [node for node in backward.nodes if "uniform" in str(node.op)]
    assert [sum(isinstance(step, Launch) for step in made.steps) for made in kernels] == [1, 1]


def test_gradients_use_the_mask_of_the_forward():
    x = torch.randn(500, dtype=torch.float64, requires_grad=True)
    compiled = kiln.compile(lambda x: F.dropout(x * 3, 0.5))
    out = compiled(x)
    out.sum().backward()
    assert torch.equal(x.grad != 0, out != 0) and torch.equal(x.grad[out != 0], torch.full_like(x, 6.0)[out != 0])


def test_with_little_memory_the_mask_is_drawn_again(graphs):
    x = torch.randn(500, requires_grad=True)
    compiled = kiln.compile(lambda x: F.dropout((x * 3).sin(), 0.5), options={"memory_budget": 0.0})
    out = compiled(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert [name for name in named(graphs[1]) if "kiln.uniform" in name]
    torch.testing.assert_close(gradient, torch.where(out != 0, 6 * torch.cos(3 * x.detach()), 0.0), rtol=1e-4, atol=1e-5)


def test_second_derivatives_use_the_same_mask():
    x = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    compiled = kiln.compile(lambda x: F.dropout((x @ x).tanh() * x, 0.4).pow(3))
    out = compiled(x)
    plain = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    recorded = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    torch.testing.assert_close(recorded, plain)
    assert torch.autograd.gradgradcheck(lambda x: seeded(compiled, x), (x,))


def test_draws_of_one_graph_differ():
    a, b = kiln.compile(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)))(torch.ones(4096))
    both = ((a != 0) & (b != 0)).double().mean()
    assert abs(both - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4096)


def test_other_dtypes_and_layouts():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        out = kiln.compile(lambda x: F.dropout(x, 0.5))(torch.ones(2000, dtype=dtype))
        assert out.dtype is dtype and set(out.tolist()) == {0.0, 2.0}
    x = torch.ones(4, 6, 5, 5).to(memory_format=torch.channels_last)
    assert kiln.compile(lambda x: F.dropout(x, 0.5))(x).stride() == x.stride()
    images = kiln.compile(lambda x: F.dropout2d(x, 0.5))(x)
    assert all(len(set(part.flatten().tolist())) == 1 for image in images for part in image)


def test_sizes_that_vary():
    compiled = kiln.compile(lambda x: F.dropout(x, 0.5), dynamic=True, fullgraph=True)
    for n in (10, 500, 3000):
        out = seeded(compiled, torch.ones(n))
        assert out.shape == (n,) and set(out.tolist()) <= {0.0, 2.0}
        assert torch.equal(out[:10], seeded(compiled, torch.ones(10)))


def test_statistics_of_masks():
    n = 1 << 18
    compiled = kiln.compile(lambda x: torch.bernoulli(x))
    for p in (0.1, 0.5, 0.9):
        drawn = seeded(compiled, torch.full((n,), p)).double()
        deviation = math.sqrt(p * (1 - p) / n)
        assert abs(drawn.mean() - p) < 4 * deviation
        centred = drawn - p
        for lag in (1, 2, 16, 64, 1024):  # neighbours, lanes, rows
            assert abs((centred[lag:] * centred[:-lag]).mean()) < 4.5 * p * (1 - p) / math.sqrt(n)
        later = compiled(torch.full((n,), p)).double() - p
        assert abs((centred * later).mean()) < 4.5 * p * (1 - p) / math.sqrt(n)


def test_statistics_of_samples():
    n = 1 << 17
    own = {"random": "own"}
    u = seeded(kiln.compile(lambda x: torch.rand_like(x), options=own), torch.empty(n))
    assert 0 <= u.min() and u.max() < 1 and far_from(u, lambda x: x) < KS
    z = seeded(kiln.compile(lambda x: torch.randn_like(x), options=own), torch.empty(n))
    assert far_from(z, torch.special.ndtr) < KS
    assert abs(z.double().mean()) < 4 / math.sqrt(n) and abs(z.double().var() - 1) < 4 * math.sqrt(2 / n)
    v = seeded(kiln.compile(lambda x: x.clone().uniform_(-3, 5), options=own), torch.empty(n))
    assert far_from(v, lambda x: (x + 3) / 8) < KS
    w = seeded(kiln.compile(lambda x: x.clone().normal_(2, 3), options=own), torch.empty(n))
    assert far_from((w - 2) / 3, torch.special.ndtr) < KS


def test_samples_that_a_program_shows_are_eagers():
    def samples(x):
        return torch.rand_like(x), torch.randn(7), torch.randint(0, 9, (5,)), torch.randperm(6), x.clone().uniform_()

    x = torch.randn(40)
    for mine, theirs in zip(seeded(kiln.compile(samples), x), seeded(samples, x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("options", [{"random": "eager"}, {"numerics": "eager"}])
def test_eagers_numbers(options):
    def masks(x):
        return F.dropout(x, 0.3), torch.bernoulli(x), torch.rand(3), F.dropout(x, 0.9)

    x = torch.rand(300)
    for mine, theirs in zip(seeded(kiln.compile(masks, options=options), x), seeded(masks, x), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(torch.rand(3), (seeded(masks, x), torch.rand(3))[1])


def test_a_generator_of_the_programs_own_stays_eagers():
    def mask(x, g):
        return torch.bernoulli(x, generator=g)

    x = torch.rand(100)
    compiled = kiln.compile(mask)
    assert torch.equal(compiled(x, torch.Generator().manual_seed(3)), mask(x, torch.Generator().manual_seed(3)))
