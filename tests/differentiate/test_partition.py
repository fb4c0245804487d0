"""The partition of joint graphs: what is saved, what is computed again, and that both halves give eager's gradients."""

import itertools
import random
import weakref

import pytest
import torch
import torch.nn.functional as F

from kiln.base.fx import runner, to_fx
from kiln.base.graph import Graph, TensorSpec, label
from kiln.base.symbols import Scope
from kiln.differentiate.flow import cheapest
from kiln.differentiate.joint import Joint, Mutation, Placeholder, Primal
from kiln.differentiate.kinds import nbytes
from kiln.differentiate.partition import partition, split_at
from kiln.ops.fake import make
from kiln.ops.record import Recording

CPU = torch.device("cpu")


def joint_of(f, *shapes, mutated=(), regions=None):
    """The joint graph of `f` over float inputs of these shapes, all of which require grad."""
    recording = Recording()
    fakes = [make(shape, None, torch.float32, CPU, 0, True) for shape in shapes]
    for i, fake in enumerate(fakes):
        recording.input(f"x{i}", fake)
    if regions is not None:
        regions(recording)
    with recording:
        outs = f(*fakes)
    outs = outs if isinstance(outs, tuple) else (outs,)
    recording.backward, recording.region = True, None
    tangents = [make(o.shape, o.stride(), o.dtype, CPU) for o in outs]
    for i, fake in enumerate(tangents):
        recording.input(f"tangent_{i}", fake)
    with recording:
        gradients = torch.autograd.grad(outs, fakes, tangents)
    graph = recording.graph
    graph.outputs = tuple(map(recording.node, (*outs, *gradients)))
    primals = tuple(Primal(Placeholder(i), node.spec, True) for i, node in enumerate(graph.inputs[: len(shapes)]))
    return Joint(graph, primals, (), None, tuple(mutated), tuple(range(len(outs))), len(outs))


def halves_of(f, *shapes, budget=1.0, **options):
    joint = joint_of(f, *shapes, **options)
    halves = partition(joint, budget)
    check_against_eager(f, joint, halves, shapes)
    return joint, halves


def check_against_eager(f, joint, halves, shapes):
    """Run both halves, by the generated function and as fx graphs, and compare with autograd."""
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    torch.manual_seed(1)
    out = f(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    tangents = [torch.randn_like(o) for o in out]
    expected = torch.autograd.grad(out, inputs, tangents)
    for boxed in (runner, lambda graph: lambda values: to_fx(graph)(*values)):
        with torch.no_grad():
            torch.manual_seed(1)
            got = boxed(halves.forward)(list(inputs))
            gradients = boxed(halves.backward)([*got[joint.results :], *tangents])
        for a, b in zip((*out, *expected), (*got[: joint.results], *gradients), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def saved(joint, halves):
    """The ops behind the saved values, inputs as "input"."""
    return sorted(label(out.op) for out in halves.forward.outputs[joint.results :])


def ops(graph):
    return [label(node.op) for node in graph.nodes]


def dropped(x):
    """Dropout as functional ops."""
    return x * torch.bernoulli(torch.empty_like(x), 0.5)


# Minimum cuts


def all_cuts(prices, reads, given, wanted):
    """The lowest price, by trying every choice."""
    best = None
    for kept in itertools.product((False, True), repeat=len(prices)):
        stack, ok, seen = list(wanted), True, set()
        while stack and ok:
            value = stack.pop()
            if value in seen or kept[value]:
                continue
            seen.add(value)
            ok = value not in given
            stack += reads[value]
        if ok:
            price = sum(p for p, k in zip(prices, kept) if k)
            best = price if best is None else min(best, price)
    return best


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_cheapest(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    reads = [sorted({rng.randrange(i) for _ in range(rng.randint(0, 2))}) if i else [] for i in range(count)]
    given = {i for i in range(count) if not reads[i] and rng.random() < 0.8 or rng.random() < 0.2}
    prices = [rng.randint(1, 9) for _ in range(count)]
    wanted = {i for i in range(count) if rng.random() < 0.4}
    keep = cheapest(prices, reads, given, wanted)
    stack, seen = list(wanted), set()
    while stack:
        value = stack.pop()
        if value in seen or keep[value]:
            continue
        seen.add(value)
        assert value not in given, "a value is neither kept nor can be made"
        stack += reads[value]
    assert sum(p for p, k in zip(prices, keep) if k) == all_cuts(prices, reads, given, wanted)


def test_among_equal_prices_least_is_made_again():
    # 0 given, 1 from 0, 2 from 1, all of one price, only 2 wanted.
    assert cheapest([4, 4, 4], [[], [0], [1]], {0}, {2}) == [False, False, True]


# What is saved


def test_cheap_chains_are_computed_again():
    def f(x, w, v):
        return (F.gelu(x @ w) * 2).sin() @ v

    joint, halves = halves_of(f, (8, 16), (16, 32), (32, 4))
    assert saved(joint, halves) == ["input", "input", "input", "mm"]
    assert ops(halves.backward).count("gelu") == ops(halves.backward).count("sin") == 1
    assert "mm" not in ops(halves.forward)[2:-1]


def test_matmuls_reductions_and_random_ops_are_not():
    def f(x, w):
        return (dropped(torch.softmax(x @ w, -1)) * 2).exp()

    joint, halves = halves_of(f, (8, 16), (16, 32))
    again = set(ops(halves.backward)) & set(ops(halves.forward))
    assert not again & {"_softmax", "bernoulli", "empty_like"}
    assert "bernoulli" in ops(halves.forward)


def test_masks_are_saved_as_bytes():
    joint, halves = halves_of(lambda x: dropped(x * 2), (64, 64))
    (mask,) = halves.forward.outputs[joint.results :]
    assert mask.spec.dtype is torch.bool and nbytes(mask.spec) == 4096


def test_views_are_taken_again_not_saved():
    joint, halves = halves_of(lambda x, w: (x @ w).t().reshape(-1).exp().view(4, 8)[1], (8, 16), (16, 4))
    assert all(label(n.op) not in ("view", "t", "select") for n in halves.forward.outputs[joint.results :])


def test_inputs_and_results_are_saved_only_where_eager_keeps_them():
    # Eager keeps the argument of cos; neither b nor the result y.
    def f(x, b):
        h = x + b
        y = h.cos() + b
        return y, h * 2

    joint, halves = halves_of(f, (8,), (8,))
    assert saved(joint, halves) == ["add"]
    joint, halves = halves_of(lambda x, b: (x * b).exp(), (8,), (8,))  # keeps x, b and the result
    assert saved(joint, halves) == ["exp", "input", "input"]


def test_a_mutated_input_is_saved_as_a_copy():
    joint = joint_of(lambda x, w: (x * w, x + 1), (8,), (8,))
    joint.mutated = (Mutation(0, 1, with_grad=False),)
    halves = partition(joint)
    kept = halves.forward.outputs[joint.results :]
    assert sorted(label(n.op) for n in kept) == ["clone", "input"]
    assert halves.forward.nodes[0] in kept  # copied before anything else runs


@pytest.mark.parametrize("budget", [1.0, 0.7, 0.4, 0.0])
def test_budgets(budget):
    def f(x, *weights):
        for w in weights:
            x = torch.tanh(x @ w) + x
        return x

    def kept(budget):
        joint, halves = halves_of(f, *[(32, 32)] * 7, budget=budget)
        return sum(nbytes(n.spec) for n in halves.forward.outputs[joint.results :] if n.op != "input")

    assert kept(budget) <= budget * kept(1.0)
    assert budget < 1.0 or kept(1.0) > 0


def test_budgets_are_shares():
    joint = joint_of(lambda x: x.exp(), (2,))
    with pytest.raises(ValueError, match="between 0 and 1, got 2"):
        partition(joint, 2)


def test_a_choice_of_ones_own():
    def f(x, w):
        return torch.sigmoid(x @ w).exp()

    joint = joint_of(f, (4, 4), (4, 4))
    halves = split_at(joint, [*joint.graph.inputs[:2]])
    assert saved(joint, halves) == ["input", "input"]
    check_against_eager(f, joint, halves, [(4, 4), (4, 4)])


# The order of the backward half


def test_what_takes_up_saved_values_runs_before_what_makes_new_ones():
    """The gradient of the weight frees what it reads; that of the input would only lie there meanwhile."""
    joint, halves = halves_of(lambda x, w, v: F.gelu(x @ w) @ v, (8, 16), (16, 64), (64, 4))
    order = [node for node in halves.backward.nodes if label(node.op) == "mm"]
    shapes = [tuple(node.spec.shape) for node in order]
    assert shapes.index((64, 4)) < shapes.index((8, 64))


def test_values_are_let_go_after_their_last_use():
    """Inputs too: the list that the caller hands over is emptied."""
    graph = Graph()
    spec = TensorSpec((4,), (1,), torch.float32, CPU)
    alive = []

    def look(value):
        alive.append([ref() is not None for ref in refs])
        return value + 1

    x, y = graph.input("x", spec), graph.input("y", spec)
    first = graph.call(torch.ops.aten.exp.default, (x,), spec=spec)
    second = graph.call(look, (first,), spec=spec)
    third = graph.call(torch.ops.aten.mul.Tensor, (second, y), spec=spec)
    graph.outputs = (graph.call(look, (third,), spec=spec),)
    values = [torch.ones(4), torch.ones(4)]
    refs = [weakref.ref(value) for value in values]
    runner(graph)(values)
    assert alive == [[False, True], [False, False]] and values == []


# Regions and symbols


def test_regions_are_computed_again_from_what_they_read():
    def f(x, w):
        (recording,) = held
        for i in range(3):
            recording.region = i
            h = torch.tanh(x @ w)
            y = h @ w
            recording.region = None
            x = x + y
        return x

    held = []
    joint = joint_of(f, (8, 8), (8, 8), regions=held.append)
    halves = partition(joint)
    assert saved(joint, halves) == ["add", "add", "input", "input"]
    assert ops(halves.backward).count("tanh") == 3


def test_symbols_reach_the_backward_half_as_numbers():
    n = Scope().symbol(6, "x.size(0)")
    graph = Graph()
    aten = torch.ops.aten
    spec = TensorSpec((n, 4), (4, 1), torch.float32, CPU)
    x = graph.input("x", spec)
    total = graph.call(aten.sum.dim_IntList, (x, [0]), spec=TensorSpec((4,), (1,), torch.float32, CPU))
    tangent = graph.input("tangent", total.spec, backward=True)
    wide = graph.call(aten.expand.default, (tangent, [n, 4]), spec=spec)
    scaled = graph.call(aten.mul.Tensor, (wide, n * 2), spec=spec)
    wide.backward = scaled.backward = True
    graph.outputs = (total, scaled)
    joint = Joint(graph, (Primal(Placeholder(0), spec, True),), (), None, (), (0,), 1)
    halves = partition(joint)
    assert (halves.tensors, halves.numbers) == (0, 1)
    for forward, backward in (
        (runner(halves.forward), runner(halves.backward)),
        (lambda v: to_fx(halves.forward)(*v), lambda v: to_fx(halves.backward)(*v)),
    ):
        out, size = forward([torch.ones(5, 4)])
        assert size == 5
        (gradient,) = backward([size, torch.ones(4)])
        assert torch.equal(gradient, torch.full((5, 4), 10.0))
