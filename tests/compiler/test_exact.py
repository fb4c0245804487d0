"""options={"numerics": "eager"}: eager's bits, forward and gradients, with what is exact still fused."""

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.fuse.program import Program
from kiln.launch import program as launched

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

PROGRAMS = {
    "a chain": lambda x, y: ((x * y + x) * 1.7 - y / 3.1).relu() * x / (y.abs() + 0.3),
    "numbers": lambda x, y: (x + 1.7, 1.7 - x, x - 0.3, x * 0.3, x / 7.3, 7.3 / y),
    "a factor": lambda x, y: torch.sub(x, y, alpha=0.3) + 2.5,
    "roots": lambda x, y: (x.square() + y.abs()).sqrt() - x.abs().rsqrt() + (y + 3).reciprocal(),
    "comparisons": lambda x, y: (x < 0.1, x >= y, x == 0.3, x != y, torch.where(y > 0, x * 1.1, 0.3)),
    "limits": lambda x, y: (x.clamp(-0.1, 0.3), torch.maximum(x, y), F.hardtanh(x * 1.3) * 2, F.relu6(x * 7)),
    "steps": lambda x, y: ((x * 3.3).floor(), (x * 3.3).ceil(), (x * 5).trunc(), x.sign(), x.round()),
    "masks": lambda x, y: x.masked_fill(y > 0, 0.1) + 1,
    "folds": lambda x, y: ((x * y).amax(1), x.argmax(1), (x * 1.1).max(1).values, (x > 0).sum(1)),
    "sums": lambda x, y: ((x * y).sum(1), x.mean(0), x.var(1), x.cumsum(1), x.norm(dim=1)),
    "norms": lambda x, y: (F.softmax(x * y, -1), F.layer_norm(x, (33,)), F.log_softmax(x, 0), x.logsumexp(1)),
    "activations": lambda x, y: (F.gelu(x) * y, F.silu(x) + y, F.elu(x), F.hardswish(x * 4), F.softplus(x)),
    "functions": lambda x, y: (x.exp() * y, torch.sin(x) + 1, x.abs().log() * 2, torch.tanh(x * y)),
    "joined": lambda x, y: (torch.addcmul(x, y, x, value=0.3), torch.lerp(x, y, 0.3)),
    "moves": lambda x, y: torch.cat([x * 1.1, y + 0.1])[:, 3:9] * 1.3,
    "dtypes": lambda x, y: (x.double() * 1.1).to(x.dtype) + y.float(),
    "random": lambda x, y: F.dropout(x * 1.1, 0.3) * y + torch.rand_like(x),
    "products": lambda x, y: (x @ y.t()).relu() * 1.3,
}  # fmt: skip


def results(f, dtype):
    """What a function gives and its gradients, on inputs and random numbers that are always the same."""
    made = torch.Generator().manual_seed(3)
    x, y = (torch.randn(17, 33, generator=made).to(dtype).requires_grad_() for _ in range(2))
    torch.manual_seed(0)
    outputs = f(x, y)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    smooth = [out for out in outputs if out.requires_grad]
    if smooth:
        weights = [torch.arange(out.numel()).reshape(out.shape) for out in smooth]
        total = sum((out.double() * weight).sum() for out, weight in zip(smooth, weights))
        outputs += torch.autograd.grad(total, (x, y), allow_unused=True)
    return outputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_bits(name, dtype):
    kiln.reset()
    expected = results(PROGRAMS[name], dtype)
    with kiln.config.patch(strict=True):
        found = results(kiln.compile(PROGRAMS[name], fullgraph=True, options={"numerics": "eager"}), dtype)
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"result {i}: {m}")


def steps_of(f, monkeypatch, **options):
    """The kernels and the names of the eager calls of a function of one tensor."""
    monkeypatch.setenv("KILN_CACHE", "0")  # a plan from the disk is not fused
    found: list[Program] = []
    fuse = launched.fuse
    monkeypatch.setattr(launched, "fuse", lambda *a, **k: found.append(fuse(*a, **k)) or found[-1])
    kiln.reset()
    with kiln.config.patch(strict=True):
        kiln.compile(f, options=options)(torch.randn(8, 16, dtype=torch.bfloat16))
    (program,) = found
    calls = [step.node.op for step in program.steps if not hasattr(step, "kernel")]
    return len(program.kernels), [op._schema.name for op in calls]


def test_what_is_exact_is_fused_and_the_rest_are_eager_calls(monkeypatch):
    chain = lambda x: ((x * 3 + 1).relu() / 7).exp() * 2 - x  # noqa: E731
    assert steps_of(chain, monkeypatch, numerics="eager") == (2, ["aten::exp"])
    assert steps_of(chain, monkeypatch) == (1, [])
    assert steps_of(lambda x: F.softmax(x + 1, -1) * 2, monkeypatch, numerics="eager") == (2, ["aten::_softmax"])


def test_a_small_model_trains_to_the_same_bits():
    def trained(compiled):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(12, 24), torch.nn.LayerNorm(24), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(24, 3)
        ).to(torch.bfloat16)
        run = kiln.compile(model, options={"numerics": "eager"}) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            loss = F.cross_entropy(run(torch.randn(6, 12).to(torch.bfloat16)).float(), torch.arange(6) % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    kiln.reset()
    for mine, theirs in zip(trained(True), trained(False), strict=True):
        assert torch.equal(mine, theirs)
