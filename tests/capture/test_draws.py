"""Numbers from Python's random generators: drawn before the graph runs, one graph where nobody looks at them."""

from __future__ import annotations

import operator
import random
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import EAGER, Counting, How, Watch, kiln, one_graph, ops_of, program, same_as_eager, t

X = t(3)
GENERATOR = random.Random(5)


def seeded() -> None:
    GENERATOR.seed(3)
    numpy.random.seed(3)


def states() -> list:
    return [GENERATOR.getstate(), list(numpy.random.get_state()[1])]


HOW = How(setup=seeded, state=states)


@program(t(3, grad=True))
def scales_and_offsets(x):
    return x * random.random() + random.randint(1, 9), random.uniform(2, 3), random.gauss(0, 1)


@program(X)
def numbers_are_numbers(x):
    a, b = random.random(), random.randrange(1, 9, 2)
    return x**a, a * 2 + b, [a, b], x.clamp(max=a), torch.full((2,), a), isinstance(a, float)


@program(X, how=HOW)
def a_generator_from_outside(x):
    return x * GENERATOR.random() + GENERATOR.randint(0, 5), GENERATOR.getrandbits(4)


@program(X, how=HOW)
def those_of_numpy(x):
    return x * numpy.random.rand() + numpy.random.randint(3), numpy.random.uniform(1, 2), numpy.random.normal(), numpy.random.beta(1.0, 2.0) * x


@program(X)
def a_number_that_nobody_uses(x):
    random.random()
    return x + 1


@program(X)
def a_range_answers_questions(x):
    k = random.randint(2, 5)
    return x * k if k > 1 else x


@program(X, graphs=2, breaks=1)
def a_branch_breaks_where_it_was_drawn(x):
    y = x + 1
    return y * 2 if random.gauss(0, 1) < 9 else y


@program(X, graphs=2, breaks=1)
def across_a_break(x):
    k = random.random()
    y = x * k
    kiln.graph_break()
    return y + k + random.random()


@program(X, raises=ValueError)
def an_empty_range(x):
    return x * random.randint(3, 1)


SYSTEM = random.SystemRandom()


@program(X, graphs=1, breaks=1)
def a_subclass_breaks(x):
    return x * SYSTEM.randint(3, 3)


test_scales, test_numbers = scales_and_offsets, numbers_are_numbers
test_outside, test_numpy, test_unused = a_generator_from_outside, those_of_numpy, a_number_that_nobody_uses
test_range, test_branch, test_across = a_range_answers_questions, a_branch_breaks_where_it_was_drawn, across_a_break
test_empty, test_subclass = an_empty_range, a_subclass_breaks


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) * random.random()


def test_each_layer_draws_its_own():
    one_graph(nn.Sequential(*(Scaled() for _ in range(8))), X)


def test_a_body_that_runs_again_breaks():
    def f(x):
        return checkpoint(lambda a: a.sin() * random.random(), x, use_reentrant=False)

    same_as_eager(f, t(3, grad=True), how=How(recompiles=True))


def test_the_generator_is_read_in_each_call():
    class Holder:
        def __init__(self, seed):
            self.generator = random.Random(seed)

    def f(x, holder):
        return x * holder.generator.random()

    watch = Watch(f)
    for seed in (1, 2, 2, 3):
        watch(X, Holder(seed))
    assert EAGER or (watch.recompiles == 0 and not watch.breaks)


@program(X, how=HOW)
def seeds_count_in_the_order_of_the_program(x):
    a = GENERATOR.random()
    GENERATOR.seed(7)
    b = GENERATOR.random()
    GENERATOR.setstate(random.Random(9).getstate())
    return x * a + b, GENERATOR.randint(1, 9)


@program(t(8, grad=True))
def test_torch_is_seeded_before_the_graph_runs(x):
    torch.manual_seed(x.shape[0])
    torch.manual_seed(seed=5)
    return torch.dropout(x, 0.5, True) * torch.rand(8)


def test_a_seed_of_before_the_graph_is_no_part_of_it():
    r = one_graph(lambda x: (torch.manual_seed(5), torch.rand(3) * x)[1], X)
    assert EAGER or torch.manual_seed not in [n.target for n in ops_of(r.modules[0])]


def test_a_seed_after_numbers_were_drawn_is_a_part_of_the_graph():
    def f(x):
        torch.manual_seed(2)
        y = torch.rand(3) * x
        torch.manual_seed(5)
        return torch.manual_seed(6), y, torch.rand(3)

    r = one_graph(f, X)
    assert EAGER or [n.args for n in ops_of(r.modules[0]) if n.target is torch.manual_seed] == [(5,), (6,)]


def test_a_full_graph_seeds_by_itself():
    def f(x):
        torch.manual_seed(5)
        return torch.rand(3) * x

    if not EAGER:
        graph = kiln.capture(f, X).graph_module
        torch.manual_seed(1)
        torch.testing.assert_close(graph(X)[0], f(X))


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, "a", 2.5], ids=["wide", "low", "text", "float"])
def test_what_is_no_seed_raises(seed):
    def f(x):
        torch.manual_seed(seed)
        return torch.rand(3) * x

    same_as_eager(f, X)


SEEDS = (2**63 + 5, 7, 2**64 - 3, 2**64 - 9, 2**63 - 1, 11, 2**63, -4)


class Seeded(nn.Module):
    def forward(self, x, drawn):
        self.seed = int(drawn % sys.maxsize)
        torch.manual_seed(self.seed)
        return torch.dropout(x.sin(), 0.5, True), self.seed, drawn


def test_seeds_that_no_machine_word_holds_have_one_graph():
    watch = Watch(Seeded())
    for seed in SEEDS:
        out, told, drawn = watch(t(64), seed)
        assert (told, drawn) == (seed % sys.maxsize, seed)
    assert EAGER or (len(watch.backend.modules) <= 3 and not watch.breaks)


class Drawing:
    """The default generator, whose own seeds are the same in each run of the tests."""

    def __init__(self, generator):
        self.generator, self.numbers = generator, random.Random(0)

    def seed(self):
        self.generator.manual_seed(found := self.numbers.getrandbits(64))
        return found

    def __getattr__(self, name):
        return getattr(self.generator, name)


def test_torchs_own_seeds_compile_no_graph_in_each_step(monkeypatch):
    monkeypatch.setattr(torch.random, "default_generator", Drawing(torch.random.default_generator))

    class Layer(nn.Module):
        def forward(self, x):
            self.seed = int(torch.seed() % sys.maxsize)
            torch.manual_seed(self.seed)
            return torch.dropout(x, 0.5, True)

    layers = nn.ModuleList([Layer() for _ in range(3)])

    def f(x):
        for layer in layers:
            x = layer(x)
        return x

    backend, x = Counting(), torch.ones(64)
    compiled = f if EAGER else kiln.compile(f, backend=backend)
    for _ in range(8):
        y, expected = compiled(x), x
        before = len(backend.modules)
        for layer in layers:
            torch.manual_seed(layer.seed)
            expected = torch.dropout(expected, 0.5, True)
        torch.testing.assert_close(y, expected)
    assert len(backend.modules) == before <= 6


USES = {
    "asked": lambda x, n: x if n > 2**63 + 4 else -x,
    "rest": lambda x, n: x * (n % 3),
    "float": lambda x, n: x * float(n),
    "half": lambda x, n: x + (n,)[0] * 0.5,
    "bits": lambda x, n: x + (n & 255) + n.bit_length(),
    "text": lambda x, n: (x, str(n)),
    "graph": lambda x, n: x.long() * n,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_numbers_that_no_machine_word_holds_are_looked_at(use):
    watch = Watch(use)
    for n in SEEDS:
        watch(X, n)


def test_an_op_that_fails_draws_once():
    def f(x, i):
        return x[i] * GENERATOR.random()

    outcomes = []
    for run in (f, f if EAGER else kiln.compile(f)):
        GENERATOR.seed(1)
        for index in ([0, 1], [0, 5], [1, 1]):
            try:
                outcomes.append(run(X, torch.tensor(index)).tolist())
            except IndexError:
                outcomes.append(None)
        outcomes.append(GENERATOR.random())
    assert outcomes[1] is outcomes[5] is None
    torch.testing.assert_close(torch.tensor(outcomes[0]), torch.tensor(outcomes[4]))


def dropped(x, layers, rate, draw):
    for layer in layers:
        if draw() < rate:
            continue
        x = layer(x)
    return x


@pytest.mark.parametrize("rate", [0.0, 1.5], ids=["never", "always"])
@pytest.mark.parametrize(
    "draw", [random.random, lambda: random.uniform(0, 1), numpy.random.rand], ids=["unit", "between", "numpy"]
)
def test_layers_that_no_number_drops_are_one_graph(rate, draw):
    def f(x):
        return dropped(x, [torch.sin] * 3, rate, draw) + 1

    one_graph(f, X, how=HOW)


def test_layers_that_a_number_drops():
    same_as_eager(lambda x: dropped(x, [torch.sin] * 3, 0.5, random.random) + 1, X, how=How(recompiles=True))


@pytest.mark.parametrize("sign", [operator.lt, operator.le, operator.gt, operator.ge, operator.eq])
@pytest.mark.parametrize("bound", [-1, 0, 2, 3])
def test_numbers_at_the_ends_of_where_they_lie(sign, bound):
    def f(x):
        return x * 2 if sign(random.uniform(0, 2), bound) else x, x + 1 if sign(bound, random.random()) else x

    same_as_eager(f, X, how=How(recompiles=True))


def of(seed):
    return torch.Generator().manual_seed(seed)


def from_given(x, *generators):
    return [x + torch.rand(3, generator=g) for g in generators], torch.rand(3)


def from_one_made(x, seed):
    g = torch.Generator().manual_seed(seed)
    return x + torch.rand(3, generator=g), torch.randn(3, generator=g), g


def from_one_seeded_twice(x, seed):
    g = torch.Generator().manual_seed(seed)
    first = x + torch.rand(3, generator=g)
    g.manual_seed(seed)
    return first, torch.rand(3, generator=g)


def within_handlers(x, seed):
    g = torch.Generator().manual_seed(seed)
    try:
        return (x + torch.rand(3, generator=g))[torch.tensor([seed])]
    except IndexError:
        return torch.rand(2, generator=g)


ONE, OTHER = of(70), of(71)
CALLED = {
    "others in each call": (from_given, [lambda i=i: (of(i), of(i + 1)) for i in range(5)], 2),
    "in a list of calls, the same": (from_given, [lambda: (ONE, OTHER)] * 3, 1),
    "those of other arguments, or torch's own": (from_given, [
        lambda: (of(1), OTHER), lambda: (of(2), ONE), lambda: (ONE, OTHER), lambda: (OTHER, ONE), lambda: (of(3), of(4)),
        lambda: (torch.default_generator, of(5)), lambda: (of(6), torch.default_generator), lambda: [of(7)] * 2,
        lambda: (of(8), of(9)),
    ], None),
    "made in each call": (from_one_made, [lambda i=i: (i,) for i in range(5)], 2),
    "made, and seeded twice": (from_one_seeded_twice, [lambda i=i: (i,) for i in range(3)], None),
    "made, within handlers": (within_handlers, [lambda i=i: (i,) for i in (0, 2, 3, 4)], None),
}  # fmt: skip


@pytest.mark.skipif(EAGER, reason="counts graphs")
@pytest.mark.parametrize("backend", ["eager", "kiln"])
@pytest.mark.parametrize("name", CALLED)
def test_random_generators_of_torch(name, backend):
    f, calls, graphs = CALLED[name]

    def outcomes(run):
        torch.manual_seed(3), ONE.manual_seed(1), OTHER.manual_seed(2)
        found = []
        for call in calls:
            given = call()
            flat = [*given, *torch.utils._pytree.tree_leaves(run(X, *given))]
            found += [v.get_state() if isinstance(v, torch.Generator) else v for v in flat]
        return found

    counting = Counting(backend)
    torch.testing.assert_close(outcomes(kiln.compile(f, backend=counting)), outcomes(f))
    assert graphs is None or len(counting.modules) == graphs


LATE = """
import numpy, torch, kiln
f = lambda x: x * numpy.random.rand() + numpy.random.randint(3)
kiln.compile(f, backend="eager", fullgraph=True)(torch.ones(2))
"""


def test_generators_of_numpy_that_the_program_is_the_first_to_load():
    subprocess.run([sys.executable, "-c", LATE], check=True)
