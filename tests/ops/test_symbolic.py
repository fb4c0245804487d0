"""Fake tensors of symbolic sizes through whole models: one run of symbols gives eager's layouts at every size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kiln.base.symbols import Expr, Scope, Symbol
from kiln.ops import fake as fakes
from kiln.ops import rules  # noqa: F401
from kiln.ops.symint import expr_of, wrap
from tests import scopes

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries take other paths, which do not depend on contents, while they are compiled."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


Sizes = dict[str, int]
Make = Callable[..., dict[str, Tensor]]


def layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        size = tuple([expr_of(n) for n in value.shape])
        stride = tuple([expr_of(s) for s in value.stride()])
        return size, stride, value.dtype, expr_of(value.storage_offset())
    return [layout(v) for v in value] if isinstance(value, (list, tuple)) else type(value)


def at(value: Any, values: dict[Any, int]) -> Any:
    """A logged layout with symbols put in; strides of dimensions of one element mean nothing."""
    if isinstance(value, Expr):
        return value.evaluate(values)
    if isinstance(value, tuple) and len(value) == 4 and isinstance(value[2], torch.dtype):
        size, stride, dtype, offset = value
        size = tuple([at(n, values) for n in size])
        stride = tuple([at(s, values) for n, s in zip(size, stride, strict=True) if n != 1])
        return size, stride, dtype, at(offset, values)
    return [at(v, values) for v in value] if isinstance(value, list) else value


class Log(TorchDispatchMode):
    """Notes each aten call with the layout of its results; `detach` is autograd's own affair."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.answer = answer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.answer(func, args, kwargs or {})
        if func is not torch.ops.aten.detach.default:
            self.calls.append((str(func), layout(result)))
        return result


def calls(program: Callable[..., Any], inputs: dict[str, Tensor], answer: Callable[..., Any]) -> list[Any]:
    with Log(answer) as log:
        out = program(**inputs)
        out = out if isinstance(out, Tensor) else out[0]
        if out.requires_grad:
            out.float().sum().backward()
    if isinstance(program, nn.Module):
        program.zero_grad()
    return log.calls


def replace_state(model: nn.Module) -> None:
    memo: dict[int, Tensor] = {}
    for module in model.modules():
        for group in (module._parameters, module._buffers):
            for name, real in group.items():
                if real is not None:
                    group[name] = memo.setdefault(id(real), fakes.fake_like(real))


def symbolic(make: Make, sizes: Sizes, scope: Scope) -> dict[str, Tensor]:
    """Fakes of what `make` gives, with a symbol wherever a size follows one of `sizes`."""
    symbols = {name: wrap(scope.symbol(n, name)) for name, n in sizes.items()}
    reals = make(**sizes)
    given = {name: list(real.shape) for name, real in reals.items()}
    for name in sizes:
        for key, other in make(**{**sizes, name: sizes[name] + 1}).items():
            for d, n in enumerate(other.shape):
                if n != reals[key].shape[d]:
                    assert n == reals[key].shape[d] + 1
                    given[key][d] = symbols[name]
    return {key: fakes.fake_like(real, given[key]) for key, real in reals.items()}


def agree(program: Any, make: Make, conditions: list[str], *assignments: Sizes) -> Scope:
    """Check the layouts of a symbolic run, made at the first sizes, against eager runs at all of them.

    The scope has recorded these conditions, in this order, and its symbols are called s0, s1, … in the order
    of the sizes.
    """
    expected = [
        calls(program, make(**sizes), lambda func, args, kwargs: func(*args, **kwargs)) for sizes in assignments
    ]
    if isinstance(program, nn.Module):
        replace_state(program)
    scope = Scope()
    with torch.random.fork_rng():
        inputs = symbolic(make, assignments[0], scope)
        found = calls(program, inputs, fakes.dispatch)
    assert [str(c) for c in scope.conditions] == conditions
    for sizes, eager in zip(assignments, expected, strict=True):
        values = dict(zip(scope.symbols, sizes.values(), strict=True))
        assert scopes.check(scope)(*sizes.values()), scopes.failing(scope, list(sizes.values()))
        for i, (f, e) in enumerate(zip(found, eager, strict=False)):
            assert at(list(f), values) == at(list(e), values), f"call {i} at {sizes}"
        assert len(found) == len(eager)
    return scope


def tokens(b: int, s: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 90, (b, s)), "attention_mask": torch.ones(b, s, dtype=torch.int64)}


def library() -> Any:
    transformers = pytest.importorskip("transformers")
    try:
        transformers.BertModel  # noqa: B018
    except ModuleNotFoundError:
        pytest.skip("transformers does not import its models here")
    return transformers


@pytest.mark.models
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert(attention: str) -> None:
    transformers = library()
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
        attn_implementation=attention,
    )  # fmt: skip
    model = transformers.BertModel(config)
    agree(model, tokens, ["s1 <= 512"], {"b": 3, "s": 7}, {"b": 5, "s": 12})


@pytest.mark.models
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gpt2(attention: str) -> None:
    transformers = library()
    config = transformers.GPT2Config(
        vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_implementation=attention,
        use_cache=False,
    )  # fmt: skip
    agree(transformers.GPT2LMHeadModel(config), tokens, [], {"b": 3, "s": 7}, {"b": 5, "s": 12})


@pytest.mark.models
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_resnet(order: torch.memory_format) -> None:
    try:
        from torchvision.models import resnet18
    except (ImportError, RuntimeError):
        pytest.skip("torchvision does not import here")

    def images(b: int, h: int, w: int) -> dict[str, Tensor]:
        return {"x": torch.randn(b, 3, h, w).contiguous(memory_format=order)}

    # The mean over the last feature map repeats its gradient, unless the map has one element.
    conditions = ["s2 >= 33", "s1 >= 33"]
    model = resnet18().to(memory_format=order)
    agree(model, images, conditions, {"b": 3, "h": 64, "w": 96}, {"b": 2, "h": 67, "w": 80})


@pytest.mark.models
def test_llama() -> None:
    transformers = library()
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    agree(transformers.LlamaModel(config), tokens, [], {"b": 3, "s": 7}, {"b": 5, "s": 12})


@pytest.mark.models
def test_t5() -> None:
    transformers = library()
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False, dropout_rate=0.0
    )

    def pair(b: int, s: int, t: int) -> dict[str, Tensor]:
        return {
            "input_ids": torch.randint(0, 90, (b, s)),
            "decoder_input_ids": torch.randint(0, 90, (b, t)),
        }

    agree(transformers.T5Model(config), pair, [], {"b": 3, "s": 7, "t": 5}, {"b": 5, "s": 12, "t": 9})


class Wave(nn.Module):
    """A small U: strided and transposed convolutions, padding, joining, pooling, normalisation of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.bottom = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1), nn.AvgPool2d(2))
        self.up = nn.ConvTranspose2d(8, 8, 4, stride=4)
        self.out = nn.Conv2d(11, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.bottom(self.down(x)))
        y = nn.functional.pad(y, (0, x.shape[-1] - y.shape[-1], 0, x.shape[-2] - y.shape[-2]))
        return self.out(torch.cat([x, y], 1)).flatten(2).log_softmax(-1).mean((1, 2))


def test_unet_like() -> None:
    def images(b: int, h: int, w: int) -> dict[str, Tensor]:
        return {"x": torch.randn(b, 3, h, w)}

    # Gradients are summed where a feature map was repeated, which one of a single element may have been.
    conditions = ["s2 >= 7", "s1 >= 7"]
    agree(Wave(), images, conditions, {"b": 3, "h": 36, "w": 52}, {"b": 2, "h": 64, "w": 47})


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_transformer_encoder(autocast: bool) -> None:
    def words(b: int, s: int) -> dict[str, Tensor]:
        return {"src": torch.randn(b, s, 32)}

    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        agree(layer, words, [], {"b": 3, "s": 7}, {"b": 5, "s": 12})


def grid(a: int, b: int) -> dict[str, Tensor]:
    return {"x": torch.randn(a, b, 8, requires_grad=True)}


def two(a: int, b: int) -> dict[str, Tensor]:
    return {"x": torch.randn(a, 8, requires_grad=True), "y": torch.randn(b, 8, requires_grad=True)}


def whole(a: int, b: int) -> dict[str, Tensor]:
    return {"x": torch.randn(a, b, 8, requires_grad=True), "i": torch.randint(0, 2, (b, a))}


PROGRAMS: dict[str, tuple[Callable[..., Tensor], Make, list[str]]] = {
    "broadcast": (lambda x: x + x[:1] * x[0, 0] - x.sum(1, keepdim=True), grid, []),
    "number": (lambda x: x * x.shape[0] / (x.shape[1] + 0.5), grid, []),
    "transposed": (lambda x: (x.transpose(0, 1) * 2).exp(), grid, []),
    "permuted": (lambda x: x.permute(2, 0, 1).contiguous().view(-1).relu(), grid, []),
    "flatten": (lambda x: x.flatten(0, 1).unflatten(0, (x.shape[0], -1)).reshape(x.shape[1], -1), grid, []),
    "view": (lambda x: x.view(x.shape[0] * 2, -1, 4), grid, []),
    "divided": (lambda x: x.view(-1, 16), grid, ["s0*s1 % 2 == 0"]),
    "expand": (lambda x: x[:, :1].expand(-1, x.shape[1], -1) * x, grid, []),
    "slices": (lambda x: x[1:, :-1] * x[:-1, 1:] + x[0, -1], grid, ["s1 >= 3", "s0 >= 3"]),
    "steps": (lambda x: x[::2, 1::2].clone(), grid, ["s0 >= 3", "s1 >= 4"]),
    "narrow": (lambda x: x.narrow(0, 1, x.shape[0] - 1).select(1, -1), grid, ["s0 >= 3"]),
    "chunk": (lambda x: torch.stack(x.chunk(2, -1)).sum(0), grid, []),
    "split": (lambda x: x.split([1, x.shape[1] - 1], 1)[1], grid, ["s1 >= 3"]),
    "cat": (lambda x, y: torch.cat([x, y, x]).softmax(0), two, []),
    "stack": (lambda x, y: torch.stack([x.sum(0), y.sum(0)], 1), two, []),
    "outer": (lambda x, y: (x @ y.T).log_softmax(-1), two, []),
    "bmm": (lambda x: torch.bmm(x, x.transpose(1, 2)), grid, []),
    "einsum": (lambda x: torch.einsum("abc,adc->abd", x, x), grid, []),
    "addmm": (lambda x, y: torch.addmm(y.sum(0), x, x.new_ones(8, 8)), two, []),
    "arange": (lambda x: x * torch.arange(x.shape[1])[:, None], grid, []),
    "mask": (lambda x: x.masked_fill(torch.ones(x.shape[:2], dtype=torch.bool).tril()[..., None], 0.0), grid, []),
    "factories": (lambda x: x + x.new_zeros(x.shape) + torch.full((x.shape[1], 1), 2.0) + torch.rand_like(x), grid, []),
    "reductions": (lambda x: x.mean((0, 1)) + x.amax(0).sum(0) + x.var(1).std(0) + x.logsumexp((0, 1)), grid, []),
    "scans": (lambda x: x.cumsum(0) + x.sort(1)[0] + x.flip(0) + x.roll(1, 1), grid, []),
    "topk": (lambda x: x.topk(2, 1)[0].max(0)[0], grid, []),
    "norms": (lambda x: nn.functional.layer_norm(x, (8,)) + nn.functional.rms_norm(x, (8,)), grid, []),
    "group_norm": (lambda x: nn.functional.group_norm(x.transpose(1, 2), 4), grid, []),
    "pad": (lambda x: nn.functional.pad(x, (1, 2, 0, 3)), grid, []),
    "repeat": (lambda x: x.repeat(2, 1, 3), grid, []),
    "gather": (lambda x, i: x.gather(1, i.T[:, :, None]), whole, []),
    "index": (lambda x, i: x[:, i[:, 0]] + x[i[0], i[0]].sum(), whole, []),
    "index_select": (lambda x, i: x.index_select(1, i[:, 0]), whole, []),
    "embedding": (lambda x, i: nn.functional.embedding(i, x[0]), whole, []),
    "where": (lambda x, i: torch.where(i.T[..., None] > 0, x, -x), whole, []),
    "scatter": (lambda x, i: torch.zeros(x.shape).scatter_add(1, i.T[:, :, None].expand(-1, -1, 8), x), whole, []),
    "losses": (lambda x, i: nn.functional.cross_entropy(x.transpose(1, 2), i.T) + nn.functional.mse_loss(x, -x), whole, []),
    "dropout": (lambda x: nn.functional.dropout(x.transpose(0, 1), 0.5), grid, []),
    "sdpa": (lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True), grid, []),
    "conv1d": (lambda x: nn.functional.conv1d(x.transpose(1, 2), x.new_ones(4, 8, 3), stride=2, padding=1), grid, ["s1 >= 3"]),
    "max_pool": (lambda x: nn.functional.max_pool2d(x[None], 2, ceil_mode=True), grid, ["s1 >= 3"]),
    "adaptive": (lambda x: nn.functional.adaptive_avg_pool2d(x[None], (3, 2)), grid, []),
    "in_place": (lambda x: x.clone().add_(1).mul_(x.shape[0]).clamp_(0, 1), grid, []),
    "diagonal": (lambda x: x @ torch.diag_embed(x.sum((0, 1))), grid, []),
    "unfold": (lambda x: x.unfold(1, 3, 2).sum(-1), grid, ["s1 >= 5"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    program, make, conditions = PROGRAMS[name]
    agree(program, make, conditions, {"a": 6, "b": 5}, {"a": 8, "b": 11})


def test_shared_sizes_are_asked_once() -> None:
    scope = agree(lambda x, y: x * y + y, two, ["s0 == s1"], {"a": 6, "b": 6}, {"a": 4, "b": 4})
    assert len(scope.records) == 1


def test_what_has_no_rule_becomes_concrete() -> None:
    def square(a: int) -> dict[str, Tensor]:
        return {"x": torch.randn(3, a, 4)}

    agree(lambda x: torch.linalg.svdvals(x) + 1, square, ["s0 == 4"], {"a": 4})


def test_operators() -> None:
    scope = Scope()
    n = wrap(scope.symbol(6, "n"))
    assert type(n) is torch.SymInt and wrap(7) == 7 and type(n - n) is int
    assert [str(expr_of(v)) for v in (n + 1, 2 * n, n // 4, n % 4, -n, n**2, 3 - n, n / 4, n * 0.5)] == [
        "s0 + 1", "2*s0", "s0 // 4", "s0 % 4", "-s0", "s0*s0", "-s0 + 3", "s0 / 4", "float(s0) * 0.5",
    ]  # fmt: skip
    assert str(expr_of(torch.sym_max(n, 9))) == "max(9, s0)" and torch.sym_sum([n, n, 1]) is not None
    assert (n > 1) is True and (n == 1) is False and type(n > 7) is torch.SymBool and scope.records == []
    assert not n > 7 and scopes.text(scope) == "s0 >= 2 and s0 <= 7"
    assert list(range(n)) == [0, 1, 2, 3, 4, 5] and scope.conditions[-1].evaluate({scope.symbols[0]: 6})
    assert type(expr_of(n)) is Symbol and type(n + 1) is int


def test_fakes_follow_the_layout() -> None:
    scope = Scope()
    a, b = wrap(scope.symbol(4)), wrap(scope.symbol(6))
    layouts = {
        torch.empty(4, 3, 6): ("3*s1", "s1", "1"),
        torch.empty(6, 3, 4).permute(2, 1, 0): ("1", "s0", "3*s0"),
        torch.empty(4, 3, 10)[..., :6]: ("30", "10", "1"),
        torch.empty(3, 6).expand(4, 3, 6): ("0", "s1", "1"),
    }
    for real, strides in layouts.items():
        fake = fakes.fake_like(real, (a, 3, b))
        assert tuple(str(expr_of(s)) for s in fake.stride()) == strides
    assert scope.records == []


FRESH = """
import sys, torch
before = set(sys.modules)
from kiln.base.symbols import Scope
from kiln.ops import rules
from kiln.ops.fake import FakeMode, fake_like
from kiln.ops.symint import wrap
scope = Scope()
n = wrap(scope.symbol(4))
x = fake_like(torch.randn(4, 8, requires_grad=True), (n, 8))
with FakeMode():
    y = torch.nn.functional.layer_norm(x @ x.T @ x, (8,)).view(-1, 4).softmax(0)
    torch.cat([y, y[: n // 2]]).square().mean().backward()
assert [str(c) for c in scope.conditions] == ["s0 >= 4"], scope.records
assert x.grad.shape[0] == n
new = set(sys.modules) - before
print(*[m for m in new if m.startswith(("sympy", "torch._dynamo", "torch._inductor", "torch._functorch"))])
print(*[m for m in new if m.startswith("torch.fx.experimental")])
"""


def test_nothing_of_pytorchs_compiler_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
