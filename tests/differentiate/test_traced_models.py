"""Whole models, traced: the joint graph gives eager's losses, statistics and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kiln
from kiln.differentiate.joint import Joint
from tests.differentiate.joined import check_graph

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 37}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 0}


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 90, shape)


def words(name: str, **config: Any) -> Any:
    """A language model of transformers and a batch with labels."""
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, name)
    return model(model.config_class(**config)), {"input_ids": ids(2, 8), "labels": ids(2, 8)}


def vit() -> Any:
    model, _ = words("ViTForImageClassification", **SIZES, image_size=16, patch_size=4)
    return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def whisper() -> Any:
    layers = {f"{side}_{what}": size for side in ("encoder", "decoder")
              for what, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 37))}  # fmt: skip
    limits = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}
    model, _ = words("WhisperForConditionalGeneration", vocab_size=99, d_model=32, **layers, **limits, **SPECIAL)
    # In training, layers are dropped by the value of a random number.
    return model.eval(), {"input_features": torch.randn(2, 8, 16), "labels": ids(2, 8)}


def picture(name: str) -> Any:
    """A model of torchvision and a batch."""
    try:
        from torchvision import models  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision does not load: {error}")
    return getattr(models, name)(num_classes=10), {"x": torch.randn(2, 3, 32, 32)}


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(99, 16), nn.Linear(20, 99)
        self.recurrent = kind(16, 20, 2, batch_first=True, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.recurrent(self.embedding(x))[0])


class Blocks(nn.Module):
    """Convolutions, statistics and shortcuts, as models of pictures have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.deep = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.Hardswish(inplace=True), nn.Dropout(0.2)
        )
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.SiLU(inplace=True), nn.Sigmoid())
        self.pool, self.head = nn.MaxPool2d(3, 2, 1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x))
        y = self.deep(x)
        y = y * self.gate(y)
        y += x
        return self.head(torch.cat([x, y], 1).mean((2, 3))[:, :8])


MODELS = {
    "BERT": lambda: words("BertForMaskedLM", **SIZES),
    "GPT-2": lambda: words("GPT2LMHeadModel", vocab_size=99, n_embd=32, n_layer=2, n_head=2, **SPECIAL),
    "Llama": lambda: words("LlamaForCausalLM", **SIZES),
    "T5": lambda: words("T5ForConditionalGeneration", vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=2,
                        **SPECIAL),
    "ViT": vit,
    "Whisper": whisper,
    "LSTM": lambda: (Recurrent(nn.LSTM), {"x": ids(2, 8)}),
    "GRU": lambda: (Recurrent(nn.GRU), {"x": ids(2, 8)}),
    "blocks": lambda: (Blocks(), {"x": torch.randn(2, 3, 10, 10)}),
    "resnet18": lambda: picture("resnet18"),
    "mobilenet_v2": lambda: picture("mobilenet_v2"),
    "densenet121": lambda: picture("densenet121"),
    "efficientnet_b0": lambda: picture("efficientnet_b0"),
}  # fmt: skip


def traced(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Joint:
    """The joint graph of a call of the model, compared with eager."""
    joints: list[Joint] = []

    def backend(module: Any, examples: Any) -> Any:
        joints.append(check_graph(module, examples, 1e-6))
        return module.forward

    def call(**inputs: torch.Tensor) -> Any:
        out = model(**inputs)
        return tuple([v for v in out.values() if torch.is_tensor(v)]) if isinstance(out, dict) else out

    kiln.compile(call, backend=backend, fullgraph=True)(**inputs)
    (joint,) = joints
    return joint


@pytest.mark.parametrize("name", MODELS)
def test_training(name):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    # In double precision, so that what differs is wrong and not rounded.
    model, inputs = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    joint = traced(model, inputs)
    assert all(g is not None for g, p in zip(joint.gradients(), joint.primals, strict=True) if p.requires_grad)
    statistics = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(joint.mutated) == 3 * len(statistics)


@pytest.mark.parametrize("name", ["BERT", "LSTM", "blocks"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(name, mode):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    with mode():
        joint = traced(model, inputs)
    assert not joint.differentiates and not joint.mutated
