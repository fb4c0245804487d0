"""Fake tensors through whole models, forward and backward: op by op, the layouts of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kiln.ops import fake as fakes
from kiln.ops import rules  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore")


def layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        # The stride of a dimension of one element means nothing, and kernels differ in it from one machine to the next.
        strides = tuple(s for n, s in zip(value.shape, value.stride(), strict=True) if n != 1)
        return tuple(value.shape), strides, value.dtype, value.storage_offset()
    return [layout(v) for v in value] if isinstance(value, (list, tuple)) else type(value)


class Log(TorchDispatchMode):
    """Notes each aten call with the layouts of its arguments and results; `detach` is autograd's own affair."""

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
            self.calls.append((str(func), layout(args), layout(result)))
        return result


def calls(model: nn.Module, inputs: dict[str, Tensor], answer: Callable[..., Any]) -> list[Any]:
    with Log(answer) as log:
        out = model(**inputs)
        (out if isinstance(out, Tensor) else out[0]).float().sum().backward()
    return log.calls


def replace_state(model: nn.Module) -> None:
    memo: dict[int, Tensor] = {}
    for module in model.modules():
        for group in (module._parameters, module._buffers):
            for name, real in group.items():
                if real is not None:
                    group[name] = memo.setdefault(id(real), fakes.fake_like(real))


def compare(build: Callable[[], nn.Module], inputs: dict[str, Tensor], autocast: bool = False) -> None:
    model = build()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        expected = calls(model, inputs, lambda func, args, kwargs: func(*args, **kwargs))
        model.zero_grad()
        replace_state(model)
        found = calls(model, {k: fakes.fake_like(v) for k, v in inputs.items()}, fakes.dispatch)
    for i, (f, e) in enumerate(zip(found, expected, strict=False)):
        assert f == e, f"call {i}"
    assert len(found) == len(expected) > 20


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 1, groups=2), nn.GroupNorm(2, width), nn.SiLU(), nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.body(x) + x)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.MaxPool2d(2), Residual(8), nn.AvgPool2d(2), Residual(8),
        nn.Upsample(scale_factor=2), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4), nn.LogSoftmax(1),
    )  # fmt: skip


def named(model: nn.Module) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    return Model()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_convolutional(training: bool, last: bool, autocast: bool) -> None:
    order = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=order)
    compare(lambda: named(convolutional()).train(training).to(memory_format=order), {"x": x}, autocast)
    compare(lambda: named(convolutional()).train(training), {"x": x}, autocast)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_transformer(autocast: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    compare(
        lambda: named(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)),
        {"x": torch.randn(2, 6, 32)},
        autocast,
    )


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.mark.models
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", ["Bert", "Llama", "GPT2"])
def test_language_model(kind: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100} if kind == "GPT2" else SMALL
    try:
        model = getattr(transformers, f"{kind}Model")
    except ModuleNotFoundError:
        pytest.skip("transformers does not import its models here")
    config = getattr(transformers, f"{kind}Config")(
        **options, use_cache=False, bos_token_id=1, eos_token_id=1, pad_token_id=1
    )
    ids = torch.randint(0, 100, (2, 8))
    compare(lambda: model(config), {"input_ids": ids}, autocast)
