"""Kernels of several loop nests: long folds in parts, results of rows folded again, many small nests at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln.expand.expand import expand
from kiln.fuse.loops import FOR_LOOPS
from kiln.fuse.program import fuse
from kiln.launch.program import compile_graph
from kiln.ops.record import recorded
from tests.fuse.test_kernels import calls_of, check, rand

aten = torch.ops.aten


def stages(function, *inputs):
    """The number of nests in each stage of each kernel, and the ops that stay calls and are no views."""
    program = fuse(expand(recorded(function, *inputs), "prims", FOR_LOOPS))
    return [[len(stage) for stage in kernel.stages] for kernel in program.kernels], calls_of(program)


def test_cross_entropy_is_one_kernel():
    x, target = rand(12, 50), torch.arange(12) % 50
    target[3] = -100
    check(F.cross_entropy, x, target, kernels=1, nests=[1, 1])
    check(lambda a, t: F.nll_loss(a.log_softmax(1), t, reduction="sum"), x, target, kernels=1, nests=[1, 1])


def test_cross_entropy_keeps_no_matrix():
    x, target = rand(12, 50), torch.arange(12)
    program = fuse(expand(recorded(F.cross_entropy, x, target), "prims", FOR_LOOPS))
    (step,) = program.steps
    assert max(node.spec.shape for node in step.writes.values()) == (12,)


@pytest.mark.parametrize("shape", [(700, 300), (3, 100003), (100003, 3), (4, 3, 170, 161)])
def test_long_folds_run_in_parts(shape):
    x = rand(*shape)
    check(lambda a: (a * 2).mean(), x, kernels=1, nests=[1, 1])
    check(lambda a: a.double().sum(0).float(), x)
    check(lambda a: (a.amax(), (a > 3).any(), (a > -3).all(0)), x)
    check(lambda a: (a - a.mean()) / a.std(), x)
    check(lambda a: a.to(torch.bfloat16).sum(), x, rtol=1e-2, atol=1e-2)
    check(lambda a: (a.argmax(), a.argmin(0)), x)


@pytest.mark.parametrize(("shape", "dim"), [((3, 200_003), 1), ((7001, 40), 0), ((300_000,), 0)])
def test_the_largest_and_the_sum_of_powers_are_found_part_by_part(shape, dim):
    x = rand(*shape) * 5
    rows = x.view(-1, x.shape[dim]) if dim == len(shape) - 1 else x.t()
    rows[0, :50_000] = -torch.inf  # all of some parts
    rows[0, -1] = 100
    for function in (lambda a: F.softmax(a, dim), lambda a: F.log_softmax(a, dim)):
        (kernel,) = fuse(expand(recorded(function, x), "prims", FOR_LOOPS)).kernels
        assert [len(nest.folds()) for nest in kernel.nests] == [2, 2, 0]
        check(function, x, atol=3e-5)  # eager's logarithms lose digits
        for number in (torch.inf, -torch.inf, torch.nan):
            y = x.clone()
            y.select(dim, 77).view(-1)[:1] = number
            check(function, y, atol=3e-5)
    check(lambda a: F.softmax(a, dim), torch.full(shape, -torch.inf))


def test_what_follows_a_long_fold_is_spread_too():
    x = rand(8, 3, 64, 64)
    kernels, _ = stages(lambda a: F.batch_norm(a, None, None, None, None, True), x)
    assert kernels == [[1, 1, 1]], "sums and squares of parts, those of all, the result"
    check(lambda a: F.batch_norm(a, None, None, None, None, True), x)


def test_a_fold_in_parts_does_not_depend_on_the_threads():
    x, threads = rand(400003), torch.get_num_threads()
    run = compile_graph(recorded(lambda a: (a.sum(), (a * a).mean(), a / a.sum()), x))
    try:
        torch.set_num_threads(1)
        one = run([x])
        torch.set_num_threads(2)
        two = run([x])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    torch.testing.assert_close(one[0], x.double().sum().float(), rtol=1e-5, atol=1e-3)


def test_adam_of_many_parameters_is_one_kernel():
    count = 100
    shapes = [(3 + i % 7, 40 + i) if i % 2 else (50 + i,) for i in range(count)]

    def step(*given):
        parameters, grads, means, squares, steps = (list(given[i * count :][:count]) for i in range(5))
        steps = aten._foreach_add.Scalar(steps, 1)
        new = aten._fused_adam(
            parameters, grads, means, squares, [], steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        return (*new[0], *new[2], *new[3], *steps)

    parts = [[rand(*s) * scale for s in shapes] for scale in (1, 0.1, 0.01)]
    parts += [[m * m for m in parts[2]], [torch.tensor(3.0)] * count]
    check(step, *[x for part in parts for x in part], kernels=1, nests=[count, count])


def test_small_kernels_after_each_other_are_one():
    x, y = rand(6, 8), rand(5, 7)
    check(lambda a, b: (a * 2, b + 1), x, y, kernels=1, nests=[2])
    check(lambda a, b: (a.t().contiguous().view(8, 6).sum(1) * 2, b + 1), x, y)
    big = rand(200, 400)
    check(lambda a: torch.logcumsumexp(a * 2, 1) + 1, big, kernels=2, calls=("logcumsumexp",))
    check(lambda a: (a * 2).t().reshape(-1)[::2].contiguous().sin(), big)


def test_sizes_that_vary():
    def function(x, y):
        return (x * 2 + 1, y.sum(0), F.log_softmax(x, -1).sum(), y.t() - 1)

    compiled = kiln.compile(function, backend="kiln", dynamic=True, fullgraph=True)
    for rows in (6, 11, 40):
        x, y = rand(rows, 9), rand(7, rows + 2)
        for mine, theirs in zip(compiled(x, y), function(x, y), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_long_folds_of_sizes_that_vary():
    def function(x):
        return x.mean(), x.sum(0), x / x.amax(), (x * 2).argmax()

    compiled = kiln.compile(function, backend="kiln", dynamic=True, fullgraph=True)
    for shape in ((4000, 30), (3, 7), (50, 2), (6001, 17), (2, 9000)):
        for mine, theirs in zip(compiled(rand(*shape)), function(rand(*shape)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-3)


class Block(nn.Module):
    """An encoder's layer."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, fused):
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v
        x = self.first(x + self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return self.second(x + self.down(F.gelu(self.up(x))))


@pytest.mark.parametrize(("fused", "kernels"), [(True, 3), (False, 6)])
def test_an_encoder_layer(fused, kernels):
    block = Block()
    names, values = zip(*[(n, p.detach()) for n, p in block.named_parameters()], strict=True)

    def function(x, *given):
        return torch.func.functional_call(block, dict(zip(names, given, strict=True)), (x, fused))

    made, called = stages(function, rand(2, 10, 64), *values)
    attention = ["_scaled_dot_product_flash_attention_for_cpu"] if fused else ["bmm", "bmm"]
    assert (len(made), called) == (kernels, ["addmm"] * 3 + attention + ["addmm"] * 3)
    check(function, rand(2, 10, 64), *values)


def test_memory_that_two_stages_write_is_read_after_both():
    def f(x):
        y = torch.diff(x, dim=-2)
        loss = F.nll_loss(y.log_softmax(1), torch.zeros(y.shape[0], dtype=torch.int64))
        y.t().mul_(2)
        y[:-1, :1] = loss
        first = y[0].mul_(2)
        return first, y * loss

    x = torch.randint(-4, 5, (100, 100), generator=torch.Generator().manual_seed(0)).bfloat16()
    for mine, theirs in zip(kiln.compile(f, fullgraph=True)(x), f(x), strict=True):
        assert mine.equal(theirs)
