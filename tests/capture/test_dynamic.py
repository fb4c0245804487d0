"""Dynamic shapes: how often programs are compiled while sizes, ints and floats vary, and that results are eager's."""

from __future__ import annotations

import bisect
import gc
import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kiln
from kiln.base import records
from kiln.base.errors import Specialised
from kiln.base.symbols import Scope
from tests.same import Same


def counted(*shape: int) -> Tensor:
    return torch.arange(float(math.prod(shape))).reshape(shape) / 8 - 3


def vary(
    f: Callable[..., Any], calls: Iterable[tuple[Any, ...]], compiles: int, breaks: int = 0, **options: Any
) -> records.Records:
    """Run eager and compiled on all calls; results must be equal, compiles and breaks as pinned."""
    kiln.reset()
    compiled = kiln.compile(f, backend="eager", **options)
    with records.collect() as seen:
        for args in calls:
            expected = f(*args)
            Same()(expected, compiled(*args), f"{f.__name__}{tuple(getattr(a, 'shape', a) for a in args)}")
    assert not seen.fallbacks, seen.fallbacks
    assert len(seen.residuals) >= compiles
    entries = 1 + len(seen.recompiles)
    assert (entries, len(seen.breaks)) == (compiles, breaks), [r.reasons for r in seen.recompiles]
    return seen


def nodes(seen: records.Records, at: int = -1) -> list[str]:
    """The calls of a graph, by name."""
    calls = [n for n in seen.graphs[at].graph.graph.nodes if n.op.startswith("call")]
    return [n.target if isinstance(n.target, str) else n.target.__name__ for n in calls]


def text(seen: records.Records, at: int = -1) -> list[str]:
    """The conditions of an entry."""
    return [str(g) for g in seen.graphs[at].guards if type(g).__name__ == "Conditions"]


SIZES = (5, 6, 7, 9, 30, 2, 3, 17, 64, 4, 8, 10, 11, 12, 13, 14, 15, 16, 33, 100)


# ---------------------------------------------------------------------------------------------- sizes in graphs


def flattened(x):
    return x.view(x.shape[0] * x.shape[1], -1) * x.size(0)


def halves(x):
    n = x.size(0)
    return x[: n // 2], x[n // 2 :], x.new_zeros(n - 1, 2), torch.arange(n), x[:, None].expand(-1, n, -1).sum(1)


def joined(x):
    parts = torch.cat([x, x[1:]]), torch.stack([x, x]), x.repeat(2, 1), x.reshape(-1), x.flatten().unflatten(0, x.shape)
    return parts, x.transpose(0, 1).contiguous(), x.flip(0), x.unsqueeze(0).squeeze(0)


def attention(x):
    n = x.shape[0]
    causal = torch.arange(n)[:, None] >= torch.arange(n)
    mask = torch.tril(torch.ones(n, n, dtype=torch.bool))
    scores = (x @ x.t()) / math.sqrt(x.shape[1])
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ x, torch.where(causal, scores, 0.0)


def padded(x):
    return F.pad(x, (1, x.shape[0])), x.narrow(0, 1, x.shape[0] - 1), x.chunk(2, 1), x.split(2, 1), x.unbind(1)


def reduced(x):
    return x.sum() / x.numel(), x.mean(0) * len(x), x.std(0), x.amax(0), x.cumsum(0), x.sort(0)[0], x.var(0)


def inferred(x):
    return x[0].expand(torch._C._infer_size(x.shape, x[:1].shape)) + x


@pytest.mark.parametrize("f", [halves, joined, attention, padded, reduced, inferred])
def test_sizes_flow_through(f):
    seen = vary(f, [(counted(n, 4),) for n in SIZES], compiles=2)
    assert len(seen.graphs) == 2


def test_one_node_an_expression():
    seen = vary(flattened, [(counted(n, 3, 4),) for n in SIZES], compiles=2)
    assert nodes(seen) == ["size", "mul", "view", "mul"]
    assert text(seen) == []


def test_convolutions_and_pools():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
                          nn.ConvTranspose2d(3, 2, 2, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten())  # fmt: skip
    compiled = kiln.compile(model.eval(), backend="eager")
    with records.collect() as seen, torch.no_grad():
        for i, n in enumerate(SIZES):
            x = torch.randn(n, 2, 9 + i, 29 - i)
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert (len(seen.graphs), len(seen.recompiles), seen.breaks) == (2, 1, [])


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "nearest-exact"])
def test_interpolation(mode):
    def f(x):
        return (F.interpolate(x, scale_factor=2, mode=mode), F.interpolate(x, size=(x.shape[2] * 2, 7), mode=mode),
                F.interpolate(x, scale_factor=(1.5, 0.6), mode=mode))  # fmt: skip

    vary(f, [(counted(2 + n % 3, 2, n, n + 1),) for n in (4, 5, 6, 7, 9, 11)], compiles=2)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_interpolation_to_a_size_that_a_scale_gives(mode):
    def f(x, scale):
        fitted = min(8 / min(x.shape[2:]), 20 / max(x.shape[2:]))
        return [F.interpolate(x, scale_factor=s, mode=mode, recompute_scale_factor=True) for s in (fitted, scale, 2, (1.5, 1))]

    calls = [(counted(1, 2, 4, 6), 1.3), (counted(1, 2, 5, 7), 1.6), (counted(1, 2, 9, 6), 0.7), (counted(1, 2, 8, 15), 1.4)]
    vary(f, calls, 2)


def test_two_inputs_of_one_size():
    seen = vary(lambda x, y: x + y, [(counted(n), counted(n)) for n in SIZES], compiles=2)
    assert text(seen) == ["x.size(0) == y.size(0)"]


def test_broadcasting_is_not_mistaken():
    calls = [(counted(n, 3), counted(n, 3)) for n in (4, 5, 6)]
    calls += [(counted(n, 3), counted(1, 3)) for n in (4, 5, 6)]
    calls += [(counted(1, 3), counted(n, 3)) for n in (4, 5, 6)]
    vary(lambda x, y: x + y, calls, compiles=4)


def test_one_and_zero_have_entries_of_their_own():
    vary(lambda x: x.sum(0) * x.shape[0], [(counted(n, 3),) for n in (4, 5, 1, 0, 7, 1, 0)], compiles=4)


def test_layouts_are_told_apart():
    calls = [(counted(n, m),) for n, m in ((4, 5), (5, 6), (6, 7))]
    calls += [(counted(m, n).t(),) for n, m in ((4, 5), (5, 6), (6, 7))]
    vary(lambda x: x.view(-1) if x.is_contiguous() else x.t().reshape(-1), calls, compiles=3)


def test_strides_that_follow_nothing():
    calls = [(counted(4, width)[:, :3],) for width in (5, 6, 7, 9)]
    vary(lambda x: (x * 2, x.stride(0)), calls, compiles=2)


def test_gradients_follow():
    w = torch.randn(4, 4, requires_grad=True)
    compiled = kiln.compile(lambda x: (x @ w).relu().view(x.shape[0] * 2, -1).sum(), backend="eager")
    with records.collect() as seen:
        for n in SIZES:
            x = counted(n, 4).requires_grad_()
            (got,) = torch.autograd.grad(compiled(x), x)
            (expected,) = torch.autograd.grad((x @ w).relu().view(x.shape[0] * 2, -1).sum(), x)
            torch.testing.assert_close(got, expected)
    assert len(seen.graphs) == 2


# ---------------------------------------------------------------------------------------------- sizes in Python


def arithmetic(x):
    n = x.shape[0]
    return (n + 1, 2 * n, n - 7, 7 - n, n // 3, n % 3, n / 2, n**2, -n, ~n, +n, abs(n - 9), divmod(n, 4), n << 1,
            min(n, 6), max(n, 6, 8), sum([n, 1]), round(n / 3), int(n / 2), float(n), math.floor(n * 0.3),
            math.ceil(n / 7), math.sqrt(n), math.prod([n, n]), pow(n, 2), x.numel(), len(x), x.shape.numel())  # fmt: skip


def kinds(x):
    n = x.shape[0]
    return isinstance(n, int), type(n) is int, isinstance(n, (float, str)), callable(n), n is None, type(n / 2) is float


def containers(x):
    n = x.shape[0]
    return [n, (n, n + 1)], {"n": n}, slice(0, n), torch.Size([n, 2]), x.shape, x.shape[1:], tuple(x.shape), list(x.shape)


def natively_held(x):
    n = x.shape[0]
    return cast(int, n) + 1, bisect.bisect_right([-4, -1, 200], n), bisect.bisect_left([n, n + 1], n), x * n


@pytest.mark.parametrize("f", [arithmetic, kinds, containers, natively_held])
def test_python_numbers_stay_open(f):
    vary(f, [(counted(n, 2),) for n in SIZES], compiles=2)


@pytest.mark.parametrize(
    "f",
    [
        lambda n: f"{n} {n:03d} {n!r}", lambda n: str(n) + repr([n]) + "{}".format(n) + "%d" % n,  # noqa: UP031,UP032
        lambda n: [i for i in range(n)], lambda n: {n: 1}, lambda n: {n, 1}, lambda n: [0] * n, lambda n: "ab" * n,
        lambda n: hash(n), lambda n: list(range(40))[n], lambda n: n.bit_length(), lambda n: hex(n), lambda n: {5: 1}.get(n),
        lambda n: n in {5, 6}, lambda n: bytes(n), lambda n: str(KeyError(n)), lambda n: math.gcd(n, 12),
    ],
)  # fmt: skip
def test_what_needs_the_number_gets_it(f):
    vary(lambda x: (f(x.shape[0]), x + 1), [(counted(n),) for n in (4, 5, 6, 5)], compiles=3)


def test_a_branch_is_a_condition():
    def f(x):
        return x * 2 if x.shape[0] > 10 else x - 1

    seen = vary(f, [(counted(n),) for n in (4, 5, 6, 10, 11, 12, 3, 30)], compiles=3)
    assert text(seen, 1) == ["x.size(0) <= 10"]
    assert text(seen, 2) == ["x.size(0) >= 11"]
    assert seen.recompiles[-1].reasons[0] == "x.size(0) was 5, now 11: compiled for x.size(0) <= 10"


def test_conditions_are_asked_once():
    def f(x):
        n, out = x.shape[0], x
        for _ in range(3):
            if n % 2 == 0 and n > 2 and 2 * n > 4 and n in (4, 6, 8):
                out = out * 2
        return out

    seen = vary(f, [(counted(n),) for n in (4, 6, 6, 4)], compiles=2)
    assert text(seen) == ["x.size(0) == 6"] or len(text(seen)) == 1


def test_writes_and_breaks_carry_numbers():
    class Box:
        pass

    box = Box()

    def f(x):
        n = x.shape[0]
        box.seen = n * 2
        y = x + n
        kiln.graph_break()
        return y.sum() * n, n, box.seen

    seen = vary(f, [(counted(n),) for n in SIZES], compiles=4 - 1, breaks=2)
    assert len(seen.graphs) == 4


def test_errors_are_those_of_eager():
    def f(x, y):
        try:
            return x @ y
        except RuntimeError as e:
            return str(e)

    calls = [(counted(n, 4), counted(4, n)) for n in (3, 5, 6)] + [(counted(n, 4), counted(3, n)) for n in (3, 5)]
    compiled = kiln.compile(f, backend="eager")
    for args in calls:
        Same()(f(*args), compiled(*args), "matmul")
    with pytest.raises(RuntimeError, match="size of tensor a"):
        kiln.compile(lambda x, y: x + y, dynamic=True)(counted(3), counted(4))


# -------------------------------------------------------------------------------------------- ints and floats


def test_an_int_becomes_an_input():
    seen = vary(lambda x, n: (x * n, x[:n], x.repeat(n), torch.zeros(n), n + 1),
                [(counted(30), n) for n in (5, 6, 7, 9, 3, 2, 11)], compiles=2)  # fmt: skip
    assert [n.name for n in seen.graphs[-1].graph.graph.nodes if n.op == "placeholder"] == ["x", "n"]


def test_conditions_on_an_int():
    seen = vary(lambda x, n: x * n if n > 3 else x + n, [(counted(4), n) for n in (5, 6, 12, 2, 1, 0, -4, 7)], compiles=3)
    assert text(seen, 1) == ["n >= 4"]


def test_a_float_becomes_an_input():
    seen = vary(lambda x, lr: (x - lr * x, torch.add(x, x, alpha=lr), -lr, lr / 2, lr * 3),
                [(counted(4), 0.1 * i) for i in range(1, 20)], compiles=2)  # fmt: skip
    assert {n.name for n in seen.graphs[-1].graph.graph.nodes if n.op == "placeholder"} == {"x", "lr"}


VALUES: dict[str, Callable[[Tensor, Any], Any]] = {
    "tensor": lambda x, v: torch.tensor(v) + x, "list": lambda x, v: torch.tensor([v, 2])[0] * x,
    "as_tensor": lambda x, v: torch.as_tensor(v) * x, "full": lambda x, v: torch.full((2,), v),
    "constant": lambda x, v: torch.ones(3) * v + torch.zeros(3).fill_(v), "fill": lambda x, v: x.clone().fill_(v),
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v), "where": lambda x, v: torch.where(x > 0, v, 0.0),
    "clamp": lambda x, v: x.clamp(max=v), "power": lambda x, v: x.abs() ** v, "base": lambda x, v: v**x,
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v), "compare": lambda x, v: (x > v) | (x == v),
    "divide": lambda x, v: (v / (x + 10), v - x, x % v if v else x), "lerp": lambda x, v: torch.lerp(x, x * 2, v),
    "in place": lambda x, v: x.clone().mul_(v).add_(v).sub_(x, alpha=v), "foreach": lambda x, v: torch._foreach_mul([x, x], v),
    "promotion": lambda x, v: (x.int() * v, (x > 0) * v, x.double() * v), "activation": lambda x, v: F.leaky_relu(x, v),
    "python": lambda x, v: x * [v, v][1] + {"a": v}["a"] + math.exp(-abs(v)) + int(v),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("values", [(0.5, 0.25, 0.75, 1.5, -2.5, 1.0, 3.0), (2, 3, 5, 7, -4, 1)], ids=["float", "int"])
def test_values_reach_the_graph(name, values):
    f = VALUES[name]
    vary(f, [(torch.tensor([-1.0, 0.5, 2.0, 3.0]), v) for v in values], compiles=2)


def test_conditions_on_a_float():
    values = (0.6, 0.7, 0.9, 0.2, 0.1, -0.0, 0.0, float("nan"), float("inf"), 0.3)
    vary(lambda x, lr: x * lr if lr > 0.5 else x + lr, [(counted(4), v) for v in values], compiles=3)


def test_numbers_in_dicts_and_attributes():
    class Holder:
        def __init__(self):
            self.rate, self.steps = 0.5, 3

    holder, group = Holder(), {"lr": 0.1}

    def f(x):
        holder.steps += 1
        return x * group["lr"] + holder.rate, holder.steps

    compiled = kiln.compile(f, backend="eager")
    with records.collect() as seen:
        for i in range(10):
            group["lr"], holder.rate = 0.1 * (i + 1), 0.5 / (i + 1)
            expected = counted(3) * group["lr"] + holder.rate, 4 + i
            Same()(expected, compiled(counted(3)), "step")
    assert len(seen.graphs) == 2


def test_large_ints_are_handed_on_by_one_entry():
    vary(lambda x, n: (x + 1, n + 1), [(counted(3), n) for n in (5, 6, 2**70, 7, 2**63 - 1, -(2**63))], compiles=3)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("foreach", [False, True])
def test_learning_rates(kind, foreach):
    def train(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(3)) for _ in range(2)]
        optimizer = getattr(torch.optim, kind)(weights, lr=0.1, foreach=foreach)
        step = kiln.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for i in range(20):
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            for j, weight in enumerate(weights):
                weight.grad = torch.sin(torch.arange(3.0) + i + j)
            step()
        return weights

    kiln.reset()  # methods of equal compile calls share what was captured
    with records.collect() as seen:
        got = train(True)
    torch.testing.assert_close(got, train(False))
    assert (len(seen.graphs), seen.breaks) == (2, [])


# ------------------------------------------------------------------------------------------- what the user says


def test_a_size_divided_by_torch_stays_open():
    vary(lambda x: x + torch.div(x.size(0), 3, rounding_mode="trunc"), [(counted(n),) for n in (4, 5, 6, 9)], compiles=2)


def test_dynamic_false_compiles_each_size():
    vary(lambda x, n: x.sum(0) * n, [(counted(n, 3), n) for n in (4, 5, 6, 5)], compiles=3, dynamic=False)


def test_dynamic_true_compiles_once():
    seen = vary(lambda x, n: (x.view(-1, n), x.shape[0]), [(counted(n, 12), n) for n in (4, 6, 12, 3)],
                compiles=1, dynamic=True)  # fmt: skip
    assert len(seen.graphs) == 1


def test_dynamic_true_keeps_modules_fixed():
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    seen = vary(lambda x: model(x), [(counted(n, 6),) for n in SIZES], compiles=1, dynamic=True)
    assert text(seen) == ["x.size(1) == 6"]


def marked(*shape: int, dim: int = 0, **bounds: int) -> Tensor:
    x = counted(*shape)
    kiln.mark_dynamic(x, dim, **bounds)
    return x


def test_marked_dimensions_are_open_from_the_first_call():
    vary(lambda x: x.sum(1) * x.shape[0], [(marked(n, 3),) for n in (5, 1, 7, 9)], compiles=1)


def test_bounds_of_a_mark():
    seen = vary(lambda x: x + 1 if x.shape[0] >= 4 else x, [(marked(n, 3, min=4, max=10),) for n in (5, 4, 10)], compiles=1)
    assert text(seen) == []
    vary(lambda x: x + 1, [(marked(n, min=4, max=10),) for n in (5, 4)] + [(counted(12),)], compiles=2)
    with pytest.raises(ValueError, match="dimension 0 has size 12, which is not between 4 and 10"):
        marked(12, min=4, max=10)


def test_static_marks():
    def static(n: int) -> Tensor:
        x = counted(n, n)
        kiln.mark_static(x, 0)
        return x

    vary(lambda x: x.sum(1), [(static(n),) for n in (4, 5, 6)], compiles=3)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * 2 if x.shape[0] == 5 else x,
        lambda x: x + torch.ones(5, 1),
        lambda x: x.view(5, 3),
        lambda x: [x[i] for i in range(x.shape[0])][0],
    ],
)
def test_a_marked_dimension_that_is_held_to_one_size(f):
    with pytest.raises(Specialised) as caught:
        kiln.compile(f, backend="eager")(marked(5, 3))
    message = str(caught.value)
    assert "x.size(0) was marked dynamic, but the program holds it to 5" in message
    assert f"test_dynamic.py:{f.__code__.co_firstlineno}" in message
    assert "x.size(0) == 5" in message
    assert kiln.compile(f, backend="eager", dynamic=False)(marked(5, 3)) is not None


# ------------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """A transformer's block and its embedding, as they are written by hand."""

    def __init__(self, width: int = 16, heads: int = 2, places: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(50, width), nn.Embedding(places, width)
        self.query, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.register_buffer("order", torch.arange(places)[None])

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length = ids.shape
        x = self.tokens(ids) + self.places(self.order[:, :length])
        q, k, v = self.query(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = None if mask is None else (1.0 - mask[:, None, None].float()) * -1e9
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.mlp(self.norm(x))


class Residual(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(8)
        self.pool, self.deep = nn.MaxPool2d(3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.down, self.short = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Conv2d(8, 16, 1, stride=2)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.norm(self.stem(x)).relu())
        x = x + self.deep(x).relu()
        x = self.down(x) + self.short(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


CASES = tuple(zip(SIZES, (8, 9, 12, 16, 17, 20, 24, 5, 6, 33, 7, 40, 41, 13, 14, 50, 18, 2, 3, 10), strict=True))


def agree(model: nn.Module, make: Callable[[int, int], tuple[Tensor, ...]], **options: Any) -> None:
    """The model over batch sizes and lengths: at most two graphs, no break, results of eager."""
    compiled = kiln.compile(model.eval(), backend="eager", **options)
    with records.collect() as seen, torch.no_grad():
        for batch, length in CASES:
            args = make(batch, length)
            got, expected = compiled(*args), model(*args)
            if not isinstance(got, Tensor):
                got, expected = got[0], expected[0]
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not seen.breaks and not seen.fallbacks
    assert len(seen.graphs) == len(seen.recompiles) + 1 <= 2, [r.reasons for r in seen.recompiles]


def test_transformer_by_hand():
    agree(Block(), lambda b, s: (torch.randint(0, 50, (b, s)), torch.ones(b, s)))
    agree(Block(), lambda b, s: (torch.randint(0, 50, (b, s)),))


def test_residual_network():
    agree(Residual(), lambda b, s: (torch.randn(b, 3, 32 + s, 33 + s),))


def library() -> Any:
    transformers = pytest.importorskip("transformers")
    try:
        transformers.BertModel  # noqa: B018
    except ModuleNotFoundError:
        pytest.skip("transformers does not import its models here")
    return transformers


@pytest.mark.models
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert(attention):
    transformers = library()
    config = transformers.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=64, attn_implementation=attention)  # fmt: skip
    model = transformers.BertModel(config)
    agree(model, lambda b, s: (torch.randint(0, 50, (b, s)), torch.ones(b, s, dtype=torch.long)))


@pytest.mark.models
@pytest.mark.parametrize("cache", [False, True])
def test_gpt2(cache):
    transformers = library()
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64, use_cache=cache,
                                     bos_token_id=0, eos_token_id=0)  # fmt: skip
    agree(transformers.GPT2LMHeadModel(config), lambda b, s: (torch.randint(0, 50, (b, s)),))


@pytest.mark.models
def test_resnet18():
    try:
        from torchvision.models import resnet18
    except (ImportError, RuntimeError):
        pytest.skip("torchvision does not import here")
    cases = lambda b, s: (torch.randn(min(b, 4) + b % 3, 3, 32 + s, 33 + s),)  # noqa: E731
    agree(resnet18(num_classes=4), cases)


def test_a_number_through_a_tensor_does_not_break():
    def f(x):
        n = int(torch.tensor(x.shape[0]) * 2)
        return x + n, n

    vary(f, [(counted(n),) for n in (4, 5, 6)], compiles=3)


def test_a_break_leaves_sizes_open():
    def f(x):
        y = x + torch.arange(x.shape[0])
        return y * 2 if y.sum() > 0 else y - 1

    vary(f, [(counted(n),) for n in (30, 31, 32, 33)], compiles=3, breaks=2)


def test_symbols_are_let_go():
    compiled = kiln.compile(lambda x, n: x.view(-1, x.shape[1]) * n, backend="eager", dynamic=True)

    def scopes_after(captures: int) -> int:
        for _ in range(captures):
            kiln.reset()
            compiled(counted(3, 4), 5)
        gc.collect()
        return sum(type(thing) is Scope for thing in gc.get_objects())

    before = scopes_after(60)
    assert scopes_after(60) - before < 30  # what the table of layouts remembers


def test_products_in_inference_mode():
    """There composite ops are seen as such, and taken apart by whoever records."""

    def f(x, w):
        return F.linear(x, w), F.linear(x, x.diagonal()), x @ w.t()

    compiled = kiln.compile(f, dynamic=True, fullgraph=True)
    with records.collect() as seen, torch.inference_mode():
        for n in (2, 40, 7):
            x, w = counted(n, 1, 1), counted(5, 1)
            torch.testing.assert_close(compiled(x, w), f(x, w))
    assert len(seen.graphs) == 1 and not seen.fallbacks


def test_sizes_that_are_kept_over_a_break_vary():
    def f(x):
        size, parts = x.shape, [x.shape[:2]]
        y = x.flatten()
        print(end="")
        return y.view(size) * 2, y.view(*parts[0], -1), size, size.numel()

    vary(f, [(counted(n, n + 1, 4),) for n in (2, 3, 5, 6)], compiles=3, breaks=2)


def test_sizes_that_are_given_vary():
    def f(x, size):
        return x.view(size) * 2 if size[-1] == 4 else x

    vary(f, [(counted(n * 4), torch.Size((n, 4))) for n in (2, 3, 5, 6)], compiles=2)


def test_functions_made_anew_that_are_alike():
    def f(x, g):
        return g(x)

    def made(k):
        def g(x, n=k, size=(2, k), *, by=2.5):
            return x * n + by + size[0]

        return g

    vary(f, [(counted(3), made(k)) for k in (1, 1, 1, 2, 2)], compiles=2)


def test_numbers_beside_the_infinite():
    def f(x, n):
        return x * max(n, -math.inf), x * min(n, math.inf), x if n < math.inf else -x, x if n != math.nan else -x

    vary(f, [(counted(3), n) for n in (1.5, 2.5, 3.5, 4.25)], compiles=2)


def test_powers_that_count_steps():
    """How optimizers correct their means: a number to the power of the step that they are at."""

    def f(x, step):
        first, second = 1 - 0.9**step, 1 - math.pow(0.999, step)
        return x.addcdiv(x, x.abs().sqrt() / math.sqrt(second) + 1e-8, value=-(1e-3 / first)), pow(2.5, step), math.pow(step, -0.5)

    vary(f, [(counted(3), n) for n in (1, 2, 3, 7, 50)], compiles=2)


def smallest(heap, value):
    least = heapq.heappop(heap)
    heapq.heappush(heap, value)
    bisect.insort(heap, value + 1)
    last = heapq.heapreplace(heap, 0.0)
    heapq.heapify(heap)
    return torch.ones(2) * least, last, len(heap)


def emptied(heap):
    found = []
    while heap:
        found.append(heapq.heappop(heap)[1])
    return torch.stack(found)


def test_functions_that_change_a_list_of_numbers_that_vary():
    compiled = kiln.compile(smallest, backend="eager", fullgraph=True)
    for numbers in ([1.5, 2.5, 3.5], [2.25, 3.0, 9.0], [0.5, 1.0, 2.0], [4.0, 5.0, 6.5]):
        mine, other = list(numbers), list(numbers)
        Same()([smallest(mine, 2.0), mine], [compiled(other, 2.0), other])
    compiled = kiln.compile(emptied, backend="eager", fullgraph=True)
    for numbers in ([1.5, 2.5, 3.5], [2.25, 3.0, 9.0], [0.5, 1.0, 2.0]):
        mine, other = ([(n, torch.tensor(n)) for n in numbers] for _ in range(2))
        Same()([emptied(mine), mine], [compiled(other), other])
