"""`kiln.measure` against reality: the same counts on real tensors of small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import kiln

pytestmark = pytest.mark.filterwarnings("ignore")


class Storages(TorchDispatchMode):
    """The bytes of all real storages alive after each op, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def see(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.nbytes():
                self.refs[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.see(item)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.refs = {k: r for k, r in self.refs.items() if not r[0].expired()}
        out = func(*args, **kwargs or {})
        self.see(out)
        self.peak = max(self.peak, sum(size for _, size in self.refs.values()))
        return out


def reality(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes saved and peak bytes of a real step."""
    state = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage()._cdata not in state:
            saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            kept.append(t.untyped_storage())
        return t

    kept: list[Any] = []
    with saved_tensors_hooks(pack, lambda t: t):
        model(*inputs)
    kept.clear()
    model.zero_grad()
    with Storages() as storages:
        storages.see([*model.parameters(), *model.buffers(), *inputs])
        out = model(*inputs)
        roots = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    return sum(saved.values()), storages.peak


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3, 5, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids).relu())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)), lambda: (torch.randn(8, 16),)),
    "frozen": (lambda: nn.Sequential(nn.Linear(16, 64).requires_grad_(False), nn.SiLU(), nn.Linear(64, 16)), lambda: (torch.randn(8, 16),)),
    "convolutional": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 4)), lambda: (torch.randn(2, 3, 16, 16),)),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), lambda: (torch.randn(2, 16, 32),)),
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), lambda: (torch.randn(2, 6, 32),)),
    "tied": (Tied, lambda: (torch.randint(50, (2, 7)),)),
    "recurrent": (Recurrent, lambda: (torch.randn(2, 5, 8),)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_real_tensors(name: str) -> None:
    build, give = MODELS[name]
    model, inputs = build(), give()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = kiln.measure(model, *inputs)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(type(t) in (torch.Tensor, nn.Parameter) and t.grad is None for t in [*model.parameters(), *model.buffers()])
    saved, peak = reality(model, inputs)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.parameter_bytes == sum(p.nbytes for p in model.parameters())
    assert found.buffer_bytes == sum(b.nbytes for b in model.buffers())
    assert found.saved_bytes == saved
    assert abs(found.peak_bytes - peak) <= 0.02 * peak


def test_flops_by_hand() -> None:
    found = kiln.measure(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)), torch.randn(8, 16))
    first, second = 2 * 8 * 16 * 64, 2 * 8 * 64 * 4
    assert (found["0"].forward_flops, found["0"].backward_flops) == (first, first)
    assert (found["2"].forward_flops, found["2"].backward_flops) == (second, 2 * second)
    assert found.flops == 2 * first + 3 * second and found["1"].flops == 0
    conv = kiln.measure(nn.Conv2d(4, 6, 3, groups=2), torch.randn(2, 4, 8, 8, requires_grad=True))
    assert (conv.total.forward_flops, conv.total.backward_flops) == (2 * 6 * 2 * 9 * 2 * 36, 2 * 2 * 6 * 2 * 9 * 2 * 36)
    deconv = kiln.measure(nn.ConvTranspose2d(4, 6, 3), torch.randn(2, 4, 8, 8))
    assert (deconv.total.forward_flops, deconv.total.backward_flops) == (2 * 4 * 6 * 9 * 2 * 64, 2 * 4 * 6 * 9 * 2 * 64)
    attention = kiln.measure(Attention(), torch.randn(2, 16, 32))
    products = 2 * 2 * 4 * 16 * 16 * (8 + 8)
    assert attention.total.forward_flops - attention["qkv"].forward_flops - attention["out"].forward_flops == products


def test_without_backward() -> None:
    model, x = nn.Sequential(nn.Linear(16, 64), nn.ReLU()), torch.randn(8, 16)
    with torch.no_grad():
        quiet = kiln.measure(model, x)
    forward = kiln.measure(model, x, backward=False)
    assert (quiet.backward, quiet.saved_bytes, quiet["0"].backward_flops) == (False, 0, 0)
    assert not forward.backward and forward.saved_bytes > 0 and forward.flops == quiet.flops


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(4, 4), nn.Linear(4, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.short(x) if mask.sum() == mask.numel() else self.long(x)


def test_values_of_masks_are_known() -> None:
    full = kiln.measure(Masked(), torch.randn(3, 4), torch.ones(3, dtype=torch.bool))
    part = kiln.measure(Masked(), torch.randn(3, 4), mask=torch.tensor([1, 0, 1]))
    assert (full["short"].calls, full["long"].calls, part["short"].calls, part["long"].calls) == (1, 0, 0, 1)
    with kiln.fake():
        unknown = torch.randint(2, (3,))
    with pytest.raises(kiln.Break, match="have no values"):
        kiln.measure(Masked(), torch.randn(3, 4), unknown)


def test_checkpoints_save_less_and_compute_more() -> None:
    class Model(nn.Module):
        def __init__(self, checkpoint: bool) -> None:
            super().__init__()
            self.body, self.checkpoint = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU()), checkpoint

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.checkpoint:
                return self.body(x)
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)

    x = torch.randn(8, 16, requires_grad=True)
    plain, light = kiln.measure(Model(False), x), kiln.measure(Model(True), x)
    assert light.saved_bytes < plain.saved_bytes and light["body"].backward_flops > plain["body"].backward_flops


def test_table() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
    found = kiln.measure(nn.Sequential(*blocks, nn.Linear(8, 2)), torch.randn(4, 8, requires_grad=True))
    lines = str(found).splitlines()
    assert lines[0].split() == ["module", "parameters", "weights", "buffers", "saved", "FLOPs", "forward", "FLOPs", "backward", "peak"]
    assert [line.split("  ")[0] or line.strip().split("  ")[0] for line in lines[2:]] == [
        "Sequential", "0 (Sequential) x3", "0 (Linear)", "1 (ReLU)", "3 (Linear)",
    ]  # fmt: skip
    assert found.table(0).count("\n") == 2 and found["1.0"].parameters == 72 and found["1.0"].calls == 1
    with pytest.raises(KeyError):
        found["9"]
    with pytest.raises(TypeError):
        kiln.measure(lambda x: x, 1)


@pytest.mark.models
def test_llama_of_seventy_billion_parameters() -> None:
    transformers = pytest.importorskip("transformers")
    try:
        model_type = transformers.LlamaForCausalLM
    except ModuleNotFoundError:
        pytest.skip("transformers does not import its models here")
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, dtype="bfloat16",
    )  # fmt: skip
    with kiln.fake():
        model = model_type(config).to(torch.bfloat16)
        ids = torch.randint(0, 128256, (1, 2048))
    found = kiln.measure(model, input_ids=ids, labels=ids)
    assert found.parameters == 70_553_706_496
    # Two operations a weight and token, and attention's two products; twice that in the backward pass.
    products = 2 * 2048 * (found.parameters - model.model.embed_tokens.weight.numel() - 161 * 8192)
    attention = 80 * 2 * 64 * 2048 * 2048 * 2 * 128
    assert found.total.forward_flops == products + attention
    assert 2 * products < found.total.backward_flops < 2 * products + 3 * attention
    assert found.peak_bytes > 2 * found.parameter_bytes and found.saved_bytes > 40e9
